"""Derivatives: first ones everywhere, higher ones and forward mode with "dense"."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import checks
import oracle
import te_mixed_jax as te

POLICIES = (oracle.FULL, oracle.CAUSAL, oracle.BOTTOM_RIGHT)
NAMES_DENSE = r'implementation="dense"'


def attend(implementation, q, k, v, ids=None, policy=te.CAUSAL):
    desc = None
    if ids is not None:
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
    return te.dot_product_attention(
        q, k, v, desc, policy=policy, implementation=implementation
    )


def arrays(*shapes, dtype: Any = np.float32):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape).astype(dtype)) for shape in shapes]


def replaced(primals, argument, x):
    q, k, v = (x if i == argument else old for i, old in enumerate(primals))
    return q, k, v


def rows():
    rng = np.random.default_rng(0)
    return {
        "q_ids": rng.integers(-1, 4, (2, 25)),
        "kv_ids": rng.integers(-1, 4, (2, 28)),
        "policies": POLICIES,
        "policy_ids": rng.integers(0, 3, (2, 25)),
    }


# ------------------------------------------------------------------------- the lse


def test_gradients_of_lse_alone(implementation):
    """Cotangent of the output 0, of the lse random."""
    data = checks.random_data(2, 25, 28)
    zero = {"q": data.q, "k": data.k, "v": data.v, "dlse": data.dlse}
    data = checks.Data(dout=jnp.zeros_like(data.dout), **zero)
    got = checks.check(**rows(), implementation=implementation, data=data)
    assert not got.dv.any()


def test_gradients_through_lse_and_without_it(eager):
    """An lse that is returned and not used changes no gradient."""
    row = rows()
    data = checks.random_data(2, 25, 28)
    desc = te.SequenceDescriptor.from_segment_ids_and_pos((row["q_ids"], row["kv_ids"]))

    def loss(q, k, v, return_lse):
        out = te.dot_product_attention(
            *(q, k, v, desc),
            policy=te.CAUSAL,
            implementation="xla",
            return_lse=return_lse,
        )
        return jnp.sum((out[0] if return_lse else out) * data.dout)

    grads = [
        jax.grad(functools.partial(loss, return_lse=flag), (0, 1, 2))(
            data.q, data.k, data.v
        )
        for flag in (False, True)
    ]
    for a, b in zip(*grads, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)


def test_gradient_of_the_lse_when_the_output_is_not_used(implementation, eager):
    """The cotangent of the output is a symbolic zero."""
    data = checks.random_data(2, 25, 28)

    def total(q, k, v):
        _, lse = te.dot_product_attention(
            q, k, v, implementation=implementation, return_lse=True
        )
        return jnp.sum(lse * data.dlse)

    dq, dk, dv = jax.grad(total, (0, 1, 2))(data.q, data.k, data.v)
    mask = np.ones((2, 25, 28), bool)
    zero = np.zeros_like(data.dout)
    want = oracle.gradients(data.q, data.k, data.v, mask, 8**-0.5, zero, data.dlse)
    np.testing.assert_allclose(dq, want.dq, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(dk, want.dk, rtol=1e-4, atol=1e-5)
    assert not np.asarray(dv).any()


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_gradient_of_one_argument(implementation, eager, argument):
    """Differentiating q, k or v alone gives its part of the whole gradient."""
    data = checks.random_data(2, 25, 28)

    def loss(q, k, v):
        return jnp.sum(attend(implementation, q, k, v) * data.dout)

    grads = jax.grad(loss, (0, 1, 2))(data.q, data.k, data.v)
    alone = jax.grad(loss, argument)(data.q, data.k, data.v)
    np.testing.assert_allclose(alone, grads[argument], rtol=1e-6, atol=1e-6)


def test_check_grads_in_reverse_mode(implementation):
    """Finite differences in float64."""
    with jax.enable_x64(True):
        q, k, v = arrays((1, 6, 2, 3), (1, 6, 1, 3), (1, 6, 1, 2), dtype=np.float64)
        f = functools.partial(
            attend, implementation, ids=np.array([[1, 1, 2, 1, 2, 0]])
        )
        check_grads(f, (q, k, v), order=1, modes=["rev"], rtol=1e-6)


def test_traced_scale_on_the_query(implementation):
    """E14: a learnt scale goes on the query, with the right derivative."""
    data = checks.random_data(1, 9, 9)

    def loss(parameter):
        out = te.dot_product_attention(
            *(data.q * jnp.exp(parameter), data.k, data.v),
            scale=1.0,
            implementation=implementation,
        )
        return jnp.sum(out * data.dout)

    got = jax.jit(jax.grad(loss))(0.3)
    mask, scale = np.ones((1, 9, 9), bool), np.exp(0.3)
    want = oracle.gradients(data.q, data.k, data.v, mask, scale, data.dout)
    np.testing.assert_allclose(got, np.sum(want.dq * data.q), rtol=1e-4)


# ------------------------------------------------------------------ repeatability


def test_E25_repeatable_gradients(implementation):
    """Ten runs bitwise equal, grouped heads and packed rows included."""
    data = checks.random_data(2, 256, 256, N=4, K=2)
    ids = np.asarray([checks.pack(100, 90, 60, total=256), checks.pack(256)])
    arguments = {
        "policies": POLICIES,
        "policy_ids": ids % 3,
        "implementation": implementation,
    }
    first = checks.run(data, ids, **arguments)
    for _ in range(9):
        checks.assert_bitwise(checks.run(data, ids, **arguments), first, "repeated")


# ------------------------------------------------------- E10, E11: higher derivatives


def _dense_or_error(f, implementation, *arguments):
    """`f` of the implementation; "xla" must name the one that can do it."""
    if implementation == "dense":
        return f(*arguments)
    with pytest.raises((NotImplementedError, TypeError), match=NAMES_DENSE):
        f(*arguments)
    return None


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize("mode", ["jvp", "jacfwd", "linearize"])
def test_E10_forward_mode(implementation, mode, jit):
    """Agrees with the reverse-mode derivative, or names implementation="dense"."""
    q, k, v, tangent = arrays((1, 6, 2, 3), *[(1, 6, 1, 3)] * 2, (1, 6, 2, 3))
    f = functools.partial(attend, implementation, k=k, v=v)

    def run(q):
        if mode == "jvp":
            return jax.jvp(f, (q,), (tangent,))[1]
        if mode == "jacfwd":
            return jnp.tensordot(jax.jacfwd(f)(q), tangent, 4)
        return jax.linearize(f, q)[1](tangent)

    got = _dense_or_error(jax.jit(run) if jit else run, implementation, q)
    if got is not None:
        mask = oracle.mask([[1] * 6], [[1] * 6], policies=(oracle.CAUSAL,))
        step = 1e-6
        ahead, behind = (
            oracle.attention(
                np.float64(q) + sign * step * np.float64(tangent),
                *(k, v, mask, 3**-0.5),
            )[0]
            for sign in (1, -1)
        )
        want = (ahead - behind) / (2 * step)
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_E11_gradient_of_the_squared_gradient_norm(implementation):
    q, k, v = arrays((1, 6, 2, 3), (1, 6, 1, 3), (1, 6, 1, 3), dtype=np.float32)
    weight = arrays((1, 6, 2, 3))[0]

    def norm(q):
        loss = lambda q: jnp.sum(attend(implementation, q, k, v) * weight)  # noqa: E731
        return jnp.sum(jax.grad(loss)(q) ** 2)

    got = _dense_or_error(jax.grad(norm), implementation, q)
    if got is not None:
        mask = oracle.mask([[1] * 6], [[1] * 6], policies=(oracle.CAUSAL,))

        def exact(q):
            assert q.dtype == np.float64
            grads = oracle.gradients(q, k, v, mask, 3**-0.5, weight)
            return np.sum(grads.dq**2)

        base, want = np.float64(q), np.zeros(q.shape)
        for index in np.ndindex(q.shape):
            step = np.zeros(q.shape)
            step[index] = 1e-5
            want[index] = (exact(base + step) - exact(base - step)) / 2e-5
        assert np.abs(want).max() > 0.01
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("argument", [0, 1, 2])
def test_E11_hessian(implementation, argument):
    """`jax.hessian` on (1, 8, 1, 4): finite differences of the oracle's gradient."""
    primals = arrays(*[(1, 8, 1, 4)] * 3)
    weight = arrays((1, 8, 1, 4))[0]
    ids = np.asarray([[1, 1, 2, 1, 2, 2, 0, 1]])

    def loss(x):
        out = attend(implementation, *replaced(primals, argument, x), ids=ids)
        return jnp.sum(jnp.sin(out) * weight)

    got = _dense_or_error(jax.hessian(loss), implementation, primals[argument])
    if got is None:
        return
    mask = oracle.mask(ids, ids, policies=(oracle.CAUSAL,))

    def exact(x):
        q, k, v = replaced(primals, argument, x)
        out, _ = oracle.attention(q, k, v, mask, 0.5)
        dout = np.cos(out) * np.asarray(weight)
        grads = oracle.gradients(q, k, v, mask, 0.5, dout)
        return (grads.dq, grads.dk, grads.dv)[argument]

    base = np.float64(primals[argument])
    for index in np.ndindex(base.shape):
        step = np.zeros(base.shape)
        step[index] = 1e-5
        want = (exact(base + step) - exact(base - step)) / 2e-5
        np.testing.assert_allclose(got[(..., *index)], want, rtol=1e-3, atol=2e-5)


