"""The static settings of one attention call, and what every module shares."""

import dataclasses

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike

from te_mixed_jax._policy import MaskPolicy


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All static settings of the primitives: their one parameter.

    Attributes:
        scale: Factor on the scores.
        implementation: A name of `te_mixed_jax.lowerings.LOWERINGS`, or None: the
            best one for the platform, chosen while lowering.
        policies: The policies in use. Key ranges say all about a mask; these say
            beforehand what may stand there.
        max_segments: Sequences that a row holds at most, if known.
        whole_rows: Whether each row is one sequence, known from there being no
            descriptor.
    """

    scale: float
    implementation: str | None
    policies: tuple[MaskPolicy, ...]
    max_segments: int | None
    whole_rows: bool


def accumulator_dtype(dtype: DTypeLike) -> jnp.dtype:
    """Dtype of scores, softmax statistics and sums: fp32, or fp64 for fp64."""
    return jnp.dtype(jnp.float64 if dtype == jnp.float64 else jnp.float32)


def empty_lse(dtype: DTypeLike) -> float:
    """The lse that the primitives give a query without keys: finite on purpose.

    -inf, which users get, would trip `jax_debug_infs` in residuals that they never
    see. No sum of exponentials of finite scores comes near this value.
    """
    return float(jnp.finfo(dtype).min)


def finite_rows(x: Array) -> tuple[Array, Array]:
    """`x` with its rows (last axis) that are not finite set to 0, and their taint.

    A product also sums over pairs that do not see each other, with weight 0, and
    0 * NaN is NaN. So products get finite rows only, and the taint travels through
    the scores, where the mask selects: it reaches those who see the row, nobody else.
    """
    taint = row_taint(x)
    return jnp.where(taint[..., None] == 0, x, 0), taint


def row_taint(x: Array) -> Array:
    """0 for the rows (last axis) of `x` that are finite, NaN for the others."""
    # A product with zeros is the fastest way on a CPU, where `jnp.isfinite` costs as
    # much as an attention product and the largest magnitude may pass over NaN.
    return lax.stop_gradient(x) @ jnp.zeros(x.shape[-1], x.dtype)
