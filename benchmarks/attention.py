"""Times packed attention against what people use today: see README.md beside this.

python -m benchmarks.attention --platform cpu
"""

import argparse
import json
import os
import platform
import statistics
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

import te_mixed_jax as tmj
from benchmarks import shapes
from benchmarks.timing import interleaved

ROOT = Path(__file__).parents[1]
OURS, DENSE = "te_mixed_jax", "jax.nn.dot_product_attention"


def mixed(q, k, v, ids, policy_ids):
    """One call; the mask is ids and policy ids."""
    desc = tmj.from_segment_ids_and_pos(ids)
    policies = (tmj.CAUSAL, tmj.FULL)
    return tmj.dot_product_attention(
        q, k, v, desc, policy=policies, policy_ids=policy_ids
    )


def dense(q, k, v, ids, policy_ids):
    """The equivalent T x S mask."""
    index = jnp.arange(ids.shape[1])
    mask = ids[:, :, None] == ids[:, None, :]
    mask &= (policy_ids == 1)[:, :, None] | (index[:, None] >= index)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None])


def with_gradients(attention: Callable) -> Callable:
    """Output and gradients for the cotangent `dout`."""

    def run(q, k, v, ids, policy_ids, dout):
        out, pullback = jax.vjp(lambda *x: attention(*x, ids, policy_ids), q, k, v)
        return out, *pullback(dout)

    return run


def exact(q, k, v, ids, policy_ids, dout):
    """Output and gradients in NumPy float64, sequence by sequence; K = N."""
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    ids, policy_ids = np.asarray(ids), np.asarray(policy_ids)
    results = [np.zeros_like(x) for x in (dout, q, k, v)]
    scale = q.shape[-1] ** -0.5
    for row in range(ids.shape[0]):
        for segment in np.unique(ids[row][ids[row] > 0]):
            own = np.flatnonzero(ids[row] == segment)
            causal = policy_ids[row, own[0]] == 0
            a, b, c, d = (x[row, own].transpose(1, 0, 2) for x in (q, k, v, dout))
            s = a @ b.transpose(0, 2, 1) * scale
            if causal:
                s = np.where(np.tri(own.size, dtype=bool), s, -np.inf)
            p = np.exp(s - s.max(-1, keepdims=True))
            p /= p.sum(-1, keepdims=True)
            dp = d @ c.transpose(0, 2, 1)
            ds = p * (dp - (p * dp).sum(-1, keepdims=True)) * scale
            parts = (p @ c, ds @ b, ds.transpose(0, 2, 1) @ a, p.transpose(0, 2, 1) @ d)
            for result, part in zip(results, parts, strict=True):
                result[row, own] = part.transpose(1, 0, 2)
    return results


def unmasked_pairs(ids: np.ndarray, policy_ids: np.ndarray) -> int:
    """Query-key pairs that are not masked, in all rows: the work to count."""
    pairs = 0
    for row, policies in zip(ids, policy_ids, strict=True):
        for segment in np.unique(row[row > 0]):
            own = row == segment
            n = int(own.sum())
            pairs += n * n if policies[own][0] == 1 else n * (n + 1) // 2
    return pairs


def measure(workload: shapes.Workload, rounds: int) -> list[dict]:
    """One row of results per implementation; each round draws other sequences.

    Gradients of the dense mask take long: they get a third of the rounds.
    """
    w = workload
    rng = np.random.default_rng(1)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((w.B, w.T, heads, w.H)), w.dtype)
        for heads in (w.N, w.K, w.K, w.N)
    )
    draws = [w.rows(seed) for seed in range(rounds)]
    arguments = [(q, k, v, *map(jnp.asarray, draw)) for draw in draws]
    # The dense mask lets padding see everything: it is compared at real tokens, and
    # without a cotangent at padding.
    real = (draws[0][0] > 0)[..., None, None]
    implementations = {OURS: mixed, DENSE: dense}
    forward = {name: jax.jit(f) for name, f in implementations.items()}
    both = {name: jax.jit(with_gradients(f)) for name, f in implementations.items()}

    clean = jnp.where(real, dout, 0)
    truth = exact(q, k, v, *draws[0], clean)
    errors = {
        name: [
            float(np.abs(np.where(real, np.asarray(got, np.float64) - want, 0)).max())
            for got, want in zip(f(*arguments[0], clean), truth, strict=True)
        ]
        for name, f in both.items()
    }
    times = {
        "forward": interleaved(forward, arguments),
        "forward_backward": interleaved(
            both, [(*draw, dout) for draw in arguments[: -(-rounds // 3)]]
        ),
    }
    pairs = [unmasked_pairs(*draw) for draw in draws]
    return [
        {
            "workload": w.name,
            "shape": {key: getattr(w, key) for key in "BTNKH"} | {"dtype": w.dtype},
            "sequences_per_row": w.sequences,
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
        for name in implementations
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


def versions() -> dict[str, str]:
    """What decides the numbers."""
    return {
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "machine": platform.machine(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "te_mixed_jax": tmj.__version__,
    }


def table(results: dict) -> str:
    """The Markdown table of the README."""
    by_workload: dict[str, dict[str, dict]] = {}
    for row in results["rows"]:
        by_workload.setdefault(row["workload"], {})[row["implementation"]] = row
    lines = [
        "| workload | forward: dense mask | te_mixed_jax | | forward + backward: "
        "dense mask | te_mixed_jax | |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, rows in by_workload.items():
        ours, theirs = rows[OURS], rows[DENSE]
        cells = [
            f"{name}: T={ours['shape']['T']}, {ours['sequences_per_row']} sequences"
        ]
        for what in ("forward", "forward_backward"):
            a, b = theirs[what]["median_ms"], ours[what]["median_ms"]
            cells += [f"{a:,.0f} ms", f"{b:,.0f} ms", f"**{a / b:.1f}x**"]
        lines.append("| " + " | ".join(cells) + " |")
    v = results["versions"]
    lines += ["", f"Medians; {v['device']}, jax {v['jax']}, Python {v['python']}."]
    return "\n".join(lines)


def write_into(path: Path, mark: str, text: str) -> None:
    """Replaces what stands between the two comments of `mark` in a Markdown file."""
    start, end = f"<!-- {mark} -->\n", f"<!-- end of {mark} -->"
    before, rest = path.read_text().split(start)
    _, after = rest.split(end)
    path.write_text(f"{before}{start}{text}\n{end}{after}")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", choices=["cpu"], required=True)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)

    measured: list[dict] = []
    for workload in shapes.CPU:
        rows = measure(workload, arguments.rounds)
        measured += rows
        for row in rows:
            print(
                f"{row['workload']} {row['implementation']}: forward "
                f"{row['forward']['median_ms']:.1f} ms, forward + backward "
                f"{row['forward_backward']['median_ms']:.1f} ms, error of out "
                f"{row['max_error']['out']:.0e}",
                flush=True,
            )
    results = {
        "command": f"python -m benchmarks.attention --platform {arguments.platform}",
        "versions": versions(),
        "rows": measured,
    }
    path = ROOT / "benchmarks" / "results" / f"attention_{arguments.platform}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(results, indent=2) + "\n")
    write_into(ROOT / "README.md", f"benchmark {arguments.platform}", table(results))
    print(table(results))


if __name__ == "__main__":
    main()
