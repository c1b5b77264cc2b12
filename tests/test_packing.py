"""Rows and sequences do not feel each other."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

B4_ROWS = np.asarray(
    [
        checks.pack(40, 30, 20, total=96),
        checks.pack(96),
        checks.pack(7, 1, 50, 25, total=96),
        [0] * 96,
    ]
)
E7_ROWS = {
    "lengths in slots": (
        np.repeat(
            [1, 0, 2, 0, 3, 4, 5, 6], [9, 3, 7, 1, 8, 12, 8, 12]
        )  # starts 0, 12, 20, 28, 40, 48
    ),
    "698 in 704": np.asarray([1] * 698 + [0] * 6),
    "7 in 8": np.asarray([1] * 7 + [0]),
    "seven in 64": np.asarray(checks.pack(3, 9, 20, 1, 13, 12, 6)),
}


@pytest.mark.parametrize("policy", [oracle.CAUSAL, oracle.FULL])
def test_B2_sequences_do_not_see_each_other(implementation, policy):
    """Other data in sequence 1 leaves every bit of sequence 2 as it was."""
    ids = np.asarray([checks.pack(100, 156)])
    sizes = {"N": 2, "K": 2, "H": 64, "V": 64}
    one = checks.random_data(1, 256, 256, **sizes)
    other = checks.random_data(1, 256, 256, seed=1, **sizes)
    first = (ids == 1)[..., None]
    mixed = dataclasses.replace(
        one,
        **{
            field.name: jnp.where(
                first if field.name == "dlse" else first[..., None],
                getattr(other, field.name),
                getattr(one, field.name),
            )
            for field in dataclasses.fields(one)
        },
    )
    got = checks.check(ids, policies=(policy,), implementation=implementation, data=one)
    changed = checks.run(mixed, ids, policies=(policy,), implementation=implementation)
    second = ids == 2
    for (name, a), (_, b) in zip(got.items(), changed.items(), strict=True):
        np.testing.assert_array_equal(a[second], b[second], err_msg=name)
        assert (a[~second] != b[~second]).any()
    checks.assert_each_alone(
        got, one, ids[0], ids[0], {2: policy}, implementation=implementation
    )


def test_B4_batched_equals_row_by_row(implementation):
    """Rows of a batch differ; one of them is all padding. Also B12."""
    policies = (oracle.CAUSAL, oracle.FULL)
    data = checks.random_data(4, 96, 96)
    policy_ids = B4_ROWS % 2
    batched = checks.check(
        B4_ROWS,
        policies=policies,
        policy_ids=policy_ids,
        implementation=implementation,
        data=data,
    )
    for row in range(4):
        here = slice(row, row + 1)
        alone = checks.run(
            checks.rows(data, here),
            B4_ROWS[here],
            policies=policies,
            policy_ids=policy_ids[here],
            implementation=implementation,
        )
        for (name, a), (_, b) in zip(batched.items(), alone.items(), strict=True):
            np.testing.assert_allclose(
                a[here], b, rtol=1e-5, atol=1e-5, err_msg=f"row {row}: {name}"
            )
    for name, array in batched.items():
        if name != "lse":
            assert not array[3].any(), name


def test_B12_batch_of_three_equals_three_batches_of_one(implementation):
    data = checks.random_data(3, 96, 96)
    out = te.dot_product_attention(
        data.q,
        data.k,
        data.v,
        te.SequenceDescriptor.from_segment_ids_and_pos(B4_ROWS[:3]),
        implementation=implementation,
    )
    for row in range(3):
        here = slice(row, row + 1)
        alone = te.dot_product_attention(
            data.q[here],
            data.k[here],
            data.v[here],
            te.SequenceDescriptor.from_segment_ids_and_pos(B4_ROWS[here]),
            implementation=implementation,
        )
        np.testing.assert_allclose(out[here], alone, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_B4_eight_sequences_of_8192_tokens():
    """The large form: other lengths in each row, 256 padding tokens at the end."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(2):
        cuts = np.sort(rng.choice(np.arange(1, 7936), 7, replace=False))
        lengths = np.diff([0, *cuts.tolist(), 7936])
        rows.append(checks.pack(*lengths.tolist(), total=8192))
    ids = np.asarray(rows)
    policies = (oracle.window(oracle.CAUSAL, 200, 0), oracle.window(oracle.FULL, 40, 9))
    data = checks.random_data(2, 8192, 8192, N=1, K=1, H=8, V=4)
    checks.check(
        ids,
        policies=policies,
        policy_ids=ids % 2,
        implementation="xla",
        data=data,
    )


@pytest.mark.parametrize("row", E7_ROWS.values(), ids=E7_ROWS.keys())
def test_E7_padding_in_the_slots(implementation, row):
    """The part that one device can decide: exact zeros, five equal runs."""
    data = checks.random_data(1, len(row), len(row))
    arguments = {"policies": (oracle.CAUSAL,), "implementation": implementation}
    first = checks.check(row[None], data=data, **arguments)
    for _ in range(4):
        again = checks.run(data, row[None], **arguments)
        checks.assert_bitwise(again, first, "repeated")


def test_S3_mixed_rows_uniform_rows_and_a_row_without_a_token(implementation):
    """Cross-attention with other key lengths, padding between sequences, two windows
    of one kind, bottom-right."""
    policies = (
        oracle.FULL,
        oracle.window(oracle.CAUSAL, 1, 0),
        oracle.window(oracle.CAUSAL, 3, 0),
        oracle.BOTTOM_RIGHT,
    )
    q_ids = np.asarray(
        [
            [1] * 5 + [0] * 2 + [2] * 6 + [3] * 3 + [0] + [4] * 6,
            checks.pack(9, 7, 4, total=23),
            [0] * 23,
        ]
    )
    kv_ids = np.asarray(
        [
            [0] + [1] * 7 + [2] * 3 + [0] * 2 + [3] * 6 + [4] * 8,
            checks.pack(4, 12, 9, total=27),
            [0] * 27,
        ]
    )
    policy_ids = np.where(np.arange(3)[:, None] == 1, 2, np.clip(q_ids - 1, 0, 3))
    for dtype in (jnp.float16, jnp.bfloat16):
        checks.check(
            q_ids,
            kv_ids,
            policies=policies,
            policy_ids=policy_ids,
            implementation=implementation,
            dtype=dtype,
        )
