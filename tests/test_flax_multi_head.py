"""The layers `MultiHeadAttention`, linen and nnx, against NumPy float64."""

import functools
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
from flax_reference import MAPPED, B, F, G, H, K, N, O, S, T, V

SELF = te.from_segment_ids_and_pos(ref.IDS)
CROSS = te.from_segment_ids_and_pos((ref.IDS, ref.KV_IDS))
BY_POLICY: dict[str, Any] = {"policy": ref.POLICIES, "policy_ids": ref.POLICY_IDS}
SIZES: dict[str, Any] = {
    "num_kv_heads": K,
    "head_dim": H,
    "v_head_dim": V,
    "out_features": O,
}
ROTARY: dict[str, Any] = SIZES | {"rotary_base": ref.ROTARY_BASE}
AXES = {
    "query": ("embed", "heads", None),
    "key": ("embed", "kv_heads", None),
    "out": ("heads", None, "embed"),
}


@pytest.fixture(params=["linen", "nnx"])
def kind(request):
    return request.param


def mask(kv_ids=ref.IDS, **positions):
    return oracle.mask(
        ref.IDS,
        kv_ids,
        policies=ref.ORACLE_POLICIES,
        policy_ids=ref.POLICY_IDS,
        **positions,
    )


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=1e-5)


X = jnp.asarray(ref.normal(B, T, F, seed=1))
X_KV = jnp.asarray(ref.normal(B, S, G, seed=2))


# ------------------------------------------------------------------------- forward


@pytest.mark.parametrize("kv_heads", [1, 3, 6])
def test_self_attention(kind, kv_heads):
    """Multi-query, grouped and full heads; a policy per sequence."""
    sizes: dict[str, Any] = SIZES | {"num_kv_heads": kv_heads}
    params, apply = ref.multi_head_layer(kind, **sizes)
    assert params["key"]["kernel"].shape == (F, kv_heads, H)
    assert_close(
        apply(params, X, desc=SELF, **BY_POLICY), ref.multi_head(params, X, X, mask())
    )


@pytest.mark.parametrize("implementation", [None, "dense"], ids=str)
def test_cross_attention(kind, implementation):
    params, apply = ref.multi_head_layer(
        kind, **SIZES, in_kv_features=G, implementation=implementation
    )
    got = apply(params, X, X_KV, desc=CROSS, **BY_POLICY)
    assert_close(got, ref.multi_head(params, X, X_KV, mask(ref.KV_IDS)))


def test_mask_types_equal_policies_bit_for_bit(kind):
    params, apply = ref.multi_head_layer(kind, **ROTARY)
    got, want = (
        apply(params, X, desc=SELF, **call) for call in (ref.MASK_TYPES, BY_POLICY)
    )
    np.testing.assert_array_equal(got, want)


def test_a_uniform_batch_without_a_descriptor(kind):
    """The layer's policy, rows that are one sequence, rotary positions 0, 1, ..."""
    base = ref.ROTARY_BASE
    params, apply = ref.multi_head_layer(
        kind, **SIZES, rotary_base=base, policy=te.CAUSAL
    )
    causal = np.tril(np.ones((T, T), bool))[None].repeat(B, axis=0)
    positions = np.arange(T)[None].repeat(B, axis=0)
    want = ref.multi_head(params, X, X, causal, rotary=(base, positions, positions))
    assert_close(apply(params, X), want)


def test_more_batch_axes(kind):
    """Two, of which the descriptor has the first only in size 1."""
    params, apply = ref.multi_head_layer(kind, **ROTARY)
    x = ref.normal(MAPPED, B, T, F, seed=3)
    desc = te.from_segment_ids_and_pos(ref.IDS[None])
    got = apply(params, x, desc=desc, policy=te.CAUSAL)
    want = [apply(params, row, desc=SELF, policy=te.CAUSAL) for row in x]
    assert_close(got, np.stack(want))


def test_sizes_by_default(kind):
    """Heads share the features; values and output are as large."""
    params, _ = ref.multi_head_layer(kind, in_features=12, num_heads=6)
    shapes = jax.tree.map(jnp.shape, params)
    qkv = {"kernel": (12, 6, 2), "bias": (6, 2)}
    out = {"kernel": (6, 2, 12), "bias": (12,)}
    assert shapes == {"query": qkv, "key": qkv, "value": qkv, "out": out}


