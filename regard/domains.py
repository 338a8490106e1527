"""Domains: where a bound holds.

Tokens lie in a set (Whole, Ball, Shell), or near a given sequence (Neighborhood, Radii), or some of them go
and others come (Edited).
"""

from __future__ import annotations

import math
from dataclasses import InitVar, dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._check import describe
from regard._kinds import names_wrong_kinds
from regard._object import Object
from regard.errors import ArgumentError
from regard.measure import Measure
from regard.norms import Frobenius, Norm, TokenMax, Wasserstein


class Domain(Object):
    """A set of sequences of tokens. Abstract.

    Examples:
        >>> typo = regard.one_token(torch.zeros(3, 2), 0, 0.1)
        >>> isinstance(regard.Ball(1.0), regard.domains.Domain), isinstance(typo, regard.domains.Domain)
        (True, True)
    """


class TokenSet(Domain):
    """Every token lies in one set; `tokens` says how many there are, None means any number,
    so a bound may not depend on it.

    Examples:
        >>> ball = regard.Ball(2.0, tokens=5)
        >>> isinstance(ball, regard.domains.TokenSet), ball.tokens
        (True, 5)
    """

    tokens: int | None


@dataclass(frozen=True, eq=False, repr=False)
class Whole(TokenSet):
    """Tokens anywhere.

    Examples:
        >>> steep = regard.Attention(regard.Dot(torch.eye(2), torch.eye(2)))
        >>> regard.certify(steep, regard.Whole(tokens=3), regard.Frobenius()).value  # that is a theorem
        inf
    """

    tokens: int | None = None

    def __post_init__(self) -> None:
        _count(self.tokens)


@dataclass(frozen=True, eq=False, repr=False)
class Ball(TokenSet):
    """Every token within `radius` of `center` (d,), of the origin where none is given.

    width: that of a token, where neither the center nor the map says it; the origin becomes the center.

    Examples:
        >>> unit = regard.Ball(1.0, tokens=4, width=8)
        >>> regard.certify(regard.Attention(regard.Dot()), unit, regard.TokenMax()).value < 10
        True
    """

    radius: float
    center: Tensor | None = None
    tokens: int | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        _radius("radius", self.radius)
        if self.width is not None:
            object.__setattr__(self, "center", _origin(self.width, self.center))
            object.__setattr__(self, "width", None)  # the center says it now: one value, one way to write it
        _check.parameter("center", self.center, 1, "(d,)")
        if self.center is not None and self.center.ndim != 1:
            raise ArgumentError("center", f"has shape {list(self.center.shape)}", "give one point (d,)")
        _count(self.tokens)


def _origin(width: Any, center: Tensor | None) -> Tensor:
    """The center, which has the given width, or the origin of that width."""
    if isinstance(width, bool) or not isinstance(width, int) or width < 1:
        raise ArgumentError("width", f"is {width!r}", "give the number of coordinates of a token")
    if center is not None and center.shape[-1:] != (width,):
        found = f"is {width} and the center has shape {list(center.shape)}"
        raise ArgumentError("width", found, "leave one of them out")
    return torch.zeros(width, dtype=torch.float64) if center is None else center


@dataclass(frozen=True, eq=False, repr=False)
class Shell(TokenSet):
    """Every token at a root mean square distance between `inner` and `outer` from its own mean, or from zero.

    centered=True: inner ≤ |x_i - mean(x_i)|/√d ≤ outer, as LayerNorm sees tokens; their means are anywhere.
    centered=False: inner ≤ |x_i|/√d ≤ outer, as RMSNorm sees them; how far they are from their means is open.
    |x_i|² = |x_i - mean|² + d mean², so |x_i|/√d ≥ inner on the first too: Shell(inner) is for both layers.

    Examples:
        >>> from regard.maps import Normalize
        >>> far = regard.Shell(0.5, tokens=3)
        >>> regard.certify(Normalize(), far, regard.TokenMax()).value < 2.001  # 1 / 0.5
        True
    """

    inner: float
    outer: float = math.inf
    tokens: int | None = None
    centered: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.centered, bool):
            remedy = "give True (distances from the mean of a token) or False (from zero)"
            raise ArgumentError("centered", f"is {self.centered!r}", remedy)
        if not 0 <= self.inner <= self.outer or math.isinf(self.inner):
            raise ArgumentError(
                "inner and outer",
                f"are {self.inner} and {self.outer}",
                "give 0 <= inner <= outer, inner finite",
            )
        _count(self.tokens)

    def __repr__(self) -> str:
        counted = "" if self.tokens is None else f", tokens={self.tokens}"
        return (
            f"Shell(inner={describe(self.inner)}, outer={describe(self.outer)}{counted}, "
            f"centered={self.centered})"
        )


