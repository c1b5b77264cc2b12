"""Meshes: equal to one device, and nothing large travels. On 8 virtual CPU devices."""

import collections
import functools
import re
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import checks
import oracle
import te_mixed_jax as te
from te_mixed_jax import _partitioning, context_parallel
from test_random_rows import MIXED_POLICIES, calls

P = PartitionSpec
B, T, S, H, VALUE = 8, 48, 40, 16, 12
POLICIES = (te.CAUSAL, te.FULL, te.prefix(3), te.chunked(4, 1), te.CAUSAL_BOTTOM_RIGHT)
IDS, ROWS = P(), P("data")


@pytest.fixture(scope="module", autouse=True)
def eight_devices() -> None:
    if len(jax.devices("cpu")) < 8:
        pytest.skip("needs 8 virtual CPU devices: the backend was started before")


def arrays(N: int, K: int) -> dict[str, jax.Array]:
    """The arguments of `value_and_gradients`, and their cotangent."""
    rng = np.random.default_rng(N * K)

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32))

    q_ids, kv_ids = (
        jnp.asarray(np.sort(rng.integers(0, 4, (B, n)), axis=1)) for n in (T, S)
    )
    return {
        "q": normal(B, T, N, H),
        "k": normal(B, S, K, H),
        "v": normal(B, S, K, VALUE),
        "dout": normal(B, T, N, VALUE),
        "q_ids": q_ids,
        "kv_ids": kv_ids,
        "policy_ids": (q_ids + jnp.arange(B)[:, None]) % len(POLICIES),
    }


def attend(q, k, v, q_ids, kv_ids, policy_ids, *, implementation=None):
    return te.dot_product_attention(
        *(q, k, v, te.from_segment_ids_and_pos((q_ids, kv_ids))),
        policy=POLICIES,
        policy_ids=policy_ids,
        implementation=implementation,
        return_lse=True,
    )


def value_and_gradients(
    q, k, v, dout, q_ids, kv_ids, policy_ids, *, attend: Callable = attend
):
    """Output, dq, dk, dv; the lse counts too."""

    def loss(q, k, v):
        out, lse = attend(q, k, v, q_ids, kv_ids, policy_ids)
        return jnp.sum(out * dout) + jnp.sum(
            jnp.where(lse > -1e9, jnp.sin(lse), 0)
        ), out

    grads, out = jax.grad(loss, (0, 1, 2), has_aux=True)(q, k, v)
    return out, *grads


@functools.cache
def on_one_device(N: int, K: int) -> list[np.ndarray]:
    return [np.asarray(x) for x in jax.jit(value_and_gradients)(**arrays(N, K))]


def assert_same(got: Any, want: Any) -> None:
    for name, a, b in zip(("out", "dq", "dk", "dv"), got, want, strict=True):
        np.testing.assert_allclose(np.asarray(a), b, atol=1e-5, rtol=1e-5, err_msg=name)


def mesh_of(
    data: int, tensor: int, kind: AxisType = AxisType.Auto
) -> jax.sharding.Mesh:
    return jax.make_mesh((data, tensor), ("data", "tensor"), axis_types=(kind, kind))


def placed(mesh, N: int, K: int, metadata: PartitionSpec) -> dict[str, jax.Array]:
    """Rows along "data", heads along "tensor" where they can be."""
    heads = P("data", None, "tensor")
    keys = heads if K % mesh.shape["tensor"] == 0 else P("data")
    specs = {"q": heads, "k": keys, "v": keys, "dout": heads}
    return {
        name: jax.device_put(x, NamedSharding(mesh, specs.get(name, metadata)))
        for name, x in arrays(N, K).items()
    }


def travelling(program: str | None) -> set[str]:
    """Names of the collectives in compiled HLO; those of integers say so."""
    assert program
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    lines = re.findall(rf"= (.*?) ({kinds})(?:-start)?\(", program)
    return {
        kind if re.search(r"\b(f|bf)\d", types) else f"{kind} of integers"
        for types, kind in lines
    }


SPLITS = [(8, 1), (4, 2), (2, 4), (1, 8)]


