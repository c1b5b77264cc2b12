"""What the tests share: data, compiled calls, the tolerance, and the PROBE."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import oracle
import te_mixed_jax as te

IMPLEMENTATIONS = ("xla", "dense")

# Compiling takes longer than running. So calls are padded to one of a few sizes (batch,
# length), and run a program that has all the policies below; which of them is data.
STANDARD_SIZES = ((2, 28), (2, 128), (4, 256))
SHARED_POLICIES = (
    *(oracle.FULL, oracle.CAUSAL, oracle.BOTTOM_RIGHT),
    *(oracle.window(oracle.FULL, *w) for w in ((0, 2), (7, 0), (0, 0), (2, 0), (1, 2))),
    *(oracle.window(oracle.FULL, *w) for w in ((4, 0), (2, 3), (3, 1))),
    *(oracle.window(oracle.CAUSAL, *w) for w in ((1, 3), (1, 0), (3, 0), (2, 0))),
    *(oracle.window(oracle.CAUSAL, *w) for w in ((4, 0), (4, 7), (2**31 - 1,) * 2)),
    *(oracle.window(oracle.BOTTOM_RIGHT, *w) for w in ((1, 3), (2, 0), (5, 0))),
    *(oracle.prefix(n) for n in (0, 2, 3, 100)),
    *(oracle.chunked(*c) for c in ((1, 0), (2, 0), (2, 1), (3, 1), (4, 0), (100, 5))),
    oracle.window(oracle.prefix(5), 2, 4),
    oracle.window(oracle.chunked(3, 1), 2, -1),
    oracle.window(oracle.chunked(4, 0), -1, 1),
)


def pack(*lengths: int, total: int | None = None) -> list[int]:
    """Ids 1, 2, ... of sequences that lie back to back, then padding up to `total`."""
    ids = [s + 1 for s, length in enumerate(lengths) for _ in range(length)]
    return ids + [0] * ((total or len(ids)) - len(ids))


def package_policy(policy: oracle.Policy) -> te.MaskPolicy:
    """The package's policy that should do what the oracle's does."""
    made = {
        "full": lambda: te.FULL,
        "causal": lambda: te.CAUSAL,
        "causal_bottom_right": lambda: te.CAUSAL_BOTTOM_RIGHT,
        "prefix": lambda: te.prefix(policy.length),
        "chunked": lambda: te.chunked(policy.size, policy.left_chunks),
    }[policy.kind]()
    if (policy.left, policy.right) != (-1, -1):
        made = made.with_window(policy.left, policy.right)
    return made


# ------------------------------------------------------------------------ tolerance


def _naive(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Scores, mask, softmax, product, each in the dtype of the arrays."""
    group = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
    mask = mask[:, None]

    def softmax(q: jax.Array, k: jax.Array) -> tuple[jax.Array, jax.Array]:
        s = jnp.einsum("btnh,bsnh->bnts", q, k) * jnp.asarray(scale, q.dtype)
        s = jnp.where(mask, s, 0)
        top = jnp.max(s, axis=-1, keepdims=True, where=mask, initial=-1e4)
        top = jax.lax.stop_gradient(top)
        p = jnp.where(mask, jnp.exp(s - top), 0)
        total = p.sum(-1, keepdims=True)
        some = total > 0
        total = jnp.where(some, total, 1)
        return p / total, jnp.where(some, top + jnp.log(total), -jnp.inf)[..., 0]

    p, _ = softmax(q, k)
    statistics = jnp.float64 if q.dtype == jnp.float64 else jnp.float32
    _, lse = softmax(q.astype(statistics), k.astype(statistics))
    return jnp.einsum("bnts,bsnv->btnv", p, v), jnp.swapaxes(lse, 1, 2)


@jax.jit
def naive_with_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    mask: jax.Array,
    scale: jax.Array,
    dout: jax.Array,
    dlse: jax.Array,
) -> tuple[jax.Array, ...]:
    """A naive implementation's (out, lse, dq, dk, dv) in the dtype under test."""
    (out, lse), vjp = jax.vjp(lambda q, k, v: _naive(q, k, v, mask, scale), q, k, v)
    return out, lse, *vjp((dout, dlse))


