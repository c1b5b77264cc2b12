"""Which stretches of a row are sequences, and which mask does each of them have?

For kernels that take a row as (start, length) of its sequences and one mask for all
tokens of a call. Such a kernel counts tokens from the start of a sequence, so a
sequence has to be one stretch of the row on either side, its key positions have to run
up by one, and the key ranges of all its queries have to be what one of the masks says.
All of that is compared with the key ranges, on the device: a sequence that does not
fit is found, whatever the descriptor and the policies were.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from te_mixed_jax import _policy
from te_mixed_jax._policy import MaskPolicy
from te_mixed_jax._ranges import KeyRanges, is_broken

# Codes beside the index of a mask: sees no key and is seen by no query; does not fit.
NOTHING, UNFIT = -1, _policy.HIGHEST


@dataclasses.dataclass(frozen=True)
class Mask:
    """A band around the diagonal; indices count from the start of the sequence.

    Attributes:
        left: Query t sees keys from ``t - left`` on; -1: from the first one on.
        right: Query t sees keys up to ``t + right``; -1: up to the last one.
        bottom_right: Whether the diagonal ends at the last query and key, rather than
            start at the first ones.
    """

    left: int = -1
    right: int = -1
    bottom_right: bool = False

    @property
    def causal(self) -> bool:
        return self.right == 0

    @property
    def whole(self) -> bool:
        """Whether every query sees every key."""
        return self.left == self.right == -1


def mask_of(policy: MaskPolicy, longest: int) -> Mask | None:
    """The band that a policy is wherever queries and keys are the same tokens.

    Windows that reach `longest` tokens hide nothing.
    """
    left, right = (-1 if x >= longest else x for x in (policy.left, policy.right))
    match policy:
        case _policy._Full():
            return Mask(left, right)
        case _policy._Causal():  # nothing right of the diagonal is left to be cut
            return Mask(left, 0, policy.bottom_right)
        case _policy._Prefix() if policy.length <= 1:
            return Mask(left, 0)
        case _policy._Chunked() if policy.size == 1:
            bounds = [x for x in (left, policy.left_chunks) if 0 <= x < longest]
            return Mask(min(bounds, default=-1), 0)
    return None


def masks_of(policies: Sequence[MaskPolicy], longest: int) -> tuple[Mask, ...]:
    """The bands, each once, that policies which have one need."""
    masks = (mask_of(policy, longest) for policy in policies)
    return tuple(dict.fromkeys(mask for mask in masks if mask is not None))


class Segments(NamedTuple):
    """Up to M sequences of each row, and for each token what becomes of it.

    `mask` and the fields of tokens hold the index of a mask, NOTHING or UNFIT.
    """

    q_start: Int[Array, "B M"]
    q_len: Int[Array, "B M"]
    kv_start: Int[Array, "B M"]
    kv_len: Int[Array, "B M"]
    mask: Int[Array, "B M"]
    q_slot: Int[Array, "B T"]
    q_mask: Int[Array, "B T"]
    kv_mask: Int[Array, "B S"]

    @property
    def fit(self) -> Bool[Array, ""]:
        """Whether the masks say all that the key ranges say."""
        return (self.q_mask != UNFIT).all() & (self.kv_mask != UNFIT).all()

    def lengths(self, index: int) -> tuple[Int[Array, "B M"], Int[Array, "B M"]]:
        """Query and key tokens of the sequences with a mask; 0 for all others."""
        here = self.mask == index
        return jnp.where(here, self.q_len, 0), jnp.where(here, self.kv_len, 0)


def find_segments(
    ranges: KeyRanges, masks: tuple[Mask, ...], max_segments: int
) -> Segments:
    """The segments of each row in their order; O(T * max_segments) comparisons."""
    q_ids, q_lo, q_hi, kv_ids, kv_pos = ranges
    T, S = q_ids.shape[1], kv_ids.shape[1]
    real = q_ids > 0
    before = jnp.pad(q_ids[:, :-1], ((0, 0), (1, 0)))
    number = jnp.cumsum(real & (q_ids != before), axis=1, dtype=jnp.int32)
    slots = jnp.arange(1, max_segments + 1, dtype=jnp.int32)[:, None]

    # Here and below [B, M, T or S]; each use is one fused pass that stores none of it.
    q_at, kv_at = (jnp.arange(n, dtype=jnp.int32) for n in (T, S))
    own = (number[:, None] == slots) & real[:, None]
    q_len = own.sum(axis=-1, dtype=jnp.int32)
    q_start = jnp.where(own, q_at, T).min(axis=-1)
    ids = jnp.where(own, q_ids[:, None], 0).max(axis=-1)
    q_whole = (q_ids[:, None] == ids[..., None]).sum(axis=-1) == q_len

    seen = kv_ids[:, None] == ids[..., None]
    kv_len = seen.sum(axis=-1, dtype=jnp.int32)
    kv_start = jnp.where(seen, kv_at, S).min(axis=-1)
    kv_whole = jnp.where(seen, kv_at + 1, 0).max(axis=-1) - kv_start == kv_len
    first = jnp.where(seen, kv_pos[:, None], _policy.HIGHEST).min(axis=-1)
    last = jnp.where(seen, kv_pos[:, None], _policy.LOWEST).max(axis=-1)
    steps = (kv_pos - kv_at)[:, None] == (first - kv_start)[..., None]
    running = kv_whole & (steps | ~seen).all(axis=-1)

    first, last, start, length = (x[..., None] for x in (first, last, q_start, kv_len))
    lo, hi = (x[:, None] for x in (q_lo, q_hi))
    some = running[..., None] & (lo <= last) & (hi >= first)
    lowest, highest = jnp.maximum(lo, first) - first, jnp.minimum(hi, last) - first
    index = q_at - start
    mask = jnp.full_like(q_len, UNFIT)
    for code, m in reversed(list(enumerate(masks))):
        if m.whole:
            same = (lo <= first) & (last <= hi)
        else:
            at = index + (length - q_len[..., None]) if m.bottom_right else index
            least = jnp.maximum(at - m.left, 0) if m.left >= 0 else 0
            most = jnp.minimum(at + m.right, length - 1) if m.right >= 0 else length - 1
            same = some & (lowest == least) & (highest == most)
        mask = jnp.where((same | ~own).all(axis=-1), code, mask)
    mask = jnp.where(q_whole & kv_whole, mask, UNFIT)
    mask = jnp.where((kv_len == 0) | (q_len == 0), NOTHING, mask)

    def of_tokens(belongs):
        return jnp.where(belongs, mask[..., None], NOTHING).max(axis=1)

    too_many = number[:, -1:] > max_segments
    q_mask = jnp.where(real & (number > max_segments), UNFIT, of_tokens(own))
    q_mask = jnp.where(is_broken(q_lo, q_hi), UNFIT, q_mask)
    kv_mask = of_tokens(seen)
    lost = too_many & (kv_ids > 0) & (kv_mask == NOTHING)
    kv_mask = jnp.where(lost, UNFIT, kv_mask)
    q_slot = jnp.clip(number - 1, 0, max_segments - 1)
    return Segments(q_start, q_len, kv_start, kv_len, mask, q_slot, q_mask, kv_mask)
