"""`python -m te_mixed_jax`: what it prints, and that it notices a wrong result."""

import functools
import importlib.metadata
import platform
import re
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from te_mixed_jax import __main__ as doctor
from te_mixed_jax.lowerings import LOWERINGS, xla


def sections(printed: str) -> list[dict[str, str]]:
    """Per section of the report its lines, by their first word."""
    return [
        dict(re.split(r"\s{2,}", line.strip(), maxsplit=1) for line in lines)
        for _, *lines in (part.splitlines() for part in printed.strip().split("\n\n"))
    ]


@pytest.fixture(scope="module")
def report() -> list[dict[str, str]]:
    """What a user without a GPU gets."""
    done = subprocess.run(
        [sys.executable, "-m", "te_mixed_jax"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return sections(done.stdout)


def test_versions(report):
    versions = report[0]
    assert versions["Python"].startswith(platform.python_version())
    for name in ("jax", "jaxlib", "flax"):
        assert versions[name] == importlib.metadata.version(name)
    assert {"te_mixed_jax", "CUDA", "cuDNN", "TransformerEngine"} <= versions.keys()


def test_what_is_not_installed_is_said_to_be_absent(report):
    try:
        expected = importlib.metadata.version("transformer-engine")
    except importlib.metadata.PackageNotFoundError:
        expected = "not installed"
    assert report[0]["TransformerEngine"] == expected


def test_every_implementation_is_there_with_a_reason(report):
    implementations = report[2]
    assert implementations.keys() == {*LOWERINGS, "by default"}
    for name in LOWERINGS:
        assert re.match(r"yes$|no: it \w+", implementations[name])


def test_on_a_cpu(report):
    _, devices, implementations, checks = report
    if "cpu" not in devices:
        pytest.skip(f"needs a machine where jax runs on the CPU, got {devices}")
    assert implementations["xla"] == implementations["dense"] == "yes"
    assert "NVIDIA GPU" in implementations["mosaic"]
    assert "NVIDIA GPU" in implementations["cudnn"]
    assert implementations["by default"] == "xla"
    assert checks.keys() == {"xla"}
    assert checks["xla"].startswith("ok: out ")


def test_on_a_gpu_older_than_hopper(monkeypatch, capsys):
    gpu = SimpleNamespace(
        platform="gpu",
        device_kind="NVIDIA A100",
        compute_capability="8.0",
        client=SimpleNamespace(platform_version="PJRT C API\ncuda 13000"),
    )
    monkeypatch.setattr(jax, "devices", lambda platform=None: [gpu])
    assert doctor.main() == 0
    _, devices, implementations, checks = sections(capsys.readouterr().out)
    assert devices == {"gpu": "1 x NVIDIA A100"}
    for name in ("mosaic", "cudnn"):
        assert re.match("no: it needs a Hopper GPU.* not 8.0", implementations[name])
    assert implementations["by default"] == "xla"
    assert checks.keys() == {"xla"}


def wrong_output(right: Any, *args: Any, **kwargs: Any) -> Any:
    out, lse = right(*args, **kwargs)
    return out * 1.1, lse


def wrong_gradient(right: Any, *args: Any, **kwargs: Any) -> Any:
    dq, dk, dv = right(*args, **kwargs)
    return dq, dk.at[0, 0].set(jnp.nan), dv


def raises(right: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("no such kernel")


@pytest.mark.parametrize(
    ("function", "wrong", "match"),
    [
        ("forward", wrong_output, r"FAILED: out 1\.0e-01, dq .*; at most 3\.1e-02"),
        ("backward", wrong_gradient, r"FAILED: out \d.*, dk nan, dv \d"),
        ("forward", raises, "FAILED: RuntimeError: no such kernel"),
    ],
    ids=["output", "gradient", "error"],
)
def test_a_wrong_implementation_fails(monkeypatch, capsys, function, wrong, match):
    right = getattr(xla, function)
    monkeypatch.setattr(xla, function, functools.partial(wrong, right))
    assert doctor.main() == 1
    assert re.match(match, sections(capsys.readouterr().out)[3]["xla"])
