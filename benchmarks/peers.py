"""The implementations that are compared, each written as its users would write it.

`PEERS[platform]` names functions of a workload that return a `Peer`, or raise `Missing`
with the reason why there is nothing to measure.
"""

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import te_mixed_jax as tmj
from benchmarks.shapes import Workload
from te_mixed_jax._ranges import key_ranges
from te_mixed_jax.lowerings import _segments, cudnn


class Missing(Exception):
    """Why a peer is not measured."""


class Peer(NamedTuple):
    """How to run one implementation of one workload.

    Attributes:
        prepare: Of q, k, v, ids, positions, policy ids and dout, NumPy or JAX arrays,
            makes the arguments of the others; untimed.
        forward: Returns the output.
        both: Returns the output, dq, dk and dv.
        to_numpy: Of one of these and the ids, makes float64 [B, T, heads, H].
    """

    prepare: Callable[..., tuple]
    forward: Callable[..., Any]
    both: Callable[..., tuple]
    to_numpy: Callable[[Any, np.ndarray], np.ndarray]


def _as_float64(x: jax.Array, ids: np.ndarray) -> np.ndarray:
    del ids
    return np.asarray(x, np.float64)


def _of(attend: Callable, prepare: Callable | None = None) -> Peer:
    """From `attend(q, k, v, *rest)`, in JAX; the rest: ids, positions, policy ids.

    `prepare` makes other arrays of them, dout last: see `Peer`.
    """

    def forward(q, k, v, *rest):
        return attend(q, k, v, *rest[:-1])

    def both(q, k, v, *rest):
        *rest, dout = rest
        out, pullback = jax.vjp(lambda *x: attend(*x, *rest), q, k, v)
        return out, *pullback(dout)

    return Peer(
        prepare or (lambda *arguments: tuple(map(jnp.asarray, arguments))),
        jax.jit(forward),
        jax.jit(both),
        _as_float64,
    )


def policies_of(w: Workload) -> tuple[tmj.MaskPolicy, ...]:
    causal = tmj.CAUSAL
    if w.window is not None:
        causal = causal.with_window(w.window - 1, 0)
    return tuple({"causal": causal, "full": tmj.FULL}[kind] for kind in w.kinds)


def mixed(w: Workload, implementation: str | None = None) -> Peer:
    """One call of this package; the mask is ids and policy ids."""
    policies = policies_of(w)
    uniform = len(policies) == 1

    def attend(q, k, v, ids, positions, policy_ids):
        desc = None
        if not w.one_sequence_a_row:
            desc = tmj.from_segment_ids_and_pos(
                ids, positions, max_segments=w.most_sequences
            )
        return tmj.dot_product_attention(
            *(q, k, v, desc),
            policy=policies[0] if uniform else policies,
            policy_ids=None if uniform else policy_ids,
            implementation=implementation,
        )

    return _of(attend)


def dense(w: Workload, implementation: Any = None) -> Peer:
    """`jax.nn.dot_product_attention` with the equivalent T x S mask."""

    def attend(q, k, v, ids, positions, policy_ids):
        del positions
        index = jnp.arange(w.T)
        behind = index[:, None] - index
        causal = (behind >= 0) & (behind < (w.window or w.T))
        mask = ids[:, :, None] == ids[:, None, :]
        if "causal" in w.kinds:
            mask &= (policy_ids != w.kinds.index("causal"))[:, :, None] | causal
        return jax.nn.dot_product_attention(
            q, k, v, mask=mask[:, None], implementation=implementation
        )

    return _of(attend)


