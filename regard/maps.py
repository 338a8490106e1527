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
    """A map of sequences of tokens. Abstract.

    Examples:
        >>> relu = regard.maps.Pointwise(regard.maps.Relu())
        >>> isinstance(relu, regard.maps.Map), relu(torch.tensor([[-3.0, 4.0]])).tolist()
        (True, [[0.0, 4.0]])
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The value at a sequence (..., n, d)."""


Mapping = Map | Attention
"""What the algebra combines."""


@dataclass(frozen=True, eq=False, repr=False)
class Compose(Map):
    """x ↦ f_k(… f_1(x)): the first of `maps` acts first.

    Examples:
        >>> from regard.maps import Affine, Compose, Pointwise, Relu
        >>> Compose((Affine(-torch.eye(2)), Pointwise(Relu())))(torch.tensor([[1.0, -1.0]])).tolist()
        [[0.0, 1.0]]
    """

    maps: tuple[Mapping, ...] = part()

    def __post_init__(self) -> None:
        _mappings("maps", self.maps)

    def __call__(self, x: Tensor) -> Tensor:
        for inner in self.maps:
            x = inner(x)
        return x


@dataclass(frozen=True, eq=False, repr=False)
class Added(Map):
    """x ↦ Σ_k f_k(x): every one of `maps` acts on the same sequence.

    Examples:
        >>> from regard.maps import Added, Affine
        >>> Added((Affine(torch.eye(1)), Affine(2 * torch.eye(1))))(torch.ones(1, 1)).tolist()
        [[3.0]]
    """

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
    """x ↦ x + f(x).

    Examples:
        >>> from regard.maps import Affine, Residual
        >>> Residual(Affine(2 * torch.eye(1)))(torch.ones(1, 1)).tolist()
        [[3.0]]
    """

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

    Examples:
        >>> attention = regard.Attention(regard.Dot(scale=torch.tensor([1.0, 2.0])))  # two heads
        >>> w_o = torch.stack([torch.eye(3), torch.eye(3)])
        >>> regard.maps.Heads(attention, w_o)(torch.ones(4, 3))[0].tolist()
        [2.0, 2.0, 2.0]
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
        every = x if x.ndim == 2 else x.unsqueeze(-3)  # sequences of a batch are not heads
        value = mix_heads(self.attention(every), self.w_o)
        return value if self.b_o is None else value + self.b_o


