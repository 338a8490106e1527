"""What must hold of a site that was built: no dead link, nothing from elsewhere, no misspelled word.

python -m website.checking [SITE]
"""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass, field
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urldefrag, urlsplit

from website.repository import ROOT

SPELLED = (
    "docs",
    "website",
    "README.md",
    "DESIGN.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "SECURITY.md",
    "regard",
    "examples",
)
ACCEPTED = ROOT / "website" / "words.txt"
LOADED = {("script", "src"), ("link", "href"), ("img", "src"), ("iframe", "src"), ("source", "src")}
"""What a browser asks for by itself."""


@dataclass
class Links(HTMLParser):
    """Where a page points, what it loads, and the places it has."""

    targets: set[str] = field(default_factory=set)
    loaded: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        super().__init__()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        for name, value in attributes:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif value and (tag, name) in LOADED:
                self.loaded.add(value)
            elif value and (tag, name) == ("a", "href"):
                self.targets.add(value)


@cache
def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text(encoding="utf-8"))
    return links


def dead(page: Path) -> list[str]:
    """Links of a page that lead nowhere, and what it would load from elsewhere."""
    links = read(page)
    found = [
        f"loads {url} from elsewhere" for url in links.loaded if urlsplit(url).scheme in ("http", "https")
    ]
    for url in sorted(links.targets | links.loaded):
        path, fragment = urldefrag(url)
        if urlsplit(url).scheme:
            continue
        target = (page.parent / unquote(path)).resolve() if path else page.resolve()
        if not target.is_file():
            found.append(f"{url}: there is no such file")
        elif fragment and target.suffix == ".html" and not _there(target, unquote(fragment)):
            found.append(f"{url}: that page has no such place")
    return found


def _there(page: Path, fragment: str) -> bool:
    return "live" in page.parts or fragment in read(page).places or fragment.startswith("__tabbed")


def misspelled() -> list[str]:
    """Words that codespell knows better, in everything that is written."""
    command = [
        sys.executable,
        "-m",
        "codespell_lib",
        f"--ignore-words={ACCEPTED}",
        "--skip=*.bib,*.svg,*.png,*.json,*.txt,*/from_npm/*",
    ]
    done = subprocess.run([*command, *SPELLED], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.splitlines()


def main() -> None:
    site = Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site"
    pages = [
        page
        for page in sorted(site.rglob("*.html"))
        if "live" not in page.relative_to(site).parts and page.name != "404.html"
    ]
    wrong = [f"{page.relative_to(site)}: {what}" for page in pages for what in dead(page)]
    wrong += misspelled()
    links = sum(len(read(page).targets) for page in pages)
    print("\n".join(wrong) or f"{len(pages)} pages, {links:,} links: all lead somewhere.")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
