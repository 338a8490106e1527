"""Normalizer: how the scores of a query become weights on its keys."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.potentials import Potential


@dataclass(frozen=True, eq=False, repr=False)
class Reference(Object):
    """The reference measure of a row: what the weights are taken relative to.

    log_counts (..., n): key j counts as exp(log_counts_j) equal keys, None means one each;
    allowed (..., m, n): the support, None means everything; log_queries (..., m): weights of the queries,
    None means equal.

    Examples:
        >>> thrice = regard.normalizers.Reference(log_counts=torch.tensor([3.0, 1.0]).log())
        >>> weights = regard.Softmax().weights(torch.zeros(1, 2), thrice)
        >>> torch.allclose(weights, torch.tensor([[0.75, 0.25]]))  # the first key counts three times
        True
    """

    log_counts: Tensor | None = None
    allowed: Tensor | None = None
    log_queries: Tensor | None = None

    def counted(self, scores: Tensor) -> Tensor:
        """Scores with the log-counts added and -inf outside the support."""
        if self.log_counts is not None:
            scores = scores + self.log_counts.unsqueeze(-2)
        return self.supported(scores)

    def supported(self, scores: Tensor) -> Tensor:
        """Scores with -inf outside the support."""
        if self.allowed is None:
            return scores
        # Adding a bias of the mask's own, smaller shape is several times faster than filling scores by a
        # broadcast mask.
        return scores + torch.zeros(
            self.allowed.shape, dtype=scores.dtype, device=scores.device
        ).masked_fill_(~self.allowed, -math.inf)

    def present(self, scores: Tensor) -> Tensor:
        """True for the pairs that are in the support and carry mass, (..., m, n)."""
        return self.counted(torch.zeros_like(scores)) > -math.inf


class Normalizer(Object):
    """Scores (..., m, n) to weights (..., m, n).

    A query whose support is empty gets zero weights, in every normalizer.

    Examples:
        >>> scores = torch.tensor([[0.0, 1.0, 3.0]])
        >>> for one in (regard.Softmax(), regard.Sparsemax(), regard.Sigmoid(0.0)):
        ...     weights = one.weights(scores, regard.normalizers.Reference())
        ...     print(one.laws, [round(float(weight), 3) for weight in weights[0]])
        True [0.042, 0.114, 0.844]
        True [0.0, 0.0, 1.0]
        False [0.5, 0.731, 0.953]
    """

    laws: ClassVar[bool]
    """Whether each row of weights is a probability law."""
    variational: ClassVar[bool]
    """Whether the weights maximize `objective`."""
    rowwise: ClassVar[bool] = True
    """Whether a row of weights depends on that row of scores alone."""

    @abstractmethod
    def weights(self, scores: Tensor, reference: Reference) -> Tensor:
        """The weights, by the definition."""

    def objective(self, weights: Tensor, scores: Tensor, reference: Reference) -> Tensor:
        """⟨p, s⟩ - Ω(p), which the weights maximize, one number a row (...,  m)."""
        raise TypeError(f"{type(self).__name__} has no variational form")

    def sharp(self) -> bool:
        """Whether weights may jump faster than any multiple of the scores,
        so that rounding of scores shows.
        """
        return False

    def acting(self, potential: Potential) -> tuple[Potential, Normalizer]:
        """The potential and the normalizer that this one stands for; itself,
        unless it replaces the kernel exp(a).
        """
        return potential, self


def without_empty_rows(scores: Tensor) -> tuple[Tensor, Tensor | None]:
    """Scores whose empty rows (all -inf) are zero instead, and which rows those were (..., m, 1);
    None where there are none.
    """
    if scores.shape[-1] == 0:
        return scores, None
    empty = scores.detach().amax(-1, keepdim=True) == -math.inf
    if _check.holds(empty.any()) is False:
        return scores, None
    return scores.masked_fill(empty, 0.0), empty


def zero_where(weights: Tensor, empty: Tensor | None) -> Tensor:
    """No weight in empty rows."""
    return weights if empty is None else weights.masked_fill(empty, 0.0)


def entropy_term(weights: Tensor, log_counts: Tensor | None) -> Tensor:
    """p log(p / c) with 0 log 0 = 0, elementwise; ∞ where there is weight on a key that counts zero."""
    safe = torch.where(weights > 0, weights, torch.ones_like(weights))
    relative = safe.log()
    if log_counts is not None:  # a key without weight takes no part, even if it counts zero
        relative = relative - torch.where(weights > 0, log_counts.unsqueeze(-2), torch.zeros_like(weights))
    return torch.where(weights > 0, weights * relative, torch.zeros_like(weights))


def expectation(weights: Tensor, scores: Tensor) -> Tensor:
    """Σ_j p_j s_j, where keys without weight do not count even if their score is -inf."""
    return torch.where(weights > 0, weights * scores, torch.zeros_like(scores)).sum(-1)


def log_total(log_counts: Tensor) -> Tensor:
    """log Σ_j exp(log_counts_j), zero where no key counts."""
    none = (log_counts == -math.inf).all(-1, keepdim=True)
    return log_counts.masked_fill(none, 0.0).logsumexp(-1).masked_fill(none.squeeze(-1), 0.0)
