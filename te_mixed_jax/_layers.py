"""What the linen and the nnx layers share: everything but their parameters."""

import functools
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from te_mixed_jax import context_parallel
from te_mixed_jax._attention import dot_product_attention
from te_mixed_jax._call import check_desc
from te_mixed_jax._descriptor import SequenceDescriptor
from te_mixed_jax._mask_types import policies_from_mask_types
from te_mixed_jax._policy import FULL, MaskPolicy
from te_mixed_jax._types import accumulator_dtype

Policies = MaskPolicy | Sequence[MaskPolicy]
KernelAxes = Mapping[str, tuple[str | None, str | None, str | None]]
PROJECTIONS = ("query", "key", "value", "out")


def head_sizes(
    features: int,
    num_heads: int,
    num_kv_heads: int | None,
    head_dim: int | None,
    v_head_dim: int | None,
    rotary_base: float | None,
) -> tuple[int, int, int]:
    """The sizes K, H and V of `MultiHeadAttention`, or an error that says why not."""
    if num_kv_heads is None:
        num_kv_heads = num_heads
    elif num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"`num_kv_heads` must divide `num_heads`={num_heads}, got {num_kv_heads}."
        )
    if head_dim is None:
        if features % num_heads:
            raise ValueError(
                f"`num_heads` must divide the {features} features of the input when "
                f"`head_dim` is not given, got {num_heads}."
            )
        head_dim = features // num_heads
    if rotary_base is not None:
        if not isinstance(rotary_base, numbers.Real) or isinstance(rotary_base, bool):
            raise TypeError(
                "`rotary_base` must be a number such as 10_000.0, or None for no "
                f"rotary positions; got {rotary_base!r} ({type(rotary_base).__name__})."
            )
        if rotary_base <= 0:
            raise ValueError(f"`rotary_base` must be positive, got {rotary_base}.")
        if head_dim % 2:
            raise ValueError(
                f"`head_dim` must be even for rotary positions, got {head_dim}."
            )
    return num_kv_heads, head_dim, head_dim if v_head_dim is None else v_head_dim


def check_kernel_axes(kernel_axes: KernelAxes | None) -> KernelAxes:
    """`kernel_axes` as a mapping, or an error that says what is wrong with it."""
    axes = {} if kernel_axes is None else kernel_axes
    for name, names in axes.items():
        if name not in PROJECTIONS:
            known = ", ".join(f'"{known}"' for known in PROJECTIONS)
            raise ValueError(
                f"`kernel_axes` must have keys from {known}, got {name!r}."
            )
        if not isinstance(names, tuple | list) or len(names) != 3:
            raise ValueError(
                f'`kernel_axes["{name}"]` must name the three axes of the kernel, '
                f"None where an axis is not partitioned; got {names!r}."
            )
    return axes


def check_inputs(inputs_q, inputs_kv) -> None:
    """What stands in the place of an input of `MultiHeadAttention` by mistake."""
    for name, x in (("inputs_q", inputs_q), ("inputs_kv", inputs_kv)):
        if isinstance(x, SequenceDescriptor):
            raise TypeError(
                f"`{name}` must be an array, got a SequenceDescriptor: give it as "
                "`desc=`."
            )
        if getattr(x, "dtype", None) == jnp.bool_:
            raise TypeError(
                f"`{name}` must hold features, got bool of shape {x.shape}. A mask is "
                "given as `desc=`, a `SequenceDescriptor`, and `policy=`."
            )


class Settings(Protocol):
    """What every layer holds about the attention itself."""

    @property
    def policy(self) -> Policies: ...

    @property
    def scale(self) -> float | None: ...

    @property
    def implementation(self) -> str | None: ...

    @property
    def axis_name(self) -> str | None: ...


