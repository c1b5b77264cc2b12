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
    policies: tuple[oracle.Policy, ...], tile: int, step: int, **sizes: int
) -> Any:
    """The tiles of ids, positions and policy ids, with tiles of another size."""
    package = tuple(map(checks.package_policy, policies))

    @jax.jit
    def tiles(ids, pos, policy_ids):
        ranges = key_ranges(te.from_segment_ids_and_pos(ids, pos), package, policy_ids)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_tiles, "TILE", tile)
            patch.setattr(_tiles, "STEP", step)
            return _tiles.tiles_of(ranges, **sizes)

    return tiles


def tiles_of(
    metadata: Any, tile: int = 128, step: int = 64, **sizes: int
) -> _tiles.Tiles:
    """`metadata` is what `oracle.mask` takes, in its order."""
    q_ids, kv_ids, q_pos, kv_pos, policies, policy_ids = metadata

    def int32(x: Any) -> np.ndarray | None:
        return None if x is None else np.asarray(x, np.int32)

    pos = None if q_pos is None else (int32(q_pos), int32(kv_pos))
    run = compiled(tuple(policies), tile, step, **sizes)
    return run((int32(q_ids), int32(kv_ids)), pos, int32(policy_ids))


def in_order(work: Any) -> np.ndarray:
    """The columns of a table of work but for the number, in the order of tiles."""
    number, *columns = np.asarray(work).T
    np.testing.assert_array_equal(np.sort(number), np.arange(number.size))
    return np.stack(columns)[:, np.argsort(number)]


def walks(work: Any, B: int, width: int) -> tuple[np.ndarray, ...]:
    """Per step of a tile, in tokens: from, to, whole from, whole to."""
    first, count, *packed = in_order(work)
    assert not (first % 8).any()
    needed, whole = (
        [np.stack(x, 1) for x in zip(*map(_tiles.unpacked, pairs), strict=True)]
        for pairs in (packed[::2], packed[1::2])
    )
    np.testing.assert_array_equal(needed[1].max(1), count)
    ends = (first[:, None] + x * width for x in (*needed, *whole))
    return tuple(x.reshape(B, -1, 1) for x in ends)


def sizes(of_queries: int, of_keys: int, queries: int) -> dict[str, int]:
    """As the kernels have them, but for head dims, see their `tiles_of`."""
    return {
        "steps_of_queries": of_queries,
        "steps_of_keys": of_keys,
        "queries_per_step": queries,
    }


@pytest.mark.parametrize(
    ("tile", "step", "sizes"),
    [
        (16, 4, sizes(2, 1, 4)),
        (16, 4, sizes(3, 2, 16)),
        pytest.param(128, 64, sizes(2, 1, 64), marks=pytest.mark.slow),
        pytest.param(128, 64, sizes(3, 2, 128), marks=pytest.mark.slow),
    ],
)
@hypothesis.given(call=calls())
def test_all_that_is_seen_is_walked_and_whole_tiles_are_whole(
    tile: int, step: int, sizes: dict[str, int], call: dict[str, Any]
) -> None:
    """Tokens in any order, from both sides; small tiles make many of them.

    Three steps a tile: the last tile of queries reaches beyond the others' end.
    """
    names = ("q_ids", "kv_ids", "q_pos", "kv_pos", "policies", "policy_ids")
    metadata = [call[name] for name in names]
    tiles = tiles_of(metadata, tile, step, **sizes)
    mask = oracle.mask(*metadata)
    B, T, S = mask.shape
    mask = np.pad(mask, ((0, 0), (0, -T % tile), (0, -S % tile)))

    queries, keys = np.asarray(tiles.queries), np.asarray(tiles.keys)
    # As the kernels compare: differences wrap.
    near = keys[:, 1, None] - queries[:, 1, :, None] <= queries[:, 2, :, None]
    seen = (queries[:, 0, :, None] == keys[:, 0, None]) & near
    np.testing.assert_array_equal(seen, mask)

    # What queries beyond the row see does not matter.
    may_be_whole = mask | (np.arange(mask.shape[1]) >= T)[:, None]
    check_walks(mask, may_be_whole, step, walks(tiles.of_queries, B, tile))
    mask, may_be_whole = (x.swapaxes(1, 2) for x in (mask, may_be_whole))
    ends = walks(tiles.of_keys, B, sizes["queries_per_step"])
    check_walks(mask, may_be_whole, step, ends)


