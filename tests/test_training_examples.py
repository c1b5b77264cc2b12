"""streaming_asr.py and embed_and_generate.py run and check what they should.

The tests shrink the modules' constants, apart from those that are marked slow.
"""

import importlib.util
import re
import types
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def load(monkeypatch: pytest.MonkeyPatch, name: str, **constants) -> types.ModuleType:
    """The example, fresh, with other constants."""
    monkeypatch.syspath_prepend(EXAMPLES)  # it imports its neighbours
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    for constant, value in constants.items():
        assert hasattr(module, constant)
        setattr(module, constant, value)
    return module


@pytest.fixture
def asr(monkeypatch) -> types.ModuleType:
    small = {"LAYERS": 1, "ROW_LENGTH": 256, "HELD_OUT_ROWS": 1}
    return load(monkeypatch, "streaming_asr", **small)


@pytest.fixture
def grit(monkeypatch) -> types.ModuleType:
    small = {"LAYERS": 1, "ROW_LENGTH": 256, "PAIRS": 6, "EMBEDDED": 12}
    return load(monkeypatch, "embed_and_generate", **small)


def percentages(line: str, printed: str) -> list[float]:
    [rest] = re.findall(rf"^ *{line}(.*)$", printed, re.MULTILINE)
    return [float(x) for x in re.findall(r"(\d+\.\d)%", rest)]


def check_picture(path: Path) -> None:
    picture = path.read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


# Streaming.


def test_streaming_asr(asr, tmp_path, capsys):
    out = tmp_path / "not" / "there"
    assert asr.main(["--steps", "40", "--seed", "3", "--out", str(out)]) is None
    printed = capsys.readouterr().out
    for mode in asr.MODES:
        assert len(percentages(mode, printed)) == 2
    assert float(re.findall(r"at most (\S+)\.\n", printed)[0]) < 1e-5
    check_picture(out / "streaming_asr.png")


@pytest.mark.slow
def test_streaming_asr_at_its_real_size(monkeypatch, tmp_path, capsys):
    """Who is not trained to be live is much worse at it, and little better else."""
    asr = load(monkeypatch, "streaming_asr")
    assert asr.main(["--out", str(tmp_path)]) is None
    printed = capsys.readouterr().out
    both, alone = percentages("offline", printed)
    assert both > alone - 3 > 90
    both, alone = percentages(f"chunks of {asr.SHORT}", printed)
    assert both > alone + 5 > 80


@pytest.fixture
def row(asr):
    return next(row for row in asr.rows_of_utterances(seed=0) if len(row) > 1)


def test_offline_needs_frames_that_a_live_recogniser_does_not_have(asr, row):
    encoder = asr.Encoder(seed=0)
    batch = asr.pack(row, [0] * len(row))
    packed = asr.encode(encoder, batch)[0, : len(row[0].phones)]
    live = asr.stream(encoder, row[0], mode=0, size=asr.LONG)
    late = np.abs(packed - live).max(axis=1)
    assert late[: asr.LONG].max() > 100 * asr.TOLERANCE
    assert late[-1] < asr.TOLERANCE  # by then all have come


def test_check_of_streaming_notices_a_convolution_across_utterances(
    asr, row, monkeypatch
):
    convolve = asr.CausalConvolution.__call__
    monkeypatch.setattr(
        asr.CausalConvolution,
        "__call__",
        lambda self, x, positions: convolve(self, x, jnp.full_like(positions, 99)),
    )
    assert asr.check_streaming(asr.Encoder(seed=0), row) > 100 * asr.TOLERANCE


def test_verdict_on_streaming(asr):
    assert asr.verdict(np.array([4.0, 2.9]), 1e-6) is None
    assert "not fallen" in asr.verdict(np.array([4.0, 3.1]), 1e-6)
    assert "not fallen" in asr.verdict(np.array([4.0, np.nan]), 1e-6)
    assert "logits change by nan" in asr.verdict(np.array([4.0, 2.9]), np.nan)


# Embedding and generation.


def test_embed_and_generate(grit, tmp_path, capsys):
    out = tmp_path / "not" / "there"
    assert grit.main(["--steps", "20", "--seed", "3", "--out", str(out)]) is None
    before, after = percentages("translations found, of  24", capsys.readouterr().out)
    assert after > before
    check_picture(out / "embed_and_generate.png")


@pytest.mark.slow
def test_embed_and_generate_at_its_real_size(monkeypatch, tmp_path, capsys):
    grit = load(monkeypatch, "embed_and_generate")
    assert grit.main(["--out", str(tmp_path)]) is None
    printed = capsys.readouterr().out
    before, after = percentages("translations found, of  96", printed)
    assert before < 5
    assert after > 90
    [bits] = re.findall(r"bits per written word .* (\S+)\n", printed)
    assert 2.0 < float(bits) < 2.3


def test_a_batch_of_both_kinds(grit):
    batch = grit.make_batch(np.random.default_rng(1))
    assert batch.tokens.shape == (2, 256)
    texts = {
        number: batch.tokens[batch.segment_ids == number].tolist()
        for number in range(1, 1 + batch.segment_ids.max())
    }
    for i in range(1, 1 + grit.PAIRS):
        translation = [x - grit.WORDS for x in reversed(texts[grit.PAIRS + i])]
        assert texts[i] == translation
    for row, (ids, positions) in enumerate(
        zip(batch.segment_ids, batch.positions, strict=True)
    ):
        kinds = {bool(number > grit.EMBEDDED) for number in ids}
        assert kinds == {False, True}, row
        starts = np.flatnonzero(np.diff(ids, prepend=0))
        np.testing.assert_array_equal(np.flatnonzero(positions == 0), starts)


def test_losses_of_one_who_knows_nothing(grit):
    batch = grit.make_batch(np.random.default_rng(1))
    embeddings = np.ones((12, 4), np.float32) / 2
    logits = np.zeros((2, 256, 2 * grit.WORDS), np.float32)
    losses = grit.losses_of((embeddings, logits), batch)
    np.testing.assert_allclose(losses, np.log2([6, 2 * grit.WORDS]), rtol=1e-5)


def test_check_of_isolation_notices_a_leak(grit, monkeypatch):
    """With all sequences of a row made one, they see each other."""
    rng = np.random.default_rng(0)
    batch = grit.make_batch(rng)
    describe = grit.from_segment_ids_and_pos
    monkeypatch.setattr(
        grit,
        "from_segment_ids_and_pos",
        lambda ids, positions: describe(jnp.minimum(ids, 1), positions),
    )
    assert grit.check_isolation(grit.Transformer(seed=0), batch, rng) > 1e-4


def test_verdict_on_embedding_and_generation(grit):
    history = np.array([[0, 0.1, 7.0], [1, 0.2, 6.0]])
    assert grit.verdict(history, 0.0) is None
    assert "change a result" in grit.verdict(history, np.nan)
    assert "No more translations" in grit.verdict(history * [1, 0, 1], 0.0)
    assert "not better predicted" in grit.verdict(history * [1, 1, 0], 0.0)


@pytest.mark.parametrize("example", ["asr", "grit"])
def test_steps_must_be_positive(example, request, capsys):
    with pytest.raises(SystemExit):
        request.getfixturevalue(example).main(["--steps", "0"])
    assert "--steps must be at least 1, got 0" in capsys.readouterr().err
