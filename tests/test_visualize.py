"""Pictures and texts of a mask, against the oracle's mask."""

import runpy
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from matplotlib import pyplot
from matplotlib.colors import to_rgb
from matplotlib.text import Annotation

import oracle
import te_mixed_jax as te
from checks import pack, package_policy
from te_mixed_jax import visualize

pyplot.switch_backend("agg")
ROOT = Path(__file__).parents[1]

POLICIES = (
    oracle.CAUSAL,
    oracle.FULL,
    oracle.window(oracle.BOTTOM_RIGHT, 5, 0),
    oracle.chunked(4, 1),
)


@pytest.fixture(autouse=True)
def close_figures() -> Iterator[None]:
    yield
    pyplot.close("all")


def package(policies: Any = POLICIES) -> tuple[te.MaskPolicy, ...]:
    return tuple(map(package_policy, policies))


def row(lengths: list[int], total: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and policy ids [1, total] of sequences that take the policies in turn."""
    ids = np.array([pack(*lengths, total=total)])
    return ids, (ids - 1) % len(POLICIES)


def pixels(ax: Any, T: int, S: int) -> np.ndarray:
    """RGBA in the middle of each pair [T, S]."""
    image = np.asarray(ax.images[0].get_array())
    height, width = image.shape[:2]
    at = ((np.arange(n) + 0.5) * size / n for n, size in ((T, height), (S, width)))
    return image[np.ix_(*(x.astype(int) for x in at))]


def packed() -> dict[str, Any]:
    ids, policy_ids = row([9, 14, 6, 8], 40)
    pos = oracle.positions(ids[0])[None]
    return {"ids": (ids, ids), "pos": (pos, pos), "policy_ids": policy_ids}


def shuffled() -> dict[str, Any]:
    """The tokens of a packed row in any order, other keys than queries."""
    rng = np.random.default_rng(0)
    q, kv = rng.permutation(40), rng.permutation(60)
    call = packed()
    kv_ids, _ = row([20, 5, 9, 16], 60)
    kv_pos = oracle.positions(kv_ids[0])[None]
    return {
        "ids": (call["ids"][0][:, q], kv_ids[:, kv]),
        "pos": (call["pos"][0][:, q], kv_pos[:, kv]),
        "policy_ids": call["policy_ids"][:, q],
    }


@pytest.mark.parametrize("make", [packed, shuffled])
def test_every_pair_that_is_seen_is_coloured_and_no_other(make):
    call = make()
    desc = te.from_segment_ids_and_pos(call["ids"], call["pos"])
    ax = visualize.plot_mask(desc, package(), call["policy_ids"])
    q_ids, kv_ids = (x[0] for x in call["ids"])
    q_pos, kv_pos = (x[0] for x in call["pos"])
    mask = oracle.allowed(q_ids, kv_ids, q_pos, kv_pos, POLICIES, call["policy_ids"][0])
    got = pixels(ax, *mask.shape)[..., 3] > 0
    real = (q_ids > 0)[:, None] & (kv_ids > 0)
    np.testing.assert_array_equal(got[real], mask[real])
    seen, pairs = mask.sum(), mask.size
    assert (
        ax.get_title()
        == f"row 0: {seen} of {pairs:,} pairs are seen ({seen / pairs:.1%})"
    )


def test_beyond_512_tokens_a_cell_holds_the_share_of_its_pairs():
    ids, policy_ids = row([300, 200, 250, 333], 1100)
    mask = oracle.allowed(ids[0], ids[0], None, None, POLICIES, policy_ids[0])
    desc = te.from_segment_ids_and_pos(ids)
    cells = visualize._cells(visualize._mask_of(desc, package(), policy_ids, 0))
    assert (cells.q_step, cells.k_step) == (3, 3)
    blocks = np.pad(mask, (0, 1)).reshape(367, 3, 367, 3)
    np.testing.assert_allclose(cells.share, blocks.mean((1, 3)), atol=1e-12)


def test_a_colour_per_sequence():
    """Seven sequences: neighbours differ, and the seventh has the first one's again."""
    ids = np.array([pack(*[5] * 7)])
    ax = visualize.plot_mask(te.from_segment_ids_and_pos(ids))
    diagonal = pixels(ax, 35, 35)[np.arange(35), np.arange(35), :3].reshape(7, 5, 3)
    assert (diagonal == diagonal[:, :1]).all()
    colors = diagonal[:, 0]
    np.testing.assert_allclose(
        colors,
        [to_rgb(c) for c in (*visualize._COLORS, visualize._COLORS[0])],
        atol=1e-6,
    )
    assert len(np.unique(colors, axis=0)) == 6


def test_a_pattern_per_policy_that_is_used():
    ids, policy_ids = row([100, 100, 100], 300)
    ax = visualize.plot_mask(te.from_segment_ids_and_pos(ids), package(), policy_ids)
    assert labels(ax) == ["CAUSAL", "FULL", "CAUSAL_BOTTOM_RIGHT.with_window(5, 0)"]
    legend = ax.get_legend()
    assert legend is not None
    hatches = [patch.get_hatch() for patch in legend.get_patches()]
    assert len({*hatches}) == 3
    image = np.asarray(ax.images[0].get_array())
    shades = []
    for sequence in range(3):
        block = image[345 * sequence : 345 * sequence + 330].reshape(-1, 4)
        shades.append(len(np.unique(block[block[:, 3] > 0], axis=0)))
    assert shades == [1, 2, 2]


def labels(ax: Any) -> list[str]:
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_padding_is_hatched():
    ids, _ = row([20, 12], 40)
    ax = visualize.plot_mask(te.from_segment_ids_and_pos(ids))
    assert labels(ax) == ["FULL", "padding"]
    image = np.asarray(ax.images[0].get_array())
    edge = int(image.shape[0] * 32 / 40) + 1
    for part in (image[edge:], image[:, edge:]):
        hatched = part[..., 3] > 0
        assert 0.1 < hatched.mean() < 0.5
        assert (part[hatched][:, :3] == part[hatched][:, :1]).all()  # grey


def test_a_row_of_padding():
    desc = te.from_segment_ids_and_pos([[0, -1, 0]])
    ax = visualize.plot_mask(desc, tiles=True)
    assert labels(ax)[0] == "padding"
    assert ax.get_title().splitlines()[1].startswith("the kernel skips 100.0% of")
    assert visualize.describe(desc).endswith("\npadding   0-2")


def test_axes_are_in_tokens():
    ids, _ = row([20, 12], 48)
    kv_ids, _ = row([50, 12], 90)
    ax = visualize.plot_mask(te.from_segment_ids_and_pos((ids, kv_ids)))
    assert (ax.get_xlim(), ax.get_ylim()) == ((0, 90), (48, 0))
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("key (token)", "query (token)")


def test_names_stand_beside_sequences_of_one_piece():
    def names(*ids: int) -> dict[str, tuple[float, float]]:
        ax = visualize.plot_mask(te.from_segment_ids_and_pos([ids]))
        return {x.get_text(): x.xy for x in ax.texts if isinstance(x, Annotation)}

    places = {"sequence 4": (3, 1.5), "sequence 2": (6, 5.5)}
    assert names(4, 4, 4, 7, 7, 2, 7, 7, 0, 0) == places
    assert names(0, 0, 0, 0, 5, 5, 5, 5) == {"sequence 5": (4, 6)}
    assert names(5, 5, 5, 5) == {}  # there is no room


@pytest.mark.parametrize(
    "policy", [oracle.FULL, oracle.CAUSAL], ids=lambda policy: policy.kind
)
def test_tiles_are_those_that_the_mask_needs(policy):
    """One sequence and padding: what is skipped, masked and plain is known exactly."""
    ids, _ = row([600], 700)
    desc = te.from_segment_ids_and_pos(ids)
    ax = visualize.plot_mask(desc, package_policy(policy), tiles=True)
    mask = oracle.allowed(ids[0], ids[0], None, None, [policy], None)
    tiles = np.pad(mask, ((0, 4), (0, 68))).reshape(11, 64, 6, 128)
    some, whole = tiles.any((1, 3)).mean(), tiles.all((1, 3)).mean()
    assert ax.get_title().splitlines()[1] == (
        f"the kernel skips {1 - some:.1%} of the tiles, "
        f"runs {some - whole:.1%} masked, {whole:.1%} plain"
    )
    assert labels(ax)[-3:] == ["tiles skipped", "tiles run masked", "tiles run plain"]


def test_a_short_row_skips_nothing():
    """Tokens that only fill a tile up do not count."""
    ax = visualize.plot_mask(te.from_segment_ids_and_pos([[1]]), tiles=True)
    assert "skips 0.0% of the tiles" in ax.get_title()


def test_frames_are_around_the_tiles_that_run_plain():
    ids, _ = row([256, 300], 600)
    ax = visualize.plot_mask(te.from_segment_ids_and_pos(ids), tiles=True)
    run, plain = (np.asarray(step.get_path().vertices) for step in ax.patches)
    for vertices, boxes in (
        (run, [[0, 0, 256, 256], [256, 256, 600, 576]]),
        (plain, [[0, 0, 256, 256], [256, 256, 512, 512]]),
    ):
        low, high = vertices.min(0), vertices.max(0)
        assert low.tolist() == boxes[0][:2]
        assert (np.minimum(high, 600)).tolist() == boxes[1][2:]


def test_axes_that_are_given_are_drawn_into():
    _, axes = pyplot.subplots(1, 2)
    desc = te.from_segment_ids_and_pos(row([3, 4], 8)[0])
    assert visualize.plot_mask(desc, ax=axes[1]) is axes[1]
    assert pyplot.get_fignums() == [1]
    assert not axes[0].images


def test_a_row_of_32k_tokens_needs_no_square_of_memory():
    T = 32768
    ids, policy_ids = row([9000, 500, 17000, 3000, 40], T)
    tracemalloc.start()
    visualize.plot_mask(te.from_segment_ids_and_pos(ids), package(), policy_ids)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < T * T / 8  # less than one bit a pair


def test_the_example_draws_the_picture_of_the_docs(tmp_path, monkeypatch, capsys):
    path = tmp_path / "mask.png"
    monkeypatch.setattr(sys, "argv", ["see_mask.py", str(path)])
    runpy.run_path(str(ROOT / "examples" / "see_mask.py"), run_name="__main__")
    assert "3         720-1199   chunked(64, 2)  164.3" in capsys.readouterr().out
    for picture in (path, ROOT / "docs" / "mask.png"):
        assert picture.read_bytes().startswith(b"\x89PNG")
        assert picture.stat().st_size < 100_000


# ------------------------------------------------------------------------------- text


def test_describe_self_attention():
    ids = np.array([[0] * 5, [3, 3, 0, 9, 3]])
    policy_ids = [[0] * 5, [0, 0, -1, 1, 0]]
    text = visualize.describe(
        te.from_segment_ids_and_pos(ids), (te.CAUSAL, te.FULL), policy_ids, row=1
    )
    assert text.splitlines() == [
        "row 1: 7 of 25 pairs are seen (28.0%)",
        "sequence  tokens  policy  keys seen",
        "3         0-1, 4  CAUSAL  2.0",
        "9         3       FULL    1.0",
        "padding   2",
    ]


def test_describe_cross_attention():
    desc = te.from_segment_ids_and_pos(([[1, 1, 2, 2]], [[1, 3, 1, 3, 1, 0]]))
    assert visualize.describe(desc, te.CAUSAL).splitlines() == [
        "row 0: 3 of 24 pairs are seen (12.5%)",
        "sequence  queries  keys     policy  keys seen",
        "1         0-1      0, 2, 4  CAUSAL  1.5",
        "2         2-3      -        CAUSAL  0.0",
        "3         -        1, 3     -       -",
        "padding   -        5",
    ]


def test_describe_shortens_many_pieces():
    desc = te.from_segment_ids_and_pos([[1, 2] * 6])
    assert "\n2         1, 3, 5, 7, and 2 more  FULL" in visualize.describe(desc)


@pytest.mark.parametrize("shape", [(), (3,), (2, 2)])
def test_rows_count_over_all_batch_axes(shape):
    """Of device arrays too; batch axes of size 1 broadcast."""
    number = int(np.prod(shape))
    lengths = np.arange(1, number + 1).reshape(*shape, 1)
    desc = te.from_segment_ids_and_pos(jnp.asarray(np.arange(6) < lengths, jnp.int32))
    policy_ids = np.zeros((*(1 for _ in shape), 6), np.int32)
    for row in range(number):
        text = visualize.describe(desc, (te.FULL,), policy_ids, row=row)
        assert text.startswith(f"row {row}: {(row + 1) ** 2} of 36 pairs")


# ----------------------------------------------------------------------------- errors


@pytest.mark.parametrize("function", [visualize.plot_mask, visualize.describe])
@pytest.mark.parametrize(
    ("changed", "error", "match"),
    [
        ({"desc": np.ones((2, 8))}, TypeError, "`desc`.*SequenceDescriptor.*ndarray"),
        ({"policy": te.CAUSAL}, ValueError, "`policy_ids`.*single"),
        ({"policy_ids": None}, ValueError, "`policy_ids`.*2 policies.*None"),
        ({"policy_ids": [[0] * 9]}, ValueError, r"`policy_ids`.*\(2, 8\).*\(1, 9\)"),
        ({"policy_ids": [0] * 8}, ValueError, r"`policy_ids`.*\(2, 8\).*\(8,\)"),
        ({"policy_ids": [[2] * 8]}, ValueError, "`policy_ids`.*0 to 1.*got 2"),
        ({"policy_ids": [[0.0] * 8]}, TypeError, "`policy_ids`.*float64"),
        ({"policy": "padding"}, TypeError, "`policy`.*'padding'"),
        ({"row": 2}, ValueError, "`row`.*0 to 1, got 2"),
        ({"row": -1}, ValueError, "`row`.*got -1"),
        ({"row": 0.0}, TypeError, "`row`.*float"),
    ],
)
def test_wrong_arguments(function, changed, error, match):
    arguments: dict[str, Any] = {
        "desc": te.from_segment_ids_and_pos(np.ones((2, 8), int)),
        "policy": (te.CAUSAL, te.FULL),
        "policy_ids": np.zeros((2, 8), int),
    }
    with pytest.raises(error, match=match):
        function(**arguments | changed)


def test_rows_that_are_broken():
    desc = te.SequenceDescriptor.from_seqlens(jnp.array([[3, 9]]), q_len=8)
    with pytest.raises(ValueError, match="broken"):
        visualize.describe(desc)


def test_traced_values():
    def text(ids):
        visualize.describe(te.from_segment_ids_and_pos(ids))

    with pytest.raises(TypeError, match=r"`desc`.*concrete.*outside `jax\.jit`"):
        jax.jit(text).trace(jnp.ones((1, 8), jnp.int32))


def test_a_row_without_keys_has_no_picture():
    desc = te.from_segment_ids_and_pos((np.ones((1, 3), int), np.ones((1, 0), int)))
    with pytest.raises(ValueError, match=r"`desc`.*3 queries and 0 keys"):
        visualize.plot_mask(desc)
    assert visualize.describe(desc).startswith("row 0: 0 of 0 pairs")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    desc = te.from_segment_ids_and_pos([[1]])
    with pytest.raises(ImportError, match=r'pip install "te_mixed_jax\[visualize\]"'):
        visualize.plot_mask(desc)


def test_importing_the_package_does_not_import_matplotlib():
    code = "import sys, te_mixed_jax.visualize; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
