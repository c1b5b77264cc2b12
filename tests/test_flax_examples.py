"""The example of the Flax layers runs."""

import pathlib
import runpy

EXAMPLE = pathlib.Path(__file__).parent.parent / "examples" / "flax_layer.py"


def test_flax_layer(capsys):
    """Packed sequences give what they give alone."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    differences = [float(line.rsplit(" by ")[-1]) for line in lines]
    assert len(differences) == 3
    assert max(differences) < 1e-5
