"""One Flax layer, three sequences packed into one row, two of them causal.

Prints how much the output of each sequence differs from that of the sequence alone.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from te_mixed_jax import CAUSAL, FULL, SequenceDescriptor
from te_mixed_jax.linen import MultiHeadAttention

POLICIES = (CAUSAL, FULL)
SEQUENCES = {7: 0, 4: 1, 9: 0}  # length: index of its policy
ROW = 24  # the last 4 tokens are padding


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, **masks):
        attention = MultiHeadAttention(num_heads=4, num_kv_heads=2, rotary_base=1e4)
        return x + attention(nn.LayerNorm()(x), **masks)


def main():
    x = jax.random.normal(jax.random.key(0), (1, ROW, 64))
    desc = SequenceDescriptor.from_seqlens([list(SEQUENCES)], q_len=ROW)
    policy_ids = [[index for n, index in SEQUENCES.items() for _ in range(n)] + [0] * 4]

    block = Block()
    variables = jax.jit(block.init)(jax.random.key(1), x)
    apply = jax.jit(block.apply, static_argnames="policy")
    packed = apply(
        variables, x, desc=desc, policy=POLICIES, policy_ids=jnp.asarray(policy_ids)
    )

    start = 0
    for length, index in SEQUENCES.items():
        tokens = slice(start, start + length)
        alone = apply(variables, x[:, tokens], policy=POLICIES[index])
        difference = jnp.abs(packed[:, tokens] - alone).max()
        print(
            f"{length} tokens, {POLICIES[index]}: alone it differs by {difference:.1e}"
        )
        start += length


if __name__ == "__main__":
    main()
