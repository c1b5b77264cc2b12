"""Which tiles of keys does each tile of queries need, and which of them whole?

All from key ranges, without sorting tokens, in O(T) memory and a boolean per pair of
steps of 64 tokens. Exact for tokens in any order: a tile that is left out holds no key
that is seen, a tile that counts as whole is seen by all queries wherever it matters,
and in all others ids and positions are compared. Tight where a sequence lies in one
piece with running positions.
"""

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from te_mixed_jax._policy import HIGHEST, LOWEST
from te_mixed_jax._ranges import KV_PADDING, Q_PADDING, KeyRanges, is_broken

# Keys of a step of the walk over them, and tokens that a warpgroup has of its own.
TILE, STEP = 128, 64
# What query ids are where a rule was broken.
Q_BROKEN = -2
# Two counts of tiles, or of steps, share an int32.
MAX_TOKENS = (1 << 15) * STEP - TILE


class Tiles(NamedTuple):
    """What the kernels read of a mask; lengths are padded to whole tiles.

    Attributes:
        queries: Per query its id, and the positions that it sees: ``pos - queries[1] <=
            queries[2]``, in wrapping int32; and whether its tile has padding.
        keys: Per key its id and position, and whether its tile has padding.
        of_queries: Per tile of queries its number in the batch and what to walk: the
            first key, a multiple of 8, and how many tiles of keys from there on. Then
            for each step of queries which of these it needs, from which to which, and
            which of them whole, see `unpacked`. Those that need most come first.
        of_keys: Per tile of keys the same, in steps of queries.
    """

    queries: Int[Array, "B 4 Tp"]
    keys: Int[Array, "B 3 Sp"]
    of_queries: Int[Array, "q_tiles entry"]
    of_keys: Int[Array, "kv_tiles entry"]


def unpacked(start_and_stop):
    """The two counts of an entry of `Tiles.of_queries` or `Tiles.of_keys`."""
    return start_and_stop & 0xFFFF, start_and_stop >> 16


