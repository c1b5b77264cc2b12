"""How an attention call is computed: one module per way.

A lowering is a module with three functions, all on rank-4 arrays with one batch axis:

    supports(q, k, v, config) -> str | None
        Why this call cannot run here, or None; from shapes, dtypes and config alone,
        and, for "te", from what is installed.
    forward(q, k, v, ranges, *, config) -> (out, lse)
        q [B, T, N, H], k [B, S, K, H], v [B, S, K, V] -> out [B, T, N, V] in q's
        dtype, lse [B, T, N] in the accumulator dtype, `empty_lse` where a query sees
        nothing. `ranges` is a `KeyRanges`; queries with `is_broken` give NaN.
    backward(q, k, v, out, lse, dout, dlse, ranges, *, config) -> (dq, dk, dv)
        dlse [B, T, N] may be None: zero.

`dense` has no `backward`: it is not behind the primitives, JAX differentiates it.
"""

import jax

from te_mixed_jax._types import Config
from te_mixed_jax.lowerings import cudnn, dense, transformer_engine, xla

LOWERINGS = {
    "cudnn": cudnn,
    "te": transformer_engine,
    "xla": xla,
    "dense": dense,
}


def lowering_for(platform: str | None, q, k, v, config: Config):
    """The module that computes a call on a platform; None: any but "cuda".

    Raises:
        NotImplementedError: if the implementation asked for does not run there.
    """
    name = config.implementation
    if platform != "cuda" and name in ("cudnn", "te"):
        raise NotImplementedError(
            f'`implementation="{name}"` needs an NVIDIA GPU, and this call is compiled '
            'for another platform. `implementation="xla"` would run.'
        )
    if name in ("cudnn", "te"):
        reason = LOWERINGS[name].supports(q, k, v, config)
        reason = reason or cudnn.size_supported(q, k)
        if reason is not None:
            raise NotImplementedError(cannot_run(name, reason))
    if name is not None:
        return LOWERINGS[name]
    if platform != "cuda" or not _may_be_hopper():
        return xla
    if cudnn.supports(q, k, v, config) or cudnn.size_supported(q, k):
        return xla
    return cudnn


def cannot_run(name: str, reason: str) -> str:
    """The text of the error where a named implementation cannot do a call."""
    return (
        f'`implementation="{name}"` cannot run this call: {reason}. '
        '`implementation="xla"` would.'
    )


def _may_be_hopper() -> bool:
    """Whether the GPU here is Hopper or newer; also if there is none, for export."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return True
    return float(getattr(device, "compute_capability", 0)) >= 9
