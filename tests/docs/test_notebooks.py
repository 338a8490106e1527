"""Notebooks: each source is a notebook, and its page has the pictures that it drew."""

from __future__ import annotations

import re
from pathlib import Path

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


def test_all_of_them_run_where_everything_is_tested() -> None:
    """Not here: a kernel for each takes a minute together."""
    commands = (ROOT / ".ci" / "run").read_text(encoding="utf-8").splitlines()
    assert "make notebooks CHECK=1" in commands
    rule = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "-m website.notebooks $(if $(CHECK),--check)" in rule


def test_a_check_says_what_is_wrong() -> None:
    cells = [int(path.stem.rpartition("-")[2]) for path in notebooks.PICTURES.glob("certify-*.png")]
    drawn = dict.fromkeys(cells, b"a picture")
    assert notebooks.wrong("certify", drawn, 1.0) == []
    assert notebooks.wrong("certify", {}, 1.0) == [
        f"certify-{number}.png is there and no cell draws it" for number in sorted(cells)
    ]
    assert notebooks.wrong("certify", drawn | {99: b""}, 1e9) == [
        "certify-99.png is drawn and not there: make notebooks",
        f"certify took 1000000000 s of the processor, more than {notebooks.MOST}",
    ]


def test_a_cell_that_fails_fails_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    pytest.importorskip("jupytext")
    (tmp_path / "broken.py").write_text("# %% [markdown]\n# # A\n\n# %%\nassert False, 'it breaks'\n")
    monkeypatch.setattr(notebooks, "SOURCES", tmp_path)
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="it breaks"):
        notebooks.run("broken")


def test_an_audit_of_a_directory_shows_itself_in_a_notebook(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a real kernel: the name, the verdict and the sentences as HTML, and as text without HTML."""
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    pytest.importorskip("transformers")
    pytest.importorskip("jinja2")
    from tests.audits.checkpoints import save

    save(tmp_path / "tiny")
    code = f"import regard\nregard.audit({str(tmp_path / 'tiny')!r}, ['the cat sat'], checks=['rows'])"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    nbclient.NotebookClient(notebook, timeout=notebooks.PATIENCE, kernel_name="python3").execute()
    (shown,) = [o.data for o in notebook.cells[0].outputs if o.output_type == "execute_result"]
    assert re.search(r"<b>[^<]*tiny", shown["text/html"])
    assert shown["text/html"].count("<li>") > 1
    assert shown["text/plain"].startswith("Report('tiny'")


@pytest.mark.parametrize(
    ("drawn", "code"), [({}, None), ({7: b""}, "a-7.png is drawn and not there: make notebooks")]
)
def test_a_check_ends_well_or_with_what_is_wrong(
    drawn: dict[int, bytes], code: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notebooks, "run", lambda name: name)
    monkeypatch.setattr(notebooks, "drawn", lambda notebook: drawn)
    monkeypatch.setattr(notebooks, "PICTURES", tmp_path)
    monkeypatch.setattr("sys.argv", ["notebooks", "--check", "a"])
    with pytest.raises(SystemExit) as ended:
        notebooks.main()
    assert ended.value.code == code
    assert not list(tmp_path.iterdir())
