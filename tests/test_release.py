"""One version everywhere, a changelog in its form, sites side by side."""

from __future__ import annotations

import re
from pathlib import Path

import regard
from tests.docs.test_snippets import ROOT
from website import release, versions

KINDS = {"Added", "Changed", "Certificates that changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_one_version_everywhere() -> None:
    assert release.version() == regard.__version__
    assert release.disagreements() == []
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert 'dynamic = ["version"]' in project
    assert not re.search(r"^version = ", project, flags=re.MULTILINE)


def test_another_version_is_noticed(monkeypatch) -> None:
    monkeypatch.setattr(release, "version", lambda: "9.9.9")
    assert len(release.disagreements()) == 2


def test_the_changelog_keeps_its_form() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert "keepachangelog.com" in text
    headings = re.findall(r"^## (.*)$", text, flags=re.MULTILINE)
    assert headings
    assert all(re.fullmatch(r"\[\d+\.\d+\.\d+\] - (unreleased|\d{4}-\d\d-\d\d)", one) for one in headings)
    assert set(re.findall(r"^### (.*)$", text, flags=re.MULTILINE)) <= KINDS


def test_sites_stand_side_by_side(tmp_path: Path) -> None:
    site, folder = tmp_path / "site", tmp_path / "versions"
    site.mkdir()
    (site / "index.html").write_text("new")
    for version in ("0.9.0", "0.10.0", "0.9.0"):
        versions.keep(site, version, folder)
    assert versions.known(folder) == ["0.10.0", "0.9.0"]
    assert 'href="0.10.0/index.html"' in (folder / "index.html").read_text()
    assert (folder / "0.9.0" / "index.html").read_text() == "new"
