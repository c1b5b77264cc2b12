"""Times each kernel of "mosaic" alone, its tables ready: for whoever works on them.

python -m benchmarks.kernels

Needs a Hopper GPU. Rates are per unmasked pair, with the operations that the kernel
does for it: 4 H forward, 6 H for dq, 8 H for dk and dv.
"""

import argparse
import functools
import json
import shlex
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import te_mixed_jax as tmj
from benchmarks import attention, peers, shapes
from benchmarks.timing import interleaved
from te_mixed_jax._ranges import key_ranges
from te_mixed_jax.lowerings import mosaic_bwd, mosaic_bwd_large, mosaic_fwd

FLOPS = {"forward": 4, "dq": 6, "dk, dv": 8}


def calls(w: shapes.Workload, rounds: int) -> dict[str, tuple[Any, list[tuple]]]:
    """Per kernel a function and its arguments in each round."""
    rng = np.random.default_rng(1)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((w.B, w.T, heads, w.H), np.float32), w.dtype)
        for heads in (w.N, w.K, w.K, w.N)
    )
    backward = mosaic_bwd if w.H <= 128 else mosaic_bwd_large
    scale = w.H**-0.5
    forward = jax.jit(functools.partial(mosaic_fwd.attend, scale=scale))
    queries = jax.jit(functools.partial(backward.query_gradients, scale=scale))
    keys = jax.jit(functools.partial(backward.key_gradients, scale=scale))

    @jax.jit
    def tiles_of(ids, policy_ids):
        desc = tmj.from_segment_ids_and_pos(ids)
        ranges = key_ranges(desc, peers.policies_of(w), policy_ids)
        return mosaic_fwd.tiles_of(ranges, w.H), backward.tiles_of(ranges, w.H)

    arguments: dict[str, list[tuple]] = {name: [] for name in FLOPS}
    for seed in range(rounds):
        for_forward, tiles = tiles_of(*map(jnp.asarray, w.rows(seed)))
        out, lse = forward(q, k, v, for_forward)
        given = q, k, v, out, dout, lse, None, tiles
        _, statistics = queries(*given)
        arguments["forward"].append((q, k, v, for_forward))
        arguments["dq"].append(given)
        arguments["dk, dv"].append((q, k, v, dout, statistics, tiles))
    functions = forward, queries, keys
    return {
        name: (function, arguments[name])
        for name, function in zip(FLOPS, functions, strict=True)
    }


def measure(w: shapes.Workload, rounds: int, **timing: Any) -> list[dict]:
    """A row of results per kernel."""
    times = interleaved(calls(w, rounds), **timing)
    pairs = [attention.unmasked_pairs(w, *w.rows(seed)) for seed in range(rounds)]
    return [
        {"workload": w.name, "kernel": name}
        | attention.summary(times[name], pairs, flops * w.N * w.H)
        for name, flops in FLOPS.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3, help="default: 3")
    parser.add_argument("--workloads", nargs="*", help="names; default: all")
    results = attention.ROOT / "benchmarks" / "results" / "kernels_gpu.json"
    parser.add_argument("--results", type=Path, default=results)
    arguments = parser.parse_args()
    rows = []
    for w in shapes.GPU:
        if arguments.workloads and w.name not in arguments.workloads:
            continue
        rows += measure(w, arguments.rounds, batch=20, seconds=1)
        for row in rows[-len(FLOPS) :]:
            print(
                " ".join(f"{name}={value}" for name, value in row.items()), flush=True
            )
        command = shlex.join(["python", "-m", "benchmarks.kernels", *sys.argv[1:]])
        found = {"command": command, "versions": attention.versions("gpu")}
        arguments.results.write_text(
            json.dumps(found | {"rows": rows}, indent=2) + "\n"
        )


if __name__ == "__main__":
    main()
