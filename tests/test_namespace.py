"""The first screen is short, everything else is in a module,
and what is asked for in the wrong place is pointed to.
"""

from __future__ import annotations

from types import ModuleType

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


def test_completion_offers_the_public_names_and_the_modules_used_by_name() -> None:
    """Nothing of another package, no private name, and no module whose name differs from a public name by its
    ending.
    """
    shown = {name: getattr(regard, name) for name in dir(regard)}
    modules = {name for name, found in shown.items() if isinstance(found, ModuleType)}
    assert set(shown) - modules == {*regard.__all__, "__version__"}
    assert modules >= {"errors", "maps", "nn", "hf", "plot"}
    assert all(shown[name].__name__ == f"regard.{name}" for name in modules)
    assert len(shown) <= 90
    words = {name.casefold().rstrip("s") for name in regard.__all__}
    assert not {name for name in modules if name.rstrip("s") in words}


def test_modules_that_completion_leaves_out_are_still_attributes() -> None:
    for name in ("proofs", "potentials", "costs", "domains", "audits"):
        assert name not in dir(regard)
        assert getattr(regard, name).__name__ == f"regard.{name}"


@pytest.mark.parametrize(
    ("name", "home"),
    [
        ("Residual", "regard.maps"),
        ("Report", "regard.audits"),
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
