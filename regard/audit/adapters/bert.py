"""BERT: separate affine projections, scaled dot product, output projection outside the attention module."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.audit.adapters.base import Adapter, NotCovered, refuse_unknown, register
from regard.lookups import Linear
from regard.potentials import Dot
from regard.supports import Full, Support, Where

# What transformers passes along and self-attention without a cache does not use.
HARMLESS = {"output_attentions", "output_hidden_states", "return_dict", "use_cache", "cache_position", "position_ids"}


class Bert(Adapter):
    """BertSelfAttention: query, key and value are nn.Linear of width heads · head_size."""

    def declare(self, module: nn.Module, arguments: tuple[Any, ...], options: dict[str, Any]) -> tuple[Attention, Tensor]:
        refuse_unknown(options, {"hidden_states", "attention_mask", *HARMLESS})
        hidden = arguments[0] if arguments else options["hidden_states"]
        mask = arguments[1] if len(arguments) > 1 else options.get("attention_mask")
        heads: int = module.num_attention_heads  # type: ignore[assignment]
        (w_q, b_q), (w_k, b_k), (w_v, b_v) = (split_heads(getattr(module, name), heads) for name in ("query", "key", "value"))
        potential = Dot(w_q, w_k, float(module.scaling), b_q, b_k)  # type: ignore[arg-type]
        return Attention(potential, Linear(w_v, b_v), support=support_of(mask)), hidden.unsqueeze(1)

    def own_output(self, module: nn.Module, output: Any) -> Tensor:
        context = output[0] if isinstance(output, tuple) else output
        return context.unflatten(-1, (module.num_attention_heads, -1)).transpose(1, 2)

    def output_projection(self, model: nn.Module, name: str, module: nn.Module) -> Tensor:
        dense: Any = model.get_submodule(f"{name.rsplit('.', 1)[0]}.output.dense")
        return dense.weight.detach().mT.unflatten(0, (module.num_attention_heads, -1))


def split_heads(linear: nn.Linear, heads: int) -> tuple[Tensor, Tensor | None]:
    """An nn.Linear of width heads · c as w (heads, d, c) and b (heads, c)."""
    weight = linear.weight.detach().unflatten(0, (heads, -1)).mT
    return weight, None if linear.bias is None else linear.bias.detach().unflatten(0, (heads, -1))


def support_of(mask: Any) -> Support:
    """The support of an attention mask (batch, 1, n, n): boolean, or additive with zero and very negative entries."""
    if mask is None:
        return Full()
    if not isinstance(mask, Tensor):
        raise NotCovered(f"the attention mask is a {type(mask).__name__}, not a tensor")
    if mask.dtype == torch.bool:
        return Where(mask)
    closed = mask <= torch.finfo(mask.dtype).min / 2
    if not bool((closed | (mask == 0)).all()):
        raise NotCovered("the attention mask has entries that are neither zero nor minus infinity")
    return Where(~closed)


register("BertSelfAttention", adapter=Bert())