def attend(
    settings: Settings,
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    value: Float[Array, "*B S K V"],
    desc: SequenceDescriptor | None,
    *,
    policy: Policies | None,
    policy_ids: Any,
    attn_mask_type_per_seq: Mapping[str, Any] | None,
    window_size_per_mask_type: Mapping[str, tuple[int, int]] | None,
) -> Float[Array, "*B T N V"]:
    """The attention of a call that has policies, or mask types instead."""
    if attn_mask_type_per_seq is None:
        if window_size_per_mask_type is not None:
            raise ValueError(
                "`window_size_per_mask_type` goes with `attn_mask_type_per_seq`, got "
                "None for that. A policy has its own window: `CAUSAL.with_window(...)`."
            )
        policy = settings.policy if policy is None else policy
    else:
        for name, given in (("policy", policy), ("policy_ids", policy_ids)):
            if given is not None:
                raise ValueError(
                    f"`attn_mask_type_per_seq` and `{name}` both say which mask a "
                    "sequence has: expected one of the two, got both."
                )
        if desc is None:
            raise ValueError(
                "`attn_mask_type_per_seq` names segment ids, so it needs a `desc` that "
                "has them; got None."
            )
        policy, policy_ids = policies_from_mask_types(
            desc, attn_mask_type_per_seq, window_size_per_mask_type
        )
    attention: Any = dot_product_attention
    if settings.axis_name is not None:
        attention = functools.partial(
            context_parallel.dot_product_attention, axis_name=settings.axis_name
        )
    return attention(
        query,
        key,
        value,
        desc,
        policy=policy,
        policy_ids=policy_ids,
        scale=settings.scale,
        implementation=settings.implementation,
    )


def promote(*arrays: Array, dtype: Any = None) -> tuple[Array, ...]:
    """The arrays in `dtype`, or in the dtype that they promote to together."""
    dtype = jnp.result_type(*arrays) if dtype is None else dtype
    return tuple(jnp.asarray(x, dtype) for x in arrays)


def rotate_by_descriptor(
    query: Float[Array, "*B T N H"],
    key: Float[Array, "*B S K H"],
    desc: SequenceDescriptor | None,
    *,
    base: float,
    axis_name: str | None,
) -> tuple[Float[Array, "*B T N H"], Float[Array, "*B S K H"]]:
    """Query and key, rotated by the positions of their own side of `desc`."""
    *batch, T, _, _ = query.shape
    S = key.shape[-3]
    if desc is not None:
        check_desc(desc, tuple(batch), T, S)
    if axis_name is not None:
        if desc is None:
            desc = context_parallel._part_of_one_sequence(query, key, axis_name)
        desc = context_parallel.with_row_positions(desc, axis_name=axis_name)
    if desc is None:
        shape = (1,) * len(batch)
        q_pos = jnp.arange(T).reshape(*shape, T)
        kv_pos = jnp.arange(S).reshape(*shape, S)
    else:
        q_pos, kv_pos = desc.segment_pos
    return rotate(query, q_pos, base=base), rotate(key, kv_pos, base=base)


def rotate(
    x: Float[Array, "*B T N H"], positions: Int[Array, "*b T"], *, base: float
) -> Float[Array, "*B T N H"]:
    """Rotary position embedding: feature pairs (i, i + H/2) turn by pos / base^(2i/H).

    In fp32 (fp64 for fp64), returned in the dtype of `x`.

    Source: Su et al. 2021, "RoFormer". The pairing of the first half of the features
    with the second is that of GPT-NeoX, Llama and `flax.nnx.RoPE`.
    """
    dtype = accumulator_dtype(x.dtype)
    half = x.shape[-1] // 2
    frequencies = base ** (-jnp.arange(half, dtype=dtype) / half)
    frequencies = frequencies.reshape((1,) * (x.ndim - 1) + (half,))
    angles = jnp.asarray(positions, dtype)[..., None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    a, b = x[..., :half].astype(dtype), x[..., half:].astype(dtype)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)


