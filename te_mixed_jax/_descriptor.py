"""Which token belongs to which sequence, and where in it does it stand?"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.core import Tracer
from jaxtyping import Array, Int

from te_mixed_jax._partitioning import check_whole_rows
from te_mixed_jax._policy import HIGHEST, LOWEST, as_int

Ids = Any  # an integer array, NumPy array or (nested) list of ints


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=("_q_ids", "_kv_ids", "_q_pos", "_kv_pos", "_broken"),
    meta_fields=("_max_segments",),
)
@dataclasses.dataclass(frozen=True)
class SequenceDescriptor:
    """Segment ids and positions of the tokens of packed rows.

    Make one with `from_segment_ids_and_pos` or `from_seqlens`. It is a pytree of
    integer arrays, so it passes through `jax.jit`, `jax.vmap`, `jax.lax.scan` and
    `jax.device_put` like any array; NumPy data stay NumPy until they are used.

    Tokens of a row with the same id > 0 are one sequence, wherever they lie; ids <= 0
    are padding. With one set of ids for both sides (self-attention) the key/value
    side is the query side.

    Dims: `*B` batch axes (as many as the query has; axes of size 1 broadcast), `T`
    query length, `S` key/value length.

    Example:
        >>> desc = SequenceDescriptor.from_seqlens([[3, 2]], q_len=6)
        >>> q_ids, kv_ids = desc.segment_ids
        >>> print(q_ids, desc.segment_pos[0], desc.max_segments)
        [[1 1 1 2 2 0]] [[0 1 2 0 1 0]] 2

    Source: the name and the constructors are TransformerEngine's.
    """

    # `_kv_ids`, `_kv_pos`: None where the key/value side is the query side.
    # `_q_pos`, `_kv_pos`: None where positions are the running index.
    # `_broken`: bool [*B], rows whose traced values broke a rule; None: impossible.
    # `_max_segments`: static.
    _q_ids: Any
    _kv_ids: Any = None
    _q_pos: Any = None
    _kv_pos: Any = None
    _broken: Any = None
    _max_segments: int | None = None

    @classmethod
    def from_segment_ids_and_pos(
        cls,
        segment_ids: Ids | tuple[Ids, Ids],
        segment_pos: Ids | tuple[Ids, Ids] | None = None,
        *,
        max_segments: int | None = None,
    ) -> "SequenceDescriptor":
        """A descriptor from segment ids and, if wanted, positions.

        Args:
            segment_ids: Integers ``[*B, T]``, or a pair (query ``[*B, T]``, key/value
                ``[*B, S]``) for cross-attention. Equal ids > 0 are one sequence, ids
                <= 0 are padding.
            segment_pos: Integers of the same shape, or a pair of them: the position
                of each token in its sequence. Default: the running index 0, 1, 2, ...
                of the token within its sequence. Ignored at padding. With a pair of
                ids this must be a pair too.
            max_segments: The number of sequences that no row exceeds, if known; static
                under `jax.jit`. cuDNN is slower the larger it is, and takes 64 where
                nothing is given; other implementations do not use it.

        Returns:
            The descriptor. Ids and positions are held as int32.

        Raises:
            TypeError: if ids, positions or `max_segments` are not integers.
            ValueError: if shapes do not match, or if host data (NumPy, lists) do not
                fit int32 or hold more sequences than `max_segments`. Traced values
                that do not fit int32 make their row's output NaN.

        Example:
            >>> desc = SequenceDescriptor.from_segment_ids_and_pos([[5, 5, 5, 2, 2, 0]])
            >>> print(desc.segment_pos[0])
            [[0 1 2 0 1 0]]

        Source: the interface is that of TransformerEngine's `SequenceDescriptor`.
        """
        if max_segments is not None:
            max_segments = as_int("max_segments", max_segments, 1)
        q_ids, kv_ids = _sides("segment_ids", segment_ids)
        q_pos, kv_pos = _sides("segment_pos", segment_pos)
        pair = kv_ids is not None
        if q_pos is not None and (kv_pos is not None) != pair:
            pairs, single = ("segment_ids", "segment_pos")[:: 1 if pair else -1]
            raise ValueError(
                f"`{pairs}` is a pair (query, key/value), `{single}` is not: give both "
                "as one array for self-attention, both as a pair for cross-attention."
            )
        suffix = "[0]" if pair else ""
        q_ids, q_pos, broken = _one_side(suffix, q_ids, q_pos)
        _check_number(q_ids, max_segments)
        if not pair:
            return cls(q_ids, None, q_pos, None, broken, max_segments)
        kv_ids, kv_pos, kv_broken = _one_side("[1]", kv_ids, kv_pos)
        if q_ids.ndim != kv_ids.ndim:
            raise ValueError(
                "`segment_ids` must have as many axes on both sides, got shapes "
                f"{q_ids.shape} and {kv_ids.shape}."
            )
        broken = _either(broken, kv_broken)
        return cls(q_ids, kv_ids, q_pos, kv_pos, broken, max_segments)

    @classmethod
    def from_seqlens(
        cls,
        q_seqlens: Ids,
        kv_seqlens: Ids | None = None,
        *,
        q_len: int,
        kv_len: int | None = None,
    ) -> "SequenceDescriptor":
        """A descriptor of sequences packed back to back, from their lengths.

        Args:
            q_seqlens: Integers ``[*B, M]``: query tokens of each of a row's
                sequences, in order; 0 where a row has fewer than M.
            kv_seqlens: The same for keys, ``[*B, M]``, paired with the queries by
                index. Default: as `q_seqlens`.
            q_len: Length T of a row of queries; the rest of the row is padding.
            kv_len: Length S of a row of keys. Default: `q_len`; required with
                `kv_seqlens`.

        Returns:
            The descriptor; sequence m of a row has id m + 1, and its `max_segments` is
            M.

        Raises:
            TypeError: if lengths are not integers.
            ValueError: if shapes do not match, or if host data (NumPy, lists) hold a
                negative length or more tokens than the row. Traced lengths that do
                so make the row's output NaN.

        Example:
            >>> desc = SequenceDescriptor.from_seqlens([[3, 2], [4, 0]], q_len=6)
            >>> print(desc.segment_ids[0])
            [[1 1 1 2 2 0]
             [1 1 1 1 0 0]]

        Source: `SequenceDescriptor.from_seqlens` of TransformerEngine, here with
        several sequences a row.
        """
        q_len = as_int("q_len", q_len, 0)
        if isinstance(q_seqlens, tuple) and any(map(_is_array, q_seqlens)):
            raise ValueError(
                "`q_seqlens` must be one array, got a tuple of arrays: give the "
                "lengths of keys as `kv_seqlens`."
            )
        q_seqlens, q_broken = _as_int32("q_seqlens", q_seqlens)
        q_ids, q_pos, overfull = _unpack_lengths("q_seqlens", q_seqlens, q_len)
        broken = _either(q_broken, overfull)
        max_segments = max(1, q_seqlens.shape[-1])
        if kv_seqlens is None and kv_len is None:
            return cls(q_ids, None, q_pos, None, broken, max_segments)
        if kv_seqlens is None or kv_len is None:
            raise ValueError(
                "`kv_seqlens` and `kv_len` go together: give both for "
                "cross-attention, neither for self-attention."
            )
        kv_len = as_int("kv_len", kv_len, 0)
        kv_seqlens, kv_broken = _as_int32("kv_seqlens", kv_seqlens)
        _check_same_shape("kv_seqlens", kv_seqlens, "q_seqlens", q_seqlens)
        kv_ids, kv_pos, overfull = _unpack_lengths("kv_seqlens", kv_seqlens, kv_len)
        broken = _either(broken, _either(kv_broken, overfull))
        return cls(q_ids, kv_ids, q_pos, kv_pos, broken, max_segments)

    @property
    def max_segments(self) -> int | None:
        """The number of sequences that no row exceeds, a Python integer, if known."""
        return self._max_segments

    @property
    def segment_ids(self) -> tuple[Array, Array]:
        """Segment ids of the (query ``[*B, T]``, key/value ``[*B, S]``) tokens."""
        return self._q_ids, self._q_ids if self._kv_ids is None else self._kv_ids

    @property
    def segment_pos(self) -> tuple[Array, Array]:
        """Positions of the (query ``[*B, T]``, key/value ``[*B, S]``) tokens.

        The running index within the sequence where none were given; then 0 at padding.
        """
        q_pos = running_index(self._q_ids) if self._q_pos is None else self._q_pos
        if self._kv_ids is None:
            return q_pos, q_pos
        if self._kv_pos is None:
            return q_pos, running_index(self._kv_ids)
        return q_pos, self._kv_pos

    def check(self) -> "SequenceDescriptor":
        """Checks the values, which waits for the device; returns the descriptor.

        Host data (NumPy, lists) are checked when the descriptor is made; this is for
        `jax.Array` values, outside `jax.jit`.

        Returns:
            The descriptor itself.

        Raises:
            ValueError: if a row holds values that would make its output NaN, or more
                sequences than `max_segments`.
            TypeError: if the values are traced.

        Example:
            >>> desc = SequenceDescriptor.from_seqlens(jnp.array([[3, 9]]), q_len=8)
            >>> desc.check()
            Traceback (most recent call last):
            ...
            ValueError: rows [0] of this `SequenceDescriptor` are broken: ...
        """
        if any(isinstance(x, Tracer) for x in jax.tree.leaves(self)):
            raise TypeError(
                "`SequenceDescriptor.check` needs concrete values: call it outside "
                "`jax.jit` and other transformations."
            )
        if self._broken is not None and np.any(self._broken):
            rows = np.argwhere(np.asarray(self._broken)).squeeze(-1).tolist()
            raise ValueError(
                f"rows {rows} of this `SequenceDescriptor` are broken: ids or "
                "positions that do not fit int32, or sequence lengths that are "
                "negative or add up to more tokens than the row holds."
            )
        _check_number(np.asarray(self._q_ids), self._max_segments)
        return self


from_segment_ids_and_pos = SequenceDescriptor.from_segment_ids_and_pos


def running_index(ids: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """The running index of each token within its sequence; 0 at padding."""
    # Row by row: a scatter that indexes rows makes the partitioner gather them.
    check_whole_rows("segment_ids", ids)
    token = jnp.arange(ids.shape[-1], dtype=jnp.int32)

    @functools.partial(jnp.vectorize, signature="(t)->(t)")
    def one_row(ids):
        sorted_ids, order = lax.sort((ids, token), num_keys=1, is_stable=True)
        is_first = jnp.ones_like(ids, bool)
        is_first = is_first.at[1:].set(sorted_ids[1:] != sorted_ids[:-1])
        first = lax.cummax(jnp.where(is_first, token, 0))
        index = jnp.zeros_like(token).at[order].set(token - first, unique_indices=True)
        return jnp.where(ids > 0, index, 0)

    return one_row(ids)


def as_integers(name: str, value) -> np.ndarray | Array:
    """`value` as an integer array, host data as NumPy; or an error that says why."""
    if not isinstance(value, jax.Array):
        if isinstance(value, jax.ShapeDtypeStruct):
            raise TypeError(
                f"`{name}` is a `jax.ShapeDtypeStruct`; make the descriptor inside "
                "`jax.eval_shape` to describe shapes without values."
            )
        try:
            value = np.asarray(value)
        except ValueError as error:
            raise ValueError(f"`{name}` must be a rectangular array: {error}") from None
        if value.size == 0 and value.dtype == np.float64:  # an empty list
            value = value.astype(np.int32)
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(
            f"`{name}` must hold integers, got {value.dtype} of shape {value.shape}."
        )
    if value.ndim == 0:
        raise ValueError(f"`{name}` must have at least one axis, got a scalar.")
    return value


def _is_array(value) -> bool:
    return isinstance(value, jax.Array | np.ndarray)


def _sides(name: str, value) -> tuple[Any, Any]:
    """(query, key/value); the latter None if the value is not a pair."""
    if not isinstance(value, tuple):
        return value, None
    if len(value) != 2:
        raise ValueError(
            f"`{name}` must be one array or a pair (query, key/value), got a tuple of "
            f"{len(value)}."
        )
    return value


def _one_side(suffix: str, ids, pos):
    """Ids and positions of one side as int32, and the rows that they break."""
    ids, broken = _as_int32(f"segment_ids{suffix}", ids)
    if pos is not None:
        name = f"segment_pos{suffix}"
        _check_same_shape(name, as_integers(name, pos), f"segment_ids{suffix}", ids)
        pos, pos_broken = _as_int32(name, pos, where=ids > 0)
        broken = _either(broken, pos_broken)
    return ids, pos, broken


def _as_int32(name: str, value, where: Any = True):
    """`value` as int32, and the rows that do not fit, None if all do.

    What does not fit is an error in host data, `where` it matters.
    """
    value = as_integers(name, value)
    if jnp.can_cast(value.dtype, jnp.int32):
        return value.astype(np.int32), None
    outside = ((value < LOWEST) | (value > HIGHEST)) & where
    clipped = value.clip(LOWEST, HIGHEST).astype(np.int32)
    if not isinstance(outside, np.ndarray):
        return clipped, outside.any(axis=-1)
    if outside.any():
        raise ValueError(f"`{name}` must fit int32, got {value[outside][0]}.")
    return clipped, None


def _either(a, b):
    """Rows broken by either, where None is no row."""
    return b if a is None else a if b is None else a | b


def _check_number(ids, max_segments: int | None) -> None:
    """Host data only: no row holds more than `max_segments` sequences."""
    if max_segments is None or not isinstance(ids, np.ndarray):
        return
    for row in ids.reshape(math.prod(ids.shape[:-1]), ids.shape[-1]):
        number = np.unique(row[row > 0]).size
        if number > max_segments:
            raise ValueError(
                "`max_segments` must be at least the number of sequences of each row, "
                f"got {max_segments} and a row of {number}."
            )


def _check_same_shape(name, value, other_name, other):
    if value.shape != other.shape:
        raise ValueError(
            f"`{name}` must have the shape of `{other_name}`, {other.shape}, got "
            f"{value.shape}."
        )


def _unpack_lengths(name: str, lengths, row_len: int):
    """Ids and positions [*B, row_len] of sequences packed back to back; broken rows."""
    check_whole_rows(name, lengths)
    broken = (lengths < 0).any(axis=-1) | (lengths.sum(axis=-1) > row_len)
    if isinstance(lengths, np.ndarray):
        if np.any(broken):
            raise ValueError(
                f"`{name}` must be >= 0 and add up to at most {row_len} tokens a row, "
                f"got {lengths.tolist()}."
            )
        broken = None
    lengths = jnp.asarray(lengths)
    ends = jnp.cumsum(lengths, axis=-1, dtype=jnp.int32)
    token = jnp.arange(row_len, dtype=jnp.int32)

    @functools.partial(jnp.vectorize, signature="(m),(m)->(t),(t)")
    def one_row(starts, ends):
        # Ends at or before each token: what `jnp.searchsorted` finds, which jax 0.10.2
        # refuses along explicit axes.
        index = jnp.cumsum(jnp.zeros_like(token).at[ends].add(1, mode="drop"))
        inside = index < ends.size
        start = starts.at[index].get(mode="fill", fill_value=0)
        return jnp.where(inside, index + 1, 0), jnp.where(inside, token - start, 0)

    return *one_row(ends - lengths, ends), broken
