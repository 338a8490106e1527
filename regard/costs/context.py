"""The context of a model: how many tokens it takes, and whether its positions are a table that ends there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

FIELDS = (
    "max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_len", "seq_length", "n_ctx",
)  # fmt: skip
"""Fields of configs that hold the length of the context, in the order in which they are read."""
TABLES = {"bert": 512, "roberta": 512, "distilbert": 512, "gpt2": 1024}
"""Model types with a closed form that look positions up in a table, with the length that transformers takes
where a config does not name one.
"""


@dataclass(frozen=True)
class Context:
    """tokens: how many a model takes; source: what says so; table: whether positions are looked up in a table
    of that length, so that the model cannot run on more.

    Examples:
        >>> from regard.costs.context import context_of
        >>> context_of({"model_type": "llama", "max_position_embeddings": 2048})
        Context(tokens=2048, source='max_position_embeddings', table=False)
        >>> context_of({"model_type": "gpt2", "n_positions": 1024}).table
        True
    """

    tokens: int
    source: str
    table: bool


def context_of(config: Mapping[str, Any], model: nn.Module | None = None) -> Context | None:
    """The context of a transformers config; None where it names none. model: the module of the config, for
    families without a closed form.
    """
    kind = str(config.get("model_type"))
    named = _named(config)
    if kind in TABLES:
        tokens, source = named or (TABLES[kind], f"the default of {kind}")
        return Context(tokens - _offset(config), source, True)
    rows = [] if model is None else list(_rows(model))
    if named is None:
        return Context(min(usable for _, usable in rows), "the table of positions", True) if rows else None
    tokens, source = named
    own = [usable for count, usable in rows if count >= tokens]  # others are of pictures, or of another part
    return Context(min([tokens, *own]), source, bool(own))


def _named(config: Mapping[str, Any]) -> tuple[int, str] | None:
    """The length that a config names, or its part about text, with the name of the field."""
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        for name in FIELDS:
            value = part.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value, name
    return None


def _offset(config: Mapping[str, Any]) -> int:
    """Rows of the table that no token takes: RoBERTa counts from the row after that of padding."""
    padding = config.get("pad_token_id", 1)
    return int(padding) + 1 if config.get("model_type") == "roberta" and isinstance(padding, int) else 0


def _rows(model: nn.Module) -> Iterator[tuple[int, int]]:
    """How many rows each table of positions has, and for how many tokens: rows up to padding are for none."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and _of_positions(path.rpartition(".")[2]):
            padding = module.padding_idx
            yield module.num_embeddings, module.num_embeddings - (0 if padding is None else padding + 1)


def _of_positions(name: str) -> bool:
    return name == "wpe" or ("position" in name and "relative" not in name)
