"""The pictures that train_mixed.py draws, and the colours of all examples."""

from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch

# Colours of Okabe and Ito, which colour-blind readers can tell apart.
BLUE, ORANGE = "#0072B2", "#D55E00"
SEQUENCE_COLORS = (BLUE, "#E69F00", "#009E73", "#CC79A7", "#56B4E9", ORANGE)
SHADES = (1.0, 0.45)  # of causal and of bidirectional sequences
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


def draw_mask(
    mask: np.ndarray, segment_ids: np.ndarray, policy_ids: np.ndarray, path: Path
) -> None:
    """The mask [T, T] of one row: a colour per sequence, a shade per policy."""
    T = len(segment_ids)
    image = np.ones((T, T, 3))
    figure = Figure(figsize=(8, 8), layout="constrained")
    axes = figure.add_subplot()
    image[segment_ids <= 0] = 0.93
    image[:, segment_ids <= 0] = 0.93
    for segment in range(1, segment_ids.max() + 1):
        here = np.flatnonzero(segment_ids == segment)
        policy = policy_ids[here[0]]
        color = np.array(to_rgb(SEQUENCE_COLORS[segment % len(SEQUENCE_COLORS) - 1]))
        image[(segment_ids == segment)[:, None] & mask] = 1 - SHADES[policy] * (
            1 - color
        )
        right = here[-1] < 0.7 * T
        axes.text(
            here[-1] + 0.012 * T if right else here[0] - 0.012 * T,
            here.mean(),
            f"{NAMES[policy].split(',')[0]}, {len(here)} bytes",
            ha="left" if right else "right",
            va="center",
        )
    axes.imshow(image, interpolation="none")
    axes.set(xlabel="key", ylabel="query")
    axes.set_title(
        f"The mask of one packed row of {T} bytes: {mask.mean():.1%} of the pairs are "
        "visible"
    )
    dark, light = (str(1 - 0.6 * shade) for shade in SHADES)
    axes.legend(
        handles=[
            Patch(color=dark, label="causal (full shade)"),
            Patch(color=light, label="bidirectional (light shade)"),
            Patch(color="0.93", label="padding"),
        ],
        title="one colour per sequence",
        loc="upper right",
    )
    figure.savefig(path, dpi=150)
