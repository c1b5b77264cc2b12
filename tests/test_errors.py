"""Bad input: which error, and that it names the argument, expected and got."""

import enum
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

# What no type checker would let pass.
HALF: Any = 1.5
SIX: Any = 6.0
NONE: Any = None
TEXT: Any = "4"
MASK_TYPES: Any = enum.Enum("AttnMaskType", ["PADDING_MASK"])

B, T, N, K, H = 2, 8, 4, 2, 16


def arrays(**replaced):
    q = jnp.ones((B, T, N, H))
    k = jnp.ones((B, T, K, H))
    return {"query": q, "key": k, "value": k} | replaced


def call(desc=None, *, policy=te.FULL, **rest):
    names = ("query", "key", "value")
    q, k, v = (arrays(**{n: rest[n] for n in names if n in rest})[n] for n in names)
    options = {name: x for name, x in rest.items() if name not in names}
    return te.dot_product_attention(q, k, v, desc, policy=policy, **options)


def ids(*shape, dtype=np.int32):
    return np.ones(shape, dtype)


def both(error, match, f):
    """Raised from the plain call and, at trace time, under jit."""
    with pytest.raises(error, match=match):
        f()
    with pytest.raises(error, match=match):
        jax.jit(f).trace()


# ------------------------------------------------------------------------- q, k, v


@pytest.mark.parametrize(
    ("replaced", "match"),
    [
        ({"query": jnp.ones((T, H))}, r"`query`.*\(\*B, T, N, H\).*\(8, 16\)"),
        (
            {"key": jnp.ones((3, 128, 4, 64))},
            r"`key`.*\(2, S, K, 16\).*\(2, 8, 4, 16\).*\(3, 128, 4, 64\)",
        ),
        ({"key": jnp.ones((B, T, K, H + 1))}, r"`key`.*16\).*\(2, 8, 2, 17\)"),
        ({"key": jnp.ones((T, K, H))}, r"`key`.*\(2, S, K, 16\).*\(8, 2, 16\)"),
        ({"value": jnp.ones((B, T + 1, K, H))}, r"`value`.*\(2, 8, 2, V\).*9, 2, 16"),
        ({"value": jnp.ones((B, T, N, H))}, r"`value`.*\(2, 8, 2, V\).*2, 8, 4, 16"),
        ({"value": jnp.ones((1, T, K, H))}, r"`value`.*\(2, 8, 2, V\).*1, 8, 2, 16"),
    ],
    ids=[
        "query rank",
        "key batch",
        "key head dim",
        "key rank",
        "value length",
        "value heads",
        "value batch",
    ],
)
def test_shapes_that_do_not_match(replaced, match):
    both(ValueError, match, lambda: call(**replaced))


def test_E23_heads_that_do_not_divide():
    """Hq=6 with Hk=4."""
    q, k = jnp.ones((B, T, 6, H)), jnp.ones((B, T, 4, H))
    both(ValueError, r"`key`.*heads.*6.*4", lambda: call(query=q, key=k, value=k))


@pytest.mark.parametrize("name", ["query", "key", "value"])
@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64, jnp.float8_e4m3fn])
def test_dtypes_that_are_not_floats(name, dtype):
    x = arrays()[name].astype(dtype)
    both(TypeError, rf"`{name}`.*{jnp.dtype(dtype).name}", lambda: call(**{name: x}))


def test_values_without_channels():
    value = jnp.ones((B, T, K, 0))
    both(ValueError, r"`value`.*V > 0.*0\)", lambda: call(value=value))


@pytest.mark.parametrize("name", ["key", "value"])
def test_mixed_dtypes(name):
    x = arrays()[name].astype(jnp.bfloat16)
    both(TypeError, rf"`{name}`.*float32.*bfloat16", lambda: call(**{name: x}))


def test_a_list_for_an_array():
    with pytest.raises(TypeError, match=r"`query`.*array.*list"):
        call(query=[[1.0]])


# ------------------------------------------------------------------- B16: descriptors