def ulp(magnitude: float, dtype: Any) -> float:
    """One unit in the last place of `dtype` at `magnitude`."""
    if not magnitude:
        return 0.0
    return float(jnp.finfo(dtype).eps) * 2.0 ** np.floor(np.log2(magnitude))


def error(got: Any, exact: np.ndarray) -> float:
    """Largest absolute difference where `exact` is finite."""
    finite = np.isfinite(exact)
    difference = np.abs(np.asarray(got, np.float64)[finite] - exact[finite])
    return float(difference.max(initial=0.0))


def assert_within(
    got: Any, exact: np.ndarray, naive: Any, magnitude: float, name: str
) -> None:
    """At most twice the naive error, plus a floor at the largest magnitude.

    `magnitude` is that of the terms, which may cancel. Half precision is rounded once,
    at the end: one ulp. Other dtypes are rounded at each step: some ulps.
    """
    assert got.shape == exact.shape, f"{name}: {got.shape} is not {exact.shape}"
    got64 = np.asarray(got, np.float64)
    infinite = ~np.isfinite(exact)
    np.testing.assert_array_equal(got64[infinite], exact[infinite], err_msg=name)
    floor = ulp(magnitude, got.dtype) * (1 if got.dtype.itemsize == 2 else 4)
    bound = 2 * error(naive, exact) + floor
    assert np.isfinite(got64[~infinite]).all(), f"{name}: not finite"
    worst = error(got, exact)
    assert worst <= bound, f"{name}: error {worst:.3g}, at most {bound:.3g} allowed"


# ------------------------------------------------------------- calls against the oracle