@pytest.mark.parametrize("order", ["forward over reverse", "reverse over forward"])
def test_E11_hessian_vector_products(implementation, order):
    q, k, v, weight = arrays(*[(1, 8, 1, 4)] * 4)
    tangent = jnp.flip(weight)

    def loss(q):
        return jnp.sum(attend(implementation, q, k, v) * weight)

    def product(q):
        if order == "forward over reverse":
            return jax.jvp(jax.grad(loss), (q,), (tangent,))[1]
        return jax.grad(lambda q: jax.jvp(loss, (q,), (tangent,))[1])(q)

    got = _dense_or_error(product, implementation, q)
    if got is not None:
        mask = oracle.mask([[1] * 8], [[1] * 8], policies=(oracle.CAUSAL,))
        ahead, behind = (
            oracle.gradients(
                np.float64(q) + sign * 1e-5 * np.float64(tangent),
                *(k, v, mask, 0.5, weight),
            ).dq
            for sign in (1, -1)
        )
        want = (ahead - behind) / 2e-5
        np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5)


def test_dense_to_second_order():
    """check_grads in both modes on a packed row with an empty query."""
    with jax.enable_x64(True):
        q, k, v = arrays((1, 5, 1, 2), (1, 5, 1, 2), (1, 5, 1, 2), dtype=np.float64)
        f = functools.partial(attend, "dense", ids=np.array([[1, 0, 1, 2, 2]]))
        check_grads(f, (q, k, v), order=2, modes=["fwd", "rev"], rtol=1e-5)


def test_dense_second_derivatives_of_empty_queries_are_zero():
    """No NaN from a softmax over nothing, in forward over reverse either."""
    q, k, v = arrays(*[(1, 4, 1, 2)] * 3)
    ids = (np.asarray([[1, 0, 2, 1]]), np.asarray([[1, 1, 0, 1]]))

    def loss(q):
        return jnp.sum(attend("dense", q, k, v, ids) ** 2)

    hessian = np.asarray(jax.hessian(loss)(q))
    assert np.isfinite(hessian).all()
    assert not hessian[:, [1, 2]].any()
    assert hessian[:, [0, 3]].any()
