"""vmap: any argument mapped or not, on any axis, to any depth, equals a loop.

The batching rule is that of the primitives, so most tests run "xla" only; "dense" is
plain jnp.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import checks
import oracle
import te_mixed_jax as te

# All sizes differ, so that a mixed-up axis shows.
V, B, T, S, N, K, H, VALUE = 3, 2, 128, 96, 8, 4, 16, 10
NAMES = ("q", "k", "v", "q_ids", "kv_ids", "q_pos", "kv_pos", "policy_ids")
POLICIES = (te.FULL, te.CAUSAL.with_window(20, 0), te.CAUSAL_BOTTOM_RIGHT)


def _rows(rng, length):
    """Packed rows [V, B, length] with 2 to 4 sequences, holes and padding."""
    rows = np.zeros((V, B, length), np.int32)
    for v, b in np.ndindex(V, B):
        cuts = np.sort(rng.choice(np.arange(8, length - 4), 1 + v + b, replace=False))
        rows[v, b] = np.searchsorted(cuts, np.arange(length), side="right") + 1
        rows[v, b, rng.choice(length, 7, replace=False)] = 0
    return rows


def _examples():
    """One mapped array per argument, examples first; all examples differ."""
    rng = np.random.default_rng(0)

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    q_pos = np.stack([np.arange(T), np.arange(T)[::-1], np.arange(T) // 2])
    kv_pos = np.stack([np.arange(S), np.arange(S)[::-1], np.arange(S) + 1])
    return {
        "q": normal(V, B, T, N, H),
        "k": normal(V, B, S, K, H),
        "v": normal(V, B, S, K, VALUE),
        "q_ids": _rows(rng, T),
        "kv_ids": _rows(rng, S),
        "q_pos": np.repeat(q_pos[:, None].astype(np.int32), B, axis=1),
        "kv_pos": np.repeat(kv_pos[:, None].astype(np.int32), B, axis=1),
        "policy_ids": rng.integers(0, len(POLICIES), (V, B, T)).astype(np.int32),
    }


EXAMPLES = _examples()
WEIGHT = np.random.default_rng(1).normal(size=(B, T, N, VALUE)).astype(np.float32)
LSE_WEIGHT = np.random.default_rng(2).normal(size=(B, T, N)).astype(np.float32)

EACH_ALONE = [frozenset({name}) for name in NAMES]
ALL_BUT_ONE = [frozenset(NAMES) - {name} for name in NAMES]
MIXES = [*EACH_ALONE, *ALL_BUT_ONE, frozenset(NAMES)]
# Positions made inside: the case that the package exists for.
INSIDE = [mix - {"q_pos", "kv_pos"} for mix in MIXES]
INSIDE = sorted({mix for mix in INSIDE if mix}, key=sorted)
JITTED = [frozenset(mix) for mix in ({"q_ids"}, {"kv_ids"}, {"q", "k", "v"}, INSIDE[0])]


def label(mix):
    if len(mix) == 1:
        return f"only {min(mix)}"
    left_out = [name for name in NAMES if name not in mix]
    return f"all but {' '.join(left_out)}" if left_out else "all"


def attend(implementation, q, k, v, q_ids, kv_ids, q_pos, kv_pos, policy_ids):
    """Output and lse of one example; `q_pos` None: positions are made inside."""
    desc = te.SequenceDescriptor.from_segment_ids_and_pos(
        (q_ids, kv_ids), None if q_pos is None else (q_pos, kv_pos)
    )
    out, lse = te.dot_product_attention(
        *(q, k, v, desc),
        policy=POLICIES,
        policy_ids=policy_ids,
        implementation=implementation,
        return_lse=True,
    )
    return out, jnp.where(jnp.isfinite(lse), lse, 0)


def loss(implementation, *arguments):
    out, lse = attend(implementation, *arguments)
    return jnp.sum(out * WEIGHT) + jnp.sum(lse * LSE_WEIGHT)


def value_and_grads(implementation, *arguments):
    """(out, lse), (dq, dk, dv) of one example."""

    def f(q, k, v):
        results = attend(implementation, q, k, v, *arguments[3:])
        return jnp.sum(results[0] * WEIGHT) + jnp.sum(results[1] * LSE_WEIGHT), results

    grads, results = jax.grad(f, (0, 1, 2), has_aux=True)(*arguments[:3])
    return results, grads


@functools.cache
def one_example(implementation):
    return jax.jit(functools.partial(value_and_grads, implementation))


def arguments_of(mix, example, *, inside):
    """The arguments of one example: unmapped ones are those of example 0."""
    return [
        None
        if inside and name in ("q_pos", "kv_pos")
        else EXAMPLES[name][example if name in mix else 0]
        for name in NAMES
    ]


@functools.cache
def loop(implementation, mix, inside):
    """What the mapped call must equal: a Python loop over the examples."""
    run = one_example(implementation)
    with jax.disable_jit(False):
        results = [run(*arguments_of(mix, i, inside=inside)) for i in range(V)]
    return jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *results)


def mapped_arguments(mix, axis=0, *, inside):
    """Arguments with the mapped axis moved to `axis`, and their in_axes."""
    arguments, in_axes = [], []
    for name in NAMES:
        if inside and name in ("q_pos", "kv_pos"):
            arguments.append(None)
            in_axes.append(None)
        elif name in mix:
            arguments.append(np.moveaxis(EXAMPLES[name], 0, axis))
            in_axes.append(axis)
        else:
            arguments.append(EXAMPLES[name][0])
            in_axes.append(None)
    return arguments, tuple(in_axes)


def assert_same(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-5, atol=2e-5)


def test_the_loop_itself_is_right(implementation):
    """The examples differ, and each is what the oracle says."""
    (out, lse), (dq, dk, dv) = loop(implementation, frozenset(NAMES), False)
    policies = (
        oracle.FULL,
        oracle.window(oracle.CAUSAL, 20, 0),
        oracle.BOTTOM_RIGHT,
    )
    for i in range(V):
        example = {name: array[i] for name, array in EXAMPLES.items()}
        q, k, v = (example.pop(name) for name in "qkv")
        mask = oracle.mask(
            example["q_ids"],
            example["kv_ids"],
            example["q_pos"],
            example["kv_pos"],
            policies,
            example["policy_ids"],
        )
        want, want_lse = oracle.attention(q, k, v, mask, 1 / 4)
        exact = oracle.gradients(q, k, v, mask, 1 / 4, WEIGHT, LSE_WEIGHT)
        want_lse[np.isinf(want_lse)] = 0
        pairs = (
            *((out, want), (lse, want_lse)),
            *((dq, exact.dq), (dk, exact.dk), (dv, exact.dv)),
        )
        for got, wanted in pairs:
            np.testing.assert_allclose(got[i], wanted, rtol=1e-4, atol=2e-5)
    for array in (out, lse, dq, dk, dv):
        assert (array[0] != array[1]).any()
        assert (array[1] != array[2]).any()


# --------------------------------------------------- S1, A1, A2: the in_axes matrix


@pytest.mark.parametrize("mix", MIXES, ids=label)
def test_A2_vmap_of_grad(implementation, eager, mix):
    """Forward and per-example gradients, for every argument mapped alone or not."""
    arguments, in_axes = mapped_arguments(mix, inside=False)
    run = jax.vmap(functools.partial(value_and_grads, implementation), in_axes)
    assert_same(run(*arguments), loop(implementation, mix, False))


@pytest.mark.parametrize("mix", INSIDE, ids=label)
def test_A1_positions_made_inside(implementation, eager, mix):
    """The starting bug: derived positions lack the axis that the ids have."""
    arguments, in_axes = mapped_arguments(mix, inside=True)
    run = jax.vmap(functools.partial(value_and_grads, implementation), in_axes)
    assert_same(run(*arguments), loop(implementation, mix, True))


@pytest.mark.parametrize(
    "inside",
    [
        pytest.param(True, id="derived"),
        pytest.param(False, id="given", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("mix", JITTED, ids=label)
def test_A1_jit_of_vmap_of_grad(mix, inside):
    """The same mixes compiled as a whole."""
    arguments, in_axes = mapped_arguments(mix, inside=inside)
    run = jax.jit(jax.vmap(functools.partial(value_and_grads, "xla"), in_axes))
    assert_same(run(*arguments), loop("xla", mix, inside))


@pytest.mark.parametrize("axis", [1, -1])
@pytest.mark.parametrize("mix", MIXES, ids=label)
def test_A2_other_axes(eager, mix, axis):
    """in_axes 1 and -1; out_axes 1 for the output and -1 for the rest."""
    arguments, in_axes = mapped_arguments(mix, axis, inside=False)
    out_axes = ((1, -1), (0, 1, -1))
    run = jax.vmap(functools.partial(value_and_grads, "xla"), in_axes, out_axes)
    got = jax.tree.map(
        lambda x, at: np.moveaxis(np.asarray(x), at, 0), run(*arguments), out_axes
    )
    assert_same(got, loop("xla", mix, False))


def test_A2_a_different_axis_for_each_argument():
    axes = (3, 1, -1, 0, 2, 1, -1, 2)
    arguments = [
        np.moveaxis(EXAMPLES[name], 0, axis)
        for name, axis in zip(NAMES, axes, strict=True)
    ]
    run = jax.jit(jax.vmap(functools.partial(value_and_grads, "xla"), axes))
    assert_same(run(*arguments), loop("xla", frozenset(NAMES), False))


@pytest.mark.parametrize("mix", MIXES, ids=label)
def test_A2_grad_of_vmap(eager, mix):
    """The gradient of an unmapped argument is the sum over the examples."""
    arguments, in_axes = mapped_arguments(mix, inside=False)

    def total(q, k, v):
        one = functools.partial(loss, "xla")
        return jnp.sum(jax.vmap(one, in_axes, axis_size=V)(q, k, v, *arguments[3:]))

    grads = jax.grad(total, (0, 1, 2))(*arguments[:3])
    _, want = loop("xla", mix, False)
    for name, got, per_example in zip("qkv", grads, want, strict=True):
        wanted = per_example if name in mix else per_example.sum(0)
        np.testing.assert_allclose(got, wanted, rtol=5e-5, atol=5e-5, err_msg=name)


@pytest.mark.parametrize(
    "size",
    [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 4, 5, 6))],
    ids=lambda n: f"{n} arguments mapped",
)
def test_A2_every_other_mix(eager, size):
    """The rest of the 255 mixes, forward and gradients, as traced and batched."""
    for names in itertools.combinations(NAMES, size):
        mix = frozenset(names)
        arguments, in_axes = mapped_arguments(mix, inside=False)
        one = functools.partial(value_and_grads, "xla")
        results, grads = jax.vmap(one, in_axes)(*arguments)
        assert_same((results, grads), loop("xla", mix, False))


@pytest.mark.parametrize(
    "mix",
    [frozenset(NAMES), frozenset({"q_ids", "kv_ids"}), frozenset({"v", "kv_pos"})],
    ids=label,
)
def test_A1_vmap_of_vmap(eager, mix):
    """A leading axis of 1, then the examples: two levels, each mapped on its own."""
    arguments, in_axes = mapped_arguments(mix, inside=False)
    one = functools.partial(value_and_grads, "xla")
    run = jax.vmap(jax.vmap(one, in_axes), in_axes)
    twice = [
        x[None] if name in mix else x for name, x in zip(NAMES, arguments, strict=True)
    ]
    got = jax.tree.map(lambda x: x[0], run(*twice))
    assert_same(got, loop("xla", mix, False))


def test_A1_jit_of_vmap_of_vmap():
    arguments, in_axes = mapped_arguments(frozenset({"q_ids", "k"}), inside=True)
    one = functools.partial(value_and_grads, "xla")
    run = jax.jit(jax.vmap(jax.vmap(one, in_axes), in_axes))
    twice = [
        x if axis is None else x[None]
        for x, axis in zip(arguments, in_axes, strict=True)
    ]
    got = jax.tree.map(lambda x: x[0], run(*twice))
    assert_same(got, loop("xla", frozenset({"q_ids", "k"}), True))


def test_A2_the_outer_and_the_inner_map_take_different_arguments(eager):
    """q, ids by the outer map; k, positions by the inner one; v by both."""
    outer, inner = {"q", "v", "q_ids", "kv_ids"}, {"k", "v", "q_pos", "kv_pos"}
    one = functools.partial(value_and_grads, "xla")
    in_axes = [tuple(0 if n in mix else None for n in NAMES) for mix in (outer, inner)]
    # `v` of outer example i and inner example j is that of example (i + j) % V.
    both = np.stack([np.roll(EXAMPLES["v"], -i, axis=0) for i in range(V)])
    arguments = [
        both
        if name == "v"
        else EXAMPLES[name]
        if name in outer | inner
        else EXAMPLES[name][0]
        for name in NAMES
    ]
    got = jax.vmap(jax.vmap(one, in_axes[1]), in_axes[0])(*arguments)
    for i, j in itertools.product(range(V), range(V)):
        example = [
            EXAMPLES["v"][(i + j) % V]
            if name == "v"
            else EXAMPLES[name][i if name in outer else j if name in inner else 0]
            for name in NAMES
        ]
        with jax.disable_jit(False):
            want = one_example("xla")(*example)
        assert_same(
            jax.tree.map(lambda x, i=i, j=j: x[i, j], got),
            jax.tree.map(np.asarray, want),
        )


def test_A2_without_lse_and_without_policy_ids(implementation):
    """The plain call: one policy, no lse; ids mapped, the rest shared."""

    def one(q_ids, kv_ids):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids))
        q, k, v = (jnp.asarray(EXAMPLES[name][0]) for name in "qkv")
        return te.dot_product_attention(
            *(q, k, v, desc),
            policy=te.CAUSAL,
            implementation=implementation,
        )

    ids = EXAMPLES["q_ids"], EXAMPLES["kv_ids"]
    got = jax.vmap(one)(*ids)
    want = np.stack([one(*(x[i] for x in ids)) for i in range(V)])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("sides", ["both", "query", "key", "positions shared"])
@pytest.mark.parametrize("transform", ["forward", "vmap of grad", "grad of vmap"])
def test_S1_mapped_ids_of_one_example(eager, sides, transform):
    """One mapped example: a leading axis of 1, and one side may need broadcasting."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        rng.normal(size=(1, 2, 128, 4, 16)).astype(np.float32) for _ in range(4)
    )
    ids = np.asarray([[checks.pack(60, 40, total=128), checks.pack(128)]], np.int32)
    pos = np.stack([oracle.positions(row) for row in ids[0]]).astype(np.int32)

    def one(q, k, v, ids):
        q_ids = ids if sides != "key" else jnp.asarray(np.where(pos >= 0, 1, 0))
        kv_ids = ids if sides != "query" else jnp.ones((2, 128), jnp.int32)
        shared = (pos, pos) if sides == "positions shared" else None
        desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids), shared)
        return te.dot_product_attention(
            q, k, v, desc, policy=te.CAUSAL, implementation="xla"
        )

    def loss(q, k, v, ids):
        return jnp.sum(one(q, k, v, ids) * weight[0])

    first = (q[0], k[0], v[0], ids[0])
    grad = jax.grad(loss, (0, 1, 2))
    if transform == "forward":
        got, want = jax.vmap(one)(q, k, v, ids), one(*first)
    elif transform == "vmap of grad":
        got, want = jax.vmap(grad)(q, k, v, ids), grad(*first)
    else:
        total = lambda q, k, v: jnp.sum(jax.vmap(loss)(q, k, v, ids))  # noqa: E731
        got, want = jax.grad(total, (0, 1, 2))(q, k, v), grad(*first)
    assert_same(got, jax.tree.map(lambda x: np.asarray(x)[None], want))


