"""Attention over packed rows in NumPy float64: the answer that the tests compare with.

One query at a time, one head at a time, over the keys that the query may see and no
others. Shares nothing with the package: a policy here is a kind and its numbers, and
the definition of each kind is the text of `visible_keys`.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike


@dataclasses.dataclass(frozen=True)
class Policy:
    """What a query may see: a kind, a window, and the numbers of the kind."""

    kind: str
    left: int = -1
    right: int = -1
    length: int = 0
    size: int = 1
    left_chunks: int = 0


FULL = Policy("full")
CAUSAL = Policy("causal")
BOTTOM_RIGHT = Policy("causal_bottom_right")


def window(policy: Policy, left: int, right: int) -> Policy:
    return dataclasses.replace(policy, left=left, right=right)


def prefix(length: int) -> Policy:
    return Policy("prefix", length=length)


def chunked(size: int, left_chunks: int) -> Policy:
    return Policy("chunked", size=size, left_chunks=left_chunks)


@dataclasses.dataclass(frozen=True)
class Gradients:
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray


def positions(ids: ArrayLike) -> np.ndarray:
    """Running index of each token of `ids` [T] in its sequence; 0 at padding."""
    result = np.zeros(len(np.asarray(ids)), np.int64)
    seen: dict[int, int] = {}
    for t, sequence in enumerate(np.asarray(ids).tolist()):
        if sequence > 0:
            result[t] = seen.get(sequence, 0)
            seen[sequence] = result[t] + 1
    return result


def visible_keys(
    policy: Policy,
    q_pos: int,
    kv_pos: np.ndarray,
    queries: int,
    keys: int,
) -> np.ndarray:
    """Which keys of its own sequence a query at `q_pos` may see.

    `kv_pos` holds the positions of all the keys of the sequence; `queries` and `keys`
    count its tokens on either side.
    """
    if policy.kind == "full":
        visible = np.ones(len(kv_pos), bool)
    elif policy.kind == "causal":
        visible = kv_pos <= q_pos
    elif policy.kind == "causal_bottom_right":
        q_pos = q_pos + keys - queries
        visible = kv_pos <= q_pos
    elif policy.kind == "prefix":
        first = min(kv_pos.tolist(), default=0)
        visible = (kv_pos - first < policy.length) | (kv_pos <= q_pos)
    elif policy.kind == "chunked":
        first = min(kv_pos.tolist(), default=0)
        chunk = (kv_pos - first) // policy.size
        own = (q_pos - first) // policy.size
        visible = chunk <= own
        if policy.left_chunks >= 0:
            visible &= own - policy.left_chunks <= chunk
    else:
        raise ValueError(policy.kind)
    if policy.left >= 0:
        visible = visible & (q_pos - policy.left <= kv_pos)
    if policy.right >= 0:
        visible = visible & (kv_pos <= q_pos + policy.right)
    return visible


def allowed(
    q_ids: ArrayLike,
    kv_ids: ArrayLike,
    q_pos: ArrayLike | None,
    kv_pos: ArrayLike | None,
    policies: Sequence[Policy],
    policy_ids: ArrayLike | None,
) -> np.ndarray:
    """Boolean [T, S]: may query i of a row see key j of it?"""
    q_ids, kv_ids = np.asarray(q_ids, np.int64), np.asarray(kv_ids, np.int64)
    q_pos = positions(q_ids) if q_pos is None else np.asarray(q_pos, np.int64)
    kv_pos = positions(kv_ids) if kv_pos is None else np.asarray(kv_pos, np.int64)
    T, S = len(q_ids), len(kv_ids)
    result = np.zeros((T, S), bool)
    for i in range(T):
        if q_ids[i] <= 0:
            continue
        own_keys = np.flatnonzero(kv_ids == q_ids[i])
        policy = policies[0 if policy_ids is None else int(np.asarray(policy_ids)[i])]
        result[i, own_keys] = visible_keys(
            policy,
            int(q_pos[i]),
            kv_pos[own_keys],
            queries=int((q_ids == q_ids[i]).sum()),
            keys=len(own_keys),
        )
    return result


def mask(
    q_ids: ArrayLike,
    kv_ids: ArrayLike,
    q_pos: ArrayLike | None = None,
    kv_pos: ArrayLike | None = None,
    policies: Sequence[Policy] = (FULL,),
    policy_ids: ArrayLike | None = None,
) -> np.ndarray:
    """Boolean [B, T, S] for ids, positions and policy ids [B, T] and [B, S]."""

    def row(x: ArrayLike | None, b: int) -> np.ndarray | None:
        return None if x is None else np.asarray(x)[b]

    return np.stack(
        [
            allowed(
                np.asarray(q_ids)[b],
                np.asarray(kv_ids)[b],
                row(q_pos, b),
                row(kv_pos, b),
                policies,
                row(policy_ids, b),
            )
            for b in range(len(np.asarray(q_ids)))
        ]
    )


def _weights(
    q: ArrayLike, k: np.ndarray, scale: float
) -> tuple[np.ndarray, np.float64]:
    """Softmax weights of one query [H] over keys [n, H], n > 0, and its lse."""
    scores = scale * (k @ q)
    top = scores.max()
    unnormalised = np.exp(scores - top)
    total = unnormalised.sum()
    return unnormalised / total, top + np.log(total)


def attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, mask: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output [B, T, N, V] and lse [B, T, N] of q [B, T, N, H], k, v [B, S, K, .]."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    B, T, N, _ = q.shape
    group = N // k.shape[2]
    out = np.zeros((B, T, N, v.shape[3]))
    lse = np.full((B, T, N), -np.inf)
    with np.errstate(all="ignore"):
        for b, i in np.ndindex(B, T):
            keys = np.flatnonzero(mask[b, i])
            if not len(keys):
                continue
            for n in range(N):
                head = n // group
                p, lse[b, i, n] = _weights(q[b, i, n], k[b, keys, head], scale)
                out[b, i, n] = p @ v[b, keys, head]
    return out, lse


def gradients(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: np.ndarray,
    scale: float,
    dout: ArrayLike,
    dlse: ArrayLike | None = None,
) -> Gradients:
    """Derivatives of sum(out * dout) + sum(lse * dlse).

    For one query and head, with weights p over its keys: dv_j = p_j dout, and with
    g_j = dout . v_j, the scores s_j get ds_j = p_j (g_j - sum_m p_m g_m) from the
    output and p_j dlse from the lse, because d lse / d s_j = p_j. Since s_j = scale
    q . k_j, dq = scale sum_j ds_j k_j and dk_j = scale ds_j q.
    """
    q, k, v, dout = (np.asarray(x, np.float64) for x in (q, k, v, dout))
    B, T, N, _ = q.shape
    dlse = np.zeros((B, T, N)) if dlse is None else np.asarray(dlse, np.float64)
    group = N // k.shape[2]
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    with np.errstate(all="ignore"):
        for b, i in np.ndindex(B, T):
            keys = np.flatnonzero(mask[b, i])
            if not len(keys):
                continue
            for n in range(N):
                head = n // group
                p, _ = _weights(q[b, i, n], k[b, keys, head], scale)
                g = v[b, keys, head] @ dout[b, i, n]
                ds = p * (g - p @ g) + p * dlse[b, i, n]
                dv[b, keys, head] += np.outer(p, dout[b, i, n])
                dq[b, i, n] += scale * (ds @ k[b, keys, head])
                dk[b, keys, head] += scale * np.outer(ds, q[b, i, n])
    return Gradients(dq, dk, dv)


def magnitudes(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    mask: np.ndarray,
    scale: float,
    dout: ArrayLike,
    dlse: ArrayLike,
) -> tuple[float, float, float, float, float]:
    """How large the terms of out, lse, dq, dk and dv are before they cancel.

    The largest absolute value of each array, with every term of its sums taken by its
    absolute value. No rounding error can be expected below one ulp of it.
    """
    q, k = np.asarray(q, np.float64), np.asarray(k, np.float64)
    v, dout, dlse = (np.abs(np.asarray(x, np.float64)) for x in (v, dout, dlse))
    B, T, N, _ = q.shape
    group = N // k.shape[2]
    out, lse = np.zeros((B, T, N, v.shape[3])), np.zeros((B, T, N))
    dq, dk, dv = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v)
    for b, i in np.ndindex(B, T):
        keys = np.flatnonzero(mask[b, i])
        if not len(keys):
            continue
        for n in range(N):
            head = n // group
            q_in, k_in = np.abs(q[b, i, n]), np.abs(k[b, keys, head])
            p, _ = _weights(q[b, i, n], k[b, keys, head], scale)
            out[b, i, n] = p @ v[b, keys, head]
            lse[b, i, n] = abs(scale) * (p @ (k_in @ q_in))
            g = v[b, keys, head] @ dout[b, i, n]
            ds = p * (g + p @ g) + p * dlse[b, i, n]
            dv[b, keys, head] += np.outer(p, dout[b, i, n])
            dq[b, i, n] += abs(scale) * (ds @ k_in)
            dk[b, keys, head] += abs(scale) * np.outer(ds, q_in)
    return tuple(x.max(initial=0.0) for x in (out, lse, dq, dk, dv))
