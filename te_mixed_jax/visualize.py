"""Pictures and text that show who sees whom in a packed row, in O(T) memory."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np
from jax.core import Tracer

from te_mixed_jax._call import canonical_call, check_is_desc
from te_mixed_jax._descriptor import SequenceDescriptor, as_integers
from te_mixed_jax._policy import FULL, LOWEST, MaskPolicy, as_int
from te_mixed_jax._ranges import KeyRanges, key_ranges
from te_mixed_jax.lowerings._tiles import MAX_TOKENS, STEP, TILE, tiles_of, unpacked

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Okabe and Ito's colours but black and yellow, in an order in which colour-blind
# readers can tell neighbours apart at once.
_COLORS = ("#0072B2", "#E69F00", "#009E73", "#56B4E9", "#D55E00", "#CC79A7")
# Along each side of a picture: cells that are computed at most, pixels of the longer.
_CELLS, _PIXELS = 512, 1024
# Pixels that a pattern is drawn lighter in, and Matplotlib's name for it. Hatches of
# Matplotlib itself would need an outline of each sequence; tokens may lie in any order.
_PERIOD = 24
_PATTERNS = {
    "": lambda y, x: (y < 0) & (x < 0),
    "//": lambda y, x: (x + y) % _PERIOD < 8,
    "..": lambda y, x: np.hypot(y % _PERIOD - 12, x % _PERIOD - 12) < 6,
    "--": lambda y, x: (y % _PERIOD < 8) & (x >= 0),
    "\\\\": lambda y, x: (x - y) % _PERIOD < 8,
    "||": lambda y, x: (x % _PERIOD < 8) & (y >= 0),
}


def plot_mask(
    desc: SequenceDescriptor,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    *,
    row: int = 0,
    tiles: bool = False,
    ax: "Axes | None" = None,
) -> "Axes":
    """Draws the mask of one row: queries downwards, keys to the right.

    Each sequence has a colour, six in turn, and each policy a pattern. Where a query
    does not see a key it is white; padding is hatched. Beyond 512 tokens a point stands
    for several: it is coloured if any pair is seen, paler the fewer are.

    Dims: `*B` batch axes, `T` query length, `S` key/value length.

    Args:
        desc: Segment ids and positions, ``[*B, T]`` and ``[*B, S]``; concrete values.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[*B, T]``: the policy of each query token.
        row: Which row, counted over all batch axes.
        tiles: Whether to show what "mosaic" does with tiles of 64 queries by 128 keys:
            it skips those without a pair that is seen (white), compares each pair in
            some (grey), and none where it knows that all are seen (framed). They start
            at the first key that 128 queries need; where a block has 192 queries, at
            the first one for those.
        ax: Axes to draw into. Default: those of a new figure of `matplotlib.pyplot`.

    Returns:
        The axes. Their title has the share of pairs that are seen; with `tiles`, also
        that of tiles that are skipped, which is the work saved.

    Raises:
        ImportError: if Matplotlib is not installed.
        ValueError: for wrong shapes and values, and for a row that is not there.
        TypeError: for wrong dtypes, and for traced values.

    Example:
        >>> desc = from_segment_ids_and_pos([[1, 1, 1, 2, 2, 2, 2, 0]])
        >>> policy_ids = [[0, 0, 0, 1, 1, 1, 1, 0]]
        >>> ax = visualize.plot_mask(desc, (CAUSAL, FULL), policy_ids)
        >>> ax.get_title()
        'row 0: 22 of 64 pairs are seen (34.4%)'

    Source: the colours are those of Okabe and Ito 2008, "Color Universal Design".
    """
    try:
        from matplotlib import pyplot, ticker
    except ImportError as error:
        raise ImportError(
            '`plot_mask` needs Matplotlib: `pip install "te_mixed_jax[visualize]"`.'
        ) from error

    mask = _mask_of(desc, policy, policy_ids, row)
    T, S = mask.q_ids.size, mask.kv_ids.size
    if not (T and S):
        raise ValueError(
            f"`desc` must have tokens on both sides, got {T} queries and {S} keys."
        )
    handles = [
        _swatch("0.35", "0.8", repr(mask.policies[index]), hatch)
        for index, hatch in zip(mask.used, _patterns(len(mask.used)), strict=True)
    ]
    if mask.padding:
        handles.append(_swatch("1", "0.6", "padding", "xx"))
    if tiles:
        handles += [
            _swatch("1", "0.8", "tiles skipped", linewidth=1),
            _swatch(_MASKED, _MASKED, "tiles run masked"),
            _swatch("1", "0", "tiles run plain", linewidth=1),
        ]
    # Width and height; a row of few queries and many keys would be a line otherwise.
    longest = max(T, S)
    width, height = max(S / longest, 0.4), max(T / longest, 0.4)
    if ax is None:
        legend = 1.1 + 0.085 * max(len(str(x.get_label())) for x in handles)
        size = 6 * width + legend + 0.8, 6 * height + 1
        ax = pyplot.subplots(figsize=size, layout="constrained")[1]
    image = _image(mask, int(height * _PIXELS), int(width * _PIXELS))
    ax.imshow(image, extent=(0, S, T, 0), aspect="auto")
    title = mask.summary(row)
    if tiles:
        skipped, masked, plain = _draw_tiles(ax, mask)
        title += f"\nthe kernel skips {skipped:.1%} of the tiles, runs {masked:.1%} "
        title += f"masked, {plain:.1%} plain"
    _draw_names(ax, mask)
    ax.set(title=title, xlabel="key (token)", ylabel="query (token)")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(ticker.MaxNLocator(8, integer=True, steps=[1, 2, 5, 10]))
    ax.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(1.01, 1),
        borderaxespad=0,
        handlelength=3,
        handleheight=1.5,
    )
    return ax


def describe(
    desc: SequenceDescriptor,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    *,
    row: int = 0,
) -> str:
    """One row as text: its sequences, where they lie, what their queries see.

    Dims: `*B` batch axes, `T` query length, `S` key/value length.

    Args:
        desc: Segment ids and positions, ``[*B, T]`` and ``[*B, S]``; concrete values.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[*B, T]``: the policy of each query token.
        row: Which row, counted over all batch axes.

    Returns:
        A table with a line per sequence, in the order of their first query: the tokens,
        from and to (inclusive), the policy, and how many keys its queries see on
        average. The last line is padding, if there is some.

    Raises:
        ValueError: for wrong shapes and values, and for a row that is not there.
        TypeError: for wrong dtypes, and for traced values.

    Example:
        >>> desc = from_segment_ids_and_pos([[1, 1, 1, 2, 2, 2, 2, 0]])
        >>> policy_ids = [[0, 0, 0, 1, 1, 1, 1, 0]]
        >>> print(visualize.describe(desc, (CAUSAL, FULL), policy_ids))
        row 0: 22 of 64 pairs are seen (34.4%)
        sequence  tokens  policy  keys seen
        1         0-2     CAUSAL  2.0
        2         3-6     FULL    4.0
        padding   7
    """
    mask = _mask_of(desc, policy, policy_ids, row)
    lines = [("sequence", "queries", "keys", "policy", "keys seen")]
    for sequence in mask.sequences:
        here = mask.q_ids == sequence
        policies = [
            repr(mask.policies[index])
            for index in mask.used
            if (mask.policy_ids[here] == index).any()
        ]
        lines.append(
            (
                str(sequence),
                _stretches(here),
                _stretches(mask.kv_ids == sequence),
                ", ".join(policies) or "-",
                f"{mask.seen[here].mean():.1f}" if here.any() else "-",
            )
        )
    if mask.padding:
        padding = _stretches(mask.q_ids <= 0), _stretches(mask.kv_ids <= 0)
        lines.append(("padding", *padding, "", ""))
    if desc._kv_ids is None:
        lines = [(sequence, tokens, *rest) for sequence, tokens, _, *rest in lines]
        lines[0] = ("sequence", "tokens", *lines[0][2:])
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = [
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in (mask.summary(row), *table))


@dataclasses.dataclass(frozen=True)
class _Mask:
    """One row. Query i sees the keys `order[start[i] : stop[i]]`."""

    ranges: KeyRanges  # of a batch of one
    q_ids: np.ndarray
    kv_ids: np.ndarray
    policies: tuple[MaskPolicy, ...]
    policy_ids: np.ndarray
    start: np.ndarray
    stop: np.ndarray
    order: np.ndarray

    @property
    def seen(self) -> np.ndarray:
        """Number of keys that each query sees."""
        return self.stop - self.start

    @property
    def padding(self) -> bool:
        """Whether there is any, on either side."""
        return bool((self.q_ids <= 0).any() or (self.kv_ids <= 0).any())

    def summary(self, row: int) -> str:
        """How much of all that is the row may be seen."""
        seen, pairs = int(self.seen.sum()), self.q_ids.size * self.kv_ids.size
        share = seen / max(1, pairs)
        return f"row {row}: {seen:,} of {pairs:,} pairs are seen ({share:.1%})"

    @functools.cached_property
    def used(self) -> list[int]:
        """Policies of real queries."""
        return np.unique(self.policy_ids[self.q_ids > 0]).tolist()

    @functools.cached_property
    def sequences(self) -> list[int]:
        """Ids in the order of their first query, then those that have keys only."""
        ids = np.concatenate([self.q_ids, self.kv_ids])
        values, first = np.unique(ids, return_index=True)
        return [i for i in values[np.argsort(first)].tolist() if i > 0]


_key_ranges = jax.jit(key_ranges, static_argnums=1)


@jax.jit
def _tiles_of_queries(ranges: KeyRanges):
    return tiles_of(ranges).of_queries


def _mask_of(desc, policy, policy_ids, row) -> _Mask:
    """The row, validated as a call of `dot_product_attention` is."""
    check_is_desc(desc)
    if any(isinstance(x, Tracer) for x in jax.tree.leaves((desc, policy_ids))):
        raise TypeError(
            "`desc` and `policy_ids` must be concrete values to be looked at, got "
            "traced ones: call this outside `jax.jit` and other transformations."
        )
    desc = jax.tree.map(np.asarray, desc.check())
    q_ids, kv_ids = desc.segment_ids
    sides = [q_ids, kv_ids]
    if policy_ids is not None:
        policy_ids = np.asarray(as_integers("policy_ids", policy_ids))
        sides.append(policy_ids)
    # What does not fit is an error of the call below, which has no heads.
    leading = [x.shape[:-1] for x in sides if x.ndim == q_ids.ndim]
    batch = tuple(map(max, *leading, (0,) * (q_ids.ndim - 1)))
    q, k = (np.zeros((*batch, x.shape[-1], 0, 1), np.float32) for x in (q_ids, kv_ids))
    call = canonical_call(
        *(q, k, k, desc),
        policy=policy,
        policy_ids=policy_ids,
        scale=None,
        implementation=None,
    )
    rows = math.prod(batch)
    row = as_int("row", row, 0)
    if row >= rows:
        raise ValueError(f"`row` must be from 0 to {rows - 1}, got {row}.")
    index = np.unravel_index(row, batch)

    def only(x):
        if x is None:
            return None
        return np.broadcast_to(x, batch + x.shape[-1:])[index][None]

    names = "_q_ids", "_kv_ids", "_q_pos", "_kv_pos"
    data = {name: only(getattr(desc, name)) for name in names}
    desc = dataclasses.replace(desc, _broken=None, **data)
    policy_ids = only(policy_ids)
    policies = call.config.policies
    ranges = _key_ranges(desc, policies, policy_ids)
    q_ids, q_lo, q_hi, kv_ids, kv_pos = (np.asarray(x[0], np.int64) for x in ranges)
    policy_ids = np.zeros_like(q_ids) if policy_ids is None else policy_ids[0]

    # Id and position as one number: a query's keys are neighbours in its order.
    keys = (kv_ids << 32) + (kv_pos - LOWEST)
    order = np.argsort(keys, kind="stable")
    start = np.searchsorted(keys, (q_ids << 32) + (q_lo - LOWEST), "left", order)
    stop = np.searchsorted(keys, (q_ids << 32) + (q_hi - LOWEST), "right", order)
    stop = np.maximum(start, stop)
    return _Mask(ranges, q_ids, kv_ids, policies, policy_ids, start, stop, order)


# ------------------------------------------------------------------------- the picture


class _Cells(NamedTuple):
    """What a picture shows of `q_step` x `k_step` pairs, which are one cell."""

    q_step: int
    k_step: int
    share: np.ndarray  # of the pairs that are seen
    color: np.ndarray  # that most of them have, as an index of `_COLORS`
    policy: np.ndarray  # the same, as an index of `_Mask.used`


def _cells(mask: _Mask) -> _Cells:
    """Counts the pairs of each cell, a row of cells at a time, in O(T) memory each."""
    T, S = mask.q_ids.size, mask.kv_ids.size
    q_step, k_step = -(-T // _CELLS), -(-S // _CELLS)
    rows, columns = -(-T // q_step), -(-S // k_step)
    colors = len(_COLORS)
    # Per key, in order: the cell that it is in, and the colour of its sequence.
    color_of = {i: rank % colors for rank, i in enumerate(mask.sequences)}
    color = [color_of.get(i, 0) for i in mask.kv_ids[mask.order].tolist()]
    place = mask.order // k_step * colors + np.asarray(color)

    share = np.zeros((rows, columns))
    best = np.zeros((rows, columns), int)
    for cell in range(rows):
        here = slice(cell * q_step, (cell + 1) * q_step)
        counts = np.zeros((len(mask.used), columns * colors))
        for which, index in enumerate(mask.used):
            own = (mask.policy_ids[here] == index) & (mask.seen[here] > 0)
            if not own.any():
                continue
            start, stop = mask.start[here][own], mask.stop[here][own]
            low, high = start.min(), stop.max()
            size = high - low + 1
            queries = np.cumsum(
                np.bincount(start - low, minlength=size)
                - np.bincount(stop - low, minlength=size)
            )
            counts[which] = np.bincount(
                place[low:high], queries[:-1], minlength=columns * colors
            )
        by_cell = np.moveaxis(counts.reshape(-1, columns, colors), 1, 0)
        share[cell] = by_cell.sum((1, 2)) / (q_step * k_step)
        best[cell] = by_cell.reshape(columns, -1).argmax(1) if mask.used else 0
    return _Cells(q_step, k_step, share, best % colors, best // colors)


def _image(mask: _Mask, height: int, width: int) -> np.ndarray:
    """RGBA pixels, transparent where nothing is seen."""
    from matplotlib.colors import to_rgb

    T, S = mask.q_ids.size, mask.kv_ids.size
    cells = _cells(mask)
    y, x = np.arange(height)[:, None], np.arange(width)
    q = ((y[:, 0] + 0.5) * T / y.size).astype(int)
    kv = ((x + 0.5) * S / x.size).astype(int)
    at = np.ix_(q // cells.q_step, kv // cells.k_step)
    share, policy = cells.share[at][..., None], cells.policy[at]

    strength = (0.4 + 0.6 * share).astype(np.float32)
    for which, hatch in enumerate(_patterns(len(mask.used))):
        lighter = (policy == which) & _PATTERNS[hatch](y, x)
        strength[lighter] *= 0.35
    color = np.array([to_rgb(color) for color in _COLORS], np.float32)[cells.color[at]]
    image = np.concatenate([1 - strength * (1 - color), share > 0], axis=-1)

    padding = (mask.q_ids[q] <= 0)[:, None] | (mask.kv_ids[kv] <= 0)
    hatched = ((x + y) % _PERIOD < 3) | ((x - y) % _PERIOD < 3)
    image[padding & hatched] = (0.6, 0.6, 0.6, 1)
    return image


def _patterns(number: int) -> list[str]:
    """The patterns of that many policies, in turn."""
    patterns = list(_PATTERNS)
    return [patterns[i % len(patterns)] for i in range(number)]


def _swatch(face: str, edge: str, label: str, hatch: str = "", linewidth: float = 0):
    """An entry of the legend, as wide and as high as a few hatches."""
    from matplotlib.patches import Patch

    return Patch(
        facecolor=face, edgecolor=edge, label=label, hatch=hatch, linewidth=linewidth
    )


_MASKED = "0.85"


def _draw_tiles(ax: "Axes", mask: _Mask) -> tuple[float, float, float]:
    """Marks the tiles, and returns the shares that are skipped, masked and plain."""
    T, S = mask.q_ids.size, mask.kv_ids.size
    if max(T, S) > MAX_TOKENS:
        raise ValueError(
            f"`tiles` are known of rows of at most {MAX_TOKENS} tokens, got "
            f"{max(T, S)}."
        )
    table = np.asarray(_tiles_of_queries(mask.ranges))
    _tile, first, _tiles, *ends = table[np.argsort(table[:, 0])].T
    # Per step of queries, of which each tile has as many.
    needed, whole = (
        [np.stack(x, 1) for x in zip(*map(unpacked, packed), strict=True)]
        for packed in (ends[0::2], ends[1::2])
    )
    needed, whole = (
        [(first[:, None] + x * TILE).ravel() for x in pair] for pair in (needed, whole)
    )
    _draw_stretches(ax, *needed, fill=True, color=_MASKED, zorder=-1)
    _draw_stretches(ax, *whole, fill=False, edgecolor="black", linewidth=1, zorder=3)
    ax.set(xlim=(0, S), ylim=(T, 0))
    total = -(-T // STEP) * -(-S // TILE) * TILE
    run, plain = ((stop - start).sum() / total for start, stop in (needed, whole))
    return 1 - run, run - plain, plain


def _draw_stretches(ax: "Axes", start: np.ndarray, stop: np.ndarray, **style) -> None:
    """The outline of the keys from `start` to `stop`, given per step of queries."""
    empty = start >= stop
    start, stop = (np.where(empty, np.nan, x) for x in (start, stop))
    edges = np.arange(start.size + 1) * STEP
    # Where neighbours do not touch, a gap of no height: else a line would join them.
    apart = 1 + np.flatnonzero((start[1:] >= stop[:-1]) | (stop[1:] <= start[:-1]))
    start, stop = (np.insert(x, apart, np.nan) for x in (start, stop))
    edges = np.insert(edges, apart, edges[apart])
    ax.stairs(stop, edges, baseline=start, orientation="horizontal", **style)


def _draw_names(ax: "Axes", mask: _Mask) -> None:
    """The id of each sequence beside it, if it is in one piece and there is room."""
    T, S = mask.q_ids.size, mask.kv_ids.size
    for sequence in mask.sequences:
        q = np.flatnonzero(mask.q_ids == sequence)
        kv = np.flatnonzero(mask.kv_ids == sequence)
        if not kv.size or q.size < 0.03 * T or q[-1] - q[0] + 1 != q.size:
            continue
        right = kv[-1] + 1 < 0.75 * S
        if not right and kv[0] < 0.25 * S:
            continue
        ax.annotate(
            f"sequence {sequence}",
            (kv[-1] + 1 if right else kv[0], q.mean() + 0.5),
            (4 if right else -4, 0),
            textcoords="offset points",
            ha="left" if right else "right",
            va="center",
        )


def _stretches(here: np.ndarray) -> str:
    """The tokens where `here`, as "0-2, 5" at most four stretches of them."""
    edges = np.flatnonzero(np.diff(here.astype(np.int8), prepend=0, append=0))
    pairs = [
        str(first) if first == end - 1 else f"{first}-{end - 1}"
        for first, end in edges.reshape(-1, 2).tolist()
    ]
    more = [f"and {len(pairs) - 4} more"] if len(pairs) > 4 else []
    return ", ".join([*pairs[:4], *more]) or "-"
