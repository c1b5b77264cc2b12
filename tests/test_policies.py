"""Which keys each policy lets a query see, alone and several in one row."""

import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

S2_IDS = checks.pack(3, 3, 3, 2, 2, 2, 4)
S2_CAUSAL, S2_FULL = (1, 3, 5, 6), (2, 4, 7)
S2_PROBE = (
    *(0, 0.5, 1, 4, 4, 4, 6, 6.5, 7, 9.5, 9.5, 11, 11.5, 13, 13.5),
    *(16.5, 16.5, 16.5, 16.5),
)
S2_POLICY_IDS = [1 if s in S2_CAUSAL else 0 for s in S2_IDS]

FULL_02 = oracle.window(oracle.FULL, 0, 2)
CAUSAL_13 = oracle.window(oracle.CAUSAL, 1, 3)
BOTTOM_RIGHT_13 = oracle.window(oracle.BOTTOM_RIGHT, 1, 3)
D1A_IDS = [1] * 7 + [0] * 2 + [2] * 3 + [3] * 5 + [0] * 2 + [4] * 4
D1A_PROBE = (
    *(1, 2, 3, 4, 5, 5.5, 6, 0, 0, 9, 9.5, 10.5, 13, 14, 15, 15.5, 16, 0, 0),
    *(19, 19.5, 20.5, 21.5),
)
D1A_POLICY_IDS = [1 if s in (2, 4) else 0 for s in D1A_IDS]


# ------------------------------------------------------- S2: seven sequences, one row


def test_S2_probe_by_policy_ids(implementation):
    checks.assert_probe(
        S2_PROBE,
        q_ids=S2_IDS,
        policies=(oracle.FULL, oracle.CAUSAL),
        policy_ids=S2_POLICY_IDS,
        implementation=implementation,
    )


def test_S2_probe_by_mask_types(implementation):
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(np.asarray([S2_IDS]))
    policies, policy_ids = te.policies_from_mask_types(
        desc,
        {"padding_causal": np.array([S2_CAUSAL]), "padding": np.array([S2_FULL])},
    )
    probed = checks.probe_call(
        *(19, 19),
        desc=desc,
        policy=policies,
        policy_ids=policy_ids,
        implementation=implementation,
    )
    checks.assert_means(probed, S2_PROBE)


def test_S2_gradients_and_each_sequence_alone(implementation):
    policies = (oracle.FULL, oracle.CAUSAL)
    data = checks.random_data(1, 19, 19)
    got = checks.check(
        [S2_IDS],
        policies=policies,
        policy_ids=[S2_POLICY_IDS],
        implementation=implementation,
        data=data,
    )
    policy_of = {s: policies[s in S2_CAUSAL] for s in range(1, 8)}
    checks.assert_each_alone(
        got, data, S2_IDS, S2_IDS, policy_of, implementation=implementation
    )


# --------------------------------------------------------- D1: windows per mask type


@pytest.mark.parametrize("second", [CAUSAL_13, BOTTOM_RIGHT_13])
def test_D1a_probe(implementation, second):
    checks.assert_probe(
        D1A_PROBE,
        nothing=(7, 8, 17, 18),
        q_ids=D1A_IDS,
        policies=(FULL_02, second),
        policy_ids=D1A_POLICY_IDS,
        implementation=implementation,
    )


def test_D1a_number_of_allowed_pairs():
    mask = oracle.mask(
        [D1A_IDS],
        [D1A_IDS],
        policies=(FULL_02, CAUSAL_13),
        policy_ids=[D1A_POLICY_IDS],
    )[0]
    ids = np.asarray(D1A_IDS)
    assert [int(mask[ids == s].sum()) for s in (1, 2, 3, 4)] == [18, 5, 12, 7]


@pytest.mark.parametrize(
    "dtype", [jnp.float16, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)]
)
def test_D1a_gradients_and_each_sequence_alone(implementation, dtype):
    policies = (FULL_02, CAUSAL_13)
    data = checks.random_data(1, 23, 23, N=16, K=16, H=64, V=64, dtype=dtype)
    got = checks.check(
        [D1A_IDS],
        policies=policies,
        policy_ids=[D1A_POLICY_IDS],
        implementation=implementation,
        data=data,
    )
    policy_of = {s: policies[s in (2, 4)] for s in (1, 2, 3, 4)}
    checks.assert_each_alone(
        got, data, D1A_IDS, D1A_IDS, policy_of, implementation=implementation
    )


