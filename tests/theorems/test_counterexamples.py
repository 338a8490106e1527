"""Bounds that look right and are wrong: each is broken by a witness, and ours is not."""

import math

import torch

import regard as r
from regard.domains import Ball
from regard.maps import Heads
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs import certify
from tests.theorems.exact import D, frobenius_norm, generator, in_ball, normal, token_max_norm


def test_hub_facts_at_one_point_bound_nothing():
    """A = 4 e₁e₂ᵀ: slopes taken at X = 0 give w (1 + g) = 5; one token e₂ and 55 tokens e₁ show 13.6."""
    a = torch.zeros(2, 2, dtype=D)
    a[0, 1] = 4.0
    attention = r.Attention(r.Bilinear(a))
    hub = torch.tensor([[0.0, 1.0]] + [[1.0, 0.0]] * 55, dtype=D)
    seen = frobenius_norm(attention, hub)
    assert seen > 13.5
    assert seen > 5.0
    assert certify(attention, Ball(1.0, tokens=56), Frobenius()).value >= seen


def test_hub_away_from_the_origin():
    """The same tokens about another center: with |A| R² alone a bound would not see where the ball is."""
    attention = r.Attention(r.Bilinear(torch.tensor([[1.0]], dtype=D)))
    center, n = torch.tensor([20.0], dtype=D), 8
    x = center + torch.tensor([[0.3]] + [[-0.3]] * (n - 1), dtype=D)
    naive = math.sqrt(n / (1 + (n - 1) * math.exp(-2 * 0.09)) * (1 + 0.09**2)) + 0.09
    seen = frobenius_norm(attention, x)
    assert seen > naive
    assert seen <= certify(attention, Ball(0.3, center, n), Frobenius()).value


def test_rotary_is_not_bounded_by_the_product_of_projections():
    """W_Q = [1 0], W_K = [0 1]: W_Q W_Kᵀ = 0, and 1 would be the constant;
    six tokens in a ball of radius 2 show more than 4.7.
    """
    attention = r.Attention(
        r.Rotary(
            r.Dot(torch.tensor([[1.0, 0.0]], dtype=D), torch.tensor([[0.0, 1.0]], dtype=D), 1.0),
            frequencies=torch.tensor([1.0], dtype=D),
        )
    )
    signs = (2.0 * torch.tensor(bits, dtype=D).unsqueeze(-1) for bits in _signs(6))
    seen = max(token_max_norm(attention, x) for x in signs)
    assert seen >= 4.7
    assert seen <= certify(attention, Ball(2.0, tokens=6), TokenMax()).value


def _signs(n):
    return [[1.0 if code >> i & 1 else -1.0 for i in range(n)] for code in range(2**n)]


def test_roots_of_sums_of_squares_fail_for_token_sums():
    """Two heads copy token 0 into two different rows: the token sum moves by 2 > √2."""
    masks = torch.zeros(2, 3, 3, dtype=torch.bool)
    masks[:, :, 2] = True  # every row sees token 2, and in head h row h sees token 0 alone
    for h in range(2):
        masks[h, h] = torch.tensor([True, False, False])
    attention = r.Attention(
        r.Alibi(0.0), r.Linear(torch.eye(1, dtype=D).expand(2, 1, 1)), support=r.Where(masks)
    )
    mixed = Heads(attention, torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]], dtype=D))
    x, moved = torch.zeros(3, 1, dtype=D), torch.zeros(3, 1, dtype=D)
    moved[0] = 1e-3
    stretch = float(TokenSum().of(mixed(moved) - mixed(x)) / TokenSum().of(moved))
    assert stretch > 1.999
    parts = [
        certify(
            r.Attention(r.Alibi(0.0), support=r.Where(mask)),
            Ball(1.0, torch.zeros(1, dtype=D), 3),
            TokenSum(),
        )
        for mask in masks
    ]
    assert certify(mixed, Ball(1.0, torch.zeros(1, dtype=D), 3), TokenSum()).value >= stretch
    assert all(math.isfinite(part.value) for part in parts)


def test_norms_of_mixers_one_by_one_are_no_root():
    """Two equal heads that are added: 2, and √(Σ (|W_O,h| L_h)²) = √2."""
    eye = torch.eye(2, dtype=D).expand(2, 2, 2)
    attention = r.Attention(r.Bilinear(torch.zeros(2, 2, 2, dtype=D)), r.Linear(eye))
    mixed = Heads(attention, eye)
    x = normal(generator(0), 3, 2)
    for norm, exact in ((Frobenius(), frobenius_norm), (TokenMax(), token_max_norm)):
        seen = exact(mixed, x)
        assert seen > 1.999
        assert certify(mixed, Ball(3.0, tokens=3), norm).value >= seen


def test_query_biases_cannot_be_left_out():
    """β = 0 would give √(1 + g²) + g."""
    bias = torch.tensor([30.0], dtype=D)
    attention = r.Attention(
        r.Dot(torch.tensor([[0.1]], dtype=D), torch.tensor([[1.0]], dtype=D), 1.0, b_q=bias)
    )
    x = torch.tensor([[0.01], [-0.01], [0.012]], dtype=D)
    naive = math.sqrt(1 + 0.1**2) + 0.1
    pairs = [0.5 * x * k for k in range(1, 200)]
    seen = max(token_max_norm(attention, pair) for pair in pairs if float(pair.abs().max()) <= 1)
    assert seen > naive
    assert seen <= certify(attention, Ball(1.0, tokens=3), TokenMax()).value


def test_a_negative_gaussian_has_no_helping_sign():
    """The cross term of -|x - y|²/2 is not positive; that of +|x - y|²/2 is."""
    g, attention = generator(3), r.Attention(-r.Gaussian(bandwidth=1.0))
    helped = math.sqrt(1 + 4 * 1.0) + 1.0  # what the sign gives the Gaussian itself on the unit ball
    bound = certify(attention, Ball(1.0, torch.zeros(1, dtype=D), 6), TokenMax()).value
    assert bound > helped
    points = [in_ball(g, 6, 1, 1.0) * torch.rand(6, 1, generator=g, dtype=D) for _ in range(60)]
    assert max(token_max_norm(attention, x) for x in points) <= bound
