"""An infinity always says why, and what would help: every noun on every kind of domain in every norm."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball, Near, Neighborhood, Shell, Whole, one_token
from regard.maps import (  # fmt: skip
    Added,
    Affine,
    Compose,
    FromQueries,
    Gated,
    Gelu,
    Heads,
    Joint,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    ToContext,
    feed_forward,
    pre_norm,
)
from regard.norms import EntryMax, Frobenius, TokenMax, TokenSum, Wasserstein
from regard.proofs import certify, deviation
from regard.proofs.theorems import dot_whole, taylor_model
from tests import nouns
from tests.nouns import _t as t

D = torch.float64
X = t(6, 4, seed=9)
W = t(4, 4, seed=3)
HEAD = r.Attention(r.Dot(W, W), r.Linear(W))
FAMILIES = (
    {f"potential {name}": r.Attention(noun) for name, noun in nouns.POTENTIALS.items()},
    {f"normalizer {name}": r.Attention(r.Dot(), normalizer=noun) for name, noun in nouns.NORMALIZERS.items()},
    {f"support {name}": r.Attention(r.Dot(), support=noun) for name, noun in nouns.SUPPORTS.items()},
    {f"lookup {name}": r.Attention(r.Dot(), noun) for name, noun in nouns.LOOKUPS.items()},
    {f"moment {name}": r.Attention(r.Dot(), moment=noun) for name, noun in nouns.MOMENTS.items()},
    {
        "affine": Affine(W),
        "pointwise": Pointwise(Relu()),
        "layer norm": Normalize(),
        "layer norm without eps": Normalize(0.0),
        "rms norm without eps": Normalize(0.0, centered=False),
        "gated": Gated(Silu(), W, W, W),
        "residual": Residual(HEAD),
        "residual of sigmoid": Residual(HEAD.replace(normalizer=r.Sigmoid())),
        "norm and head": Compose((Normalize(weight=torch.ones(4, dtype=D)), HEAD)),
        "sum": Added((HEAD, Affine(W))),
        "heads": Heads(r.Attention(r.Dot(t(2, 4, 3), t(2, 4, 3, seed=1)), r.Linear(t(2, 4, 3))), t(2, 3, 4)),
        "block": pre_norm(HEAD, feed_forward(Gelu(), W, W), Normalize(), Normalize()),
        "to a context": ToContext(HEAD, X),
        "from queries": FromQueries(HEAD, X),
        "joint": Joint(HEAD, 3),
        "lipschitz norm": r.lipschitz_norm.LipschitzNorm(W, W, W),
    },
)
MAPS = {name: map for family in FAMILIES for name, map in family.items()}
DOMAINS = (
    Whole(6), Ball(1.0), Ball(1.0, X[0], 6), Shell(0.1, 2.0, 6), Shell(0.1, 2.0, 6, centered=False),
    Neighborhood(X, 0.1), one_token(X, 1, 0.1),
)  # fmt: skip
NORMS = (Frobenius(), TokenMax(), TokenSum(), EntryMax(), Wasserstein(1.0), Wasserstein(2.0))


def explained(found: r.Certificate) -> bool:
    """Either the infinity is a theorem, or a sentence says why and, after a semicolon, what would help."""
    if found.theorem != "no theorem":
        return found.theorem.startswith(dot_whole.THEOREM.cited)
    return bool(found.refused) and all(found.refused) and any("; " in sentence for sentence in found.refused)


@pytest.mark.parametrize("name", MAPS)
def test_every_infinity_is_explained(name):
    for domain in DOMAINS:
        for norm in NORMS:
            asked = (certify, deviation) if isinstance(domain, Near) else (certify,)
            for found in (ask(MAPS[name], domain, norm) for ask in asked):
                assert not math.isnan(found.value)
                assert math.isfinite(found.value) or explained(found), str(found)


def test_attention_near_an_input_has_constants_of_laws():
    """On a ball that holds the neighborhood, where masks and positions do not stand in the way."""
    near = Neighborhood(X, 0.1)
    for p in (1.0, 2.0, 3.0, math.inf):
        found = certify(HEAD.replace(support=r.Full()), near, Wasserstein(p))
        assert found.value < math.inf or "range of numbers" in str(found)
    assert certify(r.Attention(r.Dot(scale=0.1)), near, Wasserstein(2.0)).value < math.inf
    masked = certify(HEAD.replace(support=r.Causal()), near, Wasserstein(2.0))
    assert "not functions of the law of tokens; use TokenMax() or Frobenius()" in str(masked)


def test_scores_without_a_theorem_in_a_norm_name_the_norms_that_have_some():
    found = certify(r.Attention(r.Dot()), Ball(1.0), EntryMax())
    assert "no theorem bounds the constant of Softmax rows of Dot scores in EntryMax()" in str(found)
    assert "there are theorems in TokenMax() and Frobenius()" in str(found)


@pytest.mark.parametrize("ask", [certify, deviation])
@pytest.mark.parametrize("norm", [Frobenius(), TokenMax()])
def test_the_taylor_model_proves_no_infinity(ask, norm):
    """Far from the input its remainders are no numbers, and it says so."""
    block = pre_norm(
        HEAD,
        feed_forward(Gelu(), 1e150 * W, 1e150 * W),
        Normalize(weight=1e100 * torch.ones(4, dtype=D)),
        Normalize(),
    )
    found = ask(block, Neighborhood(X, 1e300, TokenMax()), norm)
    assert all(math.isfinite(rung.value) for rung in found.others)
    assert not found.theorem.startswith(taylor_model.THEOREM.title)
    assert any(
        why.startswith(taylor_model.THEOREM.title) and "range of numbers" in why for why in found.refused
    ), str(found)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize("token", [0.0, 2.0])
def test_a_norm_layer_without_eps_has_no_value_at_a_constant_token(centered, token):
    """0/0 is no number, so nothing is certified around it, alone or inside other maps."""
    layer, x = Normalize(0.0, torch.ones(4, dtype=D), centered=centered), X.clone()
    x[2] = token
    if not centered and token:
        assert math.isfinite(certify(layer, Neighborhood(x, 0.1), TokenMax()).value)
        return
    assert not bool(torch.isfinite(layer(x)).all())
    maps = (
        layer,
        Residual(layer),
        Compose((layer, HEAD)),
        Added((layer, Affine(W))),
        pre_norm(HEAD, Affine(W), layer, layer),
    )
    for map in maps:
        for domain in (
            Neighborhood(x, 0.1),
            Neighborhood(x, 0.0, TokenMax()),
            one_token(x, 0, 0.1),
            one_token(x, 2, 0.1),
        ):
            for norm in (TokenMax(), Frobenius(), EntryMax(), Wasserstein(1.0)):
                for ask in (certify, deviation):
                    found = ask(map, domain, norm)
                    assert math.isinf(found.value), str(found)
                    said = " ".join(found.refused)
                    assert "use eps > 0" in said or (
                        isinstance(norm, EntryMax) and "not entry by entry" in said
                    ), said
        with pytest.raises(r.theorems.Refusal, match="use eps > 0"):
            r.image(map, Neighborhood(x, 0.1))


def test_a_norm_layer_without_eps_on_small_tokens():
    """Squares of small deviations vanish, deviations do not."""
    assert certify(Normalize(0.0), Shell(1e-200), TokenMax()).value == pytest.approx(1e200, rel=1e-9)