class Near(Domain):
    """Sequences near a given one. A Measure as `points` brings weights and marks along, which do not move.

    Examples:
        >>> near = regard.one_token(torch.zeros(3, 2), 1, 0.5)
        >>> isinstance(near, regard.domains.Near), near.measure.points.shape
        (True, torch.Size([3, 2]))
    """

    points: Tensor | Measure

    @property
    def measure(self) -> Measure:
        """The given sequence in float64, with its weights and marks."""
        found = self.points if isinstance(self.points, Measure) else Measure(self.points)
        weights = None if found.log_weights is None else found.log_weights.double()
        return Measure(found.points.detach().double(), weights, found.marks)


@dataclass(frozen=True, eq=False, repr=False)
class Neighborhood(Near):
    """Sequences within `radius` of `points` (n, d), in Frobenius or TokenMax norm.

    In a Wasserstein norm it is laws that are near, not sequences: Neighborhood(points, radius,
    norm=Wasserstein(p), within=...) is a `NearbyLaws`. In W_∞ `within` may be left out.

    Examples:
        >>> layer, near = regard.Attention(regard.Dot()), regard.Neighborhood(torch.zeros(3, 2), 0.1)
        >>> regard.deviation(layer, near, regard.Frobenius()).value < 0.2
        True
        >>> norm = regard.Wasserstein(1)
        >>> laws = regard.Neighborhood(torch.zeros(3, 2), 0.1, norm=norm, within=regard.Ball(1.0))
        >>> type(laws).__name__, regard.deviation(layer, laws, norm).value < 0.2
        ('NearbyLaws', True)
    """

    points: Tensor | Measure
    radius: float
    norm: Norm = Frobenius()
    within: InitVar[Ball | Vocabulary | Tube | None] = None

    def __new__(  # type: ignore[misc]  # what is made without arguments is a copy, which is filled later
        cls, points: Any = None, radius: float = 0.0, norm: Norm = Frobenius(), within: Any = None
    ) -> Neighborhood | NearbyLaws:
        """A NearbyLaws where the norm compares laws."""
        return (
            _nearby(points, radius, norm, within) if isinstance(norm, Wasserstein) else super().__new__(cls)
        )

    def __post_init__(self, within: Ball | Vocabulary | Tube | None) -> None:
        _sequence(self.points)
        _radius("radius", self.radius)
        if not isinstance(self.norm, (Frobenius, TokenMax)):
            remedy = "give Frobenius() or TokenMax(), or Wasserstein(p) for laws; use Radii for others"
            raise ArgumentError("norm", f"is {self.norm!r}", remedy)
        if within is not None:
            remedy = "leave it out: the radius holds every token; it is for norm=Wasserstein(p)"
            raise ArgumentError("within", f"is given in {self.norm!r}", remedy)


@dataclass(frozen=True, eq=False, repr=False)
class Radii(Near):
    """Sequences whose token i is within radii[i] of points[i]: a typo is one radius that is not zero.

    Examples:
        >>> x = torch.zeros(3, 2)
        >>> noisy = regard.Radii(x, torch.tensor([0.0, 0.1, 0.1]))
        >>> regard.deviation(regard.Attention(regard.Dot()), noisy, regard.TokenMax()).value < 0.2
        True
    """

    points: Tensor | Measure
    radii: Tensor

    def __post_init__(self) -> None:
        tokens = _sequence(self.points).shape[0]
        radii = _check.floating("radii", self.radii)
        if radii.shape != (tokens,) or not bool(((radii >= 0) & torch.isfinite(radii)).all()):
            raise ArgumentError(
                "radii",
                f"is {_check.describe(radii)}",
                f"give {tokens} finite numbers that are not negative, one for each token",
            )

    def __repr__(self) -> str:
        return (
            f"Radii({describe(self.points)}, {_moving(self.radii)} by at most {float(self.radii.max()):.6g})"
        )


def _moving(radii: Tensor) -> str:
    """Which tokens move."""
    places = radii.nonzero().flatten().tolist()
    if len(places) == 1:
        return f"token {places[0]} of {len(radii)} moves"
    return f"{len(places)} of {len(radii)} tokens move"


