"""The two primitives: abstract evaluation, batching, lowering.

    fused_attn_fwd_p   q, k, v, *ranges                            -> out, lse
    fused_attn_bwd_p   q, k, v, out, lse, dout, *ranges [, dlse]   -> dq, dk, dv

Shapes: q, dq ``[B, T, N, H]``; k, dk ``[B, S, K, H]``; v, dv ``[B, S, K, V]``; out,
dout ``[B, T, N, V]``; lse, dlse ``[B, T, N]``; ranges (a `KeyRanges`): q_ids, q_lo and
q_hi int32 ``[B, T]``, kv_ids and kv_pos int32 ``[B, S]``. One static parameter,
`config`.
"""

import functools

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import Config, accumulator_dtype
from te_mixed_jax.lowerings import LOWERINGS

fused_attn_fwd_p = Primitive("fused_attn_fwd")
fused_attn_bwd_p = Primitive("fused_attn_bwd")


def _forward_avals(q, k, v, *ranges, config):
    del k, ranges, config
    return [
        ShapedArray(q.shape[:-1] + v.shape[-1:], q.dtype),
        ShapedArray(q.shape[:-1], accumulator_dtype(q.dtype)),
    ]


def _backward_avals(q, k, v, *rest, config):
    del rest, config
    return [ShapedArray(x.shape, x.dtype) for x in (q, k, v)]


def _forward(q, k, v, *ranges, config: Config):
    lowering = LOWERINGS[config.implementation or "xla"]
    return lowering.forward(q, k, v, KeyRanges(*ranges), config=config)


def _backward(
    q, k, v, out, lse, dout, q_ids, q_lo, q_hi, kv_ids, kv_pos, dlse=None, *, config
):
    lowering = LOWERINGS[config.implementation or "xla"]
    ranges = KeyRanges(q_ids, q_lo, q_hi, kv_ids, kv_pos)
    return lowering.backward(q, k, v, out, lse, dout, dlse, ranges, config=config)


def _batch(primitive, operands, axes, *, config):
    """Folds the mapped axis into B, after giving it to operands that lack it.

    Each operand is decided on its own: positions without the axis next to ids with it,
    keys next to queries, cotangents next to residuals. No lowering ever sees a vmap.
    """
    (size,) = {
        x.shape[axis]
        for x, axis in zip(operands, axes, strict=True)
        if axis is not None
    }
    folded = []
    for x, axis in zip(operands, axes, strict=True):
        x = batching.bdim_at_front(x, axis, size)
        folded.append(x.reshape(size * x.shape[1], *x.shape[2:]))
    results = primitive.bind(*folded, config=config)
    results = [x.reshape(size, x.shape[0] // size, *x.shape[1:]) for x in results]
    return results, [0] * len(results)


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
    mlir.register_lowering(primitive, mlir.lower_fun(function, multiple_results=True))
    batching.primitive_batchers[primitive] = functools.partial(_batch, primitive)
    ad.primitive_jvps[primitive] = _raise_not_differentiable


_register(fused_attn_fwd_p, _forward_avals, _forward)
_register(fused_attn_bwd_p, _backward_avals, _backward)


# The tangent that forward mode would need. Reverse mode transposes it and never runs
# it; forward mode runs it, and gets an error that says what to do. (`jax.custom_vjp`
# raises one of its own, which cannot know of `implementation="dense"`.)
_tangent_p = Primitive("fused_attn_tangent")
_tangent_p.def_impl(_raise_not_differentiable)
_tangent_p.def_abstract_eval(lambda t: t)
mlir.register_lowering(_tangent_p, _raise_not_differentiable)
batching.defvectorized(_tangent_p)
ad.deflinear2(_tangent_p, lambda cotangent, _: [cotangent])


@jax.custom_jvp
def reverse_mode_only(x):
    """The identity, with a clear error in forward mode."""
    return x


@reverse_mode_only.defjvp
def _reverse_mode_only_jvp(primals, tangents):
    return primals[0], _tangent_p.bind(tangents[0])
