"""The layers `DotProductAttention`, linen and nnx: policies, mask types, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import checks
import flax_reference as ref
import oracle
import te_mixed_jax as te
from flax_reference import B, H, K, N, S, T, V

CROSS = te.SequenceDescriptor.from_segment_ids_and_pos((ref.IDS, ref.KV_IDS))
SCALE = 0.7


@pytest.fixture(params=["linen", "nnx"])
def kind(request):
    return request.param


def arrays():
    return (
        jnp.asarray(ref.normal(B, T, N, H, seed=1)),
        jnp.asarray(ref.normal(B, S, K, H, seed=2)),
        jnp.asarray(ref.normal(B, S, K, V, seed=3)),
    )


def exact(policies, policy_ids=None, ids=(ref.IDS, ref.KV_IDS), scale=H**-0.5):
    mask = oracle.mask(*ids, policies=policies, policy_ids=policy_ids)
    q, k, v = (np.asarray(x) for x in arrays())
    return oracle.attention(q, k, v, mask, scale)[0]


def assert_close(got, want):
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("implementation", [None, "dense"], ids=str)
def test_a_policy_per_sequence(kind, implementation):
    """Against the oracle, with grouped heads and V != H."""
    call = {"policy": ref.POLICIES, "policy_ids": ref.POLICY_IDS}
    got = ref.attend(kind, *arrays(), CROSS, call=call, implementation=implementation)
    assert_close(got, exact(ref.ORACLE_POLICIES, ref.POLICY_IDS))


def test_mask_types_equal_policies_bit_for_bit(kind):
    """Windows too."""
    by_policy = {"policy": ref.POLICIES, "policy_ids": ref.POLICY_IDS}
    got, want = (
        ref.attend(kind, *arrays(), CROSS, call=call)
        for call in (ref.MASK_TYPES, by_policy)
    )
    np.testing.assert_array_equal(got, want)


def test_a_window_changes_the_result(kind):
    """So the comparison above cannot pass by ignoring the window."""
    no_windows = {k: v for k, v in ref.MASK_TYPES.items() if k.startswith("attn")}
    got, other = (
        ref.attend(kind, *arrays(), CROSS, call=call)
        for call in (ref.MASK_TYPES, no_windows)
    )
    assert np.abs(np.asarray(got - other)).max() > 0.1


def test_a_uniform_batch_has_one_policy(kind):
    got = ref.attend(kind, *arrays(), CROSS, policy=te.CAUSAL)
    assert_close(got, exact((oracle.CAUSAL,)))


def test_a_policy_in_the_call_replaces_that_of_the_layer(kind):
    call = {"policy": te.FULL}
    got = ref.attend(kind, *arrays(), CROSS, policy=te.CAUSAL, call=call)
    assert_close(got, exact((oracle.FULL,)))


def test_mask_types_replace_the_policy_of_the_layer(kind):
    call = ref.MASK_TYPES
    got = ref.attend(kind, *arrays(), CROSS, policy=te.CAUSAL, call=call)
    assert_close(got, exact(ref.ORACLE_POLICIES, ref.POLICY_IDS))


@pytest.mark.parametrize("sequence", [tuple, list])
def test_the_layers_policies_and_the_calls_ids(kind, sequence):
    """Policies are settings of a model; their ids come with the data."""
    call = {"policy_ids": ref.POLICY_IDS}
    got = ref.attend(kind, *arrays(), CROSS, policy=sequence(ref.POLICIES), call=call)
    assert_close(got, exact(ref.ORACLE_POLICIES, ref.POLICY_IDS))


def test_without_a_descriptor_a_row_is_one_sequence(kind):
    ids = np.ones((B, T)), np.ones((B, S))
    assert_close(ref.attend(kind, *arrays()), exact((oracle.FULL,), ids=ids))


def test_scale(kind):
    got = ref.attend(kind, *arrays(), CROSS, scale=SCALE)
    assert_close(got, exact((oracle.FULL,), scale=SCALE))


@pytest.mark.parametrize(("implementation", "fused"), [("xla", 1), ("dense", 0)])
def test_implementation(kind, implementation, fused):
    def call(*args):
        return ref.attend(kind, *args, CROSS, implementation=implementation)

    jaxpr = jax.make_jaxpr(call)(*arrays())
    assert checks.count(jaxpr, te.fused_attn_fwd_p) == fused


def test_mask_types_are_traced(kind):
    """Under jit, with descriptor and ids as arguments."""

    @jax.jit
    def call(ids, mask_types):
        desc = te.from_segment_ids_and_pos((ids, jnp.asarray(ref.KV_IDS)))
        types = ref.MASK_TYPES | {"attn_mask_type_per_seq": mask_types}
        return ref.attend(kind, *arrays(), desc, call=types)

    got = call(ref.IDS, ref.MASK_TYPES["attn_mask_type_per_seq"])
    assert_close(got, exact(ref.ORACLE_POLICIES, ref.POLICY_IDS))


@pytest.mark.parametrize(
    "other",
    [{"policy": te.FULL}, {"policy_ids": ref.POLICY_IDS}],
    ids=lambda x: next(iter(x)),
)
def test_the_two_ways_exclude_each_other(kind, other):
    (name,) = other
    with pytest.raises(
        ValueError, match=f"`attn_mask_type_per_seq` and `{name}`.*got both"
    ):
        ref.attend(kind, *arrays(), CROSS, call=ref.MASK_TYPES | other)


def test_windows_without_mask_types(kind):
    call = {"window_size_per_mask_type": {"padding_causal": (2, 0)}}
    with pytest.raises(
        ValueError, match="`window_size_per_mask_type` goes with `attn_mask_type_per_"
    ):
        ref.attend(kind, *arrays(), CROSS, call=call)


def test_mask_types_without_a_descriptor(kind):
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq`.*`desc`.*got None"):
        ref.attend(kind, *arrays(), call=ref.MASK_TYPES)


def test_no_parameters(kind):
    """The layer can stand in a model without changing its checkpoints."""
    layer = ref.KINDS[kind].DotProductAttention(policy=te.CAUSAL)
    if kind == "linen":
        leaves = jax.eval_shape(layer.init, jax.random.key(0), *arrays())
    else:
        leaves = nnx.state(layer)
    assert not jax.tree.leaves(leaves)
