"""Key ranges -> tiles of queries, and for each the stretch of keys that it needs.

Exact for tokens in any order: a schedule only leaves out pairs that are not allowed,
and whoever uses it still compares ids and positions. It is tight where sequences are
contiguous, as packing makes them.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from te_mixed_jax._policy import HIGHEST, LOWEST
from te_mixed_jax._ranges import KeyRanges

# Tiles of queries whose keys are searched together.
_SEARCHED_AT_ONCE = 64


class Schedule(NamedTuple):
    """Tiles of queries and the keys that each needs, per batch row; int32.

    Attributes:
        tiles: Number of tiles in use; what stands behind them means nothing.
        q_start, q_end: The tile is the queries ``q_start ... q_end - 1``.
        k_start, k_end: It needs the keys ``k_start ... k_end - 1``; none if not less.
    """

    tiles: Int[Array, " B"]
    q_start: Int[Array, "B n"]
    q_end: Int[Array, "B n"]
    k_start: Int[Array, "B n"]
    k_end: Int[Array, "B n"]


def schedule(ranges: KeyRanges, tile: int) -> Schedule:
    """Covers every query by exactly one tile of at most `tile` queries.

    A tile with queries of two sequences needs the keys of both for all of them, so
    sequences of half a tile or more are given tiles of their own.
    """
    q_ids, q_lo, q_hi, kv_ids, kv_pos = ranges
    count, q_start, q_end = _cut(q_ids, tile)
    ids, lo, hi, inside = _members((q_ids, q_lo, q_hi), q_start, q_end, tile)
    inside &= lo <= hi
    id_min, id_max = _extent(ids, inside)
    lo, hi = _extent(lo, inside)[0], _extent(hi, inside)[1]
    # Positions of different sequences do not compare.
    mixed = id_min != id_max
    lo, hi = jnp.where(mixed, LOWEST, lo), jnp.where(mixed, HIGHEST, hi)

    # First the tiles of keys that may hold a key in range, then the keys of the first
    # and of the last of them. The table of all pairs of tiles is never held at once.
    _, kv_start, kv_end = _cut(kv_ids, tile)
    ids, pos, inside = _members((kv_ids, kv_pos), kv_start, kv_end, tile)
    inside &= ids > 0
    (id_from, id_to), (pos_from, pos_to) = _extent(ids, inside), _extent(pos, inside)

    def find_kv_tiles(wanted):
        id_min, id_max, lo, hi = (x[:, None] for x in wanted)
        needed = (id_from <= id_max) & (id_min <= id_to)
        return _first_and_last(needed & (pos_from <= hi) & (lo <= pos_to))

    wanted = id_min, id_max, lo, hi
    first, last = lax.map(
        find_kv_tiles, tuple(x.T for x in wanted), batch_size=_SEARCHED_AT_ONCE
    )
    first, last = first.T, last.T
    id_min, id_max, lo, hi = (x[..., None] for x in wanted)

    def keys_of(kv_tile):
        start, end = (
            jnp.take_along_axis(x, kv_tile, axis=1, mode="clip")
            for x in (kv_start, kv_end)
        )
        ids, pos, inside = _members((kv_ids, kv_pos), start, end, tile)
        hit = (id_min <= ids) & (ids <= id_max) & (lo <= pos) & (pos <= hi) & inside
        return start, *_first_and_last(hit)

    start, offset, _ = keys_of(first)
    k_start = start + offset
    start, _, offset = keys_of(last)
    k_end = jnp.where(last < 0, 0, start + offset + 1)
    return Schedule(count, q_start, q_end, k_start, k_end)


def _cut(ids: Int[Array, "B T"], tile: int):
    """Cuts rows into stretches, and those into tiles: counts, starts, ends.

    A stretch is one sequence of at least half a tile, or all the shorter ones between
    two such. So there are O(T / tile) tiles however the ids lie.
    """
    B, T = ids.shape
    at = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    edge = jnp.ones((B, 1), bool)
    changes = ids[:, 1:] != ids[:, :-1]
    starts_run = jnp.concatenate([edge, changes], axis=1)
    ends_run = jnp.concatenate([changes, edge], axis=1)
    run_start = lax.cummax(jnp.where(starts_run, at, 0), axis=1)
    run_end = lax.cummin(jnp.where(ends_run, at + 1, T), axis=1, reverse=True)
    long = run_end - run_start >= tile // 2
    beside_long = long | jnp.concatenate([edge, long[:, :-1]], axis=1)
    starts_stretch = starts_run & beside_long
    stretch_start = lax.cummax(jnp.where(starts_stretch, at, 0), axis=1)
    starts_tile = (at - stretch_start) % tile == 0

    # At most 2T/tile long stretches, as many short ones and one more between them,
    # and T/tile tiles that start inside a stretch.
    size = min(T, 5 * T // tile + 2)
    find = jax.vmap(lambda row: jnp.nonzero(row, size=size, fill_value=T)[0])
    start = find(starts_tile).astype(jnp.int32)
    end = jnp.concatenate([start[:, 1:], jnp.full((B, 1), T, jnp.int32)], axis=1)
    return starts_tile.sum(axis=1, dtype=jnp.int32), start, end


def _members(arrays, start, end, tile: int):
    """The values of the tokens of each tile, [B, tiles, tile], and which are real."""
    at = start[..., None] + jnp.arange(tile, dtype=jnp.int32)
    inside = at < end[..., None]

    def gather(x):
        at_most = jnp.minimum(at, x.shape[1] - 1).reshape(x.shape[0], -1)
        return jnp.take_along_axis(x, at_most, axis=1).reshape(at.shape)

    return (*map(gather, arrays), inside)


def _extent(values, inside: Bool[Array, "B tiles tile"]):
    """Least and greatest value inside each tile; nothing fits between if none is."""
    low = jnp.where(inside, values, HIGHEST).min(axis=2)
    return low, jnp.where(inside, values, LOWEST).max(axis=2)


def _first_and_last(flags: Bool[Array, "*n m"]):
    """Index of the first and last true entry of each row; (m, -1) if none is."""
    last_axis = flags.ndim - 1
    index = lax.broadcasted_iota(jnp.int32, flags.shape, last_axis)
    first = jnp.where(flags, index, flags.shape[-1]).min(axis=last_axis)
    return first, jnp.where(flags, index, -1).max(axis=last_axis)
