"""How an attention call is computed: one module per way.

A lowering is a module with three functions, all on rank-4 arrays with one batch axis:

    supports(q, k, v, config) -> str | None
        Why this call cannot run here, or None; from shapes, dtypes and config alone.
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
    if name is not None:
        return LOWERINGS[name]
    if platform == "cuda" and _may_be_hopper() and not cudnn.supports(q, k, v, config):
        return cudnn
    return xla


def _may_be_hopper() -> bool:
    """Whether the GPU here is Hopper or newer; also if there is none, for export."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return True
    return float(getattr(device, "compute_capability", 0)) >= 9
