"""The two primitives: abstract evaluation, batching, derivative, lowering.

    fused_attn_fwd_p   q, k, v, *ranges                            -> out, lse
    fused_attn_bwd_p   q, k, v, out, lse, dout, *ranges [, dlse]   -> dq, dk, dv

Shapes: q, dq ``[*B, T, N, H]``; k, dk ``[*B, S, K, H]``; v, dv ``[*B, S, K, V]``; out,
dout ``[*B, T, N, V]``; lse, dlse ``[*B, T, N]``; ranges (a `KeyRanges`): q_ids, q_lo
and q_hi int32 ``[*B, T]``, kv_ids and kv_pos int32 ``[*B, S]``. `*B` are the batch
axes of the call and of each `vmap` around it. One static parameter, `config`.
"""

import functools
import math

from jax.ad_checkpoint import checkpoint_name
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from te_mixed_jax._partitioning import (
    aval_like,
    lowered_per_device,
    lowering_of,
    per_device,
)
from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import Config, accumulator_dtype
from te_mixed_jax.lowerings import lowering_for

CHECKPOINT_NAMES = ("mixed_attention_out", "mixed_attention_lse")
"""Names that the output and the lse have among the residuals.

A policy ``save_only_these_names(*CHECKPOINT_NAMES)`` of `jax.checkpoint` keeps both,
and attention is not computed again.
"""

fused_attn_fwd_p = Primitive("fused_attn_fwd")
"""The primitive of the forward pass, for those who write rules for it.

Operands: q ``[*B, T, N, H]``, k ``[*B, S, K, H]``, v ``[*B, S, K, V]``, and the key
ranges, int32: of queries ``[*B, T]`` their ids, lowest and highest visible positions,
of keys ``[*B, S]`` ids and positions. Results: the output ``[*B, T, N, V]`` and the lse
``[*B, T, N]``, the lowest finite number where a query sees no key. One parameter,
`config`.
"""

fused_attn_bwd_p = Primitive("fused_attn_bwd")
"""The primitive of the backward pass, for those who write rules for it.

Operands: q, k and v; output and lse of the forward pass and the output's cotangent; the
five key ranges; and the lse's cotangent, if it has one. Results: the gradients of q, k
and v. One parameter, `config`.
"""


_RANGES = ["... t", "... t", "... t", "... s", "... s"]
_INPUTS = ["... t n h", "... s k h", "... s k v"]
_OUTPUTS = ["... t n v", "... t n"]


def _forward_avals(q, k, v, *ranges, config):
    del k, ranges, config
    return [
        aval_like(q, q.shape[:-1] + v.shape[-1:], q.dtype),
        aval_like(q, q.shape[:-1], accumulator_dtype(q.dtype)),
    ]


def _backward_avals(q, k, v, *rest, config):
    del rest, config
    return [aval_like(x, x.shape, x.dtype) for x in (q, k, v)]


def with_one_batch_axis(function):
    """`function` of arrays with all their batch axes, which it gets as one.

    Folded here, on each device, and not where the axes are added: rows that lie across
    devices would be gathered by it.
    """

    def folded(*operands):
        batch = operands[0].shape[:-3]
        rows = math.prod(batch)
        results = function(*(x.reshape(rows, *x.shape[len(batch) :]) for x in operands))
        return tuple(x.reshape(*batch, *x.shape[1:]) for x in results)

    return folded


def _forward(platform, *operands, config: Config, split: bool):
    @with_one_batch_axis
    def local(q, k, v, *ranges):
        lowering = lowering_for(platform, q, k, v, config)
        return lowering.forward(q, k, v, KeyRanges(*ranges), config=config)

    if not split:
        return local(*operands)
    return per_device(local, _INPUTS + _RANGES, _OUTPUTS)(*operands)


