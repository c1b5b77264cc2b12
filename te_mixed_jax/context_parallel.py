"""Rows that are split along a mesh axis: attention to more tokens than a device holds.

For use inside `jax.shard_map`, where each device has a part of the tokens of each row.
Any token may be on any device: a mask is ids and key ranges, which are exact for tokens
in any order.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, overload

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from te_mixed_jax._attention import attend_in_ranges, empty_as_infinite
from te_mixed_jax._call import (
    Call,
    canonical_call,
    check_arrays,
    check_is_desc,
    check_policies,
)
from te_mixed_jax._descriptor import SequenceDescriptor, running_index
from te_mixed_jax._partitioning import vary_alike
from te_mixed_jax._policy import FULL, HIGHEST, MaskPolicy, as_int
from te_mixed_jax._primitives import fused_attn_bwd_p, fused_attn_fwd_p
from te_mixed_jax._ranges import KeyRanges, key_ranges
from te_mixed_jax._types import Config, accumulator_dtype, empty_lse


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    axis_name: str,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
    ring: bool = False,
) -> Float[Array, "*B T N V"]: ...


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    axis_name: str,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: Literal[True],
    ring: bool = False,
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    axis_name: str,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
    ring: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """`te_mixed_jax.dot_product_attention` of rows that lie across devices.

    To be called inside `jax.shard_map` over `axis_name`. All arrays, the descriptor's
    too, are a device's part of the tokens; the row is their concatenation along the
    axis, and what a policy asks of a sequence is asked of the whole row. Ids and
    positions are gathered: int32, O(T) memory.

    Dims: `T` and `S` are the query and key tokens of one device.

    Args:
        query: ``[*B, T, N, H]``, like all others the part of this device.
        key: ``[*B, S, K, H]``.
        value: ``[*B, S, K, V]``.
        desc: Segment ids and positions of this device's tokens. Missing positions
            are the running index in the whole row. Default: the row is one sequence.
        axis_name: The mesh axis along which tokens are split.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[*B, T]``.
        scale: Factor on the scores. Default: ``1 / sqrt(H)``.
        implementation: As in `te_mixed_jax.dot_product_attention`.
        return_lse: Whether to return the log-sum-exp of the scores too.
        ring: False: keys and values are gathered, and their gradients scattered and
            summed. True: they go from device to device while each computes with those
            that it has, so no device holds more than two parts of them.

    Returns:
        Output ``[*B, T, N, V]``, with `return_lse` a pair (output, lse ``[*B, T, N]``).

    Raises:
        ValueError: if `jax.shard_map` does not map over `axis_name`, and, with
            TypeError and NotImplementedError, as `te_mixed_jax.dot_product_attention`.
        NotImplementedError: for ``ring=True`` with "dense".

    Example:
        >>> kinds = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((1,), ("context",), axis_types=kinds)
        >>> x = jnp.ones((2, 8, 4, 16))
        >>> tokens = jax.P(None, "context")
        >>> @jax.jit
        ... @functools.partial(
        ...     jax.shard_map, mesh=mesh, in_specs=tokens, out_specs=tokens
        ... )
        ... def attend(x):
        ...     return context_parallel.dot_product_attention(
        ...         x, x, x, axis_name="context", policy=CAUSAL
        ...     )
        >>> attend(x).shape
        (2, 8, 4, 16)

    Source: Liu et al. 2023, "Ring Attention with Blockwise Transformers".
    """
    if ring and implementation == "dense":
        raise NotImplementedError(
            '`ring=True` needs a fused implementation, got `implementation="dense"`. '
            '`implementation="xla"` would run, or "dense" with `ring=False`.'
        )
    _check_axis(axis_name)
    if desc is None:
        query, key, value = check_arrays(query, key, value)
        desc = _part_of_one_sequence(query, key, axis_name)
    call = canonical_call(
        query,
        key,
        value,
        desc,
        policy=policy,
        policy_ids=policy_ids,
        scale=scale,
        implementation=implementation,
    )
    ranges = _ranges_of_the_row(call, axis_name)
    if ring:
        out, lse = _ring(call, ranges, axis_name, return_lse=return_lse)
    else:
        out, lse = _gathered(call, ranges, axis_name)
    return (out, empty_as_infinite(lse)) if return_lse else out


def with_row_positions(
    desc: SequenceDescriptor, *, axis_name: str
) -> SequenceDescriptor:
    """The descriptor of this device's tokens, with their positions in the whole row.

    For what reads positions itself, such as rotary embeddings.

    Args:
        desc: Segment ids of this device's tokens ``[*B, T]``. Positions that it has
            are kept.
        axis_name: The mesh axis along which tokens are split.

    Returns:
        The descriptor, whose `segment_pos`, ``[*B, T]``, count in the row.

    Raises:
        ValueError: if `jax.shard_map` does not map over `axis_name`.
        TypeError: for what is no descriptor.

    Example:
        >>> kinds = (jax.sharding.AxisType.Auto,)
        >>> mesh = jax.make_mesh((1,), ("context",), axis_types=kinds)
        >>> def positions(ids):
        ...     desc = from_segment_ids_and_pos(ids)
        ...     desc = context_parallel.with_row_positions(desc, axis_name="context")
        ...     return desc.segment_pos[0]
        >>> tokens = jax.P(None, "context")
        >>> mapped = jax.shard_map(
        ...     positions, mesh=mesh, in_specs=tokens, out_specs=tokens
        ... )
        >>> print(jax.jit(mapped)(jnp.array([[1, 1, 2, 2]])))
        [[0 1 0 1]]
    """
    check_is_desc(desc)
    _check_axis(axis_name)

    def in_row(ids):
        ids = jnp.asarray(ids)
        tokens = ids.ndim - 1
        row = lax.all_gather(ids, axis_name, axis=tokens, tiled=True)
        start = lax.axis_index(axis_name) * ids.shape[-1]
        index = running_index(row)
        return lax.dynamic_slice_in_dim(index, start, ids.shape[-1], axis=tokens)

    q_pos, kv_pos = desc._q_pos, desc._kv_pos
    if q_pos is None:
        q_pos = in_row(desc._q_ids)
    if desc._kv_ids is not None and kv_pos is None:
        kv_pos = in_row(desc._kv_ids)
    return dataclasses.replace(desc, _q_pos=q_pos, _kv_pos=kv_pos)


def _part_of_one_sequence(
    query: Float[Array, "*B T N H"], key: Float[Array, "*B S K H"], axis_name: str
) -> SequenceDescriptor:
    """The descriptor of this device's tokens where the row is one sequence."""
    _check_axis(axis_name)
    at = lax.axis_index(axis_name)

    def side(x):
        shape = (1,) * (x.ndim - 3) + (x.shape[-3],)
        tokens = at * x.shape[-3] + jnp.arange(x.shape[-3], dtype=jnp.int32)
        return jnp.ones(shape, jnp.int32), tokens.reshape(shape)

    (q_ids, q_pos), (kv_ids, kv_pos) = side(query), side(key)
    return SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids), (q_pos, kv_pos))