# ------------------------------------------------------------- A1 as it was reported


def test_A1_as_reported():
    """bf16, three examples with other packings; positions derived inside."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(3, 2, 128, 4, 64)), jnp.bfloat16) for _ in range(4)
    )
    lengths = ((60, 40), (128,), (30, 30, 30))
    ids = jnp.asarray(
        [
            [checks.pack(*x, total=128), checks.pack(*reversed(x), total=128)]
            for x in lengths
        ],
        jnp.int32,
    )

    def one(q, k, v, ids):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
        return te.dot_product_attention(
            q, k, v, desc, policy=te.CAUSAL, implementation="xla"
        )

    def with_grads(q, k, v, ids, weight):
        out, vjp = jax.vjp(lambda q, k, v: one(q, k, v, ids), q, k, v)
        return out, *vjp(weight)

    run = jax.jit(with_grads)
    want = [run(q[i], k[i], v[i], ids[i], weight[i]) for i in range(3)]
    want = [
        np.stack([np.asarray(x, np.float32) for x in y])
        for y in zip(*want, strict=False)
    ]
    got = jax.jit(jax.vmap(with_grads))(q, k, v, ids, weight)
    assert got[0].shape == (3, 2, 128, 4, 64)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == jnp.bfloat16
        # One rounding to bf16 may go the other way.
        np.testing.assert_allclose(np.asarray(a, np.float32), b, rtol=8e-3, atol=1e-4)


def test_A1_key_ids_built_inside():
    """Queries with id 1 see all 128 keys, all other rows are exactly 0."""
    ids = EXAMPLES["q_ids"]
    rng = np.random.default_rng(0)
    q, k, v = (
        jnp.asarray(rng.normal(size=(B, T, 4, 8)).astype(np.float32)) for _ in range(3)
    )

    def one(q_ids):
        kv_ids = jnp.ones((B, T), jnp.int32)
        desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids))
        return te.dot_product_attention(q, k, v, desc, implementation="xla")

    got = np.asarray(jax.jit(jax.vmap(one))(ids))
    want = np.stack([one(ids[i]) for i in range(V)])
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-5)
    assert not got[ids != 1].any()
    mask = np.ones((B, T, T), bool)
    exact, _ = oracle.attention(q, k, v, mask, 8**-0.5)
    for i in range(V):
        first = ids[i] == 1
        np.testing.assert_allclose(got[i][first], exact[first], rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------ A4, A6, A7, A9


@pytest.mark.parametrize(
    "policy", [te.CAUSAL, pytest.param(te.FULL, marks=pytest.mark.slow)]
)
def test_A4_constant_cotangent(eager, policy):
    """The cotangent of a sum is an unmapped constant; the saved arrays are mapped."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 1, 4, 2, 8)).astype(np.float32) for _ in range(3))

    def one(q, k, v):
        return jnp.sum(
            te.dot_product_attention(q, k, v, policy=policy, implementation="xla")
        )

    for transform in (jax.grad, jax.value_and_grad):
        f = transform(one, (0, 1, 2))
        got = jax.vmap(f)(q, k, v)
        loop = [f(q[i], k[i], v[i]) for i in range(2)]
        want = jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *loop)
        assert_same(got, want)
    dv = got[1][2]
    np.testing.assert_allclose(np.asarray(dv).sum(axis=2), 4, rtol=1e-5)


