"""Attention layers for Flax nnx."""

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float

try:
    from flax import nnx
    from flax.typing import Dtype, Initializer, PrecisionLike
except ImportError as error:
    raise ImportError(
        '`te_mixed_jax.nnx` needs Flax: `pip install "te_mixed_jax[flax]"`.'
    ) from error

from te_mixed_jax._descriptor import SequenceDescriptor
from te_mixed_jax._layers import (
    KernelAxes,
    Policies,
    attend,
    check_inputs,
    check_kernel_axes,
    head_sizes,
    promote,
    rotate_by_descriptor,
)
from te_mixed_jax._layers import attention_fn as attention_fn
from te_mixed_jax._policy import FULL

_KERNEL_INIT = nnx.initializers.lecun_normal()
_BIAS_INIT = nnx.initializers.zeros_init()


class DotProductAttention(nnx.Module):
    """Attention over packed rows, as a layer without parameters.

    Dims: `*B` batch axes; `T` query length; `S` key/value length; `N` query heads; `K`
    key/value heads; `H` query/key and `V` value head dim.

    Args:
        policy: Policy, or sequence of policies, of calls that name none.
        scale: Factor on the scores, a Python number. Default: ``1 / sqrt(H)``.
        implementation: As in `te_mixed_jax.dot_product_attention`.
        axis_name: Inside `jax.shard_map`: the mesh axis along which the tokens of a row
            are split, as in `te_mixed_jax.context_parallel`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from te_mixed_jax import SequenceDescriptor
        >>> from te_mixed_jax.nnx import DotProductAttention
        >>> desc = SequenceDescriptor.from_segment_ids_and_pos([[1, 1, 1, 2, 2, 0]])
        >>> x = jnp.ones((1, 6, 4, 64))
        >>> out = DotProductAttention()(
        ...     *(x, x, x, desc),
        ...     attn_mask_type_per_seq={"padding": [[2]], "padding_causal": [[1]]},
        ...     window_size_per_mask_type={"padding_causal": (128, 0)},
        ... )
        >>> out.shape
        (1, 6, 4, 64)

    Source: as `te_mixed_jax.dot_product_attention`; the mask types are those of
    TransformerEngine.
    """

    def __init__(
        self,
        *,
        policy: Policies = FULL,
        scale: float | None = None,
        implementation: str | None = None,
        axis_name: str | None = None,
    ):
        self.policy = _static(policy)
        self.scale = scale
        self.implementation = implementation
        self.axis_name = axis_name

    def __call__(
        self,
        query: Float[Array, "*B T N H"],
        key: Float[Array, "*B S K H"],
        value: Float[Array, "*B S K V"],
        desc: SequenceDescriptor | None = None,
        *,
        policy: Policies | None = None,
        policy_ids: Any = None,
        attn_mask_type_per_seq: Mapping[str, Any] | None = None,
        window_size_per_mask_type: Mapping[str, tuple[int, int]] | None = None,
    ) -> Float[Array, "*B T N V"]:
        """Attention, with policies or with mask types.

        Args:
            query: Float array ``[*B, T, N, H]``.
            key: ``[*B, S, K, H]``, of the same dtype; K divides N.
            value: ``[*B, S, K, V]``, of the same dtype.
            desc: Segment ids and positions. Default: every row is one sequence.
            policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
                Default: the layer's.
            policy_ids: Integers ``[*B, T]``: the policy of each query token.
            attn_mask_type_per_seq: Instead of `policy` and `policy_ids`: per mask type
                the segment ids that run with it, as in `policies_from_mask_types`.
            window_size_per_mask_type: With it: per mask type a window (left, right).

        Returns:
            The output ``[*B, T, N, V]`` in the query's dtype; 0 at padding.

        Raises:
            ValueError: if mask types are given and policies too, or without `desc`.
            ValueError, TypeError, NotImplementedError: as `dot_product_attention` and
                `policies_from_mask_types`.
        """
        return attend(
            self,
            query,
            key,
            value,
            desc,
            policy=policy,
            policy_ids=policy_ids,
            attn_mask_type_per_seq=attn_mask_type_per_seq,
            window_size_per_mask_type=window_size_per_mask_type,
        )


