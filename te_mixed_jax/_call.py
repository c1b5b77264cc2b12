"""Is this call well formed, and can an implementation do it?"""

import math
import numbers
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from te_mixed_jax._descriptor import SequenceDescriptor, as_integers
from te_mixed_jax._policy import MaskPolicy
from te_mixed_jax._types import Config
from te_mixed_jax.lowerings import LOWERINGS


class Call(NamedTuple):
    """A validated call; batch axes of `desc` and `policy_ids` may have size 1."""

    q: Any
    k: Any
    v: Any
    desc: SequenceDescriptor
    policy_ids: Any
    config: Config

    def why_not(self, implementation: str) -> str | None:
        """Why the implementation cannot do the call, or None."""
        q, k, v = (
            jax.ShapeDtypeStruct((math.prod(x.shape[:-3]), *x.shape[-3:]), x.dtype)
            for x in (self.q, self.k, self.v)
        )
        return LOWERINGS[implementation].supports(q, k, v, self.config)


def canonical_call(
    query, key, value, desc, *, policy, policy_ids, scale, implementation
) -> Call:
    """Validates the arguments of `dot_product_attention`."""
    if implementation is not None and implementation not in LOWERINGS:
        names = ", ".join(f'"{name}"' for name in LOWERINGS)
        raise ValueError(
            f"`implementation` must be None or one of {names}, got {implementation!r}."
        )
    query, key, value = check_arrays(query, key, value)
    *batch, T, N, H = query.shape
    batch, S = tuple(batch), key.shape[-3]
    whole_rows = desc is None and policy_ids is None
    if desc is None:
        desc = _one_sequence_a_row(len(batch), T, S)
    check_desc(desc, batch, T, S, heads=N)
    policies, policy_ids = check_policies(policy, policy_ids, desc, batch, T)

    return Call(
        *(query, key, value),
        *jax.tree.map(jnp.asarray, (desc, policy_ids)),
        config=Config(
            scale=_check_scale(scale, H),
            implementation=implementation,
            policies=policies,
            max_segments=desc.max_segments,
            whole_rows=whole_rows,
        ),
    )


def check_arrays(query, key, value) -> tuple[Array, Array, Array]:
    arrays = {"query": query, "key": key, "value": value}
    for name, x in arrays.items():
        if not isinstance(x, jax.Array | np.ndarray):
            raise TypeError(f"`{name}` must be an array, got {type(x).__name__}.")
        if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize < 2:
            raise TypeError(
                f"`{name}` must be bf16, fp16, fp32 or fp64, got {x.dtype}."
            )
        if x.dtype != query.dtype:
            raise TypeError(
                f"`{name}` must have the dtype of `query`, {query.dtype}, got "
                f"{x.dtype}."
            )
    if query.ndim < 3:
        raise ValueError(
            "`query` must have shape (*B, T, N, H), at least three axes, got "
            f"{query.shape}."
        )
    *batch, T, N, H = query.shape
    expected = ", ".join([*map(str, batch), "S", "K", str(H)])
    if key.ndim != query.ndim or key.shape[:-3] != tuple(batch) or key.shape[-1] != H:
        raise ValueError(
            f"`key` must have shape ({expected}) to match `query` {query.shape}, got "
            f"{key.shape}."
        )
    if value.ndim != query.ndim or value.shape[:-1] != key.shape[:-1]:
        expected = ", ".join([*map(str, key.shape[:-1]), "V"])
        raise ValueError(
            f"`value` must have shape ({expected}) to match `key` {key.shape}, got "
            f"{value.shape}."
        )
    if H == 0:
        raise ValueError(f"`query` must have a head dim H > 0, got {query.shape}.")
    if value.shape[-1] == 0:
        raise ValueError(f"`value` must have a head dim V > 0, got {value.shape}.")
    K = key.shape[-2]
    if (K == 0 and N > 0) or (K > 0 and N % K):
        raise ValueError(
            f"`key` must have a number of heads that divides the {N} heads of "
            f"`query`, got {K}."
        )
    return tuple(jnp.asarray(x) for x in arrays.values())  # type: ignore[return-value]


def _one_sequence_a_row(batch_axes: int, T: int, S: int) -> SequenceDescriptor:
    def side(length):
        shape = (1,) * batch_axes + (length,)
        return np.ones(shape, np.int32), np.arange(length, dtype=np.int32).reshape(
            shape
        )

    (q_ids, q_pos), (kv_ids, kv_pos) = side(T), side(S)
    ids, pos = (q_ids, kv_ids), (q_pos, kv_pos)
    if T == S:
        ids, pos = q_ids, q_pos
    return SequenceDescriptor.from_segment_ids_and_pos(ids, pos, max_segments=1)


def check_is_desc(desc, alternative: str = "") -> None:
    if not isinstance(desc, SequenceDescriptor):
        what = f"got {type(desc).__name__}"
        if getattr(desc, "shape", None) is not None:
            what += f" of shape {desc.shape} and dtype {desc.dtype}"
        raise TypeError(
            f"`desc` must be a `SequenceDescriptor`{alternative}, {what}. Make one "
            "with `from_segment_ids_and_pos`; a mask is given as a `policy`."
        )


