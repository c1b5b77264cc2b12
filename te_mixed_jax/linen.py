"""Attention layers for Flax linen."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

try:
    import flax.linen as nn
    from flax.linen.dtypes import promote_dtype
    from flax.typing import Dtype, Initializer, PrecisionLike
except ImportError as error:
    raise ImportError(
        '`te_mixed_jax.linen` needs Flax: `pip install "te_mixed_jax[flax]"`.'
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


class DotProductAttention(nn.Module):
    """Attention over packed rows, as a layer without parameters.

    Dims: `*B` batch axes; `T` query length; `S` key/value length; `N` query heads; `K`
    key/value heads; `H` query/key and `V` value head dim.

    Attributes:
        policy: Policy, or sequence of policies, of calls that name none.
        scale: Factor on the scores, a Python number. Default: ``1 / sqrt(H)``.
        implementation: As in `te_mixed_jax.dot_product_attention`.
        axis_name: Inside `jax.shard_map`: the mesh axis along which the tokens of a row
            are split, as in `te_mixed_jax.context_parallel`.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from te_mixed_jax import SequenceDescriptor
        >>> from te_mixed_jax.linen import DotProductAttention
        >>> desc = SequenceDescriptor.from_segment_ids_and_pos([[1, 1, 1, 2, 2, 0]])
        >>> x = jnp.ones((1, 6, 4, 64))
        >>> out = DotProductAttention().apply(
        ...     {},
        ...     *(x, x, x, desc),
        ...     attn_mask_type_per_seq={"padding": [[2]], "padding_causal": [[1]]},
        ...     window_size_per_mask_type={"padding_causal": (128, 0)},
        ... )
        >>> out.shape
        (1, 6, 4, 64)

    Source: as `te_mixed_jax.dot_product_attention`; the mask types are those of
    TransformerEngine.
    """

    policy: Policies = FULL
    scale: float | None = None
    implementation: str | None = None
    axis_name: str | None = None

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


class MultiHeadAttention(nn.Module):
    """Multi-head attention over packed rows: projections, rotary positions, attention.

    The parameters are named and shaped as those of `te_mixed_jax.nnx`'s layer and,
    where K = N, of `flax.linen.MultiHeadDotProductAttention`: kernels `query`
    ``[F, N, H]``, `key` ``[G, K, H]``, `value` ``[G, K, V]``, `out` ``[N, V, O]``. An
    nnx layer's parameters are ``{"params": nnx.to_pure_dict(nnx.state(layer))}`` here.

    Dims: `*B` batch axes; `T` query length; `S` key/value length; `F` features of the
    query's input, `G` of the key's and value's, `O` of the output; `N` query heads; `K`
    key/value heads; `H` query/key and `V` value head dim.

    Attributes:
        num_heads: N.
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
        kernel_axes: Logical axis names of the kernels, by projection; kernels become
            `flax.linen.LogicallyPartitioned`, and biases with them. Default: none.

    Example:
        >>> import jax
        >>> import jax.numpy as jnp
        >>> from te_mixed_jax import CAUSAL, FULL, SequenceDescriptor
        >>> from te_mixed_jax.linen import MultiHeadAttention
        >>> desc = SequenceDescriptor.from_seqlens([[3, 2]], q_len=6)
        >>> layer = MultiHeadAttention(
        ...     num_heads=4, num_kv_heads=2, rotary_base=10_000.0
        ... )
        >>> x = jnp.ones((1, 6, 32))
        >>> policies = dict(policy=(CAUSAL, FULL), policy_ids=[[0, 0, 0, 1, 1, 0]])
        >>> variables = layer.init(jax.random.key(0), x, desc=desc, **policies)
        >>> out = layer.apply(variables, x, desc=desc, **policies)
        >>> out.shape
        (1, 6, 32)

    Source: Vaswani et al. 2017, "Attention Is All You Need"; Ainslie et al. 2023,
    "GQA"; Su et al. 2021, "RoFormer".
    """

    num_heads: int
    num_kv_heads: int | None = None
    head_dim: int | None = None
    v_head_dim: int | None = None
    out_features: int | None = None
    use_bias: bool = True
    qkv_bias: bool | None = None
    rotary_base: float | None = None
    policy: Policies = FULL
    scale: float | None = None
    implementation: str | None = None
    axis_name: str | None = None
    dtype: Dtype | None = None
    param_dtype: Dtype = jnp.float32
    precision: PrecisionLike = None
    kernel_init: Initializer = nn.initializers.lecun_normal()
    bias_init: Initializer = nn.initializers.zeros_init()
    kernel_axes: KernelAxes | None = None

    @nn.compact
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
        features = inputs_q.shape[-1]
        N = self.num_heads
        K, H, V = head_sizes(
            features,
            N,
            self.num_kv_heads,
            self.head_dim,
            self.v_head_dim,
            self.rotary_base,
        )
        kernel_axes = check_kernel_axes(self.kernel_axes)

        def project(name, x, num_axes, out_shape, use_bias):
            return _Projection(
                num_axes=num_axes,
                out_shape=out_shape,
                use_bias=use_bias,
                dtype=self.dtype,
                param_dtype=self.param_dtype,
                precision=self.precision,
                kernel_init=self.kernel_init,
                bias_init=self.bias_init,
                kernel_axes=kernel_axes.get(name),
                name=name,
            )(x)

        if inputs_kv is None:
            inputs_kv = inputs_q
        qkv_bias = self.use_bias if self.qkv_bias is None else self.qkv_bias
        query = project("query", inputs_q, 1, (N, H), qkv_bias)
        key = project("key", inputs_kv, 1, (K, H), qkv_bias)
        value = project("value", inputs_kv, 1, (K, V), qkv_bias)
        query, key, value = promote(query, key, value, dtype=self.dtype)
        if self.rotary_base is not None:
            query, key = rotate_by_descriptor(
                query, key, desc, base=self.rotary_base, axis_name=self.axis_name
            )
        out = attend(
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
        out_features = features if self.out_features is None else self.out_features
        return project("out", out, 2, (out_features,), self.use_bias)


class _Projection(nn.Module):
    """The last `num_axes` axes of the input, projected to axes of `out_shape`.

    `flax.linen.DenseGeneral`, except that a kernel gets its axis names in its final
    shape. There it gets them while it is a matrix, so that, under a mesh and with rules
    for its names, initialisation fails on the rank (seen in Flax 0.12.8 and 0.12.12).
    """

    num_axes: int
    out_shape: tuple[int, ...]
    use_bias: bool
    dtype: Dtype | None
    param_dtype: Dtype
    precision: PrecisionLike
    kernel_init: Initializer
    bias_init: Initializer
    kernel_axes: tuple[str | None, ...] | None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        in_shape = x.shape[x.ndim - self.num_axes :]
        fan_in, fan_out = math.prod(in_shape), math.prod(self.out_shape)
        kernel_axes = bias_axes = None
        if self.kernel_axes is not None:
            kernel_axes = self.kernel_axes
            bias_axes = kernel_axes[self.num_axes :]

        def param(name, init, flat_shape, shape, axes):
            def reshaped(rng, shape, dtype):
                # A tree, where the user's initializer puts its array into a box.
                flat = init(rng, flat_shape, dtype)
                return jax.tree.map(lambda leaf: leaf.reshape(shape), flat)

            if axes is not None:
                reshaped = nn.with_logical_partitioning(reshaped, axes)
            return self.param(name, reshaped, shape, self.param_dtype)

        kernel = param(
            "kernel",
            self.kernel_init,
            (fan_in, fan_out),
            (*in_shape, *self.out_shape),
            kernel_axes,
        )
        bias = None
        if self.use_bias:
            bias = param("bias", self.bias_init, (fan_out,), self.out_shape, bias_axes)
        x, kernel, bias = promote_dtype(x, kernel, bias, dtype=self.dtype)
        out = jnp.tensordot(x, kernel, axes=self.num_axes, precision=self.precision)
        if bias is not None:
            out += bias.reshape((1,) * (out.ndim - bias.ndim) + bias.shape)
        return out
