"""The options of the examples that train a model."""

import argparse
from pathlib import Path


def training_options(
    doc: str | None, arguments: list[str] | None, *, steps: int
) -> tuple[int, Path, int]:
    """Number of steps, folder of pictures, seed; `doc` says what the program does."""
    parser = argparse.ArgumentParser(description=str(doc).splitlines()[0])
    parser.add_argument(
        "--steps", type=int, default=steps, help=f"{steps} if not given"
    )
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "out")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.steps < 1:
        parser.error(f"--steps must be at least 1, got {options.steps}")
    options.out.mkdir(parents=True, exist_ok=True)
    return options.steps, options.out, options.seed
