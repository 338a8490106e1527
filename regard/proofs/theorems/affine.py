"""Affine maps of tokens: the spectral norm is the constant."""

from __future__ import annotations

from regard._enclosed import lengths, product_norm
from regard._upper import exact, sizes
from regard.domains import Domain, Near
from regard.maps import Affine
from regard.norms import EntryMax, Norm
from regard.proofs.setting import moves_of
from regard.proofs.theorem import Bound, Theorem
from regard.proofs.tokenwise import length_of_moves, travel

THEOREM = Theorem(
    name="affine",
    title="affine maps of tokens",
    statement=r"""
$x_i \mapsto W^\top x_i + b$ has the constant $\|W\|_2$ in Frobenius, TokenMax and TokenSum norm and in every
$W_p$, and $\max_c\sum_k|W_{kc}|$ in EntryMax norm. Both are attained. An entry of a token that moves by at
most $r$ in length moves by at most $r\max_c|W_{\cdot c}|$.
""",
    hypotheses=(),
    proof=r"""
$|W^\top(x_i - x'_i)| \le \|W\|_2|x_i - x'_i|$ for each token, hence in every norm of the token lengths, and
for every coupling of tokens. One token that moves along the first singular vector attains it.
""",
)


@THEOREM.constant(Affine, Domain, Norm)
def affine(map: Affine, domain: Domain, norm: Norm) -> Bound:
    """|W|₂, or the largest column sum of |W| entry by entry."""
    if isinstance(norm, EntryMax):
        return Bound(sizes(map.w.detach().double()).sum(0).amax())
    return Bound(product_norm(map.w))


@THEOREM.deviation(Affine, Near, Norm)
def move_bound(map: Affine, domain: Near, norm: Norm) -> Bound:
    """|W|₂ r_i for each token, and entry by entry the longest column of W times r_i."""
    if isinstance(norm, EntryMax):
        return Bound(lengths(map.w.mT).amax() * exact(moves_of(domain)).amax())
    return Bound(length_of_moves(domain, travel.one(map, domain.measure.points, moves_of(domain)), norm))