@pytest.mark.parametrize("policy_id", [0, 1], ids=["all full", "all causal"])
def test_D1b_uniform_row_of_a_mixed_call(implementation, policy_id):
    checks.check(
        [D1A_IDS],
        policies=(FULL_02, CAUSAL_13),
        policy_ids=np.full((1, 23), policy_id),
        implementation=implementation,
        data=checks.random_data(
            1, 23, 23, N=16, K=16, H=64, V=64, dtype=jnp.bfloat16, seed=1
        ),
    )


def test_D1b_no_padding_in_between(implementation):
    ids = checks.pack(7, 3, 5, 4, 4)
    checks.check(
        [ids],
        policies=(FULL_02, CAUSAL_13),
        policy_ids=[[s % 2 for s in ids]],
        implementation=implementation,
        data=checks.random_data(
            1, 23, 23, N=16, K=16, H=64, V=64, dtype=jnp.bfloat16, seed=2
        ),
    )


D1C_Q, D1C_KV = checks.pack(5, 3, 4), checks.pack(7, 2, 5)
D1C_POLICY_IDS = [1 if s == 2 else 0 for s in D1C_Q]


def test_D1c_cross_attention_probe(implementation):
    checks.assert_probe(
        [3] * 5 + [0, 7, 7.5] + [11] * 4,
        nothing=(5,),
        q_ids=D1C_Q,
        kv_ids=D1C_KV,
        policies=(oracle.FULL, oracle.window(oracle.BOTTOM_RIGHT, 2, 0)),
        policy_ids=D1C_POLICY_IDS,
        implementation=implementation,
    )


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_D1c_cross_attention_gradients(implementation, dtype):
    checks.check(
        [D1C_Q],
        [D1C_KV],
        policies=(oracle.FULL, oracle.window(oracle.BOTTOM_RIGHT, 2, 0)),
        policy_ids=[D1C_POLICY_IDS],
        implementation=implementation,
        N=16,
        K=16,
        H=64,
        V=64,
        dtype=dtype,
    )


def test_D1d_two_windows_of_one_kind(implementation):
    checks.assert_probe(
        [0, 0.5, 1.5, 2.5, 4, 4.5, 5, 5.5],
        q_ids=checks.pack(4, 4),
        policies=(
            oracle.window(oracle.CAUSAL, 1, 0),
            oracle.window(oracle.CAUSAL, 3, 0),
        ),
        policy_ids=[0] * 4 + [1] * 4,
        implementation=implementation,
    )


def test_D1_order_of_the_policies_does_not_matter(implementation):
    data = checks.random_data(1, 23, 23, dtype=jnp.bfloat16)
    ids = np.asarray([D1A_POLICY_IDS])
    one = checks.run(
        data,
        [D1A_IDS],
        policies=(FULL_02, CAUSAL_13),
        policy_ids=ids,
        implementation=implementation,
    )
    other = checks.run(
        data,
        [D1A_IDS],
        policies=(CAUSAL_13, FULL_02),
        policy_ids=1 - ids,
        implementation=implementation,
    )
    checks.assert_bitwise(one, other, "policies listed the other way round")


# ----------------------------------------------------------- causal: two corners


@pytest.mark.parametrize(
    ("q_ids", "kv_ids", "expected", "nothing"),
    [
        pytest.param([1] * 5, [1] * 6, [0.5, 1, 1.5, 2, 2.5], (), id="D2 5 and 6"),
        pytest.param(
            [1] * 6, [1] * 3, [0, 0, 0, 0, 0.5, 1], (0, 1, 2), id="D2 6 and 3"
        ),
        pytest.param(
            checks.pack(2, 4),
            checks.pack(5, 3),
            [1.5, 2, 0, 5, 5.5, 6],
            (2,),
            id="D2 two sequences",
        ),
        pytest.param([1] * 4, [1] * 5, [0.5, 1, 1.5, 2], (), id="D4 4 and 5"),
        pytest.param([1] * 4, [1] * 4, [0, 0.5, 1, 1.5], (), id="D4 4 and 4"),
        pytest.param([1, 1], [1] * 4, [1, 1.5], (), id="D15"),
        pytest.param([1, 3], [1] * 3 + [3] * 5, [1, 5], (), id="C7"),
    ],
)
def test_bottom_right_probe(implementation, q_ids, kv_ids, expected, nothing):
    """The last query of each sequence sees its last key."""
    checks.assert_probe(
        expected,
        nothing=nothing,
        q_ids=q_ids,
        kv_ids=kv_ids,
        policies=(oracle.BOTTOM_RIGHT,),
        implementation=implementation,
    )


