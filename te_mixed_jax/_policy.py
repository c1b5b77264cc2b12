"""Which keys may a query see?  One contiguous range of positions, per policy."""

import dataclasses
import operator

import jax.numpy as jnp
from jax.core import Tracer
from jaxtyping import Array, Int

# Ends of a range that is open on that side.
LOWEST = -(2**31)
HIGHEST = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class QueryTokens:
    """What a policy may know of the query tokens: int32 arrays ``[*B, T]``.

    Values at padding tokens are arbitrary. A field that a policy does not read is
    never computed: XLA drops it.

    Attributes:
        pos: Position of the query in its sequence.
        num_queries: Number of query tokens of the same sequence.
        num_keys: Number of key tokens of the same sequence.
        first_key: Lowest key position of the same sequence.

    Example:
        One sequence of three queries and five keys:

        >>> pos = jnp.array([[0, 1, 2]])
        >>> three, five, zero = (jnp.full_like(pos, n) for n in (3, 5, 0))
        >>> q = QueryTokens(pos, num_queries=three, num_keys=five, first_key=zero)
        >>> lowest, highest = CAUSAL_BOTTOM_RIGHT.key_range(q)
        >>> print(highest)
        [[2 3 4]]
    """

    pos: Int[Array, "*B T"]
    num_queries: Int[Array, "*B T"]
    num_keys: Int[Array, "*B T"]
    first_key: Int[Array, "*B T"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskPolicy:
    """A rule that gives each query a contiguous range of key positions.

    A policy acts inside one sequence; keys of other sequences are never seen. Ready
    made: `FULL`, `CAUSAL`, `CAUSAL_BOTTOM_RIGHT`, `prefix`, `chunked`. To write
    another, subclass this as a frozen dataclass and define `key_range`; instances
    must be hashable, since a policy is static under `jax.jit`.

    Attributes:
        left: Keys further than this before the query are hidden; -1: no limit.
        right: Keys further than this after the query are hidden; -1: no limit.

    Example:
        >>> import dataclasses
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class OwnBlock(MaskPolicy):
        ...     size: int
        ...
        ...     def key_range(self, q):
        ...         start = q.pos - q.pos % self.size
        ...         return start, start + self.size - 1
        >>> x = jnp.ones((1, 6, 4, 64))
        >>> dot_product_attention(x, x, x, policy=OwnBlock(size=2)).shape
        (1, 6, 4, 64)
    """

    left: int = -1
    right: int = -1

    def key_range(self, q: QueryTokens) -> tuple:
        """Lowest and highest visible key position, inclusive, before the window.

        Args:
            q: The query tokens, int32 arrays ``[*B, T]``.

        Returns:
            `(lowest, highest)`: ints or int32 arrays that broadcast to ``[*B, T]``;
            `lowest > highest` where nothing may be seen.

        Raises:
            NotImplementedError: if the subclass does not define it.

        Example:
            >>> pos = jnp.array([[0, 1, 2]])
            >>> q = QueryTokens(pos, num_queries=pos, num_keys=pos, first_key=pos)
            >>> print(CAUSAL.key_range(q)[1])
            [[0 1 2]]
        """
        raise NotImplementedError(f"{type(self).__name__} does not define key_range")

    def window_shift(self, q: QueryTokens) -> Int[Array, "*B T"] | int:
        """How far behind the query's position the centre of its window lies.

        Args:
            q: The query tokens, int32 arrays ``[*B, T]``.

        Returns:
            An int, or int32 ``[*B, T]``; 0 unless a subclass says otherwise.

        Example:
            >>> pos = jnp.array([[0, 1, 2]])
            >>> q = QueryTokens(pos, num_queries=pos, num_keys=pos + 2, first_key=pos)
            >>> print(CAUSAL_BOTTOM_RIGHT.window_shift(q))
            [[2 2 2]]
        """
        del q
        return 0

    def with_window(self, left: int, right: int) -> "MaskPolicy":
        """The same policy, cut to the key positions ``[q - left, q + right]``.

        Args:
            left: Number of keys before the query's position that stay visible; -1
                for no limit. Inclusive: `with_window(0, 0)` leaves the query's own
                position.
            right: The same after the query's position.

        Returns:
            A new policy. A window that was there before is replaced.

        Raises:
            TypeError: if a bound is not an integer.
            ValueError: if a bound is below -1.

        Example:
            >>> CAUSAL.with_window(127, 0)
            CAUSAL.with_window(127, 0)

        Source: sliding-window attention, Beltagy et al. 2020, "Longformer"; the
        convention (inclusive, -1 unbounded) is TransformerEngine's.
        """
        left = as_int("left", left, -1)
        right = as_int("right", right, -1)
        return dataclasses.replace(self, left=left, right=right)

    def _name(self) -> str:
        fields = [
            f"{f.name}={getattr(self, f.name)!r}"
            for f in dataclasses.fields(self)
            if f.name not in ("left", "right")
        ]
        return f"{type(self).__name__}({', '.join(fields)})"

    def __repr__(self) -> str:
        if self.left == self.right == -1:
            return self._name()
        return f"{self._name()}.with_window({self.left}, {self.right})"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Full(MaskPolicy):
    def key_range(self, q: QueryTokens) -> tuple:
        return LOWEST, HIGHEST

    def _name(self) -> str:
        return "FULL"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Causal(MaskPolicy):
    bottom_right: bool = False

    def window_shift(self, q: QueryTokens) -> Int[Array, "*B T"] | int:
        return q.num_keys - q.num_queries if self.bottom_right else 0

    def key_range(self, q: QueryTokens) -> tuple:
        return LOWEST, add_clipped(q.pos, self.window_shift(q))

    def _name(self) -> str:
        return "CAUSAL_BOTTOM_RIGHT" if self.bottom_right else "CAUSAL"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Prefix(MaskPolicy):
    length: int

    def key_range(self, q: QueryTokens) -> tuple:
        end_of_prefix = add_clipped(q.first_key, self.length - 1)
        return LOWEST, jnp.maximum(end_of_prefix, q.pos)

    def _name(self) -> str:
        return f"prefix({self.length})"


@dataclasses.dataclass(frozen=True, kw_only=True, repr=False)
class _Chunked(MaskPolicy):
    size: int
    left_chunks: int

    def key_range(self, q: QueryTokens) -> tuple:
        # Chunks count from the first key. `in_chunk` is exact for negative offsets
        # too: jnp's remainder takes the divisor's sign.
        in_chunk = jnp.remainder(q.pos - q.first_key, self.size)
        start = q.pos - in_chunk
        before = min(self.left_chunks * self.size, HIGHEST)
        lowest = LOWEST if self.left_chunks < 0 else add_clipped(start, -before)
        return lowest, add_clipped(start, self.size - 1)

    def _name(self) -> str:
        return f"chunked({self.size}, {self.left_chunks})"


FULL = _Full()
"""Every key of the sequence."""

CAUSAL = _Causal()
"""Keys at or before the query's own position (the diagonal starts at the top left).

Two queries, four keys: the queries see 1 and 2 keys.
"""

CAUSAL_BOTTOM_RIGHT = _Causal(bottom_right=True)
"""Causal, shifted so that a sequence's last query sees its last key.

Two queries, four keys: the queries see 3 and 4 keys. With as many queries as keys it
equals `CAUSAL`.
"""


def prefix(length: int) -> MaskPolicy:
    """Prefix-LM: the first `length` keys are seen by all, the others causally.

    Args:
        length: Number of positions, counted from the sequence's first key; >= 0.

    Returns:
        The policy: key position < length, or <= the query's own position.

    Raises:
        TypeError: if `length` is not an integer.
        ValueError: if it is negative.

    Example:
        >>> prefix(16)
        prefix(16)

    Source: Raffel et al. 2020, "Exploring the Limits of Transfer Learning", fig. 4.
    """
    return _Prefix(length=as_int("length", length, 0))


def chunked(size: int, left_chunks: int) -> MaskPolicy:
    """Streaming: the query's own chunk whole, and `left_chunks` chunks before it.

    Args:
        size: Positions in a chunk, counted from the sequence's first key; >= 1.
        left_chunks: Number of earlier chunks that are seen; -1: all of them.

    Returns:
        The policy: key chunks ``q // size - left_chunks`` to ``q // size``.

    Raises:
        TypeError: if an argument is not an integer.
        ValueError: if `size` < 1 or `left_chunks` < -1.

    Example:
        >>> chunked(8, 2)
        chunked(8, 2)

    Source: Chen et al. 2021, "Developing Real-time Streaming Transformer Transducer
    for Speech Recognition on Large-scale Dataset".
    """
    return _Chunked(
        size=as_int("size", size, 1),
        left_chunks=as_int("left_chunks", left_chunks, -1),
    )


def as_int(name: str, value, at_least: int) -> int:
    """`value` as a Python int, or an error that names the argument."""
    if isinstance(value, Tracer):
        raise TypeError(
            f"`{name}` must be a Python integer, since it is static; got a traced "
            "value. Several policies, and `policy_ids`, say what differs by sequence."
        )
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"`{name}` must be an integer, got {value!r} ({type(value).__name__})."
        ) from None
    if not at_least <= number <= HIGHEST:
        raise ValueError(
            f"`{name}` must be an integer from {at_least} to 2**31 - 1, got {number}."
        )
    return number


def add_clipped(x, y):
    """`x + y` in int32, clipped to its range instead of wrapping."""
    total = x + y
    total = jnp.where((y > 0) & (total < x), HIGHEST, total)
    return jnp.where((y < 0) & (total > x), LOWEST, total)


def visible_range(policy: MaskPolicy, q: QueryTokens) -> tuple:
    """`policy.key_range`, cut to the policy's window."""
    lowest, highest = policy.key_range(q)
    # Shift and window first: their sum is small where position + shift may not fit.
    shift = jnp.asarray(policy.window_shift(q), jnp.int32)
    if policy.left >= 0:
        start = add_clipped(q.pos, add_clipped(shift, -policy.left))
        lowest = jnp.maximum(lowest, start)
    if policy.right >= 0:
        end = add_clipped(q.pos, add_clipped(shift, policy.right))
        highest = jnp.minimum(highest, end)
    return lowest, highest
