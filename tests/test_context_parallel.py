"""Rows that lie across devices: equal to one device, and only what must travels."""

import functools
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import checks
import te_mixed_jax as te
from te_mixed_jax import context_parallel
from te_mixed_jax import linen as te_linen
from te_mixed_jax import nnx as te_nnx
from test_random_rows import MIXED_POLICIES, calls
from test_sharding import travelling

B, T, S, N, K, H, VALUE = 2, 64, 48, 4, 2, 16, 12
POLICIES = (
    te.CAUSAL,
    te.FULL,
    te.prefix(3),
    te.chunked(4, 1),
    te.CAUSAL_BOTTOM_RIGHT.with_window(5, -1),
)
TOKENS = P("data", "context")


def mesh_of(data: int, context: int) -> jax.sharding.Mesh:
    names, kinds = ("data", "context"), (AxisType.Auto,) * 2
    return jax.make_mesh((data, context), names, axis_types=kinds)


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> None:
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 virtual CPU devices: the backend was started before")


def row(rng: np.random.Generator, length: int) -> np.ndarray:
    """Ids in runs or in any order, holes and padding."""
    ids = np.sort(rng.choice([0, 1, 2, 5, 9], length, p=[0.1, 0.2, 0.3, 0.3, 0.1]))
    return rng.permutation(ids) if rng.integers(2) else np.roll(ids, rng.integers(40))


def arguments(seed: int, *, positions: bool = False) -> dict[str, Any]:
    rng = np.random.default_rng(seed)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    def pos(length: int) -> jax.Array:
        return jnp.asarray(rng.integers(-9, 9, (B, length)), jnp.int32)

    ids = [jnp.asarray([row(rng, n) for _ in range(B)], jnp.int32) for n in (T, S)]
    return {
        "q": normal(B, T, N, H),
        "k": normal(B, S, K, H),
        "v": normal(B, S, K, VALUE),
        "dout": normal(B, T, N, VALUE),
        "ids": tuple(ids),
        "pos": (pos(T), pos(S)) if positions else None,
        "policy_ids": jnp.asarray(ids[0] % len(POLICIES)),
    }


def value_and_gradients(attend, q, k, v, dout, ids, pos, policy_ids):
    """Output, lse, dq, dk, dv; the lse counts in the gradients."""

    def loss(q, k, v):
        out, lse = attend(q, k, v, ids, pos, policy_ids)
        lse_loss = jnp.sum(jnp.where(lse > -1e9, jnp.sin(lse), 0))
        return jnp.sum(out * dout) + lse_loss, (out, lse)

    grads, results = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return *results, *grads


def attend_whole(q, k, v, ids, pos, policy_ids):
    return te.dot_product_attention(
        *(q, k, v, te.from_segment_ids_and_pos(ids, pos)),
        policy=POLICIES,
        policy_ids=policy_ids,
        return_lse=True,
    )


whole = jax.jit(functools.partial(value_and_gradients, attend_whole))


@functools.cache
def split(devices: int, ring: bool, implementation: str | None, check_vma: bool):
    """The same with tokens over `devices`, rows over the others of the eight."""

    def attend(q, k, v, ids, pos, policy_ids):
        return context_parallel.dot_product_attention(
            *(q, k, v, te.from_segment_ids_and_pos(ids, pos)),
            axis_name="context",
            policy=POLICIES,
            policy_ids=policy_ids,
            implementation=implementation,
            return_lse=True,
            ring=ring,
        )

    mapped = jax.shard_map(
        attend,
        mesh=mesh_of(8 // devices, devices),
        in_specs=TOKENS,
        out_specs=(TOKENS, TOKENS),
        check_vma=check_vma,
    )
    return jax.jit(functools.partial(value_and_gradients, mapped))


def assert_same(got: Any, want: Any) -> None:
    names = ("out", "lse", "dq", "dk", "dv")
    for name, a, b in zip(names, got, want, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5, err_msg=name)


FORMS = pytest.mark.parametrize("ring", [False, True], ids=["gathered", "ring"])


@FORMS
@pytest.mark.parametrize(("devices", "positions"), [(4, False), (8, True)])
def test_equals_one_device(ring, devices, positions) -> None:
    """Sequences cross the borders of devices any number of times."""
    for seed in range(6):
        given = arguments(seed, positions=positions)
        assert_same(split(devices, ring, "xla", True)(**given), whole(**given))


@pytest.mark.slow
@FORMS
@pytest.mark.parametrize(
    "sizes",
    [(d, c, 8 // d // c) for d in (1, 2, 4, 8) for c in (1, 2, 4, 8) if d * c <= 8],
)
def test_every_split_of_eight_devices(ring, sizes) -> None:
    """Over rows, tokens and heads at once."""
    rng = np.random.default_rng(0)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    given = {
        **{name: normal(8, 64, 8, 16) for name in ("q", "k", "v", "dout")},
        "ids": jnp.asarray([row(rng, 64) for _ in range(8)], jnp.int32),
        "pos": None,
    }
    given["policy_ids"] = given["ids"] % len(POLICIES)

    def attend(q, k, v, ids, pos, policy_ids):
        return context_parallel.dot_product_attention(
            *(q, k, v, te.from_segment_ids_and_pos(ids, pos)),
            axis_name="context",
            policy=POLICIES,
            policy_ids=policy_ids,
            return_lse=True,
            ring=ring,
        )

    heads = P("data", "context", "tensor")
    mapped = jax.shard_map(
        attend,
        mesh=jax.make_mesh(
            sizes, ("data", "context", "tensor"), axis_types=(AxisType.Auto,) * 3
        ),
        in_specs=(heads, heads, heads, TOKENS, None, TOKENS),
        out_specs=(heads, heads),
    )
    got = jax.jit(functools.partial(value_and_gradients, mapped))(**given)
    assert_same(got, whole(**given))


@functools.cache
def across(ring: bool):
    """`te.dot_product_attention` by eight devices: rows over two, tokens over four."""

    def attention(q, k, v, desc, *, policy_ids, **settings):
        def local(q, k, v, desc, policy_ids):
            return context_parallel.dot_product_attention(
                *(q, k, v, desc),
                axis_name="context",
                policy_ids=policy_ids,
                ring=ring,
                **settings,
            )

        mapped = jax.shard_map(
            local, mesh=mesh_of(2, 4), in_specs=TOKENS, out_specs=(TOKENS, TOKENS)
        )
        return mapped(q, k, v, desc, policy_ids)

    return attention


@FORMS
@hypothesis.given(
    call=calls(
        [
            (2, 24, 16, {"N": 4, "K": 2, "H": 8, "V": 5}, False),
            (2, 24, 24, {"N": 3, "K": 1, "H": 8, "V": 5}, True),
        ],
        [MIXED_POLICIES] * 2,
    )
)
def test_any_rows(ring, call) -> None:
    checks.check(**call, implementation="xla", exact_shape=True, attention=across(ring))


@FORMS
def test_without_types_that_vary(ring) -> None:
    given = arguments(10)
    assert_same(split(4, ring, None, False)(**given), whole(**given))


def test_dense() -> None:
    given = arguments(11)
    assert_same(split(4, False, "dense", True)(**given), whole(**given))
    with pytest.raises(NotImplementedError, match="`ring=True` needs a fused"):
        split(4, True, "dense", True)(**given)


@pytest.mark.parametrize(
    ("ring", "kinds"),
    [
        (False, {"all-gather", "reduce-scatter"}),
        (True, {"collective-permute", "collective-permute of integers"}),
    ],
    ids=["gathered", "ring"],
)
def test_what_travels(ring, kinds) -> None:
    program = split(4, ring, "xla", True).lower(**arguments(0)).compile()
    assert travelling(program.as_text()) == {"all-gather of integers"} | kinds


@FORMS
def test_one_sequence_a_row_without_a_descriptor(ring) -> None:
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(2, 32, 3, 8)).astype(np.float32)) for _ in range(3)
    )
    attend = functools.partial(
        context_parallel.dot_product_attention,
        axis_name="context",
        policy=te.CAUSAL,
        ring=ring,
    )
    mapped = jax.shard_map(
        attend,
        mesh=mesh_of(2, 4),
        in_specs=TOKENS,
        out_specs=TOKENS,
    )
    want = te.dot_product_attention(q, k, v, policy=te.CAUSAL)
    np.testing.assert_allclose(jax.jit(mapped)(q, k, v), want, atol=1e-6)


