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

import re

import jax

from te_mixed_jax._types import Config
from te_mixed_jax.lowerings import cudnn, dense, mosaic, transformer_engine, xla

LOWERINGS = {
    "mosaic": mosaic,
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
    if name is None:
        return _best_for(platform, q, k, v, config)
    reason = why_not_on(platform, name, q, k, v, config)
    if reason is not None:
        raise NotImplementedError(cannot_run(name, reason))
    return LOWERINGS[name]


def why_not_on(platform: str | None, name: str, q, k, v, config: Config) -> str | None:
    """Why an implementation cannot compute a call on a platform, or None."""
    reason = LOWERINGS[name].supports(q, k, v, config)
    if reason is not None or name not in _GPU_ONLY:
        return reason
    if platform != "cuda":
        return "it needs an NVIDIA GPU, and this call is compiled for another platform"
    return _GPU_ONLY[name](q, k)


def _best_for(platform: str | None, q, k, v, config: Config):
    """The module for a call that names none: see docs/implementations.md."""
    if platform != "cuda":
        return xla
    capability, _ = _gpu()
    if capability is not None and capability < 9:
        return xla
    # Without a GPU the program is made for others, which may be newer than Hopper.
    if capability is None:
        names = ("cudnn",)
    elif cudnn.supports(q, k, v, config) is None and cudnn.is_whole(q, k, config):
        names = "cudnn", "mosaic"
    else:
        names = "mosaic", "cudnn"
    for name in names:
        if why_not_on(platform, name, q, k, v, config) is None:
            return LOWERINGS[name]
    return xla


def cannot_run(name: str, reason: str) -> str:
    """The text of the error where a named implementation cannot do a call."""
    return (
        f'`implementation="{name}"` cannot run this call: {reason}. '
        '`implementation="xla"` would.'
    )


def _unfit_for_mosaic(q, k) -> str | None:
    """Why the GPU here cannot run the kernels, if there is one."""
    del q, k
    capability, cuda = _gpu()
    if capability not in (None, 9.0):
        return f"it needs a Hopper GPU, of compute capability 9.0, not {capability}"
    # jax.experimental.pallas.ops.gpu.attention_mgpu refuses them for the same reason.
    if cuda is not None and 12080 <= cuda < 12091:
        return f"the compiler of CUDA {cuda} gets masks wrong; it needs 12.9.1 or newer"
    return None


def _unfit_for_cudnn(q, k) -> str | None:
    """Why the GPU here cannot run cuDNN's packed attention, if there is one."""
    capability, _ = _gpu()
    if capability is not None and capability < 9:
        return (
            "it needs a Hopper GPU or a newer one, of compute capability 9.0 or more, "
            f"not {capability}"
        )
    return cudnn.size_supported(q, k)


# What runs on GPUs only, and why not what one device computes, a `vmap` folded in.
_GPU_ONLY = {
    "mosaic": _unfit_for_mosaic,
    "cudnn": _unfit_for_cudnn,
    "te": _unfit_for_cudnn,
}


def _gpu() -> tuple[float | None, int | None]:
    """Compute capability and CUDA version of the GPU here, if there is one."""
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return None, None
    version = re.search(r"cuda (\d+)", device.client.platform_version)
    return float(device.compute_capability), version and int(version[1])
