"""Heads: grouped, one for all, and values of another size."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te


def test_E23_repeat_do_not_tile(implementation):
    """Query head n reads key/value head n // (N / K)."""
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.normal(size=(1, 5, 4, 8)).astype(np.float32))
    k = jnp.asarray(rng.normal(size=(1, 7, 2, 8)).astype(np.float32))
    v = jnp.broadcast_to(jnp.arange(2.0)[:, None], (1, 7, 2, 3))
    out = te.dot_product_attention(q, k, v, implementation=implementation)
    want = np.broadcast_to(np.array([0, 0, 1, 1])[:, None], (1, 5, 4, 3))
    np.testing.assert_allclose(out, want, atol=1e-6)


@pytest.mark.parametrize(
    ("N", "K", "H", "V"),
    [(6, 1, 3, 16), (6, 3, 48, 8), pytest.param(3, 3, 1, 1, marks=pytest.mark.slow)],
    ids=lambda n: str(n),
)
def test_E23_numbers_and_sizes_of_heads(implementation, N, K, H, V):
    """dk and dv sum over the group; values may be narrower or wider than keys."""
    ids = [checks.pack(5, 3, total=9), checks.pack(2, 7)]
    sizes = {"N": N, "K": K, "H": H, "V": V}
    got = checks.check(
        ids, policies=(oracle.CAUSAL,), implementation=implementation, **sizes
    )
    assert got.out.shape == (2, 9, N, V)
    assert got.dk.shape == (2, 9, K, H)
    assert got.dv.shape == (2, 9, K, V)


@pytest.mark.parametrize("scale", [0.0, -0.7])
def test_scale(implementation, scale):
    """Any number, 0 and negative ones too; scores are scaled once."""
    ids = [checks.pack(5, 3, total=9), checks.pack(2, 7)]
    checks.check(ids, implementation=implementation, scale=scale)


def test_default_scale_is_one_over_the_root_of_the_head_dim(implementation, eager):
    """Not of the value head dim."""
    data = checks.random_data(2, 9, 9, H=16, V=4)
    got, want = (
        te.dot_product_attention(
            data.q, data.k, data.v, scale=scale, implementation=implementation
        )
        for scale in (None, 0.25)
    )
    np.testing.assert_array_equal(got, want)


def test_E27_a_value_array_that_is_a_slice(implementation):
    """v cut from a fused projection equals a copied v, gradient included."""
    rng = np.random.default_rng(0)
    fused = jnp.asarray(rng.normal(size=(2, 9, 3, 4, 8)).astype(np.float32))
    weight = jnp.asarray(rng.normal(size=(2, 9, 4, 8)).astype(np.float32))
    q, k = (jnp.asarray(rng.normal(size=(2, 9, 4, 8)).astype(np.float32)),) * 2
    ids = np.asarray([checks.pack(5, 3, total=9), checks.pack(2, 7)])

    def loss(v):
        out = te.dot_product_attention(
            *(q, k, v),
            te.SequenceDescriptor.from_segment_ids_and_pos(ids),
            implementation=implementation,
        )
        return jnp.sum(out * weight)

    sliced = jax.jit(jax.value_and_grad(lambda fused: loss(fused[:, :, 2])))
    value, grad = sliced(fused)
    want, dv = jax.jit(jax.value_and_grad(loss))(jnp.array(fused[:, :, 2], copy=True))
    np.testing.assert_allclose(value, want, rtol=1e-5)
    np.testing.assert_allclose(grad[:, :, 2], dv, rtol=1e-5, atol=1e-6)
    assert not np.asarray(grad)[:, :, :2].any()
