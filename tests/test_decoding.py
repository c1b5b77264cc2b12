"""A key/value cache that grows: what its queries see of it, in fixed shapes.

A query at its position sees what its policy shows of the keys that are in the cache by
then. Where the policy shows no later keys, or these come in the same chunk, that is
what it sees in one call over all tokens.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import checks
import flax_reference as ref
import oracle
import te_mixed_jax as te

B, ROOM, N, K, H, V = 3, 24, 4, 2, 8, 6
LENGTHS = np.array([21, 13, 24])
DATA = checks.random_data(B, ROOM, ROOM, N=N, K=K, H=H, V=V)
POLICIES = (
    *(oracle.CAUSAL, oracle.window(oracle.CAUSAL, 3, 0)),
    *(oracle.prefix(4), oracle.window(oracle.prefix(4), 5, 2)),
    *(oracle.chunked(4, 1), oracle.chunked(2, -1)),
)
CAUSAL = POLICIES[:2]  # whole in chunks of any size; the others in chunks of 4
AT = np.broadcast_to(np.arange(ROOM), (B, ROOM))


def before(end) -> np.ndarray:
    """Which tokens of each row come before `end` [B]."""
    return np.less(AT, end[:, None])


def extend(cache, new, start, end, attend):
    """Puts the new tokens, [B, T, ...] from `start` [B] on, into the cache; attends.

    Tokens at `end` and after it are padding.
    """
    query, *key_value = new
    q_pos = start[:, None] + jnp.arange(query.shape[1])
    row = jnp.arange(B)[:, None]
    cache = [x.at[row, q_pos].set(y) for x, y in zip(cache, key_value, strict=True)]
    ids = [(pos < end[:, None]).astype(int) for pos in (q_pos, AT)]
    return cache, attend(query, *cache, tuple(ids), (q_pos, jnp.asarray(AT)))


@functools.cache
def walk(size, implementation) -> Any:
    """Jitted outputs of all tokens, `size` at a time, in a scan."""

    @jax.jit
    def run(q, k, v, lengths, policy_ids):
        def step(cache, start):
            def here(x):
                return lax.dynamic_slice_in_dim(x, start, size, axis=1)

            def attend(query, key, value, ids, pos):
                return te.dot_product_attention(
                    *(query, key, value, te.from_segment_ids_and_pos(ids, pos)),
                    policy=tuple(map(checks.package_policy, POLICIES)),
                    policy_ids=here(policy_ids),
                    implementation=implementation,
                )

            end = jnp.minimum(start + size, lengths)
            starts = jnp.full_like(lengths, start)
            return extend(cache, map(here, (q, k, v)), starts, end, attend)

        empty = jnp.full_like(k, jnp.nan), jnp.full_like(v, jnp.nan)
        _, out = lax.scan(step, list(empty), jnp.arange(0, ROOM, size))
        return out.swapaxes(0, 1).reshape(B, ROOM, N, V)

    return run


def whole_mask(policy_of_row) -> np.ndarray:
    """Who sees whom in one call over all tokens."""
    ids = before(LENGTHS).astype(int)
    policy_ids = np.broadcast_to(policy_of_row[:, None], AT.shape)
    return oracle.mask(ids, ids, policies=POLICIES, policy_ids=policy_ids)


def assert_attends(got, mask, q: Any = DATA.q):
    want, _ = oracle.attention(q, DATA.k, DATA.v, mask, H**-0.5)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)
    assert not np.asarray(got)[~mask.any(axis=2)].any()


@pytest.mark.parametrize("size", [1, 4])
def test_a_cache_walked_in_a_scan(implementation, size):
    """Every policy in rows of every length, by a program that compiles once."""
    run = walk(size, implementation)
    for shift in range(len(POLICIES)):
        policy_of_row = (shift + np.arange(B)) % len(POLICIES)
        policy_ids = np.broadcast_to(policy_of_row[:, None], AT.shape)
        whole = whole_mask(policy_of_row)
        in_cache = AT[:, None, :] < (AT[:, :, None] // size + 1) * size
        for row, policy in enumerate(policy_of_row):
            if size == 4 or POLICIES[policy] in CAUSAL:
                assert not (whole & ~in_cache)[row].any()
        out = run(DATA.q, DATA.k, DATA.v, LENGTHS, policy_ids)
        assert_attends(out, whole & in_cache)
    assert run._cache_size() == 1


def test_rows_that_read_a_prompt_next_to_rows_that_add_a_token(implementation):
    """And a row that rests: it gets exactly 0, and its cache is as it was."""
    start, count = np.array([4, 9, 5]), np.array([4, 1, 0])
    q_pos = start[:, None] + np.arange(4)
    row = np.arange(B)[:, None]
    held = before(start)
    cache = [jnp.where(held[..., None, None], x, jnp.nan) for x in (DATA.k, DATA.v)]
    new = [x[row, q_pos] for x in (DATA.q, DATA.k, DATA.v)]

    def attend(query, key, value, ids, pos):
        desc = te.from_segment_ids_and_pos(ids, pos)
        return te.dot_product_attention(
            query, key, value, desc, policy=te.CAUSAL, implementation=implementation
        )

    cache, out = extend(cache, new, start, start + count, attend)
    real = np.arange(4) < count[:, None]
    mask = (AT[:, None] <= q_pos[..., None]) & real[..., None]
    assert_attends(out, mask, q=new[0])
    np.testing.assert_array_equal(cache[0][2, :5], DATA.k[2, :5])


def test_bottom_right_needs_no_positions(implementation):
    """The last query of a chunk sees the last key, wherever the chunk is."""
    end = np.array([9, 4, 24])
    q_pos = end[:, None] - 4 + np.arange(4)
    query = DATA.q[np.arange(B)[:, None], q_pos]
    ids = np.ones_like(q_pos), before(end).astype(int)
    out = te.dot_product_attention(
        *(query, DATA.k, DATA.v, te.from_segment_ids_and_pos(ids)),
        policy=te.CAUSAL_BOTTOM_RIGHT.with_window(3, 0),
        implementation=implementation,
    )
    ago = q_pos[..., None] - AT[:, None]
    assert_attends(out, (ago >= 0) & (ago <= 3), q=query)


def test_a_window_needs_a_cache_of_its_own_size():
    """Tokens take each other's slots in turn: keys may lie in any order."""
    left = 5
    slots = left + 1

    def attend(cache, at):
        new = [x[:, at][:, None] for x in (DATA.k, DATA.v, jnp.asarray(AT))]
        cache = [
            lax.dynamic_update_slice_in_dim(x, y, at % slots, axis=1)
            for x, y in zip(cache, new, strict=True)
        ]
        key, value, kv_pos = cache
        pos = jnp.full((B, 1), at), kv_pos
        ids = jnp.ones((B, 1), int), (kv_pos >= 0).astype(int)
        out = te.dot_product_attention(
            *(DATA.q[:, at][:, None], key, value),
            te.from_segment_ids_and_pos(ids, pos),
            policy=te.CAUSAL.with_window(left, 0),
            implementation="xla",
        )
        return cache, out[:, 0]

    empty = [
        *(jnp.full((B, slots, K, x), jnp.nan) for x in (H, V)),
        jnp.full((B, slots), -1),
    ]
    _, out = jax.jit(lambda: lax.scan(attend, empty, jnp.arange(ROOM)))()
    ago = AT[:, :, None] - AT[:, None]
    assert_attends(out.swapaxes(0, 1), (ago >= 0) & (ago <= left))


def test_a_layer_rotates_by_the_positions_in_the_cache():
    """A step of `MultiHeadAttention` over cached inputs is a row of the whole call."""
    layer = ref.multi_head_layer(
        "nnx", head_dim=ref.H, rotary_base=ref.ROTARY_BASE, policy=te.CAUSAL
    )
    x = ref.normal(1, 9, ref.F)
    whole = layer.apply(layer.params, x)
    at = 6
    pos = np.array([[at]]), np.arange(9)[None]
    ids = np.ones((1, 1), int), (pos[1] <= at).astype(int)
    desc = te.from_segment_ids_and_pos(ids, pos)
    step = layer.apply(layer.params, x[:, at : at + 1], x, desc)
    np.testing.assert_allclose(step, whole[:, at : at + 1], rtol=1e-5, atol=1e-5)
