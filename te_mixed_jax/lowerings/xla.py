"""Blockwise attention in plain JAX: the default on every platform, O(T) memory.

Tiles of queries run one after the other, each over the keys that its schedule names.
The sums always run in the same order, so results are bitwise reproducible.

Inside, heads lead: queries are ``[K, G, rows, H]`` with ``G = N // K`` query heads a
key head, keys ``[K, rows, H]``, scores ``[K, G, rows, keys]``.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from te_mixed_jax._ranges import Q_PADDING, KeyRanges, is_broken
from te_mixed_jax._types import Config, accumulator_dtype, empty_lse, finite_rows
from te_mixed_jax.lowerings._schedule import Schedule, schedule

# Rows of a tile, of queries and of keys. On a CPU 64 is large enough for the products
# to run at full rate, and small enough to waste little at the edges of sequences.
_TILE = 64


def supports(q, k, v, config: Config) -> str | None:
    """Everything."""
    del q, k, v, config
    return None


def forward(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    ranges: KeyRanges,
    *,
    config: Config,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Online softmax over the keys that each tile of queries needs."""
    (B, T, N, _), (K, V) = q.shape, v.shape[2:]
    dtype = accumulator_dtype(q.dtype)
    lowest = empty_lse(dtype)
    out = jnp.zeros((B, T, N, V), q.dtype)
    lse = jnp.full((B, T, N), lowest, dtype)
    broken = is_broken(ranges.q_lo, ranges.q_hi)[..., None]

    if q.size and k.size:
        keys = _keys(k, v, ranges, dtype)
        tiles = schedule(ranges, min(_TILE, T))

        def one_tile(index, results):
            out, lse = results
            tile = _query_tile(tiles, index, q, ranges, K, config.scale, dtype)

            def step(carry):
                at, m, total, acc = carry
                _, v_tile, seen, s = _scores(tile, keys, at)
                m_next = jnp.maximum(m, s.max(axis=-1))
                p = jnp.where(seen, jnp.exp(s - m_next[..., None]), 0)
                shrink = jnp.exp(m - m_next)
                total = total * shrink + p.sum(axis=-1)
                acc = acc * shrink[..., None] + _product("kgrs,ksv->kgrv", p, v_tile)
                return at + keys.tile, m_next, total, acc

            rows = tile.q.shape[:-1]
            start = (
                tiles.k_start[index],
                jnp.full(rows, lowest, dtype),
                jnp.zeros(rows, dtype),
                jnp.zeros((*rows, V), dtype),
            )
            more = lambda carry: carry[0] < tiles.k_end[index]
            _, m, total, acc = lax.while_loop(more, step, start)
            empty = total == 0
            total = jnp.where(empty, 1, total)
            tile_lse = jnp.where(empty, lowest, m + jnp.log(total))
            out = _store(out, tile, acc / total[..., None])
            return out, _store(lse, tile, tile_lse)

        out, lse = lax.fori_loop(0, tiles.count, one_tile, (out, lse))
    out = jnp.where(broken[..., None], jnp.nan, out)
    return out, jnp.where(broken, jnp.nan, lse)


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
) -> tuple[
    Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]
]:
    """The same walk once more: probabilities from `lse`, five products a step.

    With ``p = exp(s - lse)``: ``dv = p^T dout``, ``dp = dout v^T``, and since lse's own
    cotangent adds ``p * dlse``, ``ds = p * (dp - rowsum(out * dout) + dlse)``.
    """
    (_, T, _, _), (B, S, K, V) = q.shape, v.shape
    dtype = accumulator_dtype(q.dtype)
    if not (q.size and k.size):
        return tuple(jnp.zeros_like(x) for x in (q, k, v))
    keys = _keys(k, v, ranges, dtype)
    tiles = schedule(ranges, min(_TILE, T))

    def one_tile(index, grads):
        dq, dk, dv = grads
        tile = _query_tile(tiles, index, q, ranges, K, config.scale, dtype)
        load = lambda x: _by_key_head(_rows(x, tile.row, tile.start, tile.size), K)
        tile_dout, dout_taint = finite_rows(load(dout).astype(dtype))
        delta = (load(out).astype(dtype) * tile_dout).sum(axis=-1)
        if dlse is not None:
            delta -= load(dlse)
        tile_lse = load(lse) + dout_taint

        def step(carry):
            at, tile_dq, dk, dv = carry
            k_tile, v_tile, seen, s = _scores(tile, keys, at)
            p = jnp.where(seen, jnp.exp(s - tile_lse[..., None]), 0)
            dp = _product("kgrv,ksv->kgrs", tile_dout, v_tile)
            ds = jnp.where(seen, p * (dp - delta[..., None]), 0)
            tile_dq += _product("kgrs,ksh->kgrh", ds, k_tile)
            dk = _add(dk, tile, keys, at, _product("kgrs,kgrh->ksh", ds, tile.q))
            dv = _add(dv, tile, keys, at, _product("kgrs,kgrv->ksv", p, tile_dout))
            return at + keys.tile, tile_dq, dk, dv

        more = lambda carry: carry[0] < tiles.k_end[index]
        start = tiles.k_start[index], jnp.zeros_like(tile.q), dk, dv
        _, tile_dq, dk, dv = lax.while_loop(more, step, start)
        return _store(dq, tile, tile_dq * config.scale), dk, dv

    heads_first = jnp.zeros((B, K, S, q.shape[3]), dtype), jnp.zeros((B, K, S, V), dtype)
    dq, *dkv = lax.fori_loop(
        0, tiles.count, one_tile, (jnp.zeros_like(q), *heads_first)
    )
    dk, dv = (x.swapaxes(1, 2).astype(q.dtype) for x in dkv)
    return dq, dk, dv


