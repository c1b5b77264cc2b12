"""From sequences of any length to attention: what grain packs is a descriptor.

Every token carries the index of its sequence's policy, so policy ids are packed like
tokens; grain adds segment ids and positions. Prints, for each token of each row, the
mean of the tokens that it attends to where all scores are equal.
"""

from collections.abc import Iterator

import grain
import jax
import jax.numpy as jnp
import numpy as np
from grain.experimental import FirstFitPackIterDataset

import te_mixed_jax as tmj

POLICIES = (tmj.CAUSAL, tmj.FULL, tmj.chunked(4, 0))
LENGTHS = (5, 9, 3, 12, 7, 4, 8, 6)
ROWS, ROW = 2, 16


def sequence(index: int, length: int) -> dict[str, np.ndarray]:
    """Tokens 1, 2, ..., and the policy of all of them."""
    tokens = np.arange(1, length + 1, dtype=np.int32)
    return {"tokens": tokens, "policy_ids": np.full_like(tokens, index % len(POLICIES))}


def batches() -> Iterator[dict[str, np.ndarray]]:
    """Packed rows, arrays [ROWS, ROW]."""
    sequences = grain.MapDataset.source(LENGTHS).map_with_index(sequence)
    rows = FirstFitPackIterDataset(
        sequences.to_iter_dataset(),
        length_struct={"tokens": ROW, "policy_ids": ROW},
        num_packing_bins=4,
    )
    return iter(rows.batch(ROWS))


@jax.jit
def attend(batch: dict[str, jax.Array]) -> jax.Array:
    """Attention with equal scores, whose values are the tokens."""
    # grain gives each field its segment ids and positions: they are the same.
    desc = tmj.from_segment_ids_and_pos(
        batch["tokens_segment_ids"], batch["tokens_positions"]
    )
    value = batch["tokens"][..., None, None].astype(float)
    zeros = jnp.zeros_like(value)
    out = tmj.dot_product_attention(
        zeros, zeros, value, desc, policy=POLICIES, policy_ids=batch["policy_ids"]
    )
    return out[..., 0, 0]


def main() -> None:
    """Shows every row."""
    for batch in batches():
        means = np.asarray(attend(batch))
        for row in range(ROWS):
            print("sequence", *(f"{x:4}" for x in batch["tokens_segment_ids"][row]))
            print("policy  ", *(f"{x:4}" for x in batch["policy_ids"][row]))
            print("token   ", *(f"{x:4}" for x in batch["tokens"][row]))
            print("sees    ", *(f"{x:4.1f}" for x in means[row]), end="\n\n")


if __name__ == "__main__":
    main()