def _check_axis(axis_name: str) -> None:
    try:
        lax.axis_index(axis_name)
    except (NameError, KeyError, TypeError):  # not mapped; never the name of an axis
        raise ValueError(
            "`axis_name` must be a mesh axis that `jax.shard_map` maps over around "
            f"this call, got {axis_name!r}."
        ) from None


def _ranges_of_the_row(call: Call, axis_name: str) -> KeyRanges:
    """Of this device's queries, and of all keys of the row."""
    (*batch, T, _, _), desc = call.q.shape, call.desc

    def gather(x):
        return lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)

    tokens, broken = (
        (desc._q_ids, desc._kv_ids, desc._q_pos, desc._kv_pos),
        desc._broken,
    )
    q_ids, kv_ids, q_pos, kv_pos = (None if x is None else gather(x) for x in tokens)
    if broken is not None:
        broken = lax.all_gather(broken, axis_name).any(axis=0)
    desc = SequenceDescriptor(q_ids, kv_ids, q_pos, kv_pos, broken, desc._max_segments)
    policy_ids = None if call.policy_ids is None else gather(call.policy_ids)
    ranges = key_ranges(desc, call.config.policies, policy_ids)
    ranges = [jnp.broadcast_to(x, (*batch, x.shape[-1])) for x in ranges]
    start = lax.axis_index(axis_name) * T
    own = (lax.dynamic_slice_in_dim(x, start, T, axis=-1) for x in ranges[:3])
    return KeyRanges(*own, *ranges[3:])


