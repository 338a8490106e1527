"""One token moves: closed forms against random and ascended moves, every token, masks, heads,
rows of one weight.
"""

import math

import pytest
import torch

import regard as r
from regard.domains import Radii, one_token
from regard.maps import Heads, Residual
from regard.norms import Frobenius
from regard.proofs import deviation, falsify_deviation
from regard.proofs.theorems.one_token import THEOREM
from tests.theorems.exact import SUPPORTS, D, bilinear_attention, generator, normal


def rung(map, domain):
    found = deviation(map, domain, Frobenius())
    (value,) = [c.value for c in (found, *found.others) if c.theorem.startswith(THEOREM.title)]
    return value


def largest(g, map, x, token, radius, count=30):
    here, best = map(x), 0.0
    for _ in range(count):
        y = x.clone()
        step = normal(g, x.shape[-1])
        y[token] += radius * (1 - 1e-12) * step / step.norm()
        best = max(best, float((map(y) - here).norm()))
    return best


@pytest.mark.parametrize(("seed", "support"), list(enumerate(SUPPORTS)), ids=repr)
def test_every_token_stays_below(seed, support):
    g = generator(seed)
    attention, x = bilinear_attention(g, 3, 2, support), normal(g, 4, 3)
    for token in range(4):
        for radius in (1e-3, 0.3, 3.0, 100.0):
            assert largest(g, attention, x, token, radius) <= rung(attention, one_token(x, token, radius))


def test_small_moves_are_the_column_of_the_derivative():
    """All rows together: less than the row of the token and the others on their own."""
    g = generator(1)
    attention, x = bilinear_attention(g, 3, 2, SUPPORTS[0]), normal(g, 4, 3)

    def column(token):
        return attention(torch.cat([x[:1], token.unsqueeze(0), x[2:]]))

    steep = torch.autograd.functional.jacobian(column, x[1])
    apart = [torch.linalg.matrix_norm(part.flatten(0, 1), 2) for part in (steep[1:2], steep[[0, 2, 3]])]
    whole = float(torch.linalg.matrix_norm(steep.flatten(0, 1), 2))
    assert whole < 0.99 * float(torch.stack(apart).norm())
    assert rung(attention, one_token(x, 1, 1e-6)) == pytest.approx(1e-6 * whole, rel=1e-4)


def test_the_last_token_of_a_causal_sequence():
    """No other row sees it: there is nothing but its own row."""
    g = generator(4)
    attention, x = r.Attention(r.Bilinear(normal(g, 2, 2)), support=r.Causal()), normal(g, 4, 2)
    bound = rung(attention, one_token(x, 3, 0.5))
    assert largest(g, attention, x, 3, 0.5) <= bound < math.inf


def test_a_sequence_of_one_token():
    x = normal(generator(5), 1, 2)
    bound = rung(r.Attention(r.Bilinear(torch.eye(2, dtype=D))), one_token(x, 0, 0.5))
    assert bound == pytest.approx(0.5, rel=1e-6)


def test_weights_that_underflow_come_back():
    """Token 1 has no weight in float64 in row 0, and takes all of it when it crosses over."""
    attention = r.Attention(r.Bilinear(torch.tensor([[1000.0]], dtype=D)))
    x = torch.tensor([[1.0], [-1.0]], dtype=D)
    seen = float((attention(torch.tensor([[1.0], [1.5]], dtype=D)) - attention(x)).norm())
    assert rung(attention, one_token(x, 1, 2.5)) >= seen
    # and the other way: token 0 has all the weight, and what is conditioned on the rest has none
    far = torch.tensor([[1.0], [0.9], [-1.0]], dtype=D)
    gone = float((attention(torch.tensor([[-3.0], [0.9], [-1.0]], dtype=D)) - attention(far)).norm())
    assert rung(attention, one_token(far, 0, 4.0)) >= gone


def test_heads_residuals_and_ascent():
    g = generator(6)
    attention = r.Attention(r.Dot(normal(g, 2, 3, 2), normal(g, 2, 3, 2)), r.Linear(normal(g, 2, 3, 2)))
    mixed, x = Heads(attention, normal(g, 2, 2, 3)), normal(g, 5, 3)
    for map in (mixed, Residual(mixed)):
        for radius, share in ((1e-3, 0.9), (0.1, 0.6), (1.0, 0.15)):
            domain = one_token(x, 2, radius)
            seen = falsify_deviation(map, domain, Frobenius(), steps=10, restarts=2, generator=g).value
            bound = deviation(map, domain, Frobenius()).value
            assert share * bound < seen <= bound


def test_two_moving_tokens_are_another_theorem():
    found = deviation(
        r.Attention(r.Dot()),
        Radii(normal(generator(7), 3, 2), torch.tensor([0.1, 0.1, 0.0], dtype=D)),
        Frobenius(),
    )
    assert not any(c.theorem.startswith(THEOREM.title) for c in (found, *found.others))


def test_rows_of_other_normalizers_are_refused():
    found = deviation(
        r.Attention(r.Dot(), normalizer=r.Sparsemax()),
        one_token(normal(generator(8), 3, 2), 1, 0.1),
        Frobenius(),
    )
    assert any(
        why.startswith(THEOREM.title) and "rows of Sparsemax are not Gibbs laws" in why
        for why in found.refused
    )


def test_what_is_left_when_all_weight_goes():
    """Row 1 looks at token 0 alone, in float64; a short step turns it to token 1,
    which is far away in a direction scores do not see.
    """
    a = torch.tensor([[1e4, 0.0], [0.0, 0.0]], dtype=D)
    attention = r.Attention(r.Bilinear(a))
    x = torch.tensor([[1.0, 10.0], [0.9, -10.0]], dtype=D)
    y = torch.tensor([[0.8, 10.0], [0.9, -10.0]], dtype=D)
    seen = float((attention(y) - attention(x)).norm())
    assert seen > 20
    found = deviation(attention, one_token(x, 0, 0.2), Frobenius())
    for claim in (found, *found.others):
        assert claim.value >= seen, claim