@pytest.mark.parametrize(
    ("config", "with_bias"),
    [
        ({}, {"query", "key", "value", "out"}),
        ({"use_bias": False}, set()),
        ({"qkv_bias": False}, {"out"}),
        ({"use_bias": False, "qkv_bias": True}, {"query", "key", "value"}),
    ],
    ids=["all", "none", "out", "qkv"],
)
def test_biases(kind, config, with_bias):
    params, apply = ref.multi_head_layer(kind, **SIZES, **config)
    assert {name for name in params if "bias" in params[name]} == with_bias
    assert_close(
        apply(params, X, desc=SELF, **BY_POLICY), ref.multi_head(params, X, X, mask())
    )


def test_scale(kind):
    params, apply = ref.multi_head_layer(kind, **SIZES, scale=0.9)
    got = apply(params, X, desc=SELF, **BY_POLICY)
    assert_close(got, ref.multi_head(params, X, X, mask(), scale=0.9))


# -------------------------------------------------------------------------- rotary


def test_rotary_positions_are_the_running_index(kind):
    base = ref.ROTARY_BASE
    params, apply = ref.multi_head_layer(kind, **SIZES, rotary_base=base)
    positions = ref.running_positions(ref.IDS)
    want = ref.multi_head(params, X, X, mask(), rotary=(base, positions, positions))
    assert_close(apply(params, X, desc=SELF, **BY_POLICY), want)


def test_rotary_positions_of_each_side_are_its_own(kind):
    """Given positions, unsorted and different on both sides, under a full mask."""
    base = ref.ROTARY_BASE
    params, apply = ref.multi_head_layer(
        kind, **SIZES, in_kv_features=G, rotary_base=base
    )
    rng = np.random.default_rng(4)
    q_pos, kv_pos = rng.integers(0, 40, (B, T)), rng.integers(0, 40, (B, S))
    desc = te.from_segment_ids_and_pos((ref.IDS, ref.KV_IDS), (q_pos, kv_pos))
    want = ref.multi_head(
        *(params, X, X_KV, oracle.mask(ref.IDS, ref.KV_IDS)),
        rotary=(base, q_pos, kv_pos),
    )
    assert_close(apply(params, X, X_KV, desc=desc), want)


def test_rotary_is_computed_in_fp32(kind):
    """In bf16, positions near 3000 would be rounded to multiples of 16."""
    base = ref.ROTARY_BASE
    params, apply = ref.multi_head_layer(
        kind, **SIZES, rotary_base=base, dtype=jnp.bfloat16
    )
    positions = 3000 + ref.running_positions(ref.IDS)
    desc = te.from_segment_ids_and_pos(ref.IDS, positions)
    want = ref.multi_head(params, X, X, mask(), rotary=(base, positions, positions))
    got = apply(params, X, desc=desc, **BY_POLICY)
    assert_bf16_close(got, want)


# ------------------------------------------------------------------ dtypes, padding


def assert_bf16_close(got, want):
    """A few bf16 roundings at the largest magnitude: projections, attention, output."""
    assert got.dtype == jnp.bfloat16
    atol = 4 * float(jnp.finfo(jnp.bfloat16).eps) * np.abs(want).max()
    np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=0, atol=atol)


def test_dtype_is_that_of_the_computation(kind):
    params, apply = ref.multi_head_layer(kind, **SIZES, dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    got = apply(params, X, desc=SELF, **BY_POLICY)
    assert_bf16_close(got, ref.multi_head(params, X, X, mask()))


def test_param_dtype(kind):
    """Without `dtype`, the computation is in what inputs and parameters promote to."""
    params, apply = ref.multi_head_layer(kind, **SIZES, param_dtype=jnp.bfloat16)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(jnp.bfloat16)}
    for x in (jnp.asarray(X), jnp.asarray(X, jnp.bfloat16)):
        assert jax.eval_shape(apply, params, x).dtype == x.dtype


def test_inputs_of_two_dtypes(kind):
    """Key and value come in the dtype of the query, whatever their input's."""
    params, apply = ref.multi_head_layer(
        kind, **SIZES, in_kv_features=G, param_dtype=jnp.bfloat16
    )
    got = jax.eval_shape(apply, params, jnp.asarray(X, jnp.bfloat16), X_KV)
    assert got.dtype == jnp.float32