@pytest.mark.parametrize("rows", [2, 3])
def test_B16_positions_of_the_wrong_rank(rows):
    """[3, B, T] beside ids [B, T] must not be taken for packing."""
    match = rf"`segment_pos`.*\({rows}, 8\).*\(3, {rows}, 8\)"
    both(
        ValueError,
        match,
        lambda: te.from_segment_ids_and_pos(ids(rows, T), ids(3, rows, T)),
    )


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((3, B, T), r"`segment_ids`.*\(2, 8\).*\(3, 2, 8\)"),
        ((3, T), r"`segment_ids`.*\(2, 8\).*\(3, 8\)"),
        ((B, T + 1), r"`segment_ids`.*\(2, 8\).*\(2, 9\)"),
        ((T,), r"`segment_ids`.*\(2, 8\).*\(8,\)"),
    ],
    ids=["rank", "batch", "length", "no batch axis"],
)
def test_B16_ids_that_do_not_fit_the_query(shape, match):
    both(ValueError, match, lambda: call(te.from_segment_ids_and_pos(ids(*shape))))


def test_ids_of_one_row_without_its_batch_axis():
    desc = te.from_segment_ids_and_pos(ids(T))
    both(ValueError, r"got \(8,\).*`x\[None\]`", lambda: call(desc))


def test_tokens_and_heads_swapped():
    x = jnp.ones((B, K, T, H))  # (B, N, T, H)
    desc = te.from_segment_ids_and_pos(ids(B, T))
    both(
        ValueError,
        r"got \(2, 8\).*axes swapped",
        lambda: call(desc, query=x, key=x, value=x),
    )


def test_B16_key_ids_that_do_not_fit_the_key():
    desc = te.from_segment_ids_and_pos((ids(B, T), ids(B, T + 2)))
    both(ValueError, r"`segment_ids\[1\]`.*\(2, 8\).*\(2, 10\)", lambda: call(desc))


def test_one_set_of_ids_for_two_lengths():
    desc = te.from_segment_ids_and_pos(ids(B, T))
    k = jnp.ones((B, T + 2, K, H))
    both(ValueError, r"8.*S=10.*pair", lambda: call(desc, key=k, value=k))


@pytest.mark.parametrize("dtype", [np.float32, np.bool_])
@pytest.mark.parametrize("argument", ["segment_ids", "segment_pos", "policy_ids"])
def test_B16_metadata_that_are_not_integers(argument, dtype):
    """Float ids are a TypeError, also under jit."""
    bad, good = jnp.ones((B, T), dtype), ids(B, T)

    def f():
        if argument == "policy_ids":
            return call(policy=(te.FULL, te.CAUSAL), policy_ids=bad)
        if argument == "segment_pos":
            return te.from_segment_ids_and_pos(good, bad)
        return te.from_segment_ids_and_pos(bad)

    both(TypeError, rf"`{argument}`.*integers.*{jnp.dtype(dtype).name}", f)


def test_ids_that_do_not_fit_int32():
    """2**32 + 1 must not wrap around to 1."""
    with pytest.raises(ValueError, match=r"`segment_ids`.*int32.*4294967297"):
        te.from_segment_ids_and_pos(np.array([[2**32 + 1, 1]]))


def test_a_mask_in_the_place_of_the_descriptor():
    with pytest.raises(TypeError, match=r"`desc`.*`SequenceDescriptor`.*bool"):
        call(jnp.ones((B, 1, T, T), bool))


@pytest.mark.parametrize("lengths", [[[5, 4]], [[9]], [[-1, 3]]], ids=str)
def test_lengths_that_do_not_fit_the_row(lengths):
    with pytest.raises(ValueError, match=r"`q_seqlens`.*8"):
        te.SequenceDescriptor.from_seqlens(np.asarray(lengths), q_len=8)


def test_a_pair_of_lengths():
    lengths = np.array([[3, 2]])
    with pytest.raises(ValueError, match=r"`q_seqlens`.*tuple.*`kv_seqlens`"):
        te.SequenceDescriptor.from_seqlens((lengths, lengths), q_len=6)


