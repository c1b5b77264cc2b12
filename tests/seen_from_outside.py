# pyright: strict
"""What a type checker makes of a user's file. Strict mode asks for `py.typed` too.

Checked against the wheel by test_packaging.py, against the source by `make lint`.
"""

from collections.abc import Sequence
from typing import Any, assert_type

import jax

import te_mixed_jax as tmj
from te_mixed_jax import context_parallel as cp


def describe(ids: jax.Array, lengths: jax.Array) -> None:
    desc = tmj.from_segment_ids_and_pos(ids, max_segments=4)
    assert_type(desc, tmj.SequenceDescriptor)
    assert_type(desc.segment_ids, tuple[jax.Array, jax.Array])
    assert_type(
        tmj.SequenceDescriptor.from_seqlens(lengths, q_len=8), tmj.SequenceDescriptor
    )
    assert_type(tmj.from_transformer_engine(desc), tmj.SequenceDescriptor)
    assert_type(
        tmj.policies_from_mask_types(desc, {"padding": [[1]]}),
        tuple[tuple[tmj.MaskPolicy, ...], jax.Array],
    )


def attend(x: jax.Array, desc: tmj.SequenceDescriptor) -> None:
    policy: Sequence[tmj.MaskPolicy] = tmj.CAUSAL, tmj.prefix(3).with_window(4, -1)
    ids: Any = [[0, 1] * 4]

    assert_type(tmj.dot_product_attention(x, x, x, desc), jax.Array)
    out = tmj.dot_product_attention(
        *(x, x, x, desc), policy=policy, policy_ids=ids, return_lse=True
    )
    assert_type(out, tuple[jax.Array, jax.Array])
    assert_type(cp.dot_product_attention(x, x, x, desc, axis_name="cp"), jax.Array)
    assert_type(tmj.explain(x, x, x, desc, policy=policy), dict[str, str])


def mistakes(x: jax.Array) -> None:
    """Each is an error; were it none, the comment that allows it would be one."""
    tmj.CAUSAL.with_window(4)  # pyright: ignore[reportCallIssue]
    tmj.explain(x, x, x, policy="causal")  # pyright: ignore[reportArgumentType]