def bare_cudnn(w: Workload) -> Peer:
    """XLA's cuDNN call and nothing else: tables are ready, padding stays garbage."""
    if len(w.kinds) > 1:
        raise Missing("one call has one mask")
    if w.one_sequence_a_row:

        def attend(q, k, v, ids, positions, policy_ids):
            del ids, positions, policy_ids
            return jax.nn.dot_product_attention(
                *(q, k, v),
                is_causal=w.kinds == ("causal",),
                local_window_size=None if w.window is None else (w.window - 1, 0),
                implementation="cudnn",
            )

        return _of(attend)

    (mask,) = _segments.masks_of(policies_of(w), w.T)
    settings = {"mask": mask, "scale": w.H**-0.5}

    @jax.jit
    def prepare(q, k, v, ids, positions, policy_ids, dout):
        del policy_ids
        desc = tmj.from_segment_ids_and_pos(ids, positions)
        ranges = key_ranges(desc, policies_of(w), None)
        segments = _segments.find_segments(ranges, (mask,), w.most_sequences)
        return q, k, v, dout, cudnn._lengths_and_offsets(segments, 0, q, k)

    def forward(q, k, v, dout, call):
        del dout
        return cudnn._softmax(q, k, v, call=call, **settings)[0]

    def both(q, k, v, dout, call):
        out, lse = cudnn._softmax(q, k, v, call=call, **settings)
        return out, *cudnn._softmax_backward(
            q, k, v, dout, lse=lse, out=out, call=call, **settings
        )

    return Peer(prepare, jax.jit(forward), jax.jit(both), _as_float64)


def _imported(name: str) -> Any:
    """The module, or `Missing`."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError) as error:
        raise Missing(f"{name} cannot be imported ({type(error).__name__})") from None


def transformer_engine(w: Workload) -> Peer:
    """One call per mask type; each call's other sequences are padding."""
    te = _imported("transformer_engine.jax.attention")
    masks = {
        "causal": te.AttnMaskType.PADDING_CAUSAL_MASK,
        "full": te.AttnMaskType.PADDING_MASK,
    }

    def attend(q, k, v, ids, positions, policy_ids):
        results = []
        for index, kind in enumerate(w.kinds):
            own = jnp.where(policy_ids == index, ids, 0)
            desc = te.SequenceDescriptor.from_segment_ids_and_pos(
                (own, own), (positions, positions)
            )
            out = te.fused_attn(
                *((q, k, v), None, desc, None),
                *(te.AttnBiasType.NO_BIAS, masks[kind], te.QKVLayout.THD_THD_THD),
                *(te.AttnSoftmaxType.VANILLA_SOFTMAX, w.H**-0.5, 0.0, True),
                max_segments_per_seq=w.most_sequences,
                window_size=None if w.window is None else (w.window - 1, 0),
            )
            results.append(out)
        if len(results) == 1:
            return results[0]
        return jnp.where((policy_ids == 0)[..., None, None], *results)

    return _of(attend)


def flex_attention(w: Workload) -> Peer:
    """PyTorch's FlexAttention, compiled; the block mask is made beforehand."""
    torch = _imported("torch")
    flex = _imported("torch.nn.attention.flex_attention")
    torch._dynamo.reset()
    torch._dynamo.config.recompile_limit = 64  # past it, it runs uncompiled
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    make_mask = torch.compile(flex.create_block_mask, dynamic=False)
    causal = w.kinds.index("causal") if "causal" in w.kinds else -1
    window = w.window or w.T

    def prepare(q, k, v, ids, positions, policy_ids, dout):
        """The arrays as [B, heads, T, H] on the GPU."""
        del positions
        q, k, v, dout = (
            torch.from_numpy(np.asarray(x, np.float32))
            .to("cuda", torch.bfloat16)
            .transpose(1, 2)
            .contiguous()
            for x in (q, k, v, dout)
        )
        ids, policy_ids = (
            torch.from_numpy(np.array(x)).cuda() for x in (ids, policy_ids)
        )

        def allowed(b, h, i, j):
            behind = (i >= j) & (i - j < window)
            same = (ids[b, i] == ids[b, j]) & (ids[b, i] > 0)
            return same & ((policy_ids[b, i] != causal) | behind)

        mask = make_mask(allowed, w.B, None, w.T, w.T, device="cuda")
        for x in (q, k, v):
            x.requires_grad_()
        return q, k, v, dout, mask

    def attend(q, k, v, mask):
        return compiled(q, k, v, block_mask=mask, enable_gqa=w.N != w.K)

    def forward(q, k, v, dout, mask):
        del dout
        with torch.no_grad():
            return attend(q, k, v, mask)

    def both(q, k, v, dout, mask):
        out = attend(q, k, v, mask)
        return out, *torch.autograd.grad(out, (q, k, v), dout)

    def to_numpy(x, ids):
        del ids
        return x.detach().transpose(1, 2).double().cpu().numpy()

    return Peer(prepare, forward, both, to_numpy)


