"""cuDNN's fused attention, by the calls that XLA has for it: Hopper GPUs.

Such a call has one mask for all its sequences. So there is one call for each mask that
the policies need, over the same q, k and v, where the sequences with other masks have
length 0; nothing is gathered. cuDNN writes the tokens of a call's own sequences only,
and NaN or anything else may stand in the others, so results are chosen, never added.
"""

import functools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import Config, empty_lse
from te_mixed_jax.lowerings import xla
from te_mixed_jax.lowerings._segments import (
    UNFIT,
    Mask,
    Segments,
    find_segments,
    mask_of,
    masks_of,
)

# Segments a row that cuDNN is asked to be ready for, where the descriptor says nothing.
# Its time grows with them, also with those that are empty.
_MAX_SEGMENTS = 64


def supports(q, k, v, config: Config) -> str | None:
    """16-bit floats, one head dim, and policies that are masks of cuDNN."""
    reason = shapes_supported(q, k, v)
    if reason is not None:
        return reason
    for policy in config.policies:
        mask = mask_of(policy, max(q.shape[1], k.shape[1]))
        if mask is None or mask.right > 0 or (mask.right < 0 <= mask.left):
            return f"it has no mask for the policy {policy!r}"
        if mask.bottom_right and q.shape[1] != k.shape[1]:
            return "its causal masks start at the first query and key, not at the last"
    return None


