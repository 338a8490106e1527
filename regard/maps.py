"""Maps of sequences, as values: what stands around attention in a network.

Each is called on tokens (n, d) and is declared once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._heads import mix_heads
from regard._object import Object
from regard.attention import Attention
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.parameters import Tokens, parameter, part, shared


class Map(Object):
    """A map of sequences of tokens. Abstract."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The value at a sequence (..., n, d)."""


Mapping = Map | Attention
"""What the algebra combines."""


@dataclass(frozen=True, eq=False, repr=False)
class Compose(Map):
    """x ↦ f_k(… f_1(x)): the first of `maps` acts first."""

    maps: tuple[Mapping, ...] = part()

    def __post_init__(self) -> None:
        _mappings("maps", self.maps)

    def __call__(self, x: Tensor) -> Tensor:
        for inner in self.maps:
            x = inner(x)
        return x


@dataclass(frozen=True, eq=False, repr=False)
class Added(Map):
    """x ↦ Σ_k f_k(x): every one of `maps` acts on the same sequence."""

    maps: tuple[Mapping, ...] = part()

    def __post_init__(self) -> None:
        _mappings("maps", self.maps)

    def __call__(self, x: Tensor) -> Tensor:
        first, *rest = (inner(x) for inner in self.maps)
        for value in rest:
            if value.shape != first.shape:
                found = f"take {list(x.shape)} to {list(first.shape)} and to {list(value.shape)}"
                raise ArgumentError("maps", found, "a sum needs maps that give values of one shape")
        return sum(rest, first)


@dataclass(frozen=True, eq=False, repr=False)
class Residual(Map):
    """x ↦ x + f(x)."""

    map: Mapping = part()

    def __post_init__(self) -> None:
        _mapping("map", self.map)

    def __call__(self, x: Tensor) -> Tensor:
        value = self.map(x)
        if value.shape[-2:] != x.shape[-2:]:
            found = f"takes {list(x.shape[-2:])} to {list(value.shape[-2:])}"
            raise ArgumentError(
                "map", found, "a residual connection needs a map that keeps the shape of a sequence"
            )
        return x + value


@dataclass(frozen=True, eq=False, repr=False)
class Heads(Map):
    """x ↦ Σ_h attention(x)_h w_o[h] + b_o: the heads of an attention (h, n, e) are joined and mixed; w_o (h,
    e, d).
    """

    attention: Attention = part()
    w_o: Tensor = parameter(rank=2)
    b_o: Tensor | None = shared(default=None)

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Attention):
            raise ArgumentError("attention", f"is a {type(self.attention).__name__}", "give an Attention")
        _exactly("w_o", self.w_o, 3, "(h, e, d)")
        _exactly("b_o", self.b_o, 1, "(d,)", self.w_o.shape[-1])

    def __call__(self, x: Tensor) -> Tensor:
        value = mix_heads(self.attention(x), self.w_o)
        return value if self.b_o is None else value + self.b_o


@dataclass(frozen=True, eq=False, repr=False)
class Affine(Map):
    """x_i ↦ wᵀx_i + b for each token; w (d, e)."""

    w: Tensor = parameter(rank=2, widths=(Tokens.ALL, None))
    b: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _exactly("w", self.w, 2, "(d, e)")
        _exactly("b", self.b, 1, "(e,)", self.w.shape[-1])

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.w if self.b is None else x @ self.w + self.b


@dataclass(frozen=True, eq=False, repr=False)
class Normalize(Map):
    """x_i ↦ γ (x_i - mean) / √(variance + eps) + β for each token; centered=False leaves the mean:
    RMSNorm (ba2016), (zhang2019).
    """

    eps: float = 1e-5
    weight: Tensor | None = parameter(rank=1, widths=(Tokens.ALL,), default=None)
    bias: Tensor | None = parameter(rank=1, widths=(Tokens.ALL,), default=None)
    centered: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.eps, (int, float)):
            raise ArgumentError(
                "eps",
                f"is a {type(self.eps).__name__}",
                "give a number; scale and shift are weight= and bias=",
            )
        if not self.eps >= 0:
            raise ArgumentError("eps", f"is {self.eps}", "give a number that is not negative")
        _exactly("weight", self.weight, 1, "(d,)")
        _exactly("bias", self.bias, 1, "(d,)", None if self.weight is None else len(self.weight))

    def __call__(self, x: Tensor) -> Tensor:
        for name, value in (("weight", self.weight), ("bias", self.bias)):
            if value is not None and len(value) != x.shape[-1]:
                raise ArgumentError(
                    name,
                    f"has width {len(value)} and tokens have {x.shape[-1]}",
                    "give one number for each coordinate",
                )
        x = x - x.mean(-1, keepdim=True) if self.centered else x
        x = x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        x = x if self.weight is None else x * self.weight
        return x if self.bias is None else x + self.bias


class Activation(Object):
    """A function of one number. Abstract."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The value at each entry."""