def test_padding_is_exactly_the_bias(kind):
    """Whatever stands in the input there."""
    params, apply = ref.multi_head_layer(kind, **SIZES, implementation="xla")
    x = np.where((ref.IDS > 0)[..., None], X, np.nan)
    got = np.asarray(apply(params, x, desc=SELF, **BY_POLICY))
    padding = got[ref.IDS == 0]
    bias = np.asarray(params["out"]["bias"])
    np.testing.assert_array_equal(padding, np.broadcast_to(bias, padding.shape))
    assert_close(got, ref.multi_head(params, X, X, mask()))


def test_padding_is_exactly_zero_without_bias(kind):
    params, apply = ref.multi_head_layer(kind, **SIZES, use_bias=False)
    got = np.asarray(apply(params, X, desc=SELF, **BY_POLICY))
    assert not got[ref.IDS == 0].any()


# ------------------------------------------------------------------ transformations


def test_vmap_over_ids(kind):
    """Mapped ids, positions made inside, shared parameters and inputs."""
    params, apply = ref.multi_head_layer(kind, **ROTARY, implementation="xla")
    rng = np.random.default_rng(5)
    ids = jnp.asarray(rng.integers(0, 4, (MAPPED, B, T)), jnp.int32)

    @jax.jit
    @jax.vmap
    def call(ids):
        desc = te.from_segment_ids_and_pos(ids)
        policies = {"policy": (te.FULL, te.CAUSAL), "policy_ids": ids % 2}
        return apply(params, X, desc=desc, **policies)

    for one, got in zip(np.asarray(ids), call(ids), strict=True):
        one_mask = oracle.mask(
            one, one, policies=(oracle.FULL, oracle.CAUSAL), policy_ids=one % 2
        )
        positions = ref.running_positions(one)
        rotary = (ref.ROTARY_BASE, positions, positions)
        assert_close(got, ref.multi_head(params, X, X, one_mask, rotary=rotary))


def test_vmap_over_parameters(kind):
    """An ensemble of layers on one batch."""
    layers = [ref.multi_head_layer(kind, **SIZES) for _ in range(MAPPED)]
    apply = layers[0].apply
    each = [ref.randomised(layer.params, seed) for seed, layer in enumerate(layers)]
    together = jax.tree.map(lambda *x: jnp.stack(x), *each)
    got = jax.vmap(lambda params: apply(params, X, desc=SELF, **BY_POLICY))(together)
    want = [apply(params, X, desc=SELF, **BY_POLICY) for params in each]
    assert_close(got, np.stack(want))


def test_gradients(kind):
    """Of every parameter and both inputs: finite differences of the NumPy layer."""
    base = ref.ROTARY_BASE
    params, apply = ref.multi_head_layer(
        kind,
        **SIZES,
        in_kv_features=G,
        rotary_base=base,
        implementation="xla",
    )
    positions = ref.running_positions(ref.IDS), ref.running_positions(ref.KV_IDS)
    dout = ref.normal(B, T, O, seed=6)

    @jax.jit
    def grad(arguments, ids):
        def loss(params, x_q, x_kv):
            desc = te.from_segment_ids_and_pos(ids)
            return jnp.sum(apply(params, x_q, x_kv, desc=desc, **BY_POLICY) * dout)

        return jax.grad(lambda arguments: loss(*arguments))(arguments)

    def exact_loss(arguments):
        params, x_q, x_kv = arguments
        rotary = (base, *positions)
        out = ref.multi_head(params, x_q, x_kv, mask(ref.KV_IDS), rotary=rotary)
        return np.sum(out * dout)

    arguments = jax.tree.map(lambda x: np.asarray(x, np.float64), (params, X, X_KV))
    got = grad((params, X, X_KV), (ref.IDS, ref.KV_IDS))
    leaves, tree = jax.tree.flatten(arguments)
    for index, (leaf, dleaf) in enumerate(
        zip(leaves, jax.tree.leaves(got), strict=True)
    ):
        direction = np.random.default_rng(index).normal(size=leaf.shape)

        def along(step, index=index, direction=direction):
            moved = [*leaves]
            moved[index] = moved[index] + step * direction
            return exact_loss(jax.tree.unflatten(tree, moved))

        want = (along(1e-5) - along(-1e-5)) / 2e-5
        have = np.sum(np.asarray(dleaf, np.float64) * direction)
        size = float(np.linalg.norm(dleaf) * np.linalg.norm(direction))
        # The bias of the keys adds the same to all scores of a query: gradient 0,
        # except that rotary positions turn it. So the floor is absolute.
        np.testing.assert_allclose(have, want, rtol=1e-4, atol=1e-5 * size + 1e-5)


