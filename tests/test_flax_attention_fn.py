"""`attention_fn` inside Flax's own attention modules: what it honours and refuses."""

import inspect
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import flax_reference as ref
import oracle
import te_mixed_jax as te
import te_mixed_jax.linen
import te_mixed_jax.nnx
from flax_reference import B, H, K, N, S, T, V

F = N * H  # Flax's modules share the features among the heads
X = jnp.asarray(ref.normal(B, T, F, seed=1))
X_KV = jnp.asarray(ref.normal(B, S, F, seed=2))
SELF = te.from_segment_ids_and_pos(ref.IDS)
CROSS = te.from_segment_ids_and_pos((ref.IDS, ref.KV_IDS))
MIXED: dict[str, Any] = {
    "policy": ref.POLICIES,
    "policy_ids": ref.POLICY_IDS,
    "implementation": "dense",
}


@pytest.fixture(params=["linen", "nnx"])
def kind(request):
    return request.param


def flax_layer(kind, attention_fn, **config) -> tuple[Any, Any]:
    """Flax's own layer as a function of its inputs, and its random parameters."""
    if kind == "linen":
        layer = nn.MultiHeadDotProductAttention(N, attention_fn=attention_fn, **config)
        plain = nn.MultiHeadDotProductAttention(N)
        shapes = jax.eval_shape(plain.init, jax.random.key(0), X)["params"]
        params = ref.randomised(shapes)

        def apply(*args, **call):
            return layer.apply({"params": params}, *args, **call)

        return params, apply
    layer = nnx.MultiHeadAttention(
        N, F, attention_fn=attention_fn, rngs=nnx.Rngs(0), decode=False, **config
    )
    params = ref.randomised(nnx.to_pure_dict(nnx.state(layer, nnx.Param)))
    nnx.update(layer, params)
    return params, layer


def adapter(kind, *args, **kwargs):
    return ref.KINDS[kind].attention_fn(*args, **kwargs)


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


# ----------------------------------------------------------------------- the result


def test_self_attention(kind):
    params, layer = flax_layer(kind, adapter(kind, SELF, **MIXED))
    mask = oracle.mask(
        *(ref.IDS, ref.IDS),
        policies=ref.ORACLE_POLICIES,
        policy_ids=ref.POLICY_IDS,
    )
    assert_close(layer(X), ref.multi_head(params, X, X, mask))


def test_cross_attention(kind):
    params, layer = flax_layer(kind, adapter(kind, CROSS, **MIXED))
    mask = oracle.mask(
        *(ref.IDS, ref.KV_IDS),
        policies=ref.ORACLE_POLICIES,
        policy_ids=ref.POLICY_IDS,
    )
    assert_close(layer(X, X_KV), ref.multi_head(params, X, X_KV, mask))


def test_without_settings_it_is_flaxs_own_attention(kind):
    params, layer = flax_layer(kind, adapter(kind))
    default = {
        "linen": nn.dot_product_attention,
        "nnx": nnx.dot_product_attention,
    }[kind]
    _, flax_own = flax_layer(kind, default)
    assert_close(layer(X, X_KV), flax_own(X, X_KV))


def test_our_layer_gives_the_same_with_the_same_weights(kind):
    params, layer = flax_layer(kind, adapter(kind, SELF, **MIXED))
    ours = ref.multi_head_layer(kind, in_features=F)
    want = ours.apply(
        *(params, X), desc=SELF, policy=ref.POLICIES, policy_ids=ref.POLICY_IDS
    )
    assert_close(layer(X), want)


def test_scale(kind):
    params, layer = flax_layer(kind, adapter(kind, scale=0.9, implementation="dense"))
    everything = np.ones((B, T, T), bool)
    assert_close(layer(X), ref.multi_head(params, X, X, everything, scale=0.9))


def test_linen_with_a_traced_descriptor():
    """The module is built in the compiled function; ids change, no new compilation."""
    params, _ = flax_layer("linen", adapter("linen"))

    @jax.jit
    def run(ids):
        fn = causal("linen", ids)
        layer = nn.MultiHeadDotProductAttention(N, attention_fn=fn)
        return layer.apply({"params": params}, X)

    assert_causal(run, params)


def test_nnx_with_a_traced_descriptor():
    """The function is put onto a module that is merged in the compiled function."""
    params, layer = flax_layer("nnx", adapter("nnx"))
    graphdef, state = nnx.split(layer)

    @jax.jit
    def run(ids):
        layer = nnx.merge(graphdef, state)
        layer.attention_fn = causal("nnx", ids)
        return layer(X)

    assert_causal(run, params)


def causal(kind, ids):
    desc = te.from_segment_ids_and_pos(ids)
    return adapter(kind, desc, policy=te.CAUSAL, implementation="dense")


def assert_causal(run, params):
    for ids in (ref.IDS, ref.IDS[:, ::-1].copy()):
        mask = oracle.mask(ids, ids, policies=(oracle.CAUSAL,))
        assert_close(run(ids), ref.multi_head(params, X, X, mask))
    assert run._cache_size() == 1


def test_nnx_grouped_heads():
    params, layer = flax_layer("nnx", adapter("nnx", SELF, **MIXED), num_kv_heads=K)
    mask = oracle.mask(
        *(ref.IDS, ref.IDS),
        policies=ref.ORACLE_POLICIES,
        policy_ids=ref.POLICY_IDS,
    )
    assert_close(layer(X), ref.multi_head(params, X, X, mask))


# ------------------------------------------------------------------ what it honours


