"""Which maps read what came before alone: where token i of the value depends on tokens up to i."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from regard import maps
from regard.attention import Attention
from regard.domains import Domain, Near
from regard.nonexpansive import MixTokens, Reflected, Split
from regard.proofs.locating import keeps_tokens, tokenwise
from regard.proofs.theorem import Refusal
from regard.supports import Causal
from regard.supports.base import conjuncts


def causal(map: Any) -> bool:
    """Whether token i of the value depends on tokens up to i alone, in the order of their marks."""
    if tokenwise(map):
        return True
    if isinstance(map, (maps.Compose, maps.Added, Split)):
        return all(causal(inner) for inner in map.maps)
    if isinstance(map, maps.Residual):
        return causal(map.map)
    if isinstance(map, MixTokens):
        return bool(map.w.shape[0] == map.w.shape[1]) and bool((map.w.detach().triu(1) == 0).all())
    attention = map.attention if isinstance(map, (maps.Heads, Reflected)) else map
    return (
        isinstance(attention, Attention)
        and attention.normalizer.rowwise
        and any(isinstance(part, Causal) for part in conjuncts(attention.support))
    )


def follow_own_tokens(steps: Sequence[Any], domain: Domain) -> None:
    """Refuse a composition in which a token may come back to itself through others: all maps are causal, or
    one alone looks at other tokens.
    """
    if not all(keeps_tokens(step) for step in steps):
        raise Refusal("a different number of tokens comes out, so no token is its own; use Frobenius()")
    if sum(not tokenwise(step) for step in steps) <= 1:
        return
    if not all(causal(step) for step in steps):
        raise Refusal(
            "a token comes back to itself through others that it moves; use Causal() supports, or TokenMax()"
        )
    if isinstance(domain, Near) and domain.measure.marks is not None:
        raise Refusal("tokens with equal marks see each other both ways; give the points without marks")