@dataclass(frozen=True, eq=False, repr=False)
class Box(Near):
    """Sequences whose token i has every entry within radii[i] of that of points[i].

    Examples:
        >>> x = torch.zeros(3, 2)
        >>> regard.Box(x, torch.tensor([0.0, 0.1, 0.0])).radii.shape  # only entries of the second token move
        torch.Size([3])
    """

    points: Tensor | Measure
    radii: Tensor

    def __post_init__(self) -> None:
        Radii(self.points, self.radii)

    def __repr__(self) -> str:
        return (
            f"Box({describe(self.points)}, in each entry {_moving(self.radii)} by at most "
            f"{float(self.radii.max()):.6g})"
        )


@dataclass(frozen=True, eq=False, repr=False)
class Hull(Near):
    """Sequences whose token `token` is any mixture of its own embedding and the given ones (k, d), while all
    others stay: the synonyms of a word, its spellings, and everything between them.

    Examples:
        >>> x, synonyms = torch.zeros(4, 2), 0.1 * torch.eye(2)
        >>> regard.Hull(x, 1, synonyms).token
        1
    """

    points: Tensor | Measure
    token: int
    embeddings: Tensor

    def __post_init__(self) -> None:
        tokens = _sequence(self.points)
        given = _check.floating("embeddings", self.embeddings)
        if given.ndim != 2 or not len(given) or given.shape[-1] != tokens.shape[-1]:
            raise ArgumentError(
                "embeddings",
                f"is {describe(given)}",
                f"give one or more embeddings of width {tokens.shape[-1]}, (k, {tokens.shape[-1]})",
            )
        _check.finite("embeddings", given)
        if isinstance(self.token, bool) or not isinstance(self.token, int):
            raise ArgumentError("token", f"is {self.token!r}", "give the position of a token")
        if not -len(tokens) <= self.token < len(tokens):
            raise ArgumentError("token", f"is {self.token}", f"there are {len(tokens)} tokens")

    @property
    def corners(self) -> Tensor:
        """The token as it is, and the given embeddings, (k + 1, d) in float64."""
        own = self.measure.points[self.token].unsqueeze(0)
        return torch.cat([own, self.embeddings.detach().double()])

    def __repr__(self) -> str:
        return f"Hull({describe(self.points)}, token {self.token}, {len(self.embeddings)} embeddings)"


@names_wrong_kinds
def one_token(points: Tensor | Measure, index: int, radius: float) -> Radii:
    """Token `index` moves by at most `radius`, all others stay.

    Examples:
        >>> regard.one_token(torch.zeros(3, 2), 1, 0.5).radii.tolist()
        [0.0, 0.5, 0.0]
    """
    tokens = _sequence(points)
    place = _check.whole_number("index", index, f"give the position of one of {len(tokens)} tokens")
    if not -len(tokens) <= place < len(tokens):
        raise ArgumentError("index", f"is {place}", f"there are {len(tokens)} tokens")
    _radius("radius", float(radius))
    radii = torch.zeros(len(tokens), dtype=torch.float64)
    radii[place] = radius
    return Radii(points, radii)


@dataclass(frozen=True, eq=False, repr=False)
class Vocabulary(Object):
    """A finite set of tokens (N, d): what may be written, already embedded.

    Examples:
        >>> words = regard.domains.Vocabulary(torch.randn(50, 4, dtype=torch.float64))
        >>> x = torch.randn(6, 4, dtype=torch.float64)
        >>> one_more = regard.domains.inserted(x, words)
        >>> regard.deviation(regard.Attention(regard.Dot()), one_more, regard.TokenMax()).value > 0
        True
    """

    points: Tensor

    def __post_init__(self) -> None:
        _sequence(self.points)