@dataclass(frozen=True, eq=False, repr=False)
class Relu(Activation):
    """max(x, 0)."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@dataclass(frozen=True, eq=False, repr=False)
class Gelu(Activation):
    """x Φ(x), Φ the normal distribution function; tanh=True is the approximation of it (hendrycks2016)."""

    tanh: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh" if self.tanh else "none")


@dataclass(frozen=True, eq=False, repr=False)
class Silu(Activation):
    """x σ(slope · x); the slope 1.702 is the quick form of GELU."""

    slope: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) if self.slope == 1.0 else x * torch.sigmoid(self.slope * x)


@dataclass(frozen=True, eq=False, repr=False)
class Tanh(Activation):
    """tanh x."""

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@dataclass(frozen=True, eq=False, repr=False)
class Pointwise(Map):
    """x ↦ activation of every entry."""

    activation: Activation

    def __post_init__(self) -> None:
        if not isinstance(self.activation, Activation):
            raise ArgumentError(
                "activation", f"is {self.activation!r}", "give Relu(), Gelu(), Silu() or Tanh()"
            )

    def __call__(self, x: Tensor) -> Tensor:
        return self.activation(x)


@dataclass(frozen=True, eq=False, repr=False)
class Gated(Map):
    """x_i ↦ w_outᵀ(activation(wᵀx_i + b) · (w_gateᵀx_i + b_gate)):
    the gated feed-forward layer (shazeer2020).
    """

    activation: Activation
    w: Tensor = parameter(rank=2, widths=(Tokens.ALL, None))
    w_gate: Tensor = parameter(rank=2, widths=(Tokens.ALL, None))
    w_out: Tensor = parameter(rank=2)
    b: Tensor | None = parameter(rank=1, default=None)
    b_gate: Tensor | None = parameter(rank=1, default=None)

    def __post_init__(self) -> None:
        _exactly("w", self.w, 2, "(d, c)")
        _exactly("w_gate", self.w_gate, 2, "(d, c)", self.w.shape[-1])
        _exactly("w_out", self.w_out, 2, "(c, e)")
        _exactly("b", self.b, 1, "(c,)", self.w.shape[-1])
        _exactly("b_gate", self.b_gate, 1, "(c,)", self.w.shape[-1])
        if self.w_out.shape[0] != self.w.shape[-1]:
            raise ArgumentError(
                "w_out",
                f"takes width {self.w_out.shape[0]} and w gives {self.w.shape[-1]}",
                "give w_out (c, e) for w (d, c)",
            )

    def __call__(self, x: Tensor) -> Tensor:
        inner, gate = Affine(self.w, self.b)(x), Affine(self.w_gate, self.b_gate)(x)
        return (self.activation(inner) * gate) @ self.w_out


@dataclass(frozen=True, eq=False, repr=False)
class ToContext(Map):
    """x ↦ attention(x, context): the queries move, the keys are given."""

    attention: Attention = part(moving=Tokens.QUERIES)
    context: Measure | Tensor = shared()

    def __call__(self, x: Tensor) -> Tensor:
        found = self.attention(x, self.context)
        return found.points if isinstance(found, Measure) else found


@dataclass(frozen=True, eq=False, repr=False)
class FromQueries(Map):
    """y ↦ attention(queries, y): the keys move, the queries are given."""

    attention: Attention = part(moving=Tokens.KEYS)
    queries: Tensor = shared()

    def __call__(self, x: Tensor) -> Tensor:
        return self.attention(self.queries, x)


@dataclass(frozen=True, eq=False, repr=False)
class Joint(Map):
    """(x, y) ↦ attention(x, y) where both move: the first `queries` tokens of a sequence are x,
    the rest are y.
    """

    attention: Attention = part()
    queries: int = shared()

    def __call__(self, x: Tensor) -> Tensor:
        return self.attention(x[..., : self.queries, :], x[..., self.queries :, :])


def feed_forward(
    activation: Activation,
    w_in: Tensor,
    w_out: Tensor,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
) -> Compose:
    """x_i ↦ w_outᵀ activation(w_inᵀx_i + b_in) + b_out."""
    return Compose((Affine(w_in, b_in), Pointwise(activation), Affine(w_out, b_out)))


def pre_norm(attention: Mapping, hidden: Mapping, first: Normalize, second: Normalize) -> Compose:
    """x + attention(norm(x)), then x + hidden(norm(x))."""
    return Compose((Residual(Compose((first, attention))), Residual(Compose((second, hidden)))))


def post_norm(attention: Mapping, hidden: Mapping, first: Normalize, second: Normalize) -> Compose:
    """norm(x + attention(x)), then norm(x + hidden(x))."""
    return Compose((Residual(attention), first, Residual(hidden), second))


def _exactly(name: str, value: Tensor | None, rank: int, shape: str, width: int | None = None) -> None:
    """A parameter of exactly this rank and, where it is given, this last width:
    nothing broadcasts in silence.
    """
    _check.parameter(name, value, rank, shape)
    if value is not None and (value.ndim != rank or (width is not None and value.shape[-1] != width)):
        wanted = shape if width is None else f"{shape} with {width} at the end"
        raise ArgumentError(name, f"has shape {list(value.shape)}", f"give a tensor of shape {wanted}")


def _mappings(name: str, value: object) -> None:
    if not isinstance(value, tuple) or not value:
        raise ArgumentError(name, f"is {value!r}", "give a tuple of one or more maps")
    for inner in value:
        _mapping(name, inner)


def _mapping(name: str, value: object) -> None:
    if not isinstance(value, (Map, Attention)):
        found = f"has a {type(value).__name__}"
        raise ArgumentError(
            name,
            found,
            "give maps of regard.maps or an Attention; certify(module, ...) declares modules of torch itself",
        )


Function = Callable[[Tensor], Tensor]