def _backward(platform, *operands, config: Config, split: bool):
    @with_one_batch_axis
    def local(q, k, v, out, lse, dout, *rest):
        lowering = lowering_for(platform, q, k, v, config)
        ranges, dlse = KeyRanges(*rest[:5]), (*rest[5:], None)[0]
        return lowering.backward(q, k, v, out, lse, dout, dlse, ranges, config=config)

    if not split:
        return local(*operands)
    names = [*_INPUTS, *_OUTPUTS, _OUTPUTS[0], *_RANGES, _OUTPUTS[1]][: len(operands)]
    return per_device(local, names, _INPUTS)(*operands)


def _batch(primitive, operands, axes, *, config):
    """The mapped axis is one more batch axis, of operands that lack it too.

    Each operand is decided on its own: positions without the axis next to ids with it,
    keys next to queries, cotangents next to residuals. No lowering ever sees a vmap.
    """
    (size,) = {
        x.shape[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    }
    operands = [
        batching.bdim_at_front(x, axis, size)
        for x, axis in zip(operands, axes, strict=True)
    ]
    results = primitive.bind(*operands, config=config)
    return results, [0] * len(results)


def named(out, lse):
    """Names what a policy of `jax.checkpoint` may keep."""
    out_name, lse_name = CHECKPOINT_NAMES
    return checkpoint_name(out, out_name), checkpoint_name(lse, lse_name)


def _jvp(primals, tangents, *, config: Config):
    """The forward pass, and its tangent for reverse mode to transpose."""
    q, k, v, *ranges = primals
    out, lse = named(*fused_attn_fwd_p.bind(q, k, v, *ranges, config=config))
    tangents = map(ad.instantiate_zeros, tangents[:3])
    residuals = q, k, v, out, lse, *ranges
    return (out, lse), _tangent_p.bind(*tangents, *residuals, config=config)


def _transpose(cotangents, dq, dk, dv, q, k, v, out, lse, *ranges, config: Config):
    """From the cotangents of output and lse to those of q, k and v."""
    del dq, dk, dv
    dout, dlse = cotangents
    if isinstance(dout, ad.Zero) and isinstance(dlse, ad.Zero):
        return [None] * (8 + len(ranges))
    extra = () if isinstance(dlse, ad.Zero) else (dlse,)
    dout = ad.instantiate_zeros(dout)
    grads = fused_attn_bwd_p.bind(
        q, k, v, out, lse, dout, *ranges, *extra, config=config
    )
    return [*grads, *[None] * (5 + len(ranges))]


def _raise_not_differentiable(*_, **__):
    raise NotImplementedError(
        "forward-mode derivatives (jvp, jacfwd, linearize) and second derivatives "
        "(hessian, grad of grad) of te_mixed_jax's fused attention are not "
        'implemented. Use `implementation="dense"`, which is differentiable in every '
        "mode and to any order, with O(T*S) memory."
    )


def _register(primitive, avals, function):
    primitive.multiple_results = True
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(avals)
    for platform in (None, "cuda"):
        rule = functools.partial(function, platform)
        mlir.register_lowering(primitive, lowering_of(rule), platform=platform)
    lowered_per_device(primitive)
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)


_register(fused_attn_fwd_p, _forward_avals, _forward)
_register(fused_attn_bwd_p, _backward_avals, _backward)
ad.primitive_jvps[fused_attn_fwd_p] = _jvp
ad.primitive_jvps[fused_attn_bwd_p] = _raise_not_differentiable

# The forward pass's tangent, linear in (dq, dk, dv). Reverse mode transposes it and
# never runs it; forward mode would run it, and gets an error that says what to do.
_tangent_p = Primitive("fused_attn_tangent")
_register(
    _tangent_p,
    lambda dq, dk, dv, *x, config: _forward_avals(*x, config=config),
    _raise_not_differentiable,
)
_tangent_p.def_impl(_raise_not_differentiable)
ad.primitive_transposes[_tangent_p] = _transpose
ad.primitive_jvps[_tangent_p] = _raise_not_differentiable