def test_a_row_length_that_is_no_integer():
    with pytest.raises(TypeError, match=r"`q_len`.*integer.*6\.0"):
        te.SequenceDescriptor.from_seqlens([[3, 2]], q_len=SIX)


def test_lengths_that_are_not_integers():
    with pytest.raises(TypeError, match=r"`q_seqlens`.*integers.*float64"):
        te.SequenceDescriptor.from_seqlens(np.array([[1.0]]), q_len=8)


def test_check_accepts_what_is_right_and_says_what_is_not():
    """Values that are on a device are looked at by `check` only."""
    te.from_segment_ids_and_pos(jnp.asarray([[1, 1, 0]])).check()
    te.SequenceDescriptor.from_seqlens(jnp.asarray([[3, 5]]), q_len=8).check()
    desc = te.SequenceDescriptor.from_seqlens(jnp.asarray([[1, 2], [3, 9]]), q_len=8)
    with pytest.raises(ValueError, match=r"rows \[1\].*lengths"):
        desc.check()


def test_traced_lengths_that_do_not_fit_give_nan(implementation):
    """Loud, not cut off: NaN in that row, and the other row as it should be."""

    @jax.jit
    def f(lengths):
        desc = te.SequenceDescriptor.from_seqlens(lengths, q_len=T)
        return call(desc, implementation=implementation)

    out = np.asarray(f(jnp.asarray([[3, 9], [3, 5]])))
    real = np.isnan(out[0]).all(axis=(-1, -2))
    assert real.all()
    np.testing.assert_allclose(out[1], 1, rtol=1e-6)


# ------------------------------------------------------------------------- policies


TWO = (te.FULL, te.CAUSAL)
NUMPY: Any = (np.int64(4), np.int32(0))


@pytest.mark.parametrize("index", [-1, 2, 100])
def test_D16_policy_id_out_of_range(index):
    """Host data: an error; it must not be somebody else's policy."""
    desc = te.from_segment_ids_and_pos(ids(B, T))
    policy_ids = ids(B, T)
    policy_ids[1, 3] = index
    with pytest.raises(ValueError, match=rf"`policy_ids`.*0 to 1.*{index}"):
        call(desc, policy=TWO, policy_ids=policy_ids)
    with pytest.raises(ValueError, match=rf"`policy_ids`.*0 to 1.*{index}"):
        call(desc, policy=TWO, policy_ids=policy_ids.tolist())


@pytest.mark.parametrize("shape", [(B, T + 1), (T,), (3, T), (1, B, T)], ids=str)
def test_policy_ids_of_the_wrong_shape(shape):
    both(
        ValueError,
        r"`policy_ids`.*\(2, 8\)",
        lambda: call(policy=TWO, policy_ids=jnp.zeros(shape, jnp.int32)),
    )


def test_policy_ids_per_sequence():
    per_sequence = jnp.zeros((B, 3), jnp.int32)
    both(
        ValueError,
        "per query token, not per sequence",
        lambda: call(policy=TWO, policy_ids=per_sequence),
    )


def test_several_policies_without_policy_ids():
    both(ValueError, r"`policy_ids`.*2 policies.*None", lambda: call(policy=TWO))


def test_no_policy():
    both(ValueError, r"`policy`.*at least one", lambda: call(policy=()))


@pytest.mark.parametrize("policy", ["causal", None, 3, (te.FULL, "causal")], ids=str)
def test_what_is_not_a_policy(policy):
    both(
        TypeError,
        r"`policy(\[1\])?`.*`MaskPolicy`",
        lambda: call(policy=policy, policy_ids=jnp.zeros((B, T), jnp.int32)),
    )


@pytest.mark.parametrize(
    ("policy", "hint"),
    [
        (te.prefix, r"Call it: `prefix\(3\)`"),
        (jnp.int32(1), "Policies are static.*`policy_ids`"),
        (MASK_TYPES.PADDING_MASK, "policies_from_mask"),
    ],
    ids=["a function", "an array", "a mask type"],
)
def test_what_to_write_instead_of_what_is_not_a_policy(policy, hint):
    both(TypeError, hint, lambda: call(policy=policy))


