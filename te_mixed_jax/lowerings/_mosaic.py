"""What the Hopper kernels share, and what differs between JAX's releases.

Pallas Mosaic GPU says of itself that it changes weekly. All that the kernels use of it
beyond the names that releases from 0.10.2 to 0.12 have alike is here.

The threads of a kernel are warpgroups of 128 lanes: two or three that compute, of 64
rows each, or two of the same ones, and a last one that loads. The computing ones share
what is loaded.
"""

import functools
import inspect
import math
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from te_mixed_jax.lowerings._tiles import TILE, unpacked

LOG2_E = math.log2(math.e)
# Rows of one warpgroup: what one matrix instruction has.
ROWS = 64
# Blocks of a persistent kernel: the multiprocessors of an H100 or H200. With fewer of
# them some blocks wait for their turn, which is as right.
BLOCKS = 132
LAYOUT = plgpu.Layout.WGMMA
BY_ROW, BY_COLUMN = LAYOUT.reduce(1), LAYOUT.reduce(0)
# Registers of a lane, of the 65536 that a block has: of two or three that compute, and
# of the one that loads.
COMPUTING, LOADING = {2: 240, 3: 160}, 24

# Required in 0.10.2, optional in 0.11, gone in 0.12.
_INDEX = inspect.signature(plgpu.load).parameters.get("idx")
_LOAD_TAKES_INDEX = _INDEX is not None and _INDEX.default is inspect.Parameter.empty


def load(ref, layout, *, shared: bool = True):
    """Shared memory, or global, as an array in registers."""
    index = ((),) if _LOAD_TAKES_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=shared)


def matrix(*shape: int, dtype):
    """Of 16-bit numbers, as matrix units and copies want it in shared memory.

    The last axis is 32, or a multiple of 64.
    """
    columns = min(shape[-1], 64)
    transforms = (
        plgpu.TilingTransform((8, columns)),
        plgpu.SwizzleTransform(2 * columns),
    )
    return plgpu.SMEM(shape, dtype, transforms=transforms)


def accumulator(rows: int, columns: int):
    """Registers that products are added to."""
    return plgpu.WGMMAAccumulatorRef((rows, columns), jnp.float32)


def barriers(count: int, arrivals: int):
    """`count` barriers, each open after as many arrivals of threads or copies."""
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=count)


def kernel(body, *, outputs, scratch, blocks: int, computing: int = 2):
    """A kernel of `blocks` blocks, each with one warpgroup more than compute."""
    return plgpu.kernel(
        body,
        out_type=outputs,
        scratch_types=scratch,
        grid=(blocks,),
        grid_names=("block",),
        num_threads=computing + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(
            approx_math=True,
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            # The automatic barriers would stand in the innermost loops. Where shared
            # memory is written that was read, there is one, or all write what is there.
            unsafe_no_auto_barriers=True,
        ),
    )


def number(x):
    """int32 also where JAX's numbers have 64 bits."""
    return jnp.int32(x)


def zeros(*shape: int, layout: Any = LAYOUT):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)


def across(x, shape: tuple[int, int], axis: int):
    """A vector along one axis of a tile, repeated along the other."""
    return lax.broadcast_in_dim(x, shape, [axis])


def seen(queries, keys, shape: tuple[int, int], *, queries_are_rows: bool):
    """Which pairs of a tile see each other; `queries` and `keys` as in `Tiles`.

    `queries` may be the three vectors, in registers.
    """
    q_axis, k_axis = (0, 1) if queries_are_rows else (1, 0)
    layouts = BY_ROW, BY_COLUMN
    if not isinstance(queries, tuple):
        queries = tuple(load(queries.at[i], layouts[q_axis]) for i in range(3))
    q_id, q_first, q_span = (across(x, shape, q_axis) for x in queries)
    kv_id, kv_pos = (
        across(load(keys.at[i], layouts[k_axis]), shape, k_axis) for i in range(2)
    )
    return (q_id == kv_id) & (kv_pos - q_first <= q_span)


def may_have_padding(tokens):
    """Of a stretch as in `Tiles.keys` or `Tiles.queries`, at most a tile long."""
    marks, last = tokens.shape[0] - 1, tokens.shape[1] - 1
    return tokens[marks, 0] + tokens[marks, last] > 0


def clear_padding(tile, ids):
    """Sets the rows of padding to 0 in a tile of shared memory.

    A product adds them with weight 0, and 0 * NaN is NaN. Where several warpgroups
    read the tile, all do it, each for itself, and write the same. A product of scores
    of another one may read it meanwhile: scores of padding are masked.
    """
    rows, width = tile.shape
    columns = width if width <= 128 else 64  # that fit in registers
    for start in range(0, rows, ROWS):
        real = load(ids.at[pl.ds(start, ROWS)], BY_ROW) > 0
        for column in range(0, width, columns):
            part = tile.at[pl.ds(start, ROWS), pl.ds(column, columns)]
            x = load(part, LAYOUT)
            keep = across(real, (ROWS, columns), 0)
            part[...] = jnp.where(keep, x, jnp.zeros_like(x))
    plgpu.commit_smem()


def entry_of(work_ref, number, steps: int, tiles_per_row: int):
    """Of an entry of `Tiles.of_queries`, flat: row, tile, first key, tiles of keys.

    And a function that gives for a step of the tile which of these tiles it needs, from
    which to which, and which of them whole. Of `Tiles.of_keys` the same.
    """
    start = number * (3 + 2 * steps)
    tile, first, count = (work_ref[start + i] for i in range(3))

    def own(step):
        ends = (work_ref[start + 3 + 2 * step + i] for i in range(2))
        return tuple(map(unpacked, ends))

    return tile // tiles_per_row, tile % tiles_per_row, first, count, own


def over_steps(steps, needed, one_step, passed, carry=None):
    """Goes over a tile's steps, with `carry = one_step(at, carry)` where needed.

    On others a warpgroup calls `passed(at)`, to take part in all that others wait for.
    """

    def only_passed(at, _):
        passed(at)

    lax.fori_loop(number(0), needed[0], only_passed, None)
    carry = lax.fori_loop(needed[0], needed[1], one_step, carry)
    lax.fori_loop(needed[1], steps, only_passed, None)
    return carry


class Walk:
    """The items that a block of a persistent kernel takes, one after the other.

    An item is a head and a tile, of which `entry` gives the rest, by its number.
    Rounds go over the blocks to and fro, so that each gets long and short ones.
    """

    def __init__(self, entry, entries: int, heads: int):
        self.entry, self.heads = entry, heads
        self.items = entries * heads
        self.rounds = -(-self.items // BLOCKS)
        self.block = lax.axis_index("block")

    def item(self, turn):
        """Whether there is one in this turn; its head, and what `entry` gives."""
        block = jnp.where(turn % 2 == 0, self.block, BLOCKS - 1 - self.block)
        index = turn * BLOCKS + block
        there = index < self.items
        number = jnp.where(there, index // self.heads, 0)
        return there, index % self.heads, *self.entry(number)

    def each(self, body, carry):
        """`carry = body(turn, head, *entry, carry)`, item by item."""

        def one(turn, carry):
            there, *item = self.item(turn)
            run = functools.partial(body, turn, *item)
            return lax.cond(there, run, lambda carry: carry, carry)

        return lax.fori_loop(number(0), number(self.rounds), one, carry)


def from_row(tile, offset: Any = 0, size: int = TILE):
    """The tokens of a tile, from `offset` on."""
    return pl.ds(tile * TILE + offset, size)
