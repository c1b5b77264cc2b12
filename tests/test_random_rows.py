"""Any rows at all: forward and every gradient against the oracle."""

import hypothesis
import numpy as np
from hypothesis import strategies as st

import checks
import oracle

# Compile as users do: see conftest.py.
OPTIMISED = True

# Shapes and policy lists are static: a fixed few of them, and everything else is data.
POLICY_LISTS = (
    (oracle.FULL, oracle.CAUSAL, oracle.BOTTOM_RIGHT),
    (
        oracle.window(oracle.FULL, 2, 3),
        oracle.window(oracle.CAUSAL, 4, 0),
        oracle.window(oracle.BOTTOM_RIGHT, 3, -1),
        oracle.window(oracle.FULL, -1, 0),
    ),
    (oracle.prefix(3), oracle.chunked(4, 1), oracle.chunked(1, 0), oracle.CAUSAL),
    (
        oracle.window(oracle.BOTTOM_RIGHT, 0, 5),
        oracle.window(oracle.prefix(6), 5, -1),
        oracle.window(oracle.chunked(5, 2), -1, 1),
        oracle.window(oracle.FULL, 0, 0),
    ),
    (oracle.window(oracle.CAUSAL, 7, -1),),
    (oracle.FULL, oracle.chunked(16, 1), oracle.window(oracle.CAUSAL, 40, 0)),
)
# Each kind once.
MIXED_POLICIES = (
    *(oracle.FULL, oracle.CAUSAL, oracle.BOTTOM_RIGHT),
    *(oracle.prefix(3), oracle.chunked(4, 1), oracle.window(oracle.BOTTOM_RIGHT, 3, 1)),
)
# (B, T, S, sizes, positions given): one for each policy list.
SHAPES = (
    (2, 24, 24, {"N": 4, "K": 2, "H": 8, "V": 5}, False),
    (2, 21, 30, {"N": 3, "K": 3, "H": 4, "V": 4}, True),
    (2, 30, 17, {"N": 6, "K": 1, "H": 5, "V": 9}, True),
    (1, 40, 33, {"N": 4, "K": 2, "H": 8, "V": 8}, False),
    (3, 13, 13, {"N": 2, "K": 1, "H": 8, "V": 3}, True),
    # More than one tile on either side.
    (1, 300, 280, {"N": 2, "K": 1, "H": 8, "V": 8}, False),
)
LOWEST, HIGHEST = -(2**31), 2**31 - 1


@st.composite
def rows(draw, B, length):
    """Ids [B, length]: runs of a few ids, holes and padding, sorted or shuffled."""
    longest = max(2, length // 2)
    run = st.tuples(
        st.sampled_from([1, 2, 3, 7, HIGHEST, 0, -1, LOWEST]),
        st.integers(0, longest),
    )
    result = np.zeros((B, length), np.int64)
    for b in range(B):
        row = [i for i, n in draw(st.lists(run, max_size=8)) for _ in range(n)]
        row = (row + [0] * length)[:length]
        order = draw(st.sampled_from(["runs", "reversed", "shuffled", "rolled"]))
        if order == "shuffled":
            row = np.random.default_rng(draw(st.integers(0, 99))).permutation(row)
        elif order == "reversed":
            row = row[::-1]
        elif order == "rolled":
            row = np.roll(row, draw(st.integers(0, length)))
        result[b] = row
    return result


@st.composite
def position_pairs(draw, q_ids, kv_ids):
    """Positions of either side: running, reversed, with repeats or gaps; shifted."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    kinds = st.sampled_from(["running", "reversed", "random", "gaps"])
    base = draw(st.sampled_from([0, 0, -5, 1000, HIGHEST - 200, LOWEST + 200]))

    def side(ids, kind):
        pos = np.stack([oracle.positions(row) for row in ids])
        if kind == "reversed":
            pos = pos[:, ::-1]
        elif kind == "random":
            pos = rng.integers(0, 12, ids.shape)
        elif kind == "gaps":
            pos = pos * 3 - rng.integers(0, 2, ids.shape)
        pos = pos + base
        rubbish = rng.integers(LOWEST, HIGHEST, ids.shape)
        return np.where(ids > 0, pos, rubbish)

    return side(q_ids, draw(kinds)), side(kv_ids, draw(kinds))


@st.composite
def policy_indices(draw, q_ids, number):
    """Per sequence or per token; out of range at padding."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    if draw(st.booleans()):
        chosen = rng.integers(0, number, q_ids.shape)
    else:
        chosen = (q_ids + draw(st.integers(0, number - 1))) % number
    return np.where(q_ids > 0, chosen, rng.integers(-9, 99, q_ids.shape))


@st.composite
def calls(draw, shapes=SHAPES, policy_lists=POLICY_LISTS):
    which = draw(st.integers(0, len(shapes) - 1))
    B, T, S, sizes, with_positions = shapes[which]
    q_ids = draw(rows(B, T))
    kv_ids = q_ids if T == S and draw(st.booleans()) else draw(rows(B, S))
    q_pos, kv_pos = None, None
    if with_positions:
        q_pos, kv_pos = draw(position_pairs(q_ids, kv_ids))
    policies = policy_lists[which]
    return {
        "q_ids": q_ids,
        "kv_ids": kv_ids,
        "q_pos": q_pos,
        "kv_pos": kv_pos,
        "policies": policies,
        "policy_ids": draw(policy_indices(q_ids, len(policies))),
        "seed": draw(st.integers(0, 9)),
        **sizes,
    }


@hypothesis.given(call=calls())
def test_random_rows_xla(call):
    checks.check(**call, implementation="xla", exact_shape=True)


@hypothesis.given(call=calls())
def test_random_rows_dense(call):
    checks.check(**call, implementation="dense", exact_shape=True)


@hypothesis.given(call=calls(), rubbish=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_rubbish_in_any_padding_changes_no_bit(call, rubbish):
    """On both implementations, in q, k, v and in the cotangents."""
    B, T = call["q_ids"].shape
    S = call["kv_ids"].shape[1]
    sizes = {name: call.pop(name) for name in ("N", "K", "H", "V", "seed")}
    data = checks.random_data(B, T, S, **sizes)
    q_padding, kv_padding = call["q_ids"] <= 0, call["kv_ids"] <= 0
    bad = checks.with_rubbish(data, q_padding, kv_padding, rubbish)
    for implementation in checks.IMPLEMENTATIONS:
        want = checks.run(data, **call, implementation=implementation, exact_shape=True)
        got = checks.run(bad, **call, implementation=implementation, exact_shape=True)
        checks.assert_bitwise(got, want, implementation)


@hypothesis.given(call=calls(), rubbish=st.sampled_from([np.nan, np.inf, -np.inf]))
def test_rubbish_in_another_sequence_changes_no_bit(call, rubbish):
    """Whoever does not share an id with it, on both implementations."""
    B, T = call["q_ids"].shape
    S = call["kv_ids"].shape[1]
    sizes = {name: call.pop(name) for name in ("N", "K", "H", "V", "seed")}
    data = checks.random_data(B, T, S, **sizes)
    q_bad, kv_bad = call["q_ids"] == 1, call["kv_ids"] == 1
    bad = checks.with_rubbish(data, q_bad, kv_bad, rubbish)
    for implementation in checks.IMPLEMENTATIONS:
        want = checks.run(data, **call, implementation=implementation, exact_shape=True)
        got = checks.run(bad, **call, implementation=implementation, exact_shape=True)
        for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
            kept = ~kv_bad if name in ("dk", "dv") else ~q_bad
            np.testing.assert_array_equal(a[kept], b[kept], err_msg=name)
