"""BERT, RoBERTa and others with their layers, and ELECTRA."""

from __future__ import annotations

from torch import nn

from regard.audits.outlines.base import Said, Unsaid, layers, part, register

NAMES = {
    "bert": ("bert", "Bert"),
    "roberta": ("roberta", "Roberta"),
    "camembert": ("camembert", "Camembert"),
    "xlm-roberta": ("xlm_roberta", "XLMRoberta"),
    "electra": ("electra", "Electra"),
}
"""The package of each type, and how the names of its classes begin."""


@register(*NAMES)
def bert(said: Said, kind: str) -> nn.Module:
    """Embeddings, blocks whose norms come after their branches, and a pooler where the family has one."""
    said.refuse("is_decoder", "add_cross_attention", "pruned_heads")
    package, prefix = NAMES[kind]
    width, eps = said.whole("hidden_size"), said.real("layer_norm_eps", 1e-12)
    narrow = said.whole("embedding_size") if kind == "electra" else width
    inside = {"embeddings": _embeddings(said, package, prefix, narrow, eps)}
    if narrow != width:
        inside["embeddings_project"] = nn.Linear(narrow, width)
    blocks = layers(said.whole("num_hidden_layers"), lambda number: _block(said, package, prefix, width, eps))
    inside["encoder"] = part(package, f"{prefix}Encoder", layer=blocks)
    if kind != "electra":
        inside["pooler"] = part(package, f"{prefix}Pooler", dense=nn.Linear(width, width))
    return part(package, f"{prefix}Model", **inside)


def _embeddings(said: Said, package: str, prefix: str, width: int, eps: float) -> nn.Module:
    return part(
        package,
        f"{prefix}Embeddings",
        word_embeddings=nn.Embedding(said.whole("vocab_size"), width),
        position_embeddings=nn.Embedding(said.whole("max_position_embeddings"), width),
        token_type_embeddings=nn.Embedding(said.whole("type_vocab_size", 2), width),
        LayerNorm=nn.LayerNorm(width, eps),
    )


def _block(said: Said, package: str, prefix: str, width: int, eps: float) -> nn.Module:
    heads, hidden = said.whole("num_attention_heads"), said.whole("intermediate_size")
    if width % heads:
        raise Unsaid("num_attention_heads")
    projections = {name: nn.Linear(width, width) for name in ("query", "key", "value")}
    facts = {"num_attention_heads": heads, "scaling": (width // heads) ** -0.5}
    attention = part(
        package,
        f"{prefix}Attention",
        self=part(package, f"{prefix}SelfAttention", **projections, **facts),
        output=part(
            package, f"{prefix}SelfOutput", dense=nn.Linear(width, width), LayerNorm=nn.LayerNorm(width, eps)
        ),
    )
    return part(
        package,
        f"{prefix}Layer",
        attention=attention,
        intermediate=part(package, f"{prefix}Intermediate", dense=nn.Linear(width, hidden)),
        output=part(
            package, f"{prefix}Output", dense=nn.Linear(hidden, width), LayerNorm=nn.LayerNorm(width, eps)
        ),
    )
