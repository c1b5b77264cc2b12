"""Multi-head attention in NumPy float64, and both kinds of layer behind one call.

Layers are made with `implementation="dense"`, which compiles fastest, unless a test
says otherwise: what they add to the attention call is the same for all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import oracle
import te_mixed_jax.linen
import te_mixed_jax.nnx

KINDS = {"linen": te_mixed_jax.linen, "nnx": te_mixed_jax.nnx}

# Sizes of the tests, all different.
MAPPED, B, T, S, F, G, O, N, K, H, V = 5, 2, 11, 13, 10, 9, 8, 6, 3, 4, 7  # noqa: E741
ROTARY_BASE = 100.0

# Two rows, ids in any order, with padding inside; and key/value rows for them.
IDS = np.asarray([[2, 2, 2, 0, 5, 5, 5, 5, 9, 9, 0], [3] * 5 + [1] * 4 + [0] * 2])
KV_IDS = np.asarray(
    [[9, 9, 0, 2, 2, 2, 5, 5, 5, 5, 5, 5, 0], [1] * 6 + [0, 0] + [3] * 5]
)

# One mask per sequence: full 5 and 3, windowed causal 2 and 1, bottom right 9.
ORACLE_POLICIES = (
    oracle.FULL,
    oracle.window(oracle.CAUSAL, 2, 0),
    oracle.BOTTOM_RIGHT,
)
POLICIES = (
    te_mixed_jax.FULL,
    te_mixed_jax.CAUSAL.with_window(2, 0),
    te_mixed_jax.CAUSAL_BOTTOM_RIGHT,
)
POLICY_IDS = np.select([np.isin(IDS, (2, 1)), IDS == 9], [1, 2], 0)
MASK_TYPES: dict[str, Any] = {
    "attn_mask_type_per_seq": {
        "padding": np.asarray([[5], [3]]),
        "padding_causal": np.asarray([[2], [1]]),
        "padding_causal_bottom_right": np.asarray([[9], [0]]),
    },
    "window_size_per_mask_type": {"padding_causal": (2, 0)},
}


def normal(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


# -------------------------------------------------------------------- NumPy float64


def rotate(x: np.ndarray, positions: np.ndarray, base: float) -> np.ndarray:
    """Features i and i + H/2 of x [B, T, N, H] as complex numbers, turned."""
    half = x.shape[-1] // 2
    speed = base ** (-2 * np.arange(half) / x.shape[-1])
    turn = np.exp(1j * np.asarray(positions, np.float64)[..., None, None] * speed)
    turned = (x[..., :half] + 1j * x[..., half:]) * turn
    return np.concatenate([turned.real, turned.imag], axis=-1)


def multi_head(
    params: Any,
    x_q: Any,
    x_kv: Any,
    mask: np.ndarray,
    *,
    rotary: tuple[float, np.ndarray, np.ndarray] | None = None,
    scale: float | None = None,
) -> np.ndarray:
    """Output [B, T, O] of a layer; `rotary`: base, query and key/value positions."""

    def project(name: str, subscripts: str, x: Any) -> np.ndarray:
        kernel = np.asarray(params[name]["kernel"], np.float64)
        bias = np.asarray(params[name].get("bias", 0), np.float64)
        return np.einsum(subscripts, np.asarray(x, np.float64), kernel) + bias

    q = project("query", "btf,fnh->btnh", x_q)
    k = project("key", "bsf,fnh->bsnh", x_kv)
    v = project("value", "bsf,fnh->bsnh", x_kv)
    if rotary is not None:
        base, q_pos, kv_pos = rotary
        q, k = rotate(q, q_pos, base), rotate(k, kv_pos, base)
    default = float(q.shape[-1] ** -0.5)
    out, _ = oracle.attention(q, k, v, mask, default if scale is None else scale)
    return project("out", "btnv,nvf->btf", out)


def running_positions(ids: np.ndarray) -> np.ndarray:
    return np.stack([oracle.positions(row) for row in ids])


# ------------------------------------------------------- both kinds behind one call


class Layer(NamedTuple):
    """Random parameters, biases too, and the layer as a function of them."""

    params: Any
    apply: Callable[..., jax.Array]


def randomised(params: Any, seed: int = 0) -> Any:
    """Normal values of the same shapes and dtypes, kernels scaled by their fan-in."""
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        x = rng.normal(size=leaf.shape)
        if path[-1].key == "kernel":
            fan_in = leaf.shape[:2] if path[-2].key == "out" else leaf.shape[:1]
            x = x * np.prod(fan_in) ** -0.5
        return jnp.asarray(x, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, params)


def multi_head_layer(
    kind: str,
    *,
    in_features: int = F,
    in_kv_features: int | None = None,
    num_heads: int = N,
    implementation: str | None = "dense",
    **config: Any,
) -> Layer:
    """A `MultiHeadAttention` of that kind, with random parameters."""
    config["implementation"] = implementation
    in_kv = in_features if in_kv_features is None else in_kv_features
    if kind == "linen":
        layer = te_mixed_jax.linen.MultiHeadAttention(num_heads=num_heads, **config)
        variables = jax.eval_shape(
            layer.init,
            jax.random.key(0),
            jnp.ones((1, 2, in_features)),
            jnp.ones((1, 2, in_kv)),
        )

        def apply(params: Any, *args: Any, **kwargs: Any) -> Any:
            return layer.apply({"params": params}, *args, **kwargs)

        return Layer(randomised(nn.unbox(variables)["params"]), apply)

    # The values are replaced, and zeros compile fastest.
    config = {"kernel_init": nnx.initializers.zeros_init()} | config
    layer = te_mixed_jax.nnx.MultiHeadAttention(
        num_heads,
        in_features,
        in_kv_features=in_kv_features,
        **config,
        rngs=nnx.Rngs(0),
    )

    def apply(params: Any, *args: Any, **kwargs: Any) -> Any:
        copy = nnx.clone(layer)
        nnx.update(copy, params)
        return copy(*args, **kwargs)

    return Layer(randomised(nnx.to_pure_dict(nnx.state(layer))), apply)


def attend(
    kind: str,
    *args: Any,
    call: Any = None,
    implementation: str | None = "dense",
    **config: Any,
) -> jax.Array:
    """`DotProductAttention(**config)` of that kind, called with `args` and `call`."""
    layer = KINDS[kind].DotProductAttention(implementation=implementation, **config)
    call = {} if call is None else call
    if kind == "linen":
        return layer.apply({}, *args, **call)
    return layer(*args, **call)
