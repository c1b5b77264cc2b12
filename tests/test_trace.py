"""What the compiler is given: one program for all metadata, and O(T) memory."""

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

# Compile as users do: see conftest.py.
OPTIMISED = True

MIXED = (te.FULL, te.CAUSAL.with_window(300, 0), te.chunked(64, 2))


def loss(q, k, v, ids, policy_ids, weight, *, policy=MIXED, implementation=None):
    desc = te.from_segment_ids_and_pos(ids)
    out = te.dot_product_attention(
        *(q, k, v, desc),
        policy=policy,
        policy_ids=policy_ids,
        implementation=implementation,
    )
    return jnp.sum(out.astype(jnp.float32) * weight)


def shapes(T, *, N=1, H=64, dtype=jnp.bfloat16):
    array = jax.ShapeDtypeStruct((1, T, N, H), dtype)
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32)
    return array, array, array, ids, ids, array


GRAD = jax.grad(loss, (0, 1, 2))


# ------------------------------------------------------- one program for all metadata


def _batch(seed, B, T):
    """Ids, positions and policy ids of a batch that is like no other one."""
    rng = np.random.default_rng(seed)
    ids = np.zeros((B, T), np.int32)
    for b in range(B):
        lengths = rng.integers(0, T // (1 + seed % 7) + 2, 1 + seed % 11)
        row = [int(rng.integers(1, 2**31 - 1)) for _ in lengths]
        row = np.repeat(row, lengths)[:T]
        ids[b, : len(row)] = row
    return ids, rng.integers(0, 3, (B, T)).astype(np.int32)


def test_one_compilation_for_twenty_batches(implementation):
    """Number of sequences, lengths, ids and policy ids differ; results are right."""
    policies = (oracle.FULL, oracle.CAUSAL, oracle.window(oracle.FULL, 3, 1))
    data = checks.random_data(2, 24, 24)
    traces = []

    @jax.jit
    def run(q, k, v, ids, policy_ids):
        traces.append(None)
        desc = te.from_segment_ids_and_pos(ids)

        def f(q, k, v):
            return te.dot_product_attention(
                *(q, k, v, desc),
                policy=tuple(checks.package_policy(p) for p in policies),
                policy_ids=policy_ids,
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(f, q, k, v)
        return out, lse, *vjp((data.dout, data.dlse))

    for seed in range(20):
        ids, policy_ids = _batch(seed, 2, 24)
        results = run(data.q, data.k, data.v, ids, policy_ids)
        got = checks.Result(
            **dict(
                zip(
                    ("out", "lse", "dq", "dk", "dv"),
                    map(np.asarray, results),
                    strict=True,
                )
            )
        )
        mask = oracle.mask(ids, ids, policies=policies, policy_ids=policy_ids)
        checks.assert_matches_oracle(got, data, mask, 8**-0.5)
    assert len(traces) == 1


def test_one_compilation_of_the_eager_call():
    """Called outside jit, new metadata of a known shape compile nothing."""
    data = checks.random_data(2, 24, 24)

    def call(seed):
        ids, policy_ids = _batch(seed, 2, 24)
        return te.dot_product_attention(
            *(data.q, data.k, data.v, te.from_segment_ids_and_pos(ids)),
            policy=MIXED,
            policy_ids=policy_ids,
        )

    call(0)
    compiled = []

    def listen(event: str, duration_secs: float, **_: Any) -> None:
        if event.endswith("backend_compile_duration"):
            compiled.append(duration_secs)

    jax.monitoring.register_event_duration_secs_listener(listen)
    for seed in range(1, 6):
        call(seed)
    count = len(compiled)
    # The listener does hear a compilation when there is one.
    jax.jit(lambda x: x * 3 + 1)(jnp.ones(7)).block_until_ready()
    assert count == 0
    assert len(compiled) > 0


def test_E18_the_same_executable_with_changing_metadata(implementation):
    """100 calls, each with other ids; back to the first gives the first bits. S3."""
    data = checks.random_data(2, 24, 24)
    policies = (oracle.FULL, oracle.CAUSAL, oracle.window(oracle.FULL, 3, 1))
    arguments = {"policies": policies, "implementation": implementation}
    ids, policy_ids = _batch(0, 2, 24)
    first = checks.run(data, ids, policy_ids=policy_ids, **arguments)
    for seed in range(1, 100):
        ids, policy_ids = _batch(seed, 2, 24)
        got = checks.run(data, ids, policy_ids=policy_ids, **arguments)
        mask = oracle.mask(ids, ids, policies=policies, policy_ids=policy_ids)
        out, _ = oracle.attention(data.q, data.k, data.v, mask, 8**-0.5)
        np.testing.assert_allclose(got.out, out, rtol=1e-5, atol=2e-6)
    ids, policy_ids = _batch(0, 2, 24)
    again = checks.run(data, ids, policy_ids=policy_ids, **arguments)
    checks.assert_bitwise(again, first, "back to the first metadata")


def test_no_host_transfer():
    """A step with its metadata on the device moves nothing to or from the host."""
    data = checks.random_data(2, 24, 24)
    ids, policy_ids = (jnp.asarray(x) for x in _batch(1, 2, 24))
    run = jax.jit(jax.value_and_grad(functools.partial(loss, policy=MIXED), (0, 1, 2)))
    arguments = (data.q, data.k, data.v, ids, policy_ids, data.dout)
    jax.block_until_ready(run(*arguments))
    with jax.transfer_guard("disallow"):
        jax.block_until_ready(run(*arguments))
        # Eagerly too: making a descriptor and checking it looks at no value.
        te.from_segment_ids_and_pos(ids)


# --------------------------------------------------------------------- no T x S array


def _elements(aval):
    return int(np.prod(getattr(aval, "shape", ()), dtype=np.int64))


@pytest.mark.parametrize("implementation", [None, "xla"])
def test_no_array_of_queries_times_keys_in_the_jaxpr(implementation):
    """Nothing outside the primitives is larger than q, and nothing inside quadratic."""
    T = 8192
    f = functools.partial(GRAD, implementation=implementation)
    jaxpr = jax.make_jaxpr(f)(*shapes(T, H=8))
    largest = max(
        _elements(var.aval) for eqn in checks.equations(jaxpr) for var in eqn.outvars
    )
    assert largest <= 2 * T * 8
    lowered = jax.jit(f).lower(*shapes(T, H=8)).as_text()
    assert f"{T}x{T}" not in lowered


def test_the_same_test_sees_the_mask_of_the_dense_implementation():
    """The counter-check of the test above."""
    T = 512
    f = functools.partial(GRAD, implementation="dense")
    assert f"{T}x{T}" in jax.jit(f).lower(*shapes(T, H=8)).as_text()


@functools.cache
def _temp_bytes(T, policy):
    f = jax.jit(functools.partial(GRAD, policy=policy))
    analysis = f.lower(*shapes(T)).compile().memory_analysis()
    assert analysis is not None
    return analysis.temp_size_in_bytes


@pytest.mark.parametrize(
    "policy",
    [
        pytest.param(MIXED, id="mixed"),
        pytest.param((te.CAUSAL,), id="causal", marks=pytest.mark.slow),
        pytest.param(
            (te.CAUSAL.with_window(127, 0),), id="window", marks=pytest.mark.slow
        ),
    ],
)
def test_E15_compiled_memory_is_linear(policy):
    """At most 2.2 times per doubling of T, and below 200 MB at 65536; also E16."""
    temp = [_temp_bytes(T, policy) for T in (32768, 65536, 131072)]
    for half, whole in itertools.pairwise(temp):
        assert whole <= 2.2 * half, temp
    assert temp[1] < 200e6, temp


def test_E16_compiling_needs_no_more_than_running():
    """T = 131072, lower and compile only: fast, and still linear memory."""
    assert _temp_bytes(131072, MIXED) < 400e6


# ------------------------------------------------------------------ lowering elsewhere


@pytest.mark.parametrize("platform", ["cuda", "tpu"])
@pytest.mark.parametrize("implementation", [None, "xla", "dense"])
def test_lowering_for_another_platform_from_here(platform, implementation):
    """Inspecting a program for a GPU or a TPU takes no GPU or TPU."""
    f = functools.partial(GRAD, implementation=implementation)
    traced = jax.jit(f).trace(*shapes(256))
    text = traced.lower(lowering_platforms=(platform,)).as_text()
    assert "stablehlo" in text or "func.func" in text


def test_abstract_evaluation_asks_no_device(monkeypatch):
    """Shapes are known without looking at a device or a library version."""

    def refuse(*_, **__):
        raise AssertionError("a device was asked for while tracing")

    for name in ("devices", "local_devices", "default_backend", "device_count"):
        monkeypatch.setattr(jax, name, refuse)
    dq, dk, dv = jax.eval_shape(GRAD, *shapes(96))
    assert dq.shape == dk.shape == dv.shape == (1, 96, 1, 64)


# ------------------------------------------------------------------- what stands there


def test_the_primitives_stand_in_the_jaxpr():
    """One forward and one backward for a gradient, whatever the policies."""
    value_and_grad = jax.value_and_grad(loss, (0, 1, 2))
    jaxpr = jax.make_jaxpr(value_and_grad)(*shapes(96))
    assert checks.count(jaxpr, te.fused_attn_fwd_p) == 1
    assert checks.count(jaxpr, te.fused_attn_bwd_p) == 1


def test_the_operands_of_the_forward_primitive():
    """(q, k, v, q_ids, q_lo, q_hi, kv_ids, kv_pos) and one static parameter."""
    jaxpr = jax.make_jaxpr(loss)(*shapes(96))
    (eqn,) = [e for e in checks.equations(jaxpr) if e.primitive is te.fused_attn_fwd_p]
    assert [len(x.aval.shape) for x in eqn.invars] == [4] * 3 + [2] * 5
    assert all(x.aval.dtype == jnp.int32 for x in eqn.invars[3:])
    assert set(eqn.params) == {"config"}
    assert hash(eqn.params["config"]) == hash(eqn.params["config"])


def test_the_absent_lse_cotangent_is_absent():
    """No zero-filled operand stands in for an lse that nobody used."""
    jaxpr = jax.make_jaxpr(GRAD)(*shapes(96))
    (eqn,) = [e for e in checks.equations(jaxpr) if e.primitive is te.fused_attn_bwd_p]

    def with_lse(q, k, v):
        out, lse = te.dot_product_attention(q, k, v, return_lse=True)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    jaxpr = jax.make_jaxpr(jax.grad(with_lse))(*shapes(96)[:3])
    (other,) = [
        e for e in checks.equations(jaxpr) if e.primitive is te.fused_attn_bwd_p
    ]
    assert len(other.invars) == len(eqn.invars) + 1


def test_policies_add_no_call():
    """Twelve policies are one forward, not twelve."""
    policy = tuple(te.CAUSAL.with_window(n, 0) for n in range(12))
    jaxpr = jax.make_jaxpr(functools.partial(loss, policy=policy))(*shapes(96))
    assert checks.count(jaxpr, te.fused_attn_fwd_p) == 1
