"""From a name to a model: a local directory, a GGUF file, a hub id, or the model of the extra `demo`.

Never runs code from a checkpoint.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from regard._allocation import memory
from regard.audits import own
from regard.audits.checkpoint import Checkpoint, find, first_line, read_json
from regard.audits.files import FEW, guess_type, missing_pieces, nearest_types, saved_class
from regard.errors import ArgumentError

TOKENIZERS = ("tokenizer.json", "vocab.txt", "vocab.json", "*.model", "tokenizer.*", "sentencepiece*")
"""Files without which there is no tokenizer, whatever transformers would make up."""

PACKED = 32
"""So many numbers of a matrix are in one that a quantized checkpoint stores, at most."""


def load(model: str | None) -> tuple[nn.Module, Any, str]:
    """The model, its tokenizer and its name."""
    checkpoint = find(model)
    return load_weights(checkpoint), tokenizer_of(checkpoint), checkpoint.name


def plain_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """What config.json says; nothing where a GGUF file holds everything."""
    return {} if checkpoint.quantized else read_json(checkpoint.directory / "config.json")


def config_of(checkpoint: Checkpoint) -> Any:
    """The config as transformers understands it; that of a model of regard.nn as it is."""
    plain = plain_config(checkpoint)
    if own.is_own(plain):
        return plain
    transformers = _quiet_transformers()
    try:
        if plain.get("model_type") is None and not checkpoint.quantized:
            named = {**plain, "model_type": guess_type(checkpoint.weights[0], plain)}
            return transformers.AutoConfig.for_model(**named)
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
            f"{first_line(error)})"
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
    return _build(config, torch.device("meta"), _quiet_transformers().AutoModel)


def skeleton(config: Any) -> nn.Module:
    """The model of a config without its weights, and with the buffers that it computes itself,
    such as rotary frequencies.
    """
    return _build(config, _leave_parameters_out(), _quiet_transformers().AutoModel)


def _build(config: Any, where: AbstractContextManager[Any], door: Any) -> nn.Module:
    """door: the class of transformers that makes it."""
    try:
        with where:
            made: nn.Module = door.from_config(config, trust_remote_code=False).eval()
            return made
    except Exception as error:
        found = f"transformers cannot build a model from its config ({first_line(error)})"
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
        return own.read(checkpoint.directory)
    transformers = _quiet_transformers()
    kind = saved_class(config)
    doors = {
        "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
        "ForCausalLM": transformers.AutoModelForCausalLM,
        "LMHeadModel": transformers.AutoModelForCausalLM,
    }
    door = next((door for ending, door in doors.items() if kind.endswith(ending)), transformers.AutoModel)
    return _pretrained(checkpoint, config, door)


def refuse_other_sizes(checkpoint: Checkpoint, config: Any, model: nn.Module) -> int:
    """Compare the model that a config describes, made without memory, with the file; return its numbers."""
    described, stored = sum(p.numel() for p in model.parameters()), sum(checkpoint.sizes)
    packed = PACKED if getattr(config, "quantization_config", None) else 1
    if checkpoint.sizes and described > packed * (2 * stored + FEW):
        found = f"{checkpoint.directory} has a config of {described:,} numbers and weights of {stored:,}"
        raise ArgumentError("MODEL", found, "check that config and weights belong together")
    return described


def _refuse_large(checkpoint: Checkpoint, config: Any, door: Any) -> None:
    """Compare what the config describes with the file, and with memory, before any of it is allocated."""
    model = _build(copy.deepcopy(config), torch.device("meta"), door)
    described = refuse_other_sizes(checkpoint, config, model)
    needed = 4 * described + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers())
    if needed > memory():
        found = f"takes {needed / 1e9:,.1f} GB in float32, and this process may have {memory() / 1e9:,.1f} GB"
        remedy = "use a larger machine; regard audit has --low-memory and --weights-only for such models"
        raise ArgumentError("MODEL", found, remedy)


def _pretrained(checkpoint: Checkpoint, config: Any, door: Any) -> nn.Module:
    _refuse_large(checkpoint, config, door)
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
        found = f"{checkpoint.directory} could not be loaded ({type(error).__name__}: {first_line(error)})"
        raise ArgumentError("MODEL", found, "check that config and weights belong together") from error
    if notes["missing_keys"] and all(_of_head(model, key) for key in notes["missing_keys"]):
        model = model.base_model  # the checkpoint was saved without the head that its config names
    else:
        _complete(checkpoint, notes)
    ready: nn.Module = model.eval()
    return ready


def _of_head(model: Any, key: str) -> bool:
    """Whether a tensor is of the head of a model, above the body that attention is in."""
    return model.base_model is not model and not key.startswith(f"{model.base_model_prefix}.")


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
    if not checkpoint.quantized and own.is_own(read_json(checkpoint.directory / "config.json")):
        return own.tokenizer_in(checkpoint.directory)
    transformers = _quiet_transformers()
    if not checkpoint.quantized and not any(
        match for pattern in TOKENIZERS for match in checkpoint.directory.glob(pattern)
    ):
        raise _without_tokenizer(checkpoint, "has no tokenizer")
    try:
        found = transformers.AutoTokenizer.from_pretrained(checkpoint.directory, **_way(checkpoint))
        found("a text")  # some settings are wrong only when they are used
        return found
    except Exception as error:  # as above: files of a stranger
        lacking = [] if checkpoint.quantized else missing_pieces(checkpoint.directory)
        why = f"without {' and '.join(lacking)}" if lacking else first_line(error)
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
            f"{name} cannot be used ({first_line(error)})",
            "give cpu, or cuda where there is one",
        ) from error
    return name


def _quiet_transformers() -> Any:
    """The package transformers with its progress bars and warnings turned off."""
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers
