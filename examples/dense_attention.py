"""What train_mixed.py measures against: the same attention with a T x S mask."""

import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from te_mixed_jax.nnx import MultiHeadAttention


class DenseAttention(MultiHeadAttention):
    """The layer with the same parameters and `jax.nn.dot_product_attention` inside."""

    # Only what the demo calls it with. Its policies are always (CAUSAL, FULL).
    def __call__(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, x, *, desc, policy, policy_ids
    ):
        del policy
        (ids, _), (positions, _) = desc.segment_ids, desc.segment_pos
        query = rotate(self.query(x), positions, base=self.rotary_base)
        key = rotate(self.key(x), positions, base=self.rotary_base)
        mask = dense_mask(ids, positions, policy_ids)[:, None]
        out = jax.nn.dot_product_attention(query, key, self.value(x), mask=mask)
        return self.out(out)


def rotate(x, positions, *, base):
    """Rotary position embedding of x [B, T, N, H]."""
    half = x.shape[-1] // 2
    angles = positions[..., None, None] * base ** (-jnp.arange(half) / half)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def dense_mask(segment_ids, positions, policy_ids):
    """Which query sees which key [B, T, S], for the policies (CAUSAL, FULL)."""
    query, key = np.s_[..., :, None], np.s_[..., None, :]
    same_sequence = segment_ids[query] == segment_ids[key]
    allowed = (policy_ids[query] == 1) | (positions[key] <= positions[query])
    return same_sequence & allowed & (segment_ids[query] > 0)


def compare_speed(step, twins, batches, *, turns=3):
    """Measures the training step of two models of equal weights, in turns.

    Args:
        step: The jitted step of (model, optimizer, batch), which returns losses.
        twins: Two pairs of (model, optimizer).
        batches: Iterator of batches; both take the same ones.
        turns: How often each is measured, after a first turn that compiles it.

    Returns:
        The two medians of tokens/s, padding not counted, and the largest difference
        between their losses in the first turn.
    """
    rates = [[] for _ in twins]
    losses = []
    for turn in range(turns + 1):
        batch = next(batches)
        tokens = (batch.segment_ids > 0).sum()
        for (model, optimizer), measured in zip(twins, rates, strict=True):
            start = time.perf_counter()
            result = step(model, optimizer, batch).block_until_ready()
            if turn == 0:
                losses.append(result)
            else:
                measured.append(tokens / (time.perf_counter() - start))
    difference = float(jnp.abs(losses[0] - losses[1]).max())
    return [statistics.median(measured) for measured in rates], difference
