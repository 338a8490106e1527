"""The pages of the API reference: one a module, every public name once."""

from __future__ import annotations

import importlib
import inspect
from html import escape
from pathlib import Path

from website.names import ROOMS, ROOT, Name, modules, names, pages_about, theorems_about

WIDE = 88
"""Columns of a line of code."""
SHOWN = 8
"""Theorems and pages that are named one by one; the others are counted."""


def pages() -> dict[str, str]:
    """The Markdown of each page by its path in docs."""
    return {"reference/index.md": index()} | {page_of(module): page(module) for module in modules()}


def page_of(module: str) -> str:
    return f"reference/{module.removeprefix('regard.')}.md"


def index() -> str:
    """All names in one table for each room."""
    parts = [
        "# Reference\n\nEvery public name, from its docstring and its types. "
        f"{len(names())} names in {len(modules())} modules; what is also in `regard` itself says so. "
        "Examples begin with `import torch, regard`.\n"
    ]
    for room, homes in ROOMS.items():
        parts.append(f"\n## {room}\n\n| module | names |\n| --- | --- |\n")
        for home in homes.split():
            found = [name for name in names() if name.module == f"regard.{home}"]
            links = " ".join(f"[`{one.name}`]({home}.md#{one.path})" for one in found)
            parts.append(f"| [regard.{home}]({home}.md) | {links} |\n")
    return "".join(parts)


def page(module: str) -> str:
    """A module: what it is, a table of its names, and each of them."""
    about = inspect.getdoc(importlib.import_module(module)) or ""
    found = [name for name in names() if name.module == module]
    rows = "".join(f"| [`{one.name}`](#{one.path}) | {cell(one.sentence)} |\n" for one in found)
    table = f"| name | what |\n| --- | --- |\n{rows}\n" if rows else ""
    elsewhere = [
        f"- [`{path}`]({one.module.removeprefix('regard.')}.md#{one.path})\n"
        for one in names()
        for path in one.also
        if path.rpartition(".")[0] == module
    ]
    others = f"Also here, and written down elsewhere:\n\n{''.join(elsewhere)}\n" if elsewhere else ""
    entries = "\n".join(map(entry, found))
    return f"# {module}\n\n{about}\n\n{table}{others}{entries}"


def entry(name: Name) -> str:
    """What the handler of docstrings shows; a value that is neither class nor function says what it is."""
    if inspect.isclass(name.value) or inspect.isfunction(name.value):
        return f"::: {name.path}\n"
    return f"## `{name.path}` {{: #{name.path} }}\n\n{_plain(name)}\n\n{facts(name)}\n"


def _plain(name: Name) -> str:
    """A signature and a docstring, or the kind of value."""
    if inspect.isclass(name.value) or inspect.isfunction(name.value):
        return f"```python\n{called(name)}\n```\n\n{inspect.getdoc(name.value) or ''}"
    text, _, examples = name.said.partition("Examples:\n")
    shown = f"\n\n**Examples:**\n\n```python\n{inspect.cleandoc(examples)}\n```" if examples else ""
    return f"A value: `{type(name.value).__name__}`. {text.strip()}{shown}"


def called(name: Name) -> str:
    """How a class is called: one argument a line where they are many."""
    try:
        signature = inspect.signature(name.value)
    except ValueError:  # an exception of Python's own
        return name.name
    arguments = [str(one).replace("'", "") for one in signature.parameters.values()]
    line = f"{name.name}({', '.join(arguments)})"
    return line if len(line) <= WIDE else f"{name.name}(\n    " + ",\n    ".join(arguments) + ",\n)"


def cell(text: str) -> str:
    """A sentence inside a table."""
    return (
        escape(text, quote=False)
        .replace("|", "&#124;")
        .replace("*", "&#42;")
        .replace("_", "&#95;")
        .replace("`", "")
    )


def facts(name: Name) -> str:
    """A line of HTML with where else, the source, the theorems and the pages."""
    parts = [
        f"Also <code>{path}</code>."
        for path in name.also
        if path.startswith("regard.") and path.count(".") == 1
    ]
    if name.place is not None:
        file, line = name.place
        parts.append(f'Source: <a href="../repository/{file}.html#__codelineno-0-{line}">{file}</a>.')
    theorems = theorems_about().get(name.name, [])
    parts += [f"Theorems: {_links(theorems, '../theorems/')}."] if theorems else []
    paths = (name.path, *name.also)
    used = sorted({page for path in paths for page in pages_about().get(path, [])})
    parts += [f"Code that uses it: {_links(used, '../')}."] if used else []
    return f'<p class="facts">{" ".join(parts)}</p>'


def _links(stems: list[str], folder: str) -> str:
    shown = ", ".join(f'<a href="{folder}{stem}.html">{stem}</a>' for stem in stems[:SHOWN])
    return shown + (f" and {len(stems) - SHOWN} more" if len(stems) > SHOWN else "")


def sources() -> set[str]:
    """Files of the repository that the reference points at."""
    found = {name.place[0] for name in names() if name.place is not None}
    assert all((ROOT / Path(file)).is_file() for file in found)
    return found
