"""What rules of theorems are about, where the types of subject, domain and norm cannot say it: predicates for
`about=`.

A rule that is not about something stays silent there; one that is, and cannot bound it, refuses with a
sentence.
"""

from __future__ import annotations

from typing import Any

from regard.domains import Domain, Near
from regard.normalizers import Normalizer
from regard.norms import Norm
from regard.potentials import Potential
from regard.proofs.setting import moves_of
from regard.proofs.subject import Head
from regard.proofs.terms import moving_terms
from regard.proofs.theorem import About


def rows_by(*kinds: type[Normalizer]) -> About:
    """Heads whose rows are normalized by one of these."""

    def about(head: Head, domain: Domain, norm: Norm) -> bool:
        return isinstance(head.normalizer, kinds)

    return about


def scores_by(kind: type[Potential]) -> About:
    """Heads whose scores have a term of this kind, positions apart."""

    def about(head: Head, domain: Domain, norm: Norm) -> bool:
        return any(isinstance(term, kind) for term, _ in moving_terms(head.potential))

    return about


def one_sequence_only(subject: Any, domain: Near, norm: Norm) -> bool:
    """A domain that is a single sequence: nothing moves."""
    return not bool((moves_of(domain) > 0).any())


def one_token_moves(subject: Any, domain: Near, norm: Norm) -> bool:
    """A domain where a single token moves."""
    return int((moves_of(domain) > 0).sum()) == 1


def all_of(*conditions: About) -> About:
    """What every condition is about."""

    def about(subject: Any, domain: Any, norm: Any) -> bool:
        return all(condition(subject, domain, norm) for condition in conditions)

    return about
