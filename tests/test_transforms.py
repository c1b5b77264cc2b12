"""jit, scan, while_loop, remat, donation, export, eval_shape, debug flags."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import checks
import oracle
import te_mixed_jax as te

B, T = 2, 40
POLICIES = (te.FULL, te.CAUSAL.with_window(9, 0))
ORACLE_POLICIES = (oracle.FULL, oracle.window(oracle.CAUSAL, 9, 0))


def attend(implementation, q, k, v, ids, policy_ids=None):
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
    return te.dot_product_attention(
        *(q, k, v, desc),
        policy=POLICIES,
        policy_ids=jnp.maximum(ids, 0) % 2 if policy_ids is None else policy_ids,
        implementation=implementation,
    )


def loss(implementation, q, k, v, ids, weight):
    return jnp.sum(attend(implementation, q, k, v, ids) * weight)


def ids_of(seed):
    rng = np.random.default_rng(seed)
    return np.sort(rng.integers(-1, 5, (B, T)), axis=1).astype(np.int32)


def exact(data, ids):
    """Output and gradients of `attend`, from the oracle."""
    mask = oracle.mask(
        ids, ids, policies=ORACLE_POLICIES, policy_ids=np.maximum(ids, 0) % 2
    )
    out, _ = oracle.attention(data.q, data.k, data.v, mask, 8**-0.5)
    grads = oracle.gradients(data.q, data.k, data.v, mask, 8**-0.5, data.dout)
    return out, (grads.dq, grads.dk, grads.dv)


def assert_close(got, want):
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-5)


@pytest.fixture
def data():
    return checks.random_data(B, T, T)


# --------------------------------------------------------------------- control flow


def test_jit_of_everything(implementation, data):
    """Descriptor made inside, ids an argument: equal to the oracle."""
    out, grads = exact(data, ids_of(0))
    run = jax.jit(functools.partial(attend, implementation))
    assert_close(run(data.q, data.k, data.v, ids_of(0)), out)
    run = jax.jit(jax.grad(functools.partial(loss, implementation), (0, 1, 2)))
    assert_close(run(data.q, data.k, data.v, ids_of(0), data.dout), grads)


def test_scan_over_layers(implementation, data):
    """A scan of three layers, with gradients, equals the unrolled loop."""
    scales = jnp.asarray([0.5, 1.0, 2.0])
    ids = ids_of(1)
    v = jnp.tile(data.v, (1, 1, 1, 2))[..., :8]

    def layer(x, scale):
        out = attend(implementation, x * scale, data.k, v, ids)
        return x + out, jnp.sum(out)

    def scanned(x):
        x, sums = jax.lax.scan(layer, x, scales)
        return jnp.sum(x**2) + jnp.sum(sums)

    def unrolled(x):
        total = 0.0
        for scale in scales:
            x, part = layer(x, scale)
            total += part
        return jnp.sum(x**2) + total

    got = jax.jit(jax.value_and_grad(scanned))(data.q)
    want = jax.jit(jax.value_and_grad(unrolled))(data.q)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


def test_scan_over_batches_of_ids(implementation, data):
    """The descriptor is what the scan scans over."""
    ids = np.stack([ids_of(seed) for seed in range(4)])

    def body(carry, ids):
        return carry, attend(implementation, data.q, data.k, data.v, ids)

    _, outs = jax.jit(lambda ids: jax.lax.scan(body, 0, ids))(ids)
    for i in range(4):
        assert_close(outs[i], exact(data, ids[i])[0])


def test_while_loop(implementation, data):
    """Positions in the carry move by one a turn; equal to the last turn alone."""
    ids = ids_of(2)

    def attend_at(turn):
        pos = jnp.broadcast_to(jnp.arange(T), (B, T))
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(
            (ids, ids), (pos + turn, pos)
        )
        return te.dot_product_attention(
            *(data.q, data.k, data.v, desc),
            policy=te.CAUSAL,
            implementation=implementation,
        )

    def run():
        def body(state):
            turn, _ = state
            return turn + 1, attend_at(turn)

        start = 0, jnp.zeros_like(data.dout)
        return jax.lax.while_loop(lambda state: state[0] < 4, body, start)[1]

    pos = np.broadcast_to(np.arange(T), (B, T))
    mask = oracle.mask(ids, ids, pos + 3, pos, (oracle.CAUSAL,))
    want, _ = oracle.attention(data.q, data.k, data.v, mask, 8**-0.5)
    assert_close(jax.jit(run)(), want)


def test_cond(implementation, data):
    """Either branch may hold an attention, and its gradient."""
    out, grads = exact(data, ids_of(0))

    def f(q, flag):
        return jax.lax.cond(
            flag,
            lambda q: attend(implementation, q, data.k, data.v, ids_of(0)),
            lambda q: q[..., :6],
            q,
        )

    assert_close(jax.jit(f)(data.q, True), out)
    dq = jax.jit(jax.grad(lambda q: jnp.sum(f(q, True) * data.dout)))(data.q)
    assert_close(dq, grads[0])


# ---------------------------------------------------------------- E8: rematerialisation


NOTHING = jax.checkpoint_policies.nothing_saveable
EVERYTHING = jax.checkpoint_policies.everything_saveable


def _named():
    return jax.checkpoint_policies.save_only_these_names(*te.CHECKPOINT_NAMES)


def _offload():
    return jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=list(te.CHECKPOINT_NAMES),
        offload_src="device",
        offload_dst="pinned_host",
    )


REMAT = {
    "names": _named,
    "nothing": lambda: NOTHING,
    "dots": lambda: jax.checkpoint_policies.dots_saveable,
    "everything": lambda: EVERYTHING,
    "offload": _offload,
}


@pytest.mark.parametrize(
    "saved",
    [
        *("names", "nothing", "offload"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("dots", "everything")),
    ],
)
def test_E8_gradients_under_remat(implementation, data, saved):
    """Equal to those without checkpoint, whatever is kept."""
    _, grads = exact(data, ids_of(0))
    f = jax.checkpoint(functools.partial(loss, implementation), policy=REMAT[saved]())
    run = jax.jit(jax.grad(f, (0, 1, 2)))
    assert_close(run(data.q, data.k, data.v, ids_of(0), data.dout), grads)


@pytest.mark.parametrize(
    ("saved", "forwards"), [("names", 1), ("everything", 1), ("nothing", 2)]
)
@pytest.mark.parametrize("implementation", [None, "xla"])
def test_E8_number_of_forwards(implementation, data, saved, forwards):
    """With the names saved the kernel must not run again in the backward pass."""

    # A layer around the attention: its result is needed, not only its cotangent.
    def f(q, k, v, ids, weight):
        return jnp.sum(jnp.sin(attend(implementation, q, k, v, ids)) * weight)

    f = jax.checkpoint(f, policy=REMAT[saved]())
    jaxpr = jax.make_jaxpr(jax.grad(f, (0, 1, 2)))(
        data.q, data.k, data.v, ids_of(0), data.dout
    )
    assert checks.count(jaxpr, te.fused_attn_fwd_p) == forwards
    assert checks.count(jaxpr, te.fused_attn_bwd_p) == 1


def test_checkpoint_names_are_two_strings():
    assert isinstance(te.CHECKPOINT_NAMES, tuple)
    assert [type(name) for name in te.CHECKPOINT_NAMES] == [str, str]
    assert "CHECKPOINT_NAMES" in (te.dot_product_attention.__doc__ or "")


def test_saved_residuals_are_linear_in_length(data):
    """The backward pass keeps q, k, v, out, lse and per-token arrays: no T x T."""
    f = functools.partial(loss, "xla")
    _, vjp = jax.vjp(
        lambda q, k, v: f(q, k, v, ids_of(0), data.dout), data.q, data.k, data.v
    )
    sizes = [x.size for x in jax.tree.leaves(vjp) if hasattr(x, "size")]
    assert sizes
    assert max(sizes) <= max(data.q.size, data.dout.size)


# ---------------------------------------------------------------------------- X1 to X3


def test_X1_export_round_trip(implementation, data):
    """Serialise, load, call with other ids: ids stay arguments."""

    def f(q, k, v, ids, weight):
        return jax.value_and_grad(functools.partial(loss, implementation), (0, 1, 2))(
            q, k, v, ids, weight
        )

    arguments = (data.q, data.k, data.v, ids_of(0), data.dout)
    exported = export.export(jax.jit(f))(*arguments)
    loaded = export.deserialize(exported.serialize(vjp_order=0))
    for seed in (0, 3):
        out, grads = exact(data, ids_of(seed))
        value, got = loaded.call(data.q, data.k, data.v, ids_of(seed), data.dout)
        np.testing.assert_allclose(
            value, np.sum(out * np.asarray(data.dout)), rtol=1e-4, atol=1e-4
        )
        assert_close(got, grads)


def test_X1_export_for_other_platforms_from_here(data):
    """Lowering asks no device."""
    f = jax.jit(functools.partial(attend, "xla"))
    exported = export.export(f, platforms=("cpu", "cuda", "tpu"))(
        data.q, data.k, data.v, ids_of(0)
    )
    loaded = export.deserialize(exported.serialize())
    assert_close(
        loaded.call(data.q, data.k, data.v, ids_of(0)), exact(data, ids_of(0))[0]
    )


@pytest.mark.parametrize(
    "dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)]
)
def test_X2_eval_shape_agrees(implementation, dtype):
    """Shapes and dtypes of outputs and gradients without running anything."""
    data = checks.random_data(B, T, T, dtype=dtype)

    def f(q, k, v, ids):
        def g(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, te.from_segment_ids_and_pos(ids)),
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(g, q, k, v)
        return out, lse, *vjp((out, lse))

    arguments = (data.q, data.k, data.v, ids_of(0))
    abstract = jax.eval_shape(f, *arguments)
    for a, b in zip(abstract, jax.jit(f)(*arguments), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)


def test_X3_donated_arguments(implementation):
    """Two consecutive calls with fresh arrays are right."""

    def f(q, k, v, ids):
        return attend(implementation, q, k, v, ids) + 0, q + 1, k + 1, v + 1

    run = jax.jit(f, donate_argnums=(0, 1, 2))
    for seed in (0, 1):
        data = checks.random_data(B, T, T, seed=seed)
        want, _ = exact(data, ids_of(seed))
        q = jnp.array(data.q, copy=True)
        k, v = jnp.array(data.k, copy=True), jnp.array(data.v, copy=True)
        out, *_ = run(q, k, v, ids_of(seed))
        assert q.is_deleted()
        assert_close(out, want)


# ------------------------------------------------------------------------------ others


@pytest.mark.parametrize("flag", ["debug_nans", "debug_infs"])
def test_a_row_without_keys_under_the_checkers(implementation, data, flag):
    """jit of gradients; the -inf of an empty row must not show in what is returned."""
    ids = ids_of(0).copy()
    ids[1] = 0
    out, grads = exact(data, ids)
    f = jax.jit(jax.grad(functools.partial(loss, implementation), (0, 1, 2)))
    with getattr(jax, flag)(True):
        assert_close(attend(implementation, data.q, data.k, data.v, ids), out)
        assert_close(f(data.q, data.k, data.v, ids, data.dout), grads)


@pytest.mark.parametrize(
    "promotion", ["strict", pytest.param("standard", marks=pytest.mark.slow)]
)
def test_strict_promotion(implementation, promotion):
    """No implicit promotion of dtypes or ranks inside."""
    data = checks.random_data(B, T, T, dtype=jnp.bfloat16)
    ids = jnp.asarray(ids_of(0))
    with jax.numpy_dtype_promotion(promotion), jax.numpy_rank_promotion("raise"):
        desc = te.from_segment_ids_and_pos(ids)

        def f(q, k, v):
            out, lse = te.dot_product_attention(
                *(q, k, v, desc),
                policy=(te.FULL, te.prefix(3), te.chunked(4, 1), te.CAUSAL),
                policy_ids=jnp.maximum(ids, 0) % 4,
                implementation=implementation,
                return_lse=True,
            )
            return jnp.sum(out.astype(jnp.float32)) + jnp.sum(
                jnp.where(jnp.isfinite(lse), lse, 0)
            )

        grads = jax.grad(f, (0, 1, 2))(data.q, data.k, data.v)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in grads)


def test_check_tracer_leaks(implementation, data):
    """Nothing traced is kept in a cache."""
    with jax.checking_leaks():
        f = jax.jit(jax.grad(functools.partial(loss, implementation)))
        f(data.q, data.k, data.v, ids_of(0), data.dout)


@pytest.mark.parametrize("implementation", [None, "xla", "dense"])
def test_mapped_jit_inside_jit_inside_grad(implementation, data):
    """grad of jit of vmap of jit: per-row calls equal the batched one."""

    @jax.jit
    def row(q, k, v, ids):
        return attend(implementation, q, k, v, ids)

    @jax.jit
    def total(q, k, v):
        return jnp.sum(jax.vmap(row)(q, k, v, ids_of(0)) * data.dout)

    _, grads = exact(data, ids_of(0))
    assert_close(jax.grad(total, (0, 1, 2))(data.q, data.k, data.v), grads)
