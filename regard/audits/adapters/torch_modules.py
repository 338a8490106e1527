"""torch's own nn.MultiheadAttention, alone or in a layer of nn.TransformerEncoder or
nn.TransformerDecoder.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered, register
from regard.audits.adapters.calls import first_output, options_of
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.masks import Pairs, additive_pairs, closing, unmasked_pairs
from regard.audits.adapters.projections import (
    affine,
    name_inside,
    output_projection,
    parameter_names,
    parts,
    split,
)
from regard.audits.adapters.surroundings import ancestor, block_at

KNOWN = {
    "query",
    "key",
    "value",
    "key_padding_mask",
    "attn_mask",
    "need_weights",
    "average_attn_weights",
    "is_causal",
}


class MultiheadAttention(Adapter):
    """One fused projection for queries, keys and values of equal width; masks say what is closed,
    not what is open.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN)
        query, key, value = (options[name] for name in ("query", "key", "value"))
        if key is not value and not torch.equal(key, value):
            raise NotCovered(
                "its keys and its values come from different points, and a lookup is a function of the key"
            )
        points, context = as_batch(module, query), None if query is key else as_batch(module, key)
        matrices = self.matrices(model, path, module)
        pairs = torch_pairs(options, sizes_of(points, context))
        own = as_batch(module, first_output(call.output))
        return replace(
            declare_self_attention(matrices, potential_of(matrices), pairs, points, own), context=context
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        refuse_extras(module)
        heads: Any = module.num_heads
        weight: Any = module.in_proj_weight
        bias: Any = module.in_proj_bias
        fused = parts((weight.detach().mT, None if bias is None else bias.detach()), 3)
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (split(part, heads) for part in fused)
        w_o, b_o = output_projection(affine(module, "out_proj"), heads)
        return Matrices(w_q, w_k, w_v, w_o, w_q.shape[-1] ** -0.5, b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        above = ancestor(path, 1)
        layer: Any = model.get_submodule(above) if above else None
        name = path.rpartition(".")[2]
        if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
            return None
        last = "norm3" if isinstance(layer, nn.TransformerDecoderLayer) else "norm2"
        first = "norm2" if name == "multihead_attn" else "norm1"
        attention = (first, name) if layer.norm_first else (name,)
        mlp = (last if layer.norm_first else "linear1", "linear2")  # the activation may be a function
        found = block_at(model, above, attention, mlp, "norm")
        return None if found is None else replace(found, through=True)

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        own = tuple(
            name_inside(path, name)
            for name, _ in module.named_parameters(recurse=False)
            if name.startswith("in_proj")
        )
        return own + parameter_names(path, module, "out_proj")


def refuse_extras(module: nn.Module) -> None:
    """What nn.MultiheadAttention can do beyond attention among the given points."""
    if not module._qkv_same_embed_dim:
        raise NotCovered(
            "its keys or values differ in width from its queries (kdim, vdim), and a declaration has "
            "one width"
        )
    if module.bias_k is not None or module.bias_v is not None or module.add_zero_attn:
        raise NotCovered("it adds a key of its own to every sequence (add_bias_kv or add_zero_attn)")


def as_batch(module: nn.Module, tokens: Tensor) -> Tensor:
    """Tokens as (batch, n, d), however the module takes them."""
    if tokens.is_nested:
        raise NotCovered(
            "it was called with nested tensors; build nn.TransformerEncoder with enable_nested_tensor=False"
        )
    tokens = tokens.detach()
    if tokens.ndim == 2:
        return tokens.unsqueeze(0)
    return tokens if module.batch_first else tokens.transpose(0, 1)


def torch_pairs(options: dict[str, Any], sizes: tuple[int, int, int]) -> Pairs:
    """Both masks of a call as one: attn_mask (n, m) or (batch · h, n, m), key_padding_mask (batch,
    m) or (m,).
    """
    batch, _, m = sizes
    mask, padding = options.get("attn_mask"), options.get("key_padding_mask")
    if mask is None and padding is None:
        return unmasked_pairs(sizes, False, options["query"].device)
    total = torch.zeros(batch, 1, 1, m, device=options["query"].device)
    if mask is not None:
        refuse_contradiction(options, additive_mask(mask) == 0)
        total = total + (
            additive_mask(mask) if mask.ndim == 2 else additive_mask(mask).unflatten(0, (batch, -1))
        )
    if padding is not None:
        total = total + additive_mask(padding).reshape(batch, 1, 1, m)
    return additive_pairs(total, sizes)


def refuse_contradiction(options: dict[str, Any], opened: Tensor) -> None:
    """Some kernels follow the hint is_causal and some the mask."""
    if options.get("is_causal") and not torch.equal(opened, torch.ones_like(opened).tril()):
        raise NotCovered(
            "it was called with is_causal=True and an attn_mask that is not causal, and kernels differ in "
            "which of the two counts"
        )


def additive_mask(mask: Tensor) -> Tensor:
    """A mask as what is added to scores: True closes, a number is added,
    and a very negative number closes.
    """
    mask = mask.detach()
    closed = mask if mask.dtype == torch.bool else closing(mask)
    start = torch.zeros(mask.shape, device=mask.device) if mask.dtype == torch.bool else mask
    return start.masked_fill(closed, -torch.inf)


register("MultiheadAttention", adapter=MultiheadAttention(), package="torch.nn.")
