"""What a user meets before the first call: installation, import, types."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pages import code_blocks

ROOT = Path(__file__).parents[1]


def run_python(code: str, *command: str | Path, **keywords) -> str:
    """What a new process prints, by default of this Python."""
    command = (*(command or (sys.executable,)), "-c", code)
    done = subprocess.run(
        command, check=True, stdout=subprocess.PIPE, text=True, **keywords
    )
    return done.stdout


def test_import_needs_no_extra_and_takes_no_device():
    code = """
import sys
extras = ["flax", "grain", "matplotlib", "optax", "tqdm", "transformer_engine"]
sys.modules.update(dict.fromkeys(extras))  # importing one of them is an error
import te_mixed_jax
"""
    # With this platform, so is asking for a device.
    run_python(code, env=os.environ | {"JAX_PLATFORMS": "none_such"})


@pytest.mark.parametrize("module", ["linen", "nnx"])
def test_layers_say_that_they_need_flax(module):
    code = f"""
import sys
sys.modules["flax"] = None  # importing it is an error
try:
    import te_mixed_jax.{module}
except ImportError as error:
    print(error)
"""
    expected = (
        f'`te_mixed_jax.{module}` needs Flax: `pip install "te_mixed_jax[flax]"`.'
    )
    assert run_python(code) == f"{expected}\n"


def test_import_adds_little_to_that_of_jax():
    """Below 50 ms where `import jax` takes 500; that ratio, since machines differ.

    The first run may compile, and any may be disturbed, so one of several counts.
    """
    code = """
import time
start = time.process_time()
import jax
middle = time.process_time()
import te_mixed_jax
print((time.process_time() - middle) / (middle - start))
"""
    environment = dict(os.environ)
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    assert any(float(run_python(code, env=environment)) < 0.1 for _ in range(8))


def test_the_changelog_has_a_section_for_this_version():
    release, _, _ = importlib.metadata.version("te-mixed-jax").partition(".dev")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert re.search(rf"^## {re.escape(release)} - ", changelog, re.MULTILINE)


# ----------------------------------------------------------- with --wheel: a stranger


@pytest.fixture(scope="module")
def python_of_stranger(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """The Python of an environment that has the wheel and what it depends on."""
    wheel = request.config.getoption("wheel")
    if wheel is None:
        pytest.skip("needs a wheel: --wheel, which `make wheel-test` gives")
    assert wheel.name.endswith("-py3-none-any.whl")  # for any Python, on any machine
    environment = tmp_path_factory.mktemp("stranger")
    python = environment / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    subprocess.run([python, "-m", "pip", "install", "--quiet", wheel], check=True)
    return python


def test_a_stranger_gets_what_README_shows(python_of_stranger: Path, tmp_path: Path):
    code, printed = code_blocks("README.md")[0]
    # -I: without what a developer's PYTHONPATH adds.
    assert run_python(code, python_of_stranger, "-I", cwd=tmp_path) == printed


def test_a_type_checker_of_a_stranger_sees_types(
    python_of_stranger: Path, tmp_path: Path
):
    pytest.importorskip("pyright")
    file = shutil.copy(ROOT / "tests" / "seen_from_outside.py", tmp_path)
    checked = subprocess.run(
        [sys.executable, "-m", "pyright", "--pythonpath", python_of_stranger, file],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout
