"""Maps that join, cut or mix tokens linearly: their constants are norms of matrices, all attained."""

from __future__ import annotations

import math

from regard._enclosed import product_norm
from regard._upper import Lower, Upper, exact, exact_lower, root, sizes
from regard.domains import Domain
from regard.nonexpansive import Flatten, MixTokens, Pool, Unflatten
from regard.norms import Frobenius, Norm, OwnToken, TokenMax, TokenSum, Wasserstein
from regard.proofs.setting import tokens_of
from regard.proofs.theorem import Bound, Refusal, Theorem, checked

THEOREM = Theorem(
    name="token_maps",
    title="tokens joined, cut and mixed",
    statement=r"""
For sequences of $n$ tokens, in Frobenius, TokenMax, TokenSum and EntryMax norm, each attained:
pool, $\sum_ix_i/\sqrt n$, has $1$, $\sqrt n$, $1/\sqrt n$ and $\sqrt n$, and $\sqrt n$ in every $W_p$;
flatten, $(n, d)$ to $(1, nd)$, has $1$, $\sqrt n$, $1$ and $1$;
unflatten, $(1, kd)$ to $(k, d)$, has $1$, $1$, $\sqrt k$ and $1$, and $k^{-1/\max(p, 2)}$ in $W_p$;
mix, $x \mapsto wx$, has $\|w\|_2$, $\max_i\sum_j|w_{ij}|$, $\max_j\sum_i|w_{ij}|$ and $\max_i\sum_j|w_{ij}|$.
For the own token, mixing has $\max_i|w_{ii}|$ where as many tokens come out as go in.
""",
    hypotheses=("the number of tokens is given, where the constant depends on it",),
    proof=r"""
Mixing: $w\otimes I$ has the norm of $w$; $|\sum_jw_{ij}d_j| \le \sum_j|w_{ij}|\max_j|d_j|$, attained by $d_j
= \mathrm{sign}(w_{ij})e$; $\sum_i|\sum_jw_{ij}d_j| \le \max_j\sum_i|w_{ij}|\sum_j|d_j|$, attained by one
token that moves. Pooling is mixing by $w = \mathbf 1^\top/\sqrt n$; for laws of $n$ tokens each it does not
look at the order, and $|\sum_i(x_i - y_{\sigma(i)})|/\sqrt n \le \sqrt n\,W_1 \le \sqrt n\,W_p$ for the best
matching $\sigma$. Flattening: $(\sum_i|d_i|^2)^{1/2}$ is at most $\sqrt n\max_i|d_i|$ and at most
$\sum_i|d_i|$. Cutting one token $d = (d_1, \dots, d_k)$: $\max_i|d_i| \le |d|$, $\sum_i|d_i| \le \sqrt
k\,|d|$; matching piece $i$ with piece $i$ is one coupling, so $W_p \le (\frac1k\sum_i|d_i|^p)^{1/p}$, which
is at most $k^{-1/2}|d|$ for $p \le 2$ and $k^{-1/p}|d|$ for $p \ge 2$.
""",
)

ORDER = (
    "the order of tokens counts here, so this is not a map of laws; use Frobenius(), TokenMax() or TokenSum()"
)


@THEOREM.constant(Pool, Domain, Norm)
def pool(map: Pool, domain: Domain, norm: Norm) -> Bound:
    """1 in Frobenius, 1/√n in TokenSum norm, √n in others."""
    _sequences(norm, "pooling")
    if isinstance(norm, Frobenius):
        return Bound(exact(1.0))
    tokens = _count(domain)
    value = exact(1.0) / _least_root(tokens) if isinstance(norm, TokenSum) else root(tokens)
    return Bound(value, (checked("the number of tokens"),))


@THEOREM.constant(Flatten, Domain, Norm)
def flatten(map: Flatten, domain: Domain, norm: Norm) -> Bound:
    """√n in TokenMax norm, 1 in others."""
    _sequences(norm, "flattening")
    _ordered(norm)
    if not isinstance(norm, TokenMax):
        return Bound(exact(1.0))
    return Bound(root(_count(domain)), (checked("the number of tokens"),))


@THEOREM.constant(Unflatten, Domain, Norm)
def unflatten(map: Unflatten, domain: Domain, norm: Norm) -> Bound:
    """√k in TokenSum norm, k^(-1/max(p, 2)) in W_p, 1 in others."""
    _sequences(norm, "cutting a token")
    _expect(domain, 1, "one token is cut")
    if isinstance(norm, TokenSum):
        return Bound(root(map.tokens))
    if isinstance(norm, Wasserstein) and not math.isinf(norm.p):
        if norm.p <= 2:
            return Bound(exact(1.0) / _least_root(map.tokens))
        return Bound(Upper(map.tokens ** (-1 / norm.p), 64))
    return Bound(exact(1.0))


@THEOREM.constant(MixTokens, Domain, Norm)
def mix_tokens(map: MixTokens, domain: Domain, norm: Norm) -> Bound:
    """|w|₂ in Frobenius norm, sums of |w| over rows or columns in others."""
    _ordered(norm)
    w = map.w.detach().double()
    _expect(domain, w.shape[1], f"the matrix mixes {w.shape[1]} tokens")
    if isinstance(norm, OwnToken):
        if w.shape[0] != w.shape[1]:
            raise Refusal("a different number of tokens comes out, so no token is its own; use Frobenius()")
        return Bound(sizes(w.diagonal()).amax())
    if isinstance(norm, Frobenius):
        return Bound(product_norm(w))
    return Bound(sizes(w).sum(0 if isinstance(norm, TokenSum) else 1).amax())


def _count(domain: Domain) -> int:
    tokens = tokens_of(domain)
    if tokens is None:
        raise Refusal("this bound depends on the number of tokens; say it, e.g. Ball(radius, tokens=n)")
    return tokens


def _expect(domain: Domain, wanted: int, what: str) -> None:
    tokens = tokens_of(domain)
    if tokens is not None and tokens != wanted:
        raise Refusal(f"{what} and the sequences have {tokens}; give a domain with tokens={wanted}")


def _ordered(norm: Norm) -> None:
    if isinstance(norm, Wasserstein):
        raise Refusal(ORDER)


def _sequences(norm: Norm, what: str) -> None:
    if isinstance(norm, OwnToken):
        raise Refusal(f"{what} gives a different number of tokens, so no token is its own; use Frobenius()")


def _least_root(number: int) -> Lower:
    """At most √number."""
    return exact_lower(float(number)).sqrt()