@FORMS
def test_padding_and_broken_queries(ring) -> None:
    """NaN in padding changes nothing; a policy id out of range is NaN, alone."""
    given = arguments(3)
    given["policy_ids"] = given["policy_ids"].at[1, 40].set(99)
    given["ids"][0].at[1, 40].set(5)
    want = whole(**given)
    for name, side in (("q", 0), ("k", 1), ("v", 1), ("dout", 0)):
        padding = (given["ids"][side] <= 0)[..., None, None]
        given[name] = jnp.where(padding, jnp.nan, given[name])
    assert_same(split(4, ring, "xla", True)(**given), want)


@FORMS
def test_under_vmap(ring) -> None:
    pairs = jax.tree.map(lambda *x: jnp.stack(x), arguments(4), arguments(5))
    run = split(4, ring, "xla", True)
    got = jax.vmap(lambda given: run(**given))(pairs)
    for i, seed in enumerate((4, 5)):
        assert_same([x[i] for x in got], whole(**arguments(seed)))


# ------------------------------------------------------------------------ Flax layers


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("kind", [pytest.param("linen", marks=pytest.mark.slow), "nnx"])
def test_layers_rotate_by_positions_in_the_row(kind, described) -> None:
    """A layer that is told the axis gives what it gives on one device."""
    rng = np.random.default_rng(2)
    x = jnp.asarray(rng.normal(size=(2, 64, 24)).astype(np.float32))
    ids = jnp.asarray([row(rng, 64) for _ in range(2)], jnp.int32)
    settings = {"policy": te.CAUSAL, "rotary_base": 100.0}

    def layer(axis_name: str | None) -> Any:
        if kind == "nnx":
            module = te_nnx.MultiHeadAttention(
                4, 24, **settings, axis_name=axis_name, rngs=nnx.Rngs(0)
            )
            return module
        module = te_linen.MultiHeadAttention(4, **settings, axis_name=axis_name)
        alone = te_linen.MultiHeadAttention(4, **settings)
        return functools.partial(module.apply, alone.init(jax.random.key(0), x))

    def attend(axis_name, x, ids):
        desc = te.from_segment_ids_and_pos(ids) if described else None
        return layer(axis_name)(x, desc=desc)

    mapped = jax.shard_map(
        functools.partial(attend, "context"),
        mesh=mesh_of(2, 4),
        in_specs=TOKENS,
        out_specs=TOKENS,
    )
    want = jax.jit(functools.partial(attend, None))(x, ids)
    np.testing.assert_allclose(jax.jit(mapped)(x, ids), want, atol=2e-6)


def test_keys_of_a_sequence_are_gathered_next_to_each_other(monkeypatch) -> None:
    """In order of positions, however tokens lie; or little could be left out."""

    def ids_and_positions(q, k, v, ranges, *, config):
        del q, k, v, config
        return ranges.kv_ids, ranges.kv_pos.astype(jnp.float32)

    monkeypatch.setattr(context_parallel, "attend_in_ranges", ids_and_positions)
    order = np.random.default_rng(0).permutation(T)
    ids = np.repeat([7, 3, 0, 9], [20, 24, 8, 12])[order]
    pos = np.concatenate([np.arange(n) for n in (20, 24, 8, 12)])[order]

    def gather(x, ids, pos):
        return context_parallel.dot_product_attention(
            *(x, x, x, te.from_segment_ids_and_pos(ids, pos)),
            axis_name="context",
            return_lse=True,
        )

    tokens = P(None, "context")
    gather = jax.shard_map(
        gather, mesh=mesh_of(2, 4), in_specs=tokens, out_specs=tokens
    )
    got_ids, got_pos = gather(jnp.zeros((1, T, 1, 8)), ids[None], pos[None])
    real = np.asarray(got_ids[0, :T]) > 0
    np.testing.assert_array_equal(
        got_ids[0, :T][real], np.repeat([3, 7, 9], [24, 20, 12])
    )
    want = np.concatenate([np.arange(n) for n in (24, 20, 12)])
    np.testing.assert_array_equal(got_pos[0, :T][real], want)


