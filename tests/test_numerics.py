"""Dtypes, lengths that fit no block, mask constants, extreme scores."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

C10_LENGTHS = (1, 2, 7, 63, 65, 100, 127, 129, 192, 1000)
C10_EVERYDAY = (1, 63, 65, 129, 1000)


def _check_length(length, dtype):
    """One sequence, and two of unequal length; ten calls bitwise equal."""
    first = (2 * length) // 3
    ids = np.asarray([[1] * length, checks.pack(first, length - first)])
    size = 16 if length % 2 == 0 else 32
    data = checks.random_data(2, length, length, N=1, K=1, H=size, V=size, dtype=dtype)
    arguments = {
        "policies": (oracle.FULL, oracle.CAUSAL),
        "policy_ids": ids % 2,
        "exact_shape": True,
        "implementation": "xla",
    }
    want = checks.check(ids, data=data, **arguments)
    for _ in range(9):
        checks.assert_bitwise(checks.run(data, ids, **arguments), want, "again")


@pytest.mark.parametrize(
    "length",
    [
        pytest.param(n, marks=[] if n in C10_EVERYDAY else pytest.mark.slow)
        for n in C10_LENGTHS
    ],
)
def test_C10_lengths_that_fit_no_block(length):
    """The two dtypes in turn."""
    turn = C10_LENGTHS.index(length) % 2
    _check_length(length, (jnp.bfloat16, jnp.float32)[turn])


@pytest.mark.slow
@pytest.mark.parametrize("length", C10_LENGTHS)
def test_C10_the_other_dtype(length):
    turn = C10_LENGTHS.index(length) % 2
    _check_length(length, (jnp.float32, jnp.bfloat16)[turn])


@pytest.mark.slow
def test_C10_4092_tokens():
    ids = np.asarray([checks.pack(2728, 1364)])
    for dtype in (jnp.float32, jnp.bfloat16):
        checks.check(
            ids,
            policies=(oracle.CAUSAL,),
            implementation="xla",
            N=1,
            K=1,
            H=32,
            V=32,
            dtype=dtype,
        )


@pytest.mark.parametrize(
    ("T", "S"), [(1, 300), (130, 257), pytest.param(300, 1, marks=pytest.mark.slow)]
)
def test_query_and_key_lengths_that_fit_no_block(T, S):
    """Tiles of queries and keys end independently."""
    rng = np.random.default_rng(0)
    checks.check(
        np.sort(rng.integers(0, 4, (2, T))),
        np.sort(rng.integers(0, 4, (2, S))),
        policies=(oracle.FULL, oracle.BOTTOM_RIGHT),
        policy_ids=rng.integers(0, 2, (2, T)),
        exact_shape=True,
        implementation="xla",
    )


def test_D5_long_keys_short_queries_no_mask():
    """512 queries and 2048 keys, fp16, D=64."""
    data = checks.random_data(1, 512, 2048, N=1, K=1, H=64, V=64, dtype=jnp.float16)
    checks.check(
        [[1] * 512], [[1] * 2048], policies=(oracle.FULL,), implementation="xla",
        data=data,
    )  # fmt: skip


# ----------------------------------------------------------------- C12, C13: constants


@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_C12_mask_constants_do_not_trip_the_checkers(implementation, flag):
    """fp16: the second half of a row padding, and a row that is all padding."""
    q, k, v = (
        jnp.asarray(np.random.default_rng(i).normal(size=(2, 8, 2, 4)), jnp.float16)
        for i in range(3)
    )
    ids = jnp.asarray([[1] * 4 + [0] * 4, [0] * 8], jnp.int32)

    def loss(q, k, v):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
        out = te.dot_product_attention(
            q, k, v, desc, policy=te.CAUSAL, implementation=implementation
        )
        return jnp.sum(out.astype(jnp.float32) ** 2)

    with getattr(jax, flag)(True):
        value, grads = jax.value_and_grad(loss, (0, 1, 2))(q, k, v)
        jit_value, jit_grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))(q, k, v)
    for array in (value, jit_value, *grads, *jit_grads):
        assert np.isfinite(np.asarray(array, np.float32)).all()


@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_C12_zero_inputs_in_float64(implementation, flag):
    """All inputs 0, T=5 and S=7; also a row all padding."""
    with jax.enable_x64(True), getattr(jax, flag)(True):
        q, k, v = (jnp.zeros((2, n, 1, 3), jnp.float64) for n in (5, 7, 7))
        ids = (jnp.asarray([[1] * 5, [0] * 5]), jnp.asarray([[1] * 7, [0] * 7]))

        def loss(q, k, v):
            desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
            out = te.dot_product_attention(
                q, k, v, desc, policy=te.CAUSAL, implementation=implementation
            )
            return jnp.sum(out), out

        grad = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
        (_, out), grads = grad(q, k, v)
    assert out.dtype == np.float64
    assert not np.asarray(out).any()
    assert not np.asarray(grads[0]).any()
    assert not np.asarray(grads[1]).any()
    np.testing.assert_allclose(np.asarray(grads[2])[0].sum(0), 5, rtol=1e-12)
    assert not np.asarray(grads[2])[1].any()


def test_C13_excluded_for_two_and_three_reasons(implementation):
    """bf16: other id, future and outside the window at once add up to no -Inf."""
    ids = np.asarray([[1] * 10 + [2] * 6 + [0] * 4 + [1] * 4])
    checks.check(
        ids,
        policies=(oracle.window(oracle.CAUSAL, 2, 0),),
        implementation=implementation,
        dtype=jnp.bfloat16,
    )


# ------------------------------------------------------------------------------ dtypes


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_dtypes_of_the_results(implementation, dtype):
    """Output and gradients have the dtype of what they belong to; lse is float32."""
    data = checks.random_data(2, 21, 21, dtype=dtype)
    ids = [checks.pack(9, 4, 6, total=21)] * 2
    got = checks.check(ids, implementation=implementation, data=data)
    for array in (got.out, got.dq, got.dk, got.dv):
        assert array.dtype == dtype
    assert got.lse.dtype == np.float32


def test_float64(implementation):
    """Statistics and sums in float64: far below what float32 could do."""
    with jax.enable_x64(True):
        data = checks.random_data(2, 21, 21, dtype=jnp.float64)
        ids = np.asarray([checks.pack(9, 4, 6, total=21)] * 2)
        got = checks.run(
            data, ids, policies=(oracle.CAUSAL,), implementation=implementation
        )
    mask = oracle.mask(ids, ids, policies=(oracle.CAUSAL,))
    out, lse = oracle.attention(data.q, data.k, data.v, mask, 8**-0.5)
    exact = oracle.gradients(
        *(data.q, data.k, data.v, mask, 8**-0.5, data.dout, data.dlse)
    )
    wants = (out, lse, exact.dq, exact.dk, exact.dv)
    for (name, array), want in zip(got.items(), wants, strict=True):
        assert array.dtype == np.float64
        np.testing.assert_allclose(array, want, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("ids_are", ["jax int64", "numpy int64"])
def test_E12_x64_switched_on(implementation, ids_are):
    """bf16 results keep their dtype and their bits; windows are Python ints."""
    rows = [checks.pack(20, 25, total=49), checks.pack(49)]
    data = checks.random_data(2, 49, 49, N=8, K=8, H=64, V=64, dtype=jnp.bfloat16)

    def run():
        xp = np if ids_are == "numpy int64" else jnp
        ids = xp.asarray(rows)
        pos = xp.asarray([oracle.positions(np.asarray(row)) for row in rows])
        policy_ids = xp.asarray(ids > 1, dtype=ids.dtype)

        def attend(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, te.SequenceDescriptor.from_segment_ids_and_pos(ids, pos)),
                policy=(te.CAUSAL.with_window(7, 0), te.FULL.with_window(3, 2)),
                policy_ids=policy_ids,
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(attend, data.q, data.k, data.v)
        return out, lse, *vjp((data.dout, data.dlse))

    want = run()
    with jax.enable_x64(True):
        got = run()
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


# ---------------------------------------------------------------------- extreme scores


def test_large_scores_do_not_overflow(implementation):
    """The softmax subtracts its maximum; scores of thousands are exact one-hots."""
    data = checks.random_data(1, 8, 8)
    out, lse = te.dot_product_attention(
        *(data.q * 1e3, data.k, data.v),
        implementation=implementation,
        return_lse=True,
    )
    mask = np.ones((1, 8, 8), bool)
    want, want_lse = oracle.attention(data.q * 1e3, data.k, data.v, mask, 8**-0.5)
    np.testing.assert_allclose(out, want, atol=2e-3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-5)


def test_very_negative_scores_are_not_taken_for_masked(implementation):
    """A row whose scores are all -1e30 still averages its keys."""
    q = jnp.full((1, 4, 1, 1), -1e15)
    k = jnp.full((1, 4, 1, 1), 1e15)
    v = jnp.arange(4.0).reshape(1, 4, 1, 1)
    out = te.dot_product_attention(
        *(q, k, v), policy=te.CAUSAL, implementation=implementation
    )
    np.testing.assert_allclose(np.asarray(out).ravel(), [0, 0.5, 1, 1.5], rtol=1e-6)


def test_fp16_scores_beyond_the_range_of_fp16(implementation):
    """q . k = 90,000 does not fit fp16, and need not: scores are fp32."""
    q = jnp.full((1, 3, 1, 64), 37.5, jnp.float16)
    k = q * jnp.asarray([1, 0.5, 1], jnp.float16)[None, :, None, None]
    v = jnp.asarray([2, 100, 4], jnp.float16).reshape(1, 3, 1, 1)
    out = te.dot_product_attention(q, k, v, scale=1.0, implementation=implementation)
    np.testing.assert_array_equal(np.asarray(out).ravel(), [3, 3, 3])


def test_weights_sum_to_one(implementation):
    """Values of 1 give outputs of 1, whatever the scores."""
    data = checks.random_data(2, 100, 100)
    out = te.dot_product_attention(
        *(data.q * 5, data.k, jnp.ones_like(data.v)),
        policy=te.CAUSAL,
        implementation=implementation,
    )
    np.testing.assert_allclose(out, 1, rtol=1e-6)
