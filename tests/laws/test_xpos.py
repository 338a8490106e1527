"""xPos: rotary products that fade, against the formula of the released code, pair by pair."""

import math

import pytest
import torch

import regard as r
from regard.nn import Design, Encoder, LanguageModel, XPosPositions, load, save
from regard.potentials import XPos

D = torch.float64
C, N = 6, 9
X = torch.randn(N, C, generator=torch.Generator().manual_seed(0), dtype=D)


def by_hand(x, s, t, reach=512.0, interleaved=True):
    """scale · Σ_i ζ_i^((s - t)/reach) · Re(q_i e^{iθ(s - t)} k̄_i), with coordinates as complex numbers."""
    pairs = [(2 * i, 2 * i + 1) if interleaved else (i, i + C // 2) for i in range(C // 2)]
    total = 0.0
    for i, (a, b) in enumerate(pairs):
        zeta = (2 * i / C + 0.4) / 1.4
        turn = (s - t) * 10000.0 ** (-2 * i / C)
        q, k = complex(x[s, a], x[s, b]), complex(x[t, a], x[t, b])
        product = q * complex(math.cos(turn), math.sin(turn)) * k.conjugate()
        total += zeta ** ((s - t) / reach) * product.real
    return total / math.sqrt(C)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("reach", [512.0, 4.0])
def test_scores_are_the_formula(interleaved, reach):
    found = XPos(r.Dot(), reach=reach, interleaved=interleaved).scores(X, X)
    wanted = torch.tensor([[by_hand(X, s, t, reach, interleaved) for t in range(N)] for s in range(N)])
    torch.testing.assert_close(found, wanted.to(D))


def test_far_positions_are_rotary_without_fading():
    wide = XPos(r.Dot(), reach=1e12)
    torch.testing.assert_close(wide.scores(X, X), r.Rotary(r.Dot(), interleaved=True).scores(X, X))


def test_only_differences_count_and_long_sequences_stay_finite():
    marks = torch.arange(N)
    near, far = (XPos().scores(X, X, marks + m, marks + m) for m in (0, 1_000_000))
    torch.testing.assert_close(near, far)
    low = X.float()
    spread = marks * 20_000  # 0.28^(160,000/512) is below every float32
    found = XPos().scores(low, low, spread, spread)
    assert found.isfinite().all()
    exact = XPos().scores(low.double(), low.double(), spread, spread)
    torch.testing.assert_close(found.double(), exact, rtol=1e-4, atol=0)
    with pytest.raises(r.errors.ArgumentError, match="larger reach="):
        XPos().scores(X, X, marks * 10**6, marks * 10**6)


def test_engines_agree_and_weights_fade():
    q = torch.randn(2, 2, 40, 16, dtype=D)
    potential = XPos(r.Dot(), reach=8.0)
    exact = r.attend(q, q, q, potential=potential, support=r.Causal(), engine=r.engines.ReferenceEngine())
    for engine in (r.engines.Sdpa(), r.engines.Tiled(pairs=160)):
        found = r.attend(q, q, q, potential=potential, support=r.Causal(), engine=engine)
        torch.testing.assert_close(found, exact)
    same = torch.ones(40, 16, dtype=D)
    scores = XPos(r.Dot(), reach=8.0).scores(same, same)[-1]
    assert float(scores[0].abs()) < 0.2 * float(scores[-1])


def test_a_model_with_fading_positions(tmp_path):
    design = Design(12, 2, positions=XPosPositions(reach=6.0))
    model = LanguageModel(design, 7, 2).double().eval()
    ids = torch.randint(7, (2, 9))
    whole, cache = model(ids), model.cache()
    with torch.no_grad():
        pieces = [model(part, cache=cache) for part in ids.split((4, 1, 4), -1)]
    torch.testing.assert_close(torch.cat(pieces, 1), whole)
    x = torch.randn(5, 12, dtype=D)
    torch.testing.assert_close(model.declare()(x), model.decoder(x))
    save(model, tmp_path)
    torch.testing.assert_close(load(tmp_path)(ids), whole)
    with pytest.raises(r.errors.ArgumentError, match="positions: fade with distance into the past"):
        Encoder(design, 1)
    with pytest.raises(r.errors.ArgumentError, match="odd width"):
        Design(6, 2, positions=XPosPositions())


def test_what_cannot_fade_is_refused():
    with pytest.raises(r.errors.ArgumentError, match="only products fade"):
        XPos(r.Gaussian(bandwidth=1.0))


def test_no_theorem_takes_it_for_a_dot_product():
    """Scores grow with the distance: a bound of plain dot products would be false."""
    attention = r.Attention(XPos(r.Dot(torch.eye(4, dtype=D), torch.eye(4, dtype=D)), reach=1.0))
    found = r.certify(attention, r.Ball(1.0, tokens=6), r.TokenMax())
    assert r.falsify(attention, r.Ball(1.0, tokens=6), r.TokenMax(), steps=6, restarts=2).value <= found.value
