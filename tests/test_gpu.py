"""The GPU implementations against the oracle, on a Hopper GPU.

`make test-gpu` runs them twice, with and without XLA's command buffers, since results
that a kernel leaves unwritten hold other things in each.
"""

import functools
import gzip
import itertools
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import te_mixed_jax as te
import test_random_rows
from checks import check, pack, random_data, run, with_rubbish
from te_mixed_jax.lowerings import transformer_engine
from test_tiles import some_rows

pytestmark = pytest.mark.gpu

without_te = transformer_engine._not_installed()
TE = pytest.param(
    "te", marks=pytest.mark.skipif(without_te is not None, reason=str(without_te))
)
IMPLEMENTATIONS = ("mosaic", "cudnn", TE)
# Policies that all of them have.
POLICIES = (oracle.FULL, oracle.CAUSAL, oracle.window(oracle.CAUSAL, 40, 0))
DTYPES = {"bf16": jnp.bfloat16, "fp16": jnp.float16}

each = pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def row(rng: np.random.Generator, length: int, ids: list[int]) -> np.ndarray:
    """Each id's tokens in one stretch, in any order, with padding anywhere."""
    cuts = np.sort(rng.choice(length + 1, 2 * len(ids), replace=False))
    result = rng.choice([0, -1, -(2**31)], length)
    for number, i in enumerate(rng.permutation(ids)):
        result[cuts[2 * number] : cuts[2 * number + 1]] = i
    return result


def packed(seed: int, B: int, T: int, S: int | None = None) -> tuple[np.ndarray, ...]:
    """Query ids, key ids (the same without S) and policy ids per sequence."""
    rng = np.random.default_rng(seed)
    ids = [3, 1, 200, 2**31 - 1, 12]
    q_ids = np.stack([row(rng, T, ids) for _ in range(B)])
    kv_ids = q_ids
    if S is not None:
        kv_ids = np.stack([row(rng, S, [*ids[1:], 9]) for _ in range(B)])
    policy_of = rng.integers(len(POLICIES), size=(B, 13))
    policy_ids = np.take_along_axis(policy_of, q_ids % 13, axis=1)
    return q_ids, kv_ids, policy_ids


def fill_memory_with_nan() -> None:
    """So that memory which nobody writes shows."""
    blocks = [jnp.full((256, 1024, 1024), jnp.nan) for _ in range(4)]
    jax.block_until_ready(blocks)


@pytest.mark.parametrize(
    ("implementation", "H", "V"),
    [
        *((name, H, H) for name in IMPLEMENTATIONS[:2] for H in [64, 72, 128, 256]),
        *(pytest.param(*TE.values, H, H, marks=TE.marks) for H in [64, 72, 128, 256]),
        *(("mosaic", *dims) for dims in [(160, 160), (192, 128)]),
    ],
)
@each_dtype
@pytest.mark.parametrize(("T", "S"), [(257, None), (131, 202)])
def test_packed_rows(
    implementation: str, dtype: Any, H: int, V: int, T: int, S: Any
) -> None:
    fill_memory_with_nan()
    for seed in range(4):
        q_ids, kv_ids, policy_ids = packed(seed, 2, T, S)
        if S is not None:  # a window beyond the keys leaves a query without any
            policy_ids = np.minimum(policy_ids, 1)
        check(
            q_ids,
            kv_ids,
            policies=POLICIES,
            policy_ids=policy_ids,
            exact_shape=True,
            implementation=implementation,
            dtype=dtype,
            seed=seed,
            N=6,
            K=2,
            H=H,
            V=V,
        )


@st.composite
def drawn_rows(draw: st.DrawFn, B: int, length: int) -> np.ndarray:
    """Ids [B, length]: sequences of any length in any order of ids, with gaps."""
    result = np.zeros((B, length), np.int64)
    for b in range(B):
        ids = draw(st.permutations([1, 2, 3, 7, 90, 2**31 - 1]))
        at = 0
        for i in ids[: draw(st.integers(0, len(ids)))]:
            at += draw(st.sampled_from([0, 0, 1, 7, 30]))
            end = at + draw(st.integers(1, length))
            result[b, at:end] = i
            at = min(end, length)
        result[b, result[b] == 0] = draw(st.sampled_from([0, -1, -(2**31)]))
    return result