def test_A6_shared_ids_and_an_odd_head_size():
    """16 mapped examples, ids not mapped: jit of vmap, and jit of its vjp."""
    rng = np.random.default_rng(0)
    q, k, v, weight = (
        jnp.asarray(rng.normal(size=(16, 1, 512, 16, 48)), jnp.bfloat16)
        for _ in range(4)
    )
    ids = jnp.asarray([checks.pack(200, 250, total=512)], jnp.int32)

    def one(q, k, v, ids):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
        return te.dot_product_attention(q, k, v, desc)

    def with_grads(f, q, k, v, weight):
        out, vjp = jax.vjp(lambda *x: f(*x, ids), q, k, v)
        return out, *vjp(weight)

    mapped = jax.vmap(one, in_axes=(0, 0, 0, None))
    got = jax.jit(functools.partial(with_grads, mapped))(q, k, v, weight)
    run = jax.jit(functools.partial(with_grads, one))
    for i in (0, 7, 15):
        want = run(q[i], k[i], v[i], weight[i])
        for a, b in zip(got, want, strict=True):
            a, b = (np.asarray(x, np.float32) for x in (a[i], b))
            assert np.isfinite(a).all()
            np.testing.assert_allclose(a, b, rtol=8e-3, atol=1e-4)


@pytest.mark.parametrize(
    "ids_mapped",
    ["both", *(pytest.param(x, marks=pytest.mark.slow) for x in ("outer", "inner"))],
)
def test_A7_two_mapped_axes(ids_mapped):
    """Two nested maps equal one call on the arrays reshaped to B=12."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 3, 2, 16, 2, 8)).astype(np.float32) for _ in "qkv")
    ids = rng.integers(-1, 3, (2, 3, 2, 16)).astype(np.int32)
    inner_axis, outer_axis = 0, 0
    if ids_mapped == "outer":
        ids, inner_axis = ids[:, 0], None
    elif ids_mapped == "inner":
        ids, outer_axis = ids[0], None

    def one(q, k, v, ids):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)

        def f(q, k, v):
            out = te.dot_product_attention(
                *(q, k, v, desc), policy=te.CAUSAL, implementation="xla"
            )
            return jnp.sum(out**2), out

        grads, out = jax.grad(f, (0, 1, 2), has_aux=True)(q, k, v)
        return out, *grads

    run = jax.vmap(
        jax.vmap(one, in_axes=(0, 0, 0, inner_axis)), in_axes=(0, 0, 0, outer_axis)
    )
    got = jax.jit(run)(q, k, v, ids)
    if ids_mapped == "outer":
        ids = np.repeat(ids[:, None], 3, axis=1)
    elif ids_mapped == "inner":
        ids = np.repeat(ids[None], 2, axis=0)
    flat = [x.reshape(12, *x.shape[3:]) for x in (q, k, v, ids)]
    want = jax.jit(one)(*flat)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(
            np.asarray(a).reshape(b.shape), b, rtol=2e-5, atol=2e-5
        )


def test_A7_no_batch_axis_under_vmap():
    """Mapping rank-3 arrays equals the call with a batch axis."""
    names = ("q", "k", "v", "q_ids", "kv_ids", "policy_ids")
    arrays = [EXAMPLES[name][0] for name in names]

    def one(q, k, v, q_ids, kv_ids, policy_ids):
        return attend("xla", q, k, v, q_ids, kv_ids, None, None, policy_ids)

    assert_same(jax.vmap(one)(*arrays), jax.tree.map(np.asarray, one(*arrays)))


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("length", "ids"),
    [(128, (50, 70)), pytest.param(4, (4,), marks=pytest.mark.slow)],
)
def test_A9_grouped_heads_under_vmap(length, ids):
    """x (2, 4, 128) mapped, projections shared, Hq=4, Hk=2, D=64; it hung."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, length, 128)).astype(np.float32)
    params = {
        name: (rng.normal(size=(128, heads, 64)) / 12).astype(np.float32)
        for name, heads in (("q", 4), ("k", 2), ("v", 2))
    }
    weight = rng.normal(size=(length, 4, 64)).astype(np.float32)
    row = np.asarray(checks.pack(*ids, total=length), np.int32)

    def one(params, x):
        q, k, v = (jnp.einsum("td,dnh->tnh", x, params[name]) for name in "qkv")
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(row)
        out = te.dot_product_attention(q, k, v, desc, implementation="xla")
        return jnp.sum(out * weight)

    f = jax.jit(jax.value_and_grad(one))
    got = jax.vmap(f, in_axes=(None, 0))(params, x)
    loop = [f(params, x[i]) for i in range(2)]
    want = jax.tree.map(lambda *y: np.stack([np.asarray(z) for z in y]), *loop)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-3)


