"""Several heads: two ways to combine their bounds that are valid, and where."""

from __future__ import annotations

import math
from dataclasses import replace

from regard._enclosed import root_of_squares
from regard._upper import Upper, largest, total
from regard.certificate import Certificate
from regard.domains import Domain
from regard.norms import EntryMax, Frobenius, Norm, OwnToken, TokenMax, Wasserstein
from regard.proofs.certification import smallest
from regard.proofs.subject import Head, MultiHead
from regard.proofs.theorem import Bound, Theorem, constants, finite

THEOREM = Theorem(
    name="heads",
    title="several heads together",
    statement=r"""
$F(X) = \sum_h f_h(X)W_{O,h}$ with $L_h$ a bound of $f_h$ and $L'_h$ one of $f_hW_{O,h}$:
$$ L \le \min\Big\{\sum_h L'_h,\; \|W_O\|_2\sqrt{\textstyle\sum_h L_h^2}\Big\}. $$
The sum is valid in every norm. The root is valid in Frobenius and TokenMax norm, for $W_p$ with $p \ge 2$ and
for the own token, and **not** in TokenSum norm or $W_1$: two heads that copy token 0 into two
different rows move the token sum by $2 > \sqrt{1 + 1}$. $\sqrt{\sum_h(\|W_{O,h}\|L_h)^2}$ is valid in no
norm.
""",
    hypotheses=("a bound for every head",),
    proof=r"""
The triangle inequality; and, for a token, $|\sum_h u_hW_{O,h}| \le \|W_O\|\,(\sum_h|u_h|^2)^{1/2}$ with $W_O$
the vertical stack, then Minkowski in $\ell^{p/2}$ over tokens.
""",
)


def _several(subject: MultiHead, domain: Domain, norm: Norm) -> bool:
    return len(subject.separate) > 1 and not subject.residual


@THEOREM.constant(MultiHead, Domain, Norm, about=_several)
def heads(subject: MultiHead, domain: Domain, norm: Norm) -> list[Bound]:
    """The smallest bound of each head together, and then every theorem that holds for all of them,
    for the ladder.
    """
    separate = _bounds(subject.separate, domain, norm)
    folded = None if subject.folded is None else _bounds(subject.folded, domain, norm)
    best = _together(subject, separate, folded, norm)
    found = [best]
    for theorem in _common_theorems([*separate, *(folded or ())]):
        picked = None if folded is None else [_rung(part, theorem) for part in folded]
        bound = _together(subject, [_rung(part, theorem) for part in separate], picked, norm)
        if float(bound.value) > float(best.value):
            found.append(replace(bound, note=theorem))
    return found


def _bounds(heads: list[Head], domain: Domain, norm: Norm) -> list[Certificate]:
    return [finite(smallest(constants, head, domain, norm), f"head {h}") for h, head in enumerate(heads)]


def _together(
    subject: MultiHead, separate: list[Certificate], folded: list[Certificate] | None, norm: Norm
) -> Bound:
    """The smaller of the two forms."""
    root = isinstance(norm, (Frobenius, TokenMax, OwnToken)) or (
        isinstance(norm, Wasserstein) and norm.p >= 2
    )
    joined = subject.mixing * root_of_squares(_values(separate)) if root else Upper(math.inf)
    if folded is None:
        return Bound(joined if root else _combine_side_by_side(separate, norm), parts=tuple(separate))
    added = total(_values(folded))
    parts = separate if float(joined) <= float(added) else folded
    return Bound(joined.minimum(added), parts=tuple(parts))


def _values(parts: list[Certificate]) -> list[Upper]:
    return [Upper(part.value) for part in parts]


def _common_theorems(parts: list[Certificate]) -> list[str]:
    """The theorems that gave a bound for every head."""
    names = [{rung.theorem for rung in (part, *part.others)} for part in parts]
    return sorted(set.intersection(*names))


def _rung(part: Certificate, theorem: str) -> Certificate:
    return next(rung for rung in (part, *part.others) if rung.theorem == theorem)


def _combine_side_by_side(parts: list[Certificate], norm: Norm) -> Upper:
    """Heads side by side, not mixed: the largest in EntryMax norm, at most the sum in others."""
    return largest(_values(parts)) if isinstance(norm, EntryMax) else total(_values(parts))
