"""One sequence with one head, and every number of it by its definition in plain float64:
nothing here is a bound.
"""

import math
from dataclasses import dataclass, replace

import torch

import regard as r
from regard._upper import exact
from regard.proofs.near.heads import LocalHeads
from regard.proofs.subject import subject_of
from tests.theorems.exact import D, generator, normal

CLOSE = 1e-9


def two(matrix):
    return float(torch.linalg.matrix_norm(matrix, 2))


def twos(matrices):
    return torch.linalg.matrix_norm(matrices, 2)


def is_close(found, stated, rel=CLOSE, abs=1e-12):
    """A bound that is at least the number it is of, and not more."""
    found = found.bound if hasattr(found, "bound") else torch.as_tensor(found, dtype=D)
    stated = torch.as_tensor(stated, dtype=D)
    assert found.shape == stated.shape or found.numel() == stated.numel()
    stated = stated.reshape(found.shape)
    assert bool((found >= stated * (1 - 1e-13) - 1e-15).all()), (found, stated)
    assert torch.allclose(found, stated, rtol=rel, atol=abs), (found, stated)


@dataclass
class Plain:
    """x, A, β, V, P, the slopes and what follows from them; `heads` and the rest are what is tested."""

    attention: r.Attention
    x: torch.Tensor
    a: torch.Tensor
    beta: torch.Tensor
    matrix: torch.Tensor
    bias: torch.Tensor
    heads: LocalHeads

    @property
    def local(self):
        return self.heads.heads[0]

    @property
    def values(self):
        return self.heads.separate[0]

    @property
    def n(self):
        return len(self.x)

    @property
    def seen(self):
        return self.bias > -math.inf

    @property
    def v(self):
        return self.x @ self.a + self.beta

    @property
    def away(self):
        return self.x - self.x.mean(0)

    @property
    def c(self):
        return self.away @ self.a.mT

    def law_at(self, x):
        return ((x @ self.a + self.beta) @ x.mT + self.bias).softmax(-1)

    @property
    def p(self):
        return self.law_at(self.x)

    @property
    def y(self):
        return self.x - (self.p @ self.x).unsqueeze(1)

    @property
    def z(self):
        return self.y @ self.matrix

    @property
    def own(self):
        own = self.c - (self.p @ self.c).unsqueeze(1)
        shares = torch.eye(self.n, dtype=D) - self.p.diagonal().unsqueeze(-1)
        return own + shares.unsqueeze(-1) * self.v.unsqueeze(1)

    @property
    def alpha(self):
        return self.v.norm(dim=-1, keepdim=True).expand(self.n, self.n)

    def zeta(self, d):
        """The centered change of scores for moves d (n, d)."""
        y = self.x + d
        moved = (y @ self.a + self.beta) @ y.mT - self.v @ self.x.mT
        return moved - (self.p * moved).sum(-1, keepdim=True)


def plain(seed=0, n=4, d=3, support=None, slope=None, scale=1.0, values=True, residual=False, tokens=1.0):
    g = generator(seed)
    x = normal(g, n, d, scale=tokens)
    w_q, w_k, b_q = normal(g, d, 2, scale=scale), normal(g, d, 2), normal(g, 2)
    matrix = normal(g, d, 2) if values else torch.eye(d, dtype=D)
    potential = r.Dot(w_q, w_k, scale=0.5, b_q=b_q)
    support = support or r.Full()
    marks = torch.arange(n)
    bias = torch.zeros(n, n, dtype=D)
    if slope is not None:
        potential, bias = potential + r.Alibi(slope), -slope * (marks[:, None] - marks).abs().double()
    bias = bias.masked_fill(~support.allows(marks, marks), -math.inf)
    attention = r.Attention(potential, r.Linear(matrix) if values else r.Identity(), support=support)
    heads = LocalHeads(subject_of(attention, residual), r.Neighborhood(x, 0.0))
    return Plain(attention, x, 0.5 * w_q @ w_k.mT, 0.5 * w_k @ b_q, matrix, bias, heads)


LOOSE = {"x": 0.011, "by_query": 0.023, "by_key": 0.017, "matrix": 0.013}


def loosen(s, errors=None):
    """The same facts, each known to an error that is large, so that bounds show what errors do to them; or to
    none at all, so that they show what rounding on the way does.
    """
    errors = LOOSE if errors is None else dict.fromkeys(LOOSE, errors)
    for local in s.heads.heads:
        for name in ("x", "by_query", "by_key"):
            setattr(local, name, replace(getattr(local, name), error=exact(errors[name])))
        local.radius = local.x.lengths().amax()
    for values in (*s.heads.separate, *(s.heads.folded or ())):
        norm = values.matrix.norm + exact(errors["matrix"])
        values.matrix = replace(values.matrix, error=exact(errors["matrix"]), norm=norm)
    return s


CASES = {
    "full": {},
    "causal": {"support": r.Causal()},
    "positions": {"slope": 0.7, "seed": 1, "n": 5},
    "sharp": {"scale": 6.0, "seed": 2},
}
