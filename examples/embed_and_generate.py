"""Trains one Transformer to embed text and to write it, in the same step.

To embed, a text is read in both directions, and the mean of its tokens is its
embedding: it should be closest to that of its translation, among all of the batch. To
write, a text is read causally, and each word predicts the next one. Both kinds are
packed into the same rows and share all weights: one call, where one would otherwise run
the model once per kind.

The two languages are made up. They have no word in common, and one has the order of the
other reversed. A word is followed by one of four, so that a perfect writer still needs
two bits per word. The blocks of the model are those of train_mixed.py.

Run `python examples/embed_and_generate.py`; it takes a minute.

Source: Muennighoff et al. 2024, "Generative Representational Instruction Tuning".
"""

import math
import sys
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
from te_mixed_jax import CAUSAL, FULL, from_segment_ids_and_pos
from te_mixed_jax.nnx import MultiHeadAttention
from train_mixed import WIDTH, Block

WORDS, SUCCESSORS = 64, 4  # of each language; of each word
# [SUCCESSORS, WORDS]: as permutations, so that reversed texts are as predictable.
GRAMMAR = np.random.default_rng(0).permuted(
    np.tile(np.arange(WORDS), (SUCCESSORS, 1)), axis=1
)
TEXT_LENGTHS = (12, 33)
PAIRS = 24  # per batch
EMBEDDED = 2 * PAIRS  # the texts with these ids are embedded, the others written
ROWS, ROW_LENGTH = 2, 1024
LAYERS = 2
TEMPERATURE = 0.05

HELD_OUT_BATCHES = 4
CHECKED = 8  # sequences whose isolation is checked


class Batch(NamedTuple):
    """Packed rows: every field is an array [ROWS, ROW_LENGTH].

    Segment ids tell all: 1 to PAIRS are texts to embed, the next PAIRS are their
    translations in the same order, and larger ones are texts to write.
    """

    tokens: np.ndarray
    segment_ids: np.ndarray
    positions: np.ndarray


# The data: texts in two languages, and rows full of them.


def think(rng: np.random.Generator) -> np.ndarray:
    """A text in the first language."""
    text = [rng.integers(WORDS)]
    for choice in rng.integers(SUCCESSORS, size=rng.integers(*TEXT_LENGTHS) - 1):
        text.append(GRAMMAR[choice, text[-1]])
    return np.array(text)


def translate(text: np.ndarray) -> np.ndarray:
    """The same in the second language: other words, in reverse order."""
    return WORDS + text[::-1]


def make_batch(rng: np.random.Generator) -> Batch:
    """PAIRS texts and their translations, and other texts until the rows are full."""
    pairs = [think(rng) for _ in range(PAIRS)]
    texts = pairs + [translate(text) for text in pairs]
    rows = [list(enumerate(texts, 1))[row::ROWS] for row in range(ROWS)]
    number = EMBEDDED
    for row in rows:
        space = ROW_LENGTH - sum(len(text) for _, text in row)
        while space > 0:
            number += 1
            text = think(rng)
            text = (text if number % 2 else translate(text))[:space]
            row.append((number, text))
            space -= len(text)
    return Batch(*map(np.stack, zip(*map(pack, rows), strict=True)))


def pack(row: list[tuple[int, np.ndarray]]) -> Batch:
    """One row: numbered texts, back to back."""
    numbers, texts = zip(*row, strict=True)
    lengths = [len(text) for text in texts]
    return Batch(
        tokens=np.concatenate(texts),
        segment_ids=np.repeat(numbers, lengths),
        positions=np.concatenate([np.arange(length) for length in lengths]),
    )


# The model.


class Transformer(nnx.Module):
    """Words in; embeddings of texts, and logits of next words, out."""

    def __init__(self, *, seed: int):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(2 * WORDS, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(MultiHeadAttention, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, 2 * WORDS, rngs=rngs)

    def __call__(self, batch: Batch):
        desc = from_segment_ids_and_pos(batch.segment_ids, batch.positions)
        policy_ids = jnp.asarray(batch.segment_ids > EMBEDDED, int)
        x = self.embed(jnp.asarray(batch.tokens))
        for block in self.blocks:
            x = block(x, desc=desc, policy=(FULL, CAUSAL), policy_ids=policy_ids)
        x = self.norm(x)
        # Ids beyond the texts to embed are dropped.
        embeddings = jax.ops.segment_sum(
            x.reshape(-1, WIDTH), batch.segment_ids.reshape(-1), 1 + EMBEDDED
        )[1:]
        # Scaled to unit length, a sum and a mean are the same.
        embeddings /= jnp.linalg.norm(embeddings, axis=-1, keepdims=True)
        return embeddings, self.head(x)


run = nnx.jit(lambda model, batch: model(batch))


# Training.


def losses_of(outputs: tuple[jax.Array, jax.Array], batch: Batch) -> jax.Array:
    """Bits per choice of the translation, both ways, and per word written."""
    embeddings, logits = outputs
    cross_entropy = optax.softmax_cross_entropy_with_integer_labels
    texts, translations = jnp.split(embeddings, 2)
    scores = texts @ translations.T / TEMPERATURE
    own = jnp.arange(PAIRS)
    choosing = (cross_entropy(scores, own) + cross_entropy(scores.T, own)).mean() / 2

    here, after = batch.segment_ids[:, :-1], batch.segment_ids[:, 1:]
    nats = cross_entropy(logits[:, :-1], jnp.asarray(batch.tokens)[:, 1:])
    writing = nats.mean(where=(here == after) & (here > EMBEDDED))
    return jnp.stack([choosing, writing]) / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: Batch) -> None:
    """One update by the sum of the two losses."""

    def loss(model):
        return losses_of(model(batch), batch).sum()

    optimizer.update(model, nnx.grad(loss)(model))


