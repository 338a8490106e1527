"""Files of the repository that pages point at, as pages: sources with numbered lines, the root's Markdown."""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
LANGUAGES = {".py": "python", ".toml": "toml", ".bib": "bibtex", ".txt": "text", "": "make", ".svg": "xml"}
OWN_PAGES = {
    "README.md": "index.md",
    "DESIGN.md": "design.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Markdown of the root and where it is in the site."""


def page_of(path: str) -> str:
    """Where a file of the repository is in the site, by its path from the root."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return OWN_PAGES.get(path) or f"repository/{path}.md"


def source(path: str) -> str:
    """A page that shows a file, line by line."""
    text = (ROOT / path).read_text(encoding="utf-8")
    fence = "`" * (1 + max((len(run) for run in re.findall("`{3,}", text)), default=2))
    language = LANGUAGES.get(Path(path).suffix, "text")
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# {path}\n\n"
    return f'{head}{fence}{language} linenums="1"\n{text.rstrip()}\n{fence}\n'


def linked(markdown: str, page: str) -> tuple[str, set[str]]:
    """Links of a page that leave docs/, to pages of the site; and the files they need.

    page: its path from the root of the repository.
    """
    needed: set[str] = set()

    def turned(found: re.Match[str]) -> str:
        before, target, fragment, after = found[1], found[2], found[3] or "", found[4]
        if "://" in target or target.startswith(("mailto:", "/")):
            return found[0]
        path = posixpath.normpath(posixpath.join(posixpath.dirname(page), target))
        if path.startswith("..") or not (ROOT / path).is_file():
            return found[0]
        goal = page_of(path)
        if goal.startswith("repository/"):
            needed.add(path)
        here = posixpath.dirname(page_of(page))
        return f"{before}{posixpath.relpath(goal, here or '.')}{fragment}{after}"

    return LINK.sub(turned, markdown), needed