@pytest.mark.parametrize(
    ("N", "K", "data", "tensor", "metadata"),
    [
        pytest.param(
            *(*heads, *split, metadata),
            marks=() if split == everyday else pytest.mark.slow,
        )
        for heads, metadata, everyday in (
            ((8, 8), ROWS, (4, 2)),
            ((16, 8), IDS, (2, 4)),
        )
        for split in SPLITS
    ],
)
def test_jit_computes_where_the_data_is(N, K, data, tensor, metadata) -> None:
    arguments = placed(mesh_of(data, tensor), N, K, metadata)
    compiled = jax.jit(value_and_gradients).lower(**arguments).compile()
    got = compiled(**arguments)
    assert_same(got, on_one_device(N, K))
    assert not travelling(compiled.as_text())  # ids and positions neither
    for x, argument in zip(got, "qqkv", strict=True):
        wanted = arguments[argument].sharding
        assert x.sharding.is_equivalent_to(wanted, x.ndim)


@pytest.mark.parametrize(
    ("K", "data", "tensor"),
    [
        (2, 2, 4),
        *(
            pytest.param(K, *split, marks=pytest.mark.slow)
            for K in (1, 2)
            for split in SPLITS[1:]
            if (K, split) != (2, (2, 4))
        ),
    ],
)
def test_devices_share_a_key_head(K, data, tensor) -> None:
    """More devices than key heads: only gradients of keys and values are summed."""
    arguments = placed(mesh_of(data, tensor), 8, K, IDS)
    compiled = jax.jit(value_and_gradients).lower(**arguments).compile()
    assert_same(compiled(**arguments), on_one_device(8, K))
    shared = {"all-reduce"} if K % tensor else set()
    assert travelling(compiled.as_text()) == shared


def test_heads_that_cannot_be_split_are_right() -> None:
    arguments = placed(mesh_of(4, 2), 6, 3, ROWS)
    assert_same(jax.jit(value_and_gradients)(**arguments), on_one_device(6, 3))


def split_by_jit(q, k, v, desc, *, policy_ids, split=(2, 4), **settings):
    """Rows and query heads over as many devices, key heads where they can be."""
    arguments = q, k, v, desc, policy_ids
    mesh, heads = mesh_of(*split), P("data", None, "tensor")
    keys = heads if k.shape[2] % split[1] == 0 else ROWS
    specs = heads, keys, keys, *jax.tree.map(lambda _: ROWS, (desc, policy_ids))
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    *arrays, policy_ids = jax.lax.with_sharding_constraint(arguments, shardings)
    return te.dot_product_attention(*arrays, policy_ids=policy_ids, **settings)


def split_by_shard_map(q, k, v, desc, *, policy_ids, **settings):
    """Rows over four devices, heads over two."""

    def local(q, k, v, desc, policy_ids):
        return te.dot_product_attention(
            *(q, k, v, desc), policy_ids=policy_ids, **settings
        )

    heads = P("data", None, "tensor")
    mapped = jax.shard_map(
        local,
        mesh=mesh_of(4, 2),
        in_specs=(heads, heads, heads, ROWS, ROWS),
        out_specs=heads,
    )
    return mapped(q, k, v, desc, policy_ids)


# Two queries a key head: on one device with it, and on two devices that share it.
@hypothesis.given(
    calls(
        [
            (2, 24, 17, {"N": 8, "K": 4, "H": 8, "V": 5}, False),
            (2, 24, 24, {"N": 4, "K": 2, "H": 8, "V": 5}, True),
        ],
        [MIXED_POLICIES] * 2,
    )
)
def test_any_rows_split_by_jit(call) -> None:
    checks.check(**call, implementation="xla", exact_shape=True, attention=split_by_jit)