def attention_fn(
    desc: SequenceDescriptor | None = None,
    *,
    policy: Policies = FULL,
    policy_ids: Any = None,
    scale: float | None = None,
    implementation: str | None = None,
) -> Callable[..., Array]:
    """A function for the argument `attention_fn` of Flax's own attention modules.

    For `flax.linen.MultiHeadDotProductAttention` and `flax.nnx.MultiHeadAttention`. It
    has the arguments of `flax.linen.dot_product_attention` and of
    `flax.nnx.dot_product_attention`, and refuses those that it cannot honour: it never
    ignores a mask, a bias, dropout, a precision or a request for the attention weights.

    It closes over `desc` and `policy_ids`. For data that change from step to step,
    call this inside the compiled function and build the module there (linen), or
    assign it to `layer.attention_fn` of a module that is merged there (nnx).

    Dims: `*B` batch axes; `T` query length.

    Args:
        desc: Segment ids and positions. Default: every row is one sequence.
        policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
        policy_ids: Integers ``[*B, T]``: the policy of each query token.
        scale: Factor on the scores. Default: one over the root of the head dim.
        implementation: As in `te_mixed_jax.dot_product_attention`.

    Returns:
        A function of (query ``[*B, T, N, H]``, key ``[*B, S, K, H]``, value
        ``[*B, S, K, V]``) and Flax's further arguments, which returns ``[*B, T, N, V]``
        in `dtype`.

    Raises:
        NotImplementedError: by the function, where one of Flax's arguments asks for
            something else than it does.
        ValueError, TypeError: by the function, as `dot_product_attention`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import linen
        >>> from te_mixed_jax import CAUSAL, SequenceDescriptor
        >>> from te_mixed_jax.linen import attention_fn
        >>> desc = SequenceDescriptor.from_seqlens([[3, 2]], q_len=6)
        >>> layer = linen.MultiHeadDotProductAttention(
        ...     num_heads=2, attention_fn=attention_fn(desc, policy=CAUSAL)
        ... )
        >>> x = jnp.ones((1, 6, 8))
        >>> out, variables = layer.init_with_output(jax.random.key(0), x)
        >>> out.shape
        (1, 6, 8)

    Source: the hook `attention_fn` of Flax's attention modules.
    """

    # The argument list is the union of those of flax.linen.dot_product_attention and
    # flax.nnx.dot_product_attention, and `input_positions` of newer nnx modules.
    def attention(
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K V"],
        bias: Any = None,
        mask: Any = None,
        broadcast_dropout: bool = True,
        dropout_rng: Any = None,
        dropout_rate: float = 0.0,
        deterministic: bool = False,
        dtype: Any = None,
        precision: Any = None,
        module: Any = None,
        force_fp32_for_softmax: bool = False,
        einsum_dot_general: Any = None,
        qk_attn_weights_einsum: Any = None,
        attn_weights_value_einsum: Any = None,
        promote_dtype: Any = None,
        is_causal: bool = False,
        input_positions: Any = None,
    ) -> Float[Array, "*B T N V"]:
        # Softmax is in fp32 anyway; the other two matter only where there is dropout.
        del force_fp32_for_softmax, broadcast_dropout, dropout_rng
        default = (None, "default", jax.lax.Precision.DEFAULT)
        unsupported = {
            "mask": (mask is not None, _DESCRIBE_MASK),
            "bias": (bias is not None, _DESCRIBE_MASK),
            "is_causal": (is_causal, "Expected False: give `policy=CAUSAL` instead."),
            "dropout_rate": (
                dropout_rate > 0 and not deterministic,
                f"There is no dropout on attention weights; got {dropout_rate} with "
                "`deterministic=False`. Expected 0.0, or `deterministic=True`.",
            ),
            "module": (
                module is not None,
                "The attention weights, which Flax's `sow_weights=True` asks for, are "
                "never formed. Expected `sow_weights=False`.",
            ),
            "precision": (
                precision not in default,
                f"Expected None, got {precision!r}. The precision of the attention's "
                "products can be set around the whole computation, by "
                "`jax.default_matmul_precision`.",
            ),
            "input_positions": (
                input_positions is not None,
                "Expected None: positions are those of `desc`. `MultiHeadAttention` "
                "of this package rotates by them, with `rotary_base`.",
            ),
            "einsum_dot_general": (einsum_dot_general is not None, _OWN_PRODUCTS),
            "qk_attn_weights_einsum": (
                qk_attn_weights_einsum is not None,
                _OWN_PRODUCTS,
            ),
            "attn_weights_value_einsum": (
                attn_weights_value_einsum is not None,
                _OWN_PRODUCTS,
            ),
        }
        for name, (asked_for, advice) in unsupported.items():
            if asked_for:
                raise NotImplementedError(
                    f"`{name}` is not supported by te_mixed_jax's `attention_fn`. "
                    f"{advice}"
                )
        if promote_dtype is None:
            query, key, value = promote(query, key, value, dtype=dtype)
        else:
            query, key, value = promote_dtype((query, key, value), dtype=dtype)
        return dot_product_attention(
            query,
            key,
            value,
            desc,
            policy=policy,
            policy_ids=policy_ids,
            scale=scale,
            implementation=implementation,
        )

    return attention


_DESCRIBE_MASK = (
    "Expected None: describe the sequences with a `SequenceDescriptor`, and what their "
    "queries may see with a `policy`."
)
_OWN_PRODUCTS = "Expected None: the attention computes its own products."
