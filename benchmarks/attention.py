"""Times packed attention against what people use today: see README.md beside this.

python -m benchmarks.attention --platform cpu
python -m benchmarks.attention --platform gpu
"""

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import te_mixed_jax as tmj
from benchmarks import peers, shapes
from benchmarks.timing import interleaved

ROOT = Path(__file__).parents[1]


def exact(w: shapes.Workload, q, k, v, ids, policy_ids, dout):
    """Output and gradients of the first key head's share, in NumPy float64.

    Sequence by sequence, query head by query head: out, dq ``[B, T, N // K, H]``, dk,
    dv ``[B, T, 1, H]``.
    """
    G = w.N // w.K
    q, dout, k, v = (
        np.asarray(x[:, :, :heads], np.float64)
        for x, heads in ((q, G), (dout, G), (k, 1), (v, 1))
    )
    out, dq, dk, dv = (np.zeros_like(x) for x in (q, q, k, v))
    scale = w.H**-0.5
    for row in range(w.B):
        for segment in np.unique(ids[row][ids[row] > 0]):
            own = np.flatnonzero(ids[row] == segment)
            at, n = slice(own[0], own[-1] + 1), own.size
            b, c = k[row, at, 0], v[row, at, 0]
            hidden = None
            if w.kinds[policy_ids[row, own[0]]] == "causal":
                hidden = ~np.tri(n, dtype=bool)
                hidden |= np.tri(n, k=-(w.window or n), dtype=bool)
            for head in range(G):
                a, d = q[row, at, head], dout[row, at, head]
                s = a @ b.T * scale
                if hidden is not None:
                    s[hidden] = -np.inf
                p = np.exp(s - s.max(-1, keepdims=True))
                p /= p.sum(-1, keepdims=True)
                out[row, at, head] = p @ c
                dv[row, at, 0] += p.T @ d
                dp = d @ c.T
                ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
                dq[row, at, head] = ds @ b
                dk[row, at, 0] += ds.T @ a
    return out, dq, dk, dv


def unmasked_pairs(w: shapes.Workload, ids: np.ndarray, policy_ids: np.ndarray) -> int:
    """Query-key pairs that are not masked, in all rows: the work to count."""
    pairs = 0
    for row, policies in zip(ids, policy_ids, strict=True):
        for segment in np.unique(row[row > 0]):
            own = row == segment
            n = int(own.sum())
            seen = np.full(n, n)
            if w.kinds[policies[own][0]] == "causal":
                seen = np.minimum(np.arange(1, n + 1), w.window or n)
            pairs += int(seen.sum())
    return pairs


def positions(ids: np.ndarray) -> np.ndarray:
    """The running index of each token in its sequence."""
    at = np.arange(ids.shape[1])
    starts = np.diff(ids, axis=1, prepend=-1) != 0
    return (at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)).astype(
        np.int32
    )