@pytest.mark.parametrize(("K", "shared"), [(4, set()), (2, {"all-reduce"})])
def test_vmap_over_sharded_rows(K, shared) -> None:
    """The mapped axis is whole on each device: nothing more travels for it."""
    arguments = placed(mesh_of(2, 4), 8, K, ROWS)
    pairs = {name: jnp.stack([x, x[::-1]]) for name, x in arguments.items()}
    run = jax.jit(jax.vmap(lambda x: value_and_gradients(**x)))
    got = run(pairs)
    assert travelling(run.lower(pairs).compile().as_text()) == shared
    want = on_one_device(8, K)
    assert_same([x[0] for x in got], want)
    assert_same([x[1] for x in got], [x[::-1] for x in want])


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_batch_axes_behind_the_first_are_split(kind) -> None:
    """Folding all of them into one would gather the rows."""
    mesh = mesh_of(2, 4, kind)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, 8, 4, ROWS)
        pairs = {name: jnp.stack([x, x[::-1]]) for name, x in arguments.items()}
        run = jax.jit(value_and_gradients)
        got = run(**pairs)
        assert not travelling(run.lower(**pairs).compile().as_text())
    want = on_one_device(8, 4)
    assert_same([x[0] for x in got], want)
    assert_same([x[1] for x in got], [x[::-1] for x in want])