def _gathered(call: Call, ranges: KeyRanges, axis_name: str):
    """Gathers keys and values; JAX scatters and sums their gradients.

    Then the keys of a sequence come together, by their positions: only of what lies
    together can a lowering leave out all that is not seen.
    """
    tokens = call.k.ndim - 3
    k, v = (
        lax.all_gather(x, axis_name, axis=tokens, tiled=True) for x in (call.k, call.v)
    )
    if call.config.implementation != "dense":  # which leaves nothing out
        last = jnp.where(ranges.kv_ids > 0, ranges.kv_ids, HIGHEST)  # padding
        at = lax.broadcasted_iota(jnp.int32, last.shape, last.ndim - 1)
        *_, order = lax.sort((last, ranges.kv_pos, at), num_keys=2)
        k, v = _in_order(k, order), _in_order(v, order)
        own = (jnp.take_along_axis(x, order, axis=-1) for x in ranges[3:])
        ranges = KeyRanges(*ranges[:3], *own)
    return attend_in_ranges(call.q, k, v, ranges, config=call.config)


@jax.custom_vjp
def _in_order(x, order):
    """The tokens of `x`, in another order."""
    return jnp.take_along_axis(x, order[..., None, None], axis=-3)


def _in_order_forward(x, order):
    return _in_order(x, order), order


def _in_order_backward(order, cotangent):
    """Takes them back, which no sum is needed for."""
    return _in_order(cotangent, jnp.argsort(order, axis=-1)), None


_in_order.defvjp(_in_order_forward, _in_order_backward)


def _ring(call: Call, ranges: KeyRanges, axis_name: str, *, return_lse: bool):
    S = call.k.shape[-3]
    start = lax.axis_index(axis_name) * S
    own = (lax.dynamic_slice_in_dim(x, start, S, axis=-1) for x in ranges[3:])
    operands = vary_alike(call.q, call.k, call.v, *ranges[:3], *own)
    settings = _Settings(call.config, axis_name, return_lse)
    results: Any = _ring_attention(settings, *operands)
    return results


class _Settings(NamedTuple):
    config: Config
    axis_name: str
    return_lse: bool


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _ring_attention(settings: _Settings, q, k, v, *ranges):
    return _ring_forward(settings, q, k, v, *ranges)[0]


def _ring_forward(settings: _Settings, q, k, v, *ranges):
    """Each step computes with the keys at hand while they are sent on."""
    config, axis_name, return_lse = settings
    q_ranges, kv_ranges = ranges[:3], ranges[3:]
    dtype = accumulator_dtype(q.dtype)
    shape = q.shape[:-1]
    start = vary_alike(
        jnp.zeros((*shape, v.shape[-1]), dtype),
        jnp.full(shape, empty_lse(dtype), dtype),
        q,
    )[:2]

    def step(carry, _):
        keys, out, lse = carry
        k, v, *own = keys
        following = _send_on(keys, axis_name)
        part = fused_attn_fwd_p.bind(q, k, v, *q_ranges, *own, config=config)
        return (following, *_merge(out, lse, *part)), None

    keys = k, v, *kv_ranges
    steps = lax.axis_size(axis_name)
    (_, out, lse), _ = lax.scan(step, (keys, *start), length=steps)
    out = out.astype(q.dtype)
    return (out, lse if return_lse else None), (q, k, v, out, lse, ranges)


