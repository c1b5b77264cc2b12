"""The same packed rows, described for TransformerEngine and for this package."""

import importlib
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from te_mixed_jax._call import check_is_desc
from te_mixed_jax._descriptor import SequenceDescriptor


def from_transformer_engine(
    desc: Any, *, q_len: int | None = None, kv_len: int | None = None
) -> SequenceDescriptor:
    """A descriptor from TransformerEngine's.

    Args:
        desc: A `transformer_engine.jax.attention.SequenceDescriptor` made by any of its
            constructors: from segment ids and positions, from lengths and offsets, or
            from one length a row.
        q_len: Length T of a row of queries; needed where lengths were given, since they
            do not say it.
        kv_len: Length S of a row of keys. Default: `q_len`.

    Returns:
        The descriptor. From lengths, sequence m of a row has id m + 1, and positions
        are the running index.

    Raises:
        TypeError: for what is no descriptor of TransformerEngine.
        ValueError: if `q_len` is missing, or given where rows say their length.

    Source: the layout is that of TransformerEngine 2.20.

    Example:
        >>> from types import SimpleNamespace
        >>> none = jnp.zeros(0), jnp.zeros(0)
        >>> lengths, starts = jnp.array([[2, 3, -1]]), jnp.array([[0, 3, -1, -1]])
        >>> theirs = SimpleNamespace(
        ...     segment_ids=none, seqlens=(lengths,) * 2, seq_offsets=(starts,) * 2
        ... )
        >>> print(from_transformer_engine(theirs, q_len=7).segment_ids[0])
        [[1 1 0 2 2 2 0]]
    """
    if not hasattr(desc, "seqlens"):
        raise TypeError(
            "`desc` must be TransformerEngine's `SequenceDescriptor`, got "
            f"{type(desc).__module__}.{type(desc).__name__}."
        )
    by_ids = desc.segment_ids[0].size > 0
    if by_ids != (q_len is None):
        raise ValueError(
            "`q_len` must be given for a descriptor made of sequence lengths, and not "
            f"for one made of segment ids; this one is made of "
            f"{'segment ids' if by_ids else 'lengths'}, and `q_len` is {q_len}."
        )
    if by_ids:
        return SequenceDescriptor.from_segment_ids_and_pos(
            tuple(desc.segment_ids), tuple(desc.segment_pos)
        )
    lengths = q_len, q_len if kv_len is None else kv_len
    ids = tuple(map(_ids, desc.seqlens, desc.seq_offsets, lengths))
    seqlens = desc.seqlens[0]
    return SequenceDescriptor.from_segment_ids_and_pos(
        ids, max_segments=max(1, seqlens.shape[1] if seqlens.ndim > 1 else 1)
    )


def to_transformer_engine(desc: SequenceDescriptor) -> Any:
    """TransformerEngine's descriptor, from segment ids and positions.

    Its kernels expect more of ids than this package: that they count 1, 2, ... in the
    order of the row, and that a sequence lies in one piece.

    Args:
        desc: A descriptor of ids ``[B, T]`` and ``[B, S]``.

    Returns:
        A `transformer_engine.jax.attention.SequenceDescriptor`.

    Raises:
        TypeError: for what is no descriptor.
        ValueError: if it has no batch axis, or several.
        ImportError: if TransformerEngine cannot be imported.

    Source: TransformerEngine 2.20.

    Example:
        >>> desc = from_segment_ids_and_pos([[1, 1, 2, 0]])
        >>> theirs = to_transformer_engine(desc)  # doctest: +SKIP
    """
    check_is_desc(desc)
    if desc.segment_ids[0].ndim != 2:
        raise ValueError(
            "`desc` must describe rows [B, T], as TransformerEngine's does, got ids of "
            f"shape {desc.segment_ids[0].shape}."
        )
    try:
        te = importlib.import_module("transformer_engine.jax.attention")
    except ImportError as error:
        raise ImportError(
            "`to_transformer_engine` needs TransformerEngine, "
            f'`pip install "te_mixed_jax[te]"`: {error}'
        ) from error
    ids, pos = (
        tuple(map(jnp.asarray, pair)) for pair in (desc.segment_ids, desc.segment_pos)
    )
    return te.SequenceDescriptor.from_segment_ids_and_pos(ids, pos)


def _ids(
    seqlens: Int[Array, "..."], offsets: Int[Array, "..."], length: int | None
) -> Int[Array, "B n"]:
    """Segment ids of rows that hold sequence m + 1 at offset m; offsets may be none."""
    seqlens = jnp.asarray(seqlens)
    if seqlens.ndim == 1:  # one sequence a row, from its start
        seqlens = seqlens[:, None]
    starts = jnp.zeros_like(seqlens)
    if jnp.size(offsets):
        starts = jnp.asarray(offsets)[:, : seqlens.shape[1]]
    at = jnp.arange(length or 0, dtype=jnp.int32)
    inside = (at >= starts[..., None]) & (at < (starts + seqlens)[..., None])
    inside &= (seqlens > 0)[..., None] & (starts >= 0)[..., None]
    numbers = jnp.arange(1, seqlens.shape[1] + 1, dtype=jnp.int32)[:, None]
    return jnp.where(inside, numbers, 0).max(axis=1, initial=0)
