"""Shows the mask of one packed row, as a picture and as text.

Draws docs/mask.png: `python examples/see_mask.py docs/mask.png`.
"""

import argparse

import numpy as np
from matplotlib import pyplot
from PIL import Image

from te_mixed_jax import CAUSAL, FULL, chunked, from_segment_ids_and_pos
from te_mixed_jax.visualize import describe, plot_mask

POLICIES = (CAUSAL, FULL, chunked(64, 2))
LENGTHS = (420, 300, 480, 260)
ROW_LENGTH = 1536


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("path", nargs="?", default="mask.png")
    path = parser.parse_args(argv).path

    ids = np.zeros((1, ROW_LENGTH), int)
    ids[0, : sum(LENGTHS)] = np.repeat(np.arange(1, 1 + len(LENGTHS)), LENGTHS)
    policy_ids = np.array([0, 0, 1, 2, 0])[ids]  # of padding and of sequences 1 to 4
    desc = from_segment_ids_and_pos(ids)

    print(describe(desc, POLICIES, policy_ids))
    plot_mask(desc, POLICIES, policy_ids, tiles=True)
    pyplot.savefig(path)
    # 64 colours are enough, and a quarter of the size.
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)


if __name__ == "__main__":
    main()