def check_walks(mask, may_be_whole, step: int, ends) -> None:
    """Each step of rows walks the columns that it must, and whole ones only if so."""
    B, rows, size = mask.shape
    some = mask.reshape(B, -1, step, size).any(2)
    may_be_whole = may_be_whole.reshape(B, -1, step, size).all(2)
    start, stop, whole_start, whole_stop = (x[:, : rows // step] for x in ends)
    assert ((start >= 0) & (start <= stop) & (stop <= size)).all()
    at = np.arange(size)
    visited = (start <= at) & (at < stop)
    assert not (some & ~visited).any()
    unmasked = visited & (whole_start <= at) & (at < whole_stop)
    assert not (unmasked & ~may_be_whole).any()


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
    assert (np.diff(getattr(tiles, work)[:, 2]) <= 0).all()


@pytest.mark.parametrize("work", ["of_queries", "of_keys"])
@pytest.mark.parametrize(
    ("lengths", "fill", "unmasked"),
    [((500, 2000), 0.89, 0.75), ((64, 512), 0.60, 0.25)],
)
def test_little_is_walked_in_vain(
    lengths: tuple[int, int], fill: float, unmasked: float, work: str
) -> None:
    """Share of visited pairs that are seen, and of those that need no mask."""
    ids, policy_ids = some_rows(4096, *lengths)
    arguments = ids, ids, None, None, POLICIES, policy_ids
    width = 128 if work == "of_queries" else 64
    start, stop, *whole = walks(getattr(tiles_of(arguments), work), 2, width)
    visited = (stop - start).sum()
    assert oracle.mask(*arguments).sum() / visited / _tiles.STEP > fill
    assert (whole[1] - whole[0]).sum() / visited > unmasked


def test_an_id_in_two_runs_is_walked_over_both_and_what_lies_between() -> None:
    ids = np.repeat([1, 2, 1], 128)[None]
    tiles = tiles_of((ids, ids, None, None, (oracle.FULL,), None))
    start, stop, whole_start, whole_stop = walks(tiles.of_queries, 1, 128)
    np.testing.assert_array_equal(start.ravel(), [0, 0, 128, 128, 0, 0])
    np.testing.assert_array_equal(stop.ravel(), [384, 384, 256, 256, 384, 384])
    # Ids are compared wherever another sequence may stand.
    np.testing.assert_array_equal(
        (whole_stop > whole_start).ravel(), [False, False, True, True, False, False]
    )


def test_a_walk_starts_where_a_sequence_does() -> None:
    """By 8 keys, and not where it would end beyond the last tile of the row."""
    ids = np.repeat([1, 2, 3], [250, 200, 62])[None]
    tiles = tiles_of((ids, ids, None, None, (oracle.FULL,), None))
    first, count, *_ = in_order(tiles.of_queries)
    np.testing.assert_array_equal(first, [0, 0, 248, 128])
    np.testing.assert_array_equal(count, [2, 4, 2, 3])


@pytest.mark.parametrize("work", ["of_queries", "of_keys"])
def test_padding_in_a_tile_makes_no_walk_longer(work: str) -> None:
    """A step that needs nothing says nothing about where the others start."""
    ids = np.repeat([1, 2, 0], [256, 64, 192])[None]
    tiles = tiles_of((ids, ids, None, None, (oracle.FULL,), None))
    first, count, *_ = in_order(getattr(tiles, work))
    assert first[2] == 256
    np.testing.assert_array_equal(count > 0, [True, True, True, False])


def test_positions_that_wrap_are_no_run() -> None:
    """The next number after 2^31 - 1 is the lowest: it comes before all others."""
    ids = np.ones((1, 256), np.int32)
    pos = (np.arange(256) + 2**31 - 128).astype(np.uint32).view(np.int32)[None]
    for policy in (oracle.CAUSAL, oracle.window(oracle.FULL, 5, 5)):
        arguments = ids, ids, pos, pos, (policy,), None
        start, stop, *_ = walks(tiles_of(arguments).of_queries, 1, 128)
        seen = oracle.mask(*arguments).reshape(4, 64, 256).any(1)
        at = np.arange(256)
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
