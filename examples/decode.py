"""Decoding with a key/value cache: a prompt in chunks, then token by token.

Rows have prompts of different lengths, and each has its own policy. Prints how much
the outputs differ from those of one call over the finished sequences.

A query sees only what the cache holds by then. So the later keys that a policy shows
must come in the same chunk: a prefix whole, and with `chunked(size, ...)` each chunk.
"""

import jax
import jax.numpy as jnp
from jax import lax

import te_mixed_jax as tmj

POLICIES = (tmj.CAUSAL, tmj.CAUSAL.with_window(9, 0), tmj.prefix(8))
PROMPTS = (19, 24, 13)  # lengths; row i has POLICIES[i]
CHUNK, STEPS, ROOM = 8, 20, 48  # ROOM: how many tokens the cache can hold
N, K, H = 4, 2, 16


def extend(cache, new, start, end, policy_id):
    """One row: the cache with new tokens, and what these attend to in it.

    The tokens `new`, query [T, N, H], key and value [T, K, H], are at positions from
    `start` on; those from `end` on are padding, here and in the cache.
    """
    query, *key_value = new
    q_pos, kv_pos = start + jnp.arange(len(query)), jnp.arange(ROOM)
    ids = (q_pos < end).astype(int), (kv_pos < end).astype(int)
    desc = tmj.from_segment_ids_and_pos(ids, (q_pos, kv_pos))
    key, value = (
        held.at[q_pos].set(x, mode="drop")
        for held, x in zip(cache, key_value, strict=True)
    )
    policy_ids = jnp.full_like(q_pos, policy_id)
    out = tmj.dot_product_attention(
        query, key, value, desc, policy=POLICIES, policy_ids=policy_ids
    )
    return (key, value), out


def decode(sequence, prompt, policy_id):
    """One row: outputs for its prompt, and for the STEPS tokens after it."""

    def tokens(start, number):
        return [lax.dynamic_slice_in_dim(x, start, number) for x in sequence]

    def read_chunk(cache, start):
        end = jnp.minimum(start + CHUNK, prompt)
        return extend(cache, tokens(start, CHUNK), start, end, policy_id)

    def add_token(cache, at):  # a model would make the token from the last output
        return extend(cache, tokens(at, 1), at, at + 1, policy_id)

    # What is not in the cache yet is never read, not even NaN.
    cache = (jnp.full((ROOM, K, H), jnp.nan),) * 2
    cache, read = lax.scan(read_chunk, cache, jnp.arange(0, max(PROMPTS), CHUNK))
    cache, added = lax.scan(add_token, cache, prompt + jnp.arange(STEPS))
    return jnp.concatenate(read), jnp.concatenate(added)


def main() -> None:
    """Decodes all rows at once, and compares with one call."""
    shapes = [(len(PROMPTS), ROOM, heads, H) for heads in (N, K, K)]
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = map(jax.random.normal, keys, shapes)
    prompts, rows = jnp.asarray(PROMPTS), jnp.arange(len(PROMPTS))
    read, added = jax.jit(jax.vmap(decode))((query, key, value), prompts, rows)

    desc = tmj.SequenceDescriptor.from_seqlens(prompts[:, None] + STEPS, q_len=ROOM)
    policy_ids = jnp.broadcast_to(rows[:, None], (len(PROMPTS), ROOM))
    whole = tmj.dot_product_attention(
        query, key, value, desc, policy=POLICIES, policy_ids=policy_ids
    )
    for row, (prompt, policy) in enumerate(zip(PROMPTS, POLICIES, strict=True)):
        got = jnp.concatenate([read[row, :prompt], added[row]])
        difference = float(jnp.abs(got - whole[row, : prompt + STEPS]).max())
        print(f"{policy}: a prompt of {prompt}, then {STEPS} tokens: {difference:.1e}")
        if not difference < 1e-5:
            raise SystemExit("decoding and the call over all tokens differ")


if __name__ == "__main__":
    main()
