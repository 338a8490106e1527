"""What the reference adds to a docstring: source, theorems, pages. An extension of griffe."""

from __future__ import annotations

from typing import Any

import griffe

from website.names import Name, names
from website.reference import called, facts


class Facts(griffe.Extension):
    """A line after the docstring of every public name."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[str, Name] = {name.defined: name for name in names()}

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        name = self._known.get(obj.canonical_path)
        if name is None or (obj.docstring is not None and 'class="facts"' in obj.docstring.value):
            return
        text = obj.docstring.value if obj.docstring is not None else ""
        signature = f"```python\n{called(name)}\n```\n\n" if obj.is_class else ""
        obj.docstring = griffe.Docstring(f"{signature}{text}\n\n{facts(name)}", parent=obj)