# --------------------------------------------------------------------------- balance


def seen_by(ids, policy_ids, pos) -> np.ndarray:
    """Keys that each query sees, by comparing all of them; causal or full."""
    same = (ids[:, :, None] == ids[:, None, :]) & (ids > 0)[:, :, None]
    before = pos[:, :, None] >= pos[:, None, :]
    return (same & (before | (policy_ids == 1)[:, :, None])).sum(2)


def packed(seed: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, policy ids and positions of rows of long and short sequences."""
    rng = np.random.default_rng(seed)
    cuts = np.sort(rng.choice(length, (3, 6), replace=False), axis=1)
    ids = (np.arange(length) >= cuts[..., None]).sum(1) + 1
    ids[:, length * 9 // 10 :] = 0
    starts = np.diff(ids, axis=1, prepend=-1) != 0
    at = np.arange(length)
    pos = at - np.maximum.accumulate(np.where(starts, at, 0), axis=1)
    return ids, ids % 2, pos


def test_balance_evens_out_the_work() -> None:
    """Measured as keys seen, over two draws: in row order one device has far more."""
    for seed in range(2):
        ids, policy_ids, pos = packed(seed, 1536)
        work = seen_by(ids, policy_ids, pos)
        new = context_parallel.balance(
            te.from_segment_ids_and_pos(ids, pos),
            devices=8,
            policy=(te.CAUSAL, te.FULL),
            policy_ids=policy_ids,
        )

        def worst(work: Any) -> float:
            per_device = np.asarray(work).reshape(3, 8, -1).sum(2)
            return float((per_device.max(1) / per_device.mean(1)).max())

        assert worst(work) > 1.5
        assert worst(new.apply(jnp.asarray(work))) < 1.15


def test_balanced_rows_give_the_same_results() -> None:
    ids, policy_ids, pos = (jnp.asarray(x) for x in packed(1, 96))
    rng = np.random.default_rng(1)
    q, k, v = (
        jnp.asarray(rng.normal(size=(3, 96, 2, 8)).astype(np.float32)) for _ in range(3)
    )

    def attend(q, k, v, ids, pos, policy_ids):
        desc = te.from_segment_ids_and_pos(ids, pos)
        return te.dot_product_attention(
            q, k, v, desc, policy=(te.CAUSAL, te.FULL), policy_ids=policy_ids
        )

    new = context_parallel.balance(
        te.from_segment_ids_and_pos(ids, pos),
        devices=4,
        policy=(te.CAUSAL, te.FULL),
        policy_ids=policy_ids,
    )
    given = q, k, v, ids, pos, policy_ids
    for x in given:
        np.testing.assert_array_equal(new.undo(new.apply(x)), x)
    got = new.undo(attend(*(new.apply(x) for x in given)))
    np.testing.assert_allclose(got, attend(*given), atol=1e-6)
    heads_first = q.swapaxes(1, 2)
    np.testing.assert_array_equal(
        new.apply(heads_first, axis=2), new.apply(q).swapaxes(1, 2)
    )


@pytest.mark.parametrize(
    ("desc", "devices", "what"),
    [
        (te.from_segment_ids_and_pos(np.ones((1, 10), int)), 4, "divide the 10 tokens"),
        (te.from_segment_ids_and_pos((np.ones((1, 8), int),) * 2), 4, "got a pair"),
    ],
)
def test_rows_that_cannot_be_balanced(desc, devices, what) -> None:
    with pytest.raises(ValueError, match=what):
        context_parallel.balance(desc, devices=devices)
