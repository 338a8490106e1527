"""GPT-2."""

from __future__ import annotations

import torch
from torch import nn

from regard.audits.outlines.base import Outline, Said, Unsaid, layers, part, register

PACKAGE = "gpt2"


@register("gpt2")
def gpt2(said: Said, kind: str) -> nn.Module:
    """Tables of tokens and positions, and blocks whose norms come first."""
    said.refuse("add_cross_attention", "pruned_heads")
    width, eps = said.whole("n_embd"), said.real("layer_norm_epsilon", 1e-5)
    return part(
        PACKAGE,
        "GPT2Model",
        wte=nn.Embedding(said.whole("vocab_size"), width),
        wpe=nn.Embedding(said.whole("n_positions"), width),
        h=layers(said.whole("n_layer"), lambda number: _block(said, number, width, eps)),
        ln_f=nn.LayerNorm(width, eps),
    )


def _block(said: Said, number: int, width: int, eps: float) -> nn.Module:
    heads, hidden = said.whole("n_head"), said.whole("n_inner", 4 * width)
    if width % heads:
        raise Unsaid("n_head")
    scaling = (width // heads) ** -0.5 if said.flag("scale_attn_weights", True) else 1.0
    scaling /= number + 1 if said.flag("scale_attn_by_inverse_layer_idx", False) else 1
    attention = part(
        PACKAGE,
        "GPT2Attention",
        c_attn=_transposed(width, 3 * width),
        c_proj=_transposed(width, width),
        num_heads=heads,
        scaling=scaling,
        is_cross_attention=False,
    )
    return part(
        PACKAGE,
        "GPT2Block",
        ln_1=nn.LayerNorm(width, eps),
        attn=attention,
        ln_2=nn.LayerNorm(width, eps),
        mlp=part(PACKAGE, "GPT2MLP", c_fc=_transposed(width, hidden), c_proj=_transposed(hidden, width)),
    )


def _transposed(rows: int, columns: int) -> Outline:
    """A linear layer whose matrix is stored the other way."""
    made = part(PACKAGE, "Conv1D")
    made.weight = nn.Parameter(torch.empty(rows, columns))
    made.bias = nn.Parameter(torch.empty(columns))
    return made
