"""The forward kernel: one launch for all policies, on Hopper GPUs.

Each block takes tiles of queries, those that need most keys first, and walks over the
tiles of keys that they need. The last warpgroup loads keys and values ahead, into a
ring. The others compute, 64 queries each, and pass over keys that only the others need.
There are three of them: while some have their softmax, others multiply, and what is
loaded serves 192 queries.

With heads above 128 there are registers for two, which take turns: while one
multiplies, the other has its softmax (FlashAttention-3, Shah et al. 2024). With values
above 128, half a tile of keys is a step. For lack of shared memory outputs leave in
parts where heads are above 64, and with values above 128 from where the queries were.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float

from te_mixed_jax._ranges import KeyRanges
from te_mixed_jax._types import empty_lse
from te_mixed_jax.lowerings import _mosaic as mosaic
from te_mixed_jax.lowerings import _tiles
from te_mixed_jax.lowerings._mosaic import BY_ROW, LOG2_E, ROWS
from te_mixed_jax.lowerings._tiles import Q_BROKEN, TILE, Tiles

_STAGES = 2
# Below all scores, in units of log2; masked ones are -inf and vanish against it.
_LOWEST = -1e30


def tiles_of(ranges: KeyRanges, H: int) -> Tiles:
    """What this kernel walks."""
    return _tiles.tiles_of(ranges, steps_of_queries=_computing(H))


def _computing(H: int) -> int:
    """How many warpgroups compute."""
    return 3 if H <= 128 else 2


def attend(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B S K H"],
    v: Float[Array, "B S K V"],
    tiles: Tiles,
    *,
    scale: float,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B N Tp"]]:
    """Output and lse of tokens that are multiples of 8, heads as `mosaic` pads them."""
    (B, T, N, H), (K, V) = q.shape, v.shape[2:]
    Tp, dtype, factor = tiles.queries.shape[2], q.dtype, scale * LOG2_E
    per_tile = 1 if V <= 128 else 2  # steps over a tile of keys
    width = TILE // per_tile
    shape = ROWS, width
    computing = _computing(H)
    out_over_q = V > 128
    # Of the output that leaves at once, as there is shared memory.
    columns = V if out_over_q else {64: 64, 128: 64, 192: 32}[H]
    q_and_out = (mosaic.matrix(computing, ROWS, H, dtype=dtype),)
    if not out_over_q:
        q_and_out += (mosaic.matrix(computing, ROWS, columns, dtype=dtype),)

    def attention_forward(q_ref, k_ref, v_ref, queries_ref, keys_ref, work_ref, *refs):
        out_ref, lse_ref, (q_s, *out_s), *refs = refs
        k_s, v_s, queries_s, keys_s, lse_s, *refs = refs
        q_full, k_full, k_empty, v_full, v_empty, turn_taken = refs
        warpgroup = lax.axis_index("warpgroup")
        entry = functools.partial(
            mosaic.entry_of,
            work_ref,
            steps=computing,
            tiles_per_row=pl.cdiv(Tp, computing * ROWS),
        )
        walk = mosaic.Walk(entry, tiles.of_queries.shape[0], N)

        # Two meetings a step: when the scores' product has been issued, and before that
        # of the values. Both walk the same keys, one of them a meeting behind.
        def give_turn():
            if computing == 2:
                plgpu.barrier_arrive(turn_taken)

        def await_turn():
            if computing == 2:
                plgpu.barrier_wait(turn_taken)

        def take_turns():
            give_turn()
            await_turn()

        @pl.when(warpgroup < computing)
        def compute():
            plgpu.set_max_registers(mosaic.COMPUTING[computing], action="increase")
            own_q = q_s.at[warpgroup]
            own_out = out_s[0].at[warpgroup] if out_s else own_q
            own_queries, own_lse = queries_s.at[warpgroup], lse_s.at[warpgroup]
            own_full = q_full.at[warpgroup]

            def first_token(tile):
                return (tile * computing + warpgroup) * ROWS

            def load_queries(turn):
                there, head, row, tile = walk.item(turn)[:4]
                # Those beyond the row have the last queries again, and keep the result.
                at = pl.ds(jnp.minimum(first_token(tile), Tp - ROWS), ROWS)

                @pl.when(there)
                def _():
                    plgpu.copy_gmem_to_smem(q_ref.at[row, at, head], own_q, own_full)
                    plgpu.copy_gmem_to_smem(
                        queries_ref.at[row, :, at], own_queries, own_full
                    )

            def one_item(turn, head, row, tile, _first, key_tiles, own, before):
                ends = own(warpgroup)
                needed, whole = ([x * per_tile for x in pair] for pair in ends)
                steps = key_tiles * per_tile
                plgpu.barrier_wait(own_full)

                def passed(at):
                    slot = (before + at) % _STAGES
                    plgpu.barrier_wait(k_full.at[slot])
                    take_turns()
                    plgpu.barrier_arrive(k_empty.at[slot])
                    give_turn()
                    plgpu.barrier_wait(v_full.at[slot])
                    await_turn()
                    plgpu.barrier_arrive(v_empty.at[slot])

                def one_step(at, carry):
                    acc, top, total = carry
                    slot = (before + at) % _STAGES
                    keys = keys_s.at[slot]
                    plgpu.barrier_wait(k_full.at[slot])

                    def scores(ref):
                        plgpu.wgmma(ref, own_q, k_s.at[slot].transpose((1, 0)))
                        take_turns()
                        return ref[...]

                    s = pl.run_scoped(scores, mosaic.accumulator(*shape))
                    plgpu.barrier_arrive(k_empty.at[slot])

                    def masked(s):
                        visible = mosaic.seen(
                            own_queries, keys, shape, queries_are_rows=True
                        )
                        return jnp.where(visible, s, -jnp.inf)

                    is_whole = (whole[0] <= at) & (at < whole[1])
                    s = lax.cond(is_whole, lambda s: s, masked, s)
                    top_next = jnp.maximum(top, s.max(axis=1) * factor)
                    shrink = jnp.exp2(top - top_next)
                    p = jnp.exp2(s * factor - mosaic.across(top_next, shape, 0))
                    acc *= mosaic.across(shrink, acc.shape, 0)
                    total = total * shrink + p.sum(axis=1)
                    # All of the softmax before the turn is given away.
                    acc, total, top_next, p = lax.optimization_barrier(
                        (acc, total, top_next, p.astype(dtype))
                    )
                    give_turn()
                    plgpu.barrier_wait(v_full.at[slot])

                    @pl.when(mosaic.may_have_padding(keys))
                    def _():
                        mosaic.clear_padding(v_s.at[slot], keys.at[0])

                    await_turn()

                    def add(ref):
                        plgpu.wgmma(ref, p, v_s.at[slot])

                    acc = pl.run_state(add)(plgpu.WGMMAAccumulatorRef.init(acc))
                    plgpu.barrier_arrive(v_empty.at[slot])
                    return acc, top_next, total

                start = (
                    mosaic.zeros(ROWS, V),
                    mosaic.zeros(ROWS, layout=BY_ROW) + _LOWEST,
                    mosaic.zeros(ROWS, layout=BY_ROW),
                )
                acc, top, total = mosaic.over_steps(
                    steps, needed, one_step, passed, start
                )
                broken = mosaic.load(own_queries.at[0], BY_ROW) == Q_BROKEN
                if out_over_q:
                    plgpu.commit_smem()  # all lanes have done with the queries
                else:
                    # The last item's output has left, and nobody reads the queries.
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_queries(turn + 1)
                empty = total == 0
                taint = jnp.where(broken, jnp.float32(jnp.nan), jnp.float32(0))
                lse = top * (1 / LOG2_E) + jnp.log(total)
                own_lse[...] = (
                    jnp.where(empty, jnp.float32(empty_lse(jnp.float32)), lse) + taint
                )
                factors = jnp.where(empty, jnp.float32(0), 1 / total) + taint
                out = (acc * mosaic.across(factors, acc.shape, 0)).astype(dtype)
                first = first_token(tile)
                at, is_row = pl.ds(first, ROWS), first < Tp

                for column in range(0, V, columns):
                    if column:
                        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    own_out[...] = out[:, column : column + columns]
                    plgpu.commit_smem()
                    part = out_ref.at[row, at, head, pl.ds(column, columns)]
                    copy = functools.partial(plgpu.copy_smem_to_gmem, own_out, part)
                    pl.when(is_row)(copy)

                @pl.when(is_row)
                def _():
                    plgpu.copy_smem_to_gmem(own_lse, lse_ref.at[row, head, at])

                if out_over_q:  # where the output has to leave first
                    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                    load_queries(turn + 1)
                return before + steps

            load_queries(mosaic.number(0))
            # The second one is half a step behind from here on.
            pl.when(warpgroup == 1)(take_turns)
            walk.each(one_item, mosaic.number(0))
            pl.when(warpgroup == 0)(take_turns)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(warpgroup == computing)
        def load():
            plgpu.set_max_registers(mosaic.LOADING, action="decrease")

            def one_item(_turn, head, row, _tile, first, key_tiles, _own, before):
                key_head = head // (N // K)
                steps = key_tiles * per_tile

                def one_step(at, _):
                    step = before + at
                    slot = step % _STAGES
                    used = step >= _STAGES
                    keys, full = pl.ds(first + at * width, width), k_full.at[slot]
                    pl.when(used)(lambda: plgpu.barrier_wait(k_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(
                        k_ref.at[row, keys, key_head], k_s.at[slot], full
                    )
                    # Ids and positions are read until the values are done with.
                    pl.when(used)(lambda: plgpu.barrier_wait(v_empty.at[slot]))
                    plgpu.copy_gmem_to_smem(
                        keys_ref.at[row, :, keys], keys_s.at[slot], full
                    )
                    plgpu.copy_gmem_to_smem(
                        v_ref.at[row, keys, key_head], v_s.at[slot], v_full.at[slot]
                    )

                lax.fori_loop(mosaic.number(0), steps, one_step, None)
                return before + steps

            walk.each(one_item, mosaic.number(0))

    return mosaic.kernel(
        attention_forward,
        outputs=(
            jax.ShapeDtypeStruct((B, T, N, V), dtype),
            jax.ShapeDtypeStruct((B, N, Tp), jnp.float32),
        ),
        scratch=(
            q_and_out,
            mosaic.matrix(_STAGES, width, H, dtype=dtype),
            mosaic.matrix(_STAGES, width, V, dtype=dtype),
            plgpu.SMEM((computing, 4, ROWS), jnp.int32),
            plgpu.SMEM((_STAGES, 3, width), jnp.int32),
            plgpu.SMEM((computing, ROWS), jnp.float32),
            mosaic.barriers(computing, 2),
            mosaic.barriers(_STAGES, 2),
            mosaic.barriers(_STAGES, computing),
            mosaic.barriers(_STAGES, 1),
            mosaic.barriers(_STAGES, computing),
            plgpu.Barrier(num_arrivals=2),
        ),
        blocks=mosaic.BLOCKS,
        computing=computing,
    )(q, k, v, tiles.queries, tiles.keys, tiles.of_queries.reshape(-1))
