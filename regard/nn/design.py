"""Design: what all layers of a Transformer have in common, as one value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from regard._object import Object
from regard.attention import Attention
from regard.compute.dropout import check_share
from regard.errors import ArgumentError
from regard.maps import Activation, Gelu, Normalize
from regard.nn.attention import MultiHeadAttention, check_flags, check_heads, intersection
from regard.nn.feed_forward import FeedForward, check_feed_forward
from regard.nn.initialization import Initialization, ScaledNormal
from regard.nn.mechanism import check_mechanism
from regard.nn.positions import NoPositions, Positions, RotaryPositions, XPosPositions
from regard.nn.promises import Promise
from regard.nn.shaping import Shaping
from regard.norms import TokenMax
from regard.potentials import Dot
from regard.supports import Full, Support


@dataclass(frozen=True, eq=False, repr=False)
class Design(Object):
    """width, heads, kv_heads: of the attention; hidden: of the feed-forward layer, 4 · width where it is
    None.

    mechanism: any Attention without projections; positions: how order is known; norm: Normalize() is
    LayerNorm, Normalize(centered=False) RMSNorm; norm_first: before each branch (pre-norm) or after each
    residual connection (post-norm); shaping: see regard.nn.shaped.
    promise: a constant in token-max norm, from points to logits, that a LanguageModel keeps whatever its
    weights are (PromisedDecoderLayer); its matrices are then square and orthogonal, and norm, activation,
    hidden and bias are not used.
    dropout: the share of numbers dropped in embeddings, branches and hidden layers while training;
    attention_dropout: the share of attention weights (MultiHeadAttention).

    Examples:
        >>> from regard.nn import Design, RotaryPositions
        >>> design = Design(width=64, heads=8, kv_heads=2, positions=RotaryPositions(), gated=True)
        >>> design.inner_width, design.replace(heads=4).heads
        (256, 4)
    """

    width: int
    heads: int
    kv_heads: int | None = None
    hidden: int | None = None
    mechanism: Attention = Attention(Dot())
    positions: Positions = NoPositions()
    activation: Activation = Gelu()
    gated: bool = False
    norm: Normalize = Normalize()
    norm_first: bool = True
    bias: bool = True
    dropout: float = 0.0
    initialization: Initialization = ScaledNormal()
    shaping: Shaping | None = None
    promise: Promise | None = None
    attention_dropout: float = 0.0

    def __post_init__(self) -> None:
        check_heads(self.width, self.heads, self.heads if self.kv_heads is None else self.kv_heads)
        check_mechanism(self.mechanism)
        check_feed_forward(self.width, self.inner_width, self.gated, self.dropout)
        check_flags(norm_first=self.norm_first, bias=self.bias)
        check_share("attention_dropout", self.attention_dropout)
        for name, kind in (
            ("positions", Positions),
            ("activation", Activation),
            ("norm", Normalize),
            ("initialization", Initialization),
        ):
            if not isinstance(value := getattr(self, name), kind):
                raise ArgumentError(name, f"is {value!r}", f"give a {kind.__name__} value")
        if self.shaping is not None and not isinstance(self.shaping, Shaping):
            raise ArgumentError("shaping", f"is {self.shaping!r}", "give a Shaping value, or None")
        if self.promise is not None:
            check_promise(self.promise)
            if self.attention_dropout > 0:
                found = "is above zero, and a promise is about rows that are laws"
                raise ArgumentError("attention_dropout", found, "leave it out, or the promise")
        if isinstance(self.positions, (RotaryPositions, XPosPositions)) and self.width // self.heads % 2:
            found = f"turn pairs of coordinates and heads have the odd width {self.width // self.heads}"
            raise ArgumentError("positions", found, "use heads of an even width, or other positions")
        if self.norm.weight is not None or self.norm.bias is not None:
            raise ArgumentError("norm", "has weights of its own", "leave them out: the layers learn them")

    @property
    def inner_width(self) -> int:
        """The width of the feed-forward layer."""
        return 4 * self.width if self.hidden is None else self.hidden

    def self_attention(self, support: Support = Full()) -> MultiHeadAttention:
        """Attention of a sequence to itself, at its positions."""
        mechanism = self.mechanism.replace(support=intersection(self.mechanism.support, support))
        if self.shaping is not None:
            mechanism = mechanism.replace(potential=self._scaled_potential())
        return self._attention(self.positions.placed(mechanism, self.heads), self.shaping is not None)

    def cross_attention(self) -> MultiHeadAttention:
        """Attention to another sequence, whose positions are not compared with one's own."""
        return self._attention(self.mechanism.replace(support=Full()), False)

    def _attention(self, mechanism: Attention, shaped: bool) -> MultiHeadAttention:
        return MultiHeadAttention(
            self.width,
            self.heads,
            kv_heads=self.kv_heads,
            mechanism=mechanism,
            bias=self.bias,
            shaped=shaped,
            dropout=self.attention_dropout,
        )

    def _scaled_potential(self) -> Dot:
        if not isinstance(self.mechanism.potential, Dot):
            name = type(self.mechanism.potential).__name__
            raise ArgumentError(
                "shaping",
                f"is for dot products and the potential is {name}",
                "use Attention(Dot()), or no shaping",
            )
        assert self.shaping is not None
        return self.mechanism.potential.replace(
            scale=self.shaping.scale(self.width, self.width // self.heads)
        )

    def feed_forward(self) -> FeedForward:
        """The layer between attentions."""
        return FeedForward(
            self.width,
            self.inner_width,
            activation=self.activation,
            gated=self.gated,
            bias=self.bias,
            dropout=self.dropout,
        )

    def normalization(self) -> nn.Module:
        """A norm layer with weights to learn."""
        if self.norm.centered:
            return nn.LayerNorm(self.width, self.norm.eps, bias=self.bias)
        return nn.RMSNorm(self.width, self.norm.eps)


def check_promise(promise: Any) -> None:
    """The promise of a language model: in token-max norm, which does not see how long a text is."""
    if not isinstance(promise, Promise) or not isinstance(promise.norm, TokenMax):
        raise ArgumentError("promise", f"is {promise!r}", "give Promise(TokenMax(), value), or None")


def shaped(design: Design, temperature: float = 1.0, branch: float | None = None) -> Design:
    """A design with attention I + P - uniform, residual branches λx + γf(x) and weights of variance 1/width
    (noci2023, 3).

    Covariances of tokens then follow a stochastic differential equation in layer/width and do not collapse as
    the network gets deep.

    Examples:
        >>> from regard.nn import Design, Encoder, shaped
        >>> Encoder(shaped(Design(16, 2)), layers=4)(torch.randn(1, 3, 16)).shape
        torch.Size([1, 3, 16])
    """
    from regard.nn.initialization import UnitVariance

    options: dict[str, Any] = {} if branch is None else {"branch": branch}
    return design.replace(shaping=Shaping(temperature, **options), initialization=UnitVariance())
