"""The tiles that the GPU kernels walk: nothing that is seen is left out."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te
from benchmarks import shapes
from benchmarks.attention import unmasked_pairs
from te_mixed_jax._ranges import KeyRanges, key_ranges
from te_mixed_jax.lowerings import _tiles
from test_random_rows import calls


def ranges_of(
    q_ids: Any, kv_ids: Any, q_pos: Any, kv_pos: Any, policies: Any, policy_ids: Any
) -> KeyRanges:
    def pair(*sides: Any) -> Any:
        return (
            None
            if sides[0] is None
            else tuple(jnp.asarray(x, jnp.int32) for x in sides)
        )

    desc = te.from_segment_ids_and_pos(pair(q_ids, kv_ids), pair(q_pos, kv_pos))
    if policy_ids is not None:
        policy_ids = jnp.asarray(policy_ids, jnp.int32)
    return key_ranges(desc, tuple(map(checks.package_policy, policies)), policy_ids)


def walked(work: Any, B: int) -> tuple[np.ndarray, ...]:
    """Of a table of work, in the order of tiles: from, to, whole from, whole to."""
    tile, needed, whole = np.asarray(work).T
    np.testing.assert_array_equal(np.sort(tile), np.arange(tile.size))
    order = np.argsort(tile)
    ends = (*_tiles.unpacked(needed[order]), *_tiles.unpacked(whole[order]))
    return tuple(x.reshape(B, -1, 1) for x in ends)


@functools.cache
def tiles_of_size(tile: int, step: int) -> Any:
    """`tiles_of` for tiles of another size, compiled."""

    @jax.jit
    def tiles_of(ranges: KeyRanges) -> _tiles.Tiles:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tiles, "TILE", tile)
            patch.setattr(_tiles, "STEP", step)
            return _tiles.tiles_of(ranges)

    return tiles_of


@pytest.mark.parametrize(("tile", "step"), [(8, 4), (128, 64)])
@hypothesis.given(call=calls())
def test_all_that_is_seen_is_walked_and_whole_tiles_are_whole(
    tile: int, step: int, call: dict[str, Any]
) -> None:
    """Tokens in any order, from both sides; small tiles make many of them."""
    names = ("q_ids", "kv_ids", "q_pos", "kv_pos", "policies", "policy_ids")
    metadata = [call[name] for name in names]
    tiles = tiles_of_size(tile, step)(ranges_of(*metadata))
    mask = oracle.mask(*metadata)
    B, T, S = mask.shape
    pad = (0, 0), (0, -T % tile), (0, -S % tile)
    mask = np.pad(mask, pad)

    queries, keys = np.asarray(tiles.queries), np.asarray(tiles.keys)
    # As the kernels compare: differences wrap.
    near = keys[:, 1, None] - queries[:, 1, :, None] <= queries[:, 2, :, None]
    seen = (queries[:, 0, :, None] == keys[:, 0, None]) & near
    np.testing.assert_array_equal(seen, mask)

    beyond = np.arange(mask.shape[1]) >= T  # what these see does not matter
    for work, rows, from_keys in (
        (tiles.of_queries, tile, False),
        (tiles.of_keys, step, True),
    ):
        shape = B, mask.shape[1] // rows, rows, mask.shape[2] // tile, tile
        some = np.asarray(mask.reshape(shape).any((2, 4)))
        whole = np.asarray((mask | beyond[:, None]).reshape(shape).all((2, 4)))
        if from_keys:
            some, whole = some.swapaxes(1, 2), whole.swapaxes(1, 2)
        start, stop, whole_start, whole_stop = walked(work, B)
        at = np.arange(some.shape[2])
        assert ((start >= 0) & (start <= stop) & (stop <= at.size)).all()
        visited = (start <= at) & (at < stop)
        assert not (some & ~visited).any()
        unmasked = visited & (whole_start <= at) & (at < whole_stop)
        assert not (unmasked & ~whole).any()


@pytest.mark.parametrize("work", ["of_queries", "of_keys"])
def test_the_longest_walks_come_first(work: str) -> None:
    workload = shapes.GPU[0]
    tiles = tiles_of_workload(workload)
    start, stop = _tiles.unpacked(np.asarray(getattr(tiles, work))[:, 1])
    assert (np.diff(stop - start) <= 0).all()


def tiles_of_workload(w: shapes.Workload) -> _tiles.Tiles:
    ids, policy_ids = w.rows()
    policies = {
        "full": te.FULL,
        "causal": te.CAUSAL
        if w.window is None
        else te.CAUSAL.with_window(w.window - 1, 0),
    }
    return _tiles.tiles_of(
        key_ranges(
            te.from_segment_ids_and_pos(ids),
            tuple(policies[kind] for kind in w.kinds),
            jnp.asarray(policy_ids),
        )
    )


@pytest.mark.parametrize(
    ("name", "fill", "whole"),
    [("M1", 0.91, 0.84), ("M5", 0.96, 0.93), ("M6", 0.49, 0.18), ("M7", 0.80, 0.62)],
)
def test_little_is_walked_in_vain(name: str, fill: float, whole: float) -> None:
    """Share of visited pairs that are seen, and of tiles that need no mask."""
    (w,) = (w for w in shapes.GPU if w.name == name)
    tiles = tiles_of_workload(w)
    start, stop, whole_start, whole_stop = walked(tiles.of_queries, w.B)
    visited = (stop - start).sum()
    assert unmasked_pairs(w, *w.rows()) / visited / _tiles.TILE**2 > fill
    unmasked = np.clip(np.minimum(whole_stop, stop) - whole_start, 0, None).sum()
    assert unmasked / visited > whole


def test_an_id_in_two_runs_is_walked_over_both_and_what_lies_between() -> None:
    ids = np.repeat([1, 2, 1], 128)[None]
    tiles = _tiles.tiles_of(ranges_of(ids, ids, None, None, (oracle.FULL,), None))
    start, stop, whole_start, whole_stop = walked(tiles.of_queries, 1)
    np.testing.assert_array_equal(start.ravel(), [0, 1, 0])
    np.testing.assert_array_equal(stop.ravel(), [3, 2, 3])
    # Ids are compared wherever another sequence may stand.
    np.testing.assert_array_equal(
        (whole_stop > whole_start).ravel(), [False, True, False]
    )


def test_stretches_with_padding_are_marked() -> None:
    """There the kernels clear what padding holds, NaN included."""
    ids = np.ones((1, 300), np.int32)
    ids[0, 70] = 0
    tiles = _tiles.tiles_of(ranges_of(ids, ids, None, None, (oracle.FULL,), None))
    marks = np.asarray(tiles.queries)[0, 3], np.asarray(tiles.keys)[0, 2]
    np.testing.assert_array_equal(marks[0][::64], [0, 1, 0, 0, 1, 1])
    np.testing.assert_array_equal(marks[1][::64], [1, 1, 0, 0, 1, 1])
