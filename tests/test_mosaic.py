"""What of the Hopper kernels can be tested without a GPU: that they lower, and when.

Their values are tested in test_gpu.py, the tiles that they walk in test_tiles.py.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import te_mixed_jax as te
from te_mixed_jax import lowerings


def lowered(
    *,
    T: int = 256,
    S: int = 384,
    N: int = 4,
    K: int = 2,
    H: int = 128,
    V: int = 128,
    dtype: Any = jnp.bfloat16,
) -> jax.stages.Lowered:
    """Output, lse and all gradients, lowered for CUDA."""
    arrays = [
        jax.ShapeDtypeStruct((2, n, heads, D), dtype)
        for n, heads, D in ((T, N, H), (S, K, H), (S, K, V), (T, N, V))
    ]
    ids = [jax.ShapeDtypeStruct((2, n), jnp.int32) for n in (T, S)]

    def run(q, k, v, dout, q_ids, kv_ids):
        def attend(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, te.from_segment_ids_and_pos((q_ids, kv_ids))),
                policy=(te.CAUSAL, te.chunked(7, 1).with_window(9, -1)),
                policy_ids=q_ids % 2,
                implementation="mosaic",
                return_lse=True,
            )

        results, vjp = jax.vjp(attend, q, k, v)
        return results, vjp((dout, results[1]))

    traced = jax.jit(run).trace(*arrays, *ids)
    return traced.lower(lowering_platforms=("cuda",))


def kernels(program: jax.stages.Lowered) -> int:
    return program.as_text().count("stablehlo.custom_call @mosaic_gpu")


@pytest.mark.parametrize(
    "sizes",
    [
        {"H": 128, "V": 128},
        {"H": 64, "V": 64, "dtype": jnp.float16},
        {"H": 72, "V": 40, "T": 77, "S": 130},
        {"H": 8, "V": 5, "N": 3, "K": 1, "T": 1, "S": 1},
        {"H": 192, "V": 128},
        {"H": 256, "V": 256, "dtype": jnp.float16},
        {"H": 130, "V": 200, "N": 3, "K": 3, "T": 77, "S": 130},
    ],
    ids=str,
)
def test_one_launch_forward_and_two_backward(sizes: dict[str, Any]) -> None:
    """With the JAX that is installed, and without a GPU."""
    assert kernels(lowered(**sizes)) == 3


def test_lowers_where_numbers_have_64_bits() -> None:
    with jax.enable_x64(True):
        assert kernels(lowered()) == 3


@pytest.mark.parametrize("sizes", [{"T": 0}, {"S": 0}], ids=str)
def test_empty_arrays_need_no_kernel(sizes: dict[str, Any]) -> None:
    assert kernels(lowered(**sizes)) == 0


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"dtype": jnp.float32}, "bfloat16 or float16, and `query` is float32"),
        ({"H": 264}, "head dims of at most 256, not 264 and 128"),
        ({"V": 264}, "head dims of at most 256, not 128 and 264"),
        ({"S": 2**21}, "rows of at most 2097024 tokens, not 2097152"),
    ],
    ids=str,
)
def test_what_it_cannot_do_is_an_error(sizes: dict[str, Any], reason: str) -> None:
    with pytest.raises(NotImplementedError, match=reason):
        lowered(**sizes)


@pytest.mark.parametrize("scale", [0.0, -1.0, 1e-40])
def test_scales_that_do_not_keep_the_order_of_scores(scale: float) -> None:
    x = jax.ShapeDtypeStruct((2, 8, 4, 64), jnp.bfloat16)
    reason = te.explain(x, x, x, scale=scale)["mosaic"]
    assert reason == f"no: it needs a `scale` above 0, not {scale}"


# ---------------------------------------------------------------------- who is chosen


def chosen(
    policy: te.MaskPolicy = te.CAUSAL,
    H: int = 64,
    rows: bool = False,
    dtype: Any = jnp.bfloat16,
    T: int = 384,
    S: int | None = None,
) -> str:
    """What the default runs on CUDA: rows that are one sequence, or packed ones."""
    q = jax.ShapeDtypeStruct((2, T, 4, H), dtype)
    kv = jax.ShapeDtypeStruct((2, S or T, 4, H), dtype)
    ids = jax.ShapeDtypeStruct((2, T), jnp.int32)

    def run(q, kv, ids):
        desc = None if rows else te.from_segment_ids_and_pos(ids)
        return te.dot_product_attention(q, kv, kv, desc, policy=policy)

    traced = jax.jit(run).trace(q, kv, ids)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    # Beside cuDNN's kernels is plain XLA, for rows that do not fit it.
    return "cudnn" if "fmha" in text else "mosaic" if "mosaic_gpu" in text else "xla"


@pytest.mark.parametrize(
    ("gpu", "name"),
    [
        ((9.0, 13000), "mosaic"),
        ((9.0, 12091), "mosaic"),
        ((9.0, 12080), "cudnn"),  # its compiler gets masks wrong
        ((10.0, 13000), "cudnn"),  # the kernels are for Hopper alone
        ((8.0, 13000), "xla"),
        ((None, None), "cudnn"),  # no GPU here: the program is for others
    ],
    ids=str,
)
def test_the_default_follows_the_gpu(
    monkeypatch: pytest.MonkeyPatch, gpu: Any, name: str
) -> None:
    monkeypatch.setattr(lowerings, "_gpu", lambda: gpu)
    assert chosen() == name


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({}, "mosaic"),
        ({"policy": te.chunked(7, 1)}, "mosaic"),
        ({"H": 256}, "mosaic"),
        ({"T": 4096, "H": 128}, "mosaic"),
        ({"H": 264}, "xla"),
        ({"dtype": jnp.float32}, "xla"),
        ({"rows": True}, "cudnn"),
        ({"rows": True, "policy": te.CAUSAL.with_window(50, 0)}, "cudnn"),
        # Some queries see nothing, for which cuDNN needs packed rows.
        ({"rows": True, "S": 100, "policy": te.CAUSAL.with_window(50, 0)}, "mosaic"),
        ({"rows": True, "policy": te.chunked(7, 1)}, "mosaic"),
    ],
    ids=str,
)
def test_the_default_follows_the_call(
    monkeypatch: pytest.MonkeyPatch, call: dict[str, Any], name: str
) -> None:
    monkeypatch.setattr(lowerings, "_gpu", lambda: (9.0, 13000))
    assert chosen(**call) == name


@pytest.mark.parametrize(
    ("gpu", "reason"),
    [((10.0, 13000), "of compute capability 9.0, not 10.0"), ((9.0, 12080), "12.9.1")],
    ids=str,
)
def test_named_on_another_gpu_is_an_error(
    monkeypatch: pytest.MonkeyPatch, gpu: Any, reason: str
) -> None:
    monkeypatch.setattr(lowerings, "_gpu", lambda: gpu)
    with pytest.raises(NotImplementedError, match=reason):
        lowered()