@each
@hypothesis.given(
    ids=drawn_rows(3, 197), shift=st.integers(0, 2), seed=st.integers(0, 9)
)
def test_drawn_rows(implementation: str, ids: Any, shift: int, seed: int) -> None:
    """All examples run one program."""
    check(
        ids,
        policies=POLICIES,
        policy_ids=np.where(ids > 0, (ids + shift) % 3, -7),
        exact_shape=True,
        implementation=implementation,
        dtype=jnp.bfloat16,
        seed=seed,
        N=4,
        K=2,
        H=64,
        V=64,
    )


@each
@each_dtype
def test_short_sequences(implementation: str, dtype: Any) -> None:
    """Sequences of one and two tokens, a row of one sequence, a row of none."""
    ids = np.asarray([pack(1, 2, 1, 1, 5, 1, total=40), pack(40), pack(total=40)])
    check(
        ids,
        policies=POLICIES,
        policy_ids=np.abs(ids) % 3,
        exact_shape=True,
        implementation=implementation,
        dtype=dtype,
        H=64,
        V=64,
    )


@pytest.mark.parametrize(
    ("implementation", "H", "V"),
    [
        *((name, 128, 128) for name in IMPLEMENTATIONS[:2]),
        pytest.param(*TE.values, 128, 128, marks=TE.marks),
        *(("mosaic", *dims) for dims in [(64, 64), (192, 128), (256, 256)]),
    ],
)
@each_dtype
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_rubbish_in_padding_changes_nothing(
    implementation: str, dtype: Any, H: int, V: int, value: float
) -> None:
    q_ids, kv_ids, policy_ids = packed(7, 2, 640)
    data = random_data(2, 640, 640, H=H, V=V, dtype=dtype)
    arguments: dict[str, Any] = {
        "policies": POLICIES,
        "policy_ids": policy_ids,
        "exact_shape": True,
        "implementation": implementation,
    }
    clean = check(q_ids, kv_ids, data=data, **arguments)
    fill_memory_with_nan()
    rubbish = with_rubbish(data, q_ids <= 0, kv_ids <= 0, value)
    got = run(rubbish, q_ids, kv_ids, **arguments)
    for name, x in got.items():
        want = dict(clean.items())[name]
        if name in ("out", "lse"):
            np.testing.assert_array_equal(x, want, err_msg=name)
        else:  # sums in another order from run to run
            x, want = np.asarray(x, float), np.asarray(want, float)
            np.testing.assert_allclose(x, want, atol=2e-2, err_msg=name)
            assert not x[q_ids <= 0].any(), name


# ------------------------------------------------------------------------------ vmap

NAMES = ("q", "k", "v", "ids", "pos", "policy_ids")
MIXES = [
    frozenset(mix)
    for mix in (
        *itertools.combinations(NAMES, 1),
        *itertools.combinations(NAMES, 5),
        NAMES,
    )
]


@functools.cache
def examples() -> dict[str, np.ndarray]:
    """Three examples of everything, first axis."""
    V, B, T = 3, 2, 128
    data = random_data(V * B, T, T, N=4, K=2, H=64, V=64)
    ids, _, policy_ids = packed(3, V * B, T)
    pos = np.stack([oracle.positions(x) for x in ids]) + 5
    metadata = {"ids": ids, "pos": pos, "policy_ids": policy_ids}
    arrays = {name: np.asarray(getattr(data, name)) for name in ("q", "k", "v")}
    return {
        name: x.reshape(V, B, *x.shape[1:])
        for name, x in {**arrays, **metadata}.items()
    }


@each
@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: "-".join(sorted(mix)))
@pytest.mark.parametrize("axis", [0, 1])
def test_vmap(implementation: str, mix: frozenset[str], axis: int) -> None:
    def value_and_gradients(q, k, v, ids, pos, policy_ids):
        # Positions of other ids would not run: they count in mapped ids only.
        pos = pos if {"ids", "pos"} <= mix else None
        # And policies of other ids would change within a sequence.
        mapped_policies = {"ids", "policy_ids"} <= mix
        desc = te.from_segment_ids_and_pos(ids, pos)

        def loss(q, k, v):
            q, k, v = (x.astype(jnp.bfloat16) for x in (q, k, v))
            out = te.dot_product_attention(
                *(q, k, v, desc),
                policy=(te.CAUSAL, te.FULL, te.CAUSAL.with_window(40, 0)),
                policy_ids=policy_ids if mapped_policies else ids % 3,
                implementation=implementation,
            ).astype(jnp.float32)
            return jnp.sum(out * jnp.cos(jnp.arange(64))), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)

    data = examples()
    arguments = [
        jnp.asarray(np.moveaxis(x, 0, axis) if name in mix else x[0])
        for name, x in data.items()
    ]
    in_axes = [axis if name in mix else None for name in data]
    got = jax.jit(jax.vmap(value_and_gradients, in_axes))(*arguments)
    one = jax.jit(value_and_gradients)
    for i in range(3):
        want = one(*(x[i if name in mix else 0] for name, x in data.items()))
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(np.asarray(a[i]), np.asarray(b), atol=3e-2)


