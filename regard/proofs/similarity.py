"""certified_cosine: how far can an embedding turn? The cosine to the original, proved from below."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import computed_lengths, lengths_below, spectral_norms
from regard._kinds import names_wrong_kinds
from regard._upper import Lower, Upper, relative_error, root
from regard.certificate import Certificate, round_down
from regard.domains import Near
from regard.norms import TokenMax
from regard.proofs.ball_model.beginning import at_rest, by_orders
from regard.proofs.ball_model.ellipsoids import longest, pushed
from regard.proofs.ball_model.state import State
from regard.proofs.classifier import Classifier, check_held, check_sequence, check_steps, classifier
from regard.proofs.decision import arithmetic_of, check_domain
from regard.proofs.decision_attack import as_it_runs
from regard.proofs.falsification import Witness
from regard.proofs.places import farthest, project
from regard.proofs.question import question
from regard.proofs.theorem import NO_THEOREM, Refusal, checked
from regard.proofs.theorems.ball_model import THEOREM, run, start

QUANTITY = "one minus the cosine to the original"


@dataclass(frozen=True)
class Similarity:
    """How near an embedding stays to the original one, on a domain.

    distance: upper bound on one minus the cosine of the embeddings that the model computes in its own dtype.
    It includes the rounding error of both embeddings, which is an assumption; it is zero in float64. attack:
    the input with the smallest cosine that was found, run in that dtype. reason: why nothing is proved, where
    nothing is.

    Examples:
        >>> from regard.maps import Affine
        >>> x, eye = torch.tensor([[1.0, 0.5]], dtype=torch.float64), torch.eye(2, dtype=torch.float64)
        >>> found = regard.certified_cosine(Affine(eye), x, regard.one_token(x, 0, 0.1))
        >>> 0.99 < found.cosine < 1
        True
    """

    distance: Certificate
    attack: Witness
    reason: str = ""

    @property
    def cosine(self) -> float:
        """At most the cosine anywhere in the domain; minus one where nothing is proved."""
        return max(-1.0, math.nextafter(1.0 - self.distance.value, -math.inf))

    def __str__(self) -> str:
        lines = [
            f"the cosine to the original stays above {round_down(self.cosine)} on {self.distance.domain}"
        ]
        if self.reason:
            lines = [f"the cosine to the original is open on {self.distance.domain}", f"  {self.reason}"]
        lines.append(f"  attack: the smallest cosine found is {self.attack.value:.6g}")
        return "\n".join(lines + [f"  {hypothesis}" for hypothesis in self.distance.hypotheses])

    __repr__ = __str__


@names_wrong_kinds
def certified_cosine(
    model: Any, x: Tensor, domain: Near, *, readout: Any = None, steps: int = 20
) -> Similarity:
    """The cosine of the embedding to that of x, at least, for every input of the domain around x (n, d).

    model: what `certify` takes, from tokens to one token (1, width), or with a readout that makes one (`Pool`
    for the mean, `MixTokens` for one of them). With t the move of the embedding g, t_r its part along g and
    t' the part across, cos = (1 + t_r)/((1 + t_r)² + |t'|²/|g|²)^{1/2}, which grows with t_r.

    Examples:
        >>> from regard.nonexpansive import Pool
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> layer, typo = regard.Attention(regard.Dot()), regard.one_token(x, 0, 0.01)
        >>> found = regard.certified_cosine(layer, x, typo, readout=Pool())
        >>> found.cosine > 0.9
        True
    """
    check_sequence("x", x)
    check_domain(domain, x)
    check_steps(steps)
    with question():
        found = classifier(model, x, readout, "certified_cosine")
        check_held(x, found.dtype)
        attack = _SmallestCosine(found, domain).find(steps)
        rounding = float(found.rounding(x))
        try:
            distance = _distance(found, domain, rounding)
        except Refusal as refusal:
            none = Certificate(
                math.inf, domain, TokenMax(), NO_THEOREM, refused=(str(refusal),), quantity=QUANTITY
            )
            return Similarity(none, attack, f"the bounds say nothing about it: {refusal}")
    hypotheses = (checked("the embedding is nowhere zero"), *arithmetic_of(found, rounding))
    norm = getattr(domain, "norm", TokenMax())
    return Similarity(
        Certificate(float(distance), domain, norm, THEOREM.cited, hypotheses, quantity=QUANTITY), attack
    )


def _distance(found: Classifier, domain: Near, rounding: float) -> Upper:
    """Upper bound on one minus the cosine, of the first order and, where that is small, of the second.

    rounding: upper bound on the rounding error of each coordinate of an embedding.
    """
    still = run(found.exact, at_rest(domain.measure.points))
    error = root(still.width) * Upper(rounding)
    slopes = list(by_orders(start(domain), lambda state: _slope(run(found.exact, state), still, error)))
    return cosine_distance(slopes[0].minimum(*slopes[1:]))


def _slope(state: State, still: State, error: Upper) -> Upper:
    """Upper bound on the tangent of the angle between any value of the state and that of the given sequence,
    where each of them is computed with an error of at most this length.

    Both are seen from g, the center of `still`, which may be any vector; tangents add by (s + t)/(1 - st).
    """
    g = still.center[0]
    length = lengths_below(g)
    if not float(length) > 0:
        raise Refusal("the embedding of x itself may be zero, and a zero vector has no cosine")
    blurred = longest(still.shape)[0] + error
    if not float(blurred) < float(length):
        raise Refusal("rounding may change the embedding of x by its own length; use a wider dtype")
    away = computed_lengths(state.center[0] - g) * (1 + Upper(2.0**-50)) + error
    along = away + _along(state, g, length)
    across = away + _across(state, g)
    if not float(along) < 0.9 * float(length):
        raise Refusal("the embedding may lose nine tenths of its length; use a smaller radius")
    moved = across / (length - along)
    given = blurred / (length - blurred)
    both = 1 - moved * given
    return (moved + given) / both


def _along(state: State, g: Tensor, length: Lower) -> Upper:
    """At least |ĝ·(x - c)| with ĝ = g/|g|."""
    direction = (g / g.norm()).unsqueeze(-1).unsqueeze(0)
    slip = relative_error(len(g) + 8) * (state.reach[0])
    return (state.first(direction) + state.rest(direction))[0, 0] + slip


def _across(state: State, g: Tensor) -> Upper:
    """At least the length of x - c without its part along g."""
    unit = g / g.norm()
    matrix = torch.eye(len(g), dtype=torch.float64) - unit.unsqueeze(-1) * unit
    slip = relative_error(2 * len(g) + 32) * (2 * state.reach[0]) * len(g)
    first = spectral_norms(matrix @ state.linear[0])
    return first + longest(pushed(matrix.unsqueeze(0), state.rest_shape))[0] + slip


def cosine_distance(slope: Upper) -> Upper:
    """1 - (1 + s²)^{-1/2} = s²/(1 + s² + (1 + s²)^{1/2}), which grows with s."""
    number = slope.bound
    square = 1 + Lower(number).square()
    return Upper(number).square() / (square + square.sqrt())


class _SmallestCosine:
    """Inputs of a domain whose embeddings turn as far as can be found."""

    def __init__(self, found: Classifier, domain: Near) -> None:
        self.found, self.domain, self.points = found, domain, domain.measure.points
        self.original = found.logits(self.points).detach()

    def find(self, steps: int) -> Witness:
        """From random inputs along gradients, to the farthest points and halfway there."""
        generator = torch.Generator().manual_seed(0)
        best, at = math.inf, self.points
        for _ in range(2):
            z = torch.randn(self.points.shape, generator=generator, dtype=torch.float64)
            x = farthest.one(self.domain, z)
            for step in range(steps):
                cosine, slope = self._slope(x)
                best, at = (cosine, x) if cosine < best else (best, at)
                aim = farthest.one(self.domain, -slope)
                x = aim if step % 4 else project.one(self.domain, 0.5 * (x + aim))
        moved = as_it_runs(self.found, self.domain, at)
        seen = torch.nn.functional.cosine_similarity(
            self.found.run(moved).double(), self.found.run(self.points).double(), dim=-1
        )
        return Witness(float(seen), self.points, moved.double(), TokenMax())

    def _slope(self, x: Tensor) -> tuple[float, Tensor]:
        leaf = x.detach().requires_grad_()
        with torch.enable_grad():
            cosine = torch.nn.functional.cosine_similarity(self.found.logits(leaf), self.original, dim=-1)
            (slope,) = torch.autograd.grad(cosine, leaf)
        return float(cosine.detach()), slope