@pytest.mark.parametrize(
    ("q_ids", "kv_ids", "expected"),
    [
        pytest.param([1, 1], [1] * 4, [0, 0.5], id="D15"),
        pytest.param([1, 3], [1] * 3 + [3] * 5, [0, 3], id="C7"),
    ],
)
def test_causal_probe_top_left(implementation, q_ids, kv_ids, expected):
    """The first query of each sequence sees its first key."""
    checks.assert_probe(
        expected,
        q_ids=q_ids,
        kv_ids=kv_ids,
        policies=(oracle.CAUSAL,),
        implementation=implementation,
    )


def test_D4_several_sequences_end_on_their_last_key(implementation):
    q_ids, kv_ids = checks.pack(4, 1, 3), checks.pack(5, 4, 3)
    checks.assert_probe(
        [0.5, 1, 1.5, 2, 6.5, 9, 9.5, 10],
        q_ids=q_ids,
        kv_ids=kv_ids,
        policies=(oracle.BOTTOM_RIGHT,),
        implementation=implementation,
    )


@pytest.mark.parametrize(
    ("q_ids", "kv_ids"),
    [
        pytest.param([[1] * 5] * 2, [[1] * 6] * 2, id="D2 5 and 6"),
        pytest.param(
            [checks.pack(2, 4), [1] * 6],
            [checks.pack(5, 3), [1] * 3 + [0] * 5],
            id="D2 rows that differ",
        ),
    ],
)
def test_D2_gradients(implementation, q_ids, kv_ids):
    """Surplus query rows are exactly 0 and give nothing to dk and dv."""
    checks.check(
        q_ids, kv_ids, policies=(oracle.BOTTOM_RIGHT,), implementation=implementation
    )


@pytest.mark.parametrize("policy", [oracle.BOTTOM_RIGHT, oracle.CAUSAL])
@pytest.mark.parametrize(
    ("q_ids", "kv_ids", "sizes"),
    [
        ([1, 3], [1, 1, 1, 3, 3, 3, 3, 3], {"N": 9, "K": 3, "H": 64, "V": 64}),
        ([1], [1] * 5, {"N": 21, "K": 7, "H": 120, "V": 120}),
    ],
    ids=["lengths 1 0 1", "one query"],
)
def test_C7_gradients(implementation, policy, q_ids, kv_ids, sizes):
    """One query per sequence, an empty sequence, grouped heads."""
    checks.check(
        [q_ids], [kv_ids], policies=(policy,), implementation=implementation, **sizes
    )


def test_bottom_right_counts_tokens_not_positions(implementation):
    """The shift is keys - queries of the sequence, whatever its positions are."""
    checks.check(
        [[1, 1, 2, 0, 2, 2, 1, 2]],
        [[2, 1, 0, 1, 2, 1, 1, 1]],
        q_pos=[[7, 5, 9, 0, 7, 8, 6, 6]],
        kv_pos=[[6, 5, 0, 9, 7, 6, 8, 7]],
        policies=(oracle.BOTTOM_RIGHT,),
        implementation=implementation,
    )


# ------------------------------------------------------------- prefix and chunked


@pytest.mark.parametrize(
    ("length", "expected"),
    [
        (0, [0, 0.5, 1, 1.5, 4, 4.5, 5]),
        (3, [1, 1, 1, 1.5, 5, 5, 5]),
        (100, [1.5, 1.5, 1.5, 1.5, 5, 5, 5]),
    ],
)
def test_prefix_probe(implementation, length, expected):
    """Keys of the prefix are seen by all, the others causally."""
    checks.assert_probe(
        expected,
        q_ids=checks.pack(4, 3),
        policies=(oracle.prefix(length),),
        implementation=implementation,
    )


@pytest.mark.parametrize(
    ("size", "left_chunks", "expected"),
    [
        (1, 0, [0, 1, 2, 3, 4, 5, 6, 7]),
        (2, 0, [0.5, 0.5, 2.5, 2.5, 4, 5.5, 5.5, 7]),
        (2, 1, [0.5, 0.5, 1.5, 1.5, 3, 5.5, 5.5, 6]),
        (3, 1, [1, 1, 1, 2, 2, 6, 6, 6]),
        (100, 5, [2, 2, 2, 2, 2, 6, 6, 6]),
    ],
)
def test_chunked_probe(implementation, size, left_chunks, expected):
    """A query sees its own chunk whole, and the chunks before it."""
    checks.assert_probe(
        expected,
        q_ids=checks.pack(5, 3),
        policies=(oracle.chunked(size, left_chunks),),
        implementation=implementation,
    )


