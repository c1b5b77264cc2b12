"""Trains the model of train_mixed.py on a mesh: rows, tokens and heads are split.

The mesh has the axes data, context and tensor. `jit` partitions everything by the
shardings of batch and parameters; the attention call alone is mapped over the mesh by
hand, since its tokens meet those of other devices. On a machine without accelerators it
makes virtual CPU devices:

    python examples/train_sharded.py --data 2 --context 2 --tensor 2

On a cluster each process runs the same command, with `--coordinator HOST:PORT
--processes N --process I` where JAX cannot find that out by itself.
"""

import argparse
import functools
import math
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import train_mixed as demo
from dense_attention import rotate
from te_mixed_jax import context_parallel, from_segment_ids_and_pos

TOKENS = P("data", "context")
HEADS = P("data", "context", "tensor")


class ShardedAttention(demo.MultiHeadAttention):
    """The demo's layer: heads are split along "tensor", tokens meet in a ring."""

    def __init__(self, num_heads, features, *, mesh, rngs, **settings):
        super().__init__(
            num_heads,
            features,
            rngs=rngs,
            kernel_axes={
                **dict.fromkeys(("query", "key", "value"), (None, "tensor", None)),
                "out": ("tensor", None, None),
            },
            **settings,
        )
        self.mesh = mesh

    # Only what the demo calls it with.
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x, *, desc, policy, policy_ids
    ):
        (ids, _), (positions, _) = desc.segment_ids, desc.segment_pos

        def attend(query, key, value, ids, positions, policy_ids):
            return context_parallel.dot_product_attention(
                *(query, key, value, from_segment_ids_and_pos(ids, positions)),
                axis_name="context",
                policy=policy,
                policy_ids=policy_ids,
                ring=True,
            )

        query, key = (
            rotate(project(x), positions, base=self.rotary_base)
            for project in (self.query, self.key)
        )
        mapped = jax.shard_map(
            attend,
            mesh=self.mesh,
            in_specs=(HEADS, HEADS, HEADS, TOKENS, TOKENS, TOKENS),
            out_specs=HEADS,
        )
        return self.out(mapped(query, key, self.value(x), ids, positions, policy_ids))


def train(mesh, batches: list[demo.Batch]) -> np.ndarray:
    """The losses [steps, kinds] of the demo's model on a mesh."""

    def placed(x, spec=TOKENS):
        # Every process has the whole array and gives its own part.
        sharding = NamedSharding(mesh, spec)
        return jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])

    with jax.set_mesh(mesh):
        attention: Any = functools.partial(ShardedAttention, mesh=mesh)
        model = demo.Transformer(attention, seed=0)
        specs = nnx.get_partition_spec(nnx.state(model, nnx.Param))
        state = jax.tree.map(
            lambda x, spec: placed(np.asarray(x), spec),
            nnx.state(model, nnx.Param),
            specs,
        )
        nnx.update(model, state)
        optimizer = nnx.Optimizer(model, optax.adamw(3e-3), wrt=nnx.Param)
        losses = []
        for batch in batches:
            on_mesh: Any = map(placed, batch)
            losses.append(demo.train_step(model, optimizer, demo.Batch(*on_mesh)))
        # Every device has them.
        return np.stack([np.asarray(x.addressable_data(0)) for x in losses])


def random_batches(steps: int, rows: int, length: int) -> list[demo.Batch]:
    """Rows of random bytes with a pattern to learn, 3 to 6 sequences each."""
    rng = np.random.default_rng(0)
    batches = []
    for _ in range(steps):
        ids = np.zeros((rows, length), np.int32)
        for row in ids:
            cuts = np.sort(rng.choice(length, rng.integers(3, 6), replace=False))
            row[:] = 1 + (np.arange(length) >= cuts[:, None]).sum(0)
        starts = np.diff(ids, axis=1, prepend=-1) != 0
        at = np.arange(length)
        positions = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
        tokens = (positions + rng.integers(0, 8, (rows, 1))) % 8
        batches.append(
            demo.Batch(
                tokens=tokens.astype(np.int32),
                targets=((tokens + 1) % 8).astype(np.int32),
                weights=np.ones((rows, length), np.float32),
                policy_ids=(ids % 2).astype(np.int32),
                segment_ids=ids,
                positions=positions.astype(np.int32),
            )
        )
    return batches


def main(arguments: list[str] | None = None) -> None:
    """Prints the losses of each step: the same on every mesh."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    for axis in ("data", "context", "tensor"):
        parser.add_argument(f"--{axis}", type=int, default=2)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--coordinator")
    parser.add_argument("--processes", type=int)
    parser.add_argument("--process", type=int)
    options = parser.parse_args(arguments)
    sizes = options.data, options.context, options.tensor
    # Where there are no accelerators; it says nothing about these.
    jax.config.update(
        "jax_num_cpu_devices", math.prod(sizes) // (options.processes or 1)
    )
    if options.coordinator:
        jax.distributed.initialize(
            options.coordinator, options.processes, options.process
        )

    axes = ("data", "context", "tensor")
    mesh = jax.make_mesh(sizes, axes, axis_types=(AxisType.Auto,) * 3)
    losses = train(mesh, random_batches(options.steps, options.rows, options.length))
    print(f"mesh {dict(mesh.shape)}, {jax.process_count()} processes")
    for step, both in enumerate(losses):
        print(f"step {step}: " + ", ".join(f"{x:.4f}" for x in both))


if __name__ == "__main__":
    main()
