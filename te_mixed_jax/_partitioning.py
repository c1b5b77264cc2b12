"""Which device computes what? Each the rows and heads that it holds.

Under `jit` with sharded arguments the partitioner asks a rule. Explicit axes of a mesh
stand in the types of arrays, so there a call is mapped over the mesh. Inside
`jax.shard_map` arrays are local already; their types say over which axes they vary.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.core import ShapedArray
from jax.experimental.custom_partitioning import custom_partitioning
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jaxtyping import Array

from te_mixed_jax._types import accumulator_dtype

try:  # no public name for it: without it the rule is left out
    from jax._src.dispatch import prim_requires_devices_during_lowering
except ImportError:  # pragma: no cover
    prim_requires_devices_during_lowering = None

# ------------------------------------------------------------------- inside shard_map


def vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """The arrays, typed as varying over each mesh axis that one of them varies over."""
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    axes = frozenset[Any]().union(*varying)
    return tuple(
        lax.pcast(x, tuple(axes - own), to="varying") if axes - own else x
        for x, own in zip(arrays, varying, strict=True)
    )


def aval_like(aval: ShapedArray, shape: tuple[int, ...], dtype) -> ShapedArray:
    """An abstract value that varies over the axes that `aval` varies over."""
    sharding = aval.sharding.update(spec=PartitionSpec(*(None,) * len(shape)))
    return aval.update(shape=shape, dtype=dtype, sharding=sharding)


def lowering_of(function: Callable) -> Callable:
    """The lowering rule of `function(*operands, split: bool, **params)`.

    Inside no type says over which axes it varies: loops that start from constants would
    need each of them to be cast. `split` says whether the partitioner will ask how to
    split the call: it knows how the arguments lie on a mesh, and nothing is exported.
    """

    def lower(ctx, *operands, **params):
        module = ctx.module_context
        split = getattr(module.axis_context, "abstract_mesh", None) is not None
        split &= not getattr(module.lowering_parameters, "for_export", False)
        split &= prim_requires_devices_during_lowering is not None
        rule = mlir.lower_fun(
            functools.partial(function, split=split), multiple_results=True
        )
        avals = (
            [ShapedArray(x.shape, x.dtype) for x in side]
            for side in (ctx.avals_in, ctx.avals_out)
        )
        ctx = ctx.replace(**dict(zip(("avals_in", "avals_out"), avals, strict=True)))
        return rule(ctx, *operands, **params)

    return lower


# ---------------------------------------------------------------------- explicit axes


def check_whole_rows(name: str, x) -> None:
    """Rows that explicit axes split cannot be numbered by the devices alone."""
    spec = jax.typeof(x).sharding.spec
    if spec[-1] is not None:
        raise ValueError(
            f"`{name}` must not be sharded along its last axis, since positions are "
            f"counted in whole rows; got the spec {spec} for the shape {x.shape}. "
            "Use `jax.sharding.reshard` first."
        )


def over_explicit_mesh(attend: Callable, q, k, v, desc, policy_ids):
    """`attend` of these, by each device for its rows and heads.

    Maps over the mesh where its axes are explicit. Key/value heads are those of the
    device's query heads: see `per_device`.
    """
    sharding = jax.typeof(q).sharding
    mesh = sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return attend(q, k, v, desc, policy_ids)
    *batch, tokens, heads, H = sharding.spec
    if tokens is not None or H is not None:
        raise ValueError(
            "`query` must be sharded along its batch and heads only, got the spec "
            f"{sharding.spec} for (*B, T, N, H) = {q.shape}."
        )
    N, K, devices = q.shape[-2], k.shape[-2], _size(mesh, heads)
    one_key_head = K % devices != 0
    if one_key_head and (devices % K or N % devices):
        raise ValueError(
            f"`key` must have a number of heads that divides the {devices} devices of "
            f"the axes {heads!r} along which `query` has its heads, or is divided by "
            f"them; got {K}."
        )

    def local(q, k, v, desc, policy_ids):
        if one_key_head:
            k, v = (_own_key_head(x, heads, devices // K) for x in (k, v))
        return attend(q, k, v, desc, policy_ids)

    queries = PartitionSpec(*batch, None, heads)
    keys = PartitionSpec(*batch, None, None if one_key_head else heads)

    def of_rows(x):
        sizes = x.shape[: len(batch)]
        return PartitionSpec(
            *(axis if n > 1 else None for axis, n in zip(batch, sizes, strict=True))
        )

    arguments = q, k, v, desc, policy_ids
    specs = queries, keys, keys, *jax.tree.map(of_rows, (desc, policy_ids))
    arguments = jax.tree.map(jax.sharding.reshard, arguments, specs)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=queries)
    return mapped(*arguments)


# ------------------------------------------------------------ jit, sharded arguments


def per_device(
    function: Callable, operands: Sequence[str], results: Sequence[str]
) -> Callable:
    """`function`, where each device computes the rows and query heads that it holds.

    Key/value heads are split like query heads where the devices divide them. Where
    there are more devices than key/value heads, each takes the one that it needs, and
    gradients of key and value are summed over those that share it. In any other case
    heads stay whole.

    Args:
        function: A function of arrays, of which the first two are query and key.
        operands: The axes of each operand: "..." for any number of batch axes, "t" or
            "s", and its others; "n" are query heads, "k" key/value heads.
        results: The same of each result.
    """
    rule = f"{', '.join(operands)} -> {', '.join(results)}"

    def partition(mesh, arguments, outcomes):
        del outcomes
        query, key = arguments[:2]
        rank, N, K = len(query.shape), query.shape[-2], key.shape[-2]
        *batch, _, heads, _ = (*query.sharding.spec, *[None] * rank)[:rank]
        devices, local = _size(mesh, heads), function
        axes = {"n": heads, "k": heads}
        if K % devices and devices % K == 0 and N % devices == 0:
            axes["k"] = None
            local = _with_own_key_head(function, operands, results, heads, devices // K)
        elif K % devices:
            axes["n"] = axes["k"] = None

        def shardings(arrays):
            specs = ((*batch, *map(axes.get, names.split()[1:])) for names in arrays)
            return tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in specs)

        return mesh, local, shardings(results), shardings(operands)

    wrapped = custom_partitioning(function)
    wrapped.def_partition(
        partition=partition,
        sharding_rule=rule,
        # In the order in which the rule names them.
        need_replication_factors=tuple(sorted(set("tshv") & set(rule), key=rule.index)),
    )

    return wrapped


def _with_own_key_head(function, operands, results, axes, sharing: int) -> Callable:
    """`function` on the one key/value head of a device's query heads.

    Key and value come with all heads; `sharing` neighbours along the mesh `axes` have
    the same head.
    """

    def local(*arrays):
        K = arrays[1].shape[-2]
        outputs = function(
            *(
                _own_key_head(x, axes, sharing) if "k" in names else x
                for x, names in zip(arrays, operands, strict=True)
            )
        )
        mine = (jnp.arange(K) == lax.axis_index(axes) // sharing)[:, None]

        def all_heads(x):
            spread = jnp.where(mine, x, 0).astype(accumulator_dtype(x.dtype))
            return lax.psum(spread, axes).astype(x.dtype)

        return [
            all_heads(x) if "k" in names else x
            for x, names in zip(outputs, results, strict=True)
        ]

    return local


def _own_key_head(x: Array, axes, sharing: int) -> Array:
    """The one head [..., S, 1, H] that `sharing` neighbours along the axes share."""
    head = lax.axis_index(axes) // sharing
    return lax.dynamic_slice_in_dim(x, head, 1, axis=-2)


def _size(mesh, axes) -> int:
    """Devices along one mesh axis, several, or none."""
    names = axes if isinstance(axes, tuple) else (axes,)
    return math.prod(mesh.shape[name] for name in names if name is not None)


def lowered_per_device(*primitives: Primitive) -> None:
    """Tells JAX that these primitives' lowerings ask for the devices of a call."""
    if prim_requires_devices_during_lowering is not None:
        prim_requires_devices_during_lowering.update(primitives)
