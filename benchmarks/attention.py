"""Times packed attention against what people use today: see README.md beside this.

python -m benchmarks.attention --platform cpu
"""

import argparse
import json
import os
import platform
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


def measure(workload: shapes.Workload, repeats: int) -> list[dict]:
    """One row of results per implementation."""
    w = workload
    ids, policy_ids = w.rows()
    rng = np.random.default_rng(1)
    q, k, v, dout = (
        jnp.asarray(rng.standard_normal((w.B, w.T, heads, w.H)), w.dtype)
        for heads in (w.N, w.K, w.K, w.N)
    )
    args = q, k, v, jnp.asarray(ids), jnp.asarray(policy_ids)
    implementations = {OURS: mixed, DENSE: dense}
    forward = {name: jax.jit(f) for name, f in implementations.items()}
    both = {name: jax.jit(with_gradients(f)) for name, f in implementations.items()}

    truth = exact(*args, dout)
    errors = {
        name: [
            float(np.abs(np.asarray(got, np.float64) - want).max())
            for got, want in zip(f(*args, dout), truth, strict=True)
        ]
        for name, f in both.items()
    }
    forward_times = interleaved(forward, args, 2 * repeats + 1)
    both_times = interleaved(both, (*args, dout), repeats)
    # 2 products forward, 5 backward, 2 operations for each multiply-add.
    pairs = unmasked_pairs(ids, policy_ids)
    work = pairs * w.N * w.H
    return [
        {
            "workload": w.name,
            "shape": {key: getattr(w, key) for key in "BTNKH"} | {"dtype": w.dtype},
            "sequences_per_row": w.sequences,
            "unmasked_pairs": pairs,
            "implementation": name,
            "forward": forward_times[name],
            "forward_gflops": round(
                4 * work / forward_times[name]["median_ms"] / 1e6, 1
            ),
            "forward_backward": both_times[name],
            "forward_backward_gflops": round(
                14 * work / both_times[name]["median_ms"] / 1e6, 1
            ),
            "max_error": dict(
                zip(("out", "dq", "dk", "dv"), errors[name], strict=True)
            ),
        }
        for name in implementations
    ]


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
    lines += ["", f"{v['device']}; jax {v['jax']}, Python {v['python']}."]
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
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    jax.config.update("jax_platforms", arguments.platform)

    measured: list[dict] = []
    for workload in shapes.CPU:
        rows = measure(workload, arguments.repeats)
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
