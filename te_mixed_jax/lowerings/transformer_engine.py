"""TransformerEngine's packed fused attention: windows and bottom-right on cuDNN.

As in `cudnn`, one call per mask, where the other sequences have length 0. These calls
go below TransformerEngine's own batching and partitioning rules, to the functions that
these rules call: a `vmap` has been folded before.
"""

import functools
import importlib
import importlib.metadata
import re
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import Config, empty_lse
from te_mixed_jax.lowerings import cudnn
from te_mixed_jax.lowerings._segments import (
    UNFIT,
    Mask,
    Segments,
    find_segments,
    mask_of,
    masks_of,
)

_OLDEST = (2, 20)


class _Call(NamedTuple):
    """What all of TransformerEngine's functions take beside arrays."""

    descriptor: tuple[Array, ...]
    config: Any


def supports(q, k, v, config: Config) -> str | None:
    """What `cudnn` does, and windows and bottom-right; if it is installed."""
    reason = cudnn.shapes_supported(q, k, v)
    if reason is not None:
        return reason
    for policy in config.policies:
        if mask_of(policy, max(q.shape[1], k.shape[1])) is None:
            return f"it has no mask for the policy {policy!r}"
    return _not_installed()


@functools.cache
def _not_installed() -> str | None:
    """Why TransformerEngine cannot be used; does not import it, which needs a GPU."""
    need = 'it needs TransformerEngine 2.20 or newer, `pip install "te_mixed_jax[te]"`'
    try:
        version = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        return f"{need}, which is not installed"
    numbers = tuple(int(x) for x in re.findall(r"\d+", version)[:2])
    return None if numbers >= _OLDEST else f"{need}, not {version}"


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """One call per mask, and for each query token the result of its sequence's."""
    segments, calls = _calls(q, k, ranges, config)
    outs, lses = zip(*(_softmax(q, k, v, call) for call in calls), strict=True)
    codes = segments.q_mask[..., None]
    lse = jnp.where(codes == UNFIT, jnp.nan, empty_lse(jnp.float32))
    for code, x in enumerate(lses):
        lse = jnp.where(codes == code, x, lse)
    return cudnn.choose(segments.q_mask, outs), lse


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
    """One call per mask, and for each token the gradients of its sequence's."""
    segments, calls = _calls(q, k, ranges, config)
    grads = [
        cudnn.gradients(
            *(q, k, v, dout, dlse, config.scale),
            softmax=functools.partial(_softmax, call=call),
            softmax_backward=functools.partial(
                _softmax_backward, lse=lse, out=out, call=call
            ),
        )
        for call in calls
    ]
    codes = segments.q_mask, segments.kv_mask, segments.kv_mask
    dq, dk, dv = map(cudnn.choose, codes, zip(*grads, strict=True))
    return dq, dk, dv


def _calls(q, k, ranges: KeyRanges, config: Config) -> tuple[Segments, list[_Call]]:
    longest = max(q.shape[1], k.shape[1])
    masks = masks_of(config.policies, longest)
    slots = cudnn.slots(config, q.shape[1])
    segments = find_segments(ranges, masks, slots)
    return segments, [
        _Call(_descriptor(segments, i), _config(mask, longest, slots, config.scale))
        for i, mask in enumerate(masks)
    ]


def _descriptor(segments: Segments, index: int) -> tuple[Array, ...]:
    """Lengths and offsets of the sequences with a mask; -1 and 0 in all other slots."""
    q_len, kv_len = segments.lengths(index)

    def offsets(start, length):
        start = jnp.where(length > 0, start, -1)
        return jnp.pad(start, ((0, 0), (0, 1)), constant_values=-1)

    unused = [jnp.zeros(0, jnp.int32)] * 4  # ids and positions
    return (
        *(q_len, kv_len),
        offsets(segments.q_start, q_len),
        offsets(segments.kv_start, kv_len),
        *unused,
    )


def _config(mask: Mask, longest: int, slots: int, scale: float) -> Any:
    te = _module("attention")
    kind = te.AttnMaskType.PADDING_MASK
    window = -1, -1
    if mask.causal:
        kind = te.AttnMaskType.PADDING_CAUSAL_MASK
        if mask.bottom_right:
            kind = te.AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK
        if mask.left >= 0:
            window = mask.left, 0
    elif not mask.whole:  # it has windows with two ends only
        window = tuple(longest if x < 0 else x for x in (mask.left, mask.right))
    return _module("cpp_extensions.attention")._FusedAttnConfig(
        attn_bias_type=te.AttnBiasType.NO_BIAS,
        attn_mask_type=kind,
        softmax_type=te.AttnSoftmaxType.VANILLA_SOFTMAX,
        qkv_layout=te.QKVLayout.THD_THD_THD,
        scaling_factor=scale,
        dropout_probability=0.0,
        is_training=True,
        max_segments_per_seq=slots,
        window_size=window,
        bottom_right_diagonal=kind.is_bottom_right(),
        context_parallel_load_balanced=False,
        cp_axis="",
        cp_striped_window_size=None,
        stripe_size=None,
    )


def _module(name: str) -> Any:
    """A module of TransformerEngine, whose import needs the GPU's driver."""
    try:
        return importlib.import_module(f"transformer_engine.jax.{name}")
    except (ImportError, OSError) as error:
        raise NotImplementedError(
            '`implementation="te"` cannot import TransformerEngine, which needs an '
            f"NVIDIA driver also to trace: {error}"
        ) from error


def _softmax(q, k, v, call: _Call) -> tuple[Array, Array]:
    """Output [B, T, N, V] and lse [B, T, N] of one call."""
    primitive = _module("cpp_extensions.attention").FusedAttnFwdPrimitive
    no_bias, no_sink = jnp.zeros(0, q.dtype), jnp.zeros(0, jnp.float32)
    seed = jnp.zeros(2, jnp.uint32)
    out, lse, *_ = primitive.impl(
        *(q, k, v, no_bias, no_sink, seed, *call.descriptor), config=call.config
    )
    return out, lse[..., 0]


def _softmax_backward(q, k, v, dout, *, lse, out, call: _Call) -> tuple[Array, ...]:
    """dq, dk and dv of one call."""
    primitive = _module("cpp_extensions.attention").FusedAttnBwdPrimitive
    no_bias, no_sink = jnp.zeros(0, q.dtype), jnp.zeros(0, jnp.float32)
    seeds = jnp.zeros((2, 4), jnp.uint32)
    dq, dk, dv, *_ = primitive.impl(
        *(q, k, v, no_bias, no_sink, lse[..., None], seeds, out, dout),
        *call.descriptor,
        config=call.config,
    )
    return dq, dk, dv
