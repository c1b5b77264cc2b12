"""The Hopper kernels against the oracle, without a GPU: see emulation.py."""

import importlib
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import emulation
import oracle
import te_mixed_jax as te
from checks import pack, package_policy, random_data
from te_mixed_jax._attention import empty_as_infinite
from te_mixed_jax._ranges import key_ranges
from te_mixed_jax._types import Config
from te_mixed_jax.lowerings import mosaic
from test_random_rows import MIXED_POLICIES

pytestmark = [
    pytest.mark.skipif(emulation.WHY_NOT is not None, reason=str(emulation.WHY_NOT)),
    pytest.mark.usefixtures("in_emulation"),
]


def forward_backward(policies, implementation, scale, attention):
    """What `checks` runs, without the primitives, which have no side effects."""
    assert implementation == "mosaic"
    assert scale is not None
    config = Config(
        scale=scale,
        implementation=implementation,
        policies=tuple(map(package_policy, policies)),
        max_segments=None,
        whole_rows=False,
    )

    def run(*arguments):
        arguments = jax.tree.map(jnp.asarray, arguments)
        q, k, v, ids, pos, policy_ids, dout, dlse = arguments
        desc = te.from_segment_ids_and_pos(ids, pos)
        ranges = key_ranges(desc, config.policies, policy_ids)
        with emulation.emulated():
            out, lse = mosaic.forward(q, k, v, ranges, config=config)
            gradients = mosaic.backward(
                *(q, k, v, out, lse, dout, dlse, ranges), config=config
            )
        return out, empty_as_infinite(lse), *gradients

    return run


@pytest.fixture
def in_emulation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "forward_backward", forward_backward)


def arguments(H: int, V: int, N: int = 2, K: int = 1) -> dict[str, Any]:
    return {
        "implementation": "mosaic",
        "dtype": jnp.bfloat16,
        "exact_shape": True,
        "scale": 0.125,
        "N": N,
        "K": K,
        "H": H,
        "V": V,
    }


@pytest.mark.parametrize(
    "sizes",
    [(64, 64, 4, 2), (128, 72, 3, 3), (192, 128, 4, 2), (256, 256, 3, 3)],
    ids=str,
)
def test_packed_rows(sizes: tuple[int, ...]) -> None:
    """Sequences across tiles, each with its policy, and padding behind them."""
    ids = np.asarray([pack(90, 50, 3, total=150), pack(20, 101, 12, total=150)])
    policies = oracle.CAUSAL, oracle.FULL, oracle.window(oracle.CAUSAL, 40, 0)
    checks.check(ids, policies=policies, policy_ids=ids % 3, **arguments(*sizes))


def test_walks_that_start_anywhere() -> None:
    """Sequences of several tiles, of queries and of keys, that start within one."""
    ids = np.asarray([pack(37, 170, 9, 120, 60, total=430)])
    policies = oracle.CAUSAL, oracle.FULL
    checks.check(ids, policies=policies, policy_ids=ids % 2, **arguments(128, 128))


@pytest.mark.parametrize("H", [64, 160])
def test_tokens_in_any_order_with_any_policy(H: int) -> None:
    rng = np.random.default_rng(0)
    q_ids, kv_ids = rng.integers(-1, 4, (1, 140)), rng.integers(-1, 4, (1, 203))
    policy_ids = rng.integers(len(MIXED_POLICIES), size=q_ids.shape)
    checks.check(
        q_ids,
        kv_ids,
        q_pos=rng.integers(-50, 50, q_ids.shape),
        kv_pos=rng.integers(-50, 50, kv_ids.shape),
        policies=MIXED_POLICIES,
        policy_ids=policy_ids,
        **arguments(H, H),
    )


@pytest.mark.parametrize("H", [64, 256])
def test_rubbish_in_padding_changes_no_bit(H: int) -> None:
    T = 450
    ids = np.asarray([pack(200, 190, total=T)])  # a step that ends in the padding
    ids[0, 20:30] = 0
    data = random_data(1, T, T, N=2, K=1, H=H, V=H, dtype=jnp.bfloat16)
    bad = checks.with_rubbish(data, ids <= 0, ids <= 0, np.nan)
    clean, dirty = (
        checks.run(
            x,
            ids,
            policies=(oracle.CAUSAL, oracle.FULL),
            policy_ids=ids % 2,
            exact_shape=True,
            implementation="mosaic",
            scale=0.125,
        )
        for x in (data, bad)
    )
    checks.assert_bitwise(dirty, clean, "padding")


def test_the_benchmark_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """It calls each with what the others give."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1])
    kernels, shapes = map(
        importlib.import_module, ("benchmarks.kernels", "benchmarks.shapes")
    )
    sizes = {"B": 1, "T": 136, "N": 2, "K": 1, "H": 64}
    w = shapes._gpu("small", **sizes, shortest=30, longest=80)
    with emulation.emulated():
        rows = kernels.measure(w, 1, calls=1)
    assert [row["kernel"] for row in rows] == ["forward", "dq", "dk, dv"]
    assert all(row["median_ms"] > 0 for row in rows)