@each
def test_the_starting_bug(implementation: str) -> None:
    """Ids mapped, positions made inside; forward equals the loop bit for bit."""
    data = random_data(2, 128, 128, N=4, K=4, H=64, V=64, dtype=jnp.bfloat16)
    ids = jnp.asarray(packed(5, 6, 128)[0].reshape(3, 2, 128))

    def attend(ids):
        desc = te.from_segment_ids_and_pos(ids)
        return te.dot_product_attention(
            *(data.q, data.k, data.v, desc),
            policy=te.CAUSAL,
            implementation=implementation,
        )

    together = np.asarray(jax.jit(jax.vmap(attend))(ids))
    for got, one in zip(together, ids, strict=True):
        np.testing.assert_array_equal(got, np.asarray(attend(one)))


# -------------------------------------------------------------------------- a mesh


@each
@pytest.mark.parametrize("form", ["jit", "explicit", "shard_map"])
def test_a_mesh_of_one_device_changes_nothing(implementation: str, form: str) -> None:
    """Rows over "data", heads over "tensor": what each device of more would run.

    The output bit for bit; cuDNN adds gradients in any order.
    """
    data = random_data(2, 384, 384, N=4, K=2, H=64, V=64, dtype=jnp.bfloat16)
    ids, _, policy_ids = packed(7, 2, 384)

    def forward(q, k, v, ids, policy_ids):
        return te.dot_product_attention(
            *(q, k, v, te.from_segment_ids_and_pos(ids, max_segments=8)),
            policy=(te.CAUSAL, te.FULL, te.CAUSAL.with_window(40, 0)),
            policy_ids=policy_ids,
            implementation=implementation,
        )

    def run(attend, q, k, v, ids, policy_ids):
        out, vjp = jax.vjp(lambda *x: attend(*x, ids, policy_ids), q, k, v)
        return out, *vjp(jnp.cos(out))

    arguments = (data.q, data.k, data.v, ids, policy_ids)
    want = jax.jit(functools.partial(run, forward))(*arguments)
    kind = AxisType.Explicit if form == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((1, 1), ("data", "tensor"), axis_types=(kind, kind))
    heads, tokens = P("data", None, "tensor"), P("data")
    specs = (heads, heads, heads, tokens, tokens)
    attend = forward
    if form == "shard_map":
        attend = jax.shard_map(forward, mesh=mesh, in_specs=specs, out_specs=heads)
    with jax.set_mesh(mesh):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(arguments, specs, strict=True)
        ]
        got = jax.jit(functools.partial(run, attend))(*placed)
    got, want = ([np.asarray(x, np.float32) for x in xs] for xs in (got, want))
    np.testing.assert_array_equal(got[0], want[0])
    for a, b in zip(got[1:], want[1:], strict=True):
        np.testing.assert_allclose(a, b, atol=3e-2)


# ----------------------------------------------------------------- again and again


