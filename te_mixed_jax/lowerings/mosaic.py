"""One launch for all policies, by this package's own kernels: Hopper GPUs.

`_tiles` says which tiles the kernels walk. `mosaic_fwd`, `mosaic_bwd` and, for head
dims above 128, `mosaic_bwd_large` are the kernels, written in Pallas; `_mosaic` is what
they share. They are imported when a call is lowered: Pallas takes a third of a second.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import Config
from te_mixed_jax.lowerings import xla
from te_mixed_jax.lowerings._tiles import MAX_TOKENS

# Head dims, of queries and of values, that there are kernels for; others are padded.
_HEAD_DIMS = (64, 64), (128, 128), (192, 128), (256, 256)


def supports(q, k, v, config: Config) -> str | None:
    """16-bit floats and head dims up to 256, with any policies."""
    (_, T, _, H), S, V = q.shape, k.shape[1], v.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and `query` is {q.dtype}"
    most = max(_HEAD_DIMS[-1])
    if max(H, V) > most:
        return f"it needs head dims of at most {most}, not {H} and {V}"
    if config.scale < float(jnp.finfo(jnp.float32).tiny):
        # Masked scores are -inf before they are scaled.
        return f"it needs a `scale` above 0, not {config.scale}"
    if max(T, S) > MAX_TOKENS:
        return f"it needs rows of at most {MAX_TOKENS} tokens, not {max(T, S)}"
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """One kernel."""
    if not (q.size and k.size):
        return xla.forward(q, k, v, ranges, config=config)
    from te_mixed_jax.lowerings import mosaic_fwd

    T, V = q.shape[1], v.shape[3]
    for_q, for_v = _head_dims(q, v)
    out, lse = mosaic_fwd.attend(
        *(_padded(q, for_q), _padded(k, for_q), _padded(v, for_v)),
        mosaic_fwd.tiles_of(ranges, for_q),
        scale=config.scale,
    )
    return out[:, :T, :, :V], lse[..., :T].swapaxes(1, 2)


def backward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    out: Float[Array, "B T N V"],
    lse: Float[Array, "B T N"],
    dout: Float[Array, "B T N V"],
    dlse: Float[Array, "B T N"] | None,
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Two kernels, whose sums always run in the same order."""
    if not (q.size and k.size):
        return xla.backward(q, k, v, out, lse, dout, dlse, ranges, config=config)
    from te_mixed_jax.lowerings import mosaic_bwd, mosaic_bwd_large

    (_, T, _, H), S, V = q.shape, k.shape[1], v.shape[3]
    for_q, for_v = _head_dims(q, v)
    kernels = mosaic_bwd_large if for_q > 128 else mosaic_bwd
    tiles = kernels.tiles_of(ranges, for_q)
    q, k = (_padded(x, for_q) for x in (q, k))
    v, out, dout = (_padded(x, for_v) for x in (v, out, dout))
    length = tiles.queries.shape[2]
    dq, statistics = kernels.query_gradients(
        *(q, k, v, out, dout),
        _by_head(lse, length),
        None if dlse is None else _by_head(dlse, length),
        tiles,
        scale=config.scale,
    )
    dk, dv = kernels.key_gradients(q, k, v, dout, statistics, tiles, scale=config.scale)
    return dq[:, :T, :, :H], dk[:, :S, :, :H], dv[:, :S, :, :V]


def _head_dims(q, v) -> tuple[int, int]:
    """Those of the smallest kernel that takes queries and values."""
    H, V = q.shape[3], v.shape[3]
    return next((h, w) for h, w in _HEAD_DIMS if h >= H and w >= V)


def _padded(x: Float[Array, "B n heads D"], D: int) -> Float[Array, "B n_ heads D_"]:
    """To a head dim that there is a kernel for, and a multiple of 8 tokens.

    Tensor copies go by 8 tokens. For most calls nothing is to be done.
    """
    _, n, _, have = x.shape
    return jnp.pad(x, ((0, 0), (0, -n % 8), (0, 0), (0, D - have)))


def _by_head(x: Float[Array, "B T N"], length: int) -> Float[Array, "B N Tp"]:
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, length - x.shape[1])))
