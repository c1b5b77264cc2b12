"""The examples run, and the data of train_mixed.py say what they should.

Its real size takes minutes: the tests shrink the module's constants, apart from one
that is marked slow.
"""

import ast
import importlib
import importlib.util
import os
import re
import runpy
import shutil
import socket
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import oracle

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The module train_mixed.py, fresh, in a small size."""
    monkeypatch.syspath_prepend(EXAMPLES)  # it imports its neighbours
    spec = importlib.util.spec_from_file_location(
        "train_mixed", EXAMPLES / "train_mixed.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    small = {"ROW_LENGTH": 256, "PIECE_LENGTHS": range(32, 129), "LAYERS": 1}
    for name, value in small.items():
        assert hasattr(module, name)
        setattr(module, name, value)
    return module


# Whole programs.


def check_output(printed: str, out: Path) -> None:
    sequences, change = re.findall(
        r"Held-out check: logits of (\d+) sequences.*\n.* at most (\S+)\.\n", printed
    )[0]
    assert int(sequences) > 4
    assert float(change) <= 1e-4
    differ = re.findall(r"losses differ by (\S+)\)", printed)
    assert float(differ[0]) < 1e-4
    for name in ("losses.png", "mask.png"):
        picture = (out / name).read_bytes()
        assert picture.startswith(b"\x89PNG")
        assert len(picture) > 10_000


def test_train_mixed(demo, tmp_path, capsys):
    out = tmp_path / "not" / "there"
    assert demo.main(["--steps", "20", "--seed", "3", "--out", str(out)]) is None
    check_output(capsys.readouterr().out, out)


@pytest.mark.slow
def test_train_mixed_at_its_real_size(tmp_path):
    program = [sys.executable, "-W", "error", str(EXAMPLES / "train_mixed.py")]
    result = subprocess.run(
        [*program, "--steps", "20", "--out", str(tmp_path)],
        capture_output=True,
        text=True,
    )
    assert result.returncode == 0, result.stderr
    check_output(result.stdout, tmp_path)


def processes_of_a_cluster() -> list[list[str]]:
    """The options of two processes, which run at once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        coordinator = f"localhost:{free.getsockname()[1]}"
    cluster = ["--coordinator", coordinator, "--processes", "2", "--process"]
    return [[*cluster, i] for i in "01"]


@pytest.mark.parametrize(
    ("mesh", "options"),
    [
        pytest.param((2, 2, 2), lambda: [[]], id="eight devices"),
        pytest.param(
            (2, 2, 1), processes_of_a_cluster, id="a cluster", marks=pytest.mark.slow
        ),
    ],
)
def test_train_sharded_gives_the_same_losses_as_on_one_device(mesh, options):
    data, context, tensor = mesh
    sizes = [f"--data={data}", f"--context={context}", f"--tensor={tensor}"]
    runs = [
        ["--data=1", "--context=1", "--tensor=1"],
        *([*sizes, *more] for more in options()),
    ]
    program = [sys.executable, str(EXAMPLES / "train_sharded.py")]
    common = ["--rows=4", "--steps=3", "--length=64"]
    processes = [
        subprocess.Popen(
            [*program, *common, *run],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )
        for run in runs
    ]
    ends = [process.communicate(timeout=200) for process in processes]
    losses = []
    for process, run, (printed, errors) in zip(processes, runs, ends, strict=True):
        assert process.returncode == 0, f"{run}: {errors[-2000:]}"
        used, *steps = re.findall(r"^(?:mesh|step) .*$", printed, re.MULTILINE)
        assert used.endswith(f"{2 if '--coordinator' in run else 1} processes")
        numbers = re.findall(r"\d+\.\d+", "\n".join(steps))
        losses.append([float(x) for x in numbers])
    assert len(losses[0]) == 6
    assert losses[0][4] < losses[0][0]  # it learns
    for other in losses[1:]:
        np.testing.assert_allclose(other, losses[0], atol=2e-4)


