"""Trains one speech encoder that serves whole recordings and live speech.

Offline, a frame may see its whole utterance. Live, it may see its own chunk of frames
and some before it: the recogniser answers as soon as a chunk has come. Utterances of
all modes are packed into the same rows, and each is masked by its own policy, so that
one model learns all modes in one jitted step. Another one, trained offline only, shows
what that is good for.

The encoder is a small Conformer. The speech is made up: a phone is held for some
frames, then released. Voiced and voiceless phones, as "b" and "p", sound the same until
their release. Who cannot wait for that has to guess from what was before: a phone is
most often voiced if the one before it is, and voiceless if that is.

Run `python examples/streaming_asr.py`; it takes a minute.
"""

import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx
from matplotlib.figure import Figure

from command_line import training_options
from pictures import BLUE, ORANGE
from te_mixed_jax import FULL, chunked, from_segment_ids_and_pos
from te_mixed_jax.nnx import MultiHeadAttention

FRAME_MS = 40
LONG, SHORT = 16, 4  # frames in a chunk
MODES = ("offline", f"chunks of {LONG}", f"chunks of {SHORT}")
POLICIES = (FULL, chunked(LONG, 2), chunked(SHORT, 8))  # `policy_ids` index into it
CHUNKS = {1: LONG, 2: SHORT}  # of the modes that are live
WAITS = ("the end", *(f"up to {(n - 1) * FRAME_MS} ms" for n in CHUNKS.values()))

PAIRS = ("p b", "t d", "k g", "f v", "s z", "ʃ ʒ", "θ ð", "tʃ dʒ")
PHONES = " ".join(PAIRS).split()  # voiceless, voiced, voiceless, ...
HARMONY = 0.95  # how often a phone is voiced or voiceless as the one before it
HELD_FRAMES, RELEASE_FRAMES = (3, 9), 2
SPECTRUM = 24
NOISE = 1.5
UTTERANCE_PHONES = (8, 25)
ROW_LENGTH = 1024  # frames

LAYERS, HEADS, WIDTH = 2, 4, 64
KERNEL = 8  # frames that the convolution sees: this one and those before it
HELD_OUT_ROWS = 8
TOLERANCE = 1e-4  # of logits, in fp32


class Utterance(NamedTuple):
    spectra: np.ndarray  # [frames, SPECTRUM]
    phones: np.ndarray  # [frames]


class Batch(NamedTuple):
    """One row of utterances, with an axis of size 1 for the batch."""

    spectra: np.ndarray  # [1, ROW_LENGTH, SPECTRUM]; the others [1, ROW_LENGTH]
    phones: np.ndarray
    policy_ids: np.ndarray
    segment_ids: np.ndarray  # 1, 2, ...; 0 is padding
    positions: np.ndarray


# The data: made-up speech, and rows full of it.


def speak(rng: np.random.Generator) -> Utterance:
    """Random phones, with noise on their spectra."""
    sounds = np.random.default_rng(0)  # the same for all utterances
    held = sounds.normal(size=(len(PAIRS), SPECTRUM))
    release = sounds.normal(size=(len(PHONES), SPECTRUM))
    pair, voiced = rng.integers(len(PAIRS)), rng.random() < 0.5
    spectra, phones = [], []
    for _ in range(rng.integers(*UTTERANCE_PHONES)):
        pair = (pair + rng.integers(1, len(PAIRS))) % len(PAIRS)
        voiced = voiced == (rng.random() < HARMONY)
        phone = 2 * pair + voiced
        frames = rng.integers(*HELD_FRAMES)
        spectra += [held[pair]] * frames + [release[phone]] * RELEASE_FRAMES
        phones += [phone] * (frames + RELEASE_FRAMES)
    noise = NOISE * rng.normal(size=(len(phones), SPECTRUM))
    return Utterance((spectra + noise).astype(np.float32), np.array(phones))


def pack(utterances: list[Utterance], modes: list[int]) -> Batch:
    """The utterances back to back, then padding."""
    lengths = [len(utterance.phones) for utterance in utterances]
    padding = ROW_LENGTH - sum(lengths)
    fields = (
        *(np.concatenate(field) for field in zip(*utterances, strict=True)),
        np.repeat(modes, lengths),
        np.repeat(1 + np.arange(len(lengths)), lengths),
        np.concatenate([np.arange(length) for length in lengths]),
    )
    return Batch(
        *(np.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))[None] for x in fields)
    )


def rows_of_utterances(seed: int) -> Iterator[list[Utterance]]:
    """As many utterances as fit a row, for ever."""
    rng = np.random.default_rng((seed, 1))
    row, space = [], ROW_LENGTH
    while True:
        utterance = speak(rng)
        if len(utterance.phones) > space:
            yield row
            row, space = [], ROW_LENGTH
        row.append(utterance)
        space -= len(utterance.phones)