def test_a_traced_policy():
    run = jax.jit(lambda which: call(policy=which))
    with pytest.raises(TypeError, match="Policies are static"):
        run(jnp.int32(1))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (lambda: te.CAUSAL.with_window(-2, 0), ValueError, r"`left`.*-1.*-2"),
        (lambda: te.CAUSAL.with_window(0, -7), ValueError, r"`right`.*-1.*-7"),
        (lambda: te.CAUSAL.with_window(HALF, 0), TypeError, r"`left`.*integer.*1\.5"),
        (
            lambda: te.CAUSAL.with_window(1, NONE),
            TypeError,
            r"`right`.*integer.*None",
        ),
        (lambda: te.prefix(-1), ValueError, r"`length`.*-1"),
        (lambda: te.prefix(HALF), TypeError, r"`length`.*integer.*1\.5"),
        (lambda: te.chunked(0, 1), ValueError, r"`size`.*1.*0"),
        (lambda: te.chunked(4, -2), ValueError, r"`left_chunks`.*-2"),
        (lambda: te.chunked(TEXT, 1), TypeError, r"`size`.*integer.*'4'"),
    ],
)
def test_D1_numbers_of_a_policy(make, error, match):
    """Windows are two integers >= -1; no other value is taken for one."""
    with pytest.raises(error, match=match):
        make()


def test_window_bounds_may_be_numpy_integers():
    assert te.CAUSAL.with_window(*NUMPY) == te.CAUSAL.with_window(4, 0)


# ---------------------------------------------------------------------- mask types (S3)


def mask_types(mapping, windows=None):
    desc = te.from_segment_ids_and_pos(np.array([[1, 1, 2, 2]]))
    return te.policies_from_mask_types(desc, mapping, windows)


def test_S3_unknown_mask_type():
    with pytest.raises(
        ValueError, match=r"`attn_mask_type_per_seq`.*causual.*\"padding_causal\""
    ):
        mask_types({"causual": np.array([[1, 2]])})


def test_S3_window_for_a_mask_type_that_is_not_there():
    with pytest.raises(
        ValueError, match=r"`window_size_per_mask_type`.*padding_causal"
    ):
        mask_types({"padding": np.array([[1, 2]])}, {"padding_causal": (1, 0)})


@pytest.mark.parametrize(
    ("window", "error"),
    [
        ((1,), ValueError),
        ((1, 2, 3), ValueError),
        ((-2, 0), ValueError),
        ((0.5, 0), TypeError),
    ],
    ids=str,
)
def test_S3_window_that_is_not_two_integers(window, error):
    with pytest.raises(error, match=r"`window_size_per_mask_type|`left`"):
        mask_types({"padding": np.array([[1, 2]])}, {"padding": window})


def test_S3_float_ids():
    with pytest.raises(TypeError, match=r"`attn_mask_type_per_seq.*integers.*float64"):
        mask_types({"padding": np.array([[1.0, 2.0]])})


def test_S3_ids_of_the_wrong_shape():
    desc = te.from_segment_ids_and_pos(np.array([[1, 1, 2, 2]] * 2))
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq.*\(3, 2\)"):
        te.policies_from_mask_types(desc, {"padding": np.array([[1, 2]] * 3)})


def test_no_mask_type():
    with pytest.raises(ValueError, match=r"`attn_mask_type_per_seq`"):
        mask_types({})


# -------------------------------------------------------------- scale, implementation


def test_E14_a_traced_scale():
    """A TypeError that says to multiply the query."""
    with pytest.raises(TypeError, match=r"`scale`.*[Mm]ultiply `query`"):
        jax.jit(lambda scale: call(scale=scale))(0.5)
    with pytest.raises(TypeError, match=r"`scale`.*[Mm]ultiply `query`"):
        jax.grad(lambda scale: jnp.sum(call(scale=scale)))(0.5)


@pytest.mark.parametrize(
    ("scale", "error"),
    [("1", TypeError), (1j, TypeError), (np.nan, ValueError), (np.inf, ValueError)],
)
def test_a_scale_that_is_no_number(scale, error):
    both(error, r"`scale`", lambda: call(scale=scale))


