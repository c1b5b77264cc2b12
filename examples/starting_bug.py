"""The call that this package began with: mapped ids, positions made inside.

Runs it here, against a loop, and, where TransformerEngine can be imported, there
(NVIDIA/TransformerEngine issue 2685).
"""

import functools
import importlib

import jax
import jax.numpy as jnp

from te_mixed_jax import CAUSAL, dot_product_attention, from_segment_ids_and_pos

EXAMPLES, B, T, N, H = 3, 2, 128, 4, 64


def ours(q, k, v, segment_ids):
    """One example: B packed rows, positions from the ids."""
    desc = from_segment_ids_and_pos(segment_ids)
    return dot_product_attention(q, k, v, desc, policy=CAUSAL)


def theirs(te, q, k, v, segment_ids):
    """The same with TransformerEngine, whose positions are an arange here."""
    positions = jnp.broadcast_to(jnp.arange(T, dtype=jnp.int32), (B, T))
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(
        (segment_ids, segment_ids), (positions, positions)
    )
    return te.fused_attn(
        *((q, k, v), None, desc, None),
        *(te.AttnBiasType.NO_BIAS, te.AttnMaskType.PADDING_CAUSAL_MASK),
        *(te.QKVLayout.THD_THD_THD, te.AttnSoftmaxType.VANILLA_SOFTMAX),
        *(H**-0.5, 0.0, True),
        max_segments_per_seq=8,
    )


def compare(name: str, attend, arguments, in_axes) -> float | None:
    """Prints how `vmap` differs from a loop, or how it fails."""

    def example(index: int):
        return [
            x if axis is None else x[index]
            for x, axis in zip(arguments, in_axes, strict=True)
        ]

    loop = [jax.jit(attend)(*example(i)) for i in range(EXAMPLES)]
    try:
        together = jax.jit(jax.vmap(attend, in_axes))(*arguments)
    except Exception as error:  # it is what we came to see
        reason = str(error).strip().partition("\n")[0]
        print(f"{name}: {type(error).__name__}: {reason}")
        return None
    difference = jnp.abs(together.astype(float) - jnp.stack(loop).astype(float))
    print(f"{name}: differs from the loop by {float(difference.max())}")
    return float(difference.max())


def main() -> None:
    """Maps everything, and the ids alone; here, then there."""
    keys = jax.random.split(jax.random.key(0), 3)
    shape = EXAMPLES, B, T, N, H
    q, k, v = (jax.random.normal(key, shape, jnp.bfloat16) for key in keys)
    # Example e has sequences of 16 (e + 1) tokens, the last ones shorter.
    length = 16 * (1 + jnp.arange(EXAMPLES))[:, None, None]
    ids = jnp.broadcast_to(1 + jnp.arange(T) // length, (EXAMPLES, B, T))
    calls = {
        "all mapped": ((q, k, v, ids), (0, 0, 0, 0)),
        "ids mapped": ((q[0], k[0], v[0], ids), (None, None, None, 0)),
    }
    differences = [
        compare(f"here, {name}", ours, *call) for name, call in calls.items()
    ]
    try:
        te = importlib.import_module("transformer_engine.jax.attention")
    except (ImportError, OSError) as error:
        print(f"TransformerEngine is not importable: {type(error).__name__}")
    else:
        for name, call in calls.items():
            compare(f"TransformerEngine, {name}", functools.partial(theirs, te), *call)
    if any(differences):
        raise SystemExit("vmap and the loop differ")


if __name__ == "__main__":
    main()
