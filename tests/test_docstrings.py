"""Docstrings of all that is public: arguments, shapes, errors, examples, sources."""

import dataclasses
import inspect
import re
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import flax.linen
import pytest

import te_mixed_jax
import te_mixed_jax.linen
import te_mixed_jax.nnx

SUBMODULES = [
    te_mixed_jax.linen,
    te_mixed_jax.nnx,
    te_mixed_jax.context_parallel,
    te_mixed_jax.visualize,
]


def exported() -> dict[str, Any]:
    """Every public name: of the package, and what its public modules define."""
    names = {
        name: value
        for name, value in vars(te_mixed_jax).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }
    for module in SUBMODULES:
        for name, value in vars(module).items():
            own = getattr(value, "__module__", "") == module.__name__
            if not name.startswith("_") and (own or name == "attention_fn"):
                names[f"{module.__name__.split('.')[-1]}.{name}"] = value
    return names


EXPORTED = exported()
CLASSES = {name: x for name, x in EXPORTED.items() if inspect.isclass(x)}
VALUES = [name for name, x in EXPORTED.items() if not callable(x)]


def methods(cls: type) -> dict[str, Callable]:
    """Its own public methods; properties are attributes."""
    found = {}
    for name, x in vars(cls).items():
        x = getattr(x, "__func__", x)  # of a classmethod
        public = not name.startswith("_") or name == "__call__"
        if public and inspect.isfunction(x) and name not in fields(cls):
            found[name] = inspect.unwrap(x)
    return found


def fields(cls: type) -> list[str]:
    if dataclasses.is_dataclass(cls):
        names = [field.name for field in dataclasses.fields(cls)]
    else:
        names = list(getattr(cls, "_fields", ()))
    if issubclass(cls, flax.linen.Module):
        names = [name for name in names if name not in ("parent", "name")]
    return [name for name in names if not name.startswith("_")]


METHODS = {
    f"{name}.{method}": function
    for name, cls in CLASSES.items()
    for method, function in methods(cls).items()
}
FUNCTIONS = {name: x for name, x in EXPORTED.items() if inspect.isroutine(x)} | METHODS

# What takes no idea or interface from elsewhere.
OWN = {
    *("explain", "MaskPolicy", "QueryTokens"),
    *("context_parallel.TokenOrder", "context_parallel.with_row_positions"),
    "visualize.describe",
}
# The only one that nothing can make fail.
NEVER_FAILS = "MaskPolicy.window_shift"

every_function = pytest.mark.parametrize("name", FUNCTIONS)
every_class = pytest.mark.parametrize("name", CLASSES)


def text(x: Any) -> str:
    return inspect.getdoc(x) or ""


def section(x: Any, *titles: str) -> str:
    """The indented lines under the first of these titles, or nothing."""
    found = re.search(
        rf"^(?:{'|'.join(titles)}):\n((?:(?: .*)?\n?)+)", text(x), re.MULTILINE
    )
    return found[1] if found else ""


def described(x: Any, *titles: str) -> dict[str, str]:
    """What a section says of each of its names."""
    entries = re.split(r"^    (\w+): ", section(x, *titles), flags=re.MULTILINE)[1:]
    return dict(zip(entries[::2], entries[1::2], strict=True))


def test_there_is_something_to_look_at() -> None:
    assert len(FUNCTIONS) >= 25
    assert len(CLASSES) >= 8
    assert len(VALUES) == 6


@every_function
def test_all_arguments_of_a_function_are_described(name: str) -> None:
    parameters = [
        parameter
        for parameter in inspect.signature(FUNCTIONS[name]).parameters
        if parameter not in ("self", "cls")
    ]
    assert list(described(FUNCTIONS[name], "Args")) == parameters


@every_class
def test_all_fields_of_a_class_are_described(name: str) -> None:
    cls = CLASSES[name]
    wanted = fields(cls)
    if issubclass(cls, te_mixed_jax.nnx.nnx.Module):
        _, *wanted = inspect.signature(cls.__init__).parameters
    assert list(described(cls, "Args", "Attributes")) == wanted


ARRAYS = {
    *("query", "key", "value", "inputs_q", "inputs_kv", "policy_ids", "x", "q"),
    *("segment_ids", "segment_pos", "q_seqlens", "kv_seqlens"),
    *("order", "inverse", "attn_mask_type_per_seq"),
}


@pytest.mark.parametrize("name", [*FUNCTIONS, "context_parallel.TokenOrder"])
def test_arrays_have_shapes(name: str) -> None:
    x = EXPORTED.get(name) or FUNCTIONS[name]
    for argument, said in described(x, "Args", "Attributes").items():
        if argument in ARRAYS:
            same = "of the same shape" in said or "as in `policies_from" in said
            assert "``[" in said or same, argument


@every_function
def test_what_is_returned_is_described(name: str) -> None:
    assert section(FUNCTIONS[name], "Returns")


@every_function
def test_errors_are_named(name: str) -> None:
    assert bool(section(FUNCTIONS[name], "Raises")) == (name != NEVER_FAILS)


@pytest.mark.parametrize("name", [*FUNCTIONS, *CLASSES])
def test_there_is_an_example(name: str) -> None:
    """Which test_docs.py runs. That of a method may be the one of its class."""
    of_class = ""
    if name in METHODS:
        owner, method = name.rsplit(".", 1)
        of_class = section(CLASSES[owner], "Example")
        if method != "__call__" and f".{method}(" not in of_class:
            of_class = ""
    example = section(FUNCTIONS.get(name) or CLASSES[name], "Example")
    assert ">>> " in example + of_class


def test_sources_are_named() -> None:
    """Of functions and classes; methods have that of their class."""
    whole = {name: x for name, x in EXPORTED.items() if name not in VALUES}
    assert {name for name, x in whole.items() if "\nSource: " not in text(x)} == OWN


@pytest.mark.parametrize("name", VALUES)
def test_values_are_described(name: str) -> None:
    """By a string after the assignment, which the API page shows."""
    package = Path(te_mixed_jax.__file__).parent
    found = [
        path.name
        for path in package.glob("_*.py")
        if re.search(rf'^{name} = .*\n"""[A-Z]', path.read_text(), re.MULTILINE)
    ]
    assert len(found) == 1
