"""Padding, empty rows and rubbish in masked places change nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

LOWEST = -(2**31)
B6_ROWS = {
    "0": [1, 1, 1, 0, 2, 2, 0, 0],
    "-1": [1, 1, 1, -1, 2, 2, -1, -1],
    "lowest": [1, 1, 1, LOWEST, 2, 2, LOWEST, LOWEST],
    "mixed": [1, 1, 1, LOWEST, 2, 2, 0, -1],
}
RUBBISH = [np.nan, np.inf, -np.inf, 1e10]


# -------------------------------------------------------------- B6: what is padding


@pytest.mark.parametrize("row", B6_ROWS.values(), ids=B6_ROWS.keys())
@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (oracle.CAUSAL, [0, 0.5, 1, 0, 4, 4.5, 0, 0]),
        (oracle.FULL, [1, 1, 1, 0, 4.5, 4.5, 0, 0]),
    ],
    ids=["causal", "full"],
)
def test_B6_probe(implementation, row, policy, expected):
    """Padding marked -1 on both sides compares equal, and must still see nothing."""
    checks.assert_probe(
        expected,
        nothing=(3, 6, 7),
        q_ids=row,
        policies=(policy,),
        implementation=implementation,
    )


@pytest.mark.parametrize("policy", [oracle.CAUSAL, oracle.FULL])
def test_B6_any_padding_id_gives_the_same_bits(implementation, policy):
    data = checks.random_data(1, 8, 8)
    want = checks.check(
        [B6_ROWS["0"]], policies=(policy,), implementation=implementation, data=data
    )
    padding = np.asarray(B6_ROWS["0"]) == 0
    for name, array in want.items():
        if name != "lse":
            assert not array[0, padding].any(), name
    for row in B6_ROWS.values():
        got = checks.run(data, [row], policies=(policy,), implementation=implementation)
        checks.assert_bitwise(got, want, str(row))
        bad = np.asarray([row]) <= 0
        got = checks.run(
            checks.with_rubbish(data, bad, bad, np.nan),
            [row],
            policies=(policy,),
            implementation=implementation,
        )
        checks.assert_bitwise(got, want, f"{row} with NaN")


def test_B10_each_sequence_equals_itself_alone(implementation):
    """Padding first, in between and last."""
    for ids in ([0, 1, 1, 0, 2, 2, 2, 0], [0, 0, 0, 1, 1, 1, 2, 2]):
        data = checks.random_data(1, 8, 8)
        got = checks.check(
            [ids],
            policies=(oracle.CAUSAL,),
            implementation=implementation,
            data=data,
        )
        checks.assert_each_alone(
            got,
            data,
            ids,
            ids,
            {1: oracle.CAUSAL, 2: oracle.CAUSAL},
            implementation=implementation,
        )


def test_positions_at_padding_are_ignored(implementation):
    """Whatever integer stands there, the bits stay."""
    ids = np.asarray([[0, 1, 1, -1, 2, 2, 2, 0]])
    data = checks.random_data(1, 8, 8)
    policies = (oracle.BOTTOM_RIGHT, oracle.chunked(2, 0))
    results = []
    for value in (0, 1, 2**31 - 1, LOWEST):
        pos = np.where(ids > 0, oracle.positions(ids[0]), value)
        results.append(
            checks.run(
                data,
                ids,
                q_pos=pos,
                kv_pos=pos,
                policies=policies,
                policy_ids=ids == 2,
                implementation=implementation,
            )
        )
    for other in results[1:]:
        checks.assert_bitwise(results[0], other, "position at padding")


def test_policy_ids_at_padding_are_ignored(implementation):
    """An index out of range is an error on real tokens only."""
    ids = np.asarray([[0, 1, 1, -1, 2, 2, 2, 0]])
    data = checks.random_data(1, 8, 8)
    results = [
        checks.run(
            data,
            ids,
            policies=(oracle.FULL, oracle.CAUSAL),
            policy_ids=np.where(ids > 0, ids - 1, value),
            implementation=implementation,
        )
        for value in (0, 5, -3)
    ]
    for other in results[1:]:
        checks.assert_bitwise(results[0], other, "policy id at padding")


# ------------------------------------------------------------------ C2: NaN and Inf


C2_IDS = np.asarray([checks.pack(37, 50, total=128)])


@pytest.mark.parametrize("policy", [oracle.CAUSAL, oracle.FULL])
def test_C2_rubbish_in_padding(implementation, policy):
    """0 * NaN must reach neither an output nor a gradient."""
    padding = C2_IDS <= 0
    data = checks.random_data(1, 128, 128)
    want = checks.check(
        C2_IDS,
        policies=(policy,),
        implementation=implementation,
        data=checks.with_rubbish(data, padding, padding, 0),
    )
    for value in RUBBISH:
        got = checks.run(
            checks.with_rubbish(data, padding, padding, value),
            C2_IDS,
            policies=(policy,),
            implementation=implementation,
        )
        checks.assert_bitwise(got, want, f"{value} in padding")
    for name, array in want.items():
        if name != "lse":
            assert not array[padding].any(), name


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_C2_rubbish_in_padding_at_half_precision(implementation, dtype):
    padding = C2_IDS <= 0
    data = checks.random_data(1, 128, 128, dtype=dtype)
    runs = [
        checks.run(
            checks.with_rubbish(data, padding, padding, value),
            C2_IDS,
            policies=(oracle.CAUSAL,),
            implementation=implementation,
        )
        for value in (0, np.nan, np.inf, -np.inf, 6e4)
    ]
    for other in runs[1:]:
        checks.assert_bitwise(runs[0], other, "rubbish in padding")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e10])
def test_C2_rubbish_in_another_sequence(implementation, value):
    """Sequence 2 cannot be felt in sequence 1, bit for bit, cotangents included."""
    other = C2_IDS == 2
    data = checks.random_data(1, 128, 128)
    want = checks.run(
        data, C2_IDS, policies=(oracle.CAUSAL,), implementation=implementation
    )
    got = checks.run(
        checks.with_rubbish(data, other, other, value),
        C2_IDS,
        policies=(oracle.CAUSAL,),
        implementation=implementation,
    )
    first = C2_IDS == 1
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        np.testing.assert_array_equal(a[first], b[first], err_msg=name)


def test_C2_rubbish_in_an_interleaved_sequence(implementation):
    """The same where every tile of keys holds tokens of both sequences."""
    ids = np.asarray([[1, 2, 0, 1] * 32])
    data = checks.random_data(1, 128, 128)
    policies, policy_ids = (oracle.CAUSAL, oracle.FULL), ids % 2
    arguments = {
        "policies": policies,
        "policy_ids": policy_ids,
        "implementation": implementation,
    }
    want = checks.check(ids, data=data, **arguments)
    bad = ids != 1
    for value in (np.nan, np.inf):
        got = checks.run(checks.with_rubbish(data, bad, bad, value), ids, **arguments)
        for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
            np.testing.assert_array_equal(a[~bad], b[~bad], err_msg=name)


@pytest.mark.parametrize("field", ["k", "v"])
def test_a_visible_nan_is_seen(implementation, field):
    """Masking must not hide a NaN from the queries that may see it."""
    ids = np.asarray([checks.pack(6, 2)])
    at = np.zeros((1, 8), bool)
    at[0, 3] = True
    data = checks.with_rubbish(checks.random_data(1, 8, 8), at, at, np.nan, (field,))
    got = checks.run(
        data, ids, policies=(oracle.CAUSAL,), implementation=implementation
    )
    seen = np.asarray([3, 4, 5])
    assert np.isnan(got.out[0, seen]).all()
    unseen = np.asarray([0, 1, 2, 6, 7])
    assert np.isfinite(got.out[0, unseen]).all()
    assert np.isfinite(got.dq[0, unseen]).all()


@pytest.mark.parametrize("field", ["k", "v"])
@pytest.mark.parametrize(
    "policy",
    [te.CAUSAL, te.CAUSAL.with_window(2, 0), te.chunked(4, 0), te.prefix(2)],
)
def test_a_nan_in_a_key_that_the_query_may_not_see(
    implementation, eager, policy, field
):
    """Inside one sequence too, an excluded key does not reach the output."""
    data = checks.random_data(1, 8, 8)
    clean = te.dot_product_attention(
        data.q, data.k, data.v, policy=policy, implementation=implementation
    )
    at = np.zeros((1, 8), bool)
    at[0, 4] = True
    bad = checks.with_rubbish(data, at, at, np.nan, (field,))
    out = te.dot_product_attention(
        bad.q, bad.k, bad.v, policy=policy, implementation=implementation
    )
    np.testing.assert_array_equal(np.asarray(out)[0, :4], np.asarray(clean)[0, :4])
    assert np.isnan(np.asarray(out)[0, 4]).all()


# ------------------------------------------------------------ C1: rows without a key


def _two_layers(params, x, desc, policy, implementation):
    attentions = []
    for w_in, w_out in params:
        q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, w_in)
        out = te.dot_product_attention(
            q, k, v, desc, policy=policy, implementation=implementation
        )
        attentions.append(out)
        x = jnp.tanh(jnp.einsum("btnh,nhd->btd", out, w_out))
    return x, attentions


def test_C1_empty_rows_do_not_poison_the_next_layer(implementation):
    """One row with padding at the end, one that is all padding."""
    rng = np.random.default_rng(0)
    params = [
        (
            jnp.asarray(rng.normal(size=(3, 6, 2, 8)).astype(np.float32)),
            jnp.asarray(rng.normal(size=(2, 8, 6)).astype(np.float32)),
        )
        for _ in range(2)
    ]
    x = jnp.asarray(rng.normal(size=(2, 12, 6)).astype(np.float32))
    target = jnp.asarray(rng.normal(size=(2, 12, 6)).astype(np.float32))
    # Under bottom-right the first four real queries have no key.
    q_ids = np.asarray([checks.pack(9, total=12), [0] * 12])
    kv_ids = np.asarray([checks.pack(5, total=12), [0] * 12])

    def loss(params, x, q_ids, kv_ids, target):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids))
        y, attentions = _two_layers(
            params, x, desc, te.CAUSAL_BOTTOM_RIGHT, implementation
        )
        real = (q_ids > 0)[..., None]
        return jnp.sum(jnp.where(real, (y - target) ** 2, 0)), attentions

    step = jax.jit(jax.value_and_grad(loss, has_aux=True))
    (value, attentions), grads = step(params, x, q_ids, kv_ids, target)
    (alone, _), want = step(params, x[:1], q_ids[:1], kv_ids[:1], target[:1])
    np.testing.assert_allclose(value, alone, rtol=1e-5)
    for a, b in zip(jax.tree.leaves(grads), jax.tree.leaves(want), strict=True):
        assert np.isfinite(a).all()
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)
    for out in attentions:
        assert not np.asarray(out)[q_ids <= 0].any()
    assert not np.asarray(attentions[0])[0, :4].any()


# ---------------------------------------------------------- C3, C4: gaps and tails


def test_C3_tokens_beyond_the_last_sequence():
    """Rows 944 and 945 of output and gradient are written, and are 0."""
    ids = jnp.asarray([checks.pack(144, 288, 512, total=946)], jnp.int32)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(946, 1024)).astype(np.float32))
    dout = jnp.asarray(rng.normal(size=(1, 946, 16, 64)).astype(np.float32))
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)

    @jax.jit
    def run(x):
        def f(x):
            q = (x @ jnp.eye(1024)).reshape(1, 946, 16, 64)
            return te.dot_product_attention(q, q, q, desc, policy=te.CAUSAL)

        out, vjp = jax.vjp(f, x)
        return out, *vjp(dout)

    out, dx = (np.asarray(y) for y in run(x))
    assert not out[0, 944:].any()
    assert not dx[944:].any()
    assert np.isfinite(dx).all()
    assert (np.abs(dx[:944]).max(axis=1) > 0).all()
    # One sequence against the oracle; three would take its loops half a minute.
    head = np.asarray(x).reshape(1, 946, 16, 64)[:, :144, :1]
    mask = oracle.mask([[1] * 144], [[1] * 144], policies=(oracle.CAUSAL,))
    exact, _ = oracle.attention(head, head, head, mask, 1 / 8)
    grads = oracle.gradients(head, head, head, mask, 1 / 8, dout[:, :144, :1])
    np.testing.assert_allclose(out[:, :144, :1], exact, atol=2e-5)
    np.testing.assert_allclose(
        dx.reshape(1, 946, 16, 64)[:, :144, :1],
        grads.dq + grads.dk + grads.dv,
        atol=2e-4,
    )


def test_C4_gaps_between_sequences(implementation):
    """Zero in the slots that are reserved, whatever the cotangent is there."""
    ids = np.asarray([[1, 1, 1, 0, 2, 2, 2, 2, 2, 0, 0, 0, 0, 0, 0, 0]])
    gaps = ids[0] == 0
    data = checks.random_data(1, 16, 16)
    for value in (1e4, np.nan):
        got = checks.run(
            checks.with_rubbish(data, ids == 0, ids == 0, value, ("dout", "dlse")),
            ids,
            policies=(oracle.CAUSAL,),
            implementation=implementation,
        )
        for name, array in got.items():
            if name != "lse":
                assert not array[0, gaps].any(), name
    checks.check(ids, policies=(oracle.CAUSAL,), implementation=implementation)


def test_C15_zero_weight_on_padding_in_the_loss():
    """NaN at padding times a loss weight of 0 would be NaN."""
    data = checks.random_data(1, 128, 128)
    ids = jnp.asarray(C2_IDS, jnp.int32)
    padding = C2_IDS <= 0
    bad = checks.with_rubbish(data, padding, padding, np.nan, ("q", "k", "v"))
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
    weight = (C2_IDS > 0)[..., None, None]

    def loss(q, k, v):
        out = te.dot_product_attention(q, k, v, desc, implementation="xla")
        return jnp.mean(out * weight)

    value, grads = jax.value_and_grad(loss, (0, 1, 2))(bad.q, bad.k, bad.v)
    assert np.isfinite(value)
    for array in grads:
        assert np.isfinite(array).all()
        assert not np.asarray(array)[padding].any()


# -------------------------------------------------------------------- C8: nothing


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("B", "T", "S"), [(2, 0, 0), (0, 5, 7), (2, 3, 0), (2, 0, 4)], ids=str
)
def test_C8_nothing_at_all(implementation, jit, B, T, S):
    """Empty shapes give empty results, and no key gives output exactly 0."""
    data = checks.random_data(B, T, S, dtype=jnp.bfloat16)
    ids = (jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32))
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)

    def run(q, k, v):
        def f(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, desc),
                policy=te.CAUSAL_BOTTOM_RIGHT.with_window(3, 0),
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(f, q, k, v)
        return out, lse, *vjp((jnp.ones_like(out), jnp.ones_like(lse)))

    out, lse, *grads = (jax.jit(run) if jit else run)(data.q, data.k, data.v)
    assert out.shape == (B, T, 4, 6)
    assert out.dtype == jnp.bfloat16
    assert lse.shape == (B, T, 4)
    assert (np.asarray(lse) == -np.inf).all()
    assert not np.asarray(out, np.float32).any()
    for gradient, primal in zip(grads, (data.q, data.k, data.v), strict=True):
        assert gradient.shape == primal.shape
        assert gradient.dtype == primal.dtype
        assert not np.asarray(gradient, np.float32).any()
