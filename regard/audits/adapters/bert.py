"""BERT and its relatives, and ESM: separate affine projections;
the output projection lives outside the attention module.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered, register
from regard.audits.adapters.calls import hidden_states, options_of, refuse_cache
from regard.audits.adapters.declaration import (
    declare_rotary,
    declare_self_attention,
    potential_of,
    sizes_of,
    split_output,
)
from regard.audits.adapters.masks import masked_pairs
from regard.audits.adapters.projections import affine, name_inside, output_projection, parameter_names, split
from regard.audits.adapters.rotary import Turning, fold_scale, turning_of
from regard.audits.adapters.surroundings import ancestor, block_at, exists, norm_before

KNOWN = {"hidden_states", "attention_mask", "is_causal", "past_key_values"}


class Bert(Adapter):
    """Scaled dot products of query and key; positions are in the embeddings;
    the norm comes after the residual connection.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        # A decoder's self-attention is handed the encoder's states and position_ids too, and does not look at
        # them.
        options = options_of(module, call, KNOWN | {"encoder_hidden_states", "position_ids"})
        points = hidden_states(options)
        refuse_cache(module, options.get("past_key_values"), points.shape[1])
        matrices = self.matrices(model, path, module)
        pairs = masked_pairs(module, options, sizes_of(points))
        return declare_self_attention(
            matrices, potential_of(matrices), pairs, points, split_output(call.output, module)
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        return separate_matrices(model, path, module, float(module.scaling))  # type: ignore[arg-type]

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        return block_at(
            model,
            ancestor(path, 2),
            ("attention.self", "attention.output.dense"),
            ("intermediate", "output.dense"),
            None,
        )

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return separate_names(model, path, module)

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        block = ancestor(path, 2)
        norm = norm_before(model, path, block, "output.LayerNorm", "embeddings.LayerNorm")
        return (
            None if norm is None or path != f"{block}.attention.self" or _changes_after(model, norm) else norm
        )


class BertCross(Adapter):
    """Queries from the decoder, keys and values from the encoder."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN | {"encoder_hidden_states"})
        points, context = hidden_states(options), hidden_states(options, "encoder_hidden_states")
        refuse_cache(module, options.get("past_key_values"), context.shape[1], cross=True)
        matrices = self.matrices(model, path, module)
        pairs = masked_pairs(module, options, sizes_of(points, context))
        return replace(
            declare_self_attention(
                matrices, potential_of(matrices), pairs, points, split_output(call.output, module)
            ),
            context=context,
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        return separate_matrices(model, path, module, float(module.scaling))  # type: ignore[arg-type]

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        branch = ("crossattention.self", "crossattention.output.dense")
        return block_at(model, ancestor(path, 2), branch, ("intermediate", "output.dense"), None)

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return separate_names(model, path, module)

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        return None


class Esm(Adapter):
    """Queries are scaled before they are turned by rotary positions,
    where positions are not in the embeddings; norms come first.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(
            module, call, {"hidden_states", "attention_mask", "is_causal", "position_embeddings"}
        )
        points = hidden_states(options)
        matrices, turning = self.matrices(model, path, module), self._turning(model, path, module)
        pairs = masked_pairs(module, options, sizes_of(points))
        own = split_output(call.output, module)
        if turning is None:
            return declare_self_attention(matrices, potential_of(matrices), pairs, points, own)
        return replace(declare_rotary(matrices, turning, options, pairs, call), own=own)

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        width: Any = module.attention_head_size
        turning = self._turning(model, path, module)
        scale = width**-0.5 * float(module.scaling)  # type: ignore[arg-type]
        return separate_matrices(
            model, path, module, scale if turning is None else fold_scale(turning, scale, width)
        )

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        attention = ("attention.LayerNorm", "attention.self", "attention.output.dense")
        mlp = ("LayerNorm", "intermediate", "output.dense")
        return block_at(model, ancestor(path, 2), attention, mlp, "emb_layer_norm_after")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return separate_names(model, path, module)

    def _turning(self, model: nn.Module, path: str, module: nn.Module) -> Turning | None:
        kind = module.position_embedding_type
        if kind not in ("rotary", "absolute"):
            raise NotCovered(f"its positions are of the kind {kind}, which this adapter does not know")
        return turning_of(model, path) if kind == "rotary" else None


def separate_matrices(
    model: nn.Module,
    path: str,
    module: nn.Module,
    scale: float,
    heads: int | None = None,
    beside: str = "output.dense",
) -> Matrices:
    """query, key and value of the module, and the dense layer of its sibling `output`."""
    own: Any = module
    heads = int(own.num_attention_heads) if heads is None else heads
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = (
        split(affine(module, name), heads) for name in ("query", "key", "value")
    )
    w_o, b_o = output_projection(affine(model, _dense(path, beside)), heads)
    return Matrices(w_q, w_k, w_v, w_o, scale, b_q, b_k, b_v, b_o)


def separate_names(
    model: nn.Module, path: str, module: nn.Module, beside: str = "output.dense"
) -> tuple[str, ...]:
    """The names of what `separate_matrices` reads."""
    own = parameter_names(path, module, "query", "key", "value")
    return own + parameter_names("", model, _dense(path, beside))


def _dense(path: str, beside: str) -> str:
    above = ancestor(path, 1)
    if above is None:
        raise NotCovered("the output projection lives outside the module; audit the model that contains it")
    return name_inside(above, beside)


def _changes_after(model: nn.Module, norm: str) -> bool:
    """Whether a norm of embeddings is not their end: ELECTRA may project them, RoCBert may add to them."""
    embeddings = ancestor(norm, 1) or ""
    kind = type(model.get_submodule(embeddings)).__name__
    return kind == "RoCBertEmbeddings" or (
        kind == "ElectraEmbeddings"
        and exists(model, name_inside(ancestor(embeddings, 1) or "", "embeddings_project"))
    )


RELATIVES = (
    "Bert",
    "Roberta",
    "Camembert",
    "XLMRoberta",
    "Electra",
    "Ernie",
    "Data2VecText",
    "RoCBert",
    "BertGeneration",
)
"""Families whose layers are word for word those of BERT."""

register(*(f"{name}SelfAttention" for name in RELATIVES), adapter=Bert(), package="transformers.")
register(*(f"{name}CrossAttention" for name in RELATIVES), adapter=BertCross(), package="transformers.")
register("EsmSelfAttention", adapter=Esm(), package="transformers.")