@functools.cache
def forward_backward(
    policies: tuple[oracle.Policy, ...],
    implementation: str | None,
    scale: float | None = None,
    attention: Callable[..., Any] = te.dot_product_attention,
) -> Callable[..., Any]:
    """Jitted (out, lse, dq, dk, dv); everything but the policies is traced."""
    package = tuple(package_policy(p) for p in policies)

    @jax.jit
    def run(q, k, v, ids, pos, policy_ids, dout, dlse):
        policy = package[0] if policy_ids is None else package
        desc = te.SequenceDescriptor.from_segment_ids_and_pos(ids, pos)

        def attend(q, k, v):
            return attention(
                q,
                k,
                v,
                desc,
                policy=policy,
                policy_ids=policy_ids,
                scale=scale,
                implementation=implementation,
                return_lse=True,
            )

        (out, lse), vjp = jax.vjp(attend, q, k, v)
        return out, lse, *vjp((dout, dlse))

    return run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Data:
    """Random q, k, v and cotangents, not zero at padding."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    dout: jax.Array
    dlse: jax.Array


def random_data(
    B: int,
    T: int,
    S: int,
    *,
    N: int = 4,
    K: int = 2,
    H: int = 8,
    V: int = 6,
    dtype: Any = jnp.float32,
    seed: int = 0,
) -> Data:
    rng = np.random.default_rng(seed)
    statistics = np.float64 if dtype == jnp.float64 else np.float32

    def normal(*shape: int) -> jax.Array:
        return jnp.asarray(rng.normal(size=shape).astype(np.float32), dtype)

    return Data(
        q=normal(B, T, N, H),
        k=normal(B, S, K, H),
        v=normal(B, S, K, V),
        dout=normal(B, T, N, V),
        dlse=jnp.asarray(rng.normal(size=(B, T, N)).astype(statistics)),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
    out: np.ndarray
    lse: np.ndarray
    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray

    def items(self) -> list[tuple[str, np.ndarray]]:
        return [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self)]


def assert_bitwise(got: Result, want: Result, what: str) -> None:
    for (name, a), (_, b) in zip(got.items(), want.items(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=f"{what}: {name}")


def run(
    data: Data,
    q_ids: Any,
    kv_ids: Any = None,
    *,
    policies: Sequence[oracle.Policy] = (oracle.FULL,),
    policy_ids: Any = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    scale: float | None = None,
    exact_shape: bool = False,
    implementation: str | None,
    attention: Callable[..., Any] = te.dot_product_attention,
) -> Result:
    """The package's output, lse and gradients. Ids, positions: [B, T] and [B, S].

    Padded to a standard size, unless `exact_shape`.
    """
    (B, T), S = data.q.shape[:2], data.k.shape[1]
    kv_ids = q_ids if kv_ids is None else kv_ids
    pad = _padding(B, T, S, exact_shape=exact_shape)
    if pad is not np.asarray and set(policies) <= set(SHARED_POLICIES):
        policy_ids = _shared_policy_ids(policies, policy_ids, (B, T))
        policies = SHARED_POLICIES

    def metadata(x: Any) -> np.ndarray | None:
        return None if x is None else pad(np.asarray(x, np.int32))

    pos = None
    if q_pos is not None:
        pos = metadata(q_pos), metadata(kv_pos)
    results = forward_backward(tuple(policies), implementation, scale, attention)(
        *(pad(data.q), pad(data.k), pad(data.v)),
        (metadata(q_ids), metadata(kv_ids)),
        *(pos, metadata(policy_ids), pad(data.dout), pad(data.dlse)),
    )
    out, lse, dq, dk, dv = (np.asarray(x) for x in results)
    return Result(
        out=out[:B, :T], lse=lse[:B, :T], dq=dq[:B, :T], dk=dk[:B, :S], dv=dv[:B, :S]
    )


def _padding(
    B: int, T: int, S: int, *, exact_shape: bool = False
) -> Callable[[Any], np.ndarray]:
    """What fills arrays [B, n, ...] up with 0 to the smallest standard size."""
    for batch, length in STANDARD_SIZES:
        if batch >= B and max(T, S) <= length and not exact_shape:

            def pad(x: Any, size: tuple[int, int] = (batch, length)) -> np.ndarray:
                x = np.asarray(x)
                result = np.zeros((*size, *x.shape[2:]), x.dtype)
                result[: x.shape[0], : x.shape[1]] = x
                return result

            return pad
    return np.asarray


def _shared_policy_ids(
    policies: Sequence[oracle.Policy], policy_ids: Any, shape: tuple[int, int]
) -> np.ndarray:
    """`policy_ids` as indices into `SHARED_POLICIES`; out of range stays so."""
    if policy_ids is None:
        policy_ids = np.zeros(shape, np.int32)
    policy_ids = np.asarray(policy_ids, np.int64)
    shared = np.asarray([SHARED_POLICIES.index(p) for p in policies])
    inside = (policy_ids >= 0) & (policy_ids < len(policies))
    outside = np.where(policy_ids < 0, policy_ids, 10_000)
    return np.where(inside, shared[np.where(inside, policy_ids, 0)], outside)


def check(
    q_ids: Any,
    kv_ids: Any = None,
    *,
    policies: Sequence[oracle.Policy] = (oracle.FULL,),
    policy_ids: Any = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    scale: float | None = None,
    exact_shape: bool = False,
    implementation: str | None,
    attention: Callable[..., Any] = te.dot_product_attention,
    data: Data | None = None,
    **sizes: Any,
) -> Result:
    """Output, lse and all gradients of one call, compared with the oracle.

    Also: exact zeros for queries without a key and for keys without a query. `sizes` go
    to `random_data`; `attention` is called as `te.dot_product_attention` is.
    """
    q_ids = np.asarray(q_ids)
    kv_ids = q_ids if kv_ids is None else np.asarray(kv_ids)
    if data is None:
        data = random_data(len(q_ids), q_ids.shape[1], kv_ids.shape[1], **sizes)
    got = run(
        data,
        q_ids,
        kv_ids,
        policies=policies,
        policy_ids=policy_ids,
        q_pos=q_pos,
        kv_pos=kv_pos,
        scale=scale,
        exact_shape=exact_shape,
        implementation=implementation,
        attention=attention,
    )
    factor: float = data.q.shape[-1] ** -0.5 if scale is None else scale
    mask = oracle.mask(q_ids, kv_ids, q_pos, kv_pos, policies, policy_ids)
    assert_matches_oracle(got, data, mask, factor)
    return got


def _naive_results(data: Data, mask: np.ndarray, scale: float) -> list[np.ndarray]:
    B, T, S = mask.shape
    pad = _padding(B, T, S)
    if pad is not np.asarray:
        square = pad(np.zeros((B, T, pad(data.q).shape[1]), bool))
        square[:B, :T, :S] = mask
        mask = square
    results = naive_with_gradients(
        *(pad(data.q), pad(data.k), pad(data.v)),
        *(mask, scale, pad(data.dout), pad(data.dlse)),
    )
    lengths = (T, T, T, S, S)
    return [np.asarray(x)[:B, :n] for x, n in zip(results, lengths, strict=True)]


def assert_matches_oracle(
    got: Result, data: Data, mask: np.ndarray, scale: float
) -> None:
    """`got` within tolerance of the oracle, and exactly 0 where it must be."""
    out, lse = oracle.attention(data.q, data.k, data.v, mask, scale)
    exact = oracle.gradients(data.q, data.k, data.v, mask, scale, data.dout, data.dlse)
    naive = _naive_results(data, mask, scale)
    magnitudes = oracle.magnitudes(
        data.q, data.k, data.v, mask, scale, data.dout, data.dlse
    )
    exacts = (out, lse, exact.dq, exact.dk, exact.dv)
    for (name, a), b, c, magnitude in zip(
        got.items(), exacts, naive, magnitudes, strict=True
    ):
        assert_within(a, b, c, magnitude, name)
    blind, unseen = ~mask.any(axis=2), ~mask.any(axis=1)
    assert not got.out[blind].any(), "out is not exactly 0 at queries without a key"
    assert not got.dq[blind].any(), "dq is not exactly 0 at queries without a key"
    assert (got.lse[blind] == -np.inf).all(), "lse is not -inf at queries without a key"
    assert not got.dk[unseen].any(), "dk is not exactly 0 at keys that nobody sees"
    assert not got.dv[unseen].any(), "dv is not exactly 0 at keys that nobody sees"


def with_rubbish(data: Data, q_at, kv_at, value, fields=None) -> Data:
    """`value` at the tokens where the masks `q_at` and `kv_at` [B, .] are true."""
    places = {"q": q_at, "k": kv_at, "v": kv_at, "dout": q_at, "dlse": q_at}
    changed = {}
    for field in fields or places:
        array = np.asarray(getattr(data, field)).copy()
        array[places[field]] = value
        changed[field] = jnp.asarray(array)
    return dataclasses.replace(data, **changed)


def select(data: Data, q: Any, kv: Any) -> Data:
    """Tokens `q` of the query side and `kv` of the key side of row 0, as one row."""
    return Data(
        q=data.q[:1, q],
        k=data.k[:1, kv],
        v=data.v[:1, kv],
        dout=data.dout[:1, q],
        dlse=data.dlse[:1, q],
    )


def rows(data: Data, which: slice) -> Data:
    """Some rows of the batch."""
    fields = {f.name: getattr(data, f.name)[which] for f in dataclasses.fields(data)}
    return Data(**fields)


def assert_each_alone(
    got: Result,
    data: Data,
    q_ids: Sequence[int],
    kv_ids: Sequence[int],
    policy_of: dict[int, oracle.Policy],
    *,
    implementation: str,
) -> None:
    """Row 0 of `got` equals one call per sequence, on its tokens only."""
    # Two correct results in one dtype differ by a few roundings.
    tolerance = 8 * float(jnp.finfo(data.q.dtype).eps)
    for sequence, policy in policy_of.items():
        q = np.flatnonzero(np.asarray(q_ids) == sequence)
        kv = np.flatnonzero(np.asarray(kv_ids) == sequence)
        alone = run(
            select(data, q, kv),
            np.ones((1, len(q))),
            np.ones((1, len(kv))),
            policies=(policy,),
            implementation=implementation,
        )
        for (name, whole), (_, want) in zip(got.items(), alone.items(), strict=True):
            want = np.asarray(want[0], np.float64)
            rtol = 1e-5 if name == "lse" else tolerance
            scale = max(1.0, float(np.abs(want[np.isfinite(want)]).max(initial=0)))
            np.testing.assert_allclose(
                np.asarray(whole[0, kv if name in ("dk", "dv") else q], np.float64),
                want,
                rtol=rtol,
                atol=rtol * scale,
                err_msg=f"sequence {sequence}: {name}",
            )


# ---------------------------------------------------------------------------- the PROBE


def probe(
    q_ids: Any,
    kv_ids: Any = None,
    *,
    policies: Sequence[oracle.Policy] = (oracle.FULL,),
    policy_ids: Any = None,
    q_pos: Any = None,
    kv_pos: Any = None,
    implementation: str | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Mean index of the keys that each query of one row sees, and which see nothing.

    With q = 0 all allowed keys weigh the same. v holds the index of the key, and the
    index plus one: the two channels are equal only where nothing is seen.
    """
    kv_ids = q_ids if kv_ids is None else kv_ids
    data = random_data(1, len(q_ids), len(kv_ids))
    index = np.arange(len(kv_ids), dtype=np.float32)[None, :, None]
    v = np.zeros(data.v.shape, np.float32)
    v[..., 0], v[..., 1] = index, index + 1
    result = run(
        dataclasses.replace(data, q=jnp.zeros_like(data.q), v=jnp.asarray(v)),
        [q_ids],
        [kv_ids],
        policies=policies,
        policy_ids=None if policy_ids is None else [policy_ids],
        q_pos=None if q_pos is None else [q_pos],
        kv_pos=None if kv_pos is None else [kv_pos],
        implementation=implementation,
    )
    means, ones = result.out[0, :, :, 0], result.out[0, :, :, 1]
    np.testing.assert_allclose(means, means[:, :1].repeat(means.shape[1], axis=1))
    return means[:, 0], means[:, 0] == ones[:, 0]


