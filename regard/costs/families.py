"""From a config of transformers to an architecture: what its fields are called,
and what its family leaves unsaid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from regard._check import describe
from regard._written import parsed
from regard.costs.account import Cost
from regard.costs.architecture import Architecture
from regard.costs.costing import assess
from regard.costs.sizes import Sizes
from regard.errors import ArgumentError

Config = Mapping[str, Any]
_REMEDY = "build the model of it and give that: cost(model, sizes)"

Reader = Callable[[Config], dict[str, Any]]
LAYER_TYPES = ("full_attention", "sliding_attention")
CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")

_families: dict[str, Reader] = {}
_endings: dict[str, tuple[str, ...]] = {}


def family(*kinds: str, heads: tuple[str, ...]) -> Callable[[Reader], Reader]:
    """Decorator: what configs of these model types say, as fields of an Architecture; heads:
    endings of the classes that have one.
    """

    def register(reader: Reader) -> Reader:
        _families.update(dict.fromkeys(kinds, reader))
        _endings.update(dict.fromkeys(kinds, ("Model", *heads)))
        return reader

    return register


def has_closed_form(config: Config) -> bool:
    """Whether the class of the model has a closed form here."""
    kind = config.get("model_type")
    return isinstance(kind, str) and kind in _families and ending(config) is not None


def class_name(config: Config) -> str | None:
    """The class of the model, where the config names one."""
    names = config.get("architectures")
    names = [names] if isinstance(names, str) else [] if names is None else names
    if (
        not isinstance(names, (list, tuple))
        or len(names) > 1
        or not all(isinstance(name, str) for name in names)
    ):
        raise ArgumentError(
            "config",
            f"has {names!r} for architectures",
            'give a list with the name of one class, as ["BertModel"]',
        )
    return names[0] if names else None


def ending(config: Config) -> str | None:
    """What the name of the class adds to that of its family, Model where no class is named;
    None where that has no closed form.
    """
    name, start = class_name(config), config["model_type"].replace("_", "")
    found = "Model" if name is None else name[len(start) :] if name.lower().startswith(start) else None
    return found if found in _endings[config["model_type"]] else None


def architecture_of(config: Config) -> Architecture:
    """The widths that a config declares."""
    kind = config.get("model_type")
    if kind is None:
        raise ArgumentError(
            "config",
            "has no model_type",
            "give the config.json of a model of transformers, or an Architecture",
        )
    if not isinstance(kind, str):
        raise ArgumentError("config", f"has {kind!r} for model_type", 'give a name, such as "llama"')
    if kind not in _families:
        raise ArgumentError(
            "config", f"is of the model type {kind!r}, which has no closed form here", _REMEDY
        )
    if ending(config) is None:
        raise ArgumentError(
            "config", f"is of a {class_name(config)}, which has no closed form as a {kind}", _REMEDY
        )
    refuse_cross_attention(config)
    _refuse_bidirectional(config)
    return Architecture(**_families[kind](config), dtype=_dtype(config))


def refuse_cross_attention(config: Config) -> None:
    """A config does not say how long the other sequence is,
    and a run without one leaves that attention out.
    """
    if flag(config, "add_cross_attention", False):
        remedy = (
            "build the model and give that with the sequence it looks at: cost(model, sizes, inputs={..., "
            "'encoder_hidden_states': ...})"
        )
        raise ArgumentError(
            "config", "has add_cross_attention, and what is looked at has no size here", remedy
        )


def _refuse_bidirectional(config: Config) -> None:
    if config.get("use_bidirectional_attention") is not None and flag(
        config, "use_bidirectional_attention", False
    ):
        raise ArgumentError(
            "config", "has use_bidirectional_attention, which has no closed form here", _REMEDY
        )


@assess.rule(Mapping)
def _assess(config: Config, sizes: Sizes, inputs: Any) -> Cost:
    return _counted(architecture_of(config), sizes, inputs)


@assess.rule(Path)
@assess.rule(str)
def _assess_file(path: Path | str, sizes: Sizes, inputs: Any) -> Cost:
    """The config.json at a path, or in the directory there."""
    place = Path(path).expanduser()
    place = place / "config.json" if place.is_dir() else place
    try:
        config = parsed(place.read_bytes())
    except (OSError, ValueError) as error:
        raise ArgumentError(
            "subject",
            f"{place} cannot be read as JSON ({type(error).__name__})",
            "give a config.json, or a directory that holds one",
        ) from error
    return _counted(config, sizes, inputs)


@assess.rule(object)
def _assess_config(config: Any, sizes: Sizes, inputs: Any) -> Cost:
    """A config of transformers, which gives itself as a dict; nothing else is known."""
    if not (callable(getattr(config, "to_dict", None)) and hasattr(config, "model_type")):
        raise ArgumentError(
            "subject",
            f"is {describe(config)}",
            "give a declaration, a map, a torch.nn.Module, an Architecture, the config of a model, or a path",
        )
    return _counted(config.to_dict(), sizes, inputs)


def _counted(config: Any, sizes: Sizes, inputs: Any) -> Cost:
    found = assess.one(config, sizes, inputs)
    assert isinstance(found, Cost)
    return found


def number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these fields that is there; an error names them where none is and nothing is assumed."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise ArgumentError(
            "config",
            f"has no {' or '.join(names)}",
            "add it, or give the config.json that was saved with the model",
        )
    return _whole(names[0], value, 1)


def optional(config: Config, name: str, default: int | None) -> int | None:
    """A number that may be missing."""
    return default if config.get(name) is None else number(config, name)


def flag(config: Config, name: str, default: bool) -> bool:
    """A field that is true or false; words and numbers are refused, for "false" is true to Python."""
    value = config.get(name, default)
    if not isinstance(value, bool):
        raise ArgumentError("config", f"has {value!r} for {name}", "give true or false")
    return value


def _whole(name: str, value: Any, least: int) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ArgumentError("config", f"has {value!r} for {name}", "give a positive whole number")
    return value


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ArgumentError(
            "config", f"has the dtype {name!r}", "give one of torch, such as float32 or bfloat16"
        )
    return found


def labels(config: Config) -> int:
    """How many classes a classifier tells apart: as many as have names, two where nothing is said."""
    names, stated = config.get("id2label"), optional(config, "num_labels", None)
    if names is None:
        return stated or 2
    if not isinstance(names, Mapping) or not names or stated not in (None, len(names)):
        told = "" if stated is None else f" and {stated} for num_labels"
        raise ArgumentError("config", f"has {names!r} for id2label{told}", "give one name for each class")
    return len(names)


def _sizes(config: Config) -> dict[str, Any]:
    """Fields that most families have, by any of their names."""
    return {
        "width": number(config, "hidden_size", "n_embd", "dim", "d_model"),
        "layers": number(config, "num_hidden_layers", "n_layer", "n_layers"),
        "heads": number(config, "num_attention_heads", "n_head", "n_heads"),
        "vocabulary": number(config, "vocab_size"),
    }


def _decoder_head(config: Config, tied: bool) -> dict[str, Any]:
    """The head of a model that sees the past, as its class has it: it reads every token."""
    match ending(config):
        case "ForCausalLM" | "LMHeadModel":
            return {
                "outputs": number(config, "vocab_size"),
                "tied": flag(config, "tie_word_embeddings", tied),
            }
        case "ForSequenceClassification":
            return {"outputs": labels(config)}
        case "ForTokenClassification":
            return {"outputs": labels(config), "head_bias": True}
        case "ForQuestionAnswering":
            return {"outputs": 2, "head_bias": True}
    return {}


def _encoder_head(config: Config, pooled: bool) -> dict[str, Any]:
    """The head of a model that sees everything; pooled:
    whether the model without a head has a matrix on its first token.
    """
    match ending(config):
        case "ForMaskedLM":
            tied = flag(config, "tie_word_embeddings", True)
            return {
                "outputs": number(config, "vocab_size"),
                "tied": tied,
                "transform": True,
                "outer_norms": 4,
                "head_bias": True,
            }
        case "ForSequenceClassification":
            return {"outputs": labels(config), "pooler": True, "head_bias": True}
        case "ForTokenClassification" | "ForQuestionAnswering":
            return {"outputs": labels(config), "head_bias": True}
    return {"pooler": pooled}


@family("gpt2", heads=("LMHeadModel", *CLASSIFIERS))
def _gpt2(config: Config) -> dict[str, Any]:
    sizes = _sizes(config)
    return {
        **sizes,
        "hidden": number(config, "n_inner", default=4 * sizes["width"]),
        "positions": number(config, "n_positions", "max_position_embeddings", default=1024),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias"), True),
        "norms": 4,
        "outer_norms": 2,
        **_decoder_head(config, True),
    }


@family("llama", "mistral", "qwen2", "qwen3", "gemma", heads=("ForCausalLM", *CLASSIFIERS))
def _llama(config: Config) -> dict[str, Any]:
    sizes, kind = _sizes(config), config["model_type"]
    biased = flag(config, "attention_bias", False) and kind in (
        "llama",
        "qwen3",
        "gemma",
    )  # the others do not read it
    return {
        **sizes,
        "hidden": number(config, "intermediate_size"),
        "groups": number(config, "num_key_value_heads", default=8 if kind == "mistral" else sizes["heads"]),
        "head_width": optional(config, "head_dim", {"qwen3": 128, "gemma": 256}.get(kind)),
        "gated": True,
        **_window(config, sizes["layers"]),
        "projection_bias": biased or kind == "qwen2",
        "output_bias": biased,
        "hidden_bias": flag(config, "mlp_bias", False) and kind == "llama",
        "norms": 2,
        "outer_norms": 1,
        "head_norms": kind == "qwen3",
        **_decoder_head(config, kind == "gemma"),
    }


def _window(config: Config, layers: int) -> dict[str, Any]:
    """How far tokens see, and in how many layers they see no farther; a window that is null is none."""
    kind = config["model_type"]
    if kind not in ("mistral", "qwen2", "qwen3") or (
        kind != "mistral" and not flag(config, "use_sliding_window", False)
    ):
        return {}
    window = optional(config, "sliding_window", None if "sliding_window" in config else 4096)
    return (
        {}
        if window is None
        else {
            "window": window,
            "windowed": layers if kind == "mistral" else _layers_with_window(config, layers),
        }
    )


def _layers_with_window(config: Config, layers: int) -> int:
    """Layers with the window: those that are listed as such, or all from the layer max_window_layers on."""
    kinds = config.get("layer_types")
    if kinds is None:
        return max(0, layers - _whole("max_window_layers", config.get("max_window_layers", 28), 0))
    if (
        not isinstance(kinds, (list, tuple))
        or len(kinds) != layers
        or not all(kind in LAYER_TYPES for kind in kinds)
    ):
        raise ArgumentError(
            "config",
            f"has {kinds!r} for layer_types",
            f"give one of {' and '.join(LAYER_TYPES)} for each of {layers} layers",
        )
    return kinds.count("sliding_attention")


@family("bert", "roberta", heads=("ForMaskedLM", *CLASSIFIERS))
def _bert(config: Config) -> dict[str, Any]:
    return {
        **_sizes(config),
        "hidden": number(config, "intermediate_size"),
        "causal": flag(config, "is_decoder", False),
        "positions": number(config, "max_position_embeddings") + number(config, "type_vocab_size"),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias"), True),
        "norms": 4,
        "outer_norms": 2,
        **_encoder_head(config, True),
    }


@family("distilbert", heads=("ForMaskedLM", *CLASSIFIERS))
def _distilbert(config: Config) -> dict[str, Any]:
    return {
        **_sizes(config),
        "hidden": number(config, "hidden_dim"),
        "causal": False,
        "positions": number(config, "max_position_embeddings", default=512),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias"), True),
        "norms": 4,
        "outer_norms": 2,
        **_encoder_head(config, False),
    }


@family("gpt_neox", heads=("ForCausalLM", *CLASSIFIERS))
def _gpt_neox(config: Config) -> dict[str, Any]:
    biased = flag(config, "attention_bias", True)
    return {
        **_sizes(config),
        "hidden": number(config, "intermediate_size"),
        "projection_bias": biased,
        "output_bias": biased,
        "hidden_bias": True,
        "norms": 4,
        "outer_norms": 2,
        **_decoder_head(config, False),
    }
