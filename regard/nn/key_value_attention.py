"""Attention whose keys and values come from two sequences, and may have one pair that is no token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.attention import Attention
from regard.compute.dropout import check_share
from regard.compute.tensors import attend_tokens
from regard.errors import ArgumentError
from regard.nn.attention import check_count, check_flags, check_heads, check_kind, check_tokens, intersection
from regard.nn.mechanism import Mechanism
from regard.nn.naming import refuse_torch_names
from regard.nn.visibility import check_batch
from regard.parameters import part
from regard.potentials import Dot
from regard.supports import Full, Support


class KeyValueAttention(nn.Module):
    """x ↦ Σ_h attention_h(x; keys, values) W_o[h] + b_o with keys of width key_width and values of width
    value_width: nn.MultiheadAttention with kdim and vdim (vaswani2017, 3.2.2).

    learned=True adds one key and one value that are parameters and that every query sees (torch's
    add_bias_kv). Because not all keys are tokens, it is no map of sequences and has no declaration.
    State: queries, keys, values, output, learned_key and learned_value, and the tensors of the mechanism.

    Examples:
        >>> layer = regard.nn.KeyValueAttention(8, 2, key_width=4, value_width=6)
        >>> layer(torch.randn(1, 3, 8), torch.randn(1, 5, 4), torch.randn(1, 5, 6)).shape
        torch.Size([1, 3, 8])
    """

    def __init__(
        self,
        width: int,
        heads: int,
        *,
        key_width: int | None = None,
        value_width: int | None = None,
        mechanism: Attention = Attention(Dot()),
        bias: bool = True,
        learned: bool = False,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.key_width = width if key_width is None else key_width
        self.value_width = width if value_width is None else value_width
        check_heads(width, heads, heads)
        check_count("key_width", self.key_width)
        check_count("value_width", self.value_width)
        check_flags(bias=bias, learned=learned)
        check_share("dropout", dropout)
        self.width, self.heads, self.dropout = width, heads, float(dropout)
        self.queries, self.keys = nn.Linear(width, width, bias), nn.Linear(self.key_width, width, bias)
        self.values, self.output = nn.Linear(self.value_width, width, bias), nn.Linear(width, width, bias)
        self.learned_key = nn.Parameter(torch.empty(width)) if learned else None
        self.learned_value = nn.Parameter(torch.empty(width)) if learned else None
        self.mechanism = Mechanism(mechanism)
        self._initialize()

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        values: Tensor | None = None,
        *,
        support: Support = Full(),
        **torch_names: Any,
    ) -> Tensor:
        """Tokens (..., n, width) of x look at keys made of the context (..., m, key_width), x itself where
        there is none, and get values made of `values` (..., m, value_width), the context without them.
        """
        refuse_torch_names(torch_names, self)
        context = x if context is None else context
        values = context if values is None else values
        named = (
            ("x", x, self.width),
            ("context", context, self.key_width),
            ("values", values, self.value_width),
        )
        for name, tokens, width in named:
            check_tokens(name, tokens, width)
            check_kind(name, tokens, self)
        if values.shape[-2] != context.shape[-2]:
            found = f"has {values.shape[-2]} tokens and the context {context.shape[-2]}"
            raise ArgumentError("values", found, "give one value for each key")
        check_batch(support, context)
        mechanism = self.mechanism.value()
        allowed = self._allowed(intersection(mechanism.support, support), context.shape[-2])
        queries = self._split(self.queries(x))
        keys = self._with_learned(self._split(self.keys(context)), self.learned_key)
        looked_up = self._with_learned(self._split(self.values(values)), self.learned_value)
        share = self.dropout if self.training else 0.0
        mixed = attend_tokens(
            mechanism.potential, mechanism.normalizer, allowed, queries, keys, looked_up, None, share
        )
        return self.output(mixed.transpose(-3, -2).flatten(-2))

    def _allowed(self, support: Support, tokens: int) -> Support:
        """What queries see, the learned key included."""
        plain = self.learned_key is None or isinstance(support, Full)
        return support if plain else Besides(support, tokens)

    def _split(self, projected: Tensor) -> Tensor:
        """(..., n, h c) as (..., h, n, c)."""
        return projected.unflatten(-1, (self.heads, -1)).transpose(-3, -2)

    def _with_learned(self, tokens: Tensor, learned: Tensor | None) -> Tensor:
        """The learned one behind the others, (..., h, n + 1, c)."""
        if learned is None:
            return tokens
        one = learned.unflatten(-1, (self.heads, 1, -1)).to(tokens.dtype)
        return torch.cat([tokens, one.expand(*tokens.shape[:-2], 1, -1)], -2)

    def _initialize(self) -> None:
        for layer in (self.queries, self.keys, self.values):
            nn.init.xavier_uniform_(layer.weight)
        for learned in (self.learned_key, self.learned_value):
            if learned is not None:
                nn.init.normal_(learned, std=self.width**-0.5)
        for layer in (self.queries, self.keys, self.values, self.output):
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def extra_repr(self) -> str:
        return f"{self.width}, heads={self.heads}, key_width={self.key_width}, value_width={self.value_width}"


@dataclass(frozen=True, eq=False, repr=False)
class Besides(Support):
    """What the inner support allows among tokens, and every key behind them, at marks from `tokens` on."""

    inner: Support = part()
    tokens: int = 0

    def allows(self, queries: Tensor, keys: Tensor) -> Tensor:
        inner = self.inner.allows(queries, keys.clamp(max=self.tokens - 1))
        return inner | (keys >= self.tokens).unsqueeze(-2)
