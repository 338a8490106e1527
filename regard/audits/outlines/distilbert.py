"""DistilBERT."""

from __future__ import annotations

from torch import nn

from regard.audits.outlines.base import Said, Unsaid, layers, part, register

PACKAGE = "distilbert"


@register("distilbert")
def distilbert(said: Said, kind: str) -> nn.Module:
    """Embeddings and blocks whose norms come after their branches."""
    said.refuse("pruned_heads", "sinusoidal_pos_embds")
    width = said.whole("dim")
    embeddings = part(
        PACKAGE,
        "Embeddings",
        word_embeddings=nn.Embedding(said.whole("vocab_size"), width),
        position_embeddings=nn.Embedding(said.whole("max_position_embeddings"), width),
        LayerNorm=nn.LayerNorm(width, 1e-12),
    )
    blocks = layers(said.whole("n_layers"), lambda number: _block(said, width))
    stack = part(PACKAGE, "Transformer", layer=blocks)
    return part(PACKAGE, "DistilBertModel", embeddings=embeddings, transformer=stack)


def _block(said: Said, width: int) -> nn.Module:
    heads, hidden = said.whole("n_heads"), said.whole("hidden_dim")
    if width % heads:
        raise Unsaid("n_heads")
    projections = {name: nn.Linear(width, width) for name in ("q_lin", "k_lin", "v_lin", "out_lin")}
    facts = {"n_heads": heads, "scaling": (width // heads) ** -0.5}
    return part(
        PACKAGE,
        "TransformerBlock",
        attention=part(PACKAGE, "DistilBertSelfAttention", **projections, **facts),
        sa_layer_norm=nn.LayerNorm(width, 1e-12),
        ffn=part(PACKAGE, "FFN", lin1=nn.Linear(width, hidden), lin2=nn.Linear(hidden, width)),
        output_layer_norm=nn.LayerNorm(width, 1e-12),
    )
