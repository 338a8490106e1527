"""Events of the generator: pages and files that are not in docs/, and links between them."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # mkdocs loads this file by its path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from website import glossary, live, notebooks, reference, repository, vendored
from website.names import ROOMS
from website.release import version

ASSETS = Path(__file__).parent / "assets"


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Theorems and modules in the navigation; the version below every page."""
    assert config.nav is not None
    config.nav = [_filled(entry) for entry in config.nav]
    config.copyright = f"regard {version()}, {config.copyright}"
    return config


def _filled(entry: Any) -> Any:
    """An entry of the navigation, with the word `theorems` or `reference` as all their pages."""
    if entry == {"Python": "reference"}:
        rooms = [
            {room: [reference.page_of(f"regard.{home}") for home in homes.split()]}
            for room, homes in ROOMS.items()
        ]
        return {"Python": ["reference/index.md", *rooms]}
    if entry == {"Theorems": "theorems"}:
        folder = repository.ROOT / "docs" / "theorems"
        others = sorted(f"theorems/{page.name}" for page in folder.glob("*.md") if page.stem != "index")
        return {"Theorems": ["theorems/index.md", *others]}
    if entry == {"Notebooks": "notebooks"}:
        return {"Notebooks": ["notebooks/index.md", *(f"notebooks/{name}.md" for name in notebooks.names())]}
    if isinstance(entry, dict):
        return {
            name: [_filled(one) for one in inside] if isinstance(inside, list) else inside
            for name, inside in entry.items()
        }
    return entry


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """The reference, the root's Markdown, every source that a page points at, and what is vendored."""
    made = (
        reference.pages()
        | notebooks.pages()
        | {
            goal: (repository.ROOT / path).read_text(encoding="utf-8")
            for path, goal in repository.OWN_PAGES.items()
            if path != "README.md"
        }
    )
    needed = reference.sources()
    for goal, text in made.items():
        made[goal], wanted = repository.linked(text, _origin(goal))
        needed |= wanted
    for file in files.documentation_pages():
        needed |= repository.linked(file.content_string, f"docs/{file.src_uri}")[1]
    made |= {repository.page_of(path): repository.source(path) for path in sorted(needed)}
    for goal, text in made.items():
        files.append(File.generated(config, goal, content=text))
    for goal, data in {**vendored.files(), **live.files(), **notebooks.files(), **_own()}.items():
        files.append(File.generated(config, goal, content=data))
    return files


def _origin(goal: str) -> str:
    """The file of the repository behind a page that is made."""
    return next((path for path, page in repository.OWN_PAGES.items() if page == goal), f"docs/{goal}")


def _own() -> dict[str, bytes]:
    return {f"assets/{path.name}": path.read_bytes() for path in ASSETS.iterdir()}


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that leave docs/, and the hover texts of the glossary."""
    if page.file.generated_by is None:
        markdown = repository.linked(markdown, f"docs/{page.file.src_uri}")[0]
    return markdown if page.file.src_uri.startswith("repository/") else markdown + glossary.hover_texts()


def on_page_content(html: str, **_: Any) -> str:
    """A hover text at the first place of a page, and not at every one."""
    seen: set[str] = set()

    def once(found: re.Match[str]) -> str:
        if found[2].lower() in seen:
            return found[2]
        seen.add(found[2].lower())
        return found[0]

    return re.sub(r"<abbr title=\"([^\"]*)\">([^<]*)</abbr>", once, html)
