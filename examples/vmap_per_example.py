"""Per-example gradients: `jax.vmap` over a function that describes its own rows.

The ids are mapped and the positions are made inside, where nothing maps them: mixed
like this, operands used to be the end of a fused attention call under `vmap`.
"""

import jax
import jax.numpy as jnp

from te_mixed_jax import CAUSAL, FULL, SequenceDescriptor, dot_product_attention

EXAMPLES, B, T, N, H = 3, 2, 128, 4, 16


def loss(weights, x, segment_ids, policy_ids):
    """The loss of one example: B packed rows."""
    positions = jnp.broadcast_to(jnp.arange(T), (B, T))
    desc = SequenceDescriptor.from_segment_ids_and_pos(segment_ids, positions)
    query, key, value = jnp.einsum("btnh,phg->pbtng", x, weights)
    out = dot_product_attention(
        query, key, value, desc, policy=(CAUSAL, FULL), policy_ids=policy_ids
    )
    return jnp.square(out).mean()


def main() -> None:
    """Compares the gradients under `vmap` with those of a loop."""
    keys = jax.random.split(jax.random.key(0), 2)
    weights = jax.random.normal(keys[0], (3, H, H)) / H**0.5
    x = jax.random.normal(keys[1], (EXAMPLES, B, T, N, H))
    # Example e has a border after 32 (e + 1) tokens: causal before it, full after it.
    border = 32 * (1 + jnp.arange(EXAMPLES))[:, None, None]
    policy_ids = jnp.broadcast_to(jnp.arange(T) >= border, (EXAMPLES, B, T)).astype(int)
    segment_ids = 1 + policy_ids

    gradient = jax.jit(jax.grad(loss))
    mapped = jax.vmap(gradient, in_axes=(None, 0, 0, 0))
    together = mapped(weights, x, segment_ids, policy_ids)
    loop = [
        gradient(weights, x[e], segment_ids[e], policy_ids[e]) for e in range(EXAMPLES)
    ]
    difference = float(jnp.abs(together - jnp.stack(loop)).max())
    print(f"one gradient per example: {together.shape}, parameters: {weights.shape}")
    print(f"largest difference to the loop: {difference:.1e}")
    if difference > 1e-6:
        raise SystemExit("vmap and the loop differ")


if __name__ == "__main__":
    main()
