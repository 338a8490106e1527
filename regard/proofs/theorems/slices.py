"""Slices of coordinates with a map each: in Frobenius norm the largest constant is that of all."""

from __future__ import annotations

import torch
from torch import Tensor

from regard._enclosed import root_of_squares
from regard._upper import Upper, stack
from regard.attention import Attention
from regard.certificate import Certificate, Hypothesis
from regard.domains import Domain, Shell
from regard.errors import ArgumentError
from regard.lookups import Factored, Linear
from regard.nonexpansive import Split
from regard.norms import EntryMax, Frobenius, Norm, OwnToken, Wasserstein
from regard.potentials import Dot
from regard.potentials.base import simple_parts, with_simple_parts
from regard.potentials.positions import PositionPotential
from regard.proofs.certification import certify, smallest
from regard.proofs.locating import one_sequence, tokenwise
from regard.proofs.slicing import sliced
from regard.proofs.subject import MultiHead
from regard.proofs.theorem import Bound, Theorem, checked, constants, finite
from regard.proofs.theorems.residual import smallest_for_couplings

THEOREM = Theorem(
    name="slices",
    title="slices of coordinates with a map each",
    statement=r"""
$f(x) = (f_1(x^1), \dots, f_H(x^H))$ with $x^h$ the slices of the coordinates and $L_h$ the constant of $f_h$
on its slice of the domain:
$$ \max_hL_h\ \text{ in Frobenius and EntryMax norm, } W_2\text{ and for the own token},\qquad
\Big(\sum_hL_h^2\Big)^{1/2}\ \text{ in TokenMax and TokenSum norm and other } W_p. $$
Slices whose maps see one token each count as one slice with the largest of their constants. $W_p$ needs
constants that hold coupling by coupling. The root is attained: $\sqrt H$ for $H$ slices that look up
different tokens.
Heads of one attention, each of which reads some coordinates alone (rows of its projections are zero
elsewhere): in Frobenius norm, and for the own token,
$$ L \le \|W_O\|_2\Big(\max_k\sum_{h\text{ reads }k}L_h^2\Big)^{1/2}. $$
""",
    hypotheses=(
        "a bound of every map on its slice",
        "in Wasserstein norms: constants that hold coupling by coupling",
    ),
    proof=r"""
With $d = x - x'$ and $o = f(x) - f(x')$, $|d_i|^2 = \sum_h|d_i^h|^2$ and the same for $o$. Frobenius:
$\sum_h\|o^h\|_F^2 \le \sum_hL_h^2\|d^h\|_F^2 \le \max_hL_h^2\|d\|_F^2$; the same with expectations for a
coupling and $p = 2$, for each token where each goes alone, and for token $i$ when it alone moves. TokenMax:
$|o_i|^2 \le \sum_hL_h^2\max_j|d_j^h|^2 \le \sum_hL_h^2\max_j|d_j|^2$. TokenSum: $\sum_i|o_i| \le
\sum_h\sum_i|o_i^h| \le \sum_j\sum_hL_h|d_j^h| \le (\sum_hL_h^2)^{1/2}\sum_j|d_j|$. $W_p$, $p \ge 2$:
$\|o\|_{L^p} \le (\sum_h\|o^h\|_{L^p}^2)^{1/2}$ by Minkowski's inequality in $L^{p/2}$, and $\|o^h\|_{L^p}
\le L_h\|d\|_{L^p}$. $p \le 2$: $\|o\|_{L^p} \le (\sum_h\|o^h\|_{L^p}^p)^{1/p} \le
\|(\sum_hL_h^p|d^h|^p)^{1/p}\|_{L^p}$, and $(\sum_h(L_h|d^h|)^p)^{1/p} \le
(\sum_hL_h^{2p/(2-p)})^{(2-p)/2p}|d| \le (\sum_hL_h^2)^{1/2}|d|$ by Hölder's inequality. No slice moves
farther than its token, so that $x^h$ stays in its slice of the domain. Heads: what head $h$ does not read
may be put to the center of the domain, in $x$ and in $x'$ alike, and both stay in the domain. So $\|f_h(x)
- f_h(x')\|_F^2 \le L_h^2\sum_{k\text{ read by }h}\|d_{\cdot k}\|^2$; the sum over heads is at most
$\max_k\sum_{h\text{ reads }k}L_h^2\,\|d\|_F^2$, and $W_O$ mixes as in `heads`.
""",
)


