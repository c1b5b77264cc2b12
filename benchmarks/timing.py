"""Interleaved timing: what is compared runs in turns, under the same conditions."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def interleaved(
    functions: Mapping[str, tuple[Callable, Sequence[tuple]]],
    *,
    calls: int = 7,
    seconds: float = 3,
    batch: int = 1,
    wait: Callable[[Any], object] = jax.block_until_ready,
) -> dict[str, list[float]]:
    """Times each function once a round, in turns, in a short loop of its own.

    A turn starts with an untimed call, and its time is the median of several timed
    ones: a function is to be seen as in a training loop, not with caches and an
    allocator as the one before it left them.

    Args:
        functions: Per name a function and its arguments in each round. Each is called
            once before, which compiles it.
        calls: Timed calls of a turn.
        seconds: No further call starts when the timed ones of a turn took as long.
        batch: Calls that are started one after the other and timed as one, where
            starting and waiting would count as much as the call.
        wait: Waits for the results of a call.

    Returns:
        Per name the time of one call in each round, in milliseconds.
    """
    for function, rounds in functions.values():
        wait(function(*rounds[0]))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(max((len(r) for _, r in functions.values()), default=0)):
        for name, (function, rounds) in functions.items():
            wait(function(*rounds[turn]))
            timed: list[float] = []
            results = None
            while len(timed) < calls and sum(timed) * batch < seconds * 1e3:
                start = time.perf_counter()
                for _ in range(batch):
                    results = function(*rounds[turn])
                wait(results)
                timed.append((time.perf_counter() - start) * 1e3 / batch)
            times[name].append(statistics.median(timed))
    return times
