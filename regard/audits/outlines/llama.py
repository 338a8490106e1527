"""Llama, Mistral, Qwen2, Gemma and Gemma 2: grouped queries, rotary positions, gated hidden layers."""

from __future__ import annotations

from torch import nn

from regard.audits.outlines.base import Outline, Said, layers, part, register, rotary, weighted

PREFIXES = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "gemma": "Gemma", "gemma2": "Gemma2"}
"""How the names of classes begin."""
SHIFTED = ("gemma", "gemma2")
"""Families whose norms multiply by 1 + weight."""


@register(*PREFIXES)
def llama(said: Said, kind: str) -> nn.Module:
    """A table of tokens, blocks whose norms come first, and rotary positions."""
    said.only_turns()
    width = said.whole("hidden_size")
    return part(
        kind,
        f"{PREFIXES[kind]}Model",
        embed_tokens=nn.Embedding(said.whole("vocab_size"), width),
        layers=layers(said.whole("num_hidden_layers"), lambda number: _block(said, kind, width)),
        norm=_norm(said, kind, width),
        rotary_emb=rotary(kind, PREFIXES[kind], _head_width(said, kind)),
    )


def _block(said: Said, kind: str, width: int) -> nn.Module:
    names = ["input_layernorm", "post_attention_layernorm"]
    if kind == "gemma2":
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    hidden = said.whole("intermediate_size")
    bias = said.flag("mlp_bias", False) if kind == "llama" else False
    mlp = part(
        kind,
        f"{PREFIXES[kind]}MLP",
        gate_proj=nn.Linear(width, hidden, bias),
        up_proj=nn.Linear(width, hidden, bias),
        down_proj=nn.Linear(hidden, width, bias),
    )
    norms = {name: _norm(said, kind, width) for name in names}
    return part(
        kind, f"{PREFIXES[kind]}DecoderLayer", self_attn=_attention(said, kind, width), mlp=mlp, **norms
    )


def _attention(said: Said, kind: str, width: int) -> Outline:
    own, heads = _head_width(said, kind), said.whole("num_attention_heads")
    groups = said.whole("num_key_value_heads", heads if kind == "llama" else None)
    bias = kind not in ("mistral", "qwen2") and said.flag("attention_bias", False)
    inner = bias or kind == "qwen2"
    facts: dict[str, float | None] = {"head_dim": own, "scaling": own**-0.5}
    if kind == "gemma2":
        facts["scaling"] = said.real("query_pre_attn_scalar", 256) ** -0.5
        facts["attn_logit_softcapping"] = said.perhaps("attn_logit_softcapping", 50.0)
    return part(
        kind,
        f"{PREFIXES[kind]}Attention",
        q_proj=nn.Linear(width, heads * own, inner),
        k_proj=nn.Linear(width, groups * own, inner),
        v_proj=nn.Linear(width, groups * own, inner),
        o_proj=nn.Linear(heads * own, width, bias),
        **facts,
    )


def _head_width(said: Said, kind: str) -> int:
    usual = None if kind in SHIFTED else said.whole("hidden_size") // said.whole("num_attention_heads")
    return said.whole("head_dim", usual)


def _norm(said: Said, kind: str, width: int) -> Outline:
    name = "eps" if kind in SHIFTED else "variance_epsilon"
    return weighted(kind, f"{PREFIXES[kind]}RMSNorm", width, **{name: said.real("rms_norm_eps", 1e-6)})
