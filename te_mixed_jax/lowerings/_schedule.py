"""Which queries make a tile, and which keys does it need?

Exact for tokens in any order: what is left out is not allowed, and whoever uses a tile
still compares ids and positions. Tight where sequences are contiguous, as packing
makes them.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int

from te_mixed_jax._policy import HIGHEST, LOWEST


def tile_ends(ids: Int[Array, "B T"], tile: int) -> Int[Array, "B T"]:
    """For each query: where a tile that starts there ends, exclusive.

    A tile with queries of two sequences needs the keys of both for all of them. So a
    tile that starts with half a tile or more of one sequence holds no other, and others
    stop where such a sequence starts. Shorter ones share tiles: there are at most
    ``5 * T / tile`` of them however the ids lie. Half a tile or more of padding is one
    step however long it is, since nothing is computed there.
    """
    T = ids.shape[1]
    at = lax.broadcasted_iota(jnp.int32, ids.shape, 1)
    edge = jnp.ones_like(ids[:, :1], bool)
    changes = ids[:, 1:] != ids[:, :-1]
    starts_run = jnp.concatenate([edge, changes], axis=1)
    ends_run = jnp.concatenate([changes, edge], axis=1)
    run_end = lax.cummin(jnp.where(ends_run, at + 1, T), axis=1, reverse=True)
    is_long = run_end - at >= tile // 2
    long_run = lax.cummin(jnp.where(starts_run & is_long, at, T), axis=1, reverse=True)
    next_long_run = jnp.concatenate([long_run[:, 1:], jnp.full_like(at[:, :1], T)], 1)
    tile_end = jnp.where(is_long & (ids <= 0), T, at + tile)
    return jnp.minimum(tile_end, jnp.where(is_long, run_end, next_long_run))


def needed_keys(
    q_ids: Int[Array, " rows"],
    q_lo: Int[Array, " rows"],
    q_hi: Int[Array, " rows"],
    kv_ids: Int[Array, " S"],
    kv_pos: Int[Array, " S"],
) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """The first key that a tile of queries needs, and the one after the last."""
    S = kv_ids.shape[0]
    sees = q_lo <= q_hi
    id_min = jnp.where(sees, q_ids, HIGHEST).min()
    id_max = jnp.where(sees, q_ids, LOWEST).max()
    lo, hi = jnp.where(sees, q_lo, HIGHEST).min(), jnp.where(sees, q_hi, LOWEST).max()
    # Positions of different sequences do not compare.
    mixed = id_min != id_max
    lo, hi = jnp.where(mixed, LOWEST, lo), jnp.where(mixed, HIGHEST, hi)
    needed = (id_min <= kv_ids) & (kv_ids <= id_max) & (lo <= kv_pos) & (kv_pos <= hi)
    at = jnp.arange(S, dtype=jnp.int32)
    return jnp.where(needed, at, S).min(), jnp.where(needed, at + 1, 0).max()
