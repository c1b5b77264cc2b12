"""What the documentation shows is what happens."""

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import types

import jax
import jax.numpy as jnp
import pytest

import feature_table
import te_mixed_jax
from pages import PAGES, ROOT, code_blocks

MODULES = [
    name for _, name, _ in pkgutil.walk_packages(te_mixed_jax.__path__, "te_mixed_jax.")
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


@pytest.mark.parametrize("page", [page for page in PAGES if code_blocks(page)])
def test_code_in_pages_prints_what_they_say(page):
    names = {"__name__": page}
    for code, expected in code_blocks(page):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, page, "exec"), names)
        assert printed.getvalue() == expected


def test_the_table_of_features_is_what_explain_says():
    """If not, `python tests/feature_table.py` writes it anew."""
    readme = (ROOT / "README.md").read_text()
    assert feature_table.with_table(readme) == readme


def test_the_API_page_has_all_that_is_public():
    page = (ROOT / "docs" / "api.md").read_text().splitlines()
    modules = [name for name in MODULES if "._" not in name and "lowerings" not in name]
    assert len(modules) >= 3
    for name in [
        *modules,
        *(f"te_mixed_jax.{name}" for name in public_names()),
    ]:
        assert f"::: {name}" in page


def public_names() -> list[str]:
    return [
        name
        for name, value in vars(te_mixed_jax).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_links_between_files_lead_somewhere(page):
    path = ROOT / page
    for target in re.findall(r"\]\(([\w./-]+\.(?:md|py))", path.read_text()):
        assert (path.parent / target).exists(), target


def test_every_public_function_has_an_example():
    public = [
        value
        for key, value in vars(te_mixed_jax).items()
        if callable(value) and not key.startswith("_") and not isinstance(value, type)
    ]
    assert len(public) >= 6
    for function in public:
        assert ">>> " in (function.__doc__ or ""), function
