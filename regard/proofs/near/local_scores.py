"""The scores of one head at one sequence, their slopes, and the logarithms of its laws,
with what rounding may have changed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard._enclosed import Numbers, Vectors, computed_lengths
from regard._round import vector_norm_bound
from regard._upper import ELEMENTARY, UNIT, Upper, relative_error, root, sizes
from regard.potentials import Potential
from regard.proofs.scores import bilinear
from regard.proofs.setting import positions_of
from regard.proofs.subject import Head
from regard.proofs.theorem import Refusal


@dataclass(frozen=True)
class LocalScores:
    """Scores (n, n) up to a constant in each row, within `error`, and their slopes in query (1 or n, n,
    d) and key (n, 1 or n, d).
    """

    center: Tensor
    error: Upper
    by_query: Vectors
    by_key: Vectors


def log_law(biased: Tensor, bias: Tensor | None, error: Upper) -> Numbers:
    """log P, and how far it may be from that of the true scores:
    those of the row and their log-sum-exp move by `error` each.
    """
    finite = torch.where(torch.isfinite(biased), biased, 0.0)
    if (
        not bool(torch.isfinite(biased).any())
        or bool(torch.isnan(biased).any())
        or bool((biased == math.inf).any())
    ):
        raise Refusal("scores leave the range of float64; scale the tokens")
    found = biased.log_softmax(-1)
    size = sizes(finite).amax()
    if bias is not None:
        size = size + 2 * sizes(torch.where(torch.isfinite(bias), bias, 0.0)).amax()
    return Numbers(found, 2 * error + Upper(8 * UNIT) * size + rounding_of_logs(found, found.shape[-1]))


def rounding_of_logs(logs: Tensor, terms: int) -> Upper:
    """What logarithms and log-sum-exps of so many terms lose: 16 roundings of their size,
    and of one for each term.
    """
    largest = float(torch.where(torch.isfinite(logs), logs, 0.0).abs().amax())
    return Upper(ELEMENTARY * UNIT * largest + (2 * terms + 64) * UNIT, 1)


def local_scores(head: Head, points: Tensor, x: Vectors, marks: Tensor, a: Upper) -> LocalScores:
    """Scores of all pairs of tokens, without what is fixed for a pair; x: the tokens about their mean."""
    form = bilinear.one(head.potential, points.shape[-1])
    if form is None:
        return _scores_by_differentiation(head, points, marks, a)
    width = points.shape[-1]
    longest, length, near = (
        computed_lengths(points).amax(),
        computed_lengths(form.a.flatten()),
        x.lengths().amax(),
    )
    # c_k = A x_k + γ, where γ and A times the center are the same for every key
    lost = relative_error(width + 2) * length * near + form.error * near + form.norm * x.error
    by_query = Vectors((x.center @ form.a.mT).unsqueeze(0), lost)
    # v_i = Aᵀx_i + β
    size = length * longest + Upper(vector_norm_bound(form.beta))
    lost = relative_error(width + 3) * size + form.error * longest + form.error_beta
    by_key = Vectors((points @ form.a + form.beta).unsqueeze(1), lost)
    # s_ik = v_i·x_k + constant in a row
    alpha = by_key.lengths().amax()
    error = by_key.error * near + alpha * x.error + relative_error(width + 2) * alpha * near
    return LocalScores(by_key.center.squeeze(1) @ x.center.mT, error, by_query, by_key)


def _scores_by_differentiation(head: Head, points: Tensor, marks: Tensor, a: Upper) -> LocalScores:
    """Scores that are bilinear in pairs but not one form (rotary positions), by automatic differentiation.

    Each is a product of at most four matrices of the width of a token, with rotations: assumed right to eight
    times the rounding of that.
    """
    potential, width = head.potential, points.shape[-1]
    queries, keys = (points.detach().clone().requires_grad_() for _ in range(2))
    with torch.enable_grad():
        scores = potential.scores(queries, keys, marks, marks)
        c = torch.stack(
            [
                torch.autograd.grad(scores[:, j].sum(), queries, retain_graph=True)[0]
                for j in range(len(points))
            ],
            1,
        )
        v = torch.stack(
            [torch.autograd.grad(scores[i].sum(), keys, retain_graph=True)[0] for i in range(len(points))], 0
        )
    content = _content(potential, points, marks, scores.detach())
    if not bool(torch.isfinite(content).any()):
        raise Refusal("scores leave the range of float64; scale the tokens")
    relative = 8 * relative_error(4 * width + 16) * root(width)
    longest = computed_lengths(points).amax()
    steep = computed_lengths(v).amax() + computed_lengths(c).amax() + a * longest
    size = steep * longest + sizes(torch.where(torch.isfinite(content), content, 0.0)).amax()
    return LocalScores(content, relative * size, Vectors(c, relative * steep), Vectors(v, relative * steep))


def _content(potential: Potential, points: Tensor, marks: Tensor, scores: Tensor) -> Tensor:
    """The scores without the biases of positions, which `pair_bias` has."""
    positional = positions_of(potential)
    return scores if positional is None else scores - positional.scores(points, points, marks, marks)