# --------------------------------------------------------- jacrev, and what is traced


def test_jacrev(implementation):
    """Only the cotangent is mapped: every row of the Jacobian against the oracle."""
    rng = np.random.default_rng(0)
    q = rng.normal(size=(1, 5, 4, 3)).astype(np.float32)
    k = rng.normal(size=(1, 6, 2, 3)).astype(np.float32)
    v = rng.normal(size=(1, 6, 2, 2)).astype(np.float32)
    q_ids, kv_ids = np.asarray([[1, 1, 2, 2, 0]]), np.asarray([[2, 1, 1, 2, 0, 2]])

    def one(q, k, v):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos((q_ids, kv_ids))
        out, lse = te.dot_product_attention(
            *(q, k, v, desc),
            policy=te.CAUSAL,
            implementation=implementation,
            return_lse=True,
        )
        return out, jnp.where(jnp.isfinite(lse), lse, 0)

    jacobians = jax.jacrev(one, (0, 1, 2))(q, k, v)
    mask = oracle.mask(q_ids, kv_ids, policies=(oracle.CAUSAL,))
    shapes = ((1, 5, 4, 2), (1, 5, 4))
    for result, shape in enumerate(shapes):
        for index in np.ndindex(shape):
            basis = [np.zeros(s) for s in shapes]
            basis[result][index] = 1
            want = oracle.gradients(q, k, v, mask, 3**-0.5, *basis)
            for got, exact in zip(
                jacobians[result], (want.dq, want.dk, want.dv), strict=True
            ):
                np.testing.assert_allclose(got[index], exact, rtol=1e-4, atol=1e-5)


