"""T5: scores without a scale, and a bias by relative position that the first block of a stack computes for
all.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Adapter, Block, Call, Declared, Matrices, NotCovered, register
from regard.audits.adapters.calls import first_output, hidden_states, options_of, refuse_cache
from regard.audits.adapters.declaration import declare_self_attention, potential_of, sizes_of
from regard.audits.adapters.masks import masked_pairs, refuse_blind
from regard.audits.adapters.projections import affine, name_inside, output_projection, parameter_names, split
from regard.audits.adapters.surroundings import ancestor, block_at, exists
from regard.potentials import Logarithmic, RelativeBias

KNOWN = {"hidden_states", "mask", "key_value_states", "position_bias", "past_key_values", "is_causal"}


class T5(Adapter):
    """Self-attention of encoder and decoder with the bias of their stack, cross-attention without one."""

    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        options = options_of(module, call, KNOWN)
        cross = options.get("key_value_states") is not None
        points = hidden_states(options)
        context = hidden_states(options, "key_value_states") if cross else None
        sizes = sizes_of(points, context)
        refuse_cache(module, options.get("past_key_values"), sizes[2], cross)
        pairs = masked_pairs(module, options, sizes, "mask")
        refuse_blind(pairs.allowed)  # the bias makes every mask additive
        matrices, bias = self.matrices(model, path, module), None if cross else bias_at(model, path)
        check_bias(bias, call.output[1], sizes)
        potential = potential_of(matrices) if bias is None else potential_of(matrices) + bias
        return replace(
            declare_self_attention(matrices, potential, pairs, points, first_output(call.output)),
            context=context,
        )

    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        heads: Any = module.n_heads
        scale: Any = module.scaling
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (split(affine(module, name), heads) for name in ("q", "k", "v"))
        w_o, b_o = output_projection(affine(module, "o"), heads)
        return Matrices(w_q, w_k, w_v, w_o, float(scale), b_q, b_k, b_v, b_o)

    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        above, layer = ancestor(path, 3), ancestor(path, 1)
        if not above or layer is None:
            return None
        inner = path[len(above) + 1 :]
        last = f"layer.{len(model.get_submodule(name_inside(above, 'layer'))) - 1}"  # type: ignore[arg-type]
        attention = (f"{layer[len(above) + 1 :]}.layer_norm", inner)
        return block_at(
            model, above, attention, (f"{last}.layer_norm", f"{last}.DenseReluDense"), "final_layer_norm"
        )

    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        return parameter_names(path, module, "q", "k", "v", "o")


def bias_at(model: nn.Module, path: str) -> RelativeBias:
    """The bias of a self-attention module: its own table, or that of the first block of its stack."""
    stack, inner = ancestor(path, 4), ".".join(path.split(".")[-3:])
    first = path if stack is None else name_inside(stack, f"0.{inner}")
    source: Any = model.get_submodule(first) if exists(model, first) else None
    if source is None or not source.has_relative_attention_bias:
        raise NotCovered("no first block of its stack holds the table of its position bias")
    buckets = Logarithmic(
        source.relative_attention_num_buckets, source.relative_attention_max_distance, not source.is_decoder
    )
    return RelativeBias(source.relative_attention_bias.weight.detach().mT, buckets)


def check_bias(bias: RelativeBias | None, found: Tensor, sizes: tuple[int, int, int]) -> None:
    """The bias that the module used, which it returns, must be the declared one."""
    _, n, m = sizes
    zero = (
        torch.zeros(n, 1, dtype=found.dtype, device=found.device),
        torch.zeros(m, 1, dtype=found.dtype, device=found.device),
    )
    wanted = torch.zeros_like(found) if bias is None else bias.scores(*zero)
    if not torch.equal(found.detach(), wanted.expand_as(found)):
        raise NotCovered("the position bias it was called with is not that of the first block of its stack")


register("T5Attention", "MT5Attention", adapter=T5(), package="transformers.")