@pytest.mark.parametrize(
    ("implementation", "check_vma", "metadata"),
    [
        ("xla", True, IDS),
        ("xla", True, ROWS),
        ("xla", False, IDS),
        ("dense", True, IDS),
        ("dense", False, ROWS),
    ],
)
def test_shard_map(implementation, check_vma, metadata) -> None:
    mesh = mesh_of(4, 2)
    heads = P("data", None, "tensor")

    def local(q, k, v, *rows):
        if metadata == IDS:
            at = jax.lax.axis_index("data") * (B // 4)
            rows = [jax.lax.dynamic_slice_in_dim(x, at, B // 4) for x in rows]
        return attend(q, k, v, *rows, implementation=implementation)

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(heads, heads, heads, metadata, metadata, metadata),
        out_specs=(heads, heads),
        check_vma=check_vma,
    )
    run = jax.jit(functools.partial(value_and_gradients, attend=mapped))
    assert_same(run(**arrays(8, 4)), on_one_device(8, 4))


@pytest.mark.parametrize("implementation", ["xla", "dense"])
def test_gradients_of_replicated_keys_are_summed_once(implementation) -> None:
    """All devices along "data" attend to the same two rows of keys."""
    given = arrays(8, 4)
    k, v, kv_ids = (given[name][:2] for name in ("k", "v", "kv_ids"))
    heads, shared = P("data", None, "tensor"), P(None, None, "tensor")

    def local(q, k, v, dout, q_ids, kv_ids, policy_ids):
        return value_and_gradients(
            *(q, k, v, dout, q_ids, kv_ids, policy_ids),
            attend=functools.partial(attend, implementation=implementation),
        )

    mapped = jax.shard_map(
        local,
        mesh=mesh_of(4, 2),
        in_specs=(heads, shared, shared, heads, ROWS, P(), ROWS),
        out_specs=(heads, heads, shared, shared),
    )
    rows = (given[name] for name in ("dout", "q_ids"))
    got = jax.jit(mapped)(given["q"], k, v, *rows, kv_ids, given["policy_ids"])
    repeated = {"k": k, "v": v, "kv_ids": kv_ids}
    repeated = {n: jnp.concatenate([x] * 4) for n, x in repeated.items()}
    out, dq, dk, dv = jax.jit(value_and_gradients)(**{**given, **repeated})
    dk, dv = (x.reshape(4, 2, *x.shape[1:]).sum(0) for x in (dk, dv))
    assert_same(got, (out, dq, dk, dv))


@pytest.mark.parametrize(
    ("K", "data", "tensor", "metadata"),
    [
        (4, 4, 2, IDS),
        (1, 2, 4, ROWS),
        pytest.param(4, 4, 2, ROWS, marks=pytest.mark.slow),
        pytest.param(8, 1, 8, IDS, marks=pytest.mark.slow),
    ],
)
def test_explicit_axes(K, data, tensor, metadata) -> None:
    mesh = mesh_of(data, tensor, AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = placed(mesh, 8, K, metadata)
        got = jax.jit(value_and_gradients)(**arguments)
    assert got[0].sharding.spec[:3] == ("data", None, "tensor")
    assert_same(got, on_one_device(8, K))


@pytest.mark.parametrize(
    ("K", "spec", "what"),
    [
        (8, P("data", "tensor"), r"`query` must be sharded along its batch and heads"),
        (3, P("data", None, "tensor"), r"`key` must have a number of heads .* got 3"),
    ],
)
def test_explicit_axes_that_cannot_be_honoured(K, spec, what) -> None:
    mesh = mesh_of(4, 2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        q = jax.device_put(
            jnp.ones((B, T, 6 if K == 3 else 8, H)), NamedSharding(mesh, spec)
        )
        k = jax.device_put(jnp.ones((B, T, K, H)), NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match=what):
            te.dot_product_attention(q, k, k)


@pytest.mark.parametrize(
    "name",
    [
        *("q", "q_ids"),
        *(pytest.param(x, marks=pytest.mark.slow) for x in ("k", "policy_ids", None)),
    ],
)
def test_explicit_axes_of_one_argument(name) -> None:
    """The others are whole: also when that is the query, or all of them."""
    mesh = mesh_of(4, 2, AxisType.Explicit)
    with jax.set_mesh(mesh):
        arguments = {
            n: jax.device_put(
                x, NamedSharding(mesh, P("data") if n in (name, "dout") else P())
            )
            for n, x in arrays(8, 4).items()
        }
        got = jax.jit(jax.grad(lambda q, k, v, a: attend(q, k, v, **a)[0].sum(), 0))(
            *(arguments[n] for n in "qkv"),
            {n: arguments[n] for n in ("q_ids", "kv_ids", "policy_ids")},
        )
    given = arrays(8, 4)
    ones = {**given, "dout": jnp.ones_like(given["dout"])}

    def loss(q):
        rows = (ones[n] for n in ("q_ids", "kv_ids", "policy_ids"))
        return attend(q, ones["k"], ones["v"], *rows)[0].sum()

    np.testing.assert_allclose(got, jax.jit(jax.grad(loss))(ones["q"]), atol=1e-5)


JITTED = pytest.mark.parametrize("jitted", [True, False], ids=["jit", "eager"])


@JITTED
def test_positions_of_rows_along_explicit_axes(jitted) -> None:
    """They lie as the ids do."""
    ids = np.random.default_rng(0).integers(-1, 4, (4, 2, T))
    want = [[oracle.positions(row) for row in rows] for rows in ids]

    def positions(ids):
        return te.from_segment_ids_and_pos(ids).segment_pos[0]

    with jax.set_mesh(mesh_of(4, 2, AxisType.Explicit)):
        placed = jax.device_put(ids, P("data", "tensor"))
        got = (jax.jit(positions) if jitted else positions)(placed)
    assert jax.typeof(got).sharding.spec == P("data", "tensor", None)
    np.testing.assert_array_equal(got, want)


@JITTED
def test_lengths_of_rows_along_an_explicit_axis(jitted) -> None:
    """One row has more tokens than fit; its output is NaN, wherever it lies."""
    lengths = np.random.default_rng(0).integers(0, 9, (B, 4))
    lengths[3] = 20
    ids = [checks.pack(*row, total=T)[:T] for row in lengths]
    x = checks.random_data(B, T, T, N=2, K=2, H=8, V=8)

    def attend(lengths, q, k, v):
        desc = te.SequenceDescriptor.from_seqlens(lengths, q_len=T)
        out = te.dot_product_attention(q, k, v, desc, policy=te.CAUSAL)
        return desc.segment_ids[0], out

    with jax.set_mesh(mesh_of(4, 2, AxisType.Explicit)):
        placed = jax.device_put((lengths, x.q, x.k, x.v), P("data"))
        got_ids, out = (jax.jit(attend) if jitted else attend)(*placed)
    np.testing.assert_array_equal(got_ids, ids)
    mask = oracle.mask(ids, ids, policies=(oracle.CAUSAL,))
    want, _ = oracle.attention(x.q, x.k, x.v, mask, 8**-0.5)
    want[3] = np.nan
    np.testing.assert_allclose(out, want, atol=1e-5)


def test_balance_of_rows_along_an_explicit_axis() -> None:
    """Causal rows of one sequence: the first part goes with the last."""
    with jax.set_mesh(mesh_of(4, 2, AxisType.Explicit)):
        ids = jax.device_put(jnp.ones((B, 8), jnp.int32), P("data"))
        new = context_parallel.balance(
            te.from_segment_ids_and_pos(ids), devices=2, policy=te.CAUSAL, parts=2
        )
    np.testing.assert_array_equal(new.order, [[0, 1, 6, 7, 2, 3, 4, 5]] * B)


@pytest.mark.parametrize(
    ("name", "made"),
    [
        ("segment_ids", lambda x: te.from_segment_ids_and_pos(x).segment_pos),
        ("q_seqlens", lambda x: te.SequenceDescriptor.from_seqlens(x, q_len=T)),
    ],
)
def test_rows_that_explicit_axes_split_are_not_numbered(name, made) -> None:
    with jax.set_mesh(mesh_of(4, 2, AxisType.Explicit)):
        x = jax.device_put(jnp.ones((B, 4), jnp.int32), P("data", "tensor"))
        with pytest.raises(ValueError, match=f"`{name}` must not be sharded along its"):
            made(x)


def operations(program: str | None) -> collections.Counter[str]:
    """How often each operation stands in compiled HLO."""
    assert program
    return collections.Counter(re.findall(r"= .*?([a-z][\w.-]*)\(", program))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("implementation", ["xla", "dense"])
def test_a_mesh_of_one_device_costs_nothing(implementation, kind) -> None:
    """Not an operation more than without a mesh."""
    given = arrays(8, 4)
    mesh = jax.make_mesh(
        (1, 1), ("data", "tensor"), axis_types=(kind,) * 2, devices=jax.devices()[:1]
    )

    def compiled(arguments):
        call = functools.partial(attend, implementation=implementation)
        run = jax.jit(functools.partial(value_and_gradients, attend=call))
        return run.lower(**arguments).compile()

    plain = compiled(given)
    with jax.set_mesh(mesh):
        on_mesh = compiled(placed(mesh, 8, 4, ROWS))
    assert operations(on_mesh.as_text()) == operations(plain.as_text())
    assert on_mesh.cost_analysis() == plain.cost_analysis()


def test_a_mesh_in_context_and_arrays_on_one_device() -> None:
    given = arrays(8, 4)
    with jax.set_mesh(mesh_of(4, 2)):
        assert_same(jax.jit(value_and_gradients)(**given), on_one_device(8, 4))


def test_shard_map_over_some_axes() -> None:
    """Heads are left to the partitioner."""
    mesh = mesh_of(4, 2)
    mapped = jax.shard_map(
        attend,
        mesh=mesh,
        in_specs=ROWS,
        out_specs=ROWS,
        axis_names={"data"},
    )
    run = jax.jit(functools.partial(value_and_gradients, attend=mapped))
    assert_same(run(**placed(mesh, 8, 4, ROWS)), on_one_device(8, 4))


@pytest.mark.parametrize(
    "spec",
    [
        P("data", "tensor"),
        pytest.param(P(None, "data"), marks=pytest.mark.slow),
        pytest.param(P("data"), marks=pytest.mark.slow),
    ],
)
def test_vmap_over_explicit_axes(spec) -> None:
    mesh = mesh_of(2, 4, AxisType.Explicit)
    given = arrays(8, 4)
    pairs = {name: jnp.stack([x, x[::-1]]) for name, x in given.items()}
    with jax.set_mesh(mesh):
        placed_pairs = {
            name: jax.device_put(x, NamedSharding(mesh, spec))
            for name, x in pairs.items()
        }
        run = jax.jit(jax.vmap(lambda x: value_and_gradients(**x)[0]))
        got = np.asarray(run(placed_pairs))
    want = on_one_device(8, 4)[0]
    np.testing.assert_allclose(got, [want, want[::-1]], atol=1e-5)


def test_exports_for_several_devices() -> None:
    sharding = NamedSharding(mesh_of(4, 2), P("data"))
    given = arrays(8, 4)
    structs = {
        n: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for n, x in given.items()
    }
    exported = export.export(jax.jit(value_and_gradients))(**structs)
    exported = export.deserialize(exported.serialize())
    placed = {n: jax.device_put(x, sharding) for n, x in given.items()}
    assert_same(jax.jit(exported.call)(**placed), on_one_device(8, 4))


def test_the_private_name_is_still_there() -> None:
    """Without it there is no rule for `jit` with sharded arguments."""
    assert _partitioning.prim_requires_devices_during_lowering is not None
