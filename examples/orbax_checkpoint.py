"""An orbax checkpoint of a model with our layers: saved from nnx, restored into both.

Parameters have the same names and shapes in nnx and linen, so one checkpoint serves.
"""

import tempfile
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from flax import nnx

import te_mixed_jax.linen
import te_mixed_jax.nnx
from te_mixed_jax import CAUSAL, FULL, SequenceDescriptor

F, HEADS = 32, 4
SETTINGS = {"num_kv_heads": 2, "rotary_base": 10_000.0, "policy": (CAUSAL, FULL)}


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(F, rngs=rngs)
        self.attention = te_mixed_jax.nnx.MultiHeadAttention(
            HEADS, F, rngs=rngs, **SETTINGS
        )

    def __call__(self, x, **sequences):
        return x + self.attention(self.norm(x), **sequences)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x, **sequences):
        attention = te_mixed_jax.linen.MultiHeadAttention(
            HEADS, name="attention", **SETTINGS
        )
        return x + attention(nn.LayerNorm(name="norm")(x), **sequences)


def main() -> None:
    """Saves, restores twice, and compares the outputs."""
    x = jax.random.normal(jax.random.key(0), (1, 8, F))
    sequences = {
        "desc": SequenceDescriptor.from_seqlens([[4, 3]], q_len=8),
        "policy_ids": jnp.array([[0, 0, 0, 0, 1, 1, 1, 0]]),
    }
    model = Block(nnx.Rngs(1))
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(path, nnx.to_pure_dict(nnx.state(model, nnx.Param)))

        other = Block(nnx.Rngs(2))  # with other parameters, until they are restored
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = nnx.to_pure_dict(nnx.state(other, nnx.Param))
            nnx.update(other, checkpointer.restore(path, shapes))

        block = LinenBlock()
        with ocp.StandardCheckpointer() as checkpointer:
            shapes = jax.eval_shape(block.init, jax.random.key(3), x, **sequences)
            variables = {"params": checkpointer.restore(path, shapes["params"])}

    want = model(x, **sequences)
    got = {
        "nnx": other(x, **sequences),
        "linen": block.apply(variables, x, **sequences),
    }
    for name, out in got.items():
        difference = float(jnp.abs(out - want).max())
        print(f"restored into {name}: outputs differ by {difference:.1e}")
        if not difference < 1e-5:
            raise SystemExit("a restored model differs")


if __name__ == "__main__":
    main()