def tokamax(w: Workload) -> Peer:
    """tokamax's Pallas kernel with a range of keys for each query.

    Its public call has the T x S mask only; ranges are its private `Mask`.
    """
    base = _imported("tokamax._src.ops.attention.base")
    kernel = _imported("tokamax._src.ops.attention.pallas_mosaic_gpu")
    op = kernel.PallasMosaicGpuFlashAttention()

    def prepare(q, k, v, ids, positions, policy_ids, dout):
        at = np.arange(w.T)
        start = at - positions
        changes = np.diff(ids, axis=1, append=-1) != 0
        ends = np.where(changes, at + 1, w.T)
        end = np.minimum.accumulate(ends[:, ::-1], axis=1)[:, ::-1]
        if "causal" in w.kinds:
            causal = policy_ids == w.kinds.index("causal")
            start = np.where(
                causal, np.maximum(start, at + 1 - (w.window or w.T)), start
            )
            end = np.where(causal, at + 1, end)
        # Padding sees itself: a query without a key would be NaN in all gradients.
        start = np.where(ids > 0, start, at)
        end = np.where(ids > 0, end, at + 1)
        ranges = (jnp.asarray(x[:, None], jnp.int32) for x in (start, end))
        return q, k, v, *ranges, dout

    def attend(q, k, v, start, end):
        return op(q, k, v, mask=base.Mask(k_start=start, k_end=end))

    return _of(attend, prepare)


def flash_attention_3(w: Workload) -> Peer:
    """FlashAttention-3 by its JAX binding: a stream of tokens without padding."""
    binding = _imported("flash_attn3_jax")
    if len(w.kinds) > 1:
        raise Missing("one call has one mask")
    settings = {
        "max_seqlen_q": w.longest,
        "max_seqlen_k": w.longest,
        "is_causal": w.kinds == ("causal",),
        "window_size": (-1, -1) if w.window is None else (w.window - 1, 0),
    }

    def prepare(q, k, v, ids, positions, policy_ids, dout):
        """The tokens as its users hold them, and zeros up to the same shape."""
        del policy_ids
        real = np.flatnonzero(ids > 0)
        first = np.flatnonzero(positions.reshape(-1)[real] == 0)
        ends = np.full(w.B * w.most_sequences + 1, real.size, np.int32)
        ends[: first.size] = first
        order = jnp.asarray(np.concatenate([real, np.flatnonzero(ids <= 0)]))

        def stream(x):
            x = x.reshape(-1, *x.shape[2:])[order]
            return x.at[real.size :].set(0)

        q, k, v, dout = map(stream, (q, k, v, dout))
        return q, k, v, jnp.asarray(ends), dout

    def attend(q, k, v, ends):
        return binding.flash_mha_varlen(q, k, v, ends, **settings)

    def to_numpy(x, ids):
        result = np.zeros((w.B * w.T, *x.shape[1:]))
        real = np.flatnonzero(ids > 0)
        result[real] = np.asarray(x, np.float64)[: real.size]
        return result.reshape(w.B, w.T, *x.shape[1:])

    return _of(attend, prepare)._replace(to_numpy=to_numpy)


def wait(results: Any) -> None:
    """Until the device has computed the results."""
    leaves = jax.tree.leaves(results)
    jax.block_until_ready(leaves)
    if not all(isinstance(x, jax.Array) for x in leaves):
        importlib.import_module("torch").cuda.synchronize()


OURS = "te_mixed_jax"
PEERS: dict[str, dict[str, Callable[[Workload], Peer]]] = {
    "cpu": {OURS: mixed, "jax.nn, dense mask": dense},
    "gpu": {
        f"{OURS}, mosaic": functools.partial(mixed, implementation="mosaic"),
        f"{OURS}, cudnn": functools.partial(mixed, implementation="cudnn"),
        "TransformerEngine": transformer_engine,
        "bare cuDNN call": bare_cudnn,
        "jax.nn, dense mask": functools.partial(dense, implementation="cudnn"),
        "FlexAttention": flex_attention,
        "tokamax": tokamax,
        "FlashAttention-3": flash_attention_3,
    },
}
