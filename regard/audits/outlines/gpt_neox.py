"""GPT-NeoX and Pythia."""

from __future__ import annotations

from torch import nn

from regard.audits.outlines.base import Said, Unsaid, layers, part, register, rotary

PACKAGE = "gpt_neox"


@register("gpt_neox")
def gpt_neox(said: Said, kind: str) -> nn.Module:
    """A table of tokens, blocks whose norms come first, and rotary positions."""
    said.only_turns()
    width, eps = said.whole("hidden_size"), said.real("layer_norm_eps", 1e-5)
    heads = said.whole("num_attention_heads")
    if width % heads:
        raise Unsaid("num_attention_heads")
    return part(
        PACKAGE,
        "GPTNeoXModel",
        embed_in=nn.Embedding(said.whole("vocab_size"), width),
        layers=layers(said.whole("num_hidden_layers"), lambda number: _block(said, width, heads, eps)),
        final_layer_norm=nn.LayerNorm(width, eps),
        rotary_emb=rotary(PACKAGE, "GPTNeoX", width // heads),
    )


def _block(said: Said, width: int, heads: int, eps: float) -> nn.Module:
    hidden, bias = said.whole("intermediate_size"), said.flag("attention_bias", True)
    attention = part(
        PACKAGE,
        "GPTNeoXAttention",
        query_key_value=nn.Linear(width, 3 * width, bias),
        dense=nn.Linear(width, width, bias),
        head_size=width // heads,
        scaling=(width // heads) ** -0.5,
    )
    mlp = part(
        PACKAGE,
        "GPTNeoXMLP",
        dense_h_to_4h=nn.Linear(width, hidden),
        dense_4h_to_h=nn.Linear(hidden, width),
    )
    return part(
        PACKAGE,
        "GPTNeoXLayer",
        input_layernorm=nn.LayerNorm(width, eps),
        post_attention_layernorm=nn.LayerNorm(width, eps),
        attention=attention,
        mlp=mlp,
    )