def test_it_names_every_argument_of_flaxs_attention():
    """Flax passes linen's by name only where the function has it: none may be lost."""
    ours = inspect.signature(te_mixed_jax.nnx.attention_fn()).parameters
    for flaxs in (nn.dot_product_attention, nnx.dot_product_attention):
        assert set(inspect.signature(flaxs).parameters) <= set(ours)
    assert not [p for p in ours.values() if p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]


def test_one_function_for_both():
    assert te_mixed_jax.linen.attention_fn is te_mixed_jax.nnx.attention_fn


def test_dtype(kind):
    fn = adapter(kind, SELF, implementation="dense")
    _, layer = flax_layer(kind, fn, dtype=jnp.bfloat16)
    assert layer(X).dtype == jnp.bfloat16
    q, k = (ref.normal(B, T, N, H, seed=seed) for seed in (3, 4))
    assert fn(q, k, k, dtype=jnp.bfloat16).dtype == jnp.bfloat16
    assert fn(jnp.asarray(q, jnp.bfloat16), k, k).dtype == jnp.float32


def test_nnx_promote_dtype():
    """A function that Flax documents for its own attention is used, not dropped."""

    def in_half(arrays, dtype=None):
        return tuple(jnp.asarray(x, jnp.float16) for x in arrays)

    x = ref.normal(B, T, N, H)
    fn = te_mixed_jax.nnx.attention_fn(implementation="dense")
    assert fn(x, x, x, promote_dtype=in_half).dtype == jnp.float16


def test_softmax_is_in_fp32_anyway():
    fn = adapter("linen", implementation="dense")
    x = jnp.asarray(ref.normal(B, T, N, H), jnp.bfloat16)
    got, want = (fn(x, x, x, force_fp32_for_softmax=force) for force in (True, False))
    np.testing.assert_array_equal(got, want)


def test_dropout_that_is_switched_off(kind):
    """A model that trains elsewhere with dropout can be evaluated."""
    fn = adapter(kind, SELF, **MIXED)
    _, layer = flax_layer(kind, fn, dropout_rate=0.5, deterministic=True)
    _, plain = flax_layer(kind, fn)
    np.testing.assert_array_equal(layer(X), plain(X))


@pytest.mark.parametrize("precision", [None, "default", jax.lax.Precision.DEFAULT])
def test_default_precision(kind, precision):
    fn = adapter(kind, implementation="dense")
    q, kv = ref.normal(B, T, N, H), ref.normal(B, S, N, H)
    assert fn(q, kv, ref.normal(B, S, N, V), precision=precision).shape == (B, T, N, V)


# ------------------------------------------------------------------ what it refuses


@pytest.mark.parametrize(
    ("argument", "value", "advice"),
    [
        ("mask", np.ones((B, 1, T, T), bool), "`SequenceDescriptor`.*`policy`"),
        ("bias", np.zeros((B, N, T, T)), "`SequenceDescriptor`.*`policy`"),
        ("is_causal", True, "`policy=CAUSAL`"),
        ("dropout_rate", 0.5, "got 0.5 with `deterministic=False`"),
        ("module", object(), "`sow_weights=False`"),
        ("precision", "highest", "got 'highest'.*`jax.default_matmul_precision`"),
        ("input_positions", np.arange(T), "positions are those of `desc`"),
        ("einsum_dot_general", jax.lax.dot_general, "its own products"),
        ("qk_attn_weights_einsum", jnp.einsum, "its own products"),
        ("attn_weights_value_einsum", jnp.einsum, "its own products"),
    ],
)
def test_refused_arguments(argument, value, advice):
    x = ref.normal(B, T, N, H)
    with pytest.raises(
        NotImplementedError, match=rf"`{argument}` is not supported by .*{advice}"
    ):
        adapter("linen")(x, x, x, **{argument: value})


@pytest.mark.parametrize(
    ("argument", "config", "call"),
    [
        ("mask", {}, {"mask": np.ones((B, 1, T, T), bool)}),
        ("module", {}, {"sow_weights": True}),
        ("precision", {"precision": jax.lax.Precision.HIGHEST}, {}),
    ],
)
def test_refused_through_flaxs_layer(kind, argument, config, call):
    _, layer = flax_layer(kind, adapter(kind), **config)
    with pytest.raises(NotImplementedError, match=f"`{argument}`"):
        layer(X, **call)


def test_linen_dropout_is_refused():
    _, layer = flax_layer("linen", adapter("linen"), dropout_rate=0.5)
    with pytest.raises(NotImplementedError, match="`dropout_rate`"):
        layer(X, deterministic=False, rngs={"dropout": jax.random.key(0)})


def test_linen_custom_einsums_are_refused():
    einsums = {
        "qk_attn_weights_einsum_cls": lambda: jnp.einsum,
        "attn_weights_value_einsum_cls": lambda: jnp.einsum,
    }
    _, layer = flax_layer("linen", adapter("linen"), **einsums)
    with pytest.raises(NotImplementedError, match="`qk_attn_weights_einsum`"):
        layer(X)


def test_nnx_dropout_is_refused():
    _, layer = flax_layer("nnx", adapter("nnx"), dropout_rate=0.5)
    with pytest.raises(NotImplementedError, match="`dropout_rate`"):
        layer(X, deterministic=False)


def test_nnx_is_causal_is_refused():
    _, layer = flax_layer("nnx", adapter("nnx"))
    with pytest.raises(NotImplementedError, match="`is_causal`"):
        layer(X, is_causal=True)


def test_nnx_decoding_is_refused():
    """Flax's cache comes with a mask."""
    _, layer = flax_layer("nnx", adapter("nnx"))
    layer.init_cache((B, T, F))
    with pytest.raises(NotImplementedError, match="`mask`"):
        layer(X[:, :1], decode=True)
