"""Where the report of an audit goes: a directory for each model, which no other model overwrites."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError

LONGEST = 60
"""How many letters of the names of models are in the name of a directory."""


def default_directory(command: str, models: Sequence[str]) -> Path:
    """`audit-<model>`, or `track-<first>-to-<last>`, without characters that file names do not take."""
    ends = [models[0], models[-1]] if len(models) > 1 else [*models, None][:1]
    clean = re.sub(r"[^\w.-]+", "-", "-to-".join(map(_name, ends))).strip("-.")[:LONGEST]
    return Path(f"{command}-{clean or 'model'}")


def source_of(models: Sequence[str]) -> str:
    """What tells these models from others of the same name: a fingerprint of where they are."""
    from regard.audits.checkpoint import DEMO_NAME
    from regard.audits.store import fingerprint

    paths = [str(path.absolute()) if os.path.exists(path := _path(one)) else one for one in models]
    return fingerprint([one for one in paths if one != DEMO_NAME])  # which is audited without a name, too


def refuse_other(path: Path, models: Sequence[str]) -> None:
    """Refuse to overwrite a report.json, series.json or decide.json of other models."""
    if not path.exists():
        return
    data = _read(path)
    model = data.get("model", {})
    found = model if isinstance(model, dict) and "checkpoints" not in data else data
    names = data.get("checkpoints", [model if found is data else model.get("name")])
    mine = [_name(model) for model in models] or [_name(None)]
    own = source_of(models)
    if found.get("source", own if names == mine else "") != own:
        whose = f"the report of another model ({', '.join(map(str, names))})"
        what = f"{path.parent} holds {whose if data else f'a {path.name} that cannot be read'}"
        remedy = "give another directory with --out, or delete this one if you no longer need it"
        raise ArgumentError("--out", what, remedy)


def _path(model: str) -> Path:
    from regard.audits import own

    path = Path(os.path.expanduser(model))
    return own.inside(path) if os.path.isdir(path) else path


def _name(model: str | None) -> str:
    """What a report calls a model."""
    from regard.audits import own
    from regard.audits.checkpoint import DEMO_NAME

    if model is None:
        return DEMO_NAME
    path = _path(model)
    return own.name_of(path) if os.path.isdir(path) else path.stem if os.path.isfile(path) else model


def _read(path: Path) -> dict[str, Any]:
    """What is in a report; nothing where that cannot be read."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("model", {}), (dict, str)) else {}