def probe_call(T: int, S: int, **arguments: Any) -> tuple[np.ndarray, np.ndarray]:
    """The same from a plain call, which gets `arguments`: descriptor and policies."""
    data = random_data(1, T, S, N=1, K=1, V=2)
    index = np.arange(S, dtype=np.float32)
    v = np.stack([index, index + 1], axis=-1)[None, :, None]
    out = te.dot_product_attention(
        jnp.zeros_like(data.q), data.k, jnp.asarray(v), **arguments
    )
    means, ones = np.asarray(out)[0, :, 0].T
    return means, means == ones


def assert_probe(
    expected: Sequence[float], *, nothing: Sequence[int] = (), **arguments: Any
) -> None:
    """PROBE gives `expected`, and exactly the rows in `nothing` see no key."""
    assert_means(probe(**arguments), expected, nothing)


def assert_means(
    probed: tuple[np.ndarray, np.ndarray],
    expected: Sequence[float],
    nothing: Sequence[int] = (),
) -> None:
    means, blind = probed
    np.testing.assert_allclose(means, expected, rtol=5e-5, atol=1e-5)
    assert np.flatnonzero(blind).tolist() == sorted(nothing)


# -------------------------------------------------------------------- looking at jaxprs


def equations(jaxpr: Any) -> list[Any]:
    """Every equation of a jaxpr and of the jaxprs inside it."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    found = []
    for eqn in jaxpr.eqns:
        found.append(eqn)
        for param in jax.tree.leaves(
            list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")
        ):
            if hasattr(param, "eqns") or hasattr(param, "jaxpr"):
                found.extend(equations(param))
    return found


def count(jaxpr: Any, primitive: Any) -> int:
    """How often `primitive` stands in a jaxpr."""
    return sum(eqn.primitive is primitive for eqn in equations(jaxpr))
