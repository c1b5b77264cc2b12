"""What cuDNN is handed: on meshes, with a stand-in, and in programs for CUDA.

What is made of its answers is tested in `test_cudnn.py`.
"""

import functools
import json
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import oracle
import te_mixed_jax as te
from checks import check, pack
from te_mixed_jax import lowerings
from te_mixed_jax.lowerings import cudnn, transformer_engine
from te_mixed_jax.lowerings._segments import Mask
from test_cudnn import in_the_place_of_cudnn
from test_sharding import operations, split_by_jit, split_by_shard_map

CAUSAL, FULL = oracle.CAUSAL, oracle.FULL
BOTH = (CAUSAL, FULL)

# --------------------------------------------------------------------------- on a mesh


class TraceableStandIn:
    """A stand-in of plain jnp, since callbacks do not survive in partitioned code.

    It too computes the segments that it is given and leaves NaN elsewhere. `shapes` are
    those of the queries and keys that each call gets.
    """

    def __init__(self) -> None:
        self.shapes: set[tuple[tuple[int, ...], tuple[int, ...]]] = set()

    def softmax(self, q, k, v, mask: Mask, call, scale: float) -> Any:
        self.shapes.add((q.shape, k.shape))
        (B, T, N, _), M = q.shape, call[0].shape[1]
        scores, slot, index, _ = self._scores(q, k, mask, call, scale)
        lse = jax.nn.logsumexp(scores, axis=2)
        weights = jnp.where(scores > -jnp.inf, jnp.exp(scores - lse[..., None]), 0)
        out = jnp.einsum("nts,snh->tnh", weights, self._heads(v, N))
        at = jnp.where(slot >= 0, slot, B * M), slice(None), index
        lses = jnp.full((B * M, N, T), jnp.nan, lse.dtype).at[at].set(lse.T)
        return self._elsewhere_nan(out, slot, q), lses

    def softmax_backward(self, q, k, v, dout, *, lse, out, mask, call, scale) -> Any:
        N, K = q.shape[2], k.shape[2]
        scores, slot, index, kv_slot = self._scores(q, k, mask, call, scale)
        lse = lse[slot, :, index].T[..., None]
        weights = jnp.where(scores > -jnp.inf, jnp.exp(scores - lse), 0)
        queries, out, dout = (self._heads(x, N) for x in (q, out, dout))
        keys, values = (self._heads(x, N) for x in (k, v))
        mean = jnp.sum(out * dout, axis=2).T[..., None]
        dscores = weights * (jnp.einsum("tnh,snh->nts", dout, values) - mean) * scale
        dq = jnp.einsum("nts,snh->tnh", dscores, keys)
        dk = jnp.einsum("nts,tnh->snh", dscores, queries)
        dv = jnp.einsum("nts,tnh->snh", weights, dout)
        dk, dv = (x.reshape(len(x), K, N // K, -1).sum(axis=2) for x in (dk, dv))
        return (
            self._elsewhere_nan(dq, slot, q),
            self._elsewhere_nan(dk, kv_slot, k),
            self._elsewhere_nan(dv, kv_slot, v),
        )

    @staticmethod
    def _heads(x, N: int) -> jax.Array:
        """[B, tokens, heads, H] as [B * tokens, N, H]."""
        x = x.reshape(-1, *x.shape[2:]).astype(jnp.float32)
        return jnp.repeat(x, N // x.shape[1], axis=1)

    @staticmethod
    def _elsewhere_nan(x, slot, like) -> jax.Array:
        x = jnp.where((slot >= 0)[:, None, None], x, jnp.nan)
        return x.reshape(like.shape).astype(like.dtype)

    def _scores(self, q, k, mask: Mask, call, scale: float) -> Any:
        """Scores, -inf where hidden; slots (-1: none) and indices; slots of keys."""
        q_len, kv_len, q_at, kv_at = (x.reshape(-1) for x in call)

        def segments(x, length, at):
            B, tokens, heads, H = x.shape
            start = at[: length.size] // (heads * H)
            index = jnp.arange(B * tokens)[:, None] - start
            inside = (index >= 0) & (index < length)
            slot = inside.argmax(axis=1)
            index = jnp.take_along_axis(index, slot[:, None], axis=1)[:, 0]
            return jnp.where(inside.any(axis=1), slot, -1), index

        q_slot, q_index = segments(q, q_len, q_at)
        kv_slot, kv_index = segments(k, kv_len, kv_at)
        behind = q_index[:, None] - kv_index
        allowed = (q_slot[:, None] == kv_slot) & (kv_slot >= 0)
        allowed &= (behind >= 0) | (not mask.causal)
        allowed &= (behind <= mask.left) | (mask.left < 0)
        N = q.shape[2]
        scores = jnp.einsum("tnh,snh->nts", self._heads(q, N), self._heads(k, N))
        return jnp.where(allowed, scores * scale, -jnp.inf), q_slot, q_index, kv_slot


@pytest.fixture
def traceable() -> Iterator[TraceableStandIn]:
    kernels = TraceableStandIn()
    with in_the_place_of_cudnn(kernels):
        yield kernels


@pytest.mark.parametrize(
    "implementation", ["cudnn", pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("N", "K", "split", "held"),
    [
        pytest.param(4, 2, (4, 2), (1, 2, 1), id="rows and heads"),
        pytest.param(8, 2, (2, 4), (2, 2, 1), id="key heads that devices share"),
        pytest.param(
            *(6, 3, (4, 2), (1, 6, 3)),
            id="heads that cannot be split",
            marks=pytest.mark.slow,
        ),
        pytest.param(4, 2, None, (1, 2, 1), id="shard_map"),
    ],
)
def test_on_a_mesh_each_device_calls_it_for_what_it_holds(
    traceable: TraceableStandIn, N, K, split, held, implementation
) -> None:
    """Rows, query heads, key heads; by default one row runs elsewhere."""
    T, S = 14, 11
    q_ids = [pack(3, 4, 5, total=T), pack(T), pack(1, 9, total=T), pack(2, 2, 2, 8)]
    kv_ids = [pack(4, 1, 6), pack(7, total=S), pack(2, 5, total=S), pack(1, 1, 1, 8)]
    if implementation is None:
        kv_ids[1] = [1, 1, 1, 0, *[1] * 7]
    attention = split_by_shard_map
    if split is not None:
        attention = functools.partial(split_by_jit, split=split)
    check(
        *(q_ids, kv_ids),
        policies=BOTH,
        policy_ids=np.asarray(q_ids) % 2,
        N=N,
        K=K,
        H=8,
        V=8,
        dtype=jnp.bfloat16,
        exact_shape=True,
        implementation=implementation,
        attention=attention,
    )
    # Under `jit` JAX traces it once as a whole too, to know what comes out.
    wanted = [held] if split is None else [held, (4, N, K)]
    assert traceable.shapes == {
        ((rows, T, heads, 8), (rows, S, key_heads, 8))
        for rows, heads, key_heads in wanted
    }


# ---------------------------------------------------------------- what is not supported

SHAPES: dict[str, Any] = {"B": 2, "T": 6, "S": 6, "N": 4, "K": 2, "H": 16, "V": 16}


@pytest.mark.parametrize(
    ("changes", "policy", "reason"),
    [
        (
            {"dtype": jnp.float32},
            te.FULL,
            "bfloat16 or float16, and `query` is float32",
        ),
        ({"V": 8}, te.FULL, "one head dim, and `value` has 8 where `query` has 16"),
        ({"H": 12, "V": 12}, te.FULL, "a multiple of 8, at most 256, not 12"),
        ({"H": 264, "V": 264}, te.FULL, "a multiple of 8, at most 256, not 264"),
        ({"T": 0}, te.FULL, "arrays that are not empty"),
        ({"S": 7}, te.CAUSAL_BOTTOM_RIGHT, "start at the first query and key"),
        ({}, te.prefix(2), r"no mask for the policy prefix\(2\)"),
        ({}, te.chunked(2, 1), r"no mask for the policy chunked\(2, 1\)"),
        ({}, te.FULL.with_window(1, 1), "no mask for the policy FULL.with_window"),
        ({}, te.FULL.with_window(1, -1), "no mask for the policy FULL.with_window"),
    ],
)
def test_what_cudnn_cannot_do(changes, policy, reason: str) -> None:
    s = {**SHAPES, "dtype": jnp.bfloat16, **changes}
    q, k, v = (
        jax.ShapeDtypeStruct((s["B"], length, heads, dim), s["dtype"])
        for length, heads, dim in (
            (s["T"], s["N"], s["H"]),
            (s["S"], s["K"], s["H"]),
            (s["S"], s["K"], s["V"]),
        )
    )

    def attend(q, k, v):
        return te.dot_product_attention(
            q, k, v, policy=(te.FULL, policy), policy_ids=zeros, implementation="cudnn"
        )

    zeros = np.zeros((1, s["T"]), np.int32)
    with pytest.raises(NotImplementedError, match=reason):
        jax.eval_shape(attend, q, k, v)
    answer = te.explain(q, k, v, policy=(te.FULL, policy), policy_ids=zeros)
    assert answer["cudnn"].startswith("no: ")
    assert answer["xla"] == "yes"


def test_on_another_platform_it_is_an_error() -> None:
    x = jnp.ones((1, 5, 1, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
        te.dot_product_attention(x, x, x, implementation="cudnn")


@pytest.mark.parametrize("implementation", ["cudnn", "te"])
def test_on_a_gpu_older_than_hopper_it_is_an_error(
    monkeypatch: pytest.MonkeyPatch, implementation: str
) -> None:
    """cuDNN has no packed attention there, whoever calls it."""
    monkeypatch.setattr(lowerings, "_gpu", lambda: (8.9, 13000))
    monkeypatch.setattr(transformer_engine, "_not_installed", lambda: None)
    reason = f'"{implementation}".*capability 9.0 or more, not 8.9.*"xla"` would'
    with pytest.raises(NotImplementedError, match=reason):
        lowered(implementation)


def test_on_a_gpu_newer_than_hopper_it_lowers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowerings, "_gpu", lambda: (10.0, 13000))
    assert lowered().count("@__cudnn$fmhaSoftmaxBackward(") == 2


def test_arrays_that_offsets_cannot_reach_after_a_vmap() -> None:
    """What counts is what one device computes, when the vmap is folded in."""
    x = jax.ShapeDtypeStruct((128, 1, 8192, 16, 128), jnp.bfloat16)

    def attend(x):
        return te.dot_product_attention(x, x, x, implementation="cudnn")

    traced = jax.jit(jax.vmap(attend)).trace(x)
    with pytest.raises(NotImplementedError, match=r"fewer than 2\*\*31 elements"):
        traced.lower(lowering_platforms=("cuda",))
    traced = jax.jit(jax.vmap(attend)).trace(
        jax.ShapeDtypeStruct((64, *x.shape[1:]), x.dtype)
    )
    assert "__cudnn$fmha" in traced.lower(lowering_platforms=("cuda",)).as_text()


# ------------------------------------------------------------- what XLA is handed

X = jax.ShapeDtypeStruct((2, 64, 8, 64), jnp.bfloat16)
KV = jax.ShapeDtypeStruct((2, 48, 2, 64), jnp.bfloat16)
IDS = jax.ShapeDtypeStruct((2, 64), jnp.int32), jax.ShapeDtypeStruct((2, 48), jnp.int32)


def gradient_of_sum(policy_ids, *, implementation: str | None):
    def loss(q, k, v, ids):
        out = te.dot_product_attention(
            q,
            k,
            v,
            te.from_segment_ids_and_pos(ids, max_segments=3),
            policy=(te.CAUSAL.with_window(9, 0), te.FULL),
            policy_ids=policy_ids,
            implementation=implementation,
        )
        return out.astype(jnp.float32).sum()

    return jax.jit(jax.grad(loss, (0, 1, 2)))


def lowered(implementation: str | None = "cudnn") -> str:
    f = gradient_of_sum(np.zeros((1, 64), np.int32), implementation=implementation)
    return f.trace(X, KV, KV, IDS).lower(lowering_platforms=("cuda",)).as_text()


def test_lowers_for_cuda_without_a_gpu() -> None:
    text = lowered()
    assert text.count("@__cudnn$fmhaSoftmax(") == 2
    assert text.count("@__cudnn$fmhaSoftmaxBackward(") == 2
    assert "stablehlo.case" not in text


@pytest.mark.usefixtures("traceable")
@pytest.mark.parametrize("implementation", ["cudnn", None])
def test_a_mesh_of_one_device_costs_nothing(implementation) -> None:
    """Not an operation more around the kernels than without a mesh."""
    f = gradient_of_sum(np.zeros((1, 64), np.int32), implementation=implementation)

    def compiled(sharding: Any) -> Any:
        structs = jax.tree.map(lambda x: x.update(sharding=sharding), (X, KV, KV, IDS))
        return f.lower(*structs).compile()

    mesh = jax.make_mesh(
        (1,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1]
    )
    on_mesh, plain = compiled(NamedSharding(mesh, P("data"))), compiled(None)
    assert operations(on_mesh.as_text()) == operations(plain.as_text())
    assert on_mesh.cost_analysis() == plain.cost_analysis()


def test_lowers_with_64_bit_integers() -> None:
    with jax.enable_x64(True):
        assert lowered(None).count("@__cudnn$fmhaSoftmaxBackward(") == 2


def test_the_default_keeps_a_way_out_for_rows_that_do_not_fit() -> None:
    text = lowered(None)
    assert "@__cudnn$fmhaSoftmax(" in text
    assert "stablehlo.case" in text


def test_exports_for_cuda_without_a_gpu() -> None:
    f = gradient_of_sum(np.zeros((1, 64), np.int32), implementation="cudnn")
    names = "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    exported = export.export(f, platforms=["cuda"], disabled_checks=checks)(
        X, KV, KV, IDS
    )
    assert exported.platforms == ("cuda",)
    assert export.deserialize(exported.serialize()).in_avals == exported.in_avals


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("mask", [Mask(), Mask(right=0), Mask(9, 0)], ids=repr)
def test_the_settings_are_those_that_jax_gives_its_own_call(
    mask: Mask, packed: bool, backward: bool
) -> None:
    """XLA promises nothing about them, so each version of jax is asked."""
    from jax._src.cudnn import fused_attention_stablehlo as jax_own

    kind = jax_own.MaskType.NO_MASK
    if packed:
        kind = jax_own.MaskType.PADDING
    if mask.causal:
        kind = jax_own.MaskType.PADDING_CAUSAL if packed else jax_own.MaskType.CAUSAL
    M = 5 if packed else 1
    with mlir.ir.Context():
        theirs = jax_own.create_dot_product_attention_backend_config(
            *(2, 8, 64, 48, mlir.ir.BF16Type.get(), 0.125, 42, 0.0, kind),
            *(jax_own.AttentionLayout.BTNH.value, mask.left + 1, M, False, backward),
        )
    products = cudnn._BACKWARD_PRODUCTS if backward else cudnn._FORWARD_PRODUCTS
    ours = cudnn._backend_config(
        (2, 8, 64, 48), np.dtype(jnp.bfloat16), mask, M, 0.125, products
    )
    theirs = theirs if isinstance(theirs, str) else json.dumps(theirs)
    assert json.loads(ours) == json.loads(theirs)