def test_nnx_transformations():
    """`nnx.jit` and `nnx.grad` over a layer, with the descriptor as an argument."""
    zeros = nnx.initializers.zeros_init()
    layer = te_mixed_jax.nnx.MultiHeadAttention(
        *(N, F), **SIZES, kernel_init=zeros, implementation="dense", rngs=nnx.Rngs(0)
    )

    @nnx.jit
    def grad(layer, x, desc):
        return nnx.grad(lambda layer: jnp.sum(layer(x, desc=desc, **BY_POLICY)))(layer)

    grads = nnx.to_pure_dict(grad(layer, X, SELF))
    np.testing.assert_allclose(grads["out"]["bias"], np.full(O, B * T), rtol=1e-6)


# ----------------------------------------------------------------------- parameters


def test_linen_and_nnx_are_the_same_layer():
    """One set of weights, in both directions, gives one result."""
    linen = ref.multi_head_layer("linen", **ROTARY)
    nnx_layer = ref.multi_head_layer("nnx", **ROTARY)
    for params in (linen.params, nnx_layer.params):
        got, want = (
            layer.apply(params, X, desc=SELF, **BY_POLICY)
            for layer in (linen, nnx_layer)
        )
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=1e-6)


def test_parameters_are_named_as_those_of_flax():
    """Weights of Flax's own modules can be taken over."""
    x = jnp.ones((1, 2, 12))
    flax_linen = nn.MultiHeadDotProductAttention(6).init(jax.random.key(0), x)
    flax_nnx = nnx.MultiHeadAttention(6, 12, num_kv_heads=3, rngs=nnx.Rngs(0))
    ours_linen = ref.multi_head_layer("linen", in_features=12)
    ours_nnx = ref.multi_head_layer("nnx", in_features=12, num_kv_heads=3)

    def shapes(params):
        return jax.tree.map(jnp.shape, params)

    assert shapes(flax_linen["params"]) == shapes(ours_linen.params)
    assert shapes(nnx.to_pure_dict(nnx.state(flax_nnx))) == shapes(ours_nnx.params)


def test_initializers_see_two_axes(kind):
    """(in, out), so that the fan-in is that of the projection."""
    seen = []

    def record(rng, shape, dtype=jnp.float32):
        seen.append(shape)
        return jnp.ones(shape, dtype)

    ref.multi_head_layer(kind, **SIZES, kernel_init=record)
    assert seen == [(F, N * H), (F, K * H), (F, K * V), (N * V, O)]


@functools.cache
def partition_specs(kind):
    """Of the parameters of a layer with `AXES`, by projection."""
    zeros = nn.initializers.zeros_init()
    config: dict[str, Any] = SIZES | {"kernel_axes": AXES, "kernel_init": zeros}
    if kind == "linen":
        layer = te_mixed_jax.linen.MultiHeadAttention(num_heads=N, **config)
        variables = jax.eval_shape(layer.init, jax.random.key(0), X)
        return nn.get_partition_spec(variables)["params"]
    rules = [(name, None) for name in ("embed", "heads", "kv_heads")]
    with jax.set_mesh(mesh()), nn.logical_axis_rules(rules):
        layer = te_mixed_jax.nnx.MultiHeadAttention(N, F, **config, rngs=nnx.Rngs(0))
    return nnx.to_pure_dict(nnx.get_partition_spec(nnx.state(layer)))


def mesh():
    auto = (jax.sharding.AxisType.Auto,)
    return jax.make_mesh((1,), ("model",), axis_types=auto)


@pytest.mark.parametrize("name", ["query", "key", "value", "out"])
def test_kernels_and_biases_are_partitioned(kind, name):
    """A bias goes with the output axes of its kernel; no names, no partitioning."""
    specs = partition_specs(kind)[name]
    P = jax.sharding.PartitionSpec
    kernel = P(*AXES.get(name, ()))
    bias = P(*kernel[-1:]) if name == "out" else P(*kernel[1:])
    assert specs == {"kernel": kernel, "bias": bias}


