"""Notebooks: sources in examples/notebooks, run by nbclient, shown as pages with the pictures they drew.

python -m website.notebooks [NAME ...]   runs them, and writes docs/pictures/notebooks/<name>-<cell>.png
python -m website.notebooks --check      runs them all and writes nothing: no cell fails, none takes too long,
                                         and the cells that draw are those whose pictures are there
"""

from __future__ import annotations

import base64
import os
import re
import sys
from typing import Any

from website.repository import ROOT

SOURCES = ROOT / "examples" / "notebooks"
PICTURES = ROOT / "docs" / "pictures" / "notebooks"
PATIENCE = 300
"""Seconds for one cell."""
MOST = 120
"""Seconds of the processor that a whole notebook may take."""
CELL = re.compile(r"^# %%(?P<kind> \[markdown\])?\n", flags=re.MULTILINE)


def names() -> list[str]:
    """What notebooks there are."""
    return sorted(path.stem for path in SOURCES.glob("*.py"))


def cells(text: str) -> list[tuple[str, str]]:
    """The cells of a source in the percent format: markdown or code, and what is in them."""
    parts = CELL.split(text)[1:]
    found = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        if kind is None:
            found.append(("code", body.strip()))
        else:
            found.append(("markdown", re.sub(r"^# ?", "", body.strip(), flags=re.MULTILINE)))
    return found


def page(name: str) -> str:
    """A notebook as a page: prose, code, and the pictures of each cell."""
    parts = []
    for number, (kind, body) in enumerate(cells((SOURCES / f"{name}.py").read_text(encoding="utf-8"))):
        parts.append(body if kind == "markdown" else f"```python\n{body}\n```")
        if (PICTURES / f"{name}-{number}.png").exists():
            parts.append(f"![what this cell draws](../pictures/notebooks/{name}-{number}.png)")
    parts.insert(1, f"[{name}.ipynb]({name}.ipynb), [the source](../../examples/notebooks/{name}.py)")
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """The list of them, each with its first sentences."""
    lines = []
    for name in names():
        heading, _, rest = cells((SOURCES / f"{name}.py").read_text(encoding="utf-8"))[0][1].partition("\n")
        lines.append(f"- [{heading.removeprefix('# ')}]({name}.md): {' '.join(rest.split())}\n")
    text = "`make notebooks` runs them all and draws their pictures; each takes seconds, and none asks a hub."
    return f"# Notebooks to run\n\n{text}\n\n{''.join(lines)}"


def pages() -> dict[str, str]:
    """The Markdown of each page by its path in docs."""
    return {"notebooks/index.md": index()} | {f"notebooks/{name}.md": page(name) for name in names()}


def files() -> dict[str, bytes]:
    """The notebooks as Jupyter reads them, without outputs."""
    import jupytext

    read = {name: jupytext.read(SOURCES / f"{name}.py") for name in names()}
    return {
        f"notebooks/{name}.ipynb": jupytext.writes(one, fmt="ipynb").encode() for name, one in read.items()
    }


def run(name: str) -> Any:
    """A notebook, executed; an error of a cell is an error."""
    import jupytext
    import nbclient

    notebook = jupytext.read(SOURCES / f"{name}.py")
    client = nbclient.NotebookClient(notebook, timeout=PATIENCE, resources={"metadata": {"path": str(ROOT)}})
    return client.execute()


def drawn(notebook: Any) -> dict[int, bytes]:
    """The last picture of each cell that drew one."""
    found = {}
    for number, cell in enumerate(notebook.cells):
        for output in cell.get("outputs", ()):
            if "image/png" in output.get("data", {}):
                found[number] = base64.b64decode(output["data"]["image/png"])
    return found


def wrong(name: str, found: dict[int, bytes], seconds: float) -> list[str]:
    """What is not as it should be of a notebook that ran."""
    kept = {path.name for path in PICTURES.glob(f"{name}-*.png")}
    made = {f"{name}-{number}.png" for number in found}
    lines = [f"{picture} is there and no cell draws it" for picture in sorted(kept - made)]
    lines += [f"{picture} is drawn and not there: make notebooks" for picture in sorted(made - kept)]
    if seconds > MOST:
        lines.append(f"{name} took {seconds:.0f} s of the processor, more than {MOST}")
    return lines


def main() -> None:
    given = sys.argv[1:]
    check = "--check" in given
    PICTURES.mkdir(parents=True, exist_ok=True)
    lines: list[str] = []
    for name in [one for one in given if one != "--check"] or names():
        before = sum(os.times()[:4])  # with children that ended: the kernel is one
        found = drawn(run(name))
        seconds = sum(os.times()[:4]) - before
        lines += wrong(name, found, seconds) if check else []
        for number, picture in found.items() if not check else ():
            (PICTURES / f"{name}-{number}.png").write_bytes(picture)
        print(f"{name}: {seconds:.0f} s", flush=True)
    sys.exit("\n".join(lines) or None)


if __name__ == "__main__":
    main()