def _ring_backward(settings: _Settings, residuals, cotangents):
    """The keys go round once more, their gradients with them, and come home."""
    config, axis_name, _ = settings
    q, k, v, out, lse, ranges = residuals
    dout, dlse = cotangents
    extra = () if dlse is None else (dlse,)
    dtype = accumulator_dtype(q.dtype)
    q_ranges, kv_ranges = ranges[:3], ranges[3:]

    def step(carry, _):
        keys, dq, dk, dv = carry
        k, v, *own = keys
        parts = fused_attn_bwd_p.bind(
            *(q, k, v, out, lse, dout, *q_ranges, *own, *extra), config=config
        )
        dq, dk, dv = (x + part for x, part in zip((dq, dk, dv), parts, strict=True))
        keys, dk, dv = _send_on((keys, dk, dv), axis_name)
        return (keys, dq, dk, dv), None

    zeros = (jnp.zeros_like(x, dtype) for x in (q, k, v))
    start = vary_alike(*zeros, q)[:3]
    keys = k, v, *kv_ranges
    steps = lax.axis_size(axis_name)
    (_, *grads), _ = lax.scan(step, (keys, *start), length=steps)
    return *(x.astype(q.dtype) for x in grads), *[None] * len(ranges)


_ring_attention.defvjp(_ring_forward, _ring_backward)


def _send_on(x, axis_name: str):
    """To the next device along the axis."""
    size = lax.axis_size(axis_name)
    pairs = [(i, (i + 1) % size) for i in range(size)]
    return jax.tree.map(lambda x: lax.ppermute(x, axis_name, pairs), x)


def _merge(out, lse, more_out, more_lse):
    """Output and lse over two sets of keys, from those over each."""
    lowest = empty_lse(lse.dtype)
    top = jnp.maximum(lse, more_lse)
    weight, more_weight = jnp.exp(lse - top), jnp.exp(more_lse - top)
    total = weight + more_weight
    share = (more_weight / total)[..., None]
    merged = out * (1 - share) + more_out * share
    empty = top == lowest
    return (
        jnp.where(empty[..., None], 0, merged),
        jnp.where(empty, lowest, top + jnp.log(total)),
    )


class TokenOrder(NamedTuple):
    """A new order of the tokens of each row, and the way back, as `balance` makes it.

    Attributes:
        order: Per place in the new order the token that comes there, int32 ``[B, T]``.
        inverse: Per token its place in the new order, int32 ``[B, T]``.

    Example:
        >>> order = jnp.array([[2, 0, 1]])
        >>> new = context_parallel.TokenOrder(order, jnp.argsort(order))
        >>> there = new.apply(jnp.array([[10, 11, 12]]))
        >>> print(there)
        [[12 10 11]]
        >>> print(new.undo(there))
        [[10 11 12]]
    """

    order: Int[Array, "B T"]
    inverse: Int[Array, "B T"]

    def apply(self, x: Array, axis: int = 1) -> Array:
        """An array in the new order.

        Args:
            x: ``[B, T, ...]``, of any dtype.
            axis: The axis of the tokens, if it is another; rows are the first of the
                others.

        Returns:
            The array, of the same shape.

        Raises:
            ValueError: if the array has other numbers of rows or tokens.
        """
        return _take(x, self.order, axis)

    def undo(self, x: Array, axis: int = 1) -> Array:
        """An array that is in the new order, in the old one.

        Args:
            x: ``[B, T, ...]``, of any dtype.
            axis: The axis of the tokens, as for `apply`.

        Returns:
            The array, of the same shape.

        Raises:
            ValueError: if the array has other numbers of rows or tokens.
        """
        return _take(x, self.inverse, axis)


