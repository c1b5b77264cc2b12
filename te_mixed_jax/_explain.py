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
        query: As for `dot_product_attention`, like all others: arrays, or
            `jax.ShapeDtypeStruct` in their place, since no value is read.
        key: See `query`.
        value: See `query`.
        desc: A descriptor of arrays, or one made under `jax.eval_shape`.
        policy: A policy or a sequence of them.
        policy_ids: See `query`.
        scale: Factor on the scores.

    Returns:
        "yes", or "no: " and the reason, per name of an implementation. It is said of
        shapes, dtypes and policies; "mosaic", "cudnn" and "te" also need an NVIDIA
        GPU.

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