def tiles_of(
    ranges: KeyRanges,
    *,
    steps_of_queries: int = 2,
    steps_of_keys: int = 2,
    queries_per_step: int = STEP,
) -> Tiles:
    """The tiles of one call, whatever the number of heads.

    A tile of queries has so many steps, and one of keys; the last one of a row may
    reach beyond it. `queries_per_step` is of the walk over queries, a divisor of
    `TILE`.
    """
    B, T = ranges.q_ids.shape
    S = ranges.kv_ids.shape[1]
    q_ids, q_lo, q_hi, kv_ids, kv_pos = (
        jnp.pad(x, ((0, 0), (0, -x.shape[1] % TILE))) for x in ranges
    )
    inside = lax.broadcasted_iota(jnp.int32, kv_ids.shape, 1) < S
    kv_ids = jnp.where(inside, kv_ids, KV_PADDING)
    sees = (q_lo <= q_hi) & (q_ids > 0)
    blind = jnp.where(is_broken(q_lo, q_hi), Q_BROKEN, Q_PADDING)
    queries = jnp.where(sees, q_ids, blind), q_lo + LOWEST, q_hi - q_lo + LOWEST

    first, last, exact = _seen_keys(queries[0], q_lo, q_hi, kv_ids, kv_pos)
    some = sees & (first <= last)
    # Queries beyond the row may see what they like: nobody reads what they give.
    real = lax.broadcasted_iota(jnp.int32, q_ids.shape, 1) < T

    def per_step(reduce, x):
        return reduce(x.reshape(B, -1, STEP), axis=-1)

    of_steps = _Needs(
        start=per_step(jnp.min, jnp.where(some, first, S)),
        stop=per_step(jnp.max, jnp.where(some, last + 1, 0)),
        whole_start=per_step(jnp.max, jnp.where(real, first, 0)),
        whole_stop=per_step(jnp.min, jnp.where(real, last + 1, S)),
        exact=per_step(jnp.all, (some & exact) | ~real),
    )
    Tp, Sp = q_ids.shape[1], kv_ids.shape[1]
    # -1 where a query sees nothing: before all keys.
    last = jnp.where(some, last, -1)
    from_keys = of_steps.seen_from_keys(first, last, Sp // STEP)
    return Tiles(
        jnp.stack([*queries, _has_padding(queries[0])], axis=1),
        jnp.stack([kv_ids, kv_pos, _has_padding(kv_ids)], axis=1),
        of_steps.table(steps_of_queries, TILE, Sp),
        from_keys.table(steps_of_keys, queries_per_step, Tp),
    )


def _has_padding(ids):
    """1 for all tokens of a stretch of `TILE` of which one is padding, else 0."""
    has = (ids <= 0).reshape(ids.shape[0], -1, TILE).any(-1, keepdims=True)
    return (
        jnp.broadcast_to(has, (*has.shape[:2], TILE))
        .reshape(ids.shape)
        .astype(ids.dtype)
    )


class _Needs(NamedTuple):
    """Keys that a step of queries needs: from `start` to `stop`, exclusive.

    Those from `whole_start` to `whole_stop` all of the queries see, if `exact`.
    """

    start: Int[Array, "B n"]
    stop: Int[Array, "B n"]
    whole_start: Int[Array, "B n"]
    whole_stop: Int[Array, "B n"]
    exact: Bool[Array, "B n"]

    def ends(self, first, width: int):
        """The four ends counted from `first` on in what is `width` wide, in order."""
        stop = -(-jnp.maximum(self.stop - first, 0) // width)
        start = jnp.minimum((self.start - first) // width, stop)
        # Of queries that see nothing, or beyond the row, the others may be anywhere.
        whole_start = jnp.maximum(-((first - self.whole_start) // width), start)
        whole_stop = jnp.minimum((self.whole_stop - first) // width, stop)
        whole = self.exact & (whole_start < whole_stop)
        whole_start = jnp.where(whole, whole_start, stop)
        return start, stop, whole_start, jnp.where(whole, whole_stop, stop)

    def table(self, steps_per_tile: int, width: int, length: int):
        """What to walk for tiles of so many steps, by `width` tokens of `length`."""
        missing = -self.start.shape[1] % steps_per_tile
        padded = [
            jnp.pad(x, ((0, 0), (0, missing)), constant_values=nothing)
            for x, nothing in zip(self, (length, 0, 0, 0, False), strict=True)
        ]
        # Element by element, which XLA puts into one kernel.
        steps = [
            _Needs(*(x[:, i::steps_per_tile] for x in padded))
            for i in range(steps_per_tile)
        ]
        # Copies go by 8 tokens, and do not reach beyond the row's end.
        first = functools.reduce(jnp.minimum, (x.start for x in steps)) // 8 * 8
        stop = functools.reduce(jnp.maximum, (x.stop for x in steps))
        count = -(-jnp.maximum(stop - first, 0) // width)
        first = jnp.minimum(first, length - count * width)
        packed = (x for step in steps for x in _packed(*step.ends(first, width)))
        order = jnp.argsort(-count.reshape(-1), stable=True)
        columns = (x.reshape(-1)[order] for x in (first, count, *packed))
        return jnp.stack([order.astype(jnp.int32), *columns], axis=-1)

    def seen_from_keys(self, first, last, kv_steps: int) -> "_Needs":
        """The same of steps of keys: which queries need them.

        `first` and `last` are of each query, [B, Tp], the first key and the last. This
        compares all pairs of steps; XLA may make an array of that many booleans.
        """
        start, stop, whole_start, whole_stop, exact = (x[:, None] for x in self)
        low = jnp.arange(kv_steps, dtype=jnp.int32)[:, None] * STEP
        high = low + STEP
        needed = (start < high) & (low < stop)
        whole = needed & exact & (whole_start <= low) & (high <= whole_stop)
        B, n = self.start.shape
        at = jnp.arange(n, dtype=jnp.int32)
        stop = jnp.where(needed, at + 1, 0).max(-1)
        start = jnp.where(needed, at, n).min(-1)
        whole_start = jnp.minimum(jnp.where(whole, at, n).min(-1), stop)
        # Whole as far as there is no gap.
        ends = (at > whole_start[..., None]) & ~whole
        whole_stop = jnp.minimum(jnp.where(ends, at, n).min(-1), stop)

        # Which queries of the first step and of the last one it is.
        at = jnp.arange(STEP, dtype=jnp.int32)
        row = jnp.arange(B, dtype=jnp.int32)[:, None]

        def seeing(step):
            step = jnp.clip(step, 0, n - 1)
            firsts, lasts = (x.reshape(B, n, STEP)[row, step] for x in (first, last))
            return (firsts < high) & (low <= lasts)

        before = jnp.where(seeing(start), at, STEP).min(-1) % STEP
        behind = (STEP - jnp.where(seeing(stop - 1), at + 1, 0).max(-1)) % STEP
        return _Needs(
            start * STEP + before,
            stop * STEP - behind,
            whole_start * STEP,
            whole_stop * STEP,
            jnp.ones_like(start, jnp.bool_),
        )


def _packed(start, stop, whole_start, whole_stop):
    return start | stop << 16, whole_start | whole_stop << 16


def _seen_keys(q_ids, q_lo, q_hi, kv_ids, kv_pos):
    """Per query an interval of keys that holds all that it sees, and if that is exact.

    Keys are found by their id, in a table with a place for each id modulo its size.
    Where ids meet in a place, or a sequence has more than one run of keys with running
    positions, the interval covers all of these and is not exact.
    """
    B, S = kv_ids.shape
    at = lax.broadcasted_iota(jnp.int32, kv_ids.shape, 1)
    new = (kv_ids[:, 1:] != kv_ids[:, :-1]) | (kv_pos[:, 1:] != kv_pos[:, :-1] + 1)
    new |= kv_pos[:, :-1] == HIGHEST  # where the next number would wrap
    edge = jnp.ones_like(new[:, :1], shape=(B, 1))
    starts = jnp.concatenate([edge, new], axis=1)
    ends = jnp.concatenate([new, edge], axis=1)
    size = 1 << (S - 1).bit_length()

    def place(ids):
        return ids & (size - 1)

    # Least start, greatest start and greatest end of the runs of a place.
    table = jnp.full((B, size, 3), S, jnp.int32)
    runs = jnp.stack(
        [
            jnp.where(starts, at, S),
            jnp.where(starts, -at, S),
            jnp.where(ends, -at, S),
        ],
        axis=-1,
    )
    where = jnp.where((starts | ends) & (kv_ids > 0), place(kv_ids), size)
    row = jnp.arange(B, dtype=jnp.int32)[:, None]
    table = table.at[row, where].min(runs, mode="drop")
    start, last_start, end = jnp.moveaxis(table[row, place(q_ids)], -1, 0)
    one_run = start == -last_start
    end = -end
    # Positions of that run's ends; it is the query's own only if ids agree.
    inside = jnp.minimum(start, S - 1)
    one_run &= kv_ids[row, inside] == q_ids
    lowest = kv_pos[row, inside]
    highest = lowest + (end - start)
    behind = jnp.where(q_lo > lowest, q_lo - lowest, 0)
    ahead = jnp.where(q_hi < highest, highest - q_hi, 0)
    nothing = (q_lo > highest) | (q_hi < lowest)
    first = jnp.where(one_run, jnp.where(nothing, S, start + behind), start)
    last = jnp.where(one_run, jnp.where(nothing, -1, end - ahead), end)
    return first, last, one_run
