"""How an attention call is computed: one module per way.

A lowering is a module with three functions, all on rank-4 arrays with one batch axis:

    supports(q, k, v, config) -> str | None
        Why this call cannot run here, or None; from shapes and dtypes alone.
    forward(q, k, v, ranges, *, config) -> (out, lse)
        q [B, T, N, H], k [B, S, K, H], v [B, S, K, V] -> out [B, T, N, V] in q's
        dtype, lse [B, T, N] in the accumulator dtype, `empty_lse` where a query sees
        nothing. `ranges` is a `KeyRanges`; queries with `is_broken` give NaN.
    backward(q, k, v, out, lse, dout, dlse, ranges, *, config) -> (dq, dk, dv)
        dlse [B, T, N] may be None: zero.

`dense` has no `backward`: it is not behind the primitives, JAX differentiates it.
"""

from te_mixed_jax.lowerings import dense, xla

LOWERINGS = {"xla": xla, "dense": dense}
