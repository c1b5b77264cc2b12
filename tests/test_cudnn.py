"""What cuDNN is asked for and what is made of its answers, with a stand-in for it.

The stand-in does what XLA's calls are known to do on a GPU: it computes the segments
that it is given, and leaves NaN in every other lane of its results. The real one runs
in `test_gpu.py`, and what it is handed is looked at in `test_cudnn_calls.py`.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import oracle
import te_mixed_jax as te
from checks import check, pack, random_data, run, with_rubbish
from te_mixed_jax import _primitives
from te_mixed_jax.lowerings import cudnn
from te_mixed_jax.lowerings._segments import Mask

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


@contextlib.contextmanager
def in_the_place_of_cudnn(kernels: Any) -> Iterator[None]:
    """All calls compute as "cudnn" does, with these kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cudnn, "_softmax", kernels.softmax)
        patch.setattr(cudnn, "_softmax_backward", kernels.softmax_backward)
        patch.setattr(_primitives, "lowering_for", lambda *_, **__: cudnn)
        jax.clear_caches()
        yield
    jax.clear_caches()


@pytest.fixture(scope="module")
def installed() -> Iterator[StandIn]:
    """For all tests of this module, which share programs."""
    kernels = StandIn()
    with in_the_place_of_cudnn(kernels):
        yield kernels


@pytest.fixture
def stand_in(installed: StandIn) -> StandIn:
    installed.forwards, installed.backwards = [], []
    return installed


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
        oracle.window(FULL, 3, 0),
        oracle.window(oracle.BOTTOM_RIGHT, 2, 5),
        oracle.window(oracle.prefix(1), 2, -1),
        oracle.window(oracle.chunked(1, 4), 3, 1),
        *(
            pytest.param(policy, marks=pytest.mark.slow)
            for policy in (
                oracle.window(CAUSAL, 0, 7),
                oracle.window(FULL, -1, 0),
                oracle.BOTTOM_RIGHT,
                oracle.prefix(0),
                oracle.chunked(1, 2),
                oracle.chunked(1, -1),
            )
        ),
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
