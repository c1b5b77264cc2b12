"""TransformerEngine's mask types, per sequence -> policies and their ids."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Int

from te_mixed_jax._call import check_is_desc
from te_mixed_jax._descriptor import SequenceDescriptor, as_integers
from te_mixed_jax._policy import CAUSAL, CAUSAL_BOTTOM_RIGHT, FULL, MaskPolicy

MASK_TYPES = {
    "padding": FULL,
    "padding_causal": CAUSAL,
    "padding_causal_bottom_right": CAUSAL_BOTTOM_RIGHT,
}


def policies_from_mask_types(
    desc: SequenceDescriptor,
    attn_mask_type_per_seq: Mapping[str, Any],
    window_size_per_mask_type: Mapping[str, tuple[int, int]] | None = None,
) -> tuple[tuple[MaskPolicy, ...], Int[Array, "*B T"]]:
    """Policies and policy ids from the sequences that run with each mask type.

    Each sequence that has queries belongs to exactly one mask type. Ids that the row
    does not hold are ignored, so one list can serve rows with fewer sequences.

    Args:
        desc: The descriptor whose segment ids are named.
        attn_mask_type_per_seq: Per mask type ("padding", "padding_causal" or
            "padding_causal_bottom_right"), integers ``[*B, n]``: the segment ids that
            run with it; batch axes of size 1 broadcast, ids <= 0 are filler.
        window_size_per_mask_type: Per mask type a window (left, right), as in
            `MaskPolicy.with_window`; mask types that are not named have none.

    Returns:
        `(policies, policy_ids)`, to be passed on to `dot_product_attention`:
        `policy_ids` is int32 ``[*B, T]``.

    Raises:
        ValueError: for an unknown mask type, a window for a mask type that is not
            there, wrong shapes; and, where the values are concrete, for a sequence
            in no mask type, in two, or named twice. A traced violation makes the
            output of the sequence NaN; naming it twice in one mask type does no harm.
        TypeError: for ids that are not integers, and for what is no descriptor.

    Example:
        >>> desc = from_segment_ids_and_pos([[1, 1, 2, 2, 3, 0]])
        >>> policies, policy_ids = policies_from_mask_types(
        ...     desc,
        ...     {"padding": [[2]], "padding_causal": [[1, 3]]},
        ...     {"padding_causal": (128, 0)},
        ... )
        >>> policies
        (FULL, CAUSAL.with_window(128, 0))
        >>> print(policy_ids)
        [[ 1  1  0  0  1 -1]]

    Source: the names are TransformerEngine's (`AttnMaskType`, and the mask type per
    sequence of its PyTorch pull request 3274).
    """
    check_is_desc(desc)
    if not isinstance(attn_mask_type_per_seq, Mapping) or not attn_mask_type_per_seq:
        raise ValueError(
            "`attn_mask_type_per_seq` must map at least one mask type to segment ids, "
            f"got {attn_mask_type_per_seq!r}."
        )
    windows = {} if window_size_per_mask_type is None else window_size_per_mask_type
    if not isinstance(windows, Mapping):
        raise TypeError(
            "`window_size_per_mask_type` must map mask types to (left, right), got "
            f"{windows!r}."
        )
    for name in attn_mask_type_per_seq:
        if name not in MASK_TYPES:
            known = ", ".join(f'"{known}"' for known in MASK_TYPES)
            raise ValueError(
                f"`attn_mask_type_per_seq` has the unknown mask type {name!r}; known "
                f"are {known}."
            )
    for name, window in windows.items():
        if name not in attn_mask_type_per_seq:
            raise ValueError(
                f"`window_size_per_mask_type` has a window for {name!r}, which is not "
                "in `attn_mask_type_per_seq`."
            )
        if not isinstance(window, tuple | list) or len(window) != 2:
            raise ValueError(
                f"`window_size_per_mask_type[{name!r}]` must be (left, right), got "
                f"{window!r}."
            )

    q_ids = desc.segment_ids[0]
    policies, named = [], []
    for name, ids in attn_mask_type_per_seq.items():
        policies.append(MASK_TYPES[name].with_window(*windows.get(name, (-1, -1))))
        argument = f"attn_mask_type_per_seq[{name!r}]"
        ids = as_integers(argument, ids)
        if ids.ndim != q_ids.ndim or any(
            have != want and 1 not in (have, want)
            for have, want in zip(ids.shape[:-1], q_ids.shape[:-1], strict=True)
        ):
            batch = ", ".join(map(str, q_ids.shape[:-1]))
            raise ValueError(
                f"`{argument}` must have shape (*B, n) with *B = ({batch}) as in "
                f"`desc`, got {ids.shape}."
            )
        named.append(ids)
    if not any(isinstance(x, Tracer) for x in (q_ids, *named)):
        _check_assignment(
            np.asarray(q_ids), dict(zip(attn_mask_type_per_seq, named, strict=True))
        )

    q_ids = jnp.asarray(q_ids)
    member = jnp.stack(
        [(q_ids[..., :, None] == ids[..., None, :]).any(axis=-1) for ids in named]
    )
    once = (member.sum(axis=0) == 1) & (q_ids > 0)
    policy_ids = jnp.where(once, member.argmax(axis=0), -1)
    return tuple(policies), policy_ids.astype(jnp.int32)


def _check_assignment(q_ids: np.ndarray, named: dict[str, Any]) -> None:
    """Concrete values: every sequence that has queries is named exactly once."""
    arrays = {name: np.asarray(ids) for name, ids in named.items()}
    batch = np.broadcast_shapes(
        q_ids.shape[:-1], *(ids.shape[:-1] for ids in arrays.values())
    )
    rows = {
        name: np.broadcast_to(ids, batch + ids.shape[-1:])
        for name, ids in arrays.items()
    }
    q_ids = np.broadcast_to(q_ids, batch + q_ids.shape[-1:])
    for row in np.ndindex(*batch):
        given: dict[int, str] = {}
        for name, ids in rows.items():
            for segment in ids[row][ids[row] > 0].tolist():
                if segment in given:
                    raise ValueError(
                        f"`attn_mask_type_per_seq` names sequence {segment} of row "
                        f"{row} twice: in {given[segment]!r} and in {name!r}."
                    )
                given[segment] = name
        missing = set(q_ids[row][q_ids[row] > 0].tolist()) - given.keys()
        if missing:
            raise ValueError(
                f"`attn_mask_type_per_seq` gives no mask type to the sequences "
                f"{sorted(missing)} of row {row}."
            )
