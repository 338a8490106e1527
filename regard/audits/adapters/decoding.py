"""What decoders with rotary positions share: hidden states in, no cache, a mask,
and queries and keys that are turned.
"""

from __future__ import annotations

from torch import nn

from regard.audits.adapters.base import Adapter, Call, Declared
from regard.audits.adapters.calls import hidden_states, options_of, refuse_cache
from regard.audits.adapters.declaration import declare_rotary, sizes_of
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.rotary import turning_of

KNOWN = {"hidden_states", "attention_mask", "position_embeddings", "position_ids", "is_causal"}


def declare_decoder(
    adapter: Adapter, model: nn.Module, path: str, module: nn.Module, call: Call, cache: str
) -> Declared:
    """The declaration of one call; `cache` is the name of the argument that keys of earlier calls would
    come in.
    """
    options = options_of(module, call, KNOWN | {cache})
    points = hidden_states(options)
    refuse_cache(module, options.get(cache), points.shape[1])
    pairs = masked_pairs(module, options, sizes_of(points))
    return declare_rotary(
        adapter.matrices(model, path, module), turning_of(model, path), options, pairs, call
    )
