"""What a module of transformers hands to its attention function, argument by argument: each is used,
known to be harmless, or refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from torch import Tensor

from regard.errors import ArgumentError

HARMLESS: Mapping[str, str] = {
    "position_ids": "the mask and the rotation of queries and keys have used them",
    "position_embeddings": "queries and keys come rotated",
    "cache_position": "keys and values come from the cache already",
    "past_key_values": "keys and values come from the cache already",
    "use_cache": "keys and values come from the cache already",
    "output_hidden_states": "asks for something outside attention",
    "output_router_logits": "asks for something outside attention",
    "num_items_in_batch": "scales a loss",
    "return_dict": "says how outputs are packed",
    "deterministic": "chooses among kernels of another implementation",
}
"""Arguments that do not change what attention computes, each with the reason."""

REMEDIES: Mapping[str, str] = {
    "cu_seq_lens_q": "mark packed texts by position_ids that restart at zero, or by an attention_mask",
    "cu_seq_lens_k": "mark packed texts by position_ids that restart at zero, or by an attention_mask",
    "head_mask": "prune heads in the model instead",
    "cache": "paged caches belong to transformers' own implementations; use model.generate(...)",
}


@dataclass(frozen=True)
class Arguments:
    """Arguments that change the result, under the names that transformers gives them."""

    dropout: float = 0.0
    scaling: float | None = None
    is_causal: bool | None = None
    position_bias: Tensor | None = None
    softcap: float | None = None
    sliding_window: int | None = None
    s_aux: Tensor | None = None
    output_attentions: bool | None = None

    @staticmethod
    def of(options: Mapping[str, Any]) -> Arguments:
        """The arguments among keyword options; what is neither understood nor known to be harmless is
        refused, unless it is None.
        """
        for name, value in options.items():
            if name not in UNDERSTOOD and name not in HARMLESS and value is not None:
                remedy = REMEDIES.get(
                    name, "leave it out, or use an implementation of transformers that knows it"
                )
                raise ArgumentError(
                    name, f"is {type(value).__name__}, which this attention does not know", remedy
                )
        return Arguments(**{name: value for name, value in options.items() if name in UNDERSTOOD})


UNDERSTOOD = frozenset(field.name for field in fields(Arguments))