def check_desc(desc, batch, T, S, heads: int | None = None) -> None:
    check_is_desc(desc, " or None")
    (q_ids, kv_ids), shared = desc.segment_ids, desc._kv_ids is None
    name = "segment_ids" if shared else "segment_ids[0]"
    _check_metadata(name, q_ids, batch, "T", T, heads)
    if shared and S != T:
        raise ValueError(
            f"`desc` describes one side of length {T}, but `key` has length S={S}: "
            "make it from a pair (query, key/value) for cross-attention."
        )
    _check_metadata("segment_ids[1]", kv_ids, batch, "S", S)


def _check_metadata(name, x, batch, letter, length, heads=None) -> None:
    """`x` is [*batch, length], where batch axes of size 1 broadcast.

    `heads` are those of the array whose tokens `x` describes.
    """
    batch_fits = x.ndim == len(batch) + 1 and all(
        have in (1, want) for have, want in zip(x.shape[:-1], batch, strict=True)
    )
    if not batch_fits or x.shape[-1] != length:
        expected = ", ".join(map(str, (*batch, length)))
        hint = ""
        if x.ndim == len(batch):
            hint = " Give it a batch axis: `x[None]`."
        elif x.shape[-1] == heads:
            hint = f" Arrays are (*B, {letter}, heads, head dim): are axes swapped?"
        elif batch_fits and 1 < length < x.shape[-1] and x.shape[-1] % length == 0:
            hint = " Are these whole rows, next to a device's part of them?"
        elif batch_fits and name == "policy_ids":
            hint = " It has one entry per query token, not per sequence."
        raise ValueError(
            f"`{name}` must have shape ({expected}), (*B, {letter}) of the call, where "
            f"batch axes may have size 1; got {x.shape}.{hint}"
        )


def check_policies(
    policy, policy_ids, desc: SequenceDescriptor, batch, T
) -> tuple[tuple[MaskPolicy, ...], Any]:
    """The policies, and their ids as an integer array or None."""
    policies = _check_policy(policy, policy_ids)
    if policy_ids is not None:
        policy_ids = as_integers("policy_ids", policy_ids)
        _check_metadata("policy_ids", policy_ids, batch, "T", T)
        _check_policy_range(policy_ids, desc, policies)
    return policies, policy_ids


def _check_policy(policy, policy_ids) -> tuple[MaskPolicy, ...]:
    if isinstance(policy, MaskPolicy):
        if policy_ids is not None:
            raise ValueError(
                "`policy_ids` index a sequence of policies, but `policy` is a single "
                f"one: give `policy=({policy!r}, ...)`, or leave `policy_ids` out."
            )
        return (policy,)
    if not isinstance(policy, list | tuple):
        raise _not_a_policy("policy", policy, " or a tuple of them,")
    policies = tuple(policy)
    for index, one in enumerate(policies):
        if not isinstance(one, MaskPolicy):
            raise _not_a_policy(f"policy[{index}]", one)
    if not policies:
        raise ValueError("`policy` must hold at least one policy, got none.")
    if policy_ids is None and len(policies) > 1:
        raise ValueError(
            f"`policy_ids` must say which of the {len(policies)} policies each query "
            "token has: integers of shape (*B, T). Got None."
        )
    return policies


def _not_a_policy(name: str, value, alternative: str = "") -> TypeError:
    """The error for what stands in the place of a policy."""
    if isinstance(value, jax.Array | np.ndarray):
        hint = (
            "Policies are static: give all that may be in use as a tuple, and say "
            "which by `policy_ids`, which may be traced."
        )
    elif callable(value):
        hint = "Call it: `prefix(3)`, `chunked(16, 1)`."
    else:
        hint = (
            "TransformerEngine's mask types are converted by "
            "`policies_from_mask_types`."
        )
    return TypeError(
        f"`{name}` must be a `MaskPolicy` such as FULL or CAUSAL,{alternative} got "
        f"{value!r} ({type(value).__name__}). {hint}"
    )


def _check_policy_range(policy_ids, desc, policies) -> None:
    """Host data only: a real token's policy has to exist."""
    q_ids = desc.segment_ids[0]
    if not (isinstance(policy_ids, np.ndarray) and isinstance(q_ids, np.ndarray)):
        return
    outside = ((policy_ids < 0) | (policy_ids >= len(policies))) & (q_ids > 0)
    if outside.any():
        where = tuple(np.argwhere(outside)[0].tolist())
        got = np.broadcast_to(policy_ids, outside.shape)[where]
        raise ValueError(
            f"`policy_ids` must be from 0 to {len(policies) - 1} at real tokens, the "
            f"indices of `policy`; got {got} at {where}."
        )


def _check_scale(scale, H: int) -> float:
    if scale is None:
        return H**-0.5
    if isinstance(scale, jax.Array):
        raise TypeError(
            "`scale` must be a Python number, since it is static; got a "
            f"{type(scale).__name__}. Multiply `query` by it instead, with `scale=1.0`."
        )
    if not isinstance(scale, numbers.Real | np.number) or isinstance(scale, bool):
        raise TypeError(
            f"`scale` must be a number, got {scale!r} ({type(scale).__name__})."
        )
    scale = float(scale)
    if not math.isfinite(scale):
        raise ValueError(f"`scale` must be finite, got {scale}.")
    return scale
