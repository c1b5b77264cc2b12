"""`dot_product_attention`: validates, finds the key ranges, calls the primitives."""

import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from te_mixed_jax._call import canonical_call
from te_mixed_jax._descriptor import SequenceDescriptor
from te_mixed_jax._partitioning import over_explicit_mesh, vary_alike
from te_mixed_jax._policy import FULL, MaskPolicy
from te_mixed_jax._primitives import CHECKPOINT_NAMES as CHECKPOINT_NAMES
from te_mixed_jax._primitives import fused_attn_fwd_p, named, with_one_batch_axis
from te_mixed_jax._ranges import KeyRanges, key_ranges
from te_mixed_jax._types import Config, empty_lse
from te_mixed_jax.lowerings import cannot_run, dense


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: Literal[False] = False,
) -> Float[Array, "*B T N V"]: ...


@overload
def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: Literal[True],
) -> tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]: ...


def dot_product_attention(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None = None,
    *,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
    return_lse: bool = False,
) -> Float[Array, "*B T N V"] | tuple[Float[Array, "*B T N V"], Float[Array, "*B T N"]]:
    """Attention over packed rows, with a mask policy per sequence.

    Query head n reads key/value head ``n // (N // K)``. Softmax statistics and sums
    are fp32 (fp64 for fp64). A query that sees no key, padding included, has output
    exactly 0, and keys that nobody sees have gradients exactly 0. Data in padding and
    in other sequences, NaN and Inf included, change nothing.

    The residuals carry the names `CHECKPOINT_NAMES`, in order (output, lse), for
    `jax.checkpoint_policies.save_only_these_names`.

    Dims: `*B` any number of batch axes, also none; `T` query length; `S` key/value
    length; `N` query heads; `K` key/value heads; `H` query/key and `V` value head dim.

    Args:
        query: Float array ``[*B, T, N, H]``: bf16, fp16, fp32 or fp64.
        key: ``[*B, S, K, H]``, of the same dtype; K divides N.
        value: ``[*B, S, K, V]``, of the same dtype.
        desc: Segment ids and positions. Default: every row is one sequence.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
            Static under `jax.jit`.
        policy_ids: Integers ``[*B, T]``: the policy of each query token, as an index
            into `policy`; batch axes of size 1 broadcast. Ignored at padding.
        scale: Factor on the scores, a Python number. Default: ``1 / sqrt(H)``.
        implementation: None: the best one for the platform and the call, chosen when it
            is lowered. "xla": blockwise, O(T) memory. "mosaic": one kernel for all
            policies on NVIDIA Hopper, in bf16 and fp16, head dims up to 256. "cudnn":
            one call of cuDNN per mask that the policies need, on Hopper or newer, in
            bf16 and fp16, for full and causal policies and causal windows, where each
            sequence lies in one piece; what does not fit gets NaN. "te": the same by
            TransformerEngine, also two-sided windows and bottom-right. "dense": plain
            jnp, O(T*S) memory, every mode of differentiation. A named one never falls
            back to another.
        return_lse: Whether to return the log-sum-exp of the scores too.

    Returns:
        The output ``[*B, T, N, V]`` in the query's dtype. With `return_lse` a pair
        (output, lse): lse ``[*B, T, N]``, natural logarithm, fp32 (fp64 for fp64), -inf
        where a query sees no key; it is differentiable.

    Raises:
        ValueError: for wrong shapes, or wrong values in host data (NumPy, lists). A
            traced `policy_ids` out of range makes its token's output NaN.
        TypeError: for wrong dtypes, and for a traced `scale`.
        NotImplementedError: if the named implementation cannot do this call; and for
            forward-mode or second derivatives other than with "dense".

    Example:
        Row 0 holds a causal sequence of 3 tokens and a full one of 2:

        >>> desc = from_segment_ids_and_pos([[1, 1, 1, 2, 2, 0]])
        >>> x = jnp.ones((1, 6, 4, 64))
        >>> out = dot_product_attention(
        ...     x, x, x, desc, policy=(CAUSAL, FULL), policy_ids=[[0, 0, 0, 1, 1, 0]]
        ... )
        >>> out.shape
        (1, 6, 4, 64)

    Source: Rabe and Staats 2021, "Self-attention Does Not Need O(n^2) Memory"; Dao et
    al. 2022, "FlashAttention". Names and layout are those of
    `jax.nn.dot_product_attention`.
    """
    call = canonical_call(
        query,
        key,
        value,
        desc,
        policy=policy,
        policy_ids=policy_ids,
        scale=scale,
        implementation=implementation,
    )
    if implementation is not None:
        reason = call.why_not(implementation)
        if reason is not None:
            raise NotImplementedError(cannot_run(implementation, reason))
    out, lse = _attend(*call[:5], config=call.config, return_lse=return_lse)
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames=("config", "return_lse"))
def _attend(q, k, v, desc, policy_ids, *, config, return_lse):
    local = functools.partial(_attend_locally, config=config, return_lse=return_lse)
    return over_explicit_mesh(local, q, k, v, desc, policy_ids)


def _attend_locally(q, k, v, desc, policy_ids, *, config, return_lse):
    ranges = key_ranges(desc, config.policies, policy_ids)
    batch = q.shape[:-3]
    ranges = KeyRanges(*(jnp.broadcast_to(x, batch + x.shape[-1:]) for x in ranges))
    out, lse = attend_in_ranges(q, k, v, ranges, config=config)
    return out, empty_as_infinite(lse) if return_lse else None


def attend_in_ranges(q, k, v, ranges: KeyRanges, *, config: Config):
    """Output and lse, differentiable, from the key ranges of all tokens at hand."""
    q, k, v, *alike = vary_alike(q, k, v, *ranges)
    if config.implementation == "dense":

        def local(q, k, v, *ranges):
            return dense.forward(q, k, v, KeyRanges(*ranges), config=config)

        return named(*with_one_batch_axis(local)(q, k, v, *alike))
    return fused_attn_fwd_p.bind(q, k, v, *alike, config=config)


def empty_as_infinite(lse: Float[Array, "..."]) -> Float[Array, "..."]:
    """The lse as users get it: -inf where a query sees no key."""
    return jnp.where(lse == empty_lse(lse.dtype), -jnp.inf, lse)
