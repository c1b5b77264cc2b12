"""Descriptor + policies -> which keys each query token may see, in O(T) memory.

    allowed(i, j)  <=>  q_ids[i] == kv_ids[j]  and  q_lo[i] <= kv_pos[j] <= q_hi[i]

Every lowering reads its mask from these five arrays and from nothing else.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int, Integer

from te_mixed_jax._descriptor import SequenceDescriptor
from te_mixed_jax._policy import (
    HIGHEST,
    LOWEST,
    MaskPolicy,
    QueryTokens,
    visible_range,
)

# Ids that padding tokens get: never equal, so `q_ids == kv_ids` is the whole test.
Q_PADDING, KV_PADDING = 0, -1
# `(q_lo, q_hi)` of a query that sees nothing, and of one whose values broke a rule:
# it sees nothing either, and its output is NaN.
EMPTY = (0, -1)
BROKEN = (HIGHEST, LOWEST)


class KeyRanges(NamedTuple):
    """Per token, what decides who sees whom; int32."""

    q_ids: Int[Array, "B T"]
    q_lo: Int[Array, "B T"]
    q_hi: Int[Array, "B T"]
    kv_ids: Int[Array, "B S"]
    kv_pos: Int[Array, "B S"]


def is_broken(
    q_lo: Int[Array, "*B T"], q_hi: Int[Array, "*B T"]
) -> Bool[Array, "*B T"]:
    """Queries whose output has to be NaN."""
    return (q_lo == BROKEN[0]) & (q_hi == BROKEN[1])


def allowed(ranges: KeyRanges) -> Bool[Array, "B T S"]:
    """The dense mask, O(T*S): for the dense implementation and for pictures."""
    q_ids, q_lo, q_hi = (x[..., :, None] for x in ranges[:3])
    kv_ids, kv_pos = (x[..., None, :] for x in ranges[3:])
    return (q_ids == kv_ids) & (q_lo <= kv_pos) & (kv_pos <= q_hi)


def key_ranges(
    desc: SequenceDescriptor,
    policies: tuple[MaskPolicy, ...],
    policy_ids: Integer[Array, "*#B T"] | None,
) -> KeyRanges:
    """The key range of every query token.

    Args:
        desc: Descriptor with as many batch axes on all arrays, some of size 1.
        policies: The policies that `policy_ids` index.
        policy_ids: Policy of each query token; None: policy 0 for all. Out of range
            at a real token: that token is broken.

    Returns:
        The ranges, with the batch axes broadcast against each other.
    """
    q_ids, kv_ids = (jnp.asarray(x) for x in desc.segment_ids)
    q_pos, kv_pos = (jnp.asarray(x) for x in desc.segment_pos)
    tokens = _query_tokens(q_ids, kv_ids, q_pos, kv_pos)

    if policy_ids is None:
        lo, hi = visible_range(policies[0], tokens)
        broken = jnp.zeros_like(q_ids, bool)
    else:
        lo, hi = BROKEN
        broken = (policy_ids < 0) | (policy_ids >= len(policies))
        for index, policy in enumerate(policies):
            here = policy_ids == index
            lowest, highest = visible_range(policy, tokens)
            lo, hi = jnp.where(here, lowest, lo), jnp.where(here, highest, hi)
    if desc._broken is not None:
        broken = broken | desc._broken[..., None]

    def settle(ends, empty_end, broken_end):
        ends = jnp.where(lo <= hi, ends, empty_end)
        ends = jnp.where(broken, broken_end, ends)
        return jnp.where(q_ids > 0, ends, empty_end).astype(jnp.int32)

    ranges = KeyRanges(
        q_ids=jnp.where(q_ids > 0, q_ids, Q_PADDING),
        q_lo=settle(lo, EMPTY[0], BROKEN[0]),
        q_hi=settle(hi, EMPTY[1], BROKEN[1]),
        kv_ids=jnp.where(kv_ids > 0, kv_ids, KV_PADDING),
        kv_pos=kv_pos,
    )
    batch = jnp.broadcast_shapes(*(x.shape[:-1] for x in ranges))
    return KeyRanges(*(jnp.broadcast_to(x, batch + x.shape[-1:]) for x in ranges))


def _query_tokens(q_ids, kv_ids, q_pos, kv_pos) -> QueryTokens:
    """What policies may ask of the query tokens; what they do not ask, XLA drops."""
    sorted_kv_ids, sorted_kv_pos = lax.sort((kv_ids, kv_pos), num_keys=2)
    sorted_q_ids = lax.sort(q_ids)

    @functools.partial(jnp.vectorize, signature="(s),(t)->(t),(t)")
    def bounds(sorted_ids, sought):
        search = functools.partial(jnp.searchsorted, sorted_ids, sought, method="sort")
        return tuple(search(side=side).astype(jnp.int32) for side in ("left", "right"))

    q_start, q_end = bounds(sorted_q_ids, q_ids)
    kv_start, kv_end = bounds(sorted_kv_ids, q_ids)
    if kv_ids.shape[-1] == 0:
        first_key = jnp.zeros_like(q_pos)
    else:
        at = jnp.minimum(kv_start, kv_ids.shape[-1] - 1)
        batch = jnp.broadcast_shapes(at.shape[:-1], kv_ids.shape[:-1])
        first_key = jnp.take_along_axis(
            jnp.broadcast_to(sorted_kv_pos, batch + kv_ids.shape[-1:]), at, axis=-1
        )
    return QueryTokens(
        pos=q_pos,
        num_queries=q_end - q_start,
        num_keys=kv_end - kv_start,
        first_key=first_key,
    )
