"""Interleaved timing: what is compared runs in turns, under the same conditions."""

import statistics
import time
from collections.abc import Callable, Mapping

import jax


def interleaved(
    functions: Mapping[str, Callable], args: tuple, repeats: int
) -> dict[str, dict[str, float]]:
    """Times each function `repeats` times, in turns.

    Args:
        functions: Functions of `args` by name; each is called once before, which
            compiles it.
        args: Arguments for all of them.
        repeats: Number of rounds.

    Returns:
        Per name the median, least and greatest time, in milliseconds.
    """
    for function in functions.values():
        jax.block_until_ready(function(*args))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            start = time.perf_counter()
            jax.block_until_ready(function(*args))
            times[name].append((time.perf_counter() - start) * 1e3)
    return {
        name: {
            "median_ms": round(statistics.median(t), 3),
            "min_ms": round(min(t), 3),
            "max_ms": round(max(t), 3),
        }
        for name, t in times.items()
    }
