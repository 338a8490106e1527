"""Notebooks: each source is a notebook, and its page has the pictures that it drew."""

from __future__ import annotations

import importlib.util

import pytest

from tests.docs.test_snippets import ROOT
from website import notebooks

NAMES = notebooks.names()
ASKED = ("audit", "certify", "cheaper", "classifier", "influence", "layer_flow", "particles", "set_flow")


def test_all_of_them_are_there() -> None:
    assert set(ASKED) <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_source_is_a_notebook(name: str) -> None:
    cells = notebooks.cells((ROOT / "examples" / "notebooks" / f"{name}.py").read_text(encoding="utf-8"))
    assert cells[0][0] == "markdown"
    assert cells[0][1].startswith("# ")
    for number, (kind, body) in enumerate(cells):
        if kind == "code":
            compile(body, f"{name}, cell {number}", "exec")
    page = notebooks.page(name)
    drawn = sorted(path.name for path in notebooks.PICTURES.glob(f"{name}-*.png"))
    assert drawn, f"{name} has no picture: make notebooks"
    assert all(f"](../pictures/notebooks/{picture})" in page for picture in drawn)
    assert page.count("```python") == sum(kind == "code" for kind, _ in cells)


def test_no_picture_is_left_over() -> None:
    known = {f"{name}-{number}.png" for name in NAMES for number in range(40)}
    assert {path.name for path in notebooks.PICTURES.iterdir()} <= known


def test_cells_of_the_percent_format() -> None:
    assert notebooks.cells("# ---\n# %% [markdown]\n# # A\n#\n# b\n\n# %%\nx = 1\n\n\ny = 2\n") == [
        ("markdown", "# A\n\nb"),
        ("code", "x = 1\n\n\ny = 2"),
    ]


@pytest.mark.parametrize("name", ["certify"])
def test_a_notebook_runs_and_draws(name: str) -> None:
    """One of them; `make notebooks` runs all."""
    if any(importlib.util.find_spec(package) is None for package in ("nbclient", "jupytext", "ipykernel")):
        pytest.skip("the extra notebooks is not installed: make notebooks")
    drawn = notebooks.drawn(notebooks.run(name))
    assert {f"{name}-{number}.png" for number in drawn} == {
        path.name for path in notebooks.PICTURES.glob(f"{name}-*.png")
    }
