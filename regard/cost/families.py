"""From a config of transformers to an architecture: what its fields are called, and what its family leaves unsaid."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from regard.cost.account import Cost
from regard.cost.architecture import Architecture
from regard.cost.costing import assess
from regard.cost.sizes import Sizes
from regard.errors import ArgumentError

Config = Mapping[str, Any]
_REMEDY = "build the model of it and give that: cost(model, sizes)"

_families: dict[str, Callable[[Config], dict[str, Any]]] = {}


def family(*kinds: str) -> Callable[[Callable[[Config], dict[str, Any]]], Callable[[Config], dict[str, Any]]]:
    """Decorator: what configs of these model types say, as fields of an Architecture."""

    def register(reader: Callable[[Config], dict[str, Any]]) -> Callable[[Config], dict[str, Any]]:
        _families.update(dict.fromkeys(kinds, reader))
        return reader

    return register


def known(config: Config) -> bool:
    """Whether the model type has a closed form here."""
    return config.get("model_type") in _families


def architecture_of(config: Config) -> Architecture:
    """The widths that a config declares."""
    kind = config.get("model_type")
    if kind is None:
        raise ArgumentError("config", "has no model_type", "give the config.json of a model of transformers, or an Architecture")
    if kind not in _families:
        raise ArgumentError("config", f"is of the model type {kind!r}, which has no closed form here", _REMEDY)
    return Architecture(**_families[kind](config), dtype=_dtype(config))


@assess.rule(Mapping)
def _assess(config: Config, sizes: Sizes, inputs: Any) -> Cost:
    found = assess.one(architecture_of(config), sizes, inputs)
    assert isinstance(found, Cost)
    return found


def number(config: Config, *names: str, default: int | None = None) -> int:
    """The first of these fields that is there; an error names them where none is and nothing is assumed."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if value is None:
        raise ArgumentError("config", f"has no {' or '.join(names)}", "add it, or give the config.json that was saved with the model")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError("config", f"has {value!r} for {names[0]}", "give a positive whole number")
    return value


def _dtype(config: Config) -> torch.dtype:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ArgumentError("config", f"has the dtype {name!r}", "give one of torch, such as float32 or bfloat16")
    return found


def _named(config: Config, *endings: str) -> bool:
    """Whether the class of the model, where the config names one, ends like this."""
    return any(str(name).endswith(endings) for name in config.get("architectures") or ())


def _sizes(config: Config) -> dict[str, Any]:
    """Fields that most families have, by any of their names."""
    return {
        "width": number(config, "hidden_size", "n_embd", "dim", "d_model"),
        "layers": number(config, "num_hidden_layers", "n_layer", "n_layers"),
        "heads": number(config, "num_attention_heads", "n_head", "n_heads"),
        "vocabulary": number(config, "vocab_size"),
    }


def _language_head(config: Config, tied: bool, *endings: str) -> dict[str, Any]:
    """The head of a model of language, where the config names a class that has one."""
    there = _named(config, *(endings or ("ForCausalLM", "LMHeadModel")))
    return {"outputs": number(config, "vocab_size") if there else 0, "tied": bool(config.get("tie_word_embeddings", tied))}


@family("gpt2")
def _gpt2(config: Config) -> dict[str, Any]:
    sizes = _sizes(config)
    return {
        **sizes,
        "hidden": number(config, "n_inner", default=4 * sizes["width"]),
        "positions": number(config, "n_positions", "max_position_embeddings", default=1024),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias"), True),
        "norms": 4,
        "outer_norms": 2,
        **_language_head(config, True),
    }


@family("llama", "mistral", "qwen2", "qwen3", "gemma")
def _llama(config: Config) -> dict[str, Any]:
    sizes, kind = _sizes(config), config["model_type"]
    biased = bool(config.get("attention_bias", False))
    width = config.get("head_dim") or {"qwen3": 128, "gemma": 256}.get(kind)
    return {
        **sizes,
        "hidden": number(config, "intermediate_size"),
        "groups": number(config, "num_key_value_heads", default=8 if kind == "mistral" else sizes["heads"]),
        "head_width": width,
        "gated": True,
        "window": config.get("sliding_window", 4096) if kind == "mistral" else None,
        "projection_bias": biased or kind == "qwen2",
        "output_bias": biased,
        "hidden_bias": bool(config.get("mlp_bias", False)),
        "norms": 2,
        "outer_norms": 1,
        "head_norms": kind == "qwen3",
        **_language_head(config, kind == "gemma"),
    }


@family("bert", "roberta")
def _bert(config: Config) -> dict[str, Any]:
    causal_or_masked = _named(config, "ForMaskedLM")
    rest = [name for name in config.get("architectures") or () if not str(name).endswith(("Model", "ForMaskedLM"))]
    if rest:
        raise ArgumentError("config", f"is of a {rest[0]}, whose head has no closed form here", _REMEDY)
    return {
        **_sizes(config),
        "hidden": number(config, "intermediate_size"),
        "causal": bool(config.get("is_decoder", False)),
        "positions": number(config, "max_position_embeddings") + number(config, "type_vocab_size"),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias", "head_bias"), True),
        "norms": 4,
        "outer_norms": 4 if causal_or_masked else 2,
        "pooler": not causal_or_masked,
        "transform": causal_or_masked,
        **_language_head(config, True, "ForMaskedLM"),
    }


@family("distilbert")
def _distilbert(config: Config) -> dict[str, Any]:
    masked = _named(config, "ForMaskedLM")
    return {
        **_sizes(config),
        "hidden": number(config, "hidden_dim"),
        "causal": False,
        "positions": number(config, "max_position_embeddings", default=512),
        **dict.fromkeys(("projection_bias", "output_bias", "hidden_bias", "head_bias"), True),
        "norms": 4,
        "outer_norms": 4 if masked else 2,
        "transform": masked,
        **_language_head(config, True, "ForMaskedLM"),
    }


@family("gpt_neox")
def _gpt_neox(config: Config) -> dict[str, Any]:
    biased = bool(config.get("attention_bias", True))
    return {
        **_sizes(config),
        "hidden": number(config, "intermediate_size"),
        "projection_bias": biased,
        "output_bias": biased,
        "hidden_bias": True,
        "norms": 4,
        "outer_norms": 2,
        **_language_head(config, False),
    }
