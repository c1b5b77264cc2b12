"""The example of the Flax layers runs, and only they need Flax."""

import pathlib
import runpy
import subprocess
import sys

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "flax_layer.py"


def test_flax_layer(capsys):
    """Packed sequences give what they give alone."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    differences = [float(line.rsplit(" by ")[-1]) for line in lines]
    assert len(differences) == 3
    assert max(differences) < 1e-5


def test_importing_the_package_does_not_import_flax():
    program = "import sys, te_mixed_jax; sys.exit('flax' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
