"""The likeliest mistakes, in every way to call: each error says what to write."""

import enum
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType

import te_mixed_jax as te
from te_mixed_jax import context_parallel, visualize
from te_mixed_jax import linen as te_linen
from te_mixed_jax import nnx as te_nnx

B, T, S, N, H, F = 2, 8, 6, 4, 16, 24
IDS = np.ones((B, T), np.int32)
POLICY_IDS = np.zeros((B, T), np.int32)
DESC = te.from_segment_ids_and_pos(IDS)
ROW: Any = te.from_segment_ids_and_pos(IDS[0])  # without its batch axis
MASK: Any = jnp.ones((B, 1, T, T), bool)
MASK_TYPE: Any = enum.Enum("AttnMaskType", ["PADDING_MASK"]).PADDING_MASK
TWO = (te.CAUSAL, te.FULL)


def mesh_of(devices: int) -> jax.sharding.Mesh:
    kinds = (AxisType.Auto,)
    return jax.make_mesh(
        (devices,), ("context",), kinds, devices=jax.devices()[:devices]
    )


def in_shard_map(q, k, v, desc=None, **options: Any):
    return jax.shard_map(
        lambda q, k, v: context_parallel.dot_product_attention(
            q, k, v, desc, axis_name="context", **options
        ),
        mesh=mesh_of(1),
        in_specs=jax.P(),
        out_specs=jax.P(),
        check_vma=False,
    )(q, k, v)


def by_attention_fn(q, k, v, desc=None, **options: Any):
    return te_nnx.attention_fn(desc, **options)(q, k, v)


def by_linen(q, k, v, desc=None, **options: Any):
    return te_linen.DotProductAttention().apply({}, q, k, v, desc, **options)


def by_nnx(q, k, v, desc=None, **options: Any):
    return te_nnx.DotProductAttention()(q, k, v, desc, **options)


def heads(tokens: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.ones((B, tokens, N, H), dtype)


def attention(call: Callable) -> Callable:
    """Of queries and keys; what these are is no matter here."""
    return lambda q=None, k=None, desc=None, **rest: call(
        heads(T) if q is None else q, *2 * [heads(T) if k is None else k], desc, **rest
    )


CALLS = {
    "dot_product_attention": attention(te.dot_product_attention),
    "explain": attention(te.explain),
    "context_parallel": attention(in_shard_map),
    "attention_fn": attention(by_attention_fn),
    "linen.DotProductAttention": attention(by_linen),
    "nnx.DotProductAttention": attention(by_nnx),
}


def linen_layer(x=None, kv=None, desc=None, **options: Any):
    layer = te_linen.MultiHeadAttention(num_heads=N, rotary_base=1e4)
    x = jnp.ones((B, T, F)) if x is None else x
    return layer.init(jax.random.key(0), x, kv, desc, **options)


def nnx_layer(x=None, kv=None, desc=None, **options: Any):
    layer = te_nnx.MultiHeadAttention(N, F, rngs=nnx.Rngs(0))
    return layer(jnp.ones((B, T, F)) if x is None else x, kv, desc, **options)


LAYERS = {"linen.MultiHeadAttention": linen_layer, "nnx.MultiHeadAttention": nnx_layer}
PICTURES = {"plot_mask": visualize.plot_mask, "describe": visualize.describe}


def balance(desc, policy: Any = te.FULL, policy_ids: Any = None):
    return context_parallel.balance(
        desc, devices=2, policy=policy, policy_ids=policy_ids
    )


# All that take a descriptor, a policy and policy ids: `call(desc, policy, policy_ids)`.
def of_metadata(call: Callable) -> Callable:
    def run(desc, policy: Any = te.FULL, policy_ids: Any = None):
        return call(desc=desc, policy=policy, policy_ids=policy_ids)

    return run


METADATA = {
    **{name: of_metadata(call) for name, call in (CALLS | LAYERS).items()},
    **PICTURES,
    "balance": balance,
}

every_call = pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
every_layer = pytest.mark.parametrize("call", LAYERS.values(), ids=LAYERS)
whatever_takes_metadata = pytest.mark.parametrize(
    "call", METADATA.values(), ids=METADATA
)


@every_call
def test_tokens_and_heads_swapped(call):
    x = heads(T).swapaxes(1, 2)
    with pytest.raises(ValueError, match=r"`segment_ids`.*\(2, 4\).*\(2, 8\).*swapped"):
        call(x, x, desc=DESC)


@whatever_takes_metadata
def test_a_mask_instead_of_a_descriptor(call):
    with pytest.raises(TypeError, match=r"`desc`.*bool.*`from_segment_ids_and_pos`"):
        call(MASK)


@pytest.mark.parametrize("call", (CALLS | LAYERS).values(), ids=CALLS | LAYERS)
def test_ids_of_one_row(call):
    with pytest.raises(ValueError, match=r"`segment_ids`.*\(2, 8\).*\(8,\).*x\[None\]"):
        call(desc=ROW)


def test_ids_of_one_row_to_balance():
    with pytest.raises(ValueError, match=r"`desc`.*\[B, T\].*\(8,\)"):
        balance(ROW)


@whatever_takes_metadata
def test_policy_ids_of_one_row(call):
    with pytest.raises(ValueError, match=r"`policy_ids`.*\(2, 8\).*\(8,\).*x\[None\]"):
        call(DESC, TWO, POLICY_IDS[0])


@whatever_takes_metadata
def test_policy_ids_per_sequence(call):
    with pytest.raises(ValueError, match=r"`policy_ids`.*per query token, not per seq"):
        call(DESC, TWO, POLICY_IDS[:, :3])


@whatever_takes_metadata
def test_float_policy_ids(call):
    with pytest.raises(TypeError, match=r"`policy_ids`.*integers.*float"):
        call(DESC, TWO, POLICY_IDS * 1.0)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "explain"])
def test_int64_is_as_good_as_int32(name):
    desc = te.from_segment_ids_and_pos(np.int64(IDS))
    call = METADATA[name]
    assert jax.eval_shape(lambda: call(desc, TWO, np.int64(POLICY_IDS))).shape


@whatever_takes_metadata
def test_a_mask_type_of_transformer_engine_instead_of_a_policy(call):
    with pytest.raises(TypeError, match=r"`policy`.*PADDING_MASK.*policies_from_mask"):
        call(DESC, MASK_TYPE)


@whatever_takes_metadata
def test_several_policies_without_ids(call):
    with pytest.raises(ValueError, match=r"`policy_ids`.*which of the 2 policies"):
        call(DESC, list(TWO))


@every_call
def test_a_forgotten_pair(call):
    with pytest.raises(ValueError, match=r"`desc`.*S=6.*pair \(query, key/value\)"):
        call(k=heads(S), desc=DESC)


@every_layer
def test_a_forgotten_pair_of_a_layer(call):
    with pytest.raises(ValueError, match=r"`desc`.*S=6.*pair \(query, key/value\)"):
        call(kv=jnp.ones((B, S, F)), desc=DESC)


@pytest.mark.parametrize("name", [name for name in CALLS if name != "attention_fn"])
def test_mixed_dtypes(name):
    with pytest.raises(TypeError, match=r"`key`.*`query`, float32, got bfloat16"):
        CALLS[name](k=heads(T, jnp.bfloat16))


def test_attention_fn_promotes_dtypes_as_flax_does():
    call = CALLS["attention_fn"]
    out = jax.eval_shape(lambda: call(k=heads(T, jnp.bfloat16)))
    assert out.dtype == jnp.float32


@whatever_takes_metadata
def test_a_traced_policy(call):
    with pytest.raises(TypeError, match=r"`policy`.*static.*`policy_ids`"):
        jax.jit(lambda policy: call(DESC, policy)).trace(1)


# ----------------------------------------------------------------------- layers' inputs


@every_layer
def test_a_descriptor_in_the_place_of_the_keys_input(call):
    with pytest.raises(TypeError, match=r"`inputs_kv`.*SequenceDescriptor.*`desc=`"):
        call(None, DESC)


@every_layer
def test_a_mask_in_the_place_of_the_keys_input(call):
    """Where Flax's own layers have it."""
    with pytest.raises(TypeError, match=r"`inputs_kv`.*bool.*`desc=`.*`policy=`"):
        call(None, MASK)


# ----------------------------------------------------------------- one function's own


def test_ids_in_the_place_of_a_descriptor_that_is_named():
    with pytest.raises(TypeError, match=r"`desc`.*ndarray.*`from_segment_ids_and_pos`"):
        te.policies_from_mask_types(IDS, {"padding": [[1]]})  # type: ignore[arg-type]


def test_a_window_that_is_no_mapping():
    window: Any = (128, 0)
    with pytest.raises(TypeError, match=r"`window_size_per.*\(left, right\).*128"):
        te.policies_from_mask_types(DESC, {"padding": [[1]]}, window)


@pytest.mark.parametrize("desc", [IDS, MASK, DESC], ids=["ids", "mask", "ours"])
def test_what_is_no_descriptor_of_transformer_engine(desc):
    with pytest.raises(TypeError, match=r"`desc`.*TransformerEngine's.*got \w+\.\w+"):
        te.from_transformer_engine(desc)


