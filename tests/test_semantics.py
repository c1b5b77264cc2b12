"""Each sentence of the contract that no other file decides."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

POLICIES = (
    oracle.FULL,
    oracle.CAUSAL,
    oracle.BOTTOM_RIGHT,
    oracle.window(oracle.CAUSAL, 3, 0),
    oracle.prefix(2),
    oracle.chunked(3, 1),
)
LOWEST, HIGHEST = -(2**31), 2**31 - 1


def random_row(seed, B=2, T=25, S=28):
    rng = np.random.default_rng(seed)
    q_ids, kv_ids = rng.integers(-1, 4, (B, T)), rng.integers(-1, 4, (B, S))
    return {
        "q_ids": q_ids,
        "kv_ids": kv_ids,
        "q_pos": np.stack([oracle.positions(x) for x in q_ids]),
        "kv_pos": np.stack([oracle.positions(x) for x in kv_ids]),
        "policies": POLICIES,
        "policy_ids": rng.integers(0, len(POLICIES), (B, T)),
    }


def test_the_main_case(implementation):
    """Interleaved rows, six policies, cross-attention, grouped heads: the oracle."""
    checks.check(**random_row(0), implementation=implementation)


def test_the_default_implementation_is_right():
    checks.check(**random_row(1), implementation=None)


@pytest.mark.parametrize("shift", [-7, 1000, HIGHEST - 60, LOWEST + 10])
def test_a_shift_of_both_sides_changes_nothing(implementation, shift):
    """Positions may start anywhere, near the ends of int32 too."""
    row = random_row(2)
    data = checks.random_data(2, 25, 28)
    want = checks.run(data, **row, implementation=implementation)
    row["q_pos"], row["kv_pos"] = row["q_pos"] + shift, row["kv_pos"] + shift
    got = checks.run(data, **row, implementation=implementation)
    checks.assert_bitwise(got, want, f"shifted by {shift}")


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (oracle.BOTTOM_RIGHT, [3.5, 3.5, 3.5, 3.5]),
        (oracle.window(oracle.BOTTOM_RIGHT, 5, 0), [5, 5.5, 6, 6.5]),
    ],
)
def test_the_shift_of_bottom_right_does_not_wrap_around(
    implementation, policy, expected
):
    """Query positions at the end of int32 plus keys - queries lie beyond it."""
    checks.assert_probe(
        expected,
        q_ids=[1] * 4,
        kv_ids=[1] * 8,
        q_pos=[HIGHEST - 3, HIGHEST - 2, HIGHEST - 1, HIGHEST],
        kv_pos=[HIGHEST - 7 + i for i in range(8)],
        policies=(policy,),
        implementation=implementation,
    )


def test_chunks_far_from_the_first_key_do_not_wrap_around(implementation):
    """Chunks of queries more than 2**31 after the first key."""
    checks.assert_probe(
        [0.5, 2.5],
        q_ids=[1, 1],
        kv_ids=[1] * 4,
        q_pos=[LOWEST, HIGHEST],
        kv_pos=[LOWEST, LOWEST + 1, HIGHEST - 1, HIGHEST],
        policies=(oracle.chunked(4, 0),),
        implementation=implementation,
    )


def test_given_positions_need_not_be_sorted_nor_distinct(implementation):
    rng = np.random.default_rng(0)
    row = random_row(3)
    row["q_pos"] = rng.integers(-4, 9, row["q_pos"].shape)
    row["kv_pos"] = rng.integers(-4, 9, row["kv_pos"].shape)
    checks.check(**row, implementation=implementation)


def test_the_order_of_the_tokens_does_not_matter(implementation):
    """Tokens permuted together with their metadata: the permuted result."""
    rng = np.random.default_rng(0)
    row = random_row(4)
    data = checks.random_data(2, 25, 28)
    want = checks.run(data, **row, implementation=implementation)
    q_order, kv_order = rng.permutation(25), rng.permutation(28)
    for name in ("q_ids", "q_pos", "policy_ids"):
        row[name] = row[name][:, q_order]
    for name in ("kv_ids", "kv_pos"):
        row[name] = row[name][:, kv_order]
    permuted = checks.Data(
        q=data.q[:, q_order],
        k=data.k[:, kv_order],
        v=data.v[:, kv_order],
        dout=data.dout[:, q_order],
        dlse=data.dlse[:, q_order],
    )
    got = checks.run(permuted, **row, implementation=implementation)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        order = kv_order if name in ("dk", "dv") else q_order
        np.testing.assert_allclose(a, b[:, order], rtol=1e-5, atol=1e-5, err_msg=name)


def test_the_names_of_the_sequences_do_not_matter(implementation):
    """Ids need not be small, sorted or dense."""
    row = random_row(5)
    data = checks.random_data(2, 25, 28)
    want = checks.run(data, **row, implementation=implementation)
    names = {1: HIGHEST, 2: 3, 3: 1_000_000}
    for side in ("q_ids", "kv_ids"):
        row[side] = np.vectorize(lambda i: names.get(i, i))(row[side])
    got = checks.run(data, **row, implementation=implementation)
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5, err_msg=name)


def test_without_a_descriptor_every_row_is_one_sequence(implementation):
    """T and S may differ; policy_ids are taken too."""
    data = checks.random_data(2, 7, 9)
    policies = (te.FULL, te.CAUSAL, te.CAUSAL_BOTTOM_RIGHT)
    policy_ids = np.arange(14).reshape(2, 7) % 3
    out = te.dot_product_attention(
        *(data.q, data.k, data.v),
        policy=policies,
        policy_ids=policy_ids,
        implementation=implementation,
    )
    mask = oracle.mask(
        np.ones((2, 7)),
        np.ones((2, 9)),
        policies=(oracle.FULL, oracle.CAUSAL, oracle.BOTTOM_RIGHT),
        policy_ids=policy_ids,
    )
    want, _ = oracle.attention(data.q, data.k, data.v, mask, 8**-0.5)
    np.testing.assert_allclose(out, want, rtol=1e-5, atol=1e-6)


def test_a_list_of_policies_is_as_good_as_a_tuple(implementation):
    data = checks.random_data(1, 9, 9)
    ids = np.zeros((1, 9), np.int32)
    out, other = (
        te.dot_product_attention(
            *(data.q, data.k, data.v),
            policy=policies,
            policy_ids=ids,
            implementation=implementation,
        )
        for policies in ([te.CAUSAL, te.FULL], (te.CAUSAL, te.FULL))
    )
    np.testing.assert_array_equal(out, other)


def test_return_lse_does_not_change_the_output(implementation):
    data = checks.random_data(2, 9, 9)
    run = functools.partial(
        te.dot_product_attention,
        *(data.q, data.k, data.v),
        policy=te.CAUSAL,
        implementation=implementation,
    )
    out, lse = run(return_lse=True)
    assert isinstance(run(), jax.Array)
    np.testing.assert_array_equal(run(), out)
    assert lse.shape == (2, 9, 4)
    assert lse.dtype == jnp.float32


def test_numpy_arrays_are_arrays(implementation):
    data = checks.random_data(1, 9, 9)
    q, k, v = (np.asarray(x) for x in (data.q, data.k, data.v))
    host: Any = {"query": q, "key": k, "value": v}
    out = te.dot_product_attention(**host, implementation=implementation)
    want = te.dot_product_attention(
        data.q, data.k, data.v, implementation=implementation
    )
    np.testing.assert_array_equal(out, want)


def test_one_sequence_may_hold_several_policies(implementation):
    """`policy_ids` are per query token; a prefix of a sequence may be full."""
    checks.assert_probe(
        [2.5, 2.5, 2.5, 1.5, 2, 2.5],
        q_ids=[1] * 6,
        policies=(oracle.FULL, oracle.CAUSAL),
        policy_ids=[0, 0, 0, 1, 1, 1],
        implementation=implementation,
    )


def test_implementations_agree_on_more_than_one_tile():
    """700 tokens, six policies: both against the oracle."""
    row = random_row(6, B=1, T=700, S=650)
    row["q_ids"], row["kv_ids"] = np.sort(row["q_ids"]), np.sort(row["kv_ids"])
    row["q_pos"] = np.stack([oracle.positions(x) for x in row["q_ids"]])
    row["kv_pos"] = np.stack([oracle.positions(x) for x in row["kv_ids"]])
    for implementation in checks.IMPLEMENTATIONS:
        checks.check(**row, implementation=implementation, N=2, K=1)


def test_public_names():
    """What the package exports, and nothing private."""
    for name in (
        "SequenceDescriptor",
        "from_segment_ids_and_pos",
        "MaskPolicy",
        "FULL",
        "CAUSAL",
        "CAUSAL_BOTTOM_RIGHT",
        "prefix",
        "chunked",
        "dot_product_attention",
        "policies_from_mask_types",
        "explain",
        "from_transformer_engine",
        "to_transformer_engine",
        "CHECKPOINT_NAMES",
        "fused_attn_fwd_p",
        "fused_attn_bwd_p",
    ):
        assert hasattr(te, name), name


def test_a_policy_of_ones_own(implementation):
    """A subclass that says which range of key positions a query sees."""
    import dataclasses

    @dataclasses.dataclass(frozen=True, kw_only=True)
    class Lookahead(te.MaskPolicy):
        steps: int

        def key_range(self, q):
            return LOWEST, q.pos + self.steps

    probed = checks.probe_call(
        *(6, 6), policy=Lookahead(steps=2), implementation=implementation
    )
    checks.assert_means(probed, [1, 1.5, 2, 2.5, 2.5, 2.5])