@dataclass(frozen=True, eq=False, repr=False)
class Edited(Domain):
    """What becomes of a sequence (n, d) when tokens go and others come; outputs of those that stay are
    compared.

    removed: the tokens that go. added: how many come, each from `within`, a Vocabulary or a Ball.
    after (n - removed, d): those that stay, in order, as they are afterwards, where a shift of positions
    changes their embeddings; None where they stay as they are. `inserted`, `deleted` and `replaced` make one.

    Examples:
        >>> edited = regard.domains.deleted(torch.randn(5, 2), 1, 3)
        >>> edited.stays, edited.kept.shape
        ([0, 2, 4], torch.Size([3, 2]))
    """

    points: Tensor
    removed: tuple[int, ...] = ()
    added: int = 0
    within: Vocabulary | Ball | None = None
    after: Tensor | None = None

    def __post_init__(self) -> None:
        tokens = _sequence(self.points)
        if any(not 0 <= index < len(tokens) for index in self.removed) or len(set(self.removed)) < len(
            self.removed
        ):
            raise ArgumentError(
                "removed", f"is {self.removed}", f"give different indices of the {len(tokens)} tokens"
            )
        if len(self.removed) == len(tokens):
            raise ArgumentError("removed", "names every token", "leave one, whose output is compared")
        if not isinstance(self.added, int) or self.added < 0 or (self.added > 0) != (self.within is not None):
            raise ArgumentError(
                "added and within",
                f"are {self.added!r} and {describe(self.within)}",
                "say how many tokens come, and from which Vocabulary or Ball; 0 and None where none comes",
            )
        self._check_widths(tokens)

    def _check_widths(self, tokens: Tensor) -> None:
        kept, width = len(tokens) - len(self.removed), tokens.shape[1]
        if self.after is not None and _sequence(self.after).shape != (kept, width):
            raise ArgumentError(
                "after",
                f"has shape {list(self.after.shape)}",
                f"give the tokens that stay, ({kept}, {width})",
            )
        place = self.within.points if isinstance(self.within, Vocabulary) else None
        place = self.within.center if isinstance(self.within, Ball) else place
        if place is not None and place.shape[-1] != width:
            raise ArgumentError(
                "within", f"has tokens of width {place.shape[-1]}", f"those of the sequence have {width}"
            )

    @property
    def stays(self) -> list[int]:
        """The tokens that stay, in order."""
        return [index for index in range(len(self.points)) if index not in self.removed]

    @property
    def kept(self) -> Tensor:
        """The tokens that stay as they are afterwards, in float64."""
        found = self.points[self.stays] if self.after is None else self.after
        return found.detach().double()

    def __repr__(self) -> str:
        gone = f", tokens {list(self.removed)} go" if self.removed else ""
        come = f", {self.added} of {describe(self.within)} come" if self.added else ""
        return f"Edited({describe(self.points)}{gone}{come})"


@dataclass(frozen=True, eq=False, repr=False)
class Tube(Object):
    """What is within `radius` of one of the tokens at hand.

    jumps: whether mass may go from a token to where others are. Where it may not, no mass moves farther than
    the radius: with W₁ ≤ ρ along one coupling, |Y - X| ≤ radius along the same.

    Examples:
        >>> x = torch.randn(4, 2, dtype=torch.float64)
        >>> noisy = regard.domains.NearbyLaws(x, 0.01, regard.domains.Tube(0.1, jumps=False))
        >>> anywhere = noisy.replace(within=regard.domains.Tube(0.1))
        >>> bounds = [
        ...     regard.deviation(regard.Attention(regard.Dot()), laws, regard.Wasserstein(1)).value
        ...     for laws in (noisy, anywhere)
        ... ]
        >>> bounds[0] <= bounds[1] * 1.0001
        True
    """

    radius: float
    jumps: bool = True

    def __post_init__(self) -> None:
        _radius("radius", self.radius)
        if not isinstance(self.jumps, bool):
            remedy = (
                "give True (mass may go to where other tokens are) or False (all of it stays around its own)"
            )
            raise ArgumentError("jumps", f"is {self.jumps!r}", remedy)


@dataclass(frozen=True, eq=False, repr=False)
class NearbyLaws(Domain):
    """All laws of tokens that are at most `radius` in W_p from a given one, and carry its mass to `within` at
    most: a Ball that holds its atoms, a Vocabulary, beside which mass may stay where it is, or a Tube around
    its atoms.

    Laws have any number of atoms, so tokens may split, vanish and appear, as long as little mass moves far.
    `Neighborhood(points, radius, norm=Wasserstein(p), within=...)` makes one. What is proved of W₁ holds for
    every p, since W₁ ≤ W_p; in W_∞ the tube of the radius without jumps is all there is.

    Examples:
        >>> x = torch.randn(4, 2, dtype=torch.float64)
        >>> nearby = regard.domains.NearbyLaws(x, 0.1, regard.Ball(4.0))
        >>> nearby.radius, nearby.measure.size
        (0.1, 4)
    """

    points: Tensor | Measure
    radius: float
    within: Ball | Vocabulary | Tube
    p: float = 1.0

    def __post_init__(self) -> None:
        tokens = _sequence(self.points)
        _radius("radius", self.radius)
        Wasserstein(self.p)  # p is checked there
        if not isinstance(self.within, (Ball, Vocabulary, Tube)):
            remedy = "say where mass may go: a Ball, a Vocabulary of tokens, or a Tube around those at hand"
            raise ArgumentError("within", f"is {self.within!r}", remedy)
        place = self.within.points if isinstance(self.within, Vocabulary) else None
        place = self.within.center if isinstance(self.within, Ball) else place
        if place is not None and place.shape[-1] != tokens.shape[-1]:
            raise ArgumentError(
                "within",
                f"has tokens of width {place.shape[-1]}",
                f"those of the law have {tokens.shape[-1]}",
            )
        if isinstance(self.within, Ball):
            center = 0.0 if self.within.center is None else self.within.center.double()
            if float((tokens.double() - center).norm(dim=-1).max()) > self.within.radius * (1 + 1e-12):
                raise ArgumentError("within", "does not hold the tokens", "give a larger ball")

    @property
    def measure(self) -> Measure:
        """The given law in float64; its marks do not count."""
        found = self.points if isinstance(self.points, Measure) else Measure(self.points)
        weights = None if found.log_weights is None else found.log_weights.double()
        return Measure(found.points.detach().double(), weights)


