"""Models on disk: weights as safetensors, what they are weights of as JSON. Nothing is ever unpickled."""

from __future__ import annotations

import hashlib
import inspect
import json
from pathlib import Path
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn

import regard
from regard._files import write_together, write_whole
from regard._written import parsed, read_object, write_object
from regard.errors import ArgumentError, MissingExtraError
from regard.nn import (
    design,
    fixed_points,
    initialization,
    log_determinant,
    positions,
    promises,
    scores,
    shaping,
)
from regard.nn.averaging import Averaging
from regard.nn.declared import Declared
from regard.nn.deep import Deep
from regard.nn.guaranteed import Fixed, Guaranteed
from regard.nn.invertible import Invertible
from regard.nn.memory import Memory
from regard.nn.models import LanguageModel, SequenceToSequence
from regard.nn.offset import Offset
from regard.nn.orthogonal import NormBounded, Orthogonal, OrthogonalMixing
from regard.nn.promises import Promised
from regard.nn.reflective import Reflective
from regard.nn.stacks import Decoder, Encoder, Transformer
from regard.nn.structure import changes, differences, undrawn
from regard.potentials import base as potentials
from regard.supports import base as supports

FORMAT = 2
"""The version of what is written; a reader refuses others."""

PROMISED = (
    Averaging,
    Fixed,
    Guaranteed,
    Memory,
    NormBounded,
    Offset,
    Orthogonal,
    OrthogonalMixing,
    Reflective,
)
CONTRACTING = (Declared, Deep, Invertible)
KINDS: dict[str, type[nn.Module]] = {
    kind.__name__: kind
    for kind in (LanguageModel, SequenceToSequence, Encoder, Decoder, Transformer, *PROMISED, *CONTRACTING)
}
ROOMS = (
    regard,
    *(regard.lookups, regard.maps, regard.measure, regard.moments, regard.normalizers, regard.potentials),
    *(design, positions, initialization, shaping, potentials, supports),
    *(regard.nonexpansive, regard.fixed_point, promises, scores, fixed_points, log_determinant),
)
"""Where the names in a file are looked up, and nowhere else."""


def save(model: nn.Module, directory: str | Path) -> Path:
    """Write model.safetensors and config.json into a directory, both or neither;
    what was there stays if that fails.

    Examples:
        >>> import tempfile
        >>> from regard.nn import Design, Encoder, load, save
        >>> encoder, x = Encoder(Design(8, 2), 1).eval(), torch.randn(1, 3, 8)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     again = load(save(encoder, place)).eval()
        >>> torch.equal(again(x), encoder(x))
        True
    """
    directory = Path(directory)
    state = model.state_dict()
    described = json.dumps({**configuration(model), "sha256": checksum(state)}, indent=2, allow_nan=False)
    _check_description(model, json.loads(described))
    tensors = tensor_bytes(
        state, {"regard": described}
    )  # one note: the order of several would differ from file to file
    directory.mkdir(parents=True, exist_ok=True)
    write_together({directory / "model.safetensors": tensors, directory / "config.json": described.encode()})
    return directory


def load(directory: str | Path) -> Any:
    """The model that `save` wrote; a file that is damaged, or of another model,
    is refused and nothing is built from half of it. So is a model whose promise its weights do not keep.

    Examples:
        >>> import tempfile
        >>> from regard.nn import Orthogonal, load, save
        >>> with tempfile.TemporaryDirectory() as place:
        ...     load(save(Orthogonal(4, 4), place)).certificate().value <= 1  # proved again
        True
    """
    directory = Path(directory)
    state, notes = read_tensors(directory / "model.safetensors")
    described = _read_configuration(directory, notes)
    model = blank(described)
    wrong = differences(model.state_dict(), state)
    if not wrong and described.get("sha256") != checksum(state):
        wrong = ["is damaged: its tensors are not those that were saved"]
    if wrong:
        raise ArgumentError(
            str(directory / "model.safetensors"), wrong[0], "restore it from where it was saved"
        )
    model.load_state_dict(state, assign=True)
    _freeze(model, described)
    if isinstance(model, (Promised, Invertible, Deep)) or _promising(model):
        model.keep()
    return model.eval()


