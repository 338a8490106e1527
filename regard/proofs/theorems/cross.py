"""Attention of one sequence to another: queries move, keys move, or both."""

from __future__ import annotations

import math

from torch import Tensor

from regard._enclosed import lengths, root_of_squares
from regard._upper import Upper, exact, largest, least
from regard.attention import Attention
from regard.domains import Ball, Domain, Near, Neighborhood, Radii
from regard.maps import FromQueries, Joint, ToContext
from regard.measure import Measure
from regard.norms import Frobenius, Norm, TokenMax, Wasserstein
from regard.proofs.locating import one_sequence
from regard.proofs.scores import BallFacts, Slopes, slopes
from regard.proofs.setting import balls_of, crowding, equivariant, moves_of, pair_bias, tokens_of, width_of
from regard.proofs.subject import Head, subject_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked
from regard.proofs.tokenwise import refuse_entries

THEOREM = Theorem(
    name="cross",
    title="attention to a context",
    statement=r"""
$f(X, Y)_i = W^\top\sum_jP_{ij}y_j$ with $m$ queries and keys in $B(c, R)$, key slopes $|v_{ij}| \le \alpha$
in a ball of radius $\nu$, query slopes in a ball of radius $\kappa$:
$$ L_X = wR\kappa \text{ in every norm},\qquad L_Y = w\sqrt{N(1 + 2R\nu + R^2\alpha^2)},\quad N = 1 \text{ in
TokenMax},\ N \le \frac{m}{1 + (n-1)e^{-\mathrm{osc}}} \text{ in Frobenius norm}. $$
Both move: $\sqrt{L_X^2 + L_Y^2}$ in Frobenius, $L_X + L_Y$ in TokenMax norm. For scores $x_i^\top Ay_j +
\beta\cdot y_j$: $\kappa = \|A\|R$ whatever the queries, $\nu = 0$, $\alpha = \max_i|A^\top x_i + \beta|$.
""",
    hypotheses=("softmax rows", "values affine in the keys", "keys in a ball"),
    proof=r"""
The two terms of $(Df[D])_i = W^\top\{\mathbb{E}_i[d + y\,(v\cdot d)] + \mathrm{Cov}_i(y, z)\,d_i\}$ apart,
each bounded as for `token_max` and `frobenius`: a law on a ball of
radius $R$ has standard deviation at most $R$ in each direction, so $\|\mathrm{Cov}_i(y, z)\| \le R\kappa$.
""",
)


@THEOREM.constant(ToContext, Domain, Norm)
def queries(map: ToContext, domain: Domain, norm: Norm) -> Bound:
    """w R κ: queries alone move."""
    refuse_entries(norm, "attention to a context")
    head = _head(map)
    if isinstance(norm, Wasserstein):
        equivariant(head, domain)
    context = _points(map.context)
    held = Neighborhood(context, 0.0, TokenMax())
    balls = balls_of(domain, head.width(context.shape[-1]))
    values = [
        head.w * key.radius * _slopes(head, query, key).kappa
        for query in balls
        for key in balls_of(held, context.shape[-1])
    ]
    return Bound(
        _least(values, "the slope of the scores in the queries has no bound here; use Ball(radius)"),
        (checked("softmax rows"), checked("the keys are given")),
    )


@THEOREM.constant(FromQueries, Domain, Norm)
def keys(map: FromQueries, domain: Domain, norm: Norm) -> Bound:
    """w √(N (1 + 2Rν + R²α²)): keys alone move."""
    _check_norm(norm)
    head, given = _head(map), _points(map.queries)
    width = head.width(width_of(domain) or given.shape[-1])
    tokens, values = tokens_of(domain), []
    for key in balls_of(domain, width):
        found = _slopes_of_queries(head, given, key)
        values.append(_keys(head, key, found, _crowd(head, domain, norm, found.osc, len(given), tokens)))
    return Bound(
        _least(values, "the keys are not bounded; use Ball(radius)"),
        (checked("softmax rows"), checked("every key is in a ball of finite radius")),
    )