def balance(
    desc: SequenceDescriptor,
    *,
    devices: int,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    parts: int = 8,
) -> TokenOrder:
    """An order of tokens that gives each of several devices the same work.

    A token's work is the number of keys that it sees. Each row is cut into
    ``devices * parts`` pieces; the devices take turns to get one, the most work first,
    in a turn that goes back and forth. Ids, positions and policy ids take the same
    order as queries, keys and values; positions have to be given then, since a running
    index would count in the new order.

    Args:
        desc: Segment ids and positions of whole rows ``[B, T]``, for self-attention.
        devices: Number of devices along the axis that splits the tokens; divides T.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[B, T]``.
        parts: Pieces of a device, at most. Fewer where pieces would not be equal.

    Returns:
        The order ``[B, T]``: with it, device d holds the ``T / devices`` tokens from
        ``d * T / devices`` on of each row.

    Raises:
        ValueError: if T is no multiple of `devices`, for cross-attention, for several
            policies without `policy_ids`, and for `policy_ids` of a wrong shape.
        TypeError: for what is no descriptor or no policy, and for numbers that are no
            integers.

    Example:
        >>> desc = from_segment_ids_and_pos([[1, 1, 1, 1, 1, 1, 1, 1]])
        >>> new = context_parallel.balance(desc, devices=2, policy=CAUSAL, parts=2)
        >>> print(new.order[0])
        [0 1 6 7 2 3 4 5]

    Source: the zigzag order of causal ring attention, for any mask.
    """
    check_is_desc(desc)
    q_ids, _ = desc.segment_ids
    if q_ids.ndim != 2:
        raise ValueError(f"`desc` must describe rows [B, T], got {q_ids.shape}.")
    B, T = q_ids.shape
    if desc._kv_ids is not None:
        raise ValueError(
            "`desc` must have one set of ids for queries and keys, got a pair."
        )
    devices, parts = as_int("devices", devices, 1), as_int("parts", parts, 1)
    if T % devices:
        raise ValueError(
            f"`devices` must divide the {T} tokens of a row, got {devices}."
        )
    parts = max(n for n in range(1, parts + 1) if T // devices % n == 0)
    policies, policy_ids = check_policies(policy, policy_ids, desc, (B,), T)
    return _balanced(desc, policy_ids, policies=policies, devices=devices, parts=parts)


@functools.partial(jax.jit, static_argnames=("policies", "devices", "parts"))
def _balanced(desc, policy_ids, *, policies, devices: int, parts: int) -> TokenOrder:
    seen = _keys_seen(*key_ranges(desc, policies, policy_ids))
    B, T = seen.shape
    size = T // (devices * parts)
    work = seen.reshape(B, devices * parts, size).sum(axis=2)
    turns = jnp.argsort(-work, axis=1, stable=True).reshape(B, parts, devices)
    turns = turns.at[:, 1::2].set(turns[:, 1::2, ::-1])
    pieces = jnp.sort(turns.swapaxes(1, 2), axis=2)
    order = pieces[..., None] * size + jnp.arange(size)
    order = order.reshape(B, T).astype(jnp.int32)
    return TokenOrder(order, jnp.argsort(order, axis=1).astype(jnp.int32))


def _take(x: Array, order: Int[Array, "B T"], axis: int) -> Array:
    B, T = order.shape
    if x.ndim < 2 or not -x.ndim <= axis < x.ndim or x.shape[axis] != T:
        raise ValueError(
            f"`x` must have {T} tokens along its axis {axis}, got {x.shape}."
        )
    x = jnp.moveaxis(x, axis, 1)
    if x.shape[0] != B and 1 not in (x.shape[0], B):
        raise ValueError(f"`x` must have {B} rows, got {x.shape[0]}.")
    rows = order.reshape(*order.shape, *(1,) * (x.ndim - 2))
    return jnp.moveaxis(jnp.take_along_axis(x, rows, axis=1), 1, axis)


@functools.partial(jnp.vectorize, signature="(t),(t),(t),(s),(s)->(t)")
def _keys_seen(q_ids, q_lo, q_hi, kv_ids, kv_pos):
    """The number of keys that each query of a row sees, by sorting."""
    T = q_ids.size
    token = jnp.arange(T + kv_ids.size, dtype=jnp.int32)
    is_key = (token >= T).astype(jnp.int32)

    def keys_before(pos, *, including: bool):
        """Keys of lower ids, or of the same id and before (or at) the position."""
        later = 1 - is_key if including else is_key  # of what stands at one position
        ids, pos = (jnp.concatenate(x) for x in ((q_ids, kv_ids), (pos, kv_pos)))
        *_, keys, order = lax.sort((ids, pos, later, is_key, token), num_keys=3)
        number = jnp.cumsum(keys)
        return jnp.zeros_like(token).at[order].set(number, unique_indices=True)[:T]

    seen = keys_before(q_hi, including=True) - keys_before(q_lo, including=False)
    return jnp.where(q_lo <= q_hi, seen, 0)