class MultiHeadAttention(nnx.Module):
    """Multi-head attention over packed rows: projections, rotary positions, attention.

    The parameters are named and shaped as those of `te_mixed_jax.linen`'s layer and
    of `flax.nnx.MultiHeadAttention`: kernels `query` ``[F, N, H]``, `key`
    ``[G, K, H]``, `value` ``[G, K, V]``, `out` ``[N, V, O]``. Linen's parameters
    come in by ``nnx.update(layer, variables["params"])``.

    Dims: `*B` batch axes; `T` query length; `S` key/value length; `F` features of the
    query's input, `G` of the key's and value's, `O` of the output; `N` query heads; `K`
    key/value heads; `H` query/key and `V` value head dim.

    Args:
        num_heads: N.
        in_features: F.
        in_kv_features: G. Default: F.
        num_kv_heads: K, which divides N (grouped-query attention). Default: N.
        head_dim: H. Default: F divided by N.
        v_head_dim: V. Default: H.
        out_features: O. Default: F.
        use_bias: Whether the projections have a bias.
        qkv_bias: The same for query, key and value alone. Default: `use_bias`.
        rotary_base: Base of the rotary position embedding of query and key, such as
            10_000.0. Positions are those of the descriptor, each side by its own.
            Angles are fp32: good for positions up to about 10**5. Default: none.
        policy: Policy, or sequence of policies, of calls that name none.
        scale: Factor on the scores, a Python number. Default: ``1 / sqrt(H)``.
        implementation: As in `te_mixed_jax.dot_product_attention`.
        axis_name: Inside `jax.shard_map`: the mesh axis along which the tokens of a row
            are split, as in `te_mixed_jax.context_parallel`.
        dtype: Dtype of projections, attention and output. Default: inferred from
            inputs and parameters.
        param_dtype: Dtype of the parameters.
        precision: Precision of the projections.
        kernel_init: Initializer of the kernels, called with two axes (in, out).
        bias_init: Initializer of the biases.
        kernel_axes: Axis names of the kernels, by projection: the metadata
            `out_sharding` of kernels and, with them, of biases. nnx then wants a mesh
            (`jax.set_mesh`) where the layer is made, and rules for names that are not
            axes of the mesh (`flax.linen.logical_axis_rules`). Default: none.
        rngs: Random number generators; `params` is used.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from flax import nnx
        >>> from te_mixed_jax import CAUSAL, FULL, SequenceDescriptor
        >>> from te_mixed_jax.nnx import MultiHeadAttention
        >>> desc = SequenceDescriptor.from_seqlens([[3, 2]], q_len=6)
        >>> layer = MultiHeadAttention(
        ...     4, 32, num_kv_heads=2, rotary_base=10_000.0, rngs=nnx.Rngs(0)
        ... )
        >>> out = layer(
        ...     jnp.ones((1, 6, 32)),
        ...     desc=desc,
        ...     policy=(CAUSAL, FULL),
        ...     policy_ids=[[0, 0, 0, 1, 1, 0]],
        ... )
        >>> out.shape
        (1, 6, 32)

    Source: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023,
    "GQA"; Su et al. 2021, "RoFormer".
    """

    def __init__(
        self,
        num_heads: int,
        in_features: int,
        *,
        in_kv_features: int | None = None,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        out_features: int | None = None,
        use_bias: bool = True,
        qkv_bias: bool | None = None,
        rotary_base: float | None = None,
        policy: Policies = FULL,
        scale: float | None = None,
        implementation: str | None = None,
        axis_name: str | None = None,
        dtype: Dtype | None = None,
        param_dtype: Dtype = jnp.float32,
        precision: PrecisionLike = None,
        kernel_init: Initializer = _KERNEL_INIT,
        bias_init: Initializer = _BIAS_INIT,
        kernel_axes: KernelAxes | None = None,
        rngs: nnx.Rngs,
    ):
        F, N = in_features, num_heads
        G = F if in_kv_features is None else in_kv_features
        out_features = F if out_features is None else out_features
        K, H, V = head_sizes(F, N, num_kv_heads, head_dim, v_head_dim, rotary_base)
        kernel_axes = check_kernel_axes(kernel_axes)
        self.in_features, self.in_kv_features = F, G
        self.rotary_base = rotary_base
        self.policy = _static(policy)
        self.scale = scale
        self.implementation = implementation
        self.axis_name = axis_name
        self.dtype = dtype

        def projection(name, in_shape, out_shape, use_bias):
            axes = kernel_axes.get(name)
            metadata = {}
            if axes is not None:
                metadata["kernel_metadata"] = {"out_sharding": tuple(axes)}
                metadata["bias_metadata"] = {
                    "out_sharding": tuple(axes[len(in_shape) :])
                }
            return nnx.LinearGeneral(
                in_shape,
                out_shape,
                axis=tuple(range(-len(in_shape), 0)),
                use_bias=use_bias,
                dtype=dtype,
                param_dtype=param_dtype,
                kernel_init=kernel_init,
                bias_init=bias_init,
                precision=precision,
                rngs=rngs,
                **metadata,
            )

        qkv_bias = use_bias if qkv_bias is None else qkv_bias
        self.query = projection("query", (F,), (N, H), qkv_bias)
        self.key = projection("key", (G,), (K, H), qkv_bias)
        self.value = projection("value", (G,), (K, V), qkv_bias)
        self.out = projection("out", (N, V), (out_features,), use_bias)

    def __call__(
        self,
        inputs_q: Float[Array, "*B T F"],
        inputs_kv: Float[Array, "*B S G"] | None = None,
        desc: SequenceDescriptor | None = None,
        *,
        policy: Policies | None = None,
        policy_ids: Any = None,
        attn_mask_type_per_seq: Mapping[str, Any] | None = None,
        window_size_per_mask_type: Mapping[str, tuple[int, int]] | None = None,
    ) -> Float[Array, "*B T O"]:
        """Self-attention, or cross-attention with `inputs_kv`.

        Args:
            inputs_q: Float array ``[*B, T, F]``.
            inputs_kv: ``[*B, S, G]``, the input of key and value. Default: `inputs_q`.
            desc: Segment ids and positions. Default: every row is one sequence.
            policy: One `MaskPolicy`, or a sequence of them that `policy_ids` index.
                Default: the layer's.
            policy_ids: Integers ``[*B, T]``: the policy of each query token.
            attn_mask_type_per_seq: Instead of `policy` and `policy_ids`: per mask type
                the segment ids that run with it, as in `policies_from_mask_types`.
            window_size_per_mask_type: With it: per mask type a window (left, right).

        Returns:
            The output ``[*B, T, out_features]``; exactly the bias at padding.

        Raises:
            ValueError: if the sizes do not fit each other; if mask types are given
                and policies too, or without `desc`. Else as `dot_product_attention`
                and `policies_from_mask_types`.
            TypeError: if `rotary_base` is not a number, and for a descriptor or a mask
                in the place of an input.
        """
        check_inputs(inputs_q, inputs_kv)
        if inputs_kv is None:
            inputs_kv = inputs_q
        for name, x, sized in (
            ("inputs_q", inputs_q, "in_features"),
            ("inputs_kv", inputs_kv, "in_kv_features"),
        ):
            if x.shape[-1] != getattr(self, sized):
                raise ValueError(
                    f"`{name}` must have `{sized}`={getattr(self, sized)} features, "
                    f"got shape {x.shape}."
                )
        query, key, value = promote(
            self.query(inputs_q),
            self.key(inputs_kv),
            self.value(inputs_kv),
            dtype=self.dtype,
        )
        if self.rotary_base is not None:
            query, key = rotate_by_descriptor(
                query, key, desc, base=self.rotary_base, axis_name=self.axis_name
            )
        return self.out(
            attend(
                self,
                query,
                key,
                value,
                desc,
                policy=policy,
                policy_ids=policy_ids,
                attn_mask_type_per_seq=attn_mask_type_per_seq,
                window_size_per_mask_type=window_size_per_mask_type,
            )
        )


def _static(policy: Policies) -> Policies:
    """`policy` as something that nnx takes for static: it refuses lists."""
    return tuple(policy) if isinstance(policy, list) else policy