def test_initialisation_under_a_mesh(kind):
    """With rules that put the logical axes onto it."""
    config: dict[str, Any] = SIZES | {"kernel_axes": AXES, "implementation": "dense"}
    rules = (("embed", None), ("heads", "model"), ("kv_heads", None))
    with jax.set_mesh(mesh()), nn.logical_axis_rules(rules):
        if kind == "linen":
            layer = te_mixed_jax.linen.MultiHeadAttention(num_heads=N, **config)
            out, _ = jax.jit(layer.init_with_output)(jax.random.key(0), X)
        else:
            layer = te_mixed_jax.nnx.MultiHeadAttention(
                N, F, **config, rngs=nnx.Rngs(0)
            )
            out = layer(X)
            spec = layer.query.kernel.sharding.spec
            assert spec == jax.sharding.PartitionSpec(None, "model", None)
    assert out.shape == (B, T, O)


def test_an_initializer_that_makes_boxes():
    """Linen's own way to partition parameters works too, alike for all kernels."""
    names = ("embed", "heads", None)
    init = nn.with_partitioning(nn.initializers.lecun_normal(), names)
    layer = te_mixed_jax.linen.MultiHeadAttention(
        num_heads=N, **SIZES, kernel_init=init
    )
    variables = jax.eval_shape(layer.init, jax.random.key(0), X)
    kernel = variables["params"]["query"]["kernel"]
    assert isinstance(kernel, nn.Partitioned)
    assert kernel.names == names
    assert kernel.value.shape == (F, N, H)


# --------------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("config", "error", "match"),
    [
        ({"num_kv_heads": 4}, ValueError, r"`num_kv_heads` .*`num_heads`=6, got 4"),
        ({"num_kv_heads": 0}, ValueError, r"`num_kv_heads` .*`num_heads`=6, got 0"),
        ({"head_dim": None}, ValueError, r"`num_heads` .*10 features .*got 6"),
        ({"head_dim": 5}, ValueError, r"`head_dim` must be even .*got 5"),
        ({"rotary_base": 0}, ValueError, r"`rotary_base` must be positive, got 0"),
        ({"rotary_base": True}, TypeError, r"`rotary_base` .*number .*got True"),
        (
            {"kernel_axes": {"qkv": ("a", "b", "c")}},
            ValueError,
            r"`kernel_axes` .*\"query\", .*got 'qkv'",
        ),
        (
            {"kernel_axes": {"out": ("a", "b")}},
            ValueError,
            r"`kernel_axes\[\"out\"\]` .*three axes .*got \('a', 'b'\)",
        ),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_bad_settings(kind, config, error, match):
    with pytest.raises(error, match=match):
        ref.multi_head_layer(kind, **ROTARY | config)


@pytest.mark.parametrize("argument", ["dropout_rate", "decode"])
def test_what_is_not_there_is_not_accepted(kind, argument):
    extra: dict[str, Any] = {argument: 0}
    with pytest.raises(TypeError, match=argument):
        ref.multi_head_layer(kind, **extra)


def test_the_two_ways_exclude_each_other(kind):
    params, apply = ref.multi_head_layer(kind, **SIZES)
    with pytest.raises(ValueError, match="`attn_mask_type_per_seq` and `policy`"):
        apply(params, X, desc=SELF, policy=te.FULL, **ref.MASK_TYPES)


@pytest.mark.parametrize("rotary_base", [None, 100.0])
def test_a_descriptor_of_another_batch(kind, rotary_base):
    params, apply = ref.multi_head_layer(kind, **SIZES, rotary_base=rotary_base)
    desc = te.from_segment_ids_and_pos(np.ones((3, T), np.int32))
    with pytest.raises(ValueError, match=r"`segment_ids` .*\(2, 11\).*got \(3, 11\)"):
        apply(params, X, desc=desc)


@pytest.mark.parametrize(
    ("inputs", "match"),
    [
        ((X[..., 1:],), r"`inputs_q` .*`in_features`=10 .*\(2, 11, 9\)"),
        ((X, X), r"`inputs_kv` .*`in_kv_features`=9 .*\(2, 11, 10\)"),
    ],
    ids=["inputs_q", "inputs_kv"],
)
def test_nnx_inputs_of_another_size(inputs, match):
    params, apply = ref.multi_head_layer("nnx", **SIZES, in_kv_features=G)
    with pytest.raises(ValueError, match=match):
        apply(params, *inputs)
