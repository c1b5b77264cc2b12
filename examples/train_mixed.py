"""Trains one small Transformer on causal and bidirectional sequences in the same rows.

The text is Python's standard library, cut into functions and classes. Every other
piece is causal: each byte predicts the next one. The rest is bidirectional: some bytes
are masked out, and the model, which reads in both directions, predicts them. Both
kinds are packed into the same rows and go through the same attention call.

Run it with `make demo`, or see `python examples/train_mixed.py --help`.
"""

import ast
import math
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import grain
import jax
import jax.numpy as jnp
import numpy as np
import optax
import tqdm
from flax import nnx
from grain.experimental import FirstFitPackIterDataset
from matplotlib import pyplot

from command_line import training_options
from dense_attention import DenseAttention, compare_speed
from pictures import draw_losses
from te_mixed_jax import CAUSAL, FULL, from_segment_ids_and_pos
from te_mixed_jax.nnx import MultiHeadAttention
from te_mixed_jax.visualize import plot_mask

POLICIES = (CAUSAL, FULL)  # `policy_ids` index into it
KINDS = ("causal", "masked")  # what sequences with these policies predict

MASK = 256  # the token of a masked byte; the tokens below it are the bytes
MASKED_SHARE = 0.15
PIECE_LENGTHS = range(64, 513)  # in bytes
ROW_LENGTH = 2048
ROWS = 1
LAYERS, HEADS, WIDTH = 4, 4, 128
ROTARY_BASE = 10_000.0

HELD_OUT_BATCHES = 4
TOLERANCE = 1e-4  # of logits, in fp32


class Batch(NamedTuple):
    """Packed rows: every field is an array [ROWS, ROW_LENGTH]."""

    tokens: np.ndarray
    targets: np.ndarray
    weights: np.ndarray  # 1 where the target counts
    policy_ids: np.ndarray
    segment_ids: np.ndarray  # 1, 2, ... in each row; 0 is padding
    positions: np.ndarray


# The data: pieces of text, what each of them predicts, rows full of them.


def load_texts() -> tuple[list[bytes], list[bytes]]:
    """Pieces of the standard library to train on, and pieces of other modules."""
    train, held_out = [], []
    for number, path in enumerate(sorted(Path(ast.__file__).parent.glob("*.py"))):
        source = path.read_text(encoding="utf-8")
        pieces = cut(ast.parse(source), source.splitlines())
        (train if number % 20 else held_out).extend(pieces)
    return train, held_out


def cut(node: ast.Module | ast.ClassDef, lines: list[str]) -> Iterator[bytes]:
    """Functions and classes in `node`; of classes that are too long, the methods."""
    for child in node.body:
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            piece = "\n".join(lines[child.lineno - 1 : child.end_lineno])
            text = textwrap.dedent(piece).encode()
            if len(text) in PIECE_LENGTHS:
                yield text
            elif isinstance(child, ast.ClassDef):
                yield from cut(child, lines)


