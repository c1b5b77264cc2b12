"""Times one attention call on one device and on all, split in each way there is.

python -m benchmarks.scaling --platform cpu
python -m benchmarks.scaling --platform gpu

On a CPU it makes virtual devices and shows that everything runs; times of devices that
share two cores say nothing.
"""

import argparse
import functools
import itertools
import json
import shlex
import statistics
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import te_mixed_jax as tmj
from benchmarks import attention, shapes
from benchmarks.timing import interleaved
from te_mixed_jax import context_parallel

POLICIES = (tmj.CAUSAL, tmj.FULL)  # of the workloads' kinds
AXES = ("data", "context", "tensor")


def plain(q, k, v, ids, positions, policy_ids, *, most: int, implementation):
    """One call; `jit` splits it as its arguments lie."""
    desc = tmj.from_segment_ids_and_pos(ids, positions, max_segments=most)
    return tmj.dot_product_attention(
        *(q, k, v, desc),
        policy=POLICIES,
        policy_ids=policy_ids,
        implementation=implementation,
    )


def across(q, k, v, ids, positions, policy_ids, *, mesh, ring: bool, implementation):
    """Rows lie across the devices of "context"."""

    def local(q, k, v, ids, positions, policy_ids):
        return context_parallel.dot_product_attention(
            *(q, k, v, tmj.from_segment_ids_and_pos(ids, positions)),
            axis_name="context",
            policy=POLICIES,
            policy_ids=policy_ids,
            implementation=implementation,
            ring=ring,
        )

    tokens = P(None, "context")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=tokens, out_specs=tokens)
    return mapped(q, k, v, ids, positions, policy_ids)


def with_gradients(attend: Callable) -> Any:
    @jax.jit
    def both(q, k, v, ids, positions, policy_ids, dout):
        call = functools.partial(
            attend, ids=ids, positions=positions, policy_ids=policy_ids
        )
        out, pullback = jax.vjp(call, q, k, v)
        return out, *pullback(dout)

    return both


def forms(rows: bool, devices: int, most: int, implementation: str | None) -> dict:
    """Per name: the mesh, how arguments lie on it, whether balanced, the function.

    Without a mesh, and on a mesh of one device, which must cost the same.
    """

    def mesh_of(axis: str | None):
        sizes = [devices if name == axis else 1 for name in AXES]
        kinds = (AxisType.Auto,) * len(AXES)
        used = jax.devices()[: devices if axis else 1]
        return jax.make_mesh(sizes, AXES, axis_types=kinds, devices=used)

    call = functools.partial(plain, most=most, implementation=implementation)
    found: dict[str, Any] = {"one device": (None, P(), False, call)}
    everywhere = P("data", "context", "tensor")
    found["mesh of one device"] = mesh_of(None), everywhere, False, call
    if devices == 1:
        return found
    if rows:
        found["data"] = mesh_of("data"), P("data"), False, call
        found["tensor"] = mesh_of("tensor"), P(None, None, "tensor"), False, call
        return found
    mesh = mesh_of("context")
    for ring, balanced in itertools.product((False, True), repeat=2):
        name = "context, ring" if ring else "context, gathered"
        name += ", balanced" if balanced else ""
        call = functools.partial(
            across, mesh=mesh, ring=ring, implementation=implementation
        )
        found[name] = mesh, P(None, "context"), balanced, call
    return found


def measure(w: shapes.Workload, rows: bool, implementation: str | None, on: str):
    rng = np.random.default_rng(0)
    q, k, v, dout = (
        rng.standard_normal((w.B, w.T, heads, w.H), np.float32)
        for heads in (w.N, w.K, w.K, w.N)
    )
    ids, policy_ids = w.rows(0)
    positions = attention.positions(ids)
    devices = len(jax.devices())
    order = context_parallel.balance(
        tmj.from_segment_ids_and_pos(ids, positions),
        devices=devices,
        policy=POLICIES,
        policy_ids=policy_ids,
    )
    running, memory, used, reference = {}, {}, {}, None
    for name, form in forms(rows, devices, w.most_sequences, implementation).items():
        mesh, spec, balanced, function = form
        used[name] = mesh.size if mesh else 1

        def place(x, mesh=mesh, spec=spec, balanced=balanced):
            x = order.apply(jnp.asarray(x)) if balanced else jnp.asarray(x)
            x = x.astype(w.dtype) if x.ndim == 4 else x
            if mesh is None:
                return jax.device_put(x, jax.devices()[0])
            return jax.device_put(x, NamedSharding(mesh, P(*spec[: x.ndim])))

        arguments = tuple(map(place, (q, k, v, ids, positions, policy_ids, dout)))
        both = with_gradients(function)
        memory[name] = both.lower(*arguments).compile().memory_analysis()
        results = both(*arguments)
        out = np.asarray(order.undo(results[0]) if balanced else results[0], np.float32)
        reference = out if reference is None else reference
        error = float(np.abs(out - reference).max())
        if error > 0.05:
            raise SystemExit(f"{w.name} {name}: differs from one device by {error}")
        running[name] = both, [arguments] * 3
    batch = 1 if on == "cpu" else 10
    times = interleaved(running, batch=batch, seconds=1)
    one = statistics.median(times["one device"])
    return [
        {
            "workload": w.name,
            "implementation": implementation or "default",
            "form": name,
            "devices": used[name],
            "median_ms": round(statistics.median(taken), 3),
            "speedup": round(one / statistics.median(taken), 3),
            "temp_mib_per_device": round(memory[name].temp_size_in_bytes / 2**20, 1),
        }
        for name, taken in times.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--platform", choices=["cpu", "gpu"], required=True)
    parser.add_argument(
        "--implementations", nargs="*", default=[None], help="default: the package's"
    )
    parser.add_argument("--workloads", nargs="*", help="names; default: both")
    parser.add_argument("--devices", type=int, default=8, help="virtual ones, on a CPU")
    arguments = parser.parse_args()
    on = arguments.platform
    jax.config.update("jax_platforms", "cpu" if on == "cpu" else "cuda,cpu")
    jax.config.update("jax_num_cpu_devices", arguments.devices)
    found = [
        row
        for rows, workload in zip((True, False), shapes.SCALING[on], strict=True)
        if not arguments.workloads or workload.name in arguments.workloads
        for implementation in arguments.implementations
        for row in measure(workload, rows, implementation, on)
    ]
    results = {
        "command": shlex.join(["python", "-m", "benchmarks.scaling", *sys.argv[1:]]),
        "versions": attention.versions(on),
        "rows": found,
    }
    path = attention.ROOT / "benchmarks" / "results" / f"scaling_{on}.json"
    path.write_text(json.dumps(results, indent=2) + "\n")
    for cells in (found[0], ["---"] * len(found[0]), *(x.values() for x in found)):
        print("| " + " | ".join(map(str, cells)) + " |")


if __name__ == "__main__":
    main()