@each
def test_one_program_for_all_batches(implementation: str) -> None:
    """100 batches, one compilation; the first comes again bit for bit (case E18)."""
    data = random_data(2, 384, 384, N=4, K=2, H=64, V=64, dtype=jnp.bfloat16)
    traces = []

    @jax.jit
    def attend(ids, policy_ids):
        traces.append(None)
        return te.dot_product_attention(
            *(data.q, data.k, data.v, te.from_segment_ids_and_pos(ids)),
            policy=(te.CAUSAL, te.FULL, te.CAUSAL.with_window(40, 0)),
            policy_ids=policy_ids,
            implementation=implementation,
        )

    batches = [packed(seed, 2, 384)[::2] for seed in range(100)]
    first = np.asarray(attend(*batches[0]))
    for batch in batches[1:]:
        attend(*batch)
    np.testing.assert_array_equal(np.asarray(attend(*batches[0])), first)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("implementation", "H"),
    [
        *((name, 128) for name in IMPLEMENTATIONS[:2]),
        pytest.param(*TE.values, 128, marks=TE.marks),
        ("mosaic", 256),
    ],
)
def test_a_hundred_repeats_are_bitwise_equal(implementation: str, H: int) -> None:
    """Gradients of cuDNN are so under XLA's deterministic flag, hence the process."""
    program = f"""
        import jax, jax.numpy as jnp, numpy as np
        import te_mixed_jax as te

        keys = jax.random.split(jax.random.key(0), 3)
        q, k, v = (
            jax.random.normal(key, (2, 1000, heads, {H}), jnp.bfloat16)
            for key, heads in zip(keys, (8, 2, 2))
        )
        ids = jnp.arange(1000)[None] // 170 + 1

        @jax.jit
        def run(q, k, v):
            attend = lambda *x: te.dot_product_attention(
                *x, te.from_segment_ids_and_pos(ids), policy=(te.CAUSAL, te.FULL),
                policy_ids=ids % 2, implementation="{implementation}")
            out, vjp = jax.vjp(attend, q, k, v)
            return out, *vjp(jnp.cos(q))

        first = [np.asarray(x) for x in run(q, k, v)]
        for _ in range(100):
            for a, b in zip(run(q, k, v), first, strict=True):
                np.testing.assert_array_equal(np.asarray(a), b)
    """
    deterministic = {
        "XLA_FLAGS": "--xla_gpu_deterministic_ops=true",
        "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0",
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    }
    subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        check=True,
        env={**os.environ, **deterministic},
    )


@pytest.mark.parametrize(
    ("dtype", "dims"),
    [
        (jnp.bfloat16, {}),
        (jnp.float16, {}),
        (jnp.bfloat16, {"H": 192}),
        (jnp.float16, {"H": 256, "V": 256}),
    ],
    ids=str,
)
@hypothesis.settings(max_examples=max(300, hypothesis.settings().max_examples))
@hypothesis.given(call=test_random_rows.calls())
def test_any_rows_and_policies(dtype: Any, dims: Any, call: dict[str, Any]) -> None:
    """Tokens in any order, any positions, any policies: "mosaic" has them all."""
    check(**(call | dims), implementation="mosaic", exact_shape=True, dtype=dtype)


@pytest.mark.parametrize(("H", "V"), [(64, 64), (192, 128), (256, 256)])
def test_more_tiles_than_multiprocessors(H: int, V: int) -> None:
    """Blocks take several tiles each, in both directions, and the last are not full."""
    ids = np.asarray([pack(700, 300, 200, total=1300), pack(1, 128, 900, total=1300)])
    check(
        ids,
        policies=POLICIES,
        policy_ids=ids % 3,
        exact_shape=True,
        implementation="mosaic",
        dtype=jnp.bfloat16,
        N=16,
        K=8,
        H=H,
        V=V,
    )


@pytest.mark.parametrize("sequences", [128, 4096])
def test_many_sequences_in_a_long_row(sequences: int) -> None:
    """Some of them against each on its own; what their neighbours hold is large."""
    T, policies = 131072, (te.CAUSAL, te.FULL, te.CAUSAL.with_window(40, 0))
    data = random_data(1, T, T, N=2, K=1, H=64, V=64, dtype=jnp.bfloat16)
    rng = np.random.default_rng(0)
    starts = np.sort(rng.choice(T, sequences, replace=False))
    ids = np.searchsorted(starts, np.arange(T), side="right")[None]
    chosen = [2, sequences // 3 + 1, sequences // 2, sequences - 2]
    others = 1000.0 - 999.0 * np.isin(ids, chosen)[..., None, None]
    v, dout = (x * jnp.asarray(others, x.dtype) for x in (data.v, data.dout))

    @functools.partial(jax.jit, static_argnames=("policy", "implementation"))
    def results(q, k, v, dout, ids, policy, policy_ids, implementation):
        def attend(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, te.from_segment_ids_and_pos(ids)),
                policy=policy,
                policy_ids=policy_ids,
                implementation=implementation,
            )

        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    arrays = data.q, data.k, v, dout
    got = results(*arrays, ids, policies, ids % 3, "mosaic")
    for sequence in chosen:
        own = np.flatnonzero(ids[0] == sequence)
        alone = (x[:, own].astype(jnp.float32) for x in arrays)
        with jax.default_matmul_precision("highest"):
            policy = policies[sequence % 3]
            want = results(*alone, ids[:, own], policy, None, "dense")
        for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
            a, b = np.asarray(a[:, own], float), np.asarray(b, float)
            np.testing.assert_allclose(a, b, atol=4e-2, rtol=2e-2, err_msg=name)