def measure(w: shapes.Workload, on: str, rounds: int, only: list[str]) -> list[dict]:
    """One row of results per implementation; each round draws other sequences.

    On a CPU, gradients of the dense mask take long: they get a third of the rounds.
    """
    rng = np.random.default_rng(1)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((w.B, w.T, heads, w.H), np.float32), w.dtype)
        for heads in (w.N, w.K, w.K, w.N)
    )
    draws = [w.rows(seed) for seed in range(rounds)]
    pairs = [unmasked_pairs(w, *draw) for draw in draws]
    # A dense mask lets padding see everything: it is compared at real tokens, and
    # without a cotangent at padding.
    real = (draws[0][0] > 0)[..., None, None]
    dout = jnp.where(real, dout, 0)
    truth = exact(w, q, k, v, *draws[0], dout)

    running, errors = {}, {}
    for name, build in peers.PEERS[on].items():
        if only and name not in only:
            continue
        try:
            peer = build(w)
            arguments = [
                peer.prepare(q, k, v, ids, positions(ids), policy_ids, dout)
                for ids, policy_ids in draws
            ]
            results = [peer.to_numpy(x, draws[0][0]) for x in peer.both(*arguments[0])]
        except peers.Missing as reason:
            print(f"{w.name} {name}: missing, {reason}", flush=True)
            continue
        except Exception as error:  # a peer that fails is a result, not the end
            print(f"{w.name} {name}: fails, {str(error)[:300]}", flush=True)
            continue
        errors[name] = [
            float(np.abs(np.where(real, got[:, :, : want.shape[2]] - want, 0)).max())
            for got, want in zip(results, truth, strict=True)
        ]
        running[name] = peer, arguments
    few = slice(-(-rounds // 3) if on == "cpu" else None)
    timing = {"cpu": {}, "gpu": {"batch": 20, "seconds": 1}}[on]
    times = {
        "forward": interleaved(
            {name: (peer.forward, x) for name, (peer, x) in running.items()},
            wait=peers.wait,
            **timing,
        ),
        "forward_backward": interleaved(
            {name: (peer.both, x[few]) for name, (peer, x) in running.items()},
            wait=peers.wait,
            **timing,
        ),
    }
    return [
        {
            "workload": w.name,
            "shape": {key: getattr(w, key) for key in "BTNKH"} | {"dtype": w.dtype},
            "most_sequences": w.most_sequences,
            "implementation": name,
            "max_error": dict(
                zip(("out", "dq", "dk", "dv"), errors[name], strict=True)
            ),
            "unmasked_pairs": pairs,
        }
        | {
            what: summary(times[what][name], pairs, FLOPS[what] * w.N * w.H)
            for what in times
        }
        for name in running
    ]


# Operations per unmasked pair, head and channel: a product takes 2, there are 2
# products forward and 5 backward.
FLOPS = {"forward": 4, "forward_backward": 14}


def summary(times: list[float], pairs: list[int], flops_per_pair: int) -> dict:
    """Median, least and greatest time of the rounds, and the median rate."""
    rates = [
        n * flops_per_pair / t / 1e6
        for n, t in zip(pairs[: len(times)], times, strict=True)
    ]
    return {
        "median_ms": round(statistics.median(times), 3),
        "min_ms": round(min(times), 3),
        "max_ms": round(max(times), 3),
        "gflops": round(statistics.median(rates), 1),
    }


VERSIONS_OF = (
    "nvidia-cudnn-cu13",
    "transformer-engine",
    "torch",
    "tokamax",
    "flash-attn3-jax",
)


def versions(on: str) -> dict[str, str]:
    """What decides the numbers."""
    device = jax.devices()[0].device_kind
    found = {
        "device": f"{device}, {os.cpu_count()} cores" if on == "cpu" else device,
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "te_mixed_jax": tmj.__version__,
    }
    for name in VERSIONS_OF:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            if on == "gpu":
                found[name] = importlib.metadata.version(name)
    return found


def by_workload(results: dict) -> dict[str, dict[str, dict]]:
    found: dict[str, dict[str, dict]] = {}
    order = {name: index for index, name in enumerate(w.name for w in shapes.ALL)}
    for row in sorted(results["rows"], key=lambda row: order[row["workload"]]):
        found.setdefault(row["workload"], {})[row["implementation"]] = row
    return found


def cpu_table(results: dict) -> str:
    """Times and their ratio, of this package and of the dense mask."""
    ours, theirs = peers.PEERS["cpu"]
    lines = [
        "| workload | forward: dense mask | te_mixed_jax | | forward + backward: "
        "dense mask | te_mixed_jax | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in by_workload(results).items():
        if not {ours, theirs} <= set(rows):
            continue
        row = rows[ours]
        cells = [f"{name}: T={row['shape']['T']}, {row['most_sequences']} sequences"]
        for what in ("forward", "forward_backward"):
            a, b = rows[theirs][what]["median_ms"], row[what]["median_ms"]
            cells += [f"{a:,.0f} ms", f"{b:,.0f} ms", f"**{a / b:.1f}x**"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def gpu_table(results: dict) -> str:
    """TFLOP/s on unmasked pairs, forward / forward + backward."""
    names = [
        n
        for n in peers.PEERS["gpu"]
        if any(r["implementation"] == n for r in results["rows"])
    ]
    lines = [
        "| workload | " + " | ".join(names) + " |",
        "|---" * (len(names) + 1) + "|",
    ]
    for workload, rows in by_workload(results).items():
        cells = [workload]
        for name in names:
            if name not in rows:
                cells.append("")
                continue
            rates = (rows[name][what]["gflops"] / 1e3 for what in FLOPS)
            cells.append(" / ".join(f"{rate:.0f}" for rate in rates))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def table(results: dict, on: str) -> str:
    """The Markdown table of the README."""
    lines = (cpu_table if on == "cpu" else gpu_table)(results)
    v = results["versions"]
    others = "".join(f", {n} {v[n]}" for n in list(v)[5:])
    basis = f"{v['device']}, jax {v['jax']}, Python {v['python']}{others}"
    return f"{lines}\n\nMedians; {basis}."


def write_into(path: Path, mark: str, text: str) -> None:
    """Replaces what stands between the two comments of `mark` in a Markdown file."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, rest = path.read_text().split(start)
    _, after = rest.split(end)
    path.write_text(f"{before}{start}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", choices=["cpu", "gpu"], required=True)
    parser.add_argument("--rounds", type=int, help="default: 15 on a CPU, 3 on a GPU")
    parser.add_argument("--workloads", nargs="*", help="names; default: all")
    parser.add_argument("--peers", nargs="*", default=[], help="names; default: all")
    parser.add_argument("--results", type=Path, help="write only this JSON file")
    arguments = parser.parse_args()
    on = arguments.platform
    jax.config.update("jax_platforms", "cpu" if on == "cpu" else "cuda,cpu")
    rounds = arguments.rounds or {"cpu": shapes.DRAWS, "gpu": 3}[on]

    path = ROOT / "benchmarks" / "results" / f"attention_{on}.json"
    path = arguments.results or path
    path.parent.mkdir(exist_ok=True)
    results: dict = {"commands": [], "versions": versions(on), "rows": []}
    if path.exists():
        before = json.loads(path.read_text())
        # A part that is measured again replaces that part, if nothing else changed;
        # peers may have come or gone.
        known, now = before["versions"], results["versions"]
        if all(known[name] == now[name] for name in known.keys() & now.keys()):
            results = before | {"versions": known | now}
        elif arguments.workloads or arguments.peers:
            parser.error(
                f"{path} has results of other versions, {before['versions']}, which a "
                "part cannot join: measure everything, or name another `--results`"
            )
    command = shlex.join(["python", "-m", "benchmarks.attention", *sys.argv[1:]])
    results["commands"] = [*results["commands"], command]
    for workload in shapes.CPU if on == "cpu" else shapes.GPU:
        if arguments.workloads and workload.name not in arguments.workloads:
            continue
        rows = measure(workload, on, rounds, arguments.peers)
        measured = {(row["workload"], row["implementation"]) for row in rows}
        results["rows"] = rows + [
            row
            for row in results["rows"]
            if (row["workload"], row["implementation"]) not in measured
        ]
        for row in rows:
            both = (row["forward"], row["forward_backward"])
            print(
                f"{row['workload']} {row['implementation']}: "
                + ", ".join(f"{x['median_ms']:.3f} ms {x['gflops']:.0f}" for x in both)
                + f" GFLOP/s forward, forward + backward; error of out "
                f"{row['max_error']['out']:.0e}, of dk {row['max_error']['dk']:.0e}",
                flush=True,
            )
        path.write_text(json.dumps(results, indent=2) + "\n")
    print(table(results, on))
    if not arguments.results:
        write_into(ROOT / "README.md", f"benchmark {on}", table(results, on))


if __name__ == "__main__":
    main()
