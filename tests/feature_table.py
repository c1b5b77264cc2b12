"""The table of features in README, made of what `explain` says.

`python tests/feature_table.py` writes it; a test tells when it is not up to date.
"""

import dataclasses
import itertools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

import te_mixed_jax as tmj
from pages import ROOT

COLUMNS = ("xla", "mosaic", "cudnn", "te", "dense")
START, END = "<!-- --8<-- [start:features] -->\n", "<!-- --8<-- [end:features] -->"
DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
HEAD_DIMS = range(1, 521)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Own(tmj.MaskPolicy):
    def key_range(self, q: tmj.QueryTokens) -> tuple:
        return q.pos - 1, q.pos + 1


POLICIES = {
    "`FULL`": tmj.FULL,
    "`CAUSAL`": tmj.CAUSAL,
    "causal windows": tmj.CAUSAL.with_window(5, 0),
    "two-sided windows": tmj.FULL.with_window(5, 3),
    "`CAUSAL_BOTTOM_RIGHT`": tmj.CAUSAL_BOTTOM_RIGHT,
    "`prefix(n)`": tmj.prefix(7),
    "`chunked(size, left_chunks)`": tmj.chunked(4, 1),
    "your own": Own(),
}


def runs(
    *,
    dtype: str = "bfloat16",
    T: int = 40,
    S: int = 40,
    N: int = 4,
    K: int = 4,
    H: int = 64,
    V: int | None = None,
    policy: tmj.MaskPolicy = tmj.FULL,
) -> dict[str, bool]:
    """Which implementations would run a call, were TransformerEngine installed."""
    q, k, v = (
        jax.ShapeDtypeStruct((2, *shape), dtype)
        for shape in ((T, N, H), (S, K, H), (S, K, H if V is None else V))
    )
    ids = jnp.ones((2, T), jnp.int32), jnp.ones((2, S), jnp.int32)
    desc = tmj.from_segment_ids_and_pos(ids[0] if T == S else ids)
    said = tmj.explain(q, k, v, desc, policy=policy)
    assert set(said) == set(COLUMNS)
    return {
        name: answer == "yes" or "needs TransformerEngine" in answer
        for name, answer in said.items()
    }


def rows() -> Iterator[tuple[str, dict[str, str]]]:
    """What a row is about, and its cells by implementation."""
    with jax.enable_x64(True):
        dtypes = {name: runs(dtype=dtype) for name, dtype in DTYPES.items()}
    yield "dtypes", {i: ", ".join(x for x in DTYPES if dtypes[x][i]) for i in COLUMNS}

    dims = {H: runs(H=H) for H in HEAD_DIMS}
    yield "head dims", {i: _dims([H for H in dims if dims[H][i]]) for i in COLUMNS}

    yield "value head dim of its own", _yes(runs(V=96))
    yield "fewer key/value heads than query heads", _yes(runs(K=2))
    yield "other queries than keys", _yes(runs(S=56))

    policies = {name: runs(policy=policy, S=56) for name, policy in POLICIES.items()}
    for _, group in itertools.groupby(policies, key=policies.__getitem__):
        names = list(group)
        yield ", ".join(names), _yes(policies[names[0]])


def _yes(answers: dict[str, bool]) -> dict[str, str]:
    return {name: "yes" if answer else "no" for name, answer in answers.items()}


def _dims(dims: list[int]) -> str:
    step, last = dims[0], dims[-1]
    assert dims == list(range(step, last + 1, step)), dims
    words = [f"multiples of {step}"] if step > 1 else []
    words += [f"up to {last}"] if last + step in HEAD_DIMS else []
    return " ".join(words) or "any"


def table() -> str:
    lines = [
        ["`implementation=`", *(f'`"{name}"`' for name in COLUMNS)],
        ["---"] * (1 + len(COLUMNS)),
        *([about, *map(cells.__getitem__, COLUMNS)] for about, cells in rows()),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(page: str) -> str:
    """The text of a page with the table between its marks."""
    before, rest = page.split(START)
    _, after = rest.split(END)
    return f"{before}{START}{table()}{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(with_table(readme.read_text()))