@functools.partial(jax.jit, static_argnames="policy")
def gradients(x: Any, ids: Any, policy: Any, policy_ids: Any = None) -> Any:
    def attend(q, k, v):
        return te.dot_product_attention(
            *(q, k, v, te.from_segment_ids_and_pos(ids)),
            policy=policy,
            policy_ids=policy_ids,
            implementation="mosaic",
        )

    out, vjp = jax.vjp(attend, x, x, x)
    return vjp(out)


def seconds(*calls: tuple) -> list[float]:
    """Of forward and backward pass, of each call, in turns."""
    taken: list[list[float]] = [[] for _ in calls]
    for _ in range(12):
        for call, times in zip(calls, taken, strict=True):
            start = time.perf_counter()
            jax.block_until_ready([gradients(*call) for _ in range(5)])
            times.append((time.perf_counter() - start) / 5)
    return [min(times) for times in taken]


def test_time_grows_with_what_is_seen() -> None:
    """16 times the sequences take 16 times as long, and not 256 times."""

    def call(sequences: int) -> tuple:
        ids = jnp.arange(sequences * 1024)[None] // 1024 + 1
        return jnp.ones((1, ids.size, 16, 128), jnp.bfloat16), ids, te.CAUSAL

    few, many = seconds(call(8), call(128))
    assert many < 20 * few


def test_mixing_masks_costs_no_more_than_a_call_for_each() -> None:
    """A call for the causal sequences and one for the others."""
    ids, policy_ids = (np.tile(x, (2, 1)) for x in some_rows(8192, 256, 4096))
    x = jnp.ones((4, 8192, 16, 128), jnp.bfloat16)
    causal, full = (jnp.asarray(np.where(policy_ids == i, ids, 0)) for i in (0, 1))
    together, *apart = seconds(
        (x, jnp.asarray(ids), (te.CAUSAL, te.FULL), jnp.asarray(policy_ids)),
        (x, causal, te.CAUSAL),
        (x, full, te.FULL),
    )
    assert together < 1.05 * sum(apart)


def test_layers_share_the_tiles_to_walk() -> None:
    """Ids are looked up in one table a step, however many layers there are."""

    def loss(x, ids, pos, *, layers):
        for _ in range(layers):
            desc = te.from_segment_ids_and_pos(ids, pos)
            x = te.dot_product_attention(*(x, x, x, desc), implementation="mosaic")
        return x.astype(jnp.float32).sum()

    def compiled(layers: int) -> str:
        x = jax.ShapeDtypeStruct((2, 640, 4, 64), jnp.bfloat16)
        ids = jax.ShapeDtypeStruct((2, 640), jnp.int32)
        step = jax.jit(jax.grad(functools.partial(loss, layers=layers)))
        return str(step.lower(x, ids, ids).compile().as_text())

    one, three = compiled(1), compiled(3)
    kernel = 'custom_call_target="mosaic'
    assert three.count(kernel) == 3 * one.count(kernel) > 0
    for what in (" scatter(", " sort("):
        assert three.count(what) == one.count(what) > 0


@pytest.mark.parametrize(("H", "V"), [(64, 64), (128, 128), (192, 128), (256, 256)])
def test_exact_where_one_key_wins(H: int, V: int) -> None:
    """All weights are 0 or 1 and all sums of integers, so no bit may differ.

    Compilers have got such kernels wrong in single elements: the mask of a causal tile,
    a register that a product in flight still reads.
    """
    T, N = 1000, 3
    rng = np.random.default_rng(0)
    ids = np.asarray([pack(300, 411, 170, total=T)])
    code = rng.choice([-4.0, 4.0], (T, H))
    winner = np.arange(T)
    for i in (1, 2, 3):  # another order in each sequence
        own = np.flatnonzero(ids[0] == i)
        winner[own] = rng.permutation(own)
    q = np.broadcast_to(code[winner, None], (1, T, N, H))
    k = np.broadcast_to(code[:, None], (1, T, N, H))
    v, dout = rng.integers(-128, 128, (2, 1, T, N, V)).astype(float)
    arrays = (jnp.asarray(x, jnp.bfloat16) for x in (q, k, v, dout))

    @jax.jit
    def run(q, k, v, dout):
        desc = te.from_segment_ids_and_pos(ids)
        attend = functools.partial(
            te.dot_product_attention, desc=desc, scale=1.0, implementation="mosaic"
        )
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(dout)

    fill_memory_with_nan()
    out, dq, dk, dv = (np.asarray(x, float) for x in run(*arrays))
    real = (ids[0] > 0)[:, None, None]
    want_dv = np.zeros_like(v)
    want_dv[0, winner] = np.where(real, dout[0], 0)
    np.testing.assert_array_equal(out[0], np.where(real, v[0, winner], 0))
    np.testing.assert_array_equal(dv, want_dv)
    assert not dq.any()
    assert not dk.any()


