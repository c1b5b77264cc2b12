"""Key ranges -> tiles of queries, and for each the stretch of keys that it needs.

Exact for tokens in any order: a schedule only leaves out pairs that are not allowed,
and whoever uses it still compares ids and positions. It is tight when sequences are
contiguous, as packing makes them.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from te_mixed_jax._policy import HIGHEST, LOWEST
from te_mixed_jax._ranges import KeyRanges

# Keys that the search for a tile's first and last key looks at together.
_BLOCK = 32


class Schedule(NamedTuple):
    """Tiles of query rows and the keys that each needs; int32 ``[tiles]``.

    Attributes:
        count: Number of tiles in use; entries from there on mean nothing.
        row: Batch row.
        q_start, q_end: The queries ``q_start ... q_end - 1``, at most a tile.
        k_start, k_end: The keys ``k_start ... k_end - 1``; none if not less.
    """

    count: Int[Array, ""]
    row: Int[Array, " tiles"]
    q_start: Int[Array, " tiles"]
    q_end: Int[Array, " tiles"]
    k_start: Int[Array, " tiles"]
    k_end: Int[Array, " tiles"]


def schedule(ranges: KeyRanges, tile: int) -> Schedule:
    """Covers every query by exactly one tile of at most `tile` rows.

    A tile that holds rows of two sequences needs the keys of both for all its rows, so
    sequences of half a tile or more start tiles of their own.
    """
    B, T = ranges.q_ids.shape
    S = ranges.kv_ids.shape[1]
    starts_tile = _tile_starts(ranges.q_ids, tile)
    # A stretch is at least half a tile long, or lies next to one that is.
    tiles = B * min(T, 5 * T // tile + 2)

    token = jnp.nonzero(starts_tile.reshape(-1), size=tiles, fill_value=B * T)[0]
    token = token.astype(jnp.int32)
    row = jnp.minimum(token // T, B - 1)
    q_start = token - row * T
    following = jnp.append(token[1:], B * T)
    q_end = jnp.minimum(following - row * T, T)

    at = q_start[:, None] + jnp.arange(tile, dtype=jnp.int32)
    inside = at < q_end[:, None]
    at = jnp.minimum(at, T - 1)
    ids, lo, hi = (x[row[:, None], at] for x in ranges[:3])
    inside &= lo <= hi
    id_min = jnp.where(inside, ids, HIGHEST).min(axis=1)
    id_max = jnp.where(inside, ids, LOWEST).max(axis=1)
    # Positions of different sequences do not compare.
    mixed = id_min != id_max
    lo = jnp.where(mixed, LOWEST, jnp.where(inside, lo, HIGHEST).min(axis=1))
    hi = jnp.where(mixed, HIGHEST, jnp.where(inside, hi, LOWEST).max(axis=1))

    # First the blocks of keys that may hold a key in range, then the keys of the
    # first and the last of them.
    blocks = -(-S // _BLOCK)
    padding = ((0, 0), (0, blocks * _BLOCK - S))
    kv_ids = jnp.pad(ranges.kv_ids, padding, constant_values=-1)
    kv_pos = jnp.pad(ranges.kv_pos, padding)
    kv_ids, kv_pos = (x.reshape(B, blocks, _BLOCK) for x in (kv_ids, kv_pos))
    real = kv_ids > 0
    bounds = (
        jnp.where(real, kv_ids, HIGHEST).min(axis=2),
        jnp.where(real, kv_ids, LOWEST).max(axis=2),
        jnp.where(real, kv_pos, HIGHEST).min(axis=2),
        jnp.where(real, kv_pos, LOWEST).max(axis=2),
    )
    id_from, id_to, pos_from, pos_to = (x[row] for x in bounds)
    id_min, id_max, lo, hi = (x[:, None] for x in (id_min, id_max, lo, hi))
    needed = (id_from <= id_max) & (id_min <= id_to) & (pos_from <= hi) & (lo <= pos_to)
    first, last = _first_and_last(needed)

    def keys_of(block):
        ids, pos = kv_ids[row, block], kv_pos[row, block]
        return (id_min <= ids) & (ids <= id_max) & (lo <= pos) & (pos <= hi)

    k_start = first * _BLOCK + _first_and_last(keys_of(first))[0]
    k_end = last * _BLOCK + _first_and_last(keys_of(last))[1] + 1
    k_end = jnp.where(needed.any(axis=1), jnp.minimum(k_end, S), 0)
    return Schedule(starts_tile.sum(dtype=jnp.int32), row, q_start, q_end, k_start, k_end)


def _tile_starts(ids: Int[Array, "B T"], tile: int) -> Bool[Array, "B T"]:
    """Queries that start a tile: the row cut into stretches, each cut into tiles.

    A stretch is one sequence of at least half a tile, or all the shorter ones between
    two such. So there are O(T / tile) tiles however the ids lie.
    """
    T = ids.shape[1]
    at = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    starts_run = jnp.ones_like(ids, bool).at[:, 1:].set(ids[:, 1:] != ids[:, :-1])
    run_start = lax.cummax(jnp.where(starts_run, at, 0), axis=1)
    ends_run = jnp.ones_like(ids, bool).at[:, :-1].set(starts_run[:, 1:])
    run_end = lax.cummin(jnp.where(ends_run, at + 1, T), axis=1, reverse=True)
    long = run_end - run_start >= tile // 2
    beside_long = long | jnp.zeros_like(long).at[:, 1:].set(long[:, :-1])
    starts_stretch = (starts_run & beside_long).at[:, 0].set(True)
    stretch_start = lax.cummax(jnp.where(starts_stretch, at, 0), axis=1)
    return (at - stretch_start) % tile == 0


def _first_and_last(flags: Bool[Array, "n m"]):
    """Index of the first and last true entry of each row; (m, -1) if none is."""
    m = flags.shape[1]
    index = lax.broadcasted_iota(jnp.int32, flags.shape, 1)
    first = jnp.where(flags, index, m).min(axis=1)
    last = jnp.where(flags, index, -1).max(axis=1)
    return first, last
