"""The tiles that the GPU kernels walk: nothing that is seen is left out."""

import functools
from typing import Any

import hypothesis
import jax
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te
from te_mixed_jax._ranges import key_ranges
from te_mixed_jax.lowerings import _tiles
from test_random_rows import calls


@functools.cache
def compiled(
    policies: tuple[oracle.Policy, ...], tile: int, step: int, steps: int
) -> Any:
    """The tiles of ids, positions and policy ids, with tiles of another size."""
    package = tuple(map(checks.package_policy, policies))

    @jax.jit
    def tiles(ids, pos, policy_ids):
        ranges = key_ranges(te.from_segment_ids_and_pos(ids, pos), package, policy_ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tiles, "TILE", tile)
            patch.setattr(_tiles, "STEP", step)
            return _tiles.tiles_of(ranges, steps)

    return tiles


def tiles_of(
    metadata: Any, tile: int = 128, step: int = 64, steps: int = 2
) -> _tiles.Tiles:
    """`metadata` is what `oracle.mask` takes, in its order."""
    q_ids, kv_ids, q_pos, kv_pos, policies, policy_ids = metadata

    def int32(x: Any) -> np.ndarray | None:
        return None if x is None else np.asarray(x, np.int32)

    pos = None if q_pos is None else (int32(q_pos), int32(kv_pos))
    run = compiled(tuple(policies), tile, step, steps)
    return run((int32(q_ids), int32(kv_ids)), pos, int32(policy_ids))


def walked(work: Any, B: int) -> tuple[np.ndarray, ...]:
    """Of a table of work, in the order of tiles: from, to, whole from, whole to."""
    tile, needed, whole = np.asarray(work).T
    np.testing.assert_array_equal(np.sort(tile), np.arange(tile.size))
    order = np.argsort(tile)
    ends = (*_tiles.unpacked(needed[order]), *_tiles.unpacked(whole[order]))
    return tuple(x.reshape(B, -1, 1) for x in ends)


@pytest.mark.parametrize(
    ("tile", "step", "steps"),
    [
        (8, 4, 2),
        (8, 4, 3),
        *(pytest.param(128, 64, n, marks=pytest.mark.slow) for n in (2, 3)),
    ],
)
@hypothesis.given(call=calls())
def test_all_that_is_seen_is_walked_and_whole_tiles_are_whole(
    tile: int, step: int, steps: int, call: dict[str, Any]
) -> None:
    """Tokens in any order, from both sides; small tiles make many of them.

    Three steps a tile: the last tile of queries reaches beyond the others' end.
    """
    names = ("q_ids", "kv_ids", "q_pos", "kv_pos", "policies", "policy_ids")
    metadata = [call[name] for name in names]
    tiles = tiles_of(metadata, tile, step, steps)
    mask = oracle.mask(*metadata)
    B, T, S = mask.shape
    pad = (0, 0), (0, -T % tile), (0, -S % tile)
    mask = np.pad(mask, pad)

    queries, keys = np.asarray(tiles.queries), np.asarray(tiles.keys)
    # As the kernels compare: differences wrap.
    near = keys[:, 1, None] - queries[:, 1, :, None] <= queries[:, 2, :, None]
    seen = (queries[:, 0, :, None] == keys[:, 0, None]) & near
    np.testing.assert_array_equal(seen, mask)

    for work, rows, from_keys in (
        (tiles.of_keys, step, True),
        (tiles.of_queries, steps * step, False),
    ):
        mask = np.pad(mask, ((0, 0), (0, -mask.shape[1] % rows), (0, 0)))
        beyond = np.arange(mask.shape[1]) >= T  # what these see does not matter
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


def some_rows(T: int, shortest: int, longest: int) -> tuple[np.ndarray, np.ndarray]:
    """Two rows of sequences of random lengths, causal (0) or full (1) ones."""
    rng = np.random.default_rng(0)
    ids, policy_ids = np.zeros((2, 2, T), np.int32)
    for row in range(2):
        start, number = 0, 1
        while start + (length := rng.integers(shortest, longest)) <= T:
            ids[row, start : start + length] = number
            policy_ids[row, start : start + length] = rng.integers(2)
            start, number = start + length, number + 1
    return ids, policy_ids


POLICIES = oracle.CAUSAL, oracle.FULL


@pytest.mark.parametrize("work", ["of_queries", "of_keys"])
def test_the_longest_walks_come_first(work: str) -> None:
    ids, policy_ids = some_rows(2000, 50, 900)
    tiles = tiles_of((ids, ids, None, None, POLICIES, policy_ids))
    start, stop = _tiles.unpacked(np.asarray(getattr(tiles, work))[:, 1])
    assert (np.diff(stop - start) <= 0).all()


@pytest.mark.parametrize(
    ("lengths", "fill", "unmasked"),
    [((500, 2000), 0.85, 0.70), ((64, 512), 0.50, 0.20)],
)
def test_little_is_walked_in_vain(
    lengths: tuple[int, int], fill: float, unmasked: float
) -> None:
    """Share of visited pairs that are seen, and of tiles that need no mask."""
    ids, policy_ids = some_rows(4096, *lengths)
    arguments = ids, ids, None, None, POLICIES, policy_ids
    tiles = tiles_of(arguments)
    start, stop, whole_start, whole_stop = walked(tiles.of_queries, 2)
    visited = (stop - start).sum()
    assert oracle.mask(*arguments).sum() / visited / _tiles.TILE**2 > fill
    whole = np.clip(np.minimum(whole_stop, stop) - whole_start, 0, None).sum()
    assert whole / visited > unmasked


def test_an_id_in_two_runs_is_walked_over_both_and_what_lies_between() -> None:
    ids = np.repeat([1, 2, 1], 128)[None]
    tiles = tiles_of((ids, ids, None, None, (oracle.FULL,), None))
    start, stop, whole_start, whole_stop = walked(tiles.of_queries, 1)
    np.testing.assert_array_equal(start.ravel(), [0, 1, 0])
    np.testing.assert_array_equal(stop.ravel(), [3, 2, 3])
    # Ids are compared wherever another sequence may stand.
    np.testing.assert_array_equal(
        (whole_stop > whole_start).ravel(), [False, True, False]
    )


def test_positions_that_wrap_are_no_run() -> None:
    """The next number after 2^31 - 1 is the lowest: it comes before all others."""
    ids = np.ones((1, 256), np.int32)
    pos = (np.arange(256) + 2**31 - 128).astype(np.uint32).view(np.int32)[None]
    for policy in (oracle.CAUSAL, oracle.window(oracle.FULL, 5, 5)):
        arguments = ids, ids, pos, pos, (policy,), None
        start, stop, *_ = walked(tiles_of(arguments).of_queries, 1)
        seen = oracle.mask(*arguments).reshape(2, 128, 2, 128).any((1, 3))
        at = np.arange(2)
        assert not (seen & ~((start[0] <= at) & (at < stop[0]))).any()
        assert seen.any()


def test_stretches_with_padding_are_marked() -> None:
    """There the kernels clear what padding holds, NaN included."""
    ids = np.ones((1, 300), np.int32)
    ids[0, 70] = 0
    tiles = tiles_of((ids, ids, None, None, (oracle.FULL,), None))
    marks = np.asarray(tiles.queries)[0, 3], np.asarray(tiles.keys)[0, 2]
    for mark in marks:
        np.testing.assert_array_equal(mark[::64], [1, 1, 0, 0, 1, 1])