@pytest.mark.parametrize("implementation", [TE, "mosaic"])
@pytest.mark.parametrize(
    "policy",
    [
        oracle.BOTTOM_RIGHT,
        oracle.window(oracle.BOTTOM_RIGHT, 20, 0),
        oracle.window(oracle.FULL, 9, 17),
        oracle.window(oracle.FULL, -1, 5),
        oracle.window(oracle.FULL, 30, -1),
    ],
    ids=repr,
)
def test_masks_that_cudnn_lacks(implementation: str, policy: oracle.Policy) -> None:
    """Bottom-right with more keys than queries, windows with a right side."""
    q_ids = np.asarray([pack(30, 41, 50, total=131), pack(100, total=131)])
    kv_ids = np.asarray([pack(44, 41, 80, total=202), pack(150, total=202)])
    if not policy.kind.startswith("causal"):
        kv_ids = q_ids  # as many keys as queries: no query without a key
    check(
        q_ids,
        kv_ids,
        policies=(oracle.FULL, policy),
        policy_ids=q_ids % 2,
        exact_shape=True,
        implementation=implementation,
        dtype=jnp.bfloat16,
        H=64,
        V=64,
    )


@each
def test_a_training_step_of_the_demo(
    implementation: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Compiled once, and no step waits for a transfer to or from the host."""
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "examples")
    demo = pytest.importorskip("train_mixed", reason="the examples' packages")
    traces = []
    losses_of = demo.losses_of
    monkeypatch.setattr(
        demo, "losses_of", lambda *x: traces.append(None) or losses_of(*x)
    )
    attention = functools.partial(
        demo.MultiHeadAttention, dtype=jnp.bfloat16, implementation=implementation
    )
    model = demo.Transformer(attention, seed=0)
    optimizer = nnx.Optimizer(model, demo.optax.adamw(1e-3), wrt=nnx.Param)

    def batch(seed: int) -> Any:
        ids, _, policy_ids = packed(seed, 1, demo.ROW_LENGTH)
        rng = np.random.default_rng(seed)
        tokens = rng.integers(demo.MASK, size=ids.shape).astype(np.int32)
        return demo.Batch(
            tokens=jnp.asarray(tokens),
            targets=jnp.asarray(tokens),
            weights=jnp.asarray((ids > 0).astype(np.float32)),
            policy_ids=jnp.asarray(np.minimum(policy_ids, 1)),
            segment_ids=jnp.asarray(ids),
            positions=jnp.asarray([oracle.positions(x).astype(np.int32) for x in ids]),
        )

    batches = [batch(seed) for seed in range(4)]
    losses = [demo.train_step(model, optimizer, batches[0])]
    jax.block_until_ready(losses)
    with jax.profiler.trace(tmp_path):
        losses += [demo.train_step(model, optimizer, x) for x in batches]
        jax.block_until_ready(losses)
    assert np.isfinite(np.asarray(losses)).all()
    assert losses[1].sum() < losses[0].sum()
    assert len(traces) == 1
    (path,) = tmp_path.rglob("*.trace.json.gz")
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    names = [event.get("name", "") for event in events]
    kernel = "attention_backward" if implementation == "mosaic" else "flash_bprop"
    assert any(kernel in name for name in names), "no kernel: not a GPU's trace?"
    assert not [name for name in names if "D2H" in name or "H2D" in name]


@pytest.mark.parametrize("H", [64, 256])
def test_by_default_an_id_in_two_runs_is_right(H: int) -> None:
    ids = np.asarray([[1] * 30 + [2] * 40 + [1] * 20 + [0] * 10])
    check(
        ids,
        policies=POLICIES,
        policy_ids=ids % 2,
        exact_shape=True,
        implementation=None,
        dtype=jnp.bfloat16,
        H=H,
        V=H,
    )


def test_by_default_single_precision_is_right() -> None:
    ids = np.asarray([pack(30, 50, total=100)])
    with jax.default_matmul_precision("highest"):
        check(ids, policies=POLICIES, policy_ids=ids % 3, implementation=None)