def _promising(model: nn.Module) -> TypeGuard[LanguageModel]:
    return isinstance(model, LanguageModel) and model.design.promise is not None


def _freeze(model: nn.Module, described: dict[str, Any]) -> None:
    """Parameters are trained or kept as they were when they were saved."""
    frozen, known = described.get("frozen"), dict(model.named_parameters())
    if not isinstance(frozen, list) or any(name not in known for name in frozen):
        raise ArgumentError(
            "config.json", f"names the frozen parameters {frozen!r}", "restore it from where it was saved"
        )
    for name, parameter in known.items():
        parameter.requires_grad_(name not in frozen)


def configuration(model: nn.Module) -> dict[str, Any]:
    """What a model is built from, as plain values."""
    name = type(model).__name__
    if KINDS.get(name) is not type(model):
        found = (
            f"is a {name}" if name not in KINDS else f"is a {name} of {type(model).__module__}, not regard's"
        )
        raise ArgumentError("model", found, f"save one of {', '.join(KINDS)}")
    arguments = _written(model)
    try:
        json.dumps(arguments, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            "model",
            f"has a design that cannot be written ({error})",
            "use potentials of regard, not functions",
        ) from None
    frozen = [path for path, parameter in model.named_parameters() if not parameter.requires_grad]
    return {
        "format": FORMAT,
        "regard": regard.__version__,
        "model": name,
        "arguments": arguments,
        "frozen": frozen,
    }


def _written(model: nn.Module) -> dict[str, Any]:
    """The arguments of the constructor as plain values; layers inside by their own arguments."""
    return {name: _plain(value) for name, value in _arguments(model).items()}


def _plain(value: Any) -> Any:
    if isinstance(value, nn.ModuleList):
        return [_plain(layer) for layer in value]
    if not isinstance(value, nn.Module):
        return write_object(value)
    name = type(value).__name__
    if KINDS.get(name) is not type(value):
        found = f"is made of a {name}, and a file cannot describe what that computes"
        raise ArgumentError("model", found, "save its state_dict, or declare it: Declared(map)")
    return {"model": name, "arguments": _written(value)}


def _read(value: Any) -> Any:
    """An argument from plain values; a list is a stack of layers."""
    if isinstance(value, list):
        return [_read(layer) for layer in value]
    if isinstance(value, dict) and "model" in value:
        return KINDS[value["model"]](**_read_all(value["arguments"]))
    with torch.device("cpu"):  # the numbers of a design are real
        return read_object(value, ROOMS)


def _read_all(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: _read(value) for name, value in arguments.items()}


def _arguments(model: Any) -> dict[str, Any]:
    """The arguments of the constructor."""
    if isinstance(model, Declared):
        return {"map": model.value()}
    if isinstance(model, (Deep, Invertible)):
        return _contracting(model)
    if isinstance(model, Promised):
        names = inspect.signature(type(model)).parameters
        return {name: model.bias is not None if name == "bias" else getattr(model, name) for name in names}
    if isinstance(model, LanguageModel):
        return {
            "design": model.design,
            "vocabulary": model.vocabulary,
            "layers": len(model.decoder.layers),
            "tied": model.tied,
        }
    if isinstance(model, SequenceToSequence):
        return {
            "design": model.design,
            "source": model.source,
            "target": model.target,
            "layers": len(model.decoder.layers),
        }
    if isinstance(model, Transformer):
        counts = {"encoder_layers": len(model.encoder.layers), "decoder_layers": len(model.decoder.layers)}
        return {"design": model.design, **counts, "final_norm": model.final_norm, "support": model.support}
    shared = {"design": model.design, "layers": len(model.layers), "final_norm": model.final_norm}
    decoder = {} if isinstance(model, Encoder) else {"cross": model.cross, "support": model.support}
    return {**shared, **decoder}