def shapes_supported(q, k, v) -> str | None:
    """Why cuDNN cannot compute attention of these arrays, whoever calls it."""
    H, V = q.shape[3], v.shape[3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"it computes in bfloat16 or float16, and `query` is {q.dtype}"
    if V != H:
        return f"it needs one head dim, and `value` has {V} where `query` has {H}"
    if H % 8 or H > 256:
        return f"it needs a head dim that is a multiple of 8, at most 256, not {H}"
    if not (q.size and k.size):
        return "it needs arrays that are not empty"
    return None


def size_supported(q, k) -> str | None:
    """Why these arrays are too large: what one device computes, a `vmap` folded in."""
    if max(q.size, k.size) >= 2**31:
        return "it needs arrays of fewer than 2**31 elements on each device"
    return None


def slots(config: Config, T: int) -> int:
    """Segments that a row of T tokens has room for; with 1, XLA would not pack."""
    return max(2, min(config.max_segments or _MAX_SEGMENTS, T))


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """One call per mask, and for each query token the result of its sequence's."""
    masks = _masks(q, k, config)
    if is_whole(q, k, config):
        out, lse = _softmax(q, k, v, masks[0], None, config.scale)
        return out, lse.swapaxes(1, 2)

    def fused(segments, q, k, v):
        calls = [_lengths_and_offsets(segments, i, q, k) for i in range(len(masks))]
        outs, lses = zip(
            *(
                _softmax(q, k, v, mask, call, config.scale)
                for mask, call in zip(masks, calls, strict=True)
            ),
            strict=True,
        )
        return choose(segments.q_mask, outs), _lse_by_token(lses, segments)

    return _if_fit(fused, xla.forward, ranges, masks, config, q, k, v)


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
    masks = _masks(q, k, config)
    if is_whole(q, k, config):
        lse = lse.swapaxes(1, 2)
        return _gradients(q, k, v, out, lse, dout, dlse, masks[0], None, config.scale)

    def fused(segments, q, k, v, out, lse, dout, dlse):
        lse = _lse_by_segment(lse, segments)
        calls = [_lengths_and_offsets(segments, i, q, k) for i in range(len(masks))]
        dqs, dks, dvs = zip(
            *(
                _gradients(q, k, v, out, lse, dout, dlse, mask, call, config.scale)
                for mask, call in zip(masks, calls, strict=True)
            ),
            strict=True,
        )
        dk, dv = (choose(segments.kv_mask, x) for x in (dks, dvs))
        return choose(segments.q_mask, dqs), dk, dv

    arrays = q, k, v, out, lse, dout, dlse
    return _if_fit(fused, xla.backward, ranges, masks, config, *arrays)


def _masks(q, k, config: Config) -> tuple[Mask, ...]:
    """The masks, each once, that the policies need.

    Where a sequence has as many queries as keys, bottom-right is nothing special;
    where it does not, its key ranges tell.
    """
    masks = masks_of(config.policies, max(q.shape[1], k.shape[1]))
    return tuple(dict.fromkeys(Mask(m.left, m.right) for m in masks))


def is_whole(q, k, config: Config) -> bool:
    """Whether each row is one sequence, of which every query sees a key.

    Only of calls that are supported.
    """
    if not config.whole_rows:
        return False
    T, S, mask = q.shape[1], k.shape[1], _masks(q, k, config)[0]
    return not 0 <= mask.left < T - S


def _if_fit(fused, otherwise, ranges: KeyRanges, masks, config: Config, *arrays):
    """`fused(segments, *arrays)`; unless asked for by name only where that is exact.

    Elsewhere `otherwise(*arrays, ranges, config=config)`.
    """
    room = slots(config, ranges.q_ids.shape[1])
    segments = find_segments(ranges, masks, room)
    if config.implementation is not None:
        return fused(segments, *arrays)

    def unfused(_segments, *arrays):
        return otherwise(*arrays, ranges, config=config)

    return lax.cond(segments.fit, fused, unfused, segments, *arrays)


def choose(codes: Int[Array, "B tokens"], results: Sequence[Array]) -> Array:
    """For each token the result of its call; 0 where there is none, NaN if unfit.

    results: one [B, tokens, heads, H] per call, of a 16-bit dtype.
    """
    # One pass over memory, at its speed. A result's rows for other calls' tokens are
    # not read but for the first one: the index says so. Elements go in pairs, since
    # XLA gathers 32 bits as fast as 16.
    B, tokens, heads, H = results[0].shape
    dtype = results[0].dtype
    codes = codes.reshape(-1)
    index = jnp.arange(codes.size, dtype=jnp.int32)
    nan = lax.bitcast_convert_type(jnp.full((2,), jnp.nan, dtype), jnp.uint32)
    chosen = jnp.where(codes == UNFIT, nan, 0)[:, None]
    for code, x in enumerate(results):
        here = codes == code
        x = lax.bitcast_convert_type(x.reshape(index.size, -1, 2), jnp.uint32)
        x = x.at[jnp.where(here, index, 0)].get(mode="promise_in_bounds")
        chosen = jnp.where(here[:, None], x, chosen)
    return lax.bitcast_convert_type(chosen, dtype).reshape(B, tokens, heads, H)


def _lse_by_token(lses: Sequence[Array], segments: Segments):
    """From a row for each segment, [B * M, N, T] per call, to [B, T, N]."""
    B, T = segments.q_slot.shape
    N = lses[0].shape[1]
    start = jnp.take_along_axis(segments.q_start, segments.q_slot, axis=1)
    index = jnp.clip(jnp.arange(T, dtype=jnp.int32) - start, 0, T - 1)
    rows, heads = jnp.arange(B)[:, None, None], jnp.arange(N)[:, None]
    at = rows, segments.q_slot[:, None], heads, index[:, None]
    codes = segments.q_mask[:, None]
    chosen = jnp.where(codes == UNFIT, jnp.nan, empty_lse(jnp.float32))
    for code, lse in enumerate(lses):
        lse = lse.reshape(B, -1, N, T).at[at].get(mode="promise_in_bounds")
        chosen = jnp.where(codes == code, lse, chosen)
    return chosen.swapaxes(1, 2)


def _lse_by_segment(lse: Float[Array, "B T N"], segments: Segments):
    """The way back: [B * M, N, T], arbitrary past the end of a segment."""
    B, T, N = lse.shape
    index = segments.q_start[..., None] + jnp.arange(T, dtype=jnp.int32)
    index = jnp.minimum(index, T - 1)[:, :, None]
    lse = lse.swapaxes(1, 2)[:, None]
    lse = jnp.take_along_axis(lse, index, axis=3, mode="promise_in_bounds")
    return lse.reshape(-1, N, T)


def _lengths_and_offsets(segments: Segments, index: int, q, k) -> tuple[Array, ...]:
    """Query and key lengths, then offsets, of the sequences with a mask, for XLA.

    Offsets count elements from the start of the array. XLA reads both as flat lists
    that pair up by index, so the one offset a row that its shape has more stands last.
    """

    def offsets(start, length, x):
        B, tokens, heads, H = x.shape
        row = jnp.arange(B, dtype=jnp.int32)[:, None]
        at = jnp.where(length > 0, row * tokens + start, B * tokens)
        return jnp.pad(at.reshape(-1), (0, B), constant_values=B * tokens).reshape(
            B, -1
        ) * (heads * H)

    q_len, kv_len = segments.lengths(index)
    return (
        *(q_len, kv_len),
        offsets(segments.q_start, q_len, q),
        offsets(segments.kv_start, kv_len, k),
    )


def gradients(q, k, v, dout, dlse, scale: float, *, softmax, softmax_backward):
    """dq, dk and dv of one call.

    cuDNN takes no cotangent of lse. Its share is attention too: with p the weights,
    ``dq += scale * dlse * (p @ k)`` and ``dk += p^T (scale * dlse * q)``, which are an
    output, and the gradient of values, where the keys are the values.
    """
    dq, dk, dv = softmax_backward(q, k, v, dout)
    if dlse is not None:
        weight = (dlse * scale)[..., None]
        mean_key, _ = softmax(q, k, k)
        dq = (dq + weight * mean_key).astype(dq.dtype)
        _, _, share = softmax_backward(q, k, k, (weight * q).astype(q.dtype))
        dk = dk + share
    return dq, dk, dv


def _gradients(q, k, v, out, lse, dout, dlse, mask: Mask, call, scale: float):
    settings = {"mask": mask, "call": call, "scale": scale}
    return gradients(
        *(q, k, v, dout, dlse, scale),
        softmax=functools.partial(_softmax, **settings),
        softmax_backward=functools.partial(
            _softmax_backward, lse=lse, out=out, **settings
        ),
    )


def _softmax(q, k, v, mask: Mask, call, scale: float):
    """XLA's call: output [B, T, N, H] and lse [B * M, N, T]; B * N * T without `call`.

    The output is declared as [B, N, T, H] with the bytes of [B, T, N, H].
    """
    (B, T, N, H), S = q.shape, k.shape[1]
    M = 1 if call is None else call[0].shape[1]
    out, lse, _ = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmax",
        (
            jax.ShapeDtypeStruct((B, N, T, H), q.dtype),
            jax.ShapeDtypeStruct((B * M, N, T), jnp.float32),
            jax.ShapeDtypeStruct((0,), jnp.uint8),  # workspace: XLA sets its size
        ),
        output_layouts=((0, 2, 1, 3), (0, 1, 2), (0,)),
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(
            (B, N, T, S), q.dtype, mask, M, scale, _FORWARD_PRODUCTS
        ),
    )(q, k, v, *(call or ()))
    return out.swapaxes(1, 2), lse