@dataclass(frozen=True, eq=False, repr=False)
class Affine(Map):
    """x_i ↦ wᵀx_i + b for each token; w (d, e).

    Examples:
        >>> regard.maps.Affine(torch.tensor([[1.0], [2.0]]), torch.tensor([0.5]))(torch.ones(1, 2)).tolist()
        [[3.5]]
    """

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

    Examples:
        >>> x = torch.randn(3, 8)
        >>> torch.allclose(regard.maps.Normalize()(x), torch.nn.functional.layer_norm(x, (8,)), atol=1e-6)
        True
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
    """A function of one number. Abstract.

    Examples:
        >>> for one in (regard.maps.Relu(), regard.maps.Tanh(), regard.maps.Silu()):
        ...     print(isinstance(one, regard.maps.Activation), round(float(one(torch.tensor(-1.0))), 4))
        True 0.0
        True -0.7616
        True -0.2689
    """

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The value at each entry."""


@dataclass(frozen=True, eq=False, repr=False)
class Relu(Activation):
    """max(x, 0).

    Examples:
        >>> regard.maps.Relu()(torch.tensor([-1.0, 2.0])).tolist()
        [0.0, 2.0]
    """

    def __call__(self, x: Tensor) -> Tensor:
        return torch.relu(x)


@dataclass(frozen=True, eq=False, repr=False)
class Gelu(Activation):
    """x Φ(x), Φ the normal distribution function; tanh=True is the approximation of it (hendrycks2016).

    Examples:
        >>> x = torch.linspace(-3, 3, 7)
        >>> torch.allclose(regard.maps.Gelu()(x), torch.nn.functional.gelu(x))
        True
    """

    tanh: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(x, approximate="tanh" if self.tanh else "none")


@dataclass(frozen=True, eq=False, repr=False)
class Silu(Activation):
    """x σ(slope · x); the slope 1.702 is the quick form of GELU.

    Examples:
        >>> x = torch.linspace(-3, 3, 7)
        >>> torch.allclose(regard.maps.Silu()(x), torch.nn.functional.silu(x))
        True
    """

    slope: float = 1.0

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.silu(x) if self.slope == 1.0 else x * torch.sigmoid(self.slope * x)


@dataclass(frozen=True, eq=False, repr=False)
class Tanh(Activation):
    """tanh x.

    Examples:
        >>> bool(regard.maps.Tanh()(torch.tensor(20.0)) == 1)
        True
    """

    def __call__(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


@dataclass(frozen=True, eq=False, repr=False)
class Pointwise(Map):
    """x ↦ activation of every entry.

    Examples:
        >>> regard.maps.Pointwise(regard.maps.Relu())(torch.tensor([[-1.0, 2.0]])).tolist()
        [[0.0, 2.0]]
    """

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

    Examples:
        >>> from regard.maps import Gated, Silu
        >>> w, gate, out = torch.randn(4, 8), torch.randn(4, 8), torch.randn(8, 4)
        >>> x = torch.randn(3, 4)
        >>> by_hand = (torch.nn.functional.silu(x @ w) * (x @ gate)) @ out
        >>> torch.allclose(Gated(Silu(), w, gate, out)(x), by_hand, atol=1e-5)
        True
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
    """x ↦ attention(x, context): the queries move, the keys are given.

    Examples:
        >>> from regard.maps import FromQueries, ToContext
        >>> attention, x, y = regard.Attention(regard.Dot()), torch.randn(2, 3), torch.randn(5, 3)
        >>> torch.equal(ToContext(attention, y)(x), FromQueries(attention, x)(y))
        True
    """

    attention: Attention = part(moving=Tokens.QUERIES)
    context: Measure | Tensor = shared()

    def __call__(self, x: Tensor) -> Tensor:
        found = self.attention(x, self.context)
        return found.points if isinstance(found, Measure) else found


@dataclass(frozen=True, eq=False, repr=False)
class FromQueries(Map):
    """y ↦ attention(queries, y): the keys move, the queries are given.

    Examples:
        >>> mean = regard.maps.FromQueries(regard.Attention(regard.Dot()), torch.zeros(1, 2))  # equal scores
        >>> mean(torch.tensor([[0.0, 2.0], [2.0, 0.0]])).tolist()
        [[1.0, 1.0]]
    """

    attention: Attention = part(moving=Tokens.KEYS)
    queries: Tensor = shared()

    def __call__(self, x: Tensor) -> Tensor:
        return self.attention(self.queries, x)


@dataclass(frozen=True, eq=False, repr=False)
class Joint(Map):
    """(x, y) ↦ attention(x, y) where both move: the first `queries` tokens of a sequence are x,
    the rest are y.

    Examples:
        >>> attention, both = regard.Attention(regard.Dot()), torch.randn(5, 3)
        >>> torch.equal(regard.maps.Joint(attention, 2)(both), attention(both[:2], both[2:]))
        True
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
    """x_i ↦ w_outᵀ activation(w_inᵀx_i + b_in) + b_out.

    Examples:
        >>> from regard.maps import Relu, feed_forward
        >>> absolute = feed_forward(Relu(), torch.tensor([[1.0, -1.0]]), torch.ones(2, 1))
        >>> absolute(torch.tensor([[-3.0]])).tolist()
        [[3.0]]
    """
    return Compose((Affine(w_in, b_in), Pointwise(activation), Affine(w_out, b_out)))


def pre_norm(attention: Mapping, hidden: Mapping, first: Normalize, second: Normalize) -> Compose:
    """x + attention(norm(x)), then x + hidden(norm(x)).

    Examples:
        >>> from regard.maps import Normalize, Relu, feed_forward, pre_norm
        >>> hidden = feed_forward(Relu(), torch.randn(4, 8), torch.randn(8, 4))
        >>> layer = pre_norm(regard.Attention(regard.Dot()), hidden, Normalize(), Normalize())
        >>> layer(torch.randn(3, 4)).shape
        torch.Size([3, 4])
    """
    return Compose((Residual(Compose((first, attention))), Residual(Compose((second, hidden)))))


def post_norm(attention: Mapping, hidden: Mapping, first: Normalize, second: Normalize) -> Compose:
    """norm(x + attention(x)), then norm(x + hidden(x)).

    Examples:
        >>> from regard.maps import Normalize, Relu, feed_forward, post_norm
        >>> hidden = feed_forward(Relu(), torch.randn(4, 8), torch.randn(8, 4))
        >>> layer = post_norm(regard.Attention(regard.Dot()), hidden, Normalize(), Normalize())
        >>> bool(layer(torch.randn(3, 4)).mean(-1).abs().max() < 1e-6)  # the last step centers
        True
    """
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