@THEOREM.constant(Split, Domain, Norm)
def slices(map: Split, domain: Domain, norm: Norm) -> Bound:
    """max_h L_h, or √Σ_h L_h²."""
    one_sequence(map)
    parts = [_part(map, k, domain, norm) for k in range(len(map.maps))]
    alone = [part for part, inner in zip(parts, map.maps, strict=True) if tokenwise(inner)]
    others = [part for part, inner in zip(parts, map.maps, strict=True) if not tokenwise(inner)]
    hypotheses: tuple[Hypothesis, ...] = (checked("every slice has a map of its own"),)
    if isinstance(norm, Wasserstein):
        hypotheses += (checked("the constants hold coupling by coupling"),)
    if isinstance(norm, (Frobenius, EntryMax, OwnToken)) or (isinstance(norm, Wasserstein) and norm.p == 2):
        return Bound(Upper(max(part.value for part in parts)), hypotheses, tuple(parts))
    roots = [part.value for part in others]
    roots += [max(part.value for part in alone)] if alone else []
    return Bound(root_of_squares([Upper(value) for value in roots]), hypotheses, tuple(parts))


def _some_unread(subject: MultiHead, domain: Domain, norm: Norm) -> bool:
    if len(subject.separate) < 2 or subject.residual or isinstance(domain, Shell):
        return False
    read = _read(subject)
    return read is not None and not bool(read.all())


@THEOREM.constant(MultiHead, Domain, Frobenius, about=_some_unread)
@THEOREM.constant(MultiHead, Domain, OwnToken, about=_some_unread)
def heads_apart(subject: MultiHead, domain: Domain, norm: Norm) -> Bound:
    """|W_O| √max_k Σ_h L_h², over the heads that read coordinate k."""
    read = _read(subject)
    assert read is not None
    parts = [
        finite(smallest(constants, head, domain, norm), f"head {h}")
        for h, head in enumerate(subject.separate)
    ]
    squares = stack([Upper(part.value) for part in parts]).square().unsqueeze(-1)
    most = squares.map(lambda value: value.expand(read.shape)).where(read).sum(0).amax()
    value = subject.mixing * most.sqrt()
    return Bound(value, (checked("which coordinates each head reads"),), tuple(parts))


def _read(subject: MultiHead) -> Tensor | None:
    """Which coordinates each head reads, (h, d); None where that is not seen."""
    found = [_read_by(head.attention) for head in subject.separate]
    rows = [row for row in found if row is not None]
    if len(rows) < len(found) or len({len(row) for row in rows}) > 1:
        return None
    return torch.stack(rows)


def _read_by(attention: Attention) -> Tensor | None:
    lookup = attention.lookup
    matrices = [
        lookup.w_v if isinstance(lookup, Linear) else lookup.w if isinstance(lookup, Factored) else None
    ]
    try:
        with_simple_parts(attention.potential, lambda part: part)
    except ArgumentError:  # a potential that may see tokens beside its parts
        return None
    scores = [part for part in simple_parts(attention.potential) if not isinstance(part, PositionPotential)]
    for part in scores:
        matrices += [part.w_q, part.w_k] if isinstance(part, Dot) else [None]
    known = [matrix for matrix in matrices if matrix is not None]
    if len(known) < len(matrices) or len({len(matrix) for matrix in known}) > 1:
        return None
    return (torch.cat(known, -1) != 0).any(-1)


def _part(map: Split, index: int, domain: Domain, norm: Norm) -> Certificate:
    inner = map.maps[index]
    found = finite(certify(inner, sliced(domain, index, len(map.maps)), norm), f"slice {index}")
    return smallest_for_couplings(inner, found, norm) if isinstance(norm, Wasserstein) else found
