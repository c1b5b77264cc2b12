"""The backward kernels: two launches for all policies, on Hopper GPUs.

One goes over tiles of queries and gives their gradients, the other over tiles of keys
and gives those of keys and values. Seven products instead of the five of a single
kernel, but no sum is shared between blocks: results are bitwise reproducible.

With ``p = exp(s - lse)``: ``dv = p^T dout``, ``dp = dout v^T``, and since lse's own
cotangent adds ``p * dlse``, ``ds = p * (dp - delta)`` with ``delta = rowsum(out * dout)
- dlse``, ``dq = ds k``, ``dk = ds^T q``.
"""

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

_STAGES = 2


def tiles_of(ranges: KeyRanges, H: int) -> Tiles:
    """What these kernels walk."""
    return _tiles.tiles_of(
        ranges,
        steps_of_queries=_computing(H),
        queries_per_step=_queries_per_step(H),
    )


def _computing(H: int) -> int:
    """How many warpgroups compute dq; of three, registers suffice with heads of 64."""
    return 3 if H == 64 else 2


def _queries_per_step(H: int) -> int:
    """Of the walk for dk and dv: with heads of 64 there are registers for more."""
    return TILE if H == 64 else STEP


def query_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    out: Float[Array, "B T N H"],
    dout: Float[Array, "B T N H"],
    lse: Float[Array, "B N Tp"],
    dlse: Float[Array, "B N Tp"] | None,
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B N 2 Tp"]]:
    """Gives dq, and what `key_gradients` needs of each query: lse in log2, and delta.

    Tokens are multiples of 8, heads 64 or 128. Both statistics are 0 for padding and
    for queries whose range is empty.
    """
    (B, _, N, H), K = q.shape, k.shape[2]
    Tp, dtype, factor = lse.shape[2], q.dtype, scale * LOG2_E
    computing = _computing(H)
    # Three warpgroups have registers for half the keys of a tile each.
    width, stages = (TILE // 2, 4) if computing == 3 else (TILE, 2)
    shape, rows = (ROWS, width), computing * ROWS
    vectors = (lse,) if dlse is None else (lse, dlse)

    def attention_backward_queries(q_ref, k_ref, v_ref, out_ref, dout_ref, *refs):
        vector_refs, refs = refs[: len(vectors)], refs[len(vectors) :]
        queries_ref, keys_ref, work_ref, dq_ref, statistics_ref, *refs = refs
        q_s, dout_s, k_s, v_s, vectors_s, queries_s, keys_s, *refs = refs
        q_full, out_full, k_full, k_empty, v_full, v_empty = refs
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        head, number = block % N, block // N
        row, tile, first, steps, ends = mosaic.entry_of(
            work_ref, number, computing, pl.cdiv(Tp, rows)
        )
        steps *= TILE // width

        def first_output(warpgroup):
            """Where outputs lie at first: in the slots for values but one."""
            at = warpgroup * ROWS
            return v_s.at[1 + at // width, pl.ds(at % width, ROWS)]

        @pl.when(warpgroup < computing)
        def compute():
            plgpu.set_max_registers(mosaic.COMPUTING[computing], action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)
            own_q, own_dout = q_s.at[own], dout_s.at[own]
            own_queries = queries_s.at[warpgroup]
            needed, whole = (
                [x * (TILE // width) for x in pair] for pair in ends(warpgroup)
            )
            plgpu.barrier_wait(q_full)
            plgpu.barrier_wait(out_full)
            sees = mosaic.load(own_queries.at[0], BY_ROW) > 0
            own_lse, *own_dlse = (
                mosaic.load(vectors_s.at[i, own], BY_ROW) for i in range(len(vectors))
            )
            own_lse = jnp.where(sees, own_lse * LOG2_E, jnp.float32(0))
            o, do = (
                mosaic.load(x, LAYOUT).astype(jnp.float32)
                for x in (first_output(warpgroup), own_dout)
            )
            delta = (o * do).sum(axis=1)
            for x in own_dlse:
                delta -= x
            delta = jnp.where(sees, delta, jnp.float32(0))
            for slot in range(1, stages):
                plgpu.barrier_arrive(v_empty.at[slot])

            def walk(dq_acc):
                def passed(at):
                    slot = at % stages
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[slot])
                    plgpu.barrier_arrive(v_empty.at[slot])
                    plgpu.barrier_arrive(k_empty.at[slot])

                def one_step(at, _):
                    slot = at % stages
                    keys = keys_s.at[slot]
                    is_whole = (whole[0] <= at) & (at < whole[1])
                    plgpu.barrier_wait(k_full.at[slot])
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when(mosaic.may_have_padding(keys))
                    def _():
                        mosaic.clear_padding(k_s.at[slot], keys.at[0])

                    def products(s_acc, dp_acc):
                        k_t, v_t = (x.at[slot].transpose((1, 0)) for x in (k_s, v_s))
                        plgpu.wgmma(s_acc, own_q, k_t)
                        plgpu.wgmma(dp_acc, own_dout, v_t)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)

                        p = weights(
                            is_whole, s * factor, own_lse, own_queries, keys, axis=0
                        )
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        plgpu.barrier_arrive(v_empty.at[slot])
                        ds = score_gradients(is_whole, p, dp, delta, 0)
                        return ds.astype(dtype)

                    ds = pl.run_scoped(
                        products,
                        mosaic.accumulator(*shape),
                        mosaic.accumulator(*shape),
                    )

                    plgpu.wgmma(dq_acc, ds, k_s.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(k_empty.at[slot])

                mosaic.over_steps(steps, needed, one_step, passed)
                return dq_acc[...]

            dq = pl.run_scoped(walk, mosaic.accumulator(ROWS, H))
            plgpu.commit_smem()  # all lanes have read what is written now
            vectors_s[0, own] = own_lse
            vectors_s[1, own] = delta
            own_q[...] = (dq * scale).astype(dtype)
            plgpu.commit_smem()
            first_query = tile * rows + warpgroup * ROWS

            @pl.when(first_query < Tp)
            def _():
                at = pl.ds(first_query, ROWS)
                plgpu.copy_smem_to_gmem(own_q, dq_ref.at[row, at, head])
                for i in range(2):
                    plgpu.copy_smem_to_gmem(
                        vectors_s.at[i, own], statistics_ref.at[row, head, i, at]
                    )

            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == computing)
        def load():
            plgpu.set_max_registers(mosaic.LOADING, action="decrease")
            copy = plgpu.copy_gmem_to_smem
            for i in range(computing):
                # Those beyond the row have its last queries, and keep the result.
                at = pl.ds(jnp.minimum(tile * rows + i * ROWS, Tp - ROWS), ROWS)
                own, tokens = pl.ds(i * ROWS, ROWS), (row, at, head)
                copy(dout_ref.at[tokens], dout_s.at[own], q_full)
                copy(out_ref.at[tokens], first_output(i), out_full)
                copy(q_ref.at[tokens], q_s.at[own], q_full)
                copy(queries_ref.at[row, :, at], queries_s.at[i], q_full)
                for x, x_ref in enumerate(vector_refs):
                    copy(x_ref.at[row, head, at], vectors_s.at[x, own], q_full)

            def one_step(at, _):
                slot = at % stages
                used = at >= stages
                keys, full = pl.ds(first + at * width, width), k_full.at[slot]
                tokens = row, keys, head // (N // K)
                pl.when(used)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                plgpu.copy_gmem_to_smem(k_ref.at[tokens], k_s.at[slot], full)
                plgpu.copy_gmem_to_smem(
                    keys_ref.at[row, :, keys], keys_s.at[slot], full
                )
                used |= slot > 0  # where the outputs were
                pl.when(used)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                plgpu.copy_gmem_to_smem(v_ref.at[tokens], v_s.at[slot], v_full.at[slot])

            lax.fori_loop(mosaic.number(0), steps, one_step, None)

    return mosaic.kernel(
        attention_backward_queries,
        outputs=(
            jax.ShapeDtypeStruct(q.shape, dtype),
            jax.ShapeDtypeStruct((B, N, 2, Tp), jnp.float32),
        ),
        scratch=(
            mosaic.matrix(rows, H, dtype=dtype),
            mosaic.matrix(rows, H, dtype=dtype),
            mosaic.matrix(stages, width, H, dtype=dtype),
            mosaic.matrix(stages, width, H, dtype=dtype),
            plgpu.SMEM((2, rows), jnp.float32),
            plgpu.SMEM((computing, 4, ROWS), jnp.int32),
            plgpu.SMEM((stages, 3, width), jnp.int32),
            plgpu.Barrier(num_arrivals=computing * (3 + len(vectors))),
            plgpu.Barrier(num_arrivals=computing),
            mosaic.barriers(stages, 2),
            mosaic.barriers(stages, computing),
            mosaic.barriers(stages, 1),
            mosaic.barriers(stages, computing),
        ),
        blocks=tiles.of_queries.shape[0] * N,
        computing=computing,
    )(
        *(q, k, v, out, dout, *vectors),
        *(tiles.queries, tiles.keys, tiles.of_queries.reshape(-1)),
    )


def key_gradients(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K H"],
    dout: Float[Array, "B T N H"],
    statistics: Float[Array, "B N 2 Tp"],
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Float[Array, "B S K H"], Float[Array, "B S K H"]]:
    """Gives dk and dv, summed over the query heads of a key head in order."""
    N, (_, _, K, H) = q.shape[2], k.shape
    Sp, dtype, factor = tiles.keys.shape[2], q.dtype, scale * LOG2_E
    width = _queries_per_step(H)
    shape = ROWS, width

    def attention_backward_keys(q_ref, k_ref, v_ref, dout_ref, statistics_ref, *refs):
        queries_ref, keys_ref, work_ref, dk_ref, dv_ref, *refs = refs
        k_s, v_s, q_s, dout_s, statistics_s, queries_s, keys_s, *refs = refs
        kv_full, q_full, dout_full, empty = refs
        warpgroup, block = lax.axis_index("warpgroup"), lax.axis_index("block")
        head, number = block % K, block // K
        row, tile, first, steps, ends = mosaic.entry_of(work_ref, number, 2, Sp // TILE)

        @pl.when(warpgroup < 2)
        def compute():
            plgpu.set_max_registers(mosaic.COMPUTING[2], action="increase")
            own = pl.ds(warpgroup * ROWS, ROWS)
            own_k, own_v, own_keys = k_s.at[own], v_s.at[own], keys_s.at[:, own]
            needed, whole = ends(warpgroup)
            plgpu.barrier_wait(kv_full)

            def walk(dk_acc, dv_acc):
                def passed(step):
                    slot = step % _STAGES
                    plgpu.barrier_wait(q_full.at[slot])
                    plgpu.barrier_wait(dout_full.at[slot])
                    plgpu.barrier_arrive(empty.at[slot])

                def one_step(step, at):
                    slot = step % _STAGES
                    queries = queries_s.at[slot]
                    is_whole = (whole[0] <= at) & (at < whole[1])
                    plgpu.barrier_wait(q_full.at[slot])
                    plgpu.barrier_wait(dout_full.at[slot])

                    @pl.when(mosaic.may_have_padding(queries))
                    def _():
                        mosaic.clear_padding(q_s.at[slot], queries.at[0])
                        mosaic.clear_padding(dout_s.at[slot], queries.at[0])

                    def products(s_acc, dp_acc):
                        q_t, dout_t = (
                            x.at[slot].transpose((1, 0)) for x in (q_s, dout_s)
                        )
                        plgpu.wgmma(s_acc, own_k, q_t)
                        plgpu.wgmma(dp_acc, own_v, dout_t)
                        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                        lse = mosaic.load(statistics_s.at[slot, 0], BY_COLUMN)
                        p = weights(
                            is_whole, s * factor, lse, queries, own_keys, axis=1
                        )
                        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                        # Not before, for lack of registers.
                        delta = mosaic.load(statistics_s.at[slot, 1], BY_COLUMN)
                        ds = score_gradients(is_whole, p, dp, delta, 1)
                        return p.astype(dtype), ds.astype(dtype)

                    p, ds = pl.run_scoped(
                        products,
                        mosaic.accumulator(*shape),
                        mosaic.accumulator(*shape),
                    )
                    plgpu.wgmma(dv_acc, p, dout_s.at[slot])
                    plgpu.wgmma(dk_acc, ds, q_s.at[slot])
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[slot])

                def one_head(number, _=None):
                    before = number * steps
                    mosaic.over_steps(
                        steps,
                        needed,
                        lambda at, _: one_step(before + at, at),
                        lambda at: passed(before + at),
                    )

                if N == K:
                    one_head(0)
                else:
                    lax.fori_loop(mosaic.number(0), N // K, one_head, None)
                return dk_acc[...], dv_acc[...]

            dk, dv = pl.run_scoped(
                walk, *[mosaic.accumulator(ROWS, H) for _ in range(2)]
            )
            plgpu.commit_smem()  # all lanes have read what is written now
            own_v[...] = dv.astype(dtype)
            own_k[...] = (dk * scale).astype(dtype)
            plgpu.commit_smem()
            tokens = row, mosaic.from_row(tile, warpgroup * ROWS, ROWS), head
            plgpu.copy_smem_to_gmem(own_v, dv_ref.at[tokens])
            plgpu.copy_smem_to_gmem(own_k, dk_ref.at[tokens])
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == 2)
        def load():
            plgpu.set_max_registers(mosaic.LOADING, action="decrease")
            at = mosaic.from_row(tile)
            plgpu.copy_gmem_to_smem(k_ref.at[row, at, head], k_s, kv_full)
            plgpu.copy_gmem_to_smem(v_ref.at[row, at, head], v_s, kv_full)
            plgpu.copy_gmem_to_smem(keys_ref.at[row, :, at], keys_s, kv_full)

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

    return mosaic.kernel(
        attention_backward_keys,
        outputs=(
            jax.ShapeDtypeStruct(k.shape, dtype),
            jax.ShapeDtypeStruct(v.shape, dtype),
        ),
        scratch=(
            mosaic.matrix(TILE, H, dtype=dtype),
            mosaic.matrix(TILE, H, dtype=dtype),
            mosaic.matrix(_STAGES, width, H, dtype=dtype),
            mosaic.matrix(_STAGES, width, H, dtype=dtype),
            plgpu.SMEM((_STAGES, 2, width), jnp.float32),
            plgpu.SMEM((_STAGES, 4, width), jnp.int32),
            plgpu.SMEM((3, TILE), jnp.int32),
            plgpu.Barrier(num_arrivals=3),
            mosaic.barriers(_STAGES, 3),
            mosaic.barriers(_STAGES, 1),
            mosaic.barriers(_STAGES, 2),
        ),
        blocks=tiles.of_keys.shape[0] * K,
    )(
        *(q, k, v, dout, statistics),
        *(tiles.queries, tiles.keys, tiles.of_keys.reshape(-1)),
    )


def load_queries(refs, slots, barriers, row, head, first, steps, *, sharing: int):
    """Loads what `key_gradients` needs of each step's queries into a ring of slots.

    Goes over the steps, of a slot's length, once for each of the query heads that share
    a key head. `refs` and `slots` are queries, dout, statistics and `Tiles.queries`.
    """
    q_ref, dout_ref, statistics_ref, queries_ref = refs
    q_s, dout_s, statistics_s, queries_s = slots
    q_full, dout_full, empty = barriers
    stages, width, _ = q_s.shape

    def one_step(i, carry):
        slot = i % stages
        full = q_full.at[slot]
        step, group = (i, 0) if sharing == 1 else (i % steps, i // steps)
        at = pl.ds(first + step * width, width)
        q_head = head * sharing + group
        used = i >= stages
        pl.when(used)(lambda: plgpu.barrier_wait(empty.at[slot]))
        plgpu.copy_gmem_to_smem(q_ref.at[row, at, q_head], q_s.at[slot], full)
        plgpu.copy_gmem_to_smem(queries_ref.at[row, :, at], queries_s.at[slot], full)
        plgpu.copy_gmem_to_smem(
            statistics_ref.at[row, q_head, :, at], statistics_s.at[slot], full
        )
        plgpu.copy_gmem_to_smem(
            dout_ref.at[row, at, q_head], dout_s.at[slot], dout_full.at[slot]
        )
        return carry

    lax.fori_loop(mosaic.number(0), steps * sharing, one_step, None)


def weights(is_whole, s, lse, queries, keys, *, axis: int):
    """The softmax's weights, from scores and lse in units of log2; 0 where masked.

    Queries lie along `axis`.
    """

    def where_seen(p):
        visible = mosaic.seen(queries, keys, p.shape, queries_are_rows=axis == 0)
        return jnp.where(visible, p, jnp.float32(0))

    p = jnp.exp2(s - mosaic.across(lse, s.shape, axis))
    return lax.cond(is_whole, lambda p: p, where_seen, p)


def score_gradients(is_whole, p, dp, delta, axis: int):
    """``p * (dp - delta)``, and 0 where p is: there dp may be NaN."""

    def everywhere(p, dp):
        return p * (dp - mosaic.across(delta, dp.shape, axis))

    def where_seen(p, dp):
        return jnp.where(p > 0, everywhere(p, dp), jnp.float32(0))

    return lax.cond(is_whole, everywhere, where_seen, p, dp)
