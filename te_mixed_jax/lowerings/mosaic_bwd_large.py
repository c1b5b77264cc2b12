"""The backward kernels for head dims above 128: `mosaic_bwd`'s, with less at a time.

What a warpgroup sums up takes up to 128 registers a lane. So a step of the walk over
keys has half a tile of them. The walk over queries is for half a tile of keys, too:
warpgroup 0 computes the weights and sums up dv, and hands the weights on, through
shared memory, to warpgroup 1, which sums up dk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax.lowerings import _mosaic as mosaic
from te_mixed_jax.lowerings import _tiles
from te_mixed_jax.lowerings._mosaic import BY_COLUMN, BY_ROW, LAYOUT, LOG2_E, ROWS
from te_mixed_jax.lowerings._tiles import STEP, TILE, Tiles
from te_mixed_jax.lowerings.mosaic_bwd import load_queries, score_gradients, weights

_STAGES = 2
# Keys of a step, for dq.
_HALF = TILE // 2


def tiles_of(ranges: KeyRanges, H: int) -> Tiles:
    """What these kernels walk."""
    del H
    return _tiles.tiles_of(ranges, steps_of_keys=1)


def query_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    out: Float[Array, "B T N V"],
    dout: Float[Array, "B T N V"],
    lse: Float[Array, "B N Tp"],
    dlse: Float[Array, "B N Tp"] | None,
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N 2 Tp"]]:
    """Gives dq, and what `key_gradients` needs of each query: lse in log2, and delta.

    Tokens are multiples of 8, heads as `mosaic` pads them. Both statistics are 0 for
    padding and for queries whose range is empty.
    """
    # Not made of what dout was before it was rounded: rows of ds would not sum to 0.
    dout = lax.optimization_barrier(dout)
    statistics = _statistics(out, dout, lse, dlse, tiles)
    return _query_gradients(q, k, v, dout, statistics, tiles, scale), statistics


def _product(a, b):
    """Of the rows of two tiles of shared memory, each with each."""

    def compute(ref):
        plgpu.wgmma(ref, a, b.transpose((1, 0)))
        return ref[...]

    return pl.run_scoped(compute, mosaic.accumulator(a.shape[0], b.shape[0]))


def _statistics(out, dout, lse, dlse, tiles: Tiles) -> Float[Array, "B N 2 Tp"]:
    delta = (out.astype(jnp.float32) * dout.astype(jnp.float32)).sum(-1)
    # Summed up before it is transposed: both in one kernel take XLA 6 times as long.
    delta = lax.optimization_barrier(delta).swapaxes(1, 2)
    delta = jnp.pad(delta, ((0, 0), (0, 0), (0, lse.shape[2] - delta.shape[2])))
    if dlse is not None:
        delta -= dlse
    sees = tiles.queries[:, :1] > 0
    both = (jnp.where(sees, x, 0) for x in (lse * LOG2_E, delta))
    return jnp.stack(list(both), axis=2)


def _query_gradients(q, k, v, dout, statistics, tiles: Tiles, scale: float):
    (_, _, N, H), (K, V) = q.shape, v.shape[2:]
    Tp, dtype, factor = statistics.shape[3], q.dtype, scale * LOG2_E
    v_stages = 2 if V <= 128 else 1  # as many as fit

    def attention_backward_queries(q_ref, k_ref, v_ref, dout_ref, *refs):
        statistics_ref, queries_ref, keys_ref, work_ref, dq_ref, *refs = refs
        q_s, dout_s, k_s, v_s, keys_s, q_full, *refs = refs
        k_full, k_empty, v_full, v_empty = refs
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        head, number = block % N, block // N
        row, tile, first, steps, ends = mosaic.entry_of(work_ref, number, 2, Tp // TILE)
        steps *= 2  # halves of a tile

        @pl.when(warpgroup < 2)
        def compute():
            plgpu.set_max_registers(mosaic.COMPUTING[2], action="increase")
            own_tokens = mosaic.from_row(tile, warpgroup * ROWS, ROWS)
            needed, whole = ([x * 2 for x in pair] for pair in ends(warpgroup))
            # In registers, straight from global memory: shared memory is full.
            load = functools.partial(mosaic.load, layout=BY_ROW, shared=False)
            own_queries = tuple(
                load(queries_ref.at[row, i, own_tokens]) for i in range(3)
            )
            own_lse, delta = (
                load(statistics_ref.at[row, head, i, own_tokens]) for i in range(2)
            )
            plgpu.barrier_wait(q_full)

            def walk(dq_acc):
                def passed(at):
                    slot, v_slot = at % _STAGES, at % v_stages
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[v_slot])
                    plgpu.barrier_arrive(v_empty.at[v_slot])
                    plgpu.barrier_arrive(k_empty.at[slot])

                def one_step(at, _):
                    slot, v_slot = at % _STAGES, at % v_stages
                    keys = keys_s.at[slot]
                    is_whole = (whole[0] <= at) & (at < whole[1])
                    # 0, which no compiler knows: addresses that do not change would be
                    # made before the loop, more than there are registers for.
                    zero = (first + at) >> 30
                    own = pl.ds((warpgroup + zero) * ROWS, ROWS)
                    plgpu.barrier_wait(k_full.at[slot])
                    s = _product(q_s.at[own], k_s.at[slot])
                    p = weights(
                        is_whole, s * factor, own_lse, own_queries, keys, axis=0
                    )
                    plgpu.barrier_wait(v_full.at[v_slot])
                    dp = _product(dout_s.at[own], v_s.at[v_slot + zero])
                    plgpu.barrier_arrive(v_empty.at[v_slot])
                    ds = score_gradients(is_whole, p, dp, delta, 0).astype(dtype)

                    @pl.when(mosaic.may_have_padding(keys))
                    def _():
                        mosaic.clear_padding(k_s.at[slot], keys.at[0])

                    plgpu.wgmma(dq_acc, ds, k_s.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_empty.at[slot])

                mosaic.over_steps(steps, needed, one_step, passed)
                return dq_acc[...]

            dq = pl.run_scoped(walk, mosaic.accumulator(ROWS, H))
            plgpu.commit_smem()  # all lanes have read what is written now
            own_q = q_s.at[pl.ds(warpgroup * ROWS, ROWS)]
            own_q[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(own_q, dq_ref.at[row, own_tokens, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def load():
            plgpu.set_max_registers(mosaic.LOADING, action="decrease")
            tokens = row, mosaic.from_row(tile), head
            plgpu.copy_gmem_to_smem(q_ref.at[tokens], q_s, q_full)
            plgpu.copy_gmem_to_smem(dout_ref.at[tokens], dout_s, q_full)

            def one_step(at, _):
                slot, v_slot = at % _STAGES, at % v_stages
                keys, full = pl.ds(first + at * _HALF, _HALF), k_full.at[slot]
                tokens = row, keys, head // (N // K)
                k_used, v_used = at >= _STAGES, at >= v_stages
                pl.when(k_used)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[tokens], k_s.at[slot], full)
                plgpu.copy_gmem_to_smem(
                    keys_ref.at[row, :, keys], keys_s.at[slot], full
                )
                pl.when(v_used)(lambda: plgpu.barrier_wait(v_empty.at[v_slot]))
                plgpu.copy_gmem_to_smem(
                    v_ref.at[tokens], v_s.at[v_slot], v_full.at[v_slot]
                )

            lax.fori_loop(mosaic.number(0), steps, one_step, None)

    return mosaic.kernel(
        attention_backward_queries,
        outputs=jax.ShapeDtypeStruct(q.shape, dtype),
        scratch=(
            mosaic.matrix(TILE, H, dtype=dtype),
            mosaic.matrix(TILE, V, dtype=dtype),
            mosaic.matrix(_STAGES, _HALF, H, dtype=dtype),
            mosaic.matrix(v_stages, _HALF, V, dtype=dtype),
            plgpu.SMEM((_STAGES, 3, _HALF), jnp.int32),
            plgpu.Barrier(num_arrivals=2),
            mosaic.barriers(_STAGES, 2),
            mosaic.barriers(_STAGES, 2),
            mosaic.barriers(v_stages, 1),
            mosaic.barriers(v_stages, 2),
        ),
        blocks=tiles.of_queries.shape[0] * N,
    )(
        *(q, k, v, dout, statistics),
        *(tiles.queries, tiles.keys, tiles.of_queries.reshape(-1)),
    )


def key_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    dout: Float[Array, "B T N V"],
    statistics: Float[Array, "B N 2 Tp"],
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K V"]]:
    """Gives dk and dv, summed over the query heads of a key head in order."""
    N, (_, _, K, H), V = q.shape[2], k.shape, v.shape[3]
    Sp, dtype, factor = tiles.keys.shape[2], q.dtype, scale * LOG2_E
    shape = ROWS, STEP

    def attention_backward_keys(q_ref, k_ref, v_ref, dout_ref, statistics_ref, *refs):
        queries_ref, keys_ref, work_ref, dk_ref, dv_ref, *refs = refs
        k_s, v_s, q_s, dout_s, p_s, statistics_s, queries_s, keys_s, *refs = refs
        kv_full, q_full, dout_full, empty, p_full, p_empty = refs
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        head, number = block % K, block // K
        row, tile, first, steps, ends = mosaic.entry_of(work_ref, number, 1, Sp // ROWS)
        _, whole = ends(0)
        own = pl.ds(tile * ROWS, ROWS)
        rounds = steps * (N // K)

        def walk(one_step):
            """Calls it with its number, slot, whether it is whole, and queries."""

            def one(i, carry):
                slot = i % _STAGES
                at = i if N == K else i % steps
                is_whole = (whole[0] <= at) & (at < whole[1])
                one_step(i, slot, is_whole, queries_s.at[slot])
                plgpu.barrier_arrive(empty.at[slot])
                return carry

            lax.fori_loop(mosaic.number(0), rounds, one, None)

        def clear_padding(x, queries):
            @pl.when(mosaic.may_have_padding(queries))
            def _():
                mosaic.clear_padding(x, queries.at[0])

        def leave(x, x_s, x_ref):
            plgpu.commit_smem()  # all lanes have read what is written now
            x_s[...] = x.astype(dtype)
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(x_s, x_ref.at[row, own, head])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 0)
        def sum_values():
            plgpu.set_max_registers(mosaic.COMPUTING[2], action="increase")
            plgpu.barrier_wait(kv_full)

            def sum_up(dv_acc):
                def one_step(i, slot, is_whole, queries):
                    plgpu.barrier_wait(q_full.at[slot])
                    s = _product(k_s, q_s.at[slot])
                    lse = mosaic.load(statistics_s.at[slot, 0], BY_COLUMN)
                    p = weights(is_whole, s * factor, lse, queries, keys_s, axis=1)
                    pl.when(i > 0)(lambda: plgpu.barrier_wait(p_empty))
                    p_s[...] = p
                    plgpu.barrier_arrive(p_full)
                    plgpu.barrier_wait(dout_full.at[slot])
                    clear_padding(dout_s.at[slot], queries)
                    plgpu.wgmma(dv_acc, p.astype(dtype), dout_s.at[slot])
                    plgpu.wgmma_wait(0)

                walk(one_step)
                return dv_acc[...]

            dv = pl.run_scoped(sum_up, mosaic.accumulator(ROWS, V))
            # The other one takes the weights after its last product with the values:
            # from then on `v_s` may be overwritten.
            pl.when(rounds > 0)(lambda: plgpu.barrier_wait(p_empty))
            leave(dv, v_s, dv_ref)

        @pl.when(warpgroup == 1)
        def sum_keys():
            plgpu.set_max_registers(mosaic.COMPUTING[2], action="increase")
            plgpu.barrier_wait(kv_full)

            def sum_up(dk_acc):
                def one_step(i, slot, is_whole, queries):
                    del i
                    plgpu.barrier_wait(dout_full.at[slot])
                    plgpu.barrier_wait(q_full.at[slot])

                    dp = _product(v_s, dout_s.at[slot])
                    delta = mosaic.load(statistics_s.at[slot, 1], BY_COLUMN)
                    # The other one gives the weights after its product with the keys:
                    # after the last ones `k_s` may be overwritten.
                    plgpu.barrier_wait(p_full)
                    p = mosaic.load(p_s, LAYOUT)
                    plgpu.barrier_arrive(p_empty)
                    ds = score_gradients(is_whole, p, dp, delta, 1).astype(dtype)
                    clear_padding(q_s.at[slot], queries)
                    plgpu.wgmma(dk_acc, ds, q_s.at[slot])
                    plgpu.wgmma_wait(0)

                walk(one_step)
                return dk_acc[...]

            dk = pl.run_scoped(sum_up, mosaic.accumulator(ROWS, H))
            leave(dk * scale, k_s, dk_ref)

        @pl.when(warpgroup == 2)
        def load():
            plgpu.set_max_registers(mosaic.LOADING, action="decrease")
            plgpu.copy_gmem_to_smem(k_ref.at[row, own, head], k_s, kv_full)
            plgpu.copy_gmem_to_smem(v_ref.at[row, own, head], v_s, kv_full)
            plgpu.copy_gmem_to_smem(keys_ref.at[row, :, own], keys_s, kv_full)

            load_queries(
                (q_ref, dout_ref, statistics_ref, queries_ref),
                (q_s, dout_s, statistics_s, queries_s),
                (q_full, dout_full, empty),
                row,
                head,
                first,
                steps,
                sharing=N // K,
            )

    p_transforms = plgpu.TilingTransform((8, 32)), plgpu.SwizzleTransform(128)
    return mosaic.kernel(
        attention_backward_keys,
        outputs=(
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
        ),
        scratch=(
            mosaic.matrix(ROWS, H, dtype=dtype),
            mosaic.matrix(ROWS, V, dtype=dtype),
            mosaic.matrix(_STAGES, STEP, H, dtype=dtype),
            mosaic.matrix(_STAGES, STEP, V, dtype=dtype),
            plgpu.SMEM(shape, jnp.float32, transforms=p_transforms),
            plgpu.SMEM((_STAGES, 2, STEP), jnp.float32),
            plgpu.SMEM((_STAGES, 4, STEP), jnp.int32),
            plgpu.SMEM((3, ROWS), jnp.int32),
            plgpu.Barrier(num_arrivals=3),
            mosaic.barriers(_STAGES, 3),
            mosaic.barriers(_STAGES, 1),
            mosaic.barriers(_STAGES, 2),
            plgpu.Barrier(num_arrivals=1),
            plgpu.Barrier(num_arrivals=1),
        ),
        blocks=tiles.of_keys.shape[0] * K,
    )(
        *(q, k, v, dout, statistics),
        *(tiles.queries, tiles.keys, tiles.of_keys.reshape(-1)),
    )
