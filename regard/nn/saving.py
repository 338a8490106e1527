"""Models on disk: weights as safetensors, what they are weights of as JSON. Nothing is ever unpickled."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

import regard
from regard._written import read_object, write_object
from regard.errors import ArgumentError, MissingExtraError, RegardError
from regard.nn import design, initialization, positions, shaping
from regard.nn.models import LanguageModel, SequenceToSequence
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.potentials import base as potentials
from regard.supports import base as supports

FORMAT = 1
"""The version of what is written; a reader refuses others."""

KINDS: dict[str, type[nn.Module]] = {kind.__name__: kind for kind in (LanguageModel, SequenceToSequence, Encoder, Decoder, Transformer)}
ROOMS = (regard, design, positions, initialization, shaping, potentials, supports)
"""Where the names in a file are looked up, and nowhere else."""


def save(model: nn.Module, directory: str | Path) -> Path:
    """Write model.safetensors and config.json into a directory, each whole or not at all; what was there stays if that fails."""
    directory = Path(directory)
    described = json.dumps(configuration(model), indent=2, allow_nan=False)
    state = {name: tensor.detach().contiguous() for name, tensor in model.state_dict().items()}
    directory.mkdir(parents=True, exist_ok=True)
    write_tensors(directory / "model.safetensors", state, {"regard": described})
    write_whole(directory / "config.json", described.encode())
    return directory


def load(directory: str | Path) -> Any:
    """The model that `save` wrote; a file that is damaged, or of another model, is refused and nothing is built from half of it."""
    directory = Path(directory)
    state, notes = read_tensors(directory / "model.safetensors")
    described = _described(directory, notes)
    model = build(described)
    _check_state(directory / "model.safetensors", model.state_dict(), state)
    kinds = {name: tensor.dtype for name, tensor in state.items()}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        tensor.data = tensor.data.to(kinds.get(name, tensor.dtype))
    model.load_state_dict(state)
    return model.eval()


def configuration(model: nn.Module) -> dict[str, Any]:
    """What a model is built from, as plain values."""
    if type(model).__name__ not in KINDS:
        raise ArgumentError("model", f"is a {type(model).__name__}", f"save one of {', '.join(KINDS)}")
    arguments = {name: write_object(value) for name, value in _arguments(model).items()}
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError("model", f"has a design that cannot be written ({error})", "use potentials of regard, not functions") from None
    return {"format": FORMAT, "regard": regard.__version__, "model": type(model).__name__, "arguments": arguments}


def _arguments(model: Any) -> dict[str, Any]:
    """The arguments of the constructor."""
    if isinstance(model, LanguageModel):
        return {"design": model.design, "vocabulary": model.vocabulary, "layers": len(model.decoder.layers), "tied": model.tied}
    if isinstance(model, SequenceToSequence):
        return {"design": model.design, "source": model.source, "target": model.target, "layers": len(model.decoder.layers)}
    if isinstance(model, Transformer):
        counts = {"encoder_layers": len(model.encoder.layers), "decoder_layers": len(model.decoder.layers)}
        return {"design": model.design, **counts, "final_norm": model.final_norm}
    shared = {"design": model.design, "layers": len(model.layers), "final_norm": model.final_norm}
    return shared if isinstance(model, Encoder) else {**shared, "cross": model.cross}


def build(described: dict[str, Any]) -> nn.Module:
    """A new model, as a configuration describes it."""
    if described.get("format") != FORMAT:
        raise ArgumentError("config.json", f"has format {described.get('format')!r}", f"this version of regard reads format {FORMAT}")
    kind = KINDS.get(str(described.get("model")))
    if kind is None:
        raise ArgumentError("config.json", f"names the model {described.get('model')!r}", f"it must be one of {', '.join(KINDS)}")
    try:
        arguments = {name: read_object(value, ROOMS) for name, value in described["arguments"].items()}
        return kind(**arguments)
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if isinstance(error, RegardError):
            raise
        raise ArgumentError("config.json", f"does not describe a {kind.__name__} ({error})", "restore it from where it was saved") from None


def _described(directory: Path, notes: dict[str, str]) -> dict[str, Any]:
    """The configuration, which weights carry too: a pair that was not saved together is refused."""
    path = directory / "config.json"
    if "regard" not in notes:
        raise ArgumentError(str(directory / "model.safetensors"), "was not written by regard.nn.save", "give a directory that it wrote")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArgumentError(str(path), "does not exist", "give a directory that regard.nn.save wrote") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ArgumentError(str(path), f"cannot be read ({error})", "restore it from where it was saved") from None
    if found != json.loads(notes["regard"]) or not isinstance(found, dict):
        raise ArgumentError(str(path), "describes another model than the weights beside it", "put files together that were saved together")
    return found


def _check_state(path: Path, wanted: dict[str, Tensor], found: dict[str, Tensor]) -> None:
    missing, surplus = sorted(wanted.keys() - found.keys()), sorted(found.keys() - wanted.keys())
    if missing or surplus:
        what = f"lacks {missing[0]}" if missing else f"holds {surplus[0]}, which the model does not have"
        raise ArgumentError(str(path), what, "restore it from where it was saved")
    for name, tensor in found.items():
        if tensor.shape != wanted[name].shape:
            raise ArgumentError(
                str(path), f"holds {name} as {list(tensor.shape)}, not {list(wanted[name].shape)}", "restore it from where it was saved"
            )


# Files


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    safetensors = _safetensors()
    write_whole(path, safetensors.save({name: tensor.cpu() for name, tensor in tensors.items()}, metadata=notes))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """The tensors of a safetensors file, and its notes."""
    _safetensors()
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(str(path), framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise ArgumentError(str(path), "does not exist", "give a directory that regard wrote") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise ArgumentError(str(path), f"is damaged or no safetensors file ({error})", "restore it from where it was saved") from None


def write_whole(path: Path, content: bytes) -> None:
    """Write beside, flush to the disk, then rename: a reader sees the old file or the new one, also after a crash or on a full disk."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o666 & ~_umask())  # a temporary file is its owner's alone; what is saved is as other files are
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _safetensors() -> Any:
    try:
        import safetensors.torch as found
    except ImportError:
        raise MissingExtraError("safetensors", "hf") from None
    return found
