"""One layer of an encoder or a decoder: attention and feed-forward,
each with its residual connection and its norm.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from regard._kinds import names_wrong_kinds
from regard.errors import ArgumentError
from regard.maps import Affine, Compose, Map, Residual
from regard.nn.attention import check_kind, check_tokens
from regard.nn.cache import ContextCache, LayerCache
from regard.nn.declaration import norm_map
from regard.nn.design import Design
from regard.nn.naming import refuse_torch_names
from regard.nn.shaping import Shaping
from regard.supports import Causal, Full, Support


class Branch(nn.Module):
    """A residual connection: norm(λx + γ f(x)), or λx + γ f(norm(x)) with norm_first;
    λ = γ = 1 without shaping.

    Examples:
        >>> from regard.nn import Branch, Design
        >>> branch, x = Branch(Design(8, 2)), torch.randn(3, 8)
        >>> torch.equal(branch.after(x, torch.zeros(3, 8)), x)  # x + 0
        True
    """

    @names_wrong_kinds
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.norm = design.normalization()
        self.dropout = nn.Dropout(design.dropout)
        self.norm_first, self.shaping = design.norm_first, design.shaping

    def before(self, x: Tensor) -> Tensor:
        """What the branch reads."""
        return self.norm(x) if self.norm_first else x

    def after(self, x: Tensor, found: Tensor) -> Tensor:
        """The output of the residual connection, from its input x and the value f of its branch."""
        found = self.dropout(found) if self.dropout.training else found
        x = (
            x + found
            if self.shaping is None
            else torch.add(self.shaping.kept * x, found, alpha=self.shaping.branch)
        )
        return x if self.norm_first else self.norm(x)

    def around(self, inner: Map) -> tuple[Map, ...]:
        """The same as maps, one after the other."""
        norm = norm_map(self.norm)
        read = Compose((norm, inner)) if self.norm_first else inner
        steps = (
            (Residual(read),)
            if self.shaping is None
            else _weigh_branches(read, self.shaping, norm.weight.shape[-1])
        )
        return steps if self.norm_first else (*steps, norm)


def _weigh_branches(inner: Map, shaping: Shaping, width: int) -> tuple[Map, ...]:
    """λx + γf(x) as λ(x + (γ/λ) f(x))."""
    unit = torch.eye(width, dtype=torch.float64)
    return Residual(Compose((inner, Affine(unit * (shaping.branch / shaping.kept))))), Affine(
        unit * shaping.kept
    )


class EncoderLayer(nn.Module):
    """Self-attention, then feed-forward (vaswani2017, 3.1).

    Examples:
        >>> from regard.nn import Design, EncoderLayer
        >>> layer, x = EncoderLayer(Design(8, 2)).double().eval(), torch.randn(4, 8, dtype=torch.float64)
        >>> torch.allclose(regard.declare(layer)(x), layer(x))  # the layer as a map
        True
    """

    @names_wrong_kinds
    def __init__(self, design: Design) -> None:
        super().__init__()
        self.design = design
        self.attention, self.feed_forward = design.self_attention(), design.feed_forward()
        self.attention_branch, self.hidden_branch = Branch(design), Branch(design)

    def forward(self, x: Tensor, *, support: Support = Full(), **torch_names: Any) -> Tensor:
        """Tokens (..., n, width); support: what they may see beyond the mechanism's own support,
        e.g. Padding.
        """
        refuse_torch_names(torch_names, self)
        check_tokens("x", x, self.design.width)
        if x.dtype != self.attention_branch.norm.weight.dtype:
            check_kind("x", x, self)
        x = self.attention_branch.after(x, self.attention(self.attention_branch.before(x), support=support))
        return self.hidden_branch.after(x, self.feed_forward(self.hidden_branch.before(x)))

    def declare(self) -> Compose:
        """The layer as a map of sequences, in float64 and cut off from its parameters."""
        attention, hidden = self.attention.declare(), self.feed_forward.declare()
        return Compose((*self.attention_branch.around(attention), *self.hidden_branch.around(hidden)))


class DecoderLayer(nn.Module):
    """Self-attention to the past, attention to a context unless cross=False, then feed-forward (vaswani2017,
    3.1). support: what tokens see of each other, where it is not their past.

    Examples:
        >>> from regard.nn import DecoderLayer, Design
        >>> layer, x = DecoderLayer(Design(8, 2), cross=False).eval(), torch.randn(1, 4, 8)
        >>> torch.allclose(layer(x)[:, :2], layer(x[:, :2]), atol=1e-6)  # the past alone counts
        True
    """

    @names_wrong_kinds
    def __init__(self, design: Design, *, cross: bool = True, support: Support = Causal()) -> None:
        super().__init__()
        self.design, self.support = design, support
        self.attention, self.feed_forward = design.self_attention(support), design.feed_forward()
        self.attention_branch, self.hidden_branch = Branch(design), Branch(design)
        self.cross_attention = design.cross_attention() if cross else None
        self.cross_branch = Branch(design) if cross else None

    def forward(
        self,
        x: Tensor,
        context: Tensor | None = None,
        *,
        support: Support = Full(),
        context_support: Support = Full(),
        cache: tuple[LayerCache, ContextCache] | None = None,
        **torch_names: Any,
    ) -> Tensor:
        """Tokens (..., n, width) and the context (..., m, width) they may look at; supports:
        what both may see beyond their own.
        """
        refuse_torch_names(torch_names, self)
        check_tokens("x", x, self.design.width)
        if x.dtype != self.attention_branch.norm.weight.dtype:
            check_kind("x", x, self)
        past, known = (None, None) if cache is None else cache
        x = self.attention_branch.after(
            x, self.attention(self.attention_branch.before(x), support=support, cache=past)
        )
        if self.cross_attention is not None and self.cross_branch is not None:
            found = self.cross_attention(
                self.cross_branch.before(x), require_context(context), support=context_support, cache=known
            )
            x = self.cross_branch.after(x, found)
        return self.hidden_branch.after(x, self.feed_forward(self.hidden_branch.before(x)))

    def declare(self, context: Tensor | None = None) -> Compose:
        """The layer as a map of its tokens, for one context (m, width),
        in float64 and cut off from its parameters.
        """
        steps = self.attention_branch.around(self.attention.declare())
        if self.cross_attention is not None and self.cross_branch is not None:
            steps += self.cross_branch.around(self.cross_attention.declare(require_context(context)))
        return Compose((*steps, *self.hidden_branch.around(self.feed_forward.declare())))


def require_context(context: Tensor | None) -> Tensor:
    """The context, or an error that says that cross-attention needs one."""
    if context is None:
        raise ArgumentError(
            "context",
            "is missing",
            "give the tokens that cross-attention looks at, or build with cross=False",
        )
    return context