def _contracting(model: Deep | Invertible) -> dict[str, Any]:
    inner = {name: getattr(model.contraction, name) for name in ("f", "norm", "domain")}
    if isinstance(model, Invertible):
        return {**inner, "log_determinant": model.log_determinant, "accelerate": model.accelerate}
    own = {name: getattr(model, name) for name in ("tolerance", "accelerate", "injected")}
    return {**inner, **own}


def _check_description(model: nn.Module, described: dict[str, Any]) -> None:
    """A model that was changed after it was built is not what its design says, and would not be read back."""
    made = blank(described)
    wrong = changes(made, model)
    if wrong:
        remedy = "build it from a design that says so, or save its state_dict"
        raise ArgumentError("model", f"{wrong[0]}; it was changed after it was built", remedy)


def blank(described: dict[str, Any]) -> nn.Module:
    """A model as a configuration describes it, without numbers: nothing is drawn and nothing takes memory."""
    with undrawn():
        return build(described)


def build(described: dict[str, Any]) -> nn.Module:
    """A new model, as a configuration describes it."""
    if described.get("format") != FORMAT:
        raise ArgumentError(
            "config.json",
            f"has format {described.get('format')!r}",
            f"this version of regard reads format {FORMAT}",
        )
    kind = KINDS.get(str(described.get("model")))
    if kind is None:
        raise ArgumentError(
            "config.json",
            f"names the model {described.get('model')!r}",
            f"it must be one of {', '.join(KINDS)}",
        )
    try:
        return kind(**_read_all(described["arguments"]))
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        raise ArgumentError(
            "config.json",
            f"does not describe a {kind.__name__} ({error})",
            "restore it from where it was saved",
        ) from None


def _read_configuration(directory: Path, notes: dict[str, str]) -> dict[str, Any]:
    """The configuration, which weights carry too: a pair that was not saved together is refused."""
    path = directory / "config.json"
    if "regard" not in notes:
        raise ArgumentError(
            str(directory / "model.safetensors"),
            "was not written by regard.nn.save",
            "give a directory that it wrote",
        )
    try:
        found = parsed(path.read_bytes())
    except FileNotFoundError:
        raise ArgumentError(
            str(path), "does not exist", "give a directory that regard.nn.save wrote"
        ) from None
    except (OSError, ValueError) as error:
        raise ArgumentError(
            str(path), f"cannot be read ({error})", "restore it from where it was saved"
        ) from None
    if not isinstance(found, dict) or found != _parse_notes(directory, notes["regard"]):
        raise ArgumentError(
            str(path),
            "describes a different model than the weights beside it",
            "keep files together that were saved together",
        )
    return found


def _parse_notes(directory: Path, text: str) -> Any:
    """The configuration as the weights carry it."""
    try:
        return parsed(text)
    except ValueError as error:
        path = str(directory / "model.safetensors")
        raise ArgumentError(
            path, f"has a damaged header ({error})", "restore it from where it was saved"
        ) from None


# Files


def checksum(tensors: dict[str, Tensor]) -> str:
    """SHA-256 of names, kinds of numbers, shapes and numbers."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        found.update(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode())
        found.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def tensor_bytes(tensors: dict[str, Tensor], notes: dict[str, str]) -> bytes:
    """The content of a safetensors file."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    places = [tensor.data_ptr() for tensor in plain.values() if tensor.numel()]
    if len(set(places)) < len(places):
        raise ArgumentError(
            "model",
            "uses one tensor under two names, which a file cannot express",
            "save its state_dict with torch.save",
        )
    found: bytes = _safetensors().save(plain, metadata=notes)
    return found


def write_tensors(path: Path, tensors: dict[str, Tensor], notes: dict[str, str]) -> None:
    """A safetensors file, whole or not at all."""
    write_whole(path, tensor_bytes(tensors, notes))


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
        raise ArgumentError(
            str(path), f"is damaged or not a safetensors file ({error})", "restore it from where it was saved"
        ) from None


def _safetensors() -> Any:
    try:
        import safetensors.torch as found
    except ImportError:
        raise MissingExtraError("safetensors", "hf") from None
    return found