@pytest.mark.parametrize("policy", [oracle.prefix(2), oracle.chunked(2, 0)])
def test_prefix_and_chunks_count_from_the_first_key(implementation, policy):
    """Positions that start at 5 move neither the prefix nor the chunks."""
    shifted = [5, 6, 7, 8, 9, 5, 6, 7]
    want = checks.probe(checks.pack(5, 3), policies=(policy,), implementation="dense")
    got = checks.probe(
        checks.pack(5, 3),
        policies=(policy,),
        q_pos=shifted,
        kv_pos=shifted,
        implementation=implementation,
    )
    np.testing.assert_array_equal(got, want)


def test_prefix_and_chunked_with_windows_match_the_oracle(implementation):
    """A window cuts prefixes and chunks too; queries may lie before the first key."""
    policies = (
        oracle.window(oracle.prefix(5), 2, 4),
        oracle.window(oracle.chunked(3, 1), 2, -1),
        oracle.window(oracle.chunked(4, 0), -1, 1),
    )
    rng = np.random.default_rng(5)
    q_ids = np.asarray([checks.pack(9, 4, 6, total=21)] * 2)
    kv_ids = np.asarray([checks.pack(7, 8, 5, total=22)] * 2)
    checks.check(
        q_ids,
        kv_ids,
        q_pos=rng.integers(-3, 12, q_ids.shape),
        kv_pos=rng.integers(-3, 12, kv_ids.shape),
        policies=policies,
        policy_ids=rng.integers(0, 3, q_ids.shape),
        implementation=implementation,
    )


# ------------------------------------------------------------ policies as values


@pytest.mark.parametrize(
    "policy",
    [te.FULL, te.CAUSAL, te.CAUSAL_BOTTOM_RIGHT, te.prefix(3), te.chunked(4, 1)],
)
def test_policies_are_frozen_and_hashable(policy):
    """Equal policies are one jit cache entry; none can be changed in place."""
    assert isinstance(policy, te.MaskPolicy)
    windowed = policy.with_window(2, 1)
    assert windowed == policy.with_window(2, 1)
    assert hash(windowed) == hash(policy.with_window(2, 1))
    assert windowed != policy
    assert policy.with_window(-1, -1) == policy
    assert te.prefix(3) == te.prefix(3) != te.prefix(4)
    assert te.chunked(4, 1) == te.chunked(4, 1) != te.chunked(4, 2)


# -------------------------------------------------- D16: mask types by content


D16_IDS = np.array([[1, 1, 2, 2]])


def _mask_types(mapping, windows=None):
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(D16_IDS)
    return te.policies_from_mask_types(desc, mapping, windows)


@pytest.mark.parametrize(
    "mapping",
    [
        {"padding": np.array([[1]])},
        {"padding": np.array([[1, 0]])},
    ],
    ids=["left out", "left out, 0 fills"],
)
def test_D16_a_sequence_in_no_mask_type(mapping):
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq`.*2"):
        _mask_types(mapping)


def test_D16_a_sequence_that_is_named_twice():
    """Counting names instead of looking at them would let (1, 1) pass."""
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq`.*1 .*twice"):
        _mask_types({"padding": np.array([[1, 1]])})


def test_D16_a_sequence_in_two_mask_types():
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq`.*2"):
        _mask_types({"padding": np.array([[1, 2]]), "padding_causal": np.array([[2]])})


def test_D16_a_name_that_is_not_in_the_row_is_ignored(implementation):
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(D16_IDS)
    policies, policy_ids = te.policies_from_mask_types(
        desc, {"padding": np.array([[1, 2, 3]])}
    )
    probed = checks.probe_call(
        *(4, 4),
        desc=desc,
        policy=policies,
        policy_ids=policy_ids,
        implementation=implementation,
    )
    checks.assert_means(probed, [0.5, 0.5, 2.5, 2.5])


def test_S3_windows_per_mask_type(implementation):
    """Each mask type gets its own window, at both ends."""
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(np.array([checks.pack(4, 4)]))
    policies, policy_ids = te.policies_from_mask_types(
        desc,
        {
            "padding_causal": np.array([[1]]),
            "padding_causal_bottom_right": np.array([[2]]),
        },
        {"padding_causal": (1, 0), "padding_causal_bottom_right": (3, 0)},
    )
    probed = checks.probe_call(
        *(8, 8),
        desc=desc,
        policy=policies,
        policy_ids=policy_ids,
        implementation=implementation,
    )
    checks.assert_means(probed, [0, 0.5, 1.5, 2.5, 4, 4.5, 5, 5.5])
