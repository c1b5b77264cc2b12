"""Which implementation would run this call, and why would the others not?"""

from collections.abc import Sequence
from typing import Any

import jax

from te_mixed_jax._call import canonical_call
from te_mixed_jax._descriptor import SequenceDescriptor
from te_mixed_jax._policy import FULL, MaskPolicy
from te_mixed_jax.lowerings import LOWERINGS


def explain(
    query: Any,
    key: Any,
    value: Any,
    desc: SequenceDescriptor | None = None,
    *,
    policy: MaskPolicy | Sequence[MaskPolicy] = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
) -> dict[str, str]:
    """Says for each implementation whether it would run a call, or why not.

    Args:
        query: ``[*B, T, N, H]``, like all others as for `dot_product_attention`: an
            array, or a `jax.ShapeDtypeStruct` in its place, since no value is read.
        key: ``[*B, S, K, H]``.
        value: ``[*B, S, K, V]``.
        desc: A descriptor of arrays, or one made under `jax.eval_shape`.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[*B, T]``.
        scale: Factor on the scores. Default: ``1 / sqrt(H)``.

    Returns:
        "yes", or "no: " and the reason, per name of an implementation. It is said of
        shapes, dtypes and policies, and no device is asked: "mosaic" also needs a
        Hopper GPU, "cudnn" and "te" one as new or newer.

    Raises:
        ValueError, TypeError: as `dot_product_attention`, for a call that is wrong
            for every implementation.

    Example:
        >>> x = jax.ShapeDtypeStruct((2, 1024, 8, 64), jnp.float32)
        >>> reasons = explain(x, x, x, policy=CAUSAL)
        >>> reasons["xla"]
        'yes'
        >>> reasons["cudnn"]
        'no: it computes in bfloat16 or float16, and `query` is float32'
    """
    reasons = {}

    def ask(query, key, value, desc, policy_ids):
        call = canonical_call(
            query,
            key,
            value,
            desc,
            policy=policy,
            policy_ids=policy_ids,
            scale=scale,
            implementation=None,
        )
        reasons.update({name: call.why_not(name) for name in LOWERINGS})

    jax.eval_shape(ask, query, key, value, desc, policy_ids)
    return {
        name: "yes" if reason is None else f"no: {reason}"
        for name, reason in reasons.items()
    }
