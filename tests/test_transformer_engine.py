"""TransformerEngine's descriptors, and what is said where it is not installed."""

import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_mixed_jax as te
from te_mixed_jax.lowerings import transformer_engine

NONE = jnp.zeros(0), jnp.zeros(0)


def theirs(**pairs: Any) -> SimpleNamespace:
    """A descriptor as TransformerEngine holds it: missing pairs are of size 0."""
    fields = ("seqlens", "seq_offsets", "segment_ids", "segment_pos")
    return SimpleNamespace(**{name: pairs.get(name, NONE) for name in fields})


def test_from_segment_ids_and_positions() -> None:
    ids = jnp.asarray([[1, 1, 2, 0]]), jnp.asarray([[1, 2, 2, 2, 0]])
    pos = jnp.asarray([[4, 5, 0, 0]]), jnp.asarray([[4, 0, 1, 2, 0]])
    desc = te.from_transformer_engine(theirs(segment_ids=ids, segment_pos=pos))
    for got, want in zip(desc.segment_ids + desc.segment_pos, ids + pos, strict=True):
        np.testing.assert_array_equal(got, want)


def test_from_lengths_and_offsets() -> None:
    """Gaps, unused slots, an end offset that nobody reads, sides that differ."""
    lengths = (
        jnp.asarray([[2, 1, -1], [3, -1, -1]]),
        jnp.asarray([[1, 4, 0], [2, 0, 0]]),
    )
    starts = (
        jnp.asarray([[1, 4, -1, -1], [0, -1, -1, -1]]),
        jnp.asarray([[0, 1, 5, -1], [3, -1, -1, -1]]),
    )
    desc = te.from_transformer_engine(
        theirs(seqlens=lengths, seq_offsets=starts), q_len=5, kv_len=6
    )
    q_ids, kv_ids = desc.segment_ids
    np.testing.assert_array_equal(q_ids, [[0, 1, 1, 0, 2], [1, 1, 1, 0, 0]])
    np.testing.assert_array_equal(kv_ids, [[1, 2, 2, 2, 2, 0], [0, 0, 0, 1, 1, 0]])
    assert desc.max_segments == 3


def test_from_one_length_a_row() -> None:
    lengths = jnp.asarray([3, 0]), jnp.asarray([1, 2])
    desc = te.from_transformer_engine(theirs(seqlens=lengths), q_len=4)
    np.testing.assert_array_equal(desc.segment_ids[0], [[1, 1, 1, 0], [0] * 4])
    np.testing.assert_array_equal(desc.segment_ids[1], [[1, 0, 0, 0], [1, 1, 0, 0]])


@pytest.mark.parametrize(
    ("desc", "q_len", "what"),
    [
        (theirs(seqlens=(jnp.ones(2), jnp.ones(2))), None, "made of lengths"),
        (theirs(segment_ids=(jnp.ones((1, 2)),) * 2), 2, "made of segment ids"),
    ],
)
def test_the_length_of_a_row_is_given_where_it_is_needed(desc, q_len, what) -> None:
    with pytest.raises(ValueError, match=f"`q_len` must be given.*{what}"):
        te.from_transformer_engine(desc, q_len=q_len)


def test_and_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class SequenceDescriptor:
        @staticmethod
        def from_segment_ids_and_pos(segment_ids, segment_pos):
            return theirs(segment_ids=segment_ids, segment_pos=segment_pos)

    module = SimpleNamespace(SequenceDescriptor=SequenceDescriptor)
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", module)
    desc = te.from_segment_ids_and_pos([[1, 1, 2, 0]])
    back = te.from_transformer_engine(te.to_transformer_engine(desc))
    for got, want in zip(back.segment_pos, desc.segment_pos, strict=True):
        assert isinstance(got, jax.Array)
        np.testing.assert_array_equal(got, want)


def test_to_transformer_engine_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformer_engine.jax.attention", None)
    with pytest.raises(ImportError, match=r"pip install \"te_mixed_jax\[te\]\""):
        te.to_transformer_engine(te.from_segment_ids_and_pos([[1, 1, 2, 0]]))


@pytest.mark.parametrize(
    ("version", "said"),
    [(None, "is not installed"), ("2.19.1", "not 2.19.1"), ("2.9rc1", "not 2.9rc1")],
)
def test_absent_or_too_old(monkeypatch: pytest.MonkeyPatch, version, said) -> None:
    def found(name: str) -> str:
        assert name == "transformer-engine"
        if version is None:
            raise transformer_engine.importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(transformer_engine.importlib.metadata, "version", found)
    transformer_engine._not_installed.cache_clear()
    x = jnp.ones((1, 5, 1, 8), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match=rf"TransformerEngine 2\.20.*{said}"):
        te.dot_product_attention(x, x, x, implementation="te")
    transformer_engine._not_installed.cache_clear()
