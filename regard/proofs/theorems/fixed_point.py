"""Fixed points: z = f(z) + u has the constant 1/(1 - L) as a map of u, where f has L below one."""

from __future__ import annotations

from regard._enclosed import length
from regard._upper import Upper, exact
from regard.domains import Ball, Domain, Near, TokenSet, Whole
from regard.fixed_point import FixedPoint
from regard.maps import Residual
from regard.norms import SequenceNorm
from regard.proofs.certification import certify
from regard.proofs.imaging import image, imaging
from regard.proofs.locating import enclosing, keeps_tokens, one_sequence
from regard.proofs.setting import finite_ball, radius_of
from regard.proofs.shapes import Widths, widths
from regard.proofs.theorem import Bound, Refusal, Theorem, checked, finite

THEOREM = Theorem(
    name="fixed_point",
    title="fixed point of a contraction",
    statement=r"""
Let $f$ have the constant $L \lt 1$ in a norm of sequences. Then $z = f(z) + u$ has exactly one solution for
every $u$, and the map $u \mapsto z$ has the constant $\frac{1}{1 - L}$ in this norm. The same holds for the
iterates $z_0 = u$, $z_{k+1} = f(z_k) + u$, and
$$ \|z_k - z\| \le \frac{L}{1 - L}\,\|z_k - z_{k-1}\|, \qquad
\|y - z\| \le \frac{1}{1 - L}\,\|f(y) + u - y\| \ \text{ for every } y. $$
In the other direction $\|z - z'\| \ge \frac{1}{1 + L}\,\|u - u'\|$. The equation $a = J^\top a + v$ of the
backward pass contracts with the same $L$ in the dual norm.
""",
    hypotheses=("a constant below one of the map, wherever the iterates are",),
    proof=r"""
$g(z) = f(z) + u$ is a contraction of a complete space, so Banach's theorem gives existence and uniqueness.
$\|z - z'\| \le \|f(z) - f(z')\| + \|u - u'\| \le L\,\|z - z'\| + \|u - u'\|$; the lower bound is the same
with the triangle inequality the other way round. For iterates,
$\|z_{k+1} - z_{k+1}'\| \le L\,\|z_k - z_k'\| + \|u - u'\|$ and $z_0 = u$, so that the constant is at most
$1 + L + \dots + L^{k+1} \le \frac{1}{1 - L}$. For every $y$,
$\|y - z\| \le \|y - g(y)\| + \|g(y) - g(z)\| \le \|y - g(y)\| + L\,\|y - z\|$; with $y = z_{k-1}$ and one
more application of $g$ this is the first estimate. The transpose of $J$ has in the dual norm the norm that
$J$ has in the norm itself.
Where the iterates are: if $f$ sends everything to tokens of length at most $s$ and $|u_i| \le r$, then all
iterates but the first have tokens of length at most $r + s$, and so has the solution.
""",
    source="(bai2019)",
)


def _inner(map: FixedPoint) -> None:
    one_sequence(map.map)
    if not keeps_tokens(map.map):
        raise Refusal("the map gives a different number of tokens than it takes, so it has no fixed point")


def _tokens(domain: Domain) -> int | None:
    return domain.measure.size if isinstance(domain, Near) else domain.tokens  # type: ignore[attr-defined]


@THEOREM.constant(FixedPoint, Domain, SequenceNorm)
def fixed_point(map: FixedPoint, domain: Domain, norm: SequenceNorm) -> Bound:
    """1/(1 - L) with L on all of space."""
    _inner(map)
    return _geometric(map, Whole(_tokens(domain)), norm)


@THEOREM.constant(FixedPoint, Ball, SequenceNorm)
def where_iterates_are(map: FixedPoint, domain: Ball, norm: SequenceNorm) -> Bound:
    """1/(1 - L) with L on a ball that holds the injected tokens and all iterates."""
    _inner(map)
    reach = _reach(map, domain)
    if reach is None:
        raise Refusal("the map may send tokens anywhere; put IntoBall(radius) first")
    return _geometric(map, finite_ball(reach.maximum(_length(domain)), None, domain.tokens), norm)


@THEOREM.constant(FixedPoint, Near, SequenceNorm)
def over_balls(map: FixedPoint, domain: Near, norm: SequenceNorm) -> Bound:
    """The same on a ball that holds the neighborhood."""
    part = finite(certify(map, enclosing(domain), norm), "the fixed point")
    return Bound(Upper(part.value), part.hypotheses, (part,), "on a ball that holds the neighborhood")


def _geometric(map: FixedPoint, domain: Domain, norm: SequenceNorm) -> Bound:
    part = finite(certify(map.map, domain, norm), "the map")
    if not part.value < 1:
        raise Refusal(
            f"the map has the constant {part.value:.4g} in {norm!r}, which is not a contraction; "
            f"multiply it by a number below {1 / part.value:.4g}"
        )
    return Bound(exact(1.0) / (1 - Upper(part.value)), (checked("the map is a contraction"),), (part,))


def _length(ball: Ball) -> Upper:
    """At least the length of every token of a ball."""
    return radius_of(ball) if ball.center is None else radius_of(ball) + length(ball.center)


def _reach(map: FixedPoint, domain: Ball) -> Upper | None:
    """How long tokens of f(z) + u can be, wherever z is; None where there is no bound."""
    found = image(map.map, Whole(domain.tokens))
    return _length(found) + _length(domain) if isinstance(found, Ball) else None


@widths.rule(FixedPoint)
def _widths(map: FixedPoint, width: int | None) -> Widths:
    return widths.one(Residual(map.map), width)  # z and f(z) are added


@imaging.rule(FixedPoint, TokenSet)
def _image(map: FixedPoint, domain: TokenSet) -> TokenSet:
    """A ball that holds what f gives, and what is injected."""
    _inner(map)
    reach = _reach(map, domain) if isinstance(domain, Ball) else None
    if reach is None:
        return Whole(domain.tokens)
    return finite_ball(reach, None, domain.tokens)
