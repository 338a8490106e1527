"""How weights begin. Each scheme has a name and a formula; `initialize` fills a module with it."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass

from torch import nn

from regard._object import Object
from regard.errors import ArgumentError


class Initialization(Object):
    """How the matrices of layers are drawn; biases begin at zero, norms at one. Abstract.

    Examples:
        >>> from regard.nn import Initialization, ScaledNormal, UnitVariance, Xavier
        >>> all(isinstance(one, Initialization) for one in (ScaledNormal(), UnitVariance(), Xavier()))
        True
    """

    @abstractmethod
    def fill(self, layer: nn.Linear, depth: int, last: bool) -> None:
        """Draw a matrix; last: it ends a residual branch of a stack of `depth` layers."""


@dataclass(frozen=True, eq=False, repr=False)
class Xavier(Initialization):
    """Uniform on ±√(6/(inputs + outputs)): what torch's own Transformer does (glorot2010).

    Examples:
        >>> layer = torch.nn.Linear(3, 3)
        >>> regard.nn.initialize(layer, regard.nn.Xavier(), depth=1)
        >>> bool(layer.weight.abs().max() <= 1)  # √(6/(3 + 3))
        True
    """

    def fill(self, layer: nn.Linear, depth: int, last: bool) -> None:
        nn.init.xavier_uniform_(layer.weight)


@dataclass(frozen=True, eq=False, repr=False)
class ScaledNormal(Initialization):
    """Normal with one deviation, divided by √(2 depth) where a matrix ends a residual branch (radford2019,
    2.3).

    The sum of 2 · depth branches then has a variance that does not grow with depth.

    Examples:
        >>> layer = torch.nn.Linear(300, 300)
        >>> regard.nn.initialize(layer, regard.nn.ScaledNormal(0.02), depth=1)
        >>> bool((layer.weight.std() - 0.02).abs() < 0.001)
        True
    """

    deviation: float = 0.02

    def __post_init__(self) -> None:
        if not self.deviation > 0:
            raise ArgumentError("deviation", f"is {self.deviation}", "give a positive number")

    def fill(self, layer: nn.Linear, depth: int, last: bool) -> None:
        nn.init.normal_(layer.weight, std=self.deviation / (math.sqrt(2 * depth) if last else 1.0))


@dataclass(frozen=True, eq=False, repr=False)
class UnitVariance(Initialization):
    """Normal with variance 1/inputs: a layer keeps the size of its input on average,
    as shaped attention needs.

    Examples:
        >>> from regard.nn import Design, Encoder, UnitVariance
        >>> encoder = Encoder(Design(8, 2, initialization=UnitVariance()), 1)
        >>> encoder(torch.randn(1, 3, 8)).shape
        torch.Size([1, 3, 8])
    """

    def fill(self, layer: nn.Linear, depth: int, last: bool) -> None:
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)


def initialize(module: nn.Module, scheme: Initialization, depth: int) -> None:
    """Fill all linear layers of a module. Tables of embeddings and positions keep their own initialization.

    Examples:
        >>> layer = torch.nn.Linear(400, 400)
        >>> regard.nn.initialize(layer, regard.nn.UnitVariance(), depth=1)
        >>> bool((layer.weight.std() * 20 - 1).abs() < 0.01), bool((layer.bias == 0).all())
        (True, True)
    """
    from regard.nn.attention import MultiHeadAttention
    from regard.nn.feed_forward import FeedForward

    last = {id(part.output) for part in module.modules() if isinstance(part, MultiHeadAttention)}
    last |= {id(part.outer) for part in module.modules() if isinstance(part, FeedForward)}
    for part in module.modules():
        if isinstance(part, nn.Linear):
            scheme.fill(part, depth, id(part) in last)
            if part.bias is not None:
                nn.init.zeros_(part.bias)
