"""Plain jnp with the whole T x S mask: slow, and differentiable to any order."""

import jax.numpy as jnp
from jaxtyping import Array, Float

from te_mixed_jax._ranges import KeyRanges, allowed, is_broken
from te_mixed_jax._types import Config, accumulator_dtype, empty_lse, finite_rows


def supports(q, k, v, config: Config) -> str | None:
    """Everything."""
    del q, k, v, config
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Scores, mask, softmax, product; O(T*S) memory."""
    B, T, N, H = q.shape
    K, V = v.shape[2:]
    dtype = accumulator_dtype(q.dtype)
    lowest = empty_lse(dtype)

    (q0, q_taint), (k0, k_taint), (v0, v_taint) = (
        finite_rows(x.astype(dtype)) for x in (q, k, v)
    )
    q0 = q0.reshape(B, T, K, N // max(K, 1), H) * config.scale
    q_taint = q_taint.reshape(B, T, K, N // max(K, 1)).transpose(0, 2, 3, 1)
    kv_taint = (k_taint + v_taint).transpose(0, 2, 1)
    s = jnp.einsum("btkgh,bskh->bkgts", q0, k0)
    s = s + q_taint[..., None] + kv_taint[:, :, None, None]

    seen = allowed(ranges)[:, None, None]
    s = jnp.where(seen, s, lowest)
    m = jnp.max(s, axis=-1, keepdims=True, initial=lowest)
    p = jnp.where(seen, jnp.exp(s - m), 0)
    total = p.sum(axis=-1, keepdims=True)
    empty = ~seen.any(axis=-1, keepdims=True)
    total = jnp.where(empty, 1, total)
    # Normalised before the product: a NaN row stays a NaN row in the derivative too.
    p = jnp.where(seen, p / total, 0)
    o = jnp.einsum("bkgts,bskv->btkgv", p, v0).reshape(B, T, N, V)
    lse = jnp.where(empty, lowest, m + jnp.log(total))
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(B, T, N)

    # The select also keeps cotangents of queries without keys out of the products.
    o = jnp.where(empty[:, 0, 0, :, :, None], 0, o)
    broken = is_broken(ranges.q_lo, ranges.q_hi)[..., None]
    o = jnp.where(broken[..., None], jnp.nan, o)
    return o.astype(q.dtype), jnp.where(broken, jnp.nan, lse)
