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
PAGES = ["README.md", "docs/design.md"]
BLOCK = re.compile(r"```python\n(.*?)```\n(?:\n```text\n(.*?)```)?", re.DOTALL)


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
    blocks = BLOCK.findall((ROOT / page).read_text())
    assert blocks, "no code found: has the layout of the page changed?"
    for code, expected in blocks:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), {"__name__": page})
        assert printed.getvalue() == expected


def test_every_public_function_has_an_example():
    public = [
        value
        for key, value in vars(te_mixed_jax).items()
        if callable(value) and not key.startswith("_") and not isinstance(value, type)
    ]
    assert len(public) >= 6
    for function in public:
        assert ">>> " in (function.__doc__ or ""), function
