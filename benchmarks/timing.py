"""Interleaved timing: what is compared runs in turns, under the same conditions."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import jax


def interleaved(
    functions: Mapping[str, Callable],
    rounds: Sequence[tuple],
    *,
    calls: int = 7,
    seconds: float = 3,
) -> dict[str, list[float]]:
    """Times each function once a round, in turns, in a short loop of its own.

    A turn starts with an untimed call, and its time is the median of several timed
    ones: a function is to be seen as in a training loop, not with caches and an
    allocator as the one before it left them.

    Args:
        functions: Functions by name. Each is called once before, which compiles it.
        rounds: The arguments of each round, the same for all functions.
        calls: Timed calls of a turn.
        seconds: No further call starts when the timed ones of a turn took as long.

    Returns:
        Per name the time of each round, in milliseconds.
    """
    for function in functions.values():
        jax.block_until_ready(function(*rounds[0]))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for arguments in rounds:
        for name, function in functions.items():
            jax.block_until_ready(function(*arguments))
            turn: list[float] = []
            while len(turn) < calls and sum(turn) < seconds * 1e3:
                start = time.perf_counter()
                jax.block_until_ready(function(*arguments))
                turn.append((time.perf_counter() - start) * 1e3)
            times[name].append(statistics.median(turn))
    return times
