"""What the documentation shows is what happens."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import te_mixed_jax

ROOT = Path(__file__).parents[1]
MODULES = [
    name for _, name, _ in pkgutil.walk_packages(te_mixed_jax.__path__, "te_mixed_jax.")
]
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)
PAGES = [
    str(page.relative_to(ROOT))
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if BLOCK.search(page.read_text())
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings_print_what_they_say(name):
    module = importlib.import_module(name)
    names = {"jax": jax, "jnp": jnp} | {
        key: getattr(te_mixed_jax, key)
        for key in vars(te_mixed_jax)
        if not key.startswith("_")
    }
    result = doctest.testmod(module, extraglobs=names, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0


@pytest.mark.parametrize("page", PAGES)
def test_code_in_pages_prints_what_they_say(page):
    text = (ROOT / page).read_text()
    blocks = BLOCK.findall(text)
    assert len(blocks) == text.count("```python"), "has the layout of the page changed?"
    names = {"__name__": page}  # a block may use what those before it have made
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert printed.getvalue() == expected


def test_pages_with_code_are_found():
    assert {"README.md", "docs/design.md", "docs/migrating.md"} <= set(PAGES)


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/*.md")), ids=lambda p: p.name)
def test_links_between_files_lead_somewhere(page):
    for target in re.findall(r"\]\(([\w./-]+\.(?:md|py))", page.read_text()):
        assert (page.parent / target).exists(), target


def test_every_public_function_has_an_example():
    public = [
        value
        for key, value in vars(te_mixed_jax).items()
        if callable(value) and not key.startswith("_") and not isinstance(value, type)
    ]
    assert len(public) >= 6
    for function in public:
        assert ">>> " in (function.__doc__ or ""), function
