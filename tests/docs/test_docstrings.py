"""Docstrings are programs too: every name of `regard` has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import regard
from regard._verb import Verb
from website.names import names

FLAT = [name for name in regard.__all__ if not isinstance(getattr(regard, name), type(regard) | Verb)]


def examples_of(value: object, path: str) -> list[doctest.DocTest]:
    """The examples of a name and of its methods; `torch` and `regard` are imported."""
    owned = vars(value).items() if inspect.isclass(value) else ()
    found = [(path, value), *((f"{path}.{name}", one) for name, one in owned if inspect.isfunction(one))]
    read = doctest.DocTestParser().get_doctest
    texts = [(name, inspect.getdoc(one) or "") for name, one in found]
    return [
        read(text, {"torch": torch, "regard": regard}, name, None, 0) for name, text in texts if ">>>" in text
    ]


WITH_EXAMPLES = [
    test
    for name in names()
    if hasattr(name.value, "__qualname__")
    for test in examples_of(name.value, name.path)
]


@pytest.mark.parametrize("name", FLAT)
def test_what_is_on_the_first_screen_has_an_example(name: str) -> None:
    assert examples_of(getattr(regard, name), name), (
        f"regard.{name} has no example: add `>>>` lines to its docstring"
    )


@pytest.mark.parametrize("test", WITH_EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs(test: doctest.DocTest) -> None:
    torch.manual_seed(0)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)