def _softmax_backward(q, k, v, dout, *, lse, out, mask: Mask, call, scale: float):
    """XLA's call for dq, dk and dv, shaped as q, k and v."""
    (B, T, N, H), (S, K) = q.shape, k.shape[1:3]
    M = 1 if call is None else call[0].shape[1]
    heads_first = (0, 2, 1, 3)
    *grads, _ = jax.ffi.ffi_call(
        "__cudnn$fmhaSoftmaxBackward",
        (
            jax.ShapeDtypeStruct((B, N, T, H), q.dtype),
            jax.ShapeDtypeStruct((B, K, S, H), q.dtype),
            jax.ShapeDtypeStruct((B, K, S, H), q.dtype),
            jax.ShapeDtypeStruct((0,), jnp.uint8),
        ),
        output_layouts=(heads_first, heads_first, heads_first, (0,)),
        custom_call_api_version=2,
        legacy_backend_config=_backend_config(
            (B, N, T, S), q.dtype, mask, M, scale, _BACKWARD_PRODUCTS
        ),
    )(q, k, v, lse, dout, out, *(call or ()))
    return tuple(x.swapaxes(1, 2) for x in grads)


def _backend_config(scores, dtype, mask: Mask, M: int, scale: float, products) -> str:
    """The settings of XLA's call, JSON of its `CudnnfMHABackendConfig`."""
    kind = "CAUSAL" if mask.causal else "NO_MASK"
    if M > 1:
        kind = "PADDING_CAUSAL" if mask.causal else "PADDING"
    config = {
        "algorithm": {
            "algo_id": "0",
            "math_type": "TENSOR_OP_MATH",
            "tuning_knobs": {"17": "1", "24": "0"},
            "is_cudnn_frontend": True,
            "workspace_size": "0",
        },
        "fmha_scale": scale,
        "intermediate_tensor_shape": {
            "element_type": "BF16" if dtype == jnp.bfloat16 else "F16",
            "dimensions": [str(n) for n in scores],
            "tuple_shapes": [],
            "layout": {
                "dim_level_types": [],
                "dim_unique": [],
                "dim_ordered": [],
                "minor_to_major": ["3", "2", "1", "0"],
                "tiles": [],
                "element_size_in_bits": "0",
                "memory_space": "0",
                "index_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "pointer_primitive_type": "PRIMITIVE_TYPE_INVALID",
                "dynamic_shape_metadata_prefix_bytes": "0",
            },
            "is_dynamic_dimension": [False] * 4,
        },
        "is_flash_attention": True,
        "mask_type": kind,
        "dropout_rate": 0.0,
        "seed": 42,
        # cuDNN counts the query's own key too; 0: no window
        "sliding_window_length": mask.left + 1,
        "max_seg_per_batch": M,
        "is_paged_attention": False,
    }
    fields = "lhs_contracting", "rhs_contracting", "lhs_batch", "rhs_batch"
    for name, axes in products.items():
        config[f"{name}_dot_dimension_numbers"] = {
            f"{field}_dimensions": list(numbers)
            for field, numbers in zip(fields, axes.split(), strict=True)
        }
    call = {"operation_queue_id": "0", "cudnn_fmha_backend_config": config}
    return json.dumps(call)


# Axes of the products, of arrays laid out [B, tokens, heads, H]: contracted on the left
# and right, batched on the left and right.
_FORWARD_PRODUCTS = {"bmm1": "3 3 02 02", "bmm2": "3 1 01 02"}
_BACKWARD_PRODUCTS = {
    "bmm1_grad_gemm1": "2 1 01 02",
    "bmm1_grad_gemm2": "3 1 01 02",
    "bmm2_grad_gemm1": "2 1 01 02",
    "bmm2_grad_gemm2": "3 3 02 02",
}