# The model: a Conformer whose convolution looks back only.


class FeedForward(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.silu(self.up(self.norm(x))))


class CausalConvolution(nnx.Module):
    """Per feature: a frame and those before it, of the same utterance only."""

    def __init__(self, rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.gated = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        kernel = nnx.initializers.normal(KERNEL**-0.5)(rngs.params(), (KERNEL, WIDTH))
        self.kernel = nnx.Param(kernel)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.out = nnx.Linear(WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, positions):
        x = nnx.glu(self.gated(self.norm1(x)))
        total = jnp.zeros_like(x)
        for back, weights in enumerate(self.kernel[...]):
            # Utterances are in one piece, so positions say where each starts.
            inside = (positions >= back)[..., None]
            total += weights * jnp.where(inside, jnp.roll(x, back, axis=-2), 0)
        return self.out(nnx.silu(self.norm2(total)))


class Block(nnx.Module):
    """A Conformer block."""

    def __init__(self, rngs: nnx.Rngs):
        self.before = FeedForward(rngs)
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = MultiHeadAttention(
            HEADS, WIDTH, rotary_base=1000.0, policy=POLICIES, rngs=rngs
        )
        self.convolution = CausalConvolution(rngs)
        self.after = FeedForward(rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)

    def __call__(self, x, desc, policy_ids):
        x = x + self.before(x) / 2
        x = x + self.attention(self.norm1(x), desc=desc, policy_ids=policy_ids)
        x = x + self.convolution(x, desc.segment_pos[0])
        x = x + self.after(x) / 2
        return self.norm2(x)


class Encoder(nnx.Module):
    """Spectra in, logits of phones out, for every frame."""

    def __init__(self, *, seed: int):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Linear(SPECTRUM, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, len(PHONES), rngs=rngs)

    def __call__(self, batch: Batch):
        desc = from_segment_ids_and_pos(batch.segment_ids, batch.positions)
        x = self.embed(jnp.asarray(batch.spectra))
        for block in self.blocks:
            x = block(x, desc, batch.policy_ids)
        return self.head(x)


encode = nnx.jit(lambda encoder, batch: encoder(batch))


# Training: the mode of an utterance is data, so both models run the same program.


@nnx.jit
def train_step(encoder: Encoder, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update; returns the mean loss of a frame, in nats."""

    def loss(encoder):
        logits = encoder(batch)
        nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.phones)
        return nats.mean(where=batch.segment_ids > 0)

    nats, gradients = nnx.value_and_grad(loss)(encoder)
    optimizer.update(encoder, gradients)
    return nats


def train(
    modes: tuple[int, ...], adamw, steps: int, seed: int
) -> tuple[Encoder, np.ndarray]:
    """An encoder trained on utterances of these modes, and its losses [steps]."""
    encoder = Encoder(seed=seed)
    optimizer = nnx.Optimizer(encoder, adamw, wrt=nnx.Param)
    rows, rng = rows_of_utterances(seed), np.random.default_rng((seed, 2))
    losses = []
    for _ in tqdm.trange(steps, desc=", ".join(MODES[i] for i in modes), unit="step"):
        row = next(rows)
        batch = pack(row, [int(mode) for mode in rng.choice(modes, len(row))])
        losses.append(float(train_step(encoder, optimizer, batch)))
    return encoder, np.array(losses)


# What the models can do.


def recognise(encoder: Encoder, row: list[Utterance], mode: int) -> list[np.ndarray]:
    """The phones [frames] that are found in each utterance."""
    batch = pack(row, [mode] * len(row))
    found = np.asarray(encode(encoder, batch))[0].argmax(-1)
    ends = np.cumsum([len(utterance.phones) for utterance in row])
    return np.split(found[: ends[-1]], ends[:-1])


def accuracies(encoder: Encoder, rows: list[list[Utterance]]) -> np.ndarray:
    """The share of frames recognised, per mode; all hear the same utterances."""
    spoken = np.concatenate([utterance.phones for row in rows for utterance in row])
    found = [
        np.concatenate([x for row in rows for x in recognise(encoder, row, mode)])
        for mode in range(len(MODES))
    ]
    return (np.stack(found) == spoken).mean(axis=1)


def stream(encoder: Encoder, utterance: Utterance, mode: int, size: int) -> np.ndarray:
    """Logits of each chunk when it comes, from the frames that have come so far.

    A product would keep what later chunks need of earlier ones, not compute it again.
    """
    logits = []
    for start in range(0, len(utterance.phones), size):
        received = Utterance(*(field[: start + size] for field in utterance))
        batch = pack([received], [mode])
        chunk = slice(start, len(received.phones))
        logits.append(np.asarray(encode(encoder, batch))[0, chunk])
    return np.concatenate(logits)


def check_streaming(encoder: Encoder, row: list[Utterance]) -> float:
    """The largest difference of logits between a packed row and `stream`."""
    changes = []
    for mode, size in CHUNKS.items():
        batch = pack(row, [mode] * len(row))
        packed = np.asarray(encode(encoder, batch))[batch.segment_ids > 0]
        live = np.concatenate([stream(encoder, x, mode, size) for x in row])
        changes.append(np.abs(packed - live).max())
    return float(max(changes))


def draw(spoken: np.ndarray, heard: list[np.ndarray], scores, path: Path) -> None:
    """The phones of an utterance, as each mode hears it; scores [models, modes]."""
    figure = Figure(figsize=(11, 7), layout="constrained")
    strips, bars = figure.subplots(2, height_ratios=(1, 1))
    shown = min(64, len(spoken))
    rows = [phones[:shown] for phones in (spoken, *heard)]
    for y, phones in enumerate(rows):
        wrong = phones != rows[0]
        strips.broken_barh(
            [(frame, 1) for frame in range(shown)],
            (y - 0.35, 0.7),
            color=np.where(wrong, "0.25", "0.88"),
        )
        starts = np.flatnonzero(np.diff(phones, prepend=-1))
        for start, end in itertools.pairwise([*starts, shown]):
            strips.vlines(end, y - 0.35, y + 0.35, color="white", linewidth=2)
            strips.text(
                *((start + end) / 2, y, PHONES[phones[start]]),
                ha="center",
                va="center",
                color="white" if wrong[start:end].mean() > 0.5 else "black",
            )
    for mode, size in CHUNKS.items():
        for start in range(0, shown, size):
            end = min(start + size, shown)
            strips.hlines(
                mode + 1.46, start + 0.3, end - 0.3, color="0.25", linewidth=2
            )
    strips.set(
        title="An utterance, as the model trained on all modes hears it "
        "(dark: wrong; lines: chunks)",
        yticks=range(len(rows)),
        yticklabels=("spoken", *MODES),
        ylim=(len(rows) - 0.45, -0.5),
        xlim=(0, shown),
        xlabel=f"frame of {FRAME_MS} ms",
    )
    place = np.arange(len(MODES))
    for shift, color, name, score in (
        (-0.2, BLUE, "trained on all modes", scores[0]),
        (0.2, ORANGE, "trained offline only", scores[1]),
    ):
        bars.bar_label(
            bars.bar(place + shift, 100 * score, 0.38, color=color, label=name),
            fmt="%.1f%%",
            padding=2,
        )
    bars.set(
        ylabel="held-out frames recognised, %",
        ylim=(0, 100),
        xticks=place,
        xticklabels=[f"{m}\nwaits for {w}" for m, w in zip(MODES, WAITS, strict=True)],
    )
    bars.legend(frameon=False, ncols=2, loc="lower center", bbox_to_anchor=(0.5, 1.05))
    for axes in (strips, bars):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def verdict(losses: np.ndarray, change: float) -> str | None:
    """What went wrong, if anything did."""
    if not change <= TOLERANCE:
        return f"Chunk by chunk, logits change by {change:.1e}, more than {TOLERANCE}."
    if not losses[-1] <= 0.75 * losses[0]:
        return "The loss has not fallen by a quarter: train for more steps."
    return None


def main(arguments: list[str] | None = None) -> str | None:
    """Trains both models and compares them; returns the verdict."""
    steps, out, seed = training_options(__doc__, arguments, steps=300)
    picture = out / "streaming_asr.png"

    rate = optax.warmup_cosine_decay_schedule(0, 4e-3, steps // 10, steps)
    adamw = optax.adamw(rate)
    mixed, losses = train((0, 1, 2), adamw, steps, seed)
    offline, _ = train((0,), adamw, steps, seed)

    rows = rows_of_utterances(seed + 1)
    held_out = [next(rows) for _ in range(HELD_OUT_ROWS)]
    scores = np.stack([accuracies(model, held_out) for model in (mixed, offline)])
    change = check_streaming(mixed, held_out[0])
    heard = [recognise(mixed, held_out[0], mode)[0] for mode in range(len(MODES))]
    draw(held_out[0][0].phones, heard, scores, picture)

    print("\nHeld-out frames recognised  all modes  offline only   waits for")
    for mode, (both, alone), wait in zip(MODES, scores.T, WAITS, strict=True):
        print(f"  {mode:24}  {both:9.1%}  {alone:12.1%}   {wait}")
    print(f"""
Live, chunk by chunk, the logits of {len(held_out[0])} utterances differ from those of
the packed row by at most {change:.1e}.
Picture: {picture}
""")
    return verdict(losses, change)


if __name__ == "__main__":
    sys.exit(main())
