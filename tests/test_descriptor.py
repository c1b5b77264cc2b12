"""Ids and positions: what a descriptor says, and that it survives being moved."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te


def describe(*ids):
    return te.SequenceDescriptor.from_segment_ids_and_pos(
        np.asarray(ids, dtype=np.int32)
    )


# ------------------------------------------------------------------ derived positions


@pytest.mark.parametrize(
    ("ids", "positions"),
    [
        pytest.param(checks.pack(5, 3), [0, 1, 2, 3, 4, 0, 1, 2], id="B1"),
        pytest.param(
            [1, 1, -1, 1, 2, 2, -1, 2], [0, 1, None, 2, 0, 1, None, 2], id="B7"
        ),
        pytest.param([1, 1, 2, 2, 1, 0], [0, 1, 0, 1, 2, None], id="B9 returns"),
        pytest.param([1, 1, 0, 1, 2, 2], [0, 1, None, 2, 0, 1], id="B9 hole"),
        pytest.param([2**31 - 1, 7, 7, 2**31 - 1], [0, 0, 1, 1], id="B5"),
    ],
)
def test_derived_positions_restart_at_each_sequence(ids, positions):
    """The running index of a token in its sequence, wherever its tokens lie."""
    for side in describe(ids).segment_pos:
        assert side.dtype == jnp.int32
        for got, want in zip(np.asarray(side)[0].tolist(), positions, strict=True):
            assert want is None or got == want


def test_derived_positions_of_random_rows():
    """Any order of ids, holes, repeated and negative ids."""
    rng = np.random.default_rng(0)
    ids = rng.integers(-2, 6, (5, 40))
    _, pos = describe(*ids).segment_pos
    for row in range(5):
        real = ids[row] > 0
        np.testing.assert_array_equal(
            np.asarray(pos)[row][real], oracle.positions(ids[row])[real]
        )


def test_module_level_twin_is_the_same():
    ids = np.array([checks.pack(5, 3, total=9)])
    one = te.from_segment_ids_and_pos(ids)
    other = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_array_equal(a, b)


def test_ids_are_pairs_of_int32():
    q_ids, kv_ids = np.array([[1, 2]]), np.array([[2, 1, 0]])
    desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids))
    for side, want in zip(desc.segment_ids, (q_ids, kv_ids), strict=True):
        assert side.dtype == jnp.int32
        np.testing.assert_array_equal(side, want)


# ----------------------------------------------------------------------- from_seqlens


@pytest.mark.parametrize(
    ("lengths", "ids"),
    [
        ([[5, 3]], [checks.pack(5, 3, total=10)]),
        ([[1, 0, 1]], [[1, 3] + [0] * 8]),
        ([[0, 0, 0]], [[0] * 10]),
        ([[10]], [[1] * 10]),
        ([[2, 1], [0, 4]], [checks.pack(2, 1, total=10), [2] * 4 + [0] * 6]),
    ],
    ids=["B1", "C7", "B14 none", "full", "rows"],
)
def test_from_seqlens_packs_back_to_back(lengths, ids):
    """Sequence m has id m + 1; an empty one takes no token and shifts no id."""
    desc = te.SequenceDescriptor.from_seqlens(np.asarray(lengths), q_len=10)
    for side in desc.segment_ids:
        np.testing.assert_array_equal(np.asarray(side) * (np.asarray(side) > 0), ids)
    real = np.asarray(ids) > 0
    want = np.stack([oracle.positions(np.asarray(row)) for row in ids])
    for side in desc.segment_pos:
        np.testing.assert_array_equal(np.asarray(side)[real], want[real])


def test_from_seqlens_with_key_lengths(implementation):
    """C7: query lengths 1, 0, 1 and key lengths 3, 0, 5."""
    desc = te.SequenceDescriptor.from_seqlens(
        np.array([[1, 0, 1]]), np.array([[3, 0, 5]]), q_len=2, kv_len=8
    )
    probed = checks.probe_call(
        *(2, 8),
        desc=desc,
        policy=te.CAUSAL_BOTTOM_RIGHT,
        implementation=implementation,
    )
    checks.assert_means(probed, [1, 5])


def test_from_seqlens_under_jit():
    """Lengths are data: traced ones give the same ids."""
    lengths = np.array([[2, 1], [0, 4]])
    made = jax.jit(lambda x: te.SequenceDescriptor.from_seqlens(x, q_len=6))(lengths)
    want = te.SequenceDescriptor.from_seqlens(lengths, q_len=6)
    for a, b in zip(made.segment_ids, want.segment_ids, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(made.segment_pos, want.segment_pos, strict=True):
        np.testing.assert_array_equal(a, b)


# -------------------------------------------------------------------- masks of rows


@pytest.mark.parametrize(
    ("ids", "policy", "expected", "nothing"),
    [
        pytest.param(
            checks.pack(5, 3),
            oracle.window(oracle.CAUSAL, 2, 0),
            [0, 0.5, 1, 2, 3, 5, 5.5, 6],
            (),
            id="B1",
        ),
        pytest.param(
            [1, 1, 1, 2, 2, -1], oracle.CAUSAL, [0, 0.5, 1, 3, 3.5, 0], (5,), id="B7"
        ),
        pytest.param(
            [1, 1, -1, 1, 2, 2, -1, 2],
            oracle.CAUSAL,
            [0, 0.5, 0, 1.3333, 4, 4.5, 0, 5.3333],
            (2, 6),
            id="B7 padding in the middle",
        ),
        pytest.param(
            [1, 1, 2, 2, 1, 0],
            oracle.CAUSAL,
            [0, 0.5, 2, 2.5, 1.6667, 0],
            (5,),
            id="B9 an id that returns",
        ),
        pytest.param(
            [1, 1, 2, 2, 1, 0],
            oracle.window(oracle.CAUSAL, 1, 0),
            [0, 0.5, 2, 2.5, 2.5, 0],
            (5,),
            id="B9 an id that returns, window",
        ),
        pytest.param(
            [1, 1, 0, 1, 2, 2],
            oracle.CAUSAL,
            [0, 0.5, 0, 1.3333, 4, 4.5],
            (2,),
            id="B9 a hole",
        ),
        pytest.param(
            [1, 1, 0, 1, 2, 2],
            oracle.window(oracle.CAUSAL, 1, 0),
            [0, 0.5, 0, 2, 4, 4.5],
            (2,),
            id="B9 a hole, window",
        ),
        pytest.param(
            [0, 0, 1, 1, 1], oracle.CAUSAL, [0, 0, 2, 2.5, 3], (0, 1), id="B10 first"
        ),
        pytest.param(
            [0, 0, 1, 1, 1], oracle.FULL, [0, 0, 3, 3, 3], (0, 1), id="B10 first, full"
        ),
        pytest.param(
            [0, 1, 1, 0, 2, 2, 2, 0],
            oracle.CAUSAL,
            [0, 1, 1.5, 0, 4, 4.5, 5, 0],
            (0, 3, 7),
            id="B10 on both sides",
        ),
        pytest.param(
            [1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0],
            oracle.CAUSAL,
            [0, 0.5, 1, 0, 4, 4.5, 5, 5.5, 6, 0, 0, 0, 0, 0, 0, 0],
            (3, *range(9, 16)),
            id="C4",
        ),
    ],
)
def test_probe_of_one_row(implementation, ids, policy, expected, nothing):
    checks.assert_probe(
        expected,
        nothing=nothing,
        q_ids=ids,
        policies=(policy,),
        implementation=implementation,
    )


def test_B1_cross_attention_tells_positions_that_do_not_restart(implementation):
    checks.assert_probe(
        [0, 0.5, 1, 1.5, 1.5, 4, 4.5, 5],
        q_ids=checks.pack(5, 3),
        kv_ids=checks.pack(4, 4),
        policies=(oracle.CAUSAL,),
        implementation=implementation,
    )


@pytest.mark.parametrize("policy", [oracle.CAUSAL, oracle.FULL])
def test_B9_gradients_of_interrupted_rows(implementation, policy):
    checks.check(
        [[1, 1, 2, 2, 1, 0], [1, 1, 0, 1, 2, 2]],
        policies=(policy,),
        implementation=implementation,
    )


def test_B5_the_value_of_an_id_is_not_a_length(implementation):
    """Ids 1, 7, 1000 and 2**31 - 1 all mean one sequence, as does no descriptor."""
    data = checks.random_data(1, 16, 16)
    results = [
        checks.run(data, np.full((1, 16), value), implementation=implementation)
        for value in (1, 7, 1000, 2**31 - 1)
    ]
    for other in results[1:]:
        checks.assert_bitwise(results[0], other, "id")
    without = te.dot_product_attention(
        data.q, data.k, data.v, implementation=implementation
    )
    np.testing.assert_allclose(without, results[0].out, rtol=1e-6, atol=1e-6)


def test_B5_the_sequence_of_a_token_is_not_rounded(implementation):
    """Large neighbouring ids stay apart: they never pass through a float."""
    big = 2**31 - 1
    checks.assert_probe(
        [0.5, 0.5, 2.5, 2.5],
        q_ids=[big, big, big - 1, big - 1],
        implementation=implementation,
    )


@pytest.mark.parametrize(
    "dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64]
)
def test_any_integer_dtype(dtype):
    """Ids, positions and policy ids of any integer dtype mean the same."""
    ids = np.array([checks.pack(5, 3)], dtype)
    pos = np.array([[0, 1, 2, 3, 4, 0, 1, 2]], dtype)
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids, pos)
    data = checks.random_data(1, 8, 8)

    def attend(desc, policy_ids):
        return te.dot_product_attention(
            data.q,
            data.k,
            data.v,
            desc,
            policy=(te.FULL, te.CAUSAL),
            policy_ids=policy_ids,
            implementation="dense",
        )

    want = attend(describe(ids[0]), (ids > 1).astype(np.int32))
    np.testing.assert_array_equal(attend(desc, (ids > 1).astype(dtype)), want)


def test_leading_axes_of_size_one_broadcast(implementation):
    """Ids, positions and policy ids [1, T] serve every row."""
    ids = np.array([checks.pack(9, 4, 6, total=21)])
    data = checks.random_data(2, 21, 21)
    pos = np.asarray(oracle.positions(ids[0]))[None]
    arguments = {"policies": (oracle.FULL, oracle.CAUSAL), "exact_shape": True}
    got = checks.run(
        data,
        ids,
        q_pos=pos,
        kv_pos=pos,
        policy_ids=ids % 2,
        implementation=implementation,
        **arguments,
    )
    wide = np.repeat(ids, 2, axis=0)
    want = checks.run(
        data,
        wide,
        q_pos=np.repeat(pos, 2, axis=0),
        kv_pos=np.repeat(pos, 2, axis=0),
        policy_ids=wide % 2,
        implementation=implementation,
        **arguments,
    )
    checks.assert_bitwise(got, want, "broadcast")


def test_several_leading_axes(implementation):
    """[*B, T] with two batch axes equals the flattened call."""
    rng = np.random.default_rng(3)
    ids = rng.integers(-1, 4, (2, 3, 13))
    data = checks.random_data(6, 13, 13)
    want = checks.run(data, ids.reshape(6, 13), implementation=implementation)
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in (data.q, data.k, data.v))
    out, lse = te.dot_product_attention(
        q,
        k,
        v,
        te.SequenceDescriptor.from_segment_ids_and_pos(ids),
        implementation=implementation,
        return_lse=True,
    )
    assert out.shape == (2, 3, 13, 4, 6)
    assert lse.shape == (2, 3, 13, 4)
    np.testing.assert_allclose(
        np.asarray(out).reshape(want.out.shape), want.out, rtol=1e-6, atol=1e-6
    )


def test_A7_no_batch_axis(implementation):
    """Rank 3 is accepted and equals a batch of one."""
    ids = np.array(checks.pack(6, 5, total=13))
    data = checks.random_data(1, 13, 13)
    want = checks.run(data, ids[None], implementation=implementation)
    out, lse = te.dot_product_attention(
        data.q[0],
        data.k[0],
        data.v[0],
        te.SequenceDescriptor.from_segment_ids_and_pos(ids),
        implementation=implementation,
        return_lse=True,
    )
    np.testing.assert_allclose(out, want.out[0], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(lse, want.lse[0], rtol=1e-6, atol=1e-6)


# ---------------------------------------------------- D13: descriptors that are moved


MOVES = {
    "flatten": lambda x: jax.tree.unflatten(*reversed(jax.tree.flatten(x))),
    "device_put": jax.device_put,
    "jit": jax.jit(lambda x: x),
    "pickle": lambda x: pickle.loads(pickle.dumps(x)),
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_D13_descriptor_is_unchanged_by(move):
    ids = np.array([checks.pack(3, 1, total=5)])
    pos = np.array([[4, 3, 2, 0, 9]])
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids, pos)
    moved = move(desc)
    assert isinstance(moved, te.SequenceDescriptor)
    for a, b in zip(jax.tree.leaves(moved), jax.tree.leaves(desc), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("move", ["pickle", "deepcopy"])
@pytest.mark.parametrize(
    "policy", [te.FULL, te.CAUSAL.with_window(2, 0), te.prefix(2), te.chunked(2, 1)]
)
def test_D13_policy_is_unchanged_by(move, policy):
    moved = MOVES[move](policy)
    assert moved == policy
    assert hash(moved) == hash(policy)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES.keys())
def test_D13_a_moved_causal_descriptor_is_still_causal(move, implementation):
    probed = checks.probe_call(
        *(4, 4),
        desc=move(describe([1] * 4)),
        policy=copy.deepcopy(te.CAUSAL),
        implementation=implementation,
    )
    checks.assert_means(probed, [0, 0.5, 1, 1.5])


def test_descriptor_maps_under_vmap():
    """A descriptor is a pytree of arrays: vmap slices it like any other."""
    ids = np.array([checks.pack(3, 1, total=5), checks.pack(1, 4)])
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
    rows = jax.vmap(lambda d: d.segment_pos[1])(desc)
    np.testing.assert_array_equal(rows, desc.segment_pos[1])


# ----------------------------------------------------------- B14: numbers of sequences


def test_B14_rows_with_very_different_numbers_of_sequences(implementation):
    """None, one, three and 64 sequences: 200 equal calls, each row as by itself."""
    ids = np.asarray(
        [[0] * 256, [1] * 256, checks.pack(1, 254, 1), checks.pack(*[4] * 64)]
    )
    data = checks.random_data(4, 256, 256, N=2, K=1, H=8, V=4)
    arguments = {"policies": (oracle.CAUSAL,), "implementation": implementation}
    want = checks.check(ids, data=data, **arguments)
    for _ in range(199 if implementation == "xla" else 19):
        checks.assert_bitwise(checks.run(data, ids, **arguments), want, "again")
    for row in range(4):
        here = slice(row, row + 1)
        alone = checks.run(checks.rows(data, here), ids[here], **arguments)
        for (name, a), (_, b) in zip(alone.items(), want.items(), strict=True):
            np.testing.assert_allclose(
                a, b[here], rtol=1e-5, atol=1e-5, err_msg=f"row {row}: {name}"
            )