def test_ids_to_transformer_engine():
    with pytest.raises(TypeError, match=r"`desc`.*`SequenceDescriptor`, got ndarray"):
        te.to_transformer_engine(IDS)  # type: ignore[arg-type]


def test_one_row_to_transformer_engine():
    with pytest.raises(ValueError, match=r"`desc`.*\[B, T\].*\(8,\)"):
        te.to_transformer_engine(ROW)


@pytest.mark.parametrize(
    "make",
    [
        lambda n: te.CAUSAL.with_window(n, 0),
        lambda n: te.prefix(n),
        lambda n: te.chunked(n, 1),
        lambda n: te.SequenceDescriptor.from_seqlens([[3]], q_len=n),
    ],
    ids=["with_window", "prefix", "chunked", "from_seqlens"],
)
def test_traced_numbers_where_static_ones_are_needed(make):
    with pytest.raises(TypeError, match=r"`\w+` must be a Python integer.*static"):
        jax.jit(lambda n: make(n) and 0).trace(4)


# ---------------------------------------------------------------- context parallelism


def two_devices(f: Callable, *arrays: Any):
    """`f` of the halves of rows that lie on two devices."""
    tokens = jax.P(None, "context")
    return jax.shard_map(f, mesh=mesh_of(2), in_specs=tokens, out_specs=tokens)(*arrays)


def attend_parts(x, desc=None, *, axis_name: str = "context", **options: Any):
    return context_parallel.dot_product_attention(
        x, x, x, desc, axis_name=axis_name, **options
    )


def test_ids_of_whole_rows_next_to_a_part():
    with pytest.raises(ValueError, match=r"`segment_ids`.*\(2, 4\).*8\).*whole rows"):
        two_devices(lambda x: attend_parts(x, DESC), heads(T))


def test_policy_ids_of_whole_rows_next_to_a_part():
    with pytest.raises(ValueError, match=r"`policy_ids`.*\(2, 4\).*8\).*whole rows"):
        two_devices(
            lambda x: attend_parts(x, policy=TWO, policy_ids=POLICY_IDS), heads(T)
        )


def test_a_list_instead_of_a_part_of_the_queries():
    """Also where there is no descriptor, which is made of their shapes."""
    with pytest.raises(TypeError, match=r"`query` must be an array, got list"):
        two_devices(lambda x: attend_parts([x]), heads(T))


@pytest.mark.parametrize("name", ["rows", None, 0], ids=str)
def test_an_axis_that_is_not_mapped(name):
    with pytest.raises(ValueError, match=rf"`axis_name`.*`jax.shard_map`.*{name!r}"):
        two_devices(lambda x: attend_parts(x, axis_name=name), heads(T))


def test_positions_in_the_row_outside_of_shard_map():
    with pytest.raises(ValueError, match=r"`axis_name`.*`jax.shard_map`.*'context'"):
        context_parallel.with_row_positions(DESC, axis_name="context")


def test_ids_instead_of_a_descriptor_whose_positions_count_in_the_row():
    ids: Any = IDS
    with pytest.raises(TypeError, match=r"`desc`.*`SequenceDescriptor`, got ndarray"):
        context_parallel.with_row_positions(ids, axis_name="context")


@pytest.mark.parametrize("name", ["devices", "parts"])
@pytest.mark.parametrize(("number", "error"), [(0, ValueError), (2.0, TypeError)])
def test_numbers_to_balance(name, number, error):
    with pytest.raises(error, match=rf"`{name}` must be an integer.*got {number}"):
        context_parallel.balance(DESC, **{"devices": 2, name: number})


def test_policy_ids_out_of_range_to_balance():
    with pytest.raises(ValueError, match=r"`policy_ids`.*0 to 1.*got 2"):
        balance(DESC, TWO, POLICY_IDS + 2)


@pytest.mark.parametrize("method", ["apply", "undo"])
@pytest.mark.parametrize(
    ("shape", "axis", "match"),
    [
        ((B, T + 1, 3), 1, r"8 tokens along its axis 1.*\(2, 9, 3\)"),
        ((B, 3, T), 1, r"8 tokens along its axis 1.*\(2, 3, 8\)"),
        ((T,), 0, r"8 tokens along its axis 0.*\(8,\)"),
        ((B, T), 2, r"8 tokens along its axis 2.*\(2, 8\)"),
        ((3, T), 1, "2 rows, got 3"),
    ],
    ids=str,
)
def test_arrays_of_other_rows_than_the_order(method, shape, axis, match):
    """Not cut off, and not filled up."""
    order = balance(DESC)
    with pytest.raises(ValueError, match=f"`x` must have {match}"):
        getattr(order, method)(jnp.ones(shape), axis)