# What the model can do.


def evaluate(model: Transformer, batches: list[Batch]) -> tuple[np.ndarray, float]:
    """Similarities [texts, translations] across all batches; bits per written word."""
    outputs = [run(model, batch) for batch in batches]
    bits = [losses_of(*pair)[1] for pair in zip(outputs, batches, strict=True)]
    embeddings = np.stack([embeddings for embeddings, _ in outputs])
    texts, translations = np.split(embeddings, 2, axis=1)
    similarity = texts.reshape(-1, WIDTH) @ translations.reshape(-1, WIDTH).T
    return similarity, float(np.mean(bits))


def found(similarity: np.ndarray) -> float:
    """The share of texts that are closest to their own translation."""
    return float((similarity.argmax(axis=1) == np.arange(len(similarity))).mean())


def check_isolation(
    model: Transformer, batch: Batch, rng: np.random.Generator
) -> float:
    """The largest change of a result when all other sequences are replaced by noise."""
    embeddings, logits = run(model, batch)
    changes = []
    for number in rng.choice(batch.segment_ids.max(), CHECKED, replace=False) + 1:
        here = batch.segment_ids == number
        noise = rng.integers(2 * WORDS, size=here.shape)
        noisy = batch._replace(tokens=np.where(here, batch.tokens, noise))
        noisy_embeddings, noisy_logits = run(model, noisy)
        change = jnp.abs(noisy_logits - logits)[here].max()
        if number <= EMBEDDED:
            index = number - 1
            change = jnp.abs(noisy_embeddings[index] - embeddings[index]).max()
        changes.append(float(change))
    return max(changes)


def draw(history: np.ndarray, similarity: np.ndarray, path: Path) -> None:
    """History of (step, share found, bits per word); similarities at the end."""
    figure = Figure(figsize=(13, 4.2), layout="constrained")
    writing, finding, matrix = figure.subplots(1, 3)
    steps, shares, bits = history.T
    floor = math.log2(SUCCESSORS)
    writing.plot(steps, bits, color=BLUE, linewidth=2)
    writing.axhline(floor, color="0.35", linestyle="--", linewidth=1)
    writing.text(0, floor - 0.1, "what the language leaves open", va="top")
    writing.set(
        title="Written: the next word",
        xlabel="training step",
        ylabel="held-out texts, bits per word",
        ylim=(0, None),
    )
    finding.plot(steps, 100 * shares, color=ORANGE, linewidth=2)
    chance = 100 / len(similarity)
    finding.axhline(chance, color="0.35", linestyle="--", linewidth=1)
    finding.text(steps[-1], chance + 1, "by chance", va="bottom", ha="right")
    finding.set(
        title=f"Embedded: the translation, among {len(similarity)}",
        xlabel="training step",
        ylabel="held-out texts, % found",
        ylim=(0, 102),
    )
    for axes in (writing, finding):
        axes.grid(axis="y", color="0.9")
        axes.spines[["top", "right"]].set_visible(False)
    shown = similarity[:PAIRS, :PAIRS]
    image = matrix.imshow(shown, cmap="cividis", interpolation="none")
    figure.colorbar(image, ax=matrix, label="cosine of the embeddings")
    matrix.set(
        title="Held-out texts and translations",
        xlabel="translation",
        ylabel="text",
    )
    figure.savefig(path, dpi=150)


def verdict(history: np.ndarray, change: float) -> str | None:
    """What went wrong, if anything did."""
    (_, found_before, bits_before), (_, found_after, bits_after) = history[[0, -1]]
    if change != 0:
        return f"Other sequences change a result by {change:.1e}."
    if not found_after > found_before:
        return "No more translations are found than before: train for more steps."
    if not bits_after < bits_before:
        return "Words are not better predicted than before: train for more steps."
    return None


def main(arguments: list[str] | None = None) -> str | None:
    """Trains the model and shows both of its uses; returns the verdict."""
    steps, out, seed = training_options(__doc__, arguments, steps=250)
    picture = out / "embed_and_generate.png"

    rng = np.random.default_rng(seed)
    held_out = [make_batch(rng) for _ in range(HELD_OUT_BATCHES)]
    model = Transformer(seed=seed)
    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    optimizer = nnx.Optimizer(model, optax.adamw(rate), wrt=nnx.Param)
    similarity, bits = evaluate(model, held_out)
    history = [(0, found(similarity), bits)]
    for step in tqdm.trange(1, 1 + steps, desc="training", unit="step"):
        train_step(model, optimizer, make_batch(rng))
        if step % max(1, steps // 25) == 0 or step == steps:
            similarity, bits = evaluate(model, held_out)
            history.append((step, found(similarity), bits))
    history = np.array(history)
    change = check_isolation(model, held_out[0], rng)
    draw(history, similarity, picture)

    (_, *before), (_, *after) = history[[0, -1]]
    print(f"""
Held-out texts                    before     after
  translations found, of {len(similarity):3}    {before[0]:7.1%}   {after[0]:7.1%}
  bits per written word           {before[1]:7.2f}   {after[1]:7.2f}
  ... at best                                {math.log2(SUCCESSORS):5.2f}

With all other sequences replaced by noise, embeddings and logits of {CHECKED} sequences
change by {change:.1e}.
Picture: {picture}
""")
    return verdict(history, change)


if __name__ == "__main__":
    sys.exit(main())
