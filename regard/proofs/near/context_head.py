"""One head whose keys are given: what bounds about its queries need, at one sequence of them."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard import maps
from regard._enclosed import computed_lengths
from regard._round import vector_norm_bound
from regard._upper import UNIT, Lower, Upper, relative_error, root, sizes
from regard.domains import Neighborhood
from regard.measure import Measure
from regard.norms import TokenMax
from regard.proofs.locating import in_double, one_sequence
from regard.proofs.near.head import value_matrix
from regard.proofs.setting import balls_of, positions_of
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal


class ContextHead:
    """One head at queries x (n, d) with given keys: value (n, e), gains (n, 1, e, d) = Df, and the sizes that
    bounds need.

    spread ≥ wR and kappa ≥ |A|R: how far values, and slopes of scores, are from a center; error: what
    rounding may change, relative to spread · kappa in a derivative and to spread in a value.
    """

    def __init__(self, map: maps.ToContext, x: Tensor) -> None:
        one_sequence(map)
        self.head = subject_of(map.attention).separate[0]
        given = map.context if isinstance(map.context, Measure) else Measure(map.context)
        width = x.shape[-1]
        form = (
            self.head.form(width)
            if self.head.softmax and given.points.ndim == 2 and given.points.shape[-1] == width
            else None
        )
        if form is None:
            raise Refusal(
                "attention to a context has a Taylor model for softmax rows of "
                "bilinear scores and one context"
            )
        ball = min(
            balls_of(Neighborhood(given.points.detach(), 0.0, TokenMax()), width),
            key=lambda ball: float(ball.radius),
        )
        center = (
            torch.zeros(width, dtype=torch.float64) if ball.center is None else ball.center.detach().double()
        )
        self.spread, self.kappa = self.head.w * ball.radius, form.norm * ball.radius
        keys, pull = given.points.detach().double() - center, x @ form.a + form.beta
        scores = self._with_biases(map, given, pull @ keys.mT)
        law = scores.softmax(-1).nan_to_num(0.0)  # zero for a query that sees nothing
        steepest = computed_lengths(x).amax() * form.norm + Upper(vector_norm_bound(form.beta))
        longest = computed_lengths(keys).amax()
        inexact = form.error * computed_lengths(x).amax() + form.error_beta
        biased = Upper(16 * UNIT) * sizes(torch.where(torch.isfinite(scores), scores, 0.0)).amax()
        matrix = value_matrix(self.head, width)
        self.error = self._rounding(steepest * longest, inexact * longest + biased, keys)
        self.error = self.error + matrix.error / Lower(float(self.head.w))
        away = keys - (law @ keys).unsqueeze(1)  # (n, keys, d)
        self.gains = ((law.unsqueeze(-1) * (away @ matrix.center)).mT @ (away @ form.a.mT)).unsqueeze(1)
        value = in_double(map)(x)
        self.value = value.reshape(value.shape[-2:])

    def _with_biases(self, map: maps.ToContext, given: Measure, scores: Tensor) -> Tensor:
        """The scores with the biases of positions, weights and masks."""
        marks, others = torch.arange(len(scores)), given.positions()
        positional = positions_of(self.head.potential)
        if positional is not None:
            points = given.points.detach().double()
            scores = scores + positional.scores(
                points.new_zeros(len(scores), points.shape[-1]), points, marks, others
            )
        if given.log_weights is not None:
            scores = scores + given.log_weights.detach().double()
        return scores.masked_fill(~map.attention.support.allows(marks, others).expand_as(scores), -math.inf)

    def _rounding(self, scores: Upper, more: Upper, keys: Tensor) -> Upper:
        """Scores are right to η, `more` of it from their form and biases, so weights to a factor e^{2η};
        covariances are sums of at most (2 + 2) spread · kappa.
        """
        count, width = keys.shape
        eta = 8 * relative_error(4 * width + 16) * root(width) * scores + more
        if not float(eta) < 1e-3:
            raise Refusal(
                "scores of the context are so large that float64 leaves no digits of the weights; center "
                "or scale the tokens"
            )
        return 16 * (4 * eta + relative_error(4 * (count + width) + 64)) * root(width)
