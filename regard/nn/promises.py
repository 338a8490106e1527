"""Layers with a promise: a constant that is proved from the weights as they are, whenever it is asked."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from inspect import isabstract

import torch
from torch import Tensor, nn

from regard._object import Object
from regard.certificate import Certificate, round_up
from regard.domains import Whole
from regard.errors import ArgumentError
from regard.maps import Map
from regard.nn.attention import check_kind
from regard.nn.digits import blank, working
from regard.norms import Frobenius, Norm
from regard.proofs.certification import certify

SLACK = 1e-6
"""A promise is kept by a certificate of at most (1 + SLACK) times its value."""


@dataclass(frozen=True, eq=False, repr=False)
class Promise(Object):
    """|f(x) - f(x')| ≤ value · |x - x'| in this norm, for all sequences x and x'.

    Examples:
        >>> from regard.nn import Orthogonal, Promise
        >>> Orthogonal(4, 4).promise == Promise(regard.Frobenius(), 1.0)
        True
    """

    norm: Norm = Frobenius()
    value: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.norm, Norm):
            raise ArgumentError("norm", f"is {self.norm!r}", "give Frobenius(), TokenMax() or TokenSum()")
        number = isinstance(self.value, (int, float)) and not isinstance(self.value, bool)
        if not number or not 0 < self.value < math.inf:
            raise ArgumentError("value", f"is {self.value!r}", "give a finite number above zero")

    def kept_by(self, certificate: Certificate) -> bool:
        """Whether a certificate proves it, up to the slack."""
        return certificate.norm == self.norm and certificate.value <= self.value * (1 + SLACK)


class Promised(nn.Module, ABC):
    """A layer that keeps a promise whatever its parameters are. Abstract.

    The certificate is about the map in real arithmetic with the weights as the forward pass computes them; it
    is proved in float64 with outward rounding. Layers compute in float32 at least, also where their
    parameters are stored in less, so that a cast changes the parameters and not the promise.

    Examples:
        >>> from regard.nn import Orthogonal, Promised
        >>> layer = Orthogonal(4, 4)
        >>> isinstance(layer, Promised), layer.keep().value <= 1
        (True, True)
    """

    promise: Promise
    tokens: int | None = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        for base in cls.__mro__[1:]:
            if issubclass(base, Promised) and not isabstract(base):
                raise TypeError(
                    f"{cls.__name__} derives from {base.__name__}, which is final: what is proved about "
                    f"{base.__name__} would be assumed of {cls.__name__}; derive it from Promised"
                )

    @abstractmethod
    def run(self, x: Tensor) -> Tensor:
        """Tokens (..., n, d) to tokens, in float32 at least."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (..., n, d) to tokens; autocast does not reach inside."""
        check_points(x)
        if all(x.dtype != working(weight) for weight in self.parameters()):
            check_kind("x", x, self)
        with torch.autocast(x.device.type, enabled=False):
            return self.run(x.to(working(x))).to(x.dtype)

    @abstractmethod
    def declare(self) -> Map:
        """The layer as a map of one sequence, in float64 and cut off from its parameters."""

    def certificate(self, tokens: int | None = None) -> Certificate:
        """What is proved of the weights as they are, for all sequences of so many tokens; None: of any
        number, or of the number that the layer was made for.
        """
        check_finite(self)
        domain = Whole(tokens=self.tokens if tokens is None else tokens)
        return certify(self, domain, self.promise.norm)

    def keep(self, tokens: int | None = None) -> Certificate:
        """The certificate, or an error with the ladder of its parts where it is above the promise."""
        found = self.certificate(tokens)
        if not self.promise.kept_by(found):
            raise broken(self, found)
        return found

    def _made(self) -> None:
        """The end of a construction: the promise is proved, unless the layer holds no numbers yet."""
        if not blank(self):
            self.keep()


def broken(layer: Promised, certificate: Certificate) -> ArgumentError:
    """The error of a promise that is not kept, with what each part contributes."""
    promise = layer.promise
    found = (
        f"is {promise.value:g} in {promise.norm!r} and {type(layer).__name__} has the certificate "
        f"{round_up(certificate.value)}:\n{ladder_of_parts(layer, certificate)}\n"
    )
    if math.isinf(certificate.value):
        remedy = (
            "use layers with a promise in this norm, or bound the tokens before them with IntoBall(radius)"
        )
    else:
        remedy = f"promise {round_up(certificate.value)}, or use layers whose constants are smaller"
    return ArgumentError("promise", found, remedy)


def ladder_of_parts(layer: Promised, certificate: Certificate) -> str:
    """One line for each layer inside with its own certificate, and one for the whole."""
    inside = [
        part
        for child in layer.children()
        for part in (child if isinstance(child, nn.ModuleList) else (child,))
        if isinstance(part, Promised)
    ]
    found = [
        (type(part).__name__, certify(part, Whole(tokens=part.tokens), certificate.norm)) for part in inside
    ]
    rows = [*found, (type(layer).__name__, certificate)]
    lines = [f"{round_up(proved.value):>12}  {name}: {proved.theorem}" for name, proved in rows]
    refused = [why for _, proved in rows if math.isinf(proved.value) for why in proved.refused]
    return "\n".join(lines + [f"{'–':>12}  {why}" for why in dict.fromkeys(refused)])


def check_finite(module: nn.Module) -> None:
    """Parameters that are numbers, of which alone something can be proved."""
    for name, parameter in module.named_parameters():
        if not bool(torch.isfinite(parameter).all()):
            raise ArgumentError(name, "holds NaN or infinity", "restore it from before training diverged")


def check_points(x: Tensor) -> None:
    """Tokens (..., n, d) of some kind of real numbers."""
    if not isinstance(x, Tensor) or x.ndim < 2 or not x.dtype.is_floating_point:
        found = f"is a {type(x).__name__}" if not isinstance(x, Tensor) else f"is {x.dtype} {list(x.shape)}"
        raise ArgumentError("x", found, "give tokens (..., n, d) as real numbers")


def exact(value: Tensor) -> Tensor:
    """The numbers that a forward pass uses, in float64 and cut off."""
    return value.detach().to("cpu", torch.float64)
