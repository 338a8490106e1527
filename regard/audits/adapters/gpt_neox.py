"""GPT-NeoX and Pythia: queries, keys and values interleaved by head, rotary positions on some coordinates."""

from __future__ import annotations

from typing import Any

from torch import nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, register
from regard.audits.adapters.decoding import declare_decoder
from regard.audits.adapters.projections import affine, output_projection, parameter_names, parts, split
from regard.audits.adapters.rotary import fold_scale, turning_of
from regard.audits.adapters.surroundings import ancestor, block_at


class GptNeoX(Adapter):
    """Each head's columns are its query, its key and its value;
    attention and mlp may both read the block's input.
    """

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        return declare_decoder(self, model, path, module, call, "layer_past")

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        width: Any = module.head_size
        heads = module.get_submodule("dense").in_features // width
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = parts(split(affine(module, "query_key_value"), heads), 3)
        w_o, b_o = output_projection(affine(module, "dense"), heads)
        scale = fold_scale(turning_of(model, path), float(module.scaling), width)  # type: ignore[arg-type]
        return Matrices(w_q, w_k, w_v, w_o, scale, b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        mlp = ("post_attention_layernorm", "mlp")
        return block_at(model, ancestor(path, 1), ("input_layernorm", "attention"), mlp, "final_layer_norm")

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "query_key_value", "dense")


register("GPTNeoXAttention", adapter=GptNeoX(), package="transformers.")