class _Keys(NamedTuple):
    """Keys and values, heads first, with finite rows."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    taint: Float[Array, "B K S"]
    ids: Int[Array, "B S"]
    pos: Int[Array, "B S"]

    @property
    def tile(self) -> int:
        return min(_TILE, self.ids.shape[1])

    def start(self, at):
        """Where the tile at `at` is read: the last one ends where the row ends."""
        return jnp.minimum(at, self.ids.shape[1] - self.tile)


def _keys(k, v, ranges: KeyRanges, dtype) -> _Keys:
    k, v = (x.swapaxes(1, 2).astype(dtype) for x in (k, v))
    (k, k_taint), (v, v_taint) = finite_rows(k), finite_rows(v)
    return _Keys(k, v, k_taint + v_taint, ranges.kv_ids, ranges.kv_pos)


class _QueryTile(NamedTuple):
    """A tile of scaled queries. Rows that are not its `own` are other tiles' work.

    They are padding here: they see nothing and add nothing.
    """

    row: Int[Array, ""]
    start: Int[Array, ""]
    own: Bool[Array, " rows"]
    ids: Int[Array, " rows"]
    lo: Int[Array, " rows"]
    hi: Int[Array, " rows"]
    q: Float[Array, "K G rows H"]
    taint: Float[Array, "K G rows"]

    @property
    def size(self) -> int:
        return self.ids.shape[0]


def _query_tile(tiles: Schedule, index, q, ranges: KeyRanges, K, scale, dtype):
    T = q.shape[1]
    size = min(_TILE, T)
    row, start = tiles.row[index], jnp.minimum(tiles.q_start[index], T - size)
    at = start + jnp.arange(size, dtype=jnp.int32)
    own = (tiles.q_start[index] <= at) & (at < tiles.q_end[index])
    ids, lo, hi = (_rows(x, row, start, size) for x in ranges[:3])
    ids = jnp.where(own, ids, Q_PADDING)
    q_tile = _by_key_head(_rows(q, row, start, size), K).astype(dtype)
    return _QueryTile(row, start, own, ids, lo, hi, *finite_rows(q_tile * scale))


def _scores(tile: _QueryTile, keys: _Keys, at):
    """The keys and values from `at` on, who sees them, and the masked scores."""
    start = keys.start(at)
    ids, pos = (_rows(x, tile.row, start, keys.tile) for x in (keys.ids, keys.pos))
    k, v, taint = (
        lax.dynamic_slice_in_dim(x[tile.row], start, keys.tile, axis=1)
        for x in (keys.k, keys.v, keys.taint)
    )
    fresh = start + jnp.arange(keys.tile, dtype=jnp.int32) >= at
    seen = (tile.ids[:, None] == ids) & (tile.lo[:, None] <= pos) & fresh
    seen &= pos <= tile.hi[:, None]
    s = _product("kgrh,ksh->kgrs", tile.q, k)
    s = s + tile.taint[..., None] + taint[:, None, None]
    return k, v, seen, jnp.where(seen, s, empty_lse(s.dtype))


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=a.dtype)


def _rows(x, row, start, size):
    """`x[row, start : start + size]`."""
    index = (row, start) + (0,) * (x.ndim - 2)
    return lax.dynamic_slice(x, index, (1, size, *x.shape[2:]))[0]


def _by_key_head(x, K):
    """[rows, N, ...] as [K, G, rows, ...]."""
    x = x.reshape(x.shape[0], K, x.shape[1] // K, *x.shape[2:])
    return jnp.moveaxis(x, 0, 2)


def _store(x, tile: _QueryTile, value):
    """Writes [K, G, rows, ...] to the tile's own rows of `x` [B, T, N, ...]."""
    value = jnp.moveaxis(value, 2, 0).reshape(tile.size, *x.shape[2:])
    own = tile.own.reshape(-1, *(1,) * (x.ndim - 2))
    before = _rows(x, tile.row, tile.start, tile.size)
    value = jnp.where(own, value.astype(x.dtype), before)
    index = (tile.row, tile.start) + (0,) * (x.ndim - 2)
    return lax.dynamic_update_slice(x, value[None], index)


def _add(x, tile: _QueryTile, keys: _Keys, at, value):
    """Adds [K, keys, ...] to `x` [B, K, S, ...] at the tile of keys from `at` on."""
    index = (tile.row, 0, keys.start(at), 0)
    before = lax.dynamic_slice(x, index, (1, *value.shape))
    return lax.dynamic_update_slice(x, before + value[None], index)
