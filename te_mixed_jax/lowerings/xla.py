"""Blockwise attention in plain JAX: runs on every platform, in O(T) memory.

Tiles of queries run one after the other, each over the keys that its schedule names.
The sums always run in the same order, so results are bitwise reproducible.

Inside a tile key heads lead: queries are ``[K, R, H]``, where the R rows are those of
all query heads of one key head, ``(N // K) * rows``; keys are ``[K, keys, H]``.
"""

from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from te_mixed_jax._ranges import (
    EMPTY,
    KV_PADDING,
    Q_PADDING,
    KeyRanges,
    is_broken,
)
from te_mixed_jax._types import (
    Config,
    accumulator_dtype,
    empty_lse,
    finite_rows,
    row_taint,
)
from te_mixed_jax.lowerings._schedule import needed_keys, tile_ends

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
    (B, T, N, _), V = q.shape, v.shape[3]
    dtype = accumulator_dtype(q.dtype)
    lowest = empty_lse(dtype)
    # What no tile writes: queries that broke a rule.
    broken = is_broken(ranges.q_lo, ranges.q_hi)[..., None]
    lse = jnp.where(broken, jnp.nan, jnp.full((B, T, N), lowest, dtype))
    out = jnp.where(broken[..., None], jnp.nan, jnp.zeros((B, T, N, V), q.dtype))

    if q.size and k.size:
        keys = _Keys.of(k, v, ranges)

        def one_tile(queries, results):
            out, lse = results

            def step(carry):
                at, m, total, acc = carry
                tile = keys.load(queries.row, at)
                s, _ = _masked_scores(queries, tile)
                m_next = jnp.maximum(m, s.max(axis=-1))
                # Masked scores are `lowest` and vanish exactly against any other
                # maximum; against one that is `lowest` itself they would count.
                m_used = jnp.where(m_next == lowest, 0, m_next)
                p = jnp.exp(s - m_used[..., None])
                shrink = jnp.exp(m - m_used)
                total = total * shrink + p.sum(axis=-1)
                acc = acc * shrink[..., None] + _product("krs,ksv->krv", p, tile.v)
                return at + keys.rows, m_next, total, acc

            rows = queries.q.shape[:-1]
            start = (
                queries.k_start,
                jnp.full(rows, lowest, dtype),
                jnp.zeros(rows, dtype),
                jnp.zeros((*rows, V), dtype),
            )
            _, m, total, acc = _while_keys(queries, step, start)
            empty = total == 0
            total = jnp.where(empty, 1, total)
            taint = jnp.where(empty, 0, queries.taint)
            tile_out = acc / total[..., None] + taint[..., None]
            tile_lse = jnp.where(empty, lowest, m + jnp.log(total)) + taint
            return queries.store(out, tile_out), queries.store(lse, tile_lse)

        out, lse = _for_each_tile(one_tile, (out, lse), q, keys, ranges, config)
    return out, lse


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
) -> tuple[Float[Array, "B T N H"], Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """The same walk once more: probabilities from `lse`, five products a step.

    With ``p = exp(s - lse)``: ``dv = p^T dout``, ``dp = dout v^T``, and since lse's own
    cotangent adds ``p * dlse``, ``ds = p * (dp - rowsum(out * dout) + dlse)``.
    """
    if not (q.size and k.size):
        return jnp.zeros_like(q), jnp.zeros_like(k), jnp.zeros_like(v)
    dtype = accumulator_dtype(q.dtype)
    lowest = empty_lse(dtype)
    keys = _Keys.of(k, v, ranges)

    def one_tile(queries, grads):
        dq, dk, dv = grads
        tile_dout, taint = finite_rows(queries.load_like(dout).astype(dtype))
        tile_lse = queries.load_like(lse) + taint
        delta = (queries.load_like(out).astype(dtype) * tile_dout).sum(axis=-1)
        if dlse is not None:
            delta -= queries.load_like(dlse)

        def step(carry):
            at, tile_dq, dk, dv = carry
            tile = keys.load(queries.row, at)
            s, seen = _masked_scores(queries, tile)
            p = jnp.exp(jnp.where(seen, s - tile_lse[..., None], lowest))
            dp = _product("krv,ksv->krs", tile_dout, tile.v)
            ds = jnp.where(seen, p * (dp - delta[..., None]), 0)
            tile_dq += _product("krs,ksh->krh", ds, tile.k)
            dk = keys.add(dk, queries.row, at, _product("krs,krh->ksh", ds, queries.q))
            dv = keys.add(dv, queries.row, at, _product("krs,krv->ksv", p, tile_dout))
            return at + keys.rows, tile_dq, dk, dv

        start = queries.k_start, jnp.zeros_like(queries.q), dk, dv
        _, tile_dq, dk, dv = _while_keys(queries, step, start)
        return queries.store(dq, tile_dq * config.scale), dk, dv

    zeros = jnp.zeros_like(q), jnp.zeros_like(keys.k), jnp.zeros_like(keys.v)
    dq, *dkv = _for_each_tile(one_tile, zeros, q, keys, ranges, config)
    dk, dv = (x.swapaxes(1, 2).astype(q.dtype) for x in dkv)
    return dq, dk, dv


def _for_each_tile(one_tile, results, q, keys: "_Keys", ranges: KeyRanges, config):
    """Runs `results = one_tile(queries, results)` over all tiles of all rows."""
    B, T = ranges.q_ids.shape
    ends = tile_ends(ranges.q_ids, min(_TILE, T))

    def one_row(row, results):
        def step(carry):
            start, results = carry
            end = ends[row, start]
            queries = _Queries.load(q, keys, ranges, row, start, end, config.scale)
            return end, one_tile(queries, results)

        more = lambda carry: carry[0] < T  # noqa: E731
        return lax.while_loop(more, step, (jnp.int32(0), results))[1]

    return lax.fori_loop(jnp.int32(0), jnp.int32(B), one_row, results)


def _while_keys(queries: "_Queries", step, carry):
    """Runs `carry = step(carry)` while its first value is a key that they need."""
    return lax.while_loop(lambda carry: carry[0] < queries.k_end, step, carry)


class _KeyTile(NamedTuple):
    """Some keys of one row; those whose k or v is not finite are 0, with NaN taint."""

    k: Float[Array, "K keys H"]
    v: Float[Array, "K keys V"]
    taint: Float[Array, "K keys"]
    ids: Int[Array, " keys"]
    pos: Int[Array, " keys"]


class _Keys(NamedTuple):
    """All keys, heads first, and how to reach a tile."""

    k: Float[Array, "B K S H"]
    v: Float[Array, "B K S V"]
    taint: Float[Array, "B K S"]
    ids: Int[Array, "B S"]
    pos: Int[Array, "B S"]

    @classmethod
    def of(cls, k, v, ranges: KeyRanges) -> "_Keys":
        dtype = accumulator_dtype(k.dtype)
        taint = (row_taint(k) + row_taint(v)).astype(dtype)
        k, v, taint = (x.swapaxes(1, 2).astype(dtype) for x in (k, v, taint))
        return cls(k, v, taint, ranges.kv_ids, ranges.kv_pos)

    @property
    def rows(self) -> int:
        return min(_TILE, self.ids.shape[1])

    def _start(self, at):
        """Where the tile at `at` is read: the last one ends where the row ends."""
        return jnp.minimum(at, self.ids.shape[1] - self.rows)

    def load(self, row, at) -> _KeyTile:
        start = self._start(at)
        ids, pos = (_rows(x, row, start, self.rows) for x in (self.ids, self.pos))
        already_done = start + jnp.arange(self.rows, dtype=jnp.int32) < at
        ids = jnp.where(already_done, KV_PADDING, ids)
        k, v, taint = (self._heads_first(x, row, start) for x in self[:3])
        k, v = (jnp.where(taint[..., None] == 0, x, 0) for x in (k, v))
        return _KeyTile(k, v, taint, ids, pos)

    def add(self, x, row, at, value):
        """Adds `value` [K, keys, ...] to `x` [B, K, S, ...] at the tile at `at`."""
        start = self._start(at)
        value = self._heads_first(x, row, start) + value
        return lax.dynamic_update_slice(x, value[None], _index(x, row, 0, start))

    def _heads_first(self, x, row, start):
        """`x[row, :, start : start + rows]`."""
        size = (1, x.shape[1], self.rows, *x.shape[3:])
        return lax.dynamic_slice(x, _index(x, row, 0, start), size)[0]


class _Queries(NamedTuple):
    """A tile of scaled queries of one row, and how to read and write what is theirs.

    The tile is read where it fits into the row, so it may hold queries that are other
    tiles' work. They are padding here, see nothing and add nothing. Its `own` are those
    that it writes.
    """

    row: Int[Array, ""]
    start: Int[Array, ""]
    own: Bool[Array, " rows"]
    ids: Int[Array, " R"]
    lo: Int[Array, " R"]
    hi: Int[Array, " R"]
    q: Float[Array, "K R H"]
    taint: Float[Array, "K R"]
    k_start: Int[Array, ""]
    k_end: Int[Array, ""]

    @classmethod
    def load(cls, q, keys: _Keys, ranges: KeyRanges, row, q_start, q_end, scale):
        (_, T, N, _), K = q.shape, keys.k.shape[1]
        size = min(_TILE, T)
        start = jnp.minimum(q_start, T - size)
        at = start + jnp.arange(size, dtype=jnp.int32)
        own = (q_start <= at) & (at < q_end)
        ids, lo, hi = (_rows(x, row, start, size) for x in ranges[:3])
        ids, lo, hi = (
            jnp.where(own, x, other)
            for x, other in ((ids, Q_PADDING), (lo, EMPTY[0]), (hi, EMPTY[1]))
        )
        own &= ~is_broken(lo, hi)
        k_range = needed_keys(ids, lo, hi, keys.ids[row], keys.pos[row])
        ids, lo, hi = (jnp.tile(x, N // K) for x in (ids, lo, hi))
        q = _by_key_head(_rows(q, row, start, size), K)
        q, taint = finite_rows(q.astype(accumulator_dtype(q.dtype)) * scale)
        return cls(row, start, own, ids, lo, hi, q, taint, *k_range)

    def load_like(self, x):
        """The tile of `x` [B, T, N, ...], as [K, R, ...]."""
        rows = _rows(x, self.row, self.start, self.own.shape[0])
        return _by_key_head(rows, self.q.shape[0])

    def store(self, x, value):
        """`x` [B, T, N, ...] with `value` [K, R, ...] at the tile's own queries."""
        before = _rows(x, self.row, self.start, self.own.shape[0])
        rows = before.shape[0]
        value = value.reshape(value.shape[0], -1, rows, *value.shape[2:])
        value = jnp.moveaxis(value, 2, 0).reshape(before.shape).astype(x.dtype)
        own = self.own.reshape(-1, *(1,) * (before.ndim - 1))
        value = jnp.where(own, value, before)
        index = _index(x, self.row, self.start)
        return lax.dynamic_update_slice(x, value[None], index)


def _masked_scores(queries: _Queries, keys: _KeyTile):
    """Scores [K, R, keys], the lowest number where not `seen` [R, keys]."""
    q_ids, lo, hi = (x[:, None] for x in (queries.ids, queries.lo, queries.hi))
    kv_ids, pos = keys.ids[None], keys.pos[None]
    seen = (q_ids == kv_ids) & (lo <= pos) & (pos <= hi)
    s = _product("krh,ksh->krs", queries.q, keys.k) + keys.taint[:, None]
    return jnp.where(seen, s, empty_lse(s.dtype)), seen


def _product(subscripts, a, b):
    return jnp.einsum(subscripts, a, b, preferred_element_type=a.dtype)


def _rows(x, row, start, size):
    """`x[row, start : start + size]`."""
    size = (1, size, *x.shape[2:])
    return lax.dynamic_slice(x, _index(x, row, start), size)[0]


def _index(x, *starts):
    """`starts` and zeros for the other axes of `x`, all int32 also with x64 on."""
    return tuple(map(jnp.int32, starts + (0,) * (x.ndim - len(starts))))


def _by_key_head(x, K):
    """[rows, N, ...] as [K, N // K * rows, ...]."""
    rows, N, *rest = x.shape
    x = jnp.moveaxis(x.reshape(rows, K, N // K, *rest), 0, 2)
    return x.reshape(K, N // K * rows, *rest)
