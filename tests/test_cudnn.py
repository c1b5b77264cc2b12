"""What cuDNN is asked for and what is made of its answers, with a stand-in for it.

The stand-in does what XLA's calls are known to do on a GPU: it computes the segments
that it is given, and leaves NaN in every other lane of its results. The real one runs
in `test_gpu.py`.
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
from checks import check, pack, random_data, run, with_rubbish
from te_mixed_jax import _primitives
from te_mixed_jax.lowerings import cudnn
from te_mixed_jax.lowerings._segments import Mask
from test_sharding import operations, split_by_jit, split_by_shard_map

CAUSAL, FULL = oracle.CAUSAL, oracle.FULL
BOTH = (CAUSAL, FULL)


class StandIn:
    """Counts its calls in `forwards` and `backwards`, as (mask, segments)."""

    def __init__(self) -> None:
        self.forwards: list[tuple[Mask, list[tuple[int, ...]]]] = []
        self.backwards: list[tuple[Mask, list[tuple[int, ...]]]] = []

    def segments(self, q: Any, k: Any, mask: Mask, call: tuple[Any, ...]) -> list:
        """(slot, first query, queries, first key, keys) of what has to be computed."""
        if not call:
            (B, T), S = q.shape[:2], k.shape[1]
            return [(row, row * T, T, row * S, S) for row in range(B)]
        q_len, kv_len, q_at, kv_at = (np.asarray(x).reshape(-1) for x in call)
        assert len(q_at) == len(q_len) + q.shape[0]
        per_query, per_key = (x.shape[2] * x.shape[3] for x in (q, k))
        found = []
        for slot in range(len(q_len)):
            lengths = int(q_len[slot]), int(kv_len[slot])
            if lengths == (0, 0):
                continue
            assert all(lengths), "a segment with one side only: NaN on some versions"
            assert q_at[slot] % per_query == 0
            assert kv_at[slot] % per_key == 0
            first = int(q_at[slot]) // per_query, int(kv_at[slot]) // per_key
            found.append((slot, first[0], lengths[0], first[1], lengths[1]))
        return found

    def softmax(self, q, k, v, mask: Mask, call, scale: float) -> Any:
        (B, T, N, H), M = q.shape, 1 if call is None else call[0].shape[1]
        shapes = (
            jax.ShapeDtypeStruct((B, T, N, H), q.dtype),
            jax.ShapeDtypeStruct((B * M, N, T), jnp.float32),
        )

        def compute(q, k, v, *call):
            segments = self.segments(q, k, mask, call)
            self.forwards.append((mask, segments))
            results = [np.full(x.shape, np.nan, x.dtype) for x in shapes]
            out, lse = results[0].reshape(B * T, N, H), results[1]
            for slot, part, a, b, c in self._parts(q, k, v, segments):
                o, m = oracle.attention(a, b, c, self._mask(part, mask), scale)
                out[part[1] : part[1] + part[2]] = o[0]
                lse[slot, :, : part[2]] = m[0].T
            return tuple(results)

        return jax.pure_callback(compute, shapes, q, k, v, *(call or ()))

    def softmax_backward(self, q, k, v, dout, *, lse, out, mask, call, scale) -> Any:
        shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (q, k, v)]

        def compute(q, k, v, lse, dout, out, *call):
            segments = self.segments(q, k, mask, call)
            self.backwards.append((mask, segments))
            results = [np.full(x.shape, np.nan, x.dtype) for x in shapes]
            dq, dk, dv = (x.reshape(-1, *x.shape[2:]) for x in results)
            dout, out = (x.reshape(-1, *x.shape[2:]) for x in (dout, out))
            for slot, part, a, b, c in self._parts(q, k, v, segments):
                at_q = slice(part[1], part[1] + part[2])
                at_k = slice(part[3], part[3] + part[4])
                allowed = self._mask(part, mask)
                _, m = oracle.attention(a, b, c, allowed, scale)
                np.testing.assert_allclose(lse[slot, :, : part[2]], m[0].T, rtol=2e-2)
                d = dout[None, at_q]
                none = np.zeros(m.shape)
                exact = oracle.gradients(a, b, c, allowed, scale, d, none)
                dq[at_q], dk[at_k], dv[at_k] = exact.dq[0], exact.dk[0], exact.dv[0]
            return tuple(results)

        return jax.pure_callback(
            compute, tuple(shapes), q, k, v, lse, dout, out, *(call or ())
        )

    @staticmethod
    def _parts(q, k, v, segments) -> Iterator[tuple]:
        q, k, v = (np.asarray(x).reshape(-1, *x.shape[2:]) for x in (q, k, v))
        for part in segments:
            slot, q_at, q_len, kv_at, kv_len = part
            keys = slice(kv_at, kv_at + kv_len)
            yield slot, part, q[None, q_at : q_at + q_len], k[None, keys], v[None, keys]

    @staticmethod
    def _mask(part: tuple[int, ...], mask: Mask) -> np.ndarray:
        behind = np.arange(part[2])[:, None] - np.arange(part[4])
        allowed = (behind >= 0) if mask.causal else np.ones_like(behind, bool)
        if mask.left >= 0:
            allowed &= behind <= mask.left
        return allowed[None]


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    kernels = StandIn()
    monkeypatch.setattr(cudnn, "_softmax", kernels.softmax)
    monkeypatch.setattr(cudnn, "_softmax_backward", kernels.softmax_backward)
    monkeypatch.setattr(_primitives, "lowering_for", lambda *_, **__: cudnn)
    jax.clear_caches()
    yield kernels
    jax.clear_caches()


def sizes(**changes: Any) -> dict[str, Any]:
    common = {"H": 8, "V": 8, "dtype": jnp.bfloat16, "exact_shape": True}
    return {**common, "implementation": "cudnn", **changes}


def test_each_mask_gets_a_call_with_its_sequences_only(stand_in: StandIn) -> None:
    """Seven sequences of two mask types: case S2."""
    lengths = (3, 3, 3, 2, 2, 2, 4)
    causal = {1, 3, 5, 6}
    ids = np.asarray([pack(*lengths)])
    policy_ids = np.asarray([[0 if i in causal else 1 for i in ids[0]]])
    check(ids, policies=BOTH, policy_ids=policy_ids, **sizes())
    wanted = {
        Mask(right=0): [(0, 3), (6, 3), (11, 2), (13, 2)],
        Mask(): [(3, 3), (9, 2), (15, 4)],
    }
    for calls in (stand_in.forwards, stand_in.backwards):
        asked = {mask: [(s[1], s[2]) for s in segments] for mask, segments in calls}
        assert asked == wanted


def test_a_uniform_batch_takes_one_call(stand_in: StandIn) -> None:
    check([pack(3, 4, total=9)] * 2, policies=(CAUSAL,), **sizes())
    # One forward, one backward, and for the cotangent of lse one more of each.
    assert len(stand_in.forwards) == len(stand_in.backwards) == 2


def test_rows_without_a_descriptor_are_not_packed(stand_in: StandIn) -> None:
    data = random_data(2, 11, 11, H=8, V=8, dtype=jnp.bfloat16)
    out = te.dot_product_attention(
        data.q, data.k, data.v, policy=te.CAUSAL, implementation="cudnn"
    )
    allowed = np.tri(11, dtype=bool)[None].repeat(2, 0)
    exact, _ = oracle.attention(data.q, data.k, data.v, allowed, 8**-0.5)
    np.testing.assert_allclose(np.asarray(out, float), exact, atol=2e-2)
    assert stand_in.forwards == [
        (Mask(right=0), [(0, 0, 11, 0, 11), (1, 11, 11, 11, 11)])
    ]


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    "policy",
    [
        oracle.window(CAUSAL, 2, 0),
        oracle.window(CAUSAL, 0, 7),
        oracle.window(FULL, 3, 0),
        oracle.window(FULL, -1, 0),
        oracle.BOTTOM_RIGHT,
        oracle.window(oracle.BOTTOM_RIGHT, 2, 5),
        oracle.prefix(0),
        oracle.window(oracle.prefix(1), 2, -1),
        oracle.chunked(1, 2),
        oracle.chunked(1, -1),
        oracle.window(oracle.chunked(1, 4), 3, 1),
    ],
    ids=repr,
)
def test_policies_that_a_mask_of_cudnn_does(policy: oracle.Policy) -> None:
    ids = np.asarray([pack(5, 1, 6, total=15), pack(3, 12)])
    policy_ids = ids % 2
    check(ids, policies=(FULL, policy), policy_ids=policy_ids, **sizes())


@pytest.mark.parametrize("window", [(2**31 - 1, 2**31 - 1), (9, 9)])
def test_windows_that_hide_nothing_are_none(stand_in: StandIn, window) -> None:
    """Their bounds need not fit what XLA and TransformerEngine compute with."""
    ids = np.asarray([pack(5, 4)])
    policies = (oracle.window(CAUSAL, *window), oracle.window(FULL, *window))
    check(ids, policies=policies, policy_ids=ids % 2, **sizes())
    assert {mask for mask, _ in stand_in.forwards} == {Mask(), Mask(right=0)}


def test_whole_rows_whose_last_queries_see_nothing(stand_in: StandIn) -> None:
    """They are not handed to cuDNN as a whole, which would leave NaN there or worse."""
    data = random_data(1, 9, 4, H=8, V=8, dtype=jnp.bfloat16)
    te.dot_product_attention(
        *(data.q, data.k, data.v),
        policy=te.CAUSAL.with_window(2, 0),
        implementation="cudnn",
    )
    assert stand_in.forwards == [(Mask(2, 0), [])]


@pytest.mark.usefixtures("stand_in")
def test_sides_of_different_lengths_and_orders() -> None:
    """Keys in another order, with gaps, missing on either side; fewer key heads."""
    q_ids = np.asarray([[0, 7, 7, 7, 0, 0, 2, 2, 5, 9], [1, 1, 1, 1, 1, 1, 1, 0, 3, 3]])
    kv_ids = np.asarray(
        [[2, 2, 2, 0, 5, 0, 8, 8, 7, 7, 7, 7, -1], [0, 0, 3, 1, 1, 1] + [0] * 7]
    )
    policy_ids = np.asarray(
        [[0, 1, 1, 1, 0, 0, 0, 0, 1, 1], [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]]
    )
    check(q_ids, kv_ids, policies=BOTH, policy_ids=policy_ids, **sizes(N=6, K=3))


@pytest.mark.usefixtures("stand_in")
def test_rubbish_outside_sequences_and_in_results_changes_nothing() -> None:
    ids = np.asarray([pack(4, 3, total=10)])
    ids[0, 7:9] = (0, -3)
    policy_ids = np.asarray([[0] * 4 + [1] * 6])
    data = random_data(1, 10, 10, H=8, V=8, dtype=jnp.bfloat16)
    data = with_rubbish(data, ids <= 0, ids <= 0, np.nan)
    got = run(
        data,
        ids,
        policies=BOTH,
        policy_ids=policy_ids,
        exact_shape=True,
        implementation="cudnn",
    )
    for name, x in got.items():
        if name != "lse":
            assert not np.isnan(x).any(), name
            assert not x[ids <= 0].any(), name


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize("shift", [-40, 5, 2**31 - 5])
def test_positions_may_start_anywhere(shift: int) -> None:
    ids = np.asarray([pack(4, 3, total=9)])
    pos = np.asarray([[0, 1, 2, 3, 0, 1, 2, 77, 99]]) + np.where(ids == 1, shift, 0)
    check(ids, policies=(CAUSAL,), q_pos=pos, kv_pos=pos, **sizes())


def unfit_output(ids, policies, policy_ids=None, pos=None, **arguments) -> np.ndarray:
    """Which tokens of the row have NaN output; their gradients must have it too."""
    ids = np.asarray([ids])
    pos = None if pos is None else np.asarray([pos])
    got = run(
        random_data(1, ids.shape[1], ids.shape[1], H=8, V=8, dtype=jnp.bfloat16),
        ids,
        policies=policies,
        policy_ids=None if policy_ids is None else np.asarray([policy_ids]),
        q_pos=pos,
        kv_pos=pos,
        exact_shape=True,
        implementation="cudnn",
        **arguments,
    )
    bad = np.isnan(got.out).any(axis=(0, 2, 3))
    for name, x in got.items():
        is_nan = np.isnan(x[0]).any(axis=tuple(range(1, x[0].ndim)))
        np.testing.assert_array_equal(is_nan, bad, err_msg=name)
    return np.flatnonzero(bad)


@pytest.mark.usefixtures("stand_in")
@pytest.mark.parametrize(
    ("row", "wanted"),
    [
        pytest.param(
            {"ids": [1, 1, 2, 2, 1], "policies": (FULL,)}, [0, 1, 4], id="two runs"
        ),
        pytest.param(
            {
                "ids": [1, 1, 1, 2, 2],
                "policies": (CAUSAL,),
                "pos": [0, 2, 1, 0, 1],
            },
            [0, 1, 2],
            id="positions out of order",
        ),
        pytest.param(
            {"ids": [1, 1, 1, 2, 2], "policies": BOTH, "policy_ids": [0, 1, 0, 1, 1]},
            [0, 1, 2],
            id="two policies in one sequence",
        ),
        pytest.param(
            {"ids": [1, 1, 2, 2, 2], "policies": BOTH, "policy_ids": [5, 5, 1, 1, 1]},
            [0, 1],
            id="policy id out of range",
        ),
    ],
)
def test_what_does_not_fit_is_nan(row: dict[str, Any], wanted: list[int]) -> None:
    """And only the sequence that does not fit; its neighbours stay right."""
    np.testing.assert_array_equal(unfit_output(**row), wanted)


@pytest.mark.usefixtures("stand_in")
def test_more_sequences_than_segments_are_nan() -> None:
    data = random_data(1, 6, 6, H=8, V=8, dtype=jnp.bfloat16)

    @jax.jit
    def attend(ids):
        desc = te.from_segment_ids_and_pos(ids, max_segments=2)
        return te.dot_product_attention(
            data.q, data.k, data.v, desc, implementation="cudnn"
        )

    out = np.asarray(attend(jnp.asarray([[1, 1, 2, 3, 3, 4]])))
    np.testing.assert_array_equal(
        np.isnan(out).any(axis=(0, 2, 3)), [False] * 3 + [True] * 3
    )


@pytest.mark.usefixtures("stand_in")
def test_by_default_what_does_not_fit_runs_elsewhere() -> None:
    ids = np.asarray([[1, 1, 2, 2, 1, 0, 3]])
    arguments = sizes(implementation=None)
    check(ids, policies=BOTH, policy_ids=ids % 2, **arguments)


def test_by_default_what_fits_runs_on_cudnn(stand_in: StandIn) -> None:
    ids = np.asarray([pack(2, 3, total=7)])
    check(ids, policies=BOTH, policy_ids=ids % 2, **sizes(implementation=None))
    assert len(stand_in.forwards) == 4  # two masks, output and cotangent of lse


@pytest.mark.usefixtures("stand_in")
def test_under_vmap_with_positions_made_inside() -> None:
    """Ids mapped, the rest shared: the starting bug."""
    V, B, T = 3, 2, 16
    rng = np.random.default_rng(0)
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (V, B, T)), axis=-1))
    data = random_data(B, T, T, H=8, V=8, dtype=jnp.bfloat16)

    def attend(ids):
        desc = te.from_segment_ids_and_pos(ids)
        return te.dot_product_attention(
            data.q, data.k, data.v, desc, policy=te.CAUSAL, implementation="cudnn"
        )

    together = jax.jit(jax.vmap(attend))(ids)
    for got, row in zip(together, ids, strict=True):
        np.testing.assert_array_equal(np.asarray(got), np.asarray(attend(row)))


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
def traceable(monkeypatch: pytest.MonkeyPatch) -> Iterator[TraceableStandIn]:
    kernels = TraceableStandIn()
    monkeypatch.setattr(cudnn, "_softmax", kernels.softmax)
    monkeypatch.setattr(cudnn, "_softmax_backward", kernels.softmax_backward)
    monkeypatch.setattr(_primitives, "lowering_for", lambda *_, **__: cudnn)
    jax.clear_caches()
    yield kernels
    jax.clear_caches()


@pytest.mark.parametrize(
    "implementation", ["cudnn", pytest.param(None, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    ("N", "K", "split", "held"),
    [
        pytest.param(4, 2, (4, 2), (1, 2, 1), id="rows and heads"),
        pytest.param(8, 2, (2, 4), (2, 2, 1), id="key heads that devices share"),
        pytest.param(6, 3, (4, 2), (1, 6, 3), id="heads that cannot be split"),
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
        **sizes(N=N, K=K, implementation=implementation),
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
