"""Sites of several versions side by side, with a first page that lists them; all of it opens from disk.

python -m website.versions [SITE]   keeps a site in versions/<version of the package>
"""

from __future__ import annotations

import re
import shutil
import sys
from html import escape
from pathlib import Path

from website.repository import ROOT

FOLDER = ROOT / "versions"


def keep(site: Path, version: str, folder: Path = FOLDER) -> Path:
    """A copy of a site under its version, in place of an older copy; the list is written again."""
    goal = folder / version
    shutil.rmtree(goal, ignore_errors=True)
    shutil.copytree(site, goal)
    (folder / "index.html").write_text(page(known(folder)), encoding="utf-8")
    return goal


def known(folder: Path = FOLDER) -> list[str]:
    """The versions that were kept, newest first."""
    found = [path.name for path in folder.iterdir() if (path / "index.html").is_file()]
    return sorted(found, key=lambda name: [int(part) for part in re.findall(r"\d+", name)], reverse=True)


def page(found: list[str]) -> str:
    """The list of them, and on to the newest."""
    links = "".join(f'<li><a href="{escape(name)}/index.html">{escape(name)}</a></li>' for name in found)
    onward = f'<meta http-equiv="refresh" content="3; url={escape(found[0])}/index.html">'
    head = f'<meta charset="utf-8"><title>regard, all versions</title>{onward}'
    body = f"<h1>regard</h1><ul>{links}</ul>"
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>\n"


if __name__ == "__main__":
    from website.release import version

    print(keep(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "site", version()))