def _nearby(
    points: Tensor | Measure, radius: float, norm: Wasserstein, within: Ball | Vocabulary | Tube | None
) -> NearbyLaws:
    """In W_∞ no mass moves farther than the radius; other distances need a set that mass stays in."""
    if within is None and norm.p == math.inf:
        within = Tube(radius, jumps=False)
    if within is None:
        remedy = (
            "say where mass may go: within=Ball(...), Vocabulary(...) or Tube(...); a little mass anywhere"
        )
        raise ArgumentError("within", "is not given", f"{remedy} moves outputs without bound")
    return NearbyLaws(points, radius, within, norm.p)


def inserted(
    points: Tensor, within: Vocabulary | Ball, *, count: int = 1, after: Tensor | None = None
) -> Edited:
    """`count` tokens of a set come; `after`: the others, where their embeddings change with the shift.

    Examples:
        >>> x, words = torch.zeros(5, 2), regard.domains.Vocabulary(torch.randn(9, 2))
        >>> regard.domains.inserted(x, words, count=2).added
        2
    """
    return Edited(points, (), count, within, after)


def deleted(points: Tensor, *indices: int, after: Tensor | None = None) -> Edited:
    """Tokens go; `after`: the others, where their embeddings change with the shift.

    Examples:
        >>> x = torch.randn(4, 2, dtype=torch.float64)
        >>> layer, shorter = regard.Attention(regard.Dot()), regard.domains.deleted(x, 3)
        >>> bound = regard.deviation(layer, shorter, regard.TokenMax())
        >>> bool((layer(x)[:3] - layer(x[:3])).norm(dim=-1).max() <= bound.value)
        True
    """
    return Edited(points, _indices(points, indices), 0, None, after)


def replaced(
    points: Tensor, index: int, within: Vocabulary | Ball, *, count: int = 1, after: Tensor | None = None
) -> Edited:
    """One token goes and `count` tokens of a set come: another word, or the pieces of a misspelled one.

    Examples:
        >>> x, words = torch.zeros(5, 2), regard.domains.Vocabulary(torch.randn(9, 2))
        >>> typo = regard.domains.replaced(x, 2, words, count=3)  # one word becomes three pieces
        >>> typo.removed, typo.added
        ((2,), 3)
    """
    return Edited(points, _indices(points, (index,)), count, within, after)


def _indices(points: Tensor, indices: tuple[int, ...]) -> tuple[int, ...]:
    tokens = len(_sequence(points))
    if not indices or any(not -tokens <= index < tokens for index in indices):
        raise ArgumentError("index", f"is {list(indices)}", f"give some of the {tokens} tokens")
    return tuple(index % tokens for index in indices)


def _sequence(points: Tensor | Measure) -> Tensor:
    tokens = _check.floating("points", points.points if isinstance(points, Measure) else points)
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ArgumentError(
            "points",
            f"has shape {list(tokens.shape)}",
            "give one sequence (n, d) with at least one token; bound batches one by one",
        )
    _check.finite("points", tokens)
    return tokens


def _radius(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not value >= 0:
        raise ArgumentError(name, f"is {value!r}", "give a number that is not negative")
    if math.isinf(value):
        raise ArgumentError(
            name, "is infinite", "give a finite number; tokens anywhere are Whole(), or Whole(tokens=n)"
        )


def _count(tokens: int | None) -> None:
    if tokens is not None and (not isinstance(tokens, int) or tokens < 1):
        raise ArgumentError(
            "tokens", f"is {tokens!r}", "give how many tokens there are, one or more, or None for any number"
        )