def test_scale_may_be_any_real_number_type():
    want = call(scale=0.5)
    for scale in (np.float32(0.5), np.float64(0.5)):
        np.testing.assert_array_equal(call(scale=scale), want)


def test_unknown_implementation():
    both(
        ValueError,
        r"`implementation`.*\"xla\".*\"dense\".*'flash'",
        lambda: call(implementation="flash"),
    )


# ---------------------------------------------------- values that are traced: loud NaN


ROW = np.array([checks.pack(3, 4, total=T)])


def assert_nan_at(got, clean, bad):
    """Output and lse NaN at `bad`, everything else at the bits of a call without."""
    good = ~bad
    assert np.isnan(got.out[0, bad]).all()
    assert np.isnan(got.lse[0, bad]).all()
    np.testing.assert_array_equal(got.out[0, good], clean.out[0, good])
    np.testing.assert_array_equal(got.lse[0, good], clean.lse[0, good])
    np.testing.assert_array_equal(got.dq[0, good], clean.dq[0, good])
    assert np.isfinite(got.dk).all()
    assert np.isfinite(got.dv).all()


@pytest.mark.parametrize("index", [-1, 2, -(2**31), 2**31 - 1])
def test_D16_traced_policy_id_out_of_range(implementation, index):
    """NaN at those tokens and at no other; gradients of the others are finite."""
    data = checks.random_data(1, T, T)
    policy_ids = np.zeros((1, T), np.int32)
    policy_ids[0, [1, 5, 7]] = index  # token 7 is padding
    arguments = {
        "policies": (oracle.FULL, oracle.CAUSAL),
        "implementation": implementation,
    }
    got = checks.run(data, ROW, policy_ids=policy_ids, **arguments)
    clean = checks.run(data, ROW, policy_ids=policy_ids * 0, **arguments)
    assert_nan_at(got, clean, np.isin(np.arange(T), [1, 5]))


@functools.cache
def mask_types_traced(implementation):
    """Jitted results of one row, whose ids of either mask type are traced."""
    data = checks.random_data(1, T, T)

    @jax.jit
    def run(full, causal):
        desc = te.from_segment_ids_and_pos(ROW)
        mapping = {"padding": full, "padding_causal": causal}
        policies, policy_ids = te.policies_from_mask_types(desc, mapping)

        def attend(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, desc),
                policy=policies,
                policy_ids=policy_ids,
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(attend, data.q, data.k, data.v)
        dq, dk, dv = vjp((data.dout, data.dlse))
        return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}

    def numpy_results(full, causal):
        results = run(np.array([full]), np.array([causal]))
        return checks.Result(**{name: np.asarray(x) for name, x in results.items()})

    return numpy_results


@pytest.mark.parametrize(
    ("full", "causal"), [((1, 0), (0, 0)), ((1, 2), (2, 0))], ids=["in none", "in two"]
)
def test_D16_traced_mask_types(implementation, full, causal):
    """Sequence 2 in no mask type or in two: NaN there, sequence 1 as it should be."""
    run = mask_types_traced(implementation)
    assert_nan_at(run(full, causal), run((1, 0), (2, 0)), ROW[0] == 2)


# ----------------------------------------------------------------- context parallelism


def test_outside_of_shard_map():
    x = jnp.ones((B, T, K, H))
    with pytest.raises(ValueError, match=r"`axis_name`.*`jax.shard_map`.*'context'"):
        te.context_parallel.dot_product_attention(x, x, x, axis_name="context")


# ------------------------------------------------------------------------------ explain


def test_explain_says_of_each_implementation_whether_it_would_run():
    """From arrays or from shapes alone."""
    structs = {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays().items()
    }
    for given in (arrays(), structs):
        said = te.explain(given["query"], given["key"], given["value"])
        assert list(said) == ["mosaic", "cudnn", "te", "xla", "dense"]
        assert said["xla"] == said["dense"] == "yes"
        assert said["mosaic"].startswith("no: ")
        assert said["cudnn"].startswith("no: ")
