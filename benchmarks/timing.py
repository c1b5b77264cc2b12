"""Interleaved timing: what is compared runs in turns, under the same conditions."""

import time
from collections.abc import Callable, Mapping, Sequence

import jax


def interleaved(
    functions: Mapping[str, Callable], rounds: Sequence[tuple]
) -> dict[str, list[float]]:
    """Times each function once a round, in turns, right after an untimed call.

    The untimed call is there since each function is to be seen as in a loop of its own,
    not with caches and an allocator as the one before it left them.

    Args:
        functions: Functions by name. Each is called once before, which compiles it.
        rounds: The arguments of each round, the same for all functions.

    Returns:
        Per name the time of each round, in milliseconds.
    """
    for function in functions.values():
        jax.block_until_ready(function(*rounds[0]))
    times: dict[str, list[float]] = {name: [] for name in functions}
    for arguments in rounds:
        for name, function in functions.items():
            jax.block_until_ready(function(*arguments))
            start = time.perf_counter()
            jax.block_until_ready(function(*arguments))
            times[name].append((time.perf_counter() - start) * 1e3)
    return times
