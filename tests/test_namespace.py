"""The first screen is short, everything else is in a module,
and what is asked for in the wrong place is pointed to.
"""

from __future__ import annotations

import pytest

import regard

VERBS = "attend apply explain linearize certify deviation falsify image cost audit cite wasserstein"
NOUNS = (
    "Measure Attention Certificate Witness Whole Ball Shell Neighborhood Radii "
    "Frobenius TokenMax TokenSum Wasserstein"
)


def test_the_first_screen_is_short() -> None:
    assert len(regard.__all__) <= 80
    assert set(VERBS.split()) | set(NOUNS.split()) <= set(regard.__all__)


def test_every_flat_name_is_there_once() -> None:
    assert len(set(regard.__all__)) == len(regard.__all__)
    assert all(name in vars(regard) for name in regard.__all__)


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Affine", "regard.maps"),
        ("Domain", "regard.domains"),
        ("SequenceNorm", "regard.norms"),
        ("Sdpa", "regard.engines"),
        ("Theorem", "regard.theorems"),
        ("THEOREMS", "regard.theorems"),
        ("Clipped", "regard.potentials"),
        ("PositiveRandom", "regard.normalizers"),
        ("Support", "regard.supports"),
        ("ArgumentError", "regard.errors"),
        ("misspecification", "regard.proofs"),
        ("row_statistics", "regard.derive"),
        ("Sizes", "regard.costs"),
    ],
)
def test_a_name_that_is_elsewhere_says_where(name: str, home: str) -> None:
    with pytest.raises(AttributeError, match=rf"^regard\.{name} is {home}\.{name}$"):
        getattr(regard, name)


def test_a_name_that_is_nowhere() -> None:
    for name in ("Nothing", "Tensor", "torch", "_check_nothing"):
        with pytest.raises(AttributeError, match=f"has no attribute '{name}'"):
            getattr(regard, name)
