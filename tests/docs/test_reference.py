"""The reference has every public name, and says where it is written."""

from __future__ import annotations

import importlib
import pkgutil
import re
from pathlib import Path
from typing import TypeVar

import pytest

import regard
from tests.docs.test_snippets import ROOT
from website import glossary, reference, repository, vendored
from website.names import modules, names, pages_about, public, theorems_about, used_in

WITHOUT_PAGE = {"regard.cli", "regard.__main__"}
"""Modules that nobody imports."""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return reference.pages()


def test_every_public_module_has_a_page() -> None:
    found = {
        f"regard.{one.name}" for one in pkgutil.iter_modules(regard.__path__) if not one.name.startswith("_")
    }
    assert found - WITHOUT_PAGE - set(modules()) == set()
    assert len(modules()) == len(set(modules()))


@pytest.mark.parametrize("home", ["regard", *modules()])
def test_every_public_name_has_an_entry(home: str, pages: dict[str, str]) -> None:
    module = importlib.import_module(home)
    known = {path: one for one in names() for path in (one.path, *one.also)}
    for name in public(module):
        if isinstance(getattr(module, name), type(regard) | TypeVar):
            continue
        assert f"{home}.{name}" in known, f"{home}.{name} is public and has no page"
        one = known[f"{home}.{name}"]
        page = pages[reference.page_of(one.module)]
        assert f"::: {one.path}\n" in page or f"{{: #{one.path} }}" in page


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    found = re.findall(r"- ([\w-]+\.md)$", navigation, flags=re.MULTILINE)
    assert sorted(found) == sorted(page.name for page in (ROOT / "docs").glob("*.md"))
    assert found[:2] == ["index.md", "limits.md"]


def test_the_first_audit_is_a_short_page() -> None:
    assert len((ROOT / "docs" / "audit.md").read_text(encoding="utf-8").split()) <= 900


def test_every_class_and_function_says_what_it_is() -> None:
    assert not [one.path for one in names() if hasattr(one.value, "__qualname__") and not one.sentence]


def test_facts_point_at_files_that_are_there() -> None:
    assert len(reference.sources()) > 100
    for one in names():
        for target in re.findall(r'href="\.\./([^"#]+)\.html', reference.facts(one)):
            path = (
                target.removeprefix("repository/")
                if target.startswith("repository/")
                else f"docs/{target}.md"
            )
            assert (ROOT / path).is_file(), f"{one.path}: {target}"


def test_theorems_and_pages_are_found() -> None:
    assert {"castin_general", "frobenius"} <= set(theorems_about()["Frobenius"])
    assert "attention" in pages_about()["regard.Causal"]
    assert used_in("from regard.nn import Design\nregard.maps.Affine(x).y\n") == {
        "regard.nn.Design",
        "regard.maps",
        "regard.maps.Affine",
    }


def test_links_that_leave_the_docs_are_turned() -> None:
    turns = {
        "../regard/measure.py": "repository/regard/measure.py.md",
        "../DESIGN.md#words": "design.md#words",
        "https://x.org/y": "https://x.org/y",
        "audit.md": "audit.md",
        "../nothing.py": "../nothing.py",
    }
    for before, after in turns.items():
        turned, needed = repository.linked(f"[a]({before})", "docs/index.md")
        assert turned == f"[a]({after})"
        assert needed == ({"regard/measure.py"} if "measure" in before else set())


def test_what_is_vendored_is_whole_and_licensed() -> None:
    found = vendored.files()
    assert {path.relative_to(vendored.KEPT).as_posix() for path in vendored.KEPT.rglob("*.*")} == {
        *found,
        vendored.SUMS.name,
    }
    for archive in vendored.ARCHIVES:
        text = found[f"assets/licenses/{archive.name.rpartition('/')[2]}.txt"].decode()
        assert "Permission is hereby granted" in text or "SIL OPEN FONT LICENSE" in text.upper()
        for goal in archive.files.values():
            assert any(name.startswith(goal) for name in found)


def test_a_file_changed_by_hand_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(vendored, "KEPT", tmp_path)
    monkeypatch.setattr(vendored, "SUMS", tmp_path / "sums.txt")
    (tmp_path / "sums.txt").write_text(f"{'0' * 64}  some.js\n", encoding="utf-8")
    (tmp_path / "some.js").write_text("changed", encoding="utf-8")
    with pytest.raises(ValueError, match=r"changed by hand: some\.js; python -m website\.vendored"):
        vendored.files()


def test_a_wrong_sum_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vendored.Archive, "_fetch", lambda self: b"something else")
    with pytest.raises(ValueError, match="sha512"):
        vendored.ARCHIVES[0].contents()


def test_an_npm_that_fails_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what was kept stays."""

    def refused(command: list[str], **options: object) -> None:
        assert command[:3] == ["npm", "pack", vendored.ARCHIVES[0].release]
        raise OSError("name or service not known")

    monkeypatch.setattr(vendored.subprocess, "run", refused)
    with pytest.raises(
        SystemExit, match=r"katex@.* could not be fetched \(name or .*\); nothing was changed"
    ):
        vendored.main()
    assert vendored.files()


def test_hover_texts_are_short_and_plain() -> None:
    words = glossary.words()
    assert len(words) > 30
    assert all(20 < len(meaning) < 260 and "](" not in meaning for meaning in words.values())