@pytest.mark.slow
def test_the_scaling_benchmark_runs_and_checks_its_results(tmp_path):
    """On two virtual devices, in a copy, since it writes its results."""
    root = EXAMPLES.parent
    shutil.copytree(root / "benchmarks", tmp_path / "benchmarks")
    command = [sys.executable, "-m", "benchmarks.scaling", "--platform=cpu"]
    done = subprocess.run(
        [*command, "--devices=2"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout.count("| S1 |") == 4
    assert done.stdout.count("| S2 |") == 6


def test_starting_bug(capsys):
    """Without TransformerEngine it says so; with it, what it does."""
    runpy.run_path(str(EXAMPLES / "starting_bug.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == [
        "here, all mapped: differs from the loop by 0.0",
        "here, ids mapped: differs from the loop by 0.0",
    ]
    assert lines[2].startswith("TransformerEngine")


def test_decode(capsys):
    """Rows decoded from a cache differ by rounding from one call; it compares them."""
    runpy.run_path(str(EXAMPLES / "decode.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "CAUSAL",
        "CAUSAL.with_window(9, 0)",
        "prefix(8)",
    ]
    assert max(float(line.split()[-1]) for line in lines) < 1e-5


def test_grain_packing(capsys):
    """Each sequence has its own tokens, positions and policy, wherever it lies."""
    example = runpy.run_path(str(EXAMPLES / "grain_packing.py"))
    policies = (oracle.CAUSAL, oracle.FULL, oracle.chunked(4, 0))
    lengths = []
    for batch in example["batches"]():
        ids, tokens = batch["tokens_segment_ids"], batch["tokens"]
        mask = oracle.mask(
            *(ids, ids), policies=policies, policy_ids=batch["policy_ids"]
        )
        seen = np.maximum(mask.sum(axis=2), 1)
        means = (mask * tokens[:, None]).sum(axis=2) / seen
        np.testing.assert_allclose(example["attend"](batch), means, rtol=1e-6)
        lengths += [n for row in ids for n in np.bincount(row)[1:]]
    assert sorted(lengths) == sorted(example["LENGTHS"])
    example["main"]()
    assert capsys.readouterr().out.count("sequence") == 4


def test_from_transformer_engine(capsys):
    """Without it, its descriptor has a stand-in; only full sequences change."""
    runpy.run_path(str(EXAMPLES / "from_transformer_engine.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == [
        "sequences 1 as before: True",
        "sequences 2 as before: False",
    ]
    assert len(lines) == 2 or lines[0].startswith("TransformerEngine")


def test_orbax_checkpoint(capsys):
    runpy.run_path(str(EXAMPLES / "orbax_checkpoint.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        "restored into nnx",
        "restored into linen",
    ]
    assert max(float(line.split()[-1]) for line in lines) < 1e-6


def test_vmap_per_example(capsys):
    runpy.run_path(str(EXAMPLES / "vmap_per_example.py"), run_name="__main__")
    shape, difference = capsys.readouterr().out.splitlines()
    assert "(3, 3, 16, 16)" in shape
    assert float(difference.split()[-1]) < 1e-6


# What train_mixed.py refuses.


def test_held_out_check_notices_a_leak(demo, monkeypatch):
    """With all sequences of a row made one, they see each other."""
    describe = demo.from_segment_ids_and_pos
    monkeypatch.setattr(
        demo,
        "from_segment_ids_and_pos",
        lambda ids, positions: describe(jnp.minimum(ids, 1), positions),
    )
    monkeypatch.setattr(demo, "HELD_OUT_BATCHES", 1)
    texts = [bytes(range(first, first + 60)) for first in (32, 40, 60)]
    batches = demo.packed_batches(texts, seed=0)
    _, change, sequences = demo.check_held_out(demo.Transformer(seed=0), batches)
    assert sequences == 4
    assert change > 100 * demo.TOLERANCE


def test_verdict(demo):
    first = np.array([8.0, 8.0])
    assert demo.verdict(first, np.array([5.9, 3.0]), 1e-6) is None
    assert "has not fallen" in demo.verdict(first, np.array([6.1, 3.0]), 1e-6)
    assert "has not fallen" in demo.verdict(first, np.array([5.9, np.nan]), 1e-6)
    assert "changes logits by 2.0e-04" in demo.verdict(first, first / 2, 2e-4)
    assert "changes logits by nan" in demo.verdict(first, first / 2, np.nan)


def test_steps_must_be_positive(demo, capsys):
    with pytest.raises(SystemExit):
        demo.main(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err


# The data of train_mixed.py.


def test_cut_takes_functions_and_short_classes_and_methods_of_long_ones(demo):
    demo.PIECE_LENGTHS = range(20, 60)
    source = '''
import this

@decorated
def function():
    return "ä"

class Short:
    size: int = 123

class Long:
    """Longer than a piece may be, and so it is cut up."""

    async def method(self):
        await self.it

    def tiny(): 0
'''
    pieces = list(demo.cut(ast.parse(source), source.splitlines()))
    assert [piece.decode() for piece in pieces] == [
        'def function():\n    return "ä"',
        "class Short:\n    size: int = 123",
        "async def method(self):\n    await self.it",
    ]


def test_held_out_text_comes_from_other_modules(demo):
    demo.PIECE_LENGTHS = range(200, 300)
    train, held_out = demo.load_texts()
    assert len(train) > 10 * len(held_out) > 100
    assert len(set(train) & set(held_out)) < 0.1 * len(held_out)


def test_a_causal_sequence_predicts_the_next_byte_and_its_last_byte_nothing(demo):
    example = demo.causal_example(b"abcd")
    a, b, c, d = 97, 98, 99, 100
    assert example["tokens"].tolist() == [a, b, c, d]
    assert example["targets"][:3].tolist() == [b, c, d]
    assert example["weights"].tolist() == [1, 1, 1, 0]
    assert example["policy_ids"].tolist() == [0, 0, 0, 0]


def test_a_bidirectional_sequence_predicts_its_masked_bytes_and_no_others(demo):
    class Dice:
        def random(self, size):
            assert size == 4
            return np.array([0.149, 0.15, 0.0, 0.9])

    example = demo.masked_example(b"abcd", Dice())
    a, b, c, d, mask = 97, 98, 99, 100, 256
    assert example["tokens"].tolist() == [mask, b, mask, d]
    assert example["targets"].tolist() == [a, b, c, d]
    assert example["weights"].tolist() == [1, 0, 1, 0]
    assert example["policy_ids"].tolist() == [1, 1, 1, 1]


@pytest.fixture
def row(demo) -> Iterator:
    """A packed row: `abc`, causal; `abc`, all of it masked; two padding tokens."""
    demo.ROW_LENGTH, demo.MASKED_SHARE = 8, 1.0
    return next(demo.packed_batches([b"abc"], seed=0))


def test_a_packed_row(row):
    a, b, c, mask, pad = 97, 98, 99, 256, 0
    assert row.tokens.tolist() == [[a, b, c, mask, mask, mask, pad, pad]]
    assert row.weights.tolist() == [[1, 1, 0, 1, 1, 1, 0, 0]]
    assert row.targets[row.weights > 0].tolist() == [b, c, a, b, c]
    assert row.policy_ids.tolist() == [[0, 0, 0, 1, 1, 1, 0, 0]]
    assert row.segment_ids.tolist() == [[1, 1, 1, 2, 2, 2, 0, 0]]
    assert row.positions.tolist() == [[0, 1, 2, 0, 1, 2, 0, 0]]
    assert row.tokens.dtype == row.targets.dtype == np.int32
    assert row.weights.dtype == np.float32


def test_no_target_crosses_the_border_of_a_sequence(demo):
    """Bytes say which text they are from, and where in it they stand."""
    lengths = (5, 9, 12, 16)
    texts = [bytes(32 * t + i for i in range(n)) for t, n in enumerate(lengths)]
    demo.ROW_LENGTH, demo.ROWS = 40, 3
    batches = demo.packed_batches(texts, seed=1)
    seen = set()
    for batch in (next(batches) for _ in range(6)):
        for tokens, targets, weights, policies, ids, positions in zip(
            *(field.reshape(3, 40) for field in batch), strict=True
        ):
            assert not weights[ids == 0].any()
            for i in np.flatnonzero(weights):
                ahead = 1 if policies[i] == 0 else 0
                own = {int(x) // 32 for x in tokens[ids == ids[i]] if x != 256}
                assert own | {int(targets[i]) // 32} == own
                assert int(targets[i]) % 32 == positions[i] + ahead
                assert (tokens[i] == 256) == (policies[i] == 1)
                seen.add(int(policies[i]))
    assert seen == {0, 1}


def test_batches_depend_on_the_seed_alone(demo):
    texts = [bytes(range(32, 32 + n)) for n in range(40, 120, 7)]
    first, same, other = (next(demo.packed_batches(texts, s)) for s in (5, 5, 6))
    np.testing.assert_array_equal(np.stack(first), np.stack(same))
    assert (first.tokens != other.tokens).any()


def test_losses_count_the_targets_of_their_kind_only(demo, row):
    """A logit that makes the masked `a` as likely as all other bytes together."""
    logits = np.zeros((1, 8, 256), np.float32)
    np.testing.assert_allclose(demo.losses_of(logits, row), [8, 8], rtol=1e-6)
    logits[0, [2, 6, 7]] = 1e4 * np.eye(256)[5]  # where nothing is predicted
    logits[0, 3, 97] = np.log(255)  # p = 1/2: one bit
    np.testing.assert_allclose(
        demo.losses_of(logits, row), [8, (1 + 8 + 8) / 3], rtol=1e-6
    )


def test_rows_without_one_of_the_kinds_are_left_out(demo):
    causal, masked = (np.array([kind, kind, 0]) for kind in (0, 1))
    weights = np.array([1.0, 1.0, 0.0])
    mixed = np.array([0, 1, 0])
    for policy_ids, kept in ((causal, False), (masked, False), (mixed, True)):
        row = {"policy_ids": policy_ids, "weights": weights}
        assert demo.has_all_kinds(row) == kept


def test_the_dense_mask(demo, row):
    dense_mask = importlib.import_module("dense_attention").dense_mask
    mask = dense_mask(row.segment_ids, row.positions, row.policy_ids)
    assert mask[0].astype(int).tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
    ]


def test_byte_entropy(demo):
    assert demo.byte_entropy([b"aabc", b"aabc"]) == pytest.approx(1.5)
