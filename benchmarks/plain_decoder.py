"""A language model in plain torch with the weights of a LanguageModel of regard.nn: what a careful person
writes by hand, with keys that are turned once and buffers for them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.nn import AlibiPositions, LanguageModel, RotaryPositions


class PlainDecoder:
    """Embedding, pre-norm layers of attention and feed-forward, tied output; rotary, ALiBi or none."""

    def __init__(self, model: LanguageModel, longest: int) -> None:
        self.model, self.longest = model, longest
        design = model.design
        self.heads, self.width = design.heads, design.width // design.heads
        self.rotary = isinstance(design.positions, RotaryPositions)
        pairs = torch.arange(0, self.width, 2, dtype=torch.float64)
        angle = torch.arange(longest).unsqueeze(-1) * 10000.0 ** (-pairs / self.width)
        self.cos, self.sin = angle.cos().float(), angle.sin().float()
        self.mask = self._fall() if isinstance(design.positions, AlibiPositions) else None

    def _fall(self) -> Tensor:
        """What ALiBi adds to scores, (1, heads, longest, longest), with -inf on later keys."""
        places = torch.arange(self.longest)
        slopes = 2.0 ** (-8.0 * torch.arange(1, self.heads + 1) / self.heads)
        fall = -slopes.view(-1, 1, 1) * (places.unsqueeze(-1) - places)
        return fall.masked_fill(places.unsqueeze(-1) < places, -math.inf).unsqueeze(0)

    def generate(self, ids: Tensor, tokens: int) -> Tensor:
        """ids (batch, n), continued by the likeliest tokens."""
        shape = (len(self.model.decoder.layers), len(ids), self.heads, self.longest, self.width)
        keys, values = torch.empty(shape), torch.empty(shape)
        found, new, past = [ids], ids, 0
        with torch.no_grad():
            for _ in range(tokens):
                logits = self._run(new, past, keys, values)
                past += new.shape[-1]
                new = logits[:, -1].argmax(-1, keepdim=True)
                found.append(new)
        return torch.cat(found, -1)

    def _run(self, ids: Tensor, past: int, keys: Tensor, values: Tensor) -> Tensor:
        table = self.model.embedding.weight
        x = F.embedding(ids, table) * math.sqrt(table.shape[-1])
        for layer, own_keys, own_values in zip(self.model.decoder.layers, keys, values, strict=True):
            x = x + self._attend(layer, layer.attention_branch.norm(x), past, own_keys, own_values)
            ff = layer.feed_forward
            x = x + ff.outer(F.gelu(ff.inner(layer.hidden_branch.norm(x))))
        return F.linear(self.model.decoder.norm(x), table)

    def _attend(self, layer: torch.nn.Module, x: Tensor, past: int, keys: Tensor, values: Tensor) -> Tensor:
        attention = layer.attention
        both = attention.projection(x)
        q, k, v = both.unflatten(-1, (3, self.heads, self.width)).permute(2, 0, 3, 1, 4)
        now = past + x.shape[-2]
        if self.rotary:
            q, k = self._turn(q, past, now), self._turn(k, past, now)
        keys[:, :, past:now], values[:, :, past:now] = k, v
        mask = None if self.mask is None else self.mask[:, :, past:now, :now]
        causal = past == 0 and mask is None
        out = F.scaled_dot_product_attention(q, keys[:, :, :now], values[:, :, :now], mask, is_causal=causal)
        return attention.output(out.transpose(1, 2).flatten(-2))

    def _turn(self, z: Tensor, past: int, now: int) -> Tensor:
        cos, sin = self.cos[past:now], self.sin[past:now]
        a, b = z.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