def test_jacrev_under_vmap_under_jit():
    """Cotangents mapped inside, ids outside."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.normal(size=(2, 4, 2, 3)).astype(np.float32) for _ in range(3))
    ids = np.asarray([[[1, 1, 2, 0]] * 2, [[1, 2, 1, 2], [0, 3, 3, 3]], [[1] * 4] * 2])

    def one(ids):
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids)
        return jax.jacrev(
            lambda q, k, v: te.dot_product_attention(
                q, k, v, desc, implementation="xla"
            ),
            (0, 1, 2),
        )(q, k, v)

    got = jax.jit(jax.vmap(one))(ids)
    loop = [one(ids[i]) for i in range(3)]
    assert_same(
        got, jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), *loop)
    )


def test_a_mapped_axis_is_a_batch_axis():
    """One forward and one backward of V x B rows, not V of them."""
    arguments, in_axes = mapped_arguments(frozenset({"q_ids"}), inside=True)
    one = functools.partial(value_and_grads, "xla")
    jaxpr = jax.make_jaxpr(jax.vmap(one, in_axes))(*arguments)
    for primitive in (te.fused_attn_fwd_p, te.fused_attn_bwd_p):
        found = [e for e in checks.equations(jaxpr) if e.primitive is primitive]
        assert len(found) == 1
        for operand in found[0].invars:
            assert operand.aval.shape[:2] == (V, B)


def test_vmap_over_no_example(implementation):
    """A mapped axis of size 0 gives empty results."""
    arguments, in_axes = mapped_arguments(frozenset(NAMES), inside=False)
    run = jax.vmap(functools.partial(value_and_grads, implementation), in_axes)
    (out, lse), grads = run(*(x[:0] for x in arguments))
    assert out.shape == (0, B, T, N, VALUE)
    assert lse.shape == (0, B, T, N)
    assert grads[1].shape == (0, B, S, K, H)


@pytest.mark.parametrize("spmd_axis_name", [None, "examples"])
def test_vmap_with_an_axis_name(spmd_axis_name):
    """Collectives over the mapped axis work around the call."""
    arguments, in_axes = mapped_arguments(frozenset({"q", "q_ids"}), inside=True)

    def one(*arguments):
        out, _ = attend("xla", *arguments)
        return jax.lax.psum(out, "examples")

    if spmd_axis_name is None:
        got = jax.vmap(one, in_axes, axis_name="examples")(*arguments)
        (out, _), _ = loop("xla", frozenset({"q", "q_ids"}), True)
        np.testing.assert_allclose(got[0], out.sum(0), rtol=1e-4, atol=1e-4)
        return
    mesh = jax.make_mesh((1,), ("examples",))
    with jax.set_mesh(mesh):
        got = jax.jit(
            jax.vmap(
                lambda *x: attend("xla", *x)[0],
                in_axes,
                spmd_axis_name="examples",
            )
        )(*arguments)
    (out, _), _ = loop("xla", frozenset({"q", "q_ids"}), True)
    np.testing.assert_allclose(got, out, rtol=2e-5, atol=2e-5)
