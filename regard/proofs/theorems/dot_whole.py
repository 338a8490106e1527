"""Dot-product scores on the whole space: no finite constant, the tokens that show it, and what would help."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._upper import Upper
from regard.attention import Attention
from regard.domains import Whole
from regard.norms import Norm
from regard.potentials import Gaussian
from regard.proofs.certification import remedies
from regard.proofs.scores import Form
from regard.proofs.setting import pair_bias
from regard.proofs.subject import Head, MultiHead, single_heads
from regard.proofs.terms import moving_term
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="dot_whole",
    title="dot-product attention is not Lipschitz on the whole space",
    statement=r"""
Scores $x_i^\top A x_j + \beta\cdot x_j$ with $A \ne 0$, values $W^\top x_j$ with $W \ne 0$, and a row that
sees two keys: $L = \infty$ in every norm. Tokens $(Ry, -Ry, x_*)$ have a derivative that grows like $R^2$; in
one dimension with $A = W = 1$ and $x_* = 0$ it is $1/3 + 2R^2/3$.
""",
    hypotheses=(
        "softmax rows",
        "scores are one bilinear form that is not zero",
        "values are not constant",
        "some row sees two keys",
    ),
    source="(kim2021, Theorem 3.1)",
    proof=r"""
The derivative of row $i$ by its own token has the part $W^\top C_iA^\top$, $C_i$ the covariance of the keys
under the row. Let $x_*$ make $|A^\top x_* + \beta|$ least and $y$ be orthogonal to that rest, with $Ay \ne 0$
and $W^\top y \ne 0$. Then the row of $x_*$ scores $Ry$ and $-Ry$ alike, for every $R$, and $C \succeq
2pR^2yy^\top$ with $p$ that does not tend to 0.
""",
)


def _bilinear_rows(head: Head, domain: Whole, norm: Norm) -> bool:
    return head.softmax and head.form(_width(head)) is not None


@THEOREM.constant(Head, Whole, Norm, about=_bilinear_rows)
def dot_whole(head: Head, domain: Whole, norm: Norm) -> Bound:
    """∞."""
    form = _form(head)
    _direction(head, form)
    if not _sees_two(head, domain):
        raise Refusal("no row sees two keys, and then rows do not look at scores")
    statements = (
        "softmax rows",
        "scores are one bilinear form that is not zero",
        "values are not constant",
        "some row sees two keys",
    )
    note = "growing_witness(attention, radius) shows it"
    hypotheses = tuple(checked(statement) for statement in statements)
    return Bound(Upper(math.inf), hypotheses, note=note, unbounded=True)


def growing_witness(subject: Head | Attention, radius: float) -> Tensor:
    """Tokens (R y, -R y, x_*) at which the derivative of softmax attention with bilinear scores grows like R²
    (kim2021, Theorem 3.1).

    In one dimension without biases they are (R, -R, 0). The last token sees all others under a causal mask
    too.

    Examples:
        >>> line = regard.Attention(regard.Dot(torch.eye(1), torch.eye(1)))
        >>> regard.proofs.growing_witness(line, 3.0).abs().flatten().tolist()  # R, -R and zero
        [3.0, 3.0, 0.0]
    """
    head = Head(single_heads(subject)[0]) if isinstance(subject, Attention) else subject
    start, direction = _direction(head, _form(head))
    return torch.stack([radius * direction, -radius * direction, start])


def _form(head: Head) -> Form:
    form = head.form(_width(head)) if head.softmax else None
    if form is None:
        raise Refusal(
            "tokens that show it are known for softmax rows of one bilinear form; give Softmax() and Dot() "
            "or Bilinear()"
        )
    return form


def _width(head: Head) -> int:
    try:
        return head.width(None)
    except Refusal:  # no projection at all: every width behaves alike
        return 1


def _direction(head: Head, form: Form) -> tuple[Tensor, Tensor]:
    """x_* with |Aᵀx_* + β| least, and a unit vector y orthogonal to the rest with Ay ≠ 0 and Wᵀy ≠ 0."""
    w = head.matrix(len(form.beta))
    start = torch.linalg.lstsq(form.a.mT, -form.beta.unsqueeze(-1), driver="gelsd").solution.squeeze(-1)
    rest = form.a.mT @ start + form.beta
    left, right = torch.linalg.svd(w)[0].mT, torch.linalg.svd(form.a)[2]
    candidates = torch.cat([right, left, right[:1] + left, right[:1] - left])
    if float(rest.norm()) > 1e-9 * float(form.beta.norm()):
        candidates = candidates - (candidates @ rest / rest.dot(rest)).unsqueeze(-1) * rest
    kept = candidates.norm(dim=-1, keepdim=True)  # what is left of a direction along the rest is rounding
    candidates = torch.where(kept > 1e-9, candidates / kept, 0.0)
    growth = (candidates @ form.a.mT).norm(dim=-1) * (candidates @ w).norm(dim=-1)
    best = int(growth.argmax())
    if not float(growth[best]) > 1e-12 * float(form.a.norm() * w.norm()):
        raise Refusal("scores or values do not depend on the tokens in a common direction")
    return start, candidates[best]


def _sees_two(head: Head, domain: Whole) -> bool:
    if domain.tokens == 1:
        return False
    bias = pair_bias(head, domain)
    return bias is None or int((bias > -math.inf).sum(-1).max()) > 1


@remedies.rule(Head)
def head_remedies(head: Head) -> tuple[str, ...]:
    """The smallest changes that would make a constant finite."""
    kind = type(head.attention.potential).__name__
    bound = (
        f"it becomes finite if the tokens are bounded: Ball(radius, tokens=n); {kind} scores and linear "
        "values grow with them"
    )
    layer = "or if a norm layer comes first, which bounds them: Compose((Normalize(), attention))"
    return bound, layer, _other_scores(head)


@remedies.rule(MultiHead)
def heads_remedies(subject: MultiHead) -> tuple[str, ...]:
    """The same for all heads."""
    return head_remedies(subject.separate[0])


def _other_scores(head: Head) -> str:
    try:
        gaussian = isinstance(moving_term(head.attention.potential)[0], Gaussian)
    except Refusal:
        gaussian = False
    if gaussian:
        return (
            "or, on Whole(tokens=n), with softmax rows that see their own token, w_q = w_k = w tied, and "
            "the lookup Factored(w, u)"
        )
    return (
        "or with other scores: Gaussian() has the constant 1 + 4 W₀((n-1)/e) times the norm of the values "
        "in TokenMax() on Whole(tokens=n)"
    )
