"""`python -m te_mixed_jax`: versions, devices, what runs here, and is it right?

Bug reports ask for what it prints. The exit status is 1 if a result is wrong.
"""

import functools
import importlib.metadata
import platform
import re
import sys
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import te_mixed_jax
from te_mixed_jax import (
    CAUSAL,
    FULL,
    dot_product_attention,
    from_segment_ids_and_pos,
)
from te_mixed_jax._call import canonical_call
from te_mixed_jax.lowerings import LOWERINGS, lowering_for, why_not_on

# A call that the GPU implementations have too.
_B, _T, _N, _K, _H = 2, 256, 4, 2, 64
_WHAT = f"{_B} packed rows of {_T} tokens, bfloat16, head dim {_H}, CAUSAL and FULL"
# Of the largest value: some roundings of bfloat16. A wrong mask is far beyond.
_TOLERANCE = 2.0**-5


def main() -> int:
    """Prints the report; returns the exit status."""
    print("Versions")
    _line("te_mixed_jax", te_mixed_jax.__version__)
    _line("Python", f"{platform.python_version()}, {platform.platform()}")
    for name, packages in {
        "jax": ("jax",),
        "jaxlib": ("jaxlib",),
        "flax": ("flax",),
        "cuDNN": ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12"),
        "TransformerEngine": ("transformer-engine",),
    }.items():
        _line(name, _version(*packages) or "not installed")
    device = jax.devices()[0]
    cuda = re.search(r"cuda (\d+)(\d\d)(\d)", device.client.platform_version)
    _line("CUDA", ".".join(str(int(x)) for x in cuda.groups()) if cuda else "not used")

    print("\nDevices")
    kinds = Counter((device.platform, device.device_kind) for device in jax.devices())
    for (where, kind), number in kinds.items():
        _line(where, f"{number} x {kind}")

    arguments = _arguments()
    call = canonical_call(**arguments, scale=None, implementation=None)
    where = "cuda" if cuda else device.platform
    reasons = {
        name: why_not_on(where, name, *call[:3], call.config) for name in LOWERINGS
    }
    best = lowering_for(where, *call[:3], call.config)
    print(f"\nImplementations, for {_WHAT}")
    for name, reason in reasons.items():
        _line(name, "yes" if reason is None else f"no: {reason}")
    default = next(name for name, module in LOWERINGS.items() if module is best)
    _line("by default", default)

    print('\nErrors of output and gradients, relative to "dense" in float32')
    failed = False
    for name, reason in reasons.items():
        if name != "dense" and reason is None:
            verdict = _check(name, arguments)
            failed |= not verdict.startswith("ok")
            _line(name, verdict)
    return int(failed)


def _line(name: str, text: str) -> None:
    print(f"  {name:<19}{text}", flush=True)


def _version(*packages: str) -> str | None:
    """The version of the first of these that is installed."""
    for name in packages:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def _arguments() -> dict[str, Any]:
    """The arguments of a call: a causal sequence, a bidirectional one, padding."""
    rng = np.random.default_rng(0)
    heads = {"query": _N, "key": _K, "value": _K}
    arrays = {
        name: jnp.asarray(rng.normal(size=(_B, _T, n, _H)), jnp.bfloat16)
        for name, n in heads.items()
    }
    lengths = (90, 130, 36), (150, 70, 36)
    ids = np.stack([np.repeat([1, 2, 0], row) for row in lengths])
    return arrays | {
        "desc": from_segment_ids_and_pos(ids),
        "policy": (CAUSAL, FULL),
        "policy_ids": ids // 2,
    }


def _check(name: str, arguments: dict[str, Any]) -> str:
    """How far results and gradients are from those of "dense": ok, or FAILED."""
    rest = dict(arguments)
    arrays = [rest.pop(name) for name in ("query", "key", "value")]
    dout = np.random.default_rng(1).normal(size=arrays[0].shape)

    def results(implementation, dtype):
        attend = functools.partial(
            dot_product_attention, **rest, implementation=implementation
        )

        @jax.jit
        def run(*arrays):
            out, vjp = jax.vjp(attend, *arrays)
            return out, *vjp(jnp.asarray(dout, dtype))

        return [
            np.asarray(x, np.float32) for x in run(*(x.astype(dtype) for x in arrays))
        ]

    exact = results("dense", jnp.float32)
    try:
        got = results(name, arrays[0].dtype)
    except Exception as error:  # whatever it is, it belongs into the report
        return f"FAILED: {type(error).__name__}: {error}"
    errors = {
        what: float(np.abs(a - b).max() / np.abs(b).max())
        for what, a, b in zip(("out", "dq", "dk", "dv"), got, exact, strict=True)
    }
    # NaN is not within it.
    right = all(error <= _TOLERANCE for error in errors.values())
    listed = ", ".join(f"{what} {error:.1e}" for what, error in errors.items())
    return f"{'ok' if right else 'FAILED'}: {listed}; at most {_TOLERANCE:.1e} allowed"


if __name__ == "__main__":
    sys.exit(main())
