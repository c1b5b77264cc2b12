"""Runs the Hopper kernels on a CPU, in JAX's emulation of Mosaic GPU.

The emulation runs each warpgroup of a block as a thread, with the barriers and copies
of the kernel, and does each product at once. So it shows wrong indices, wrong masks
and threads that wait forever; not a product whose result is read too early, nor a place
in shared memory that is used for two things. Threads of a block need threads of the
CPU: on few cores, `jax_num_cpu_devices` of 8 makes enough, as in conftest.py.

What it lacks in jax 0.11.2 and 0.12 is added here, to JAX's internals: products whose
first operand is in registers, accumulators that start from a value, and barriers that
are open when a kernel ends.
"""

import contextlib
import importlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from te_mixed_jax.lowerings import _mosaic


def _internals(module: str) -> Any:
    return importlib.import_module(f"jax._src.pallas.mosaic_gpu.interpret.{module}")


WHY_NOT = None
callbacks: Any = None
memory: Any = None
try:
    callbacks, memory = map(_internals, ("gpu_callbacks", "shared_memory"))
    _mode: Any = plgpu.force_gpu_interpret_mode  # type: ignore[attr-defined]
except (ImportError, AttributeError):
    WHY_NOT = f"jax {jax.__version__} has no emulation of Mosaic GPU"


def _run_state(body: Any) -> Any:
    """`pl.run_state` of one accumulator, which starts from 0 in an emulation."""

    def run(start: jax.Array) -> jax.Array:
        def added(ref):
            body(ref)
            return ref[...]

        return start + pl.run_scoped(added, _mosaic.accumulator(*start.shape))

    return run


def _product(
    *, token: Any, mesh_location: Any, thread: Any, source_info: Any, **operands: Any
) -> Any:
    """Adds the product of two operands, of which the first may be an array."""
    shared = callbacks._get_shared_memory()
    logged = memory.GPULoggingInfo(mesh_location, thread, source_info)

    def content(name: str) -> tuple[Any, Any, Any]:
        key = operands[f"{name}_allocation_key_as_array"]
        if key.ndim > 1:  # no key, but the operand
            return np.asarray(key, np.float32), None, None
        key = callbacks.HostAllocationKey.from_array(key)
        transforms = operands[f"{name}_transforms"]
        transforms = callbacks._remove_noop_transforms(transforms)
        where = shared.access(key, jax.tree.map(int, transforms))
        values, *_ = shared.get_buffer_content(key, where, thread, logging_info=logged)
        return values.astype(np.float32), key, where

    (a, *_), (b, *_), (acc, key, where) = (content(x) for x in ("a", "b", "acc"))
    with np.errstate(all="ignore"):
        acc = acc + a @ b
    shared.store_buffer_content(key, where, acc, thread, logging_info=logged)
    return token


def _drop_barrier(barrier: Any) -> None:
    with barrier.cv:
        barrier.ref_count -= 1
        done = barrier.ref_count == 0
        assert not (done and barrier.arrivals_count), "a barrier is half open"


@contextlib.contextmanager
def emulated() -> Iterator[None]:
    """Runs kernels on the CPU; of persistent blocks there is one."""
    with contextlib.ExitStack() as stack:
        for target, name, new in (
            (_mosaic, "BLOCKS", 1),
            (pl, "run_state", _run_state),
            (plgpu.WGMMAAccumulatorRef, "init", staticmethod(lambda x: x)),
            (callbacks, "wgmma", _product),
            (memory.Barrier, "deallocate", _drop_barrier),
        ):
            stack.enter_context(mock.patch.object(target, name, new))
        stack.enter_context(_mode())
        yield