@THEOREM.constant(Joint, Domain, Norm)
def both(map: Joint, domain: Domain, norm: Norm) -> Bound:
    """√(L_X² + L_Y²) in Frobenius, L_X + L_Y in TokenMax norm."""
    _check_norm(norm)
    head = _head(map)
    first, second, count = _split(domain, map.queries)
    width, values = head.width(width_of(domain)), []
    for query in balls_of(first, width):
        for key in balls_of(second, width):
            found = _slopes(head, query, key)
            moved = _keys(head, key, found, _crowd(head, second, norm, found.osc, map.queries, count))
            own = head.w * key.radius * found.kappa
            values.append(root_of_squares([own, moved]) if isinstance(norm, Frobenius) else own + moved)
    return Bound(
        _least(values, "the tokens are not bounded; use Ball(radius)"),
        (checked("softmax rows"), checked("every token is in a ball of finite radius")),
    )


def _head(map: ToContext | FromQueries | Joint) -> Head:
    one_sequence(map)
    attention: Attention = map.attention
    head = subject_of(attention).separate[0]
    if not head.softmax:
        raise Refusal(f"rows of {type(head.normalizer).__name__} are not Gibbs laws; use Softmax()")
    head.factors  # noqa: B018 (values without a theorem are refused here)
    return head


def _check_norm(norm: Norm) -> None:
    if not isinstance(norm, (Frobenius, TokenMax)):
        raise Refusal("keys that move are bounded in Frobenius() and TokenMax()")


def _points(given: Measure | Tensor) -> Tensor:
    points = (given.points if isinstance(given, Measure) else given).detach().double()
    if points.ndim != 2:
        raise Refusal("the given sequence has batch dimensions; bounds are for one sequence (n, d)")
    return points


def _least(values: list[Upper], why: str) -> Upper:
    found = least(values)
    if not math.isfinite(found):
        raise Refusal(why)
    return found


def _slopes(head: Head, query: BallFacts, key: BallFacts) -> Slopes:
    """Slopes for queries in one ball and keys in another."""
    form = head.form(len(key.center))
    if form is None:
        return slopes.one(head.potential, _union(query, key))
    return _bilinear(form.shift(query.center) + form.norm * query.radius, form.norm * key.radius, key)


def _slopes_of_queries(head: Head, given: Tensor, key: BallFacts) -> Slopes:
    """Slopes for queries that are known."""
    form = head.form(len(key.center))
    if form is not None:
        return _bilinear(largest([form.shift(x) for x in given]), exact(0.0), key)
    held = balls_of(Neighborhood(given, 0.0, TokenMax()), given.shape[-1])
    return _slopes(head, min(held, key=lambda ball: float(ball.radius)), key)


def _bilinear(alpha: Upper, kappa: Upper, key: BallFacts) -> Slopes:
    return Slopes(alpha, exact(0.0), kappa, Upper(math.inf), 2 * key.radius * alpha, exact(0.0))


def _union(query: BallFacts, key: BallFacts) -> BallFacts:
    """A ball about the keys' center that holds the queries too."""
    apart = lengths(query.center - key.center, 1) + query.radius
    return BallFacts(key.center, key.radius.maximum(apart), query.reach.maximum(key.reach))


def _keys(head: Head, key: BallFacts, found: Slopes, crowd: Upper) -> Upper:
    return head.w * (crowd * (1 + 2 * key.radius * found.nu + (key.radius * found.alpha).square())).sqrt()


def _crowd(head: Head, keys: Domain, norm: Norm, osc: Upper, rows: int, count: int | None) -> Upper:
    """N: one in TokenMax norm; the number of queries where biases or masks decide who sees whom."""
    if isinstance(norm, TokenMax):
        return exact(1.0)
    if count is None or not _has_no_bias(head, keys):
        return exact(rows)
    return crowding(head, Ball(0.0, tokens=count), osc, rows)


def _has_no_bias(head: Head, keys: Domain) -> bool:
    try:
        return pair_bias(head, keys) is None
    except Refusal:
        return False


def _split(domain: Domain, queries: int) -> tuple[Domain, Domain, int | None]:
    """Where queries and keys are, and how many keys there are."""
    tokens = tokens_of(domain)
    count = None if tokens is None else tokens - queries
    if count is not None and count < 1:
        raise Refusal(f"of {tokens} tokens {queries} are queries, so there is no key")
    if not isinstance(domain, Near):
        return domain, domain.replace(tokens=count), count
    points, moves = domain.measure.points, moves_of(domain)
    if domain.measure.log_weights is not None or domain.measure.marks is not None:
        raise Refusal(
            "queries and keys that move together have no weights or marks; give the points without them"
        )
    return Radii(points[:queries], moves[:queries]), Radii(points[queries:], moves[queries:]), count
