"""The picture of losses that train_mixed.py draws, and the colours of all examples."""

from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, ORANGE = "#0072B2", "#D55E00"
NAMES = ("causal, next byte", "bidirectional, masked bytes")


def draw_losses(history: np.ndarray, entropy: float, path: Path) -> None:
    """The two losses [steps, 2] of every step, and their running means."""
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.add_subplot()
    steps = 1 + np.arange(len(history))
    window = max(1, len(history) // 20)
    for name, color, losses in zip(NAMES, (BLUE, ORANGE), history.T, strict=True):
        mean = np.convolve(losses, np.full(window, 1 / window), "valid")
        axes.plot(steps, losses, color=color, alpha=0.25, linewidth=1)
        middle = np.arange(len(mean)) + (window + 1) / 2
        axes.plot(middle, mean, color=color, linewidth=2, label=name)
    axes.axhline(
        entropy,
        color="0.35",
        linestyle="--",
        linewidth=1,
        label="from byte frequencies alone",
    )
    axes.set(
        title="Both losses of one model, trained on mixed rows",
        xlabel=f"training step (thin: each one, thick: running mean of {window})",
        ylabel="bits per predicted byte",
        xlim=(0, len(history) + 1),
        ylim=(0, None),
    )
    axes.grid(axis="y", color="0.9")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=150)
