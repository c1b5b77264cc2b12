"""Runtime type checks of internal modules, GPU skips and hypothesis profiles."""

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import jax
import jaxtyping
import pytest

# The public functions stay unchecked, so that their own errors are what the tests see.
jaxtyping.install_import_hook(
    ["te_mixed_jax._ranges", "te_mixed_jax._primitives", "te_mixed_jax.lowerings"],
    "beartype.beartype",
)

# For the tests of sharding; all others use the first one.
jax.config.update("jax_num_cpu_devices", 8)

_COMMON = {
    "deadline": None,
    "suppress_health_check": [hypothesis.HealthCheck.too_slow],
    "print_blob": True,
}
hypothesis.settings.register_profile("default", max_examples=40, **_COMMON)
hypothesis.settings.register_profile("full", max_examples=2_000, **_COMMON)
hypothesis.settings.load_profile("default")


def _no_hopper() -> str | None:
    """Why the GPU tests cannot run here, or None."""
    try:
        device = jax.devices("gpu")[0]
    except RuntimeError:
        return "needs a Hopper GPU, and jax finds no GPU"
    if getattr(device, "compute_capability", None) != "9.0":
        return f"needs a Hopper GPU, got {device.device_kind}"
    return None


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--wheel", type=Path, help="test that this file can be installed")


# What these test is the same in both implementations that run anywhere; "dense", the
# simpler one, is left to the full run. All others test both every day.
_DENSE_IS_SLOW = {
    "test_descriptor",
    "test_heads",
    "test_numerics",
    "test_packing",
    "test_padding",
    "test_policies",
    "test_sharding",
    "test_transforms",
    "test_vmap",
    "test_windows",
}


@pytest.hookimpl(tryfirst=True)  # before what selects by marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = getattr(getattr(item, "callspec", None), "params", {})
        dense = parameters.get("implementation") == "dense"
        if dense and item.path.stem in _DENSE_IS_SLOW:
            item.add_marker(pytest.mark.slow)
    gpu = [item for item in items if item.get_closest_marker("gpu")]
    reason = _no_hopper() if gpu else None
    if reason:
        for item in gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True, scope="module")
def compiler_effort(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compiles quickly rather than well, since most programs here run once.

    Modules that say `OPTIMISED = True` test what the compiler makes of a program, and
    the full run tests everything as users run it.
    """
    full = request.config.getoption("hypothesis_profile") == "full"
    quick = not full and not getattr(request.module, "OPTIMISED", False)
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


@pytest.fixture
def eager() -> Iterator[None]:
    """No jit around the primitives, so that many calls share their programs."""
    with jax.disable_jit():
        yield


@pytest.fixture(params=["xla", "dense"])
def implementation(request: pytest.FixtureRequest) -> str:
    """Every implementation that runs on any machine."""
    return request.param