def causal_example(text: bytes) -> dict[str, np.ndarray]:
    """Every byte predicts the next one; the last has nothing to predict."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    return {
        "tokens": tokens,
        "targets": np.append(tokens[1:], 0).astype(np.int32),
        "weights": np.append(np.ones(len(text) - 1), 0).astype(np.float32),
        "policy_ids": np.full_like(tokens, KINDS.index("causal")),
    }


def masked_example(text: bytes, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Some bytes are masked out; these are predicted, each in its place."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int32)
    masked = rng.random(len(text)) < MASKED_SHARE
    return {
        "tokens": np.where(masked, MASK, tokens).astype(np.int32),
        "targets": tokens,
        "weights": masked.astype(np.float32),
        "policy_ids": np.full_like(tokens, KINDS.index("masked")),
    }


def packed_batches(texts: list[bytes], seed: int) -> Iterator[Batch]:
    """Shuffles and packs, for ever; every other sequence is causal."""

    def example(index: int, text: bytes) -> dict[str, np.ndarray]:
        if index % 2:
            return masked_example(text, np.random.default_rng((seed, index)))
        return causal_example(text)

    examples = grain.MapDataset.source(texts).seed(seed).shuffle().repeat()
    features = Batch._fields[:4]
    rows = FirstFitPackIterDataset(
        examples.map_with_index(example).to_iter_dataset(),
        length_struct=dict.fromkeys(features, ROW_LENGTH),
        num_packing_bins=16,
        seed=seed,
    )
    for batch in rows.filter(has_all_kinds).batch(ROWS):
        # grain gives every feature its segment ids and positions: they are the same.
        yield Batch(
            segment_ids=batch["tokens_segment_ids"],
            positions=batch["tokens_positions"],
            **{name: batch[name] for name in features},
        )


def has_all_kinds(row: dict[str, np.ndarray]) -> bool:
    """Whether each of the losses is the mean of at least one target."""
    return len(set(row["policy_ids"][row["weights"] > 0])) == len(KINDS)


# The model: the batch describes its sequences, and each attends by its own policy.


class Block(nnx.Module):
    """A pre-norm Transformer block."""

    def __init__(self, attention: type[MultiHeadAttention], rngs: nnx.Rngs):
        self.norm1 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.attention = attention(HEADS, WIDTH, rotary_base=ROTARY_BASE, rngs=rngs)
        self.norm2 = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x, **sequences):
        x = x + self.attention(self.norm1(x), **sequences)
        return x + self.down(nnx.gelu(self.up(self.norm2(x))))


class Transformer(nnx.Module):
    """Bytes and masks in, logits of bytes out."""

    def __init__(self, attention=MultiHeadAttention, *, seed: int):
        rngs = nnx.Rngs(seed)
        self.embed = nnx.Embed(MASK + 1, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(attention, rngs) for _ in range(LAYERS)])
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, MASK, rngs=rngs)

    def __call__(self, batch: Batch):
        desc = from_segment_ids_and_pos(batch.segment_ids, batch.positions)
        x = self.embed(jnp.asarray(batch.tokens))
        for block in self.blocks:
            x = block(x, desc=desc, policy=POLICIES, policy_ids=batch.policy_ids)
        return self.head(self.norm(x))


# Training, and what is checked and measured after it.


def losses_of(logits: jax.Array, batch: Batch) -> jax.Array:
    """The mean loss of each of KINDS, in bits per predicted byte."""
    nats = optax.softmax_cross_entropy_with_integer_labels(logits, batch.targets)
    weights = [batch.weights * (batch.policy_ids == i) for i in range(len(KINDS))]
    means = jnp.stack([(nats * w).sum() / w.sum() for w in weights])
    return means / math.log(2)


@nnx.jit
def train_step(model: Transformer, optimizer: nnx.Optimizer, batch: Batch) -> jax.Array:
    """One update by the sum of the two losses; returns them."""

    def loss(model):
        losses = losses_of(model(batch), batch)
        return losses.sum(), losses

    gradients, losses = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, gradients)
    return losses


def train(model, optimizer, batches: Iterator[Batch], steps: int) -> np.ndarray:
    """Trains, with a progress bar; returns the losses [steps, kinds]."""
    history = []
    with tqdm.trange(steps, desc="training", unit="step") as progress:
        for _ in progress:
            history.append(np.asarray(train_step(model, optimizer, next(batches))))
            shown = zip(KINDS, history[-1], strict=True)
            progress.set_postfix({kind: f"{bits:.2f}" for kind, bits in shown})
    return np.stack(history)


def alone(batch: Batch, row: int, segment_id: int) -> Batch:
    """One sequence of a batch, at the start of a row that holds nothing else."""
    here = batch.segment_ids[row] == segment_id
    padding = (0, ROW_LENGTH - here.sum())
    return Batch(*(np.pad(field[row, here], padding)[None] for field in batch))


def check_held_out(model, batches: Iterator[Batch]) -> tuple[np.ndarray, float, int]:
    """Losses; largest change of a logit if a sequence is alone; number of sequences."""
    predict = nnx.jit(lambda model, batch: model(batch))
    losses, changes = [], []
    for _ in range(HELD_OUT_BATCHES):
        batch = next(batches)
        logits = predict(model, batch)
        losses.append(losses_of(logits, batch))
        for row, ids in enumerate(batch.segment_ids):
            for segment_id in range(1, ids.max() + 1):
                packed = logits[row][ids == segment_id]
                single = predict(model, alone(batch, row, segment_id))[0, : len(packed)]
                changes.append(float(jnp.abs(packed - single).max()))
    return np.mean(losses, axis=0), max(changes), len(changes)


def byte_entropy(texts: list[bytes]) -> float:
    """The loss of a model that knows how frequent each byte is, and nothing else."""
    counts = np.bincount(np.frombuffer(b"".join(texts), np.uint8))
    p = counts[counts > 0] / counts.sum()
    return float(-(p * np.log2(p)).sum())


def verdict(first: np.ndarray, last: np.ndarray, change: float) -> str | None:
    """What went wrong, if anything did."""
    if not change <= TOLERANCE:
        return f"Packing changes logits by {change:.1e}, more than {TOLERANCE}."
    if not (last <= 0.75 * first).all():
        return "A loss has not fallen by a quarter: train for more steps."
    return None


def main(arguments: list[str] | None = None) -> str | None:
    """Tells the story from text to table; returns the verdict."""
    steps, out, seed = training_options(__doc__, arguments, steps=200)

    texts, held_out_texts = load_texts()
    batches = packed_batches(texts, seed)
    batch = next(batches)
    desc = from_segment_ids_and_pos(batch.segment_ids, batch.positions)
    plot_mask(desc, POLICIES, batch.policy_ids)
    pyplot.savefig(out / "mask.png")

    rate = optax.warmup_cosine_decay_schedule(0, 3e-3, steps // 10, steps)
    adamw = optax.adamw(rate)
    model = Transformer(seed=seed)
    optimizer = nnx.Optimizer(model, adamw, wrt=nnx.Param)
    history = train(model, optimizer, batches, steps)
    first, last = history[0], history[-max(1, steps // 10) :].mean(axis=0)
    entropy = byte_entropy(texts)
    draw_losses(history, entropy, out / "losses.png")
    held_out_batches = packed_batches(held_out_texts, seed)
    held_out, change, sequences = check_held_out(model, held_out_batches)

    dense = Transformer(DenseAttention, seed=seed)
    nnx.update(dense, nnx.state(model, nnx.Param))
    twins = [(model, optimizer), (dense, nnx.Optimizer(dense, adamw, wrt=nnx.Param))]
    (mixed_rate, dense_rate), difference = compare_speed(train_step, twins, batches)

    print(f"""
Bits per predicted byte        {KINDS[0]:>8} {KINDS[1]:>8}
  first step                   {first[0]:8.2f} {first[1]:8.2f}
  mean of the last tenth       {last[0]:8.2f} {last[1]:8.2f}
  held-out text                {held_out[0]:8.2f} {held_out[1]:8.2f}
  from byte frequencies alone  {entropy:8.2f} {entropy:8.2f}

Tokens/s of a training step    {mixed_rate:8.0f}
  with a dense T x S mask      {dense_rate:8.0f}   (losses differ by {difference:.1e})
  ratio                        {mixed_rate / dense_rate:8.1f}

Held-out check: logits of {sequences} sequences, each alone or inside its row,
differ by at most {change:.1e}.
Pictures: {out / "losses.png"}, {out / "mask.png"}
""")
    return verdict(first, last, change)


if __name__ == "__main__":
    sys.exit(main())
