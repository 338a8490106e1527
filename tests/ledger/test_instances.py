"""Small instances of what only slow tests reach otherwise. Each holds a plain law; the ledger has more."""

import pytest
import torch

import regard as r
from regard import maps
from regard.domains import NearbyLaws, Tube, Vocabulary
from regard.nonexpansive import Pool
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs.ball_model.beginning import begin, second_order
from regard.proofs.ball_model.margin import least
from regard.proofs.ball_model.network import through
from regard.proofs.law_rows import LawRows, ball_around
from regard.proofs.subject import subject_of
from regard.proofs.theorems.measure_dual import _needed, _on_balls, _on_words
from tests.ball_model.networks import hidden, network, sequence
from tests.theorems.exact import D, generator, normal
from tests.theorems.laws_nearby import ball_of, law

WIDTH = 3


def _head(seed):
    g = generator(seed)
    return r.Attention(r.Bilinear(0.6 * normal(g, WIDTH, WIDTH)), r.Linear(normal(g, WIDTH, WIDTH)))


LAWS = {
    "ball": lambda given, radius: ball_of(given, radius, 2.0),
    "words": lambda given, radius: NearbyLaws(given, radius, Vocabulary(normal(generator(8), 4, WIDTH))),
    "tube": lambda given, radius: NearbyLaws(given, radius, Tube(0.3)),
    "own tube": lambda given, radius: NearbyLaws(given, radius, Tube(0.3, jumps=False)),
}


@pytest.mark.parametrize("within", LAWS)
@pytest.mark.parametrize("weighted", [False, True])
def test_facts_of_rows_near_a_law(within, weighted):
    domain = LAWS[within](law(generator(1), 3, WIDTH, 1.0, weighted), 0.1)
    rows = LawRows(subject_of(_head(2)).separate[0], domain)
    assert bool((rows.smallest < rows.largest).all())
    assert bool((rows.atoms.lengths().bound <= rows.farthest.bound.unsqueeze(-1) * (1 + 1e-9)).all())
    assert ball_around(domain).radius > 0
    assert bool((rows.alpha.bound > 0).all())
    assert float(rows.masses.bound.sum()) >= 1
    if within == "words":
        assert rows.moments().bound.shape == (3, *rows.apart.bound.shape)


@pytest.mark.parametrize("within", LAWS)
def test_suprema_over_places_hold_at_places(within):
    """|h(y) - h(x_j)| - τ(k(y) - κ_j) - λ|y - x_j| for places y that mass may go to."""
    domain = LAWS[within](law(generator(1), 3, WIDTH, 1.0, weighted=True), 0.1)
    rows = LawRows(subject_of(_head(2)).separate[0], domain)
    drawn = torch.tanh(normal(generator(4), 400, WIDTH))
    places = domain.within.points if within == "words" else 1.15 * drawn
    if "tube" in within:
        places = rows.points.repeat(100, 1) + 0.17 * drawn[:300]  # around atom 0, 1, 2, 0, …
    seen = rows.rows.seen(places)
    k, kappa = rows.rows.log_odds(seen).center.exp(), rows.log_atoms.center.exp()
    h, at = k.unsqueeze(-1) * rows.away(seen).center, kappa.unsqueeze(-1) * rows.atoms.center
    allowed = torch.ones(3, len(places), dtype=torch.bool)
    if within == "own tube":
        allowed = torch.arange(len(places)) % 3 == torch.arange(3).unsqueeze(-1)
    gains = (_on_words if within == "words" else _on_balls)(rows)
    for tau, multiplier in ((0.0, 0.5), (0.3, 0.1), (3.0, 2.0), (0.5, 20.0)):
        given = [torch.full((3,), value, dtype=D) for value in (tau, multiplier)]
        found = torch.cdist(at, h) - tau * (k.unsqueeze(1) - kappa.unsqueeze(-1))
        found = (found - multiplier * torch.cdist(rows.points, places)).masked_fill(~allowed, 0.0).amax(-1)
        assert bool((found <= gains(*given).bound).all())
        assert bool((_needed(rows, gains, *given).bound >= multiplier * domain.radius).all())


DOMAINS = {
    "ball": lambda x, one: r.Radii(x, 0.01 * one),
    "box": lambda x, one: r.Box(x, 0.01 * one),
    "all": lambda x, one: r.Neighborhood(x, 0.01),
    "each": lambda x, one: r.Neighborhood(x, 0.01, TokenMax()),
    "hull": lambda x, one: r.Hull(x, 1, x[1] + 0.05 * normal(generator(5), 2, x.shape[-1])),
}
KINDS = {
    "post": {},
    "pre, rotary": {"pre": True, "turned": "rotary", "activation": maps.Silu()},
    "scaled, gated, causal": {"turned": "scaled", "gated": True, "support": r.Causal()},
    "alibi, root mean squares": {"turned": "alibi", "norms": (False, 1e-3), "activation": maps.Relu()},
    "grouped keys": {"heads": 4, "keys": 2, "activation": maps.Gelu(tanh=True)},
}


@pytest.mark.parametrize(("kind", "domain"), list(zip(KINDS, DOMAINS, strict=True)))
def test_states_of_networks(kind, domain):
    """The least margin near an input is below the one at the input, to both orders."""
    model, x = network(1, layers=1, width=4, **KINDS[kind]), sequence(1, 3, 4)
    whole = maps.Compose((maps.Added((model, model)), Pool()))
    directions, offsets = normal(generator(6), 4, 2), normal(generator(7), 2)
    state = begin.one(DOMAINS[domain](x, torch.tensor([0.0, 1.0, 0.0], dtype=D)))
    for start in (state, second_order(state)):
        found = least(through.one(whole, start), directions, offsets)
        assert bool((found < (whole(x) @ directions + offsets)[0]).all())


def test_gates_with_kinks_in_reach():
    """Neurons whose kink is inside have a value between their two lines; no sample is below the least."""
    g = generator(3)
    layer, x = hidden(g, 4, maps.Relu(), gated=True), sequence(1, 2, 4)
    radii = torch.tensor([0.8, 0.0], dtype=D)
    directions, offsets = normal(g, 4, 2), normal(g, 2)
    whole = maps.Compose((layer, Pool()))
    found = least(through.one(whole, begin.one(r.Radii(x, radii))), directions, offsets)
    away = normal(g, 500, 2, 4) * radii.unsqueeze(-1)
    away = away / away.flatten(1).norm(dim=-1)[:, None, None] * radii[0]
    seen = torch.stack([(whole(x + move) @ directions + offsets)[0] for move in away])
    assert bool((seen.amin(0) >= found).all())


@pytest.mark.parametrize("norm_of", [TokenMax(), TokenSum(), Frobenius()])
def test_norms_of_derivatives(norm_of):
    x = normal(generator(7), 4, WIDTH)
    jacobian = r.linearize(_head(9), x)
    assert float(jacobian.norm(norm_of).value) >= float(jacobian.norm(Frobenius()).value) / 2
