"""A call of TransformerEngine's attention layer, and what to write instead.

Flax, THD layout: packed rows, a `SequenceDescriptor`, a mask type. Then what one call
there cannot do: another mask type for some of the sequences. Where TransformerEngine
or a GPU is missing, a stand-in describes the rows, and its layer is left out.
"""

import importlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from te_mixed_jax import CAUSAL, SequenceDescriptor, from_transformer_engine
from te_mixed_jax.linen import DotProductAttention

T, N, K, H = 256, 4, 2, 64
WINDOW = (100, 0)
LENGTHS = ((120, 96), (40, 200))  # two sequences a row


class StandIn(NamedTuple):
    """The fields of TransformerEngine's descriptor that segment ids fill."""

    segment_ids: Any
    segment_pos: Any


def theirs(te, query, key, value, sequence_descriptor):
    """Before."""
    layer = te.flax.DotProductAttention(
        head_dim=H,
        num_attention_heads=N,
        num_gqa_groups=K,
        attn_mask_type="padding_causal",
        window_size=WINDOW,
        qkv_layout="thd_thd_thd",
        max_segments_per_seq=2,
        transpose_batch_sequence=False,
    )
    call = (query, key, value, sequence_descriptor)
    return layer.apply({}, *call, deterministic=True)


def ours(query, key, value, sequence_descriptor):
    """After: the mask type and its window are a policy, sizes are those of arrays."""
    desc = from_transformer_engine(sequence_descriptor)
    layer = DotProductAttention(policy=CAUSAL.with_window(*WINDOW))
    return layer.apply({}, query, key, value, desc)


def mixed(query, key, value, sequence_descriptor):
    """New: each row's sequence 1 causal in the window, its sequence 2 full."""
    return DotProductAttention().apply(
        {},
        *(query, key, value, from_transformer_engine(sequence_descriptor)),
        attn_mask_type_per_seq={"padding_causal": [[1]], "padding": [[2]]},
        window_size_per_mask_type={"padding_causal": WINDOW},
    )


def main() -> None:
    """Runs what can run, and says how the results differ."""
    rows = SequenceDescriptor.from_seqlens(LENGTHS, q_len=T)
    pairs = rows.segment_ids, rows.segment_pos  # (query, key/value) each
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (
        jax.random.normal(key, (len(LENGTHS), T, heads, H), jnp.bfloat16)
        for key, heads in zip(keys, (N, K, K), strict=True)
    )
    try:
        te: Any = importlib.import_module("transformer_engine.jax")
        importlib.import_module("transformer_engine.jax.flax")
    except (ImportError, OSError, RuntimeError) as error:
        print(f"TransformerEngine is not importable: {type(error).__name__}")
        te, desc = None, StandIn(*pairs)
    else:
        desc = te.attention.SequenceDescriptor.from_segment_ids_and_pos(*pairs)
    after, new = jax.jit(ours)(q, k, v, desc), jax.jit(mixed)(q, k, v, desc)
    if te and jax.default_backend() == "gpu":
        before = jax.jit(theirs, static_argnums=0)(te, q, k, v, desc)
        difference = jnp.abs(before.astype(float) - after.astype(float)).max()
        print(f"TransformerEngine's layer differs by {float(difference):.1e}")
    for sequence in 1, 2:
        same = bool((new == after)[pairs[0][0] == sequence].all())
        print(f"sequences {sequence} as before: {same}")


if __name__ == "__main__":
    main()
