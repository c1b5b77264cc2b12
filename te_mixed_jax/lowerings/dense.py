"""Plain jnp with the whole T x S mask: slow, and differentiable to any order."""

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from te_mixed_jax._partitioning import aval_like
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
    (B, T, N, H), (S, K, V) = q.shape, v.shape[1:]
    G = N // max(K, 1)
    out_dtype, dtype = q.dtype, accumulator_dtype(q.dtype)
    lowest = empty_lse(dtype)

    q = q.astype(dtype).reshape(B, T, K, G, H).transpose(0, 2, 3, 1, 4)
    k, v = (x.astype(dtype).swapaxes(1, 2) for x in (k, v))
    (q, q_taint), (k, k_taint) = finite_rows(q * config.scale), finite_rows(k)
    s = jnp.einsum("bkgth,bksh->bkgts", q, k)
    s = s + q_taint[..., None] + k_taint[:, :, None, None]

    seen = jnp.broadcast_to(allowed(ranges)[:, None, None], s.shape)
    s = jnp.where(seen, s, lowest)
    m = jnp.max(s, axis=-1, keepdims=True, initial=lowest)
    p = jnp.where(seen, jnp.exp(s - m), 0)
    total = p.sum(axis=-1, keepdims=True)
    empty = ~seen.any(axis=-1, keepdims=True)
    total = jnp.where(empty, 1, total)
    # Normalised before the product: a NaN row stays a NaN row in the derivative too.
    p = jnp.where(seen, p / total, 0)
    p, seen = (x.reshape(B, K, G * T, S) for x in (p, seen))
    o = _masked_product_p.bind(p, v, seen).reshape(B, K, G, T, V)
    o = o.transpose(0, 3, 1, 2, 4).reshape(B, T, N, V)
    lse = jnp.where(empty, lowest, m + jnp.log(total))
    lse = lse[..., 0].transpose(0, 3, 1, 2).reshape(B, T, N)

    broken = is_broken(ranges.q_lo, ranges.q_hi)[..., None]
    o = jnp.where(broken[..., None], jnp.nan, o)
    return o.astype(out_dtype), jnp.where(broken, jnp.nan, lse)


# `p @ x`, where what is not seen does not count even if x is not finite there. Its
# derivatives are products of the same kind, so a cotangent that is NaN in one sequence
# does not reach the values of another. JAX's own transpose of `@` would let it.
_masked_product_p = Primitive("masked_product")


def _masked_product(p, x, seen):
    """p, seen [*B, T, S] and x [*B, S, V] -> [*B, T, V]."""
    x, taint = finite_rows(x)
    return jnp.where(seen, p + taint[..., None, :], 0) @ x


def _masked_product_batch(operands, axes):
    size = next(
        x.shape[a] for x, a in zip(operands, axes, strict=True) if a is not None
    )
    operands = map(lambda x, a: batching.bdim_at_front(x, a, size), operands, axes)
    return _masked_product_p.bind(*operands), 0


def _masked_product_jvp(primals, tangents):
    (p, x, seen), (dp, dx, _) = primals, map(ad.instantiate_zeros, tangents)
    y = _masked_product_p.bind(p, x, seen)
    dy = _masked_product_p.bind(dp, x, seen) + _masked_product_p.bind(p, dx, seen)
    return y, dy


def _masked_product_transpose(dy, p, x, seen):
    if isinstance(dy, ad.Zero):
        return None, None, None
    if ad.is_undefined_primal(p):
        dp = jnp.einsum("...tv,...sv->...ts", dy, finite_rows(x)[0])
        return jnp.where(seen, dp, 0), None, None
    p, seen = p.swapaxes(-1, -2), seen.swapaxes(-1, -2)
    return None, _masked_product_p.bind(p, dy, seen), None


_masked_product_p.def_impl(jax.jit(_masked_product))
_masked_product_p.def_abstract_eval(
    lambda p, x, seen: aval_like(p, p.shape[:-1] + x.shape[-1:], p.dtype)
)
mlir.register_lowering(
    _masked_product_p, mlir.lower_fun(_masked_product, multiple_results=False)
)
batching.primitive_batchers[_masked_product_p] = _masked_product_batch
ad.primitive_jvps[_masked_product_p] = _masked_product_jvp
ad.primitive_transposes[_masked_product_p] = _masked_product_transpose
