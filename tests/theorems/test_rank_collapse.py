"""Rank collapse: a cubic bound on how far outputs are from one point, and what breaks it."""

import math

import pytest
import torch

import regard as r
from regard.domains import Ball
from regard.maps import Heads, Residual
from regard.proofs.theorems.rank_collapse import collapse_after, consensus, rank_collapse


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def joined(outputs):
    return outputs if outputs.ndim == 2 else outputs.transpose(0, 1).flatten(1)


def reached(map, x, center=None, norm=r.TokenMax()):
    outputs = map(x)
    outputs = outputs.points if isinstance(outputs, r.Measure) else outputs
    return float(norm.of(joined(outputs) - consensus(map, x, center)))


def test_worked_example():
    x = torch.tensor([[math.sin(1 + 3 * i + j) for j in range(3)] for i in range(4)], dtype=torch.float64)
    a = torch.tensor([[math.cos(2 + 3 * i + j) / 2 for j in range(3)] for i in range(3)], dtype=torch.float64)
    w = torch.tensor(
        [[math.sin(3 + 2 * (3 * i + j)) for j in range(3)] for i in range(3)], dtype=torch.float64
    )
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    certificate = rank_collapse(attention, x, x.mean(0))
    assert certificate.value == pytest.approx(4.2950324640272175, rel=1e-9)
    assert reached(attention, x, x.mean(0)) == pytest.approx(0.17180763983219066, rel=1e-9)
    assert certificate.quantity == "radius of the outputs"
    assert rank_collapse(attention, x).value <= certificate.value  # the better of two centers


CASES = {
    "bilinear": lambda g: r.Attention(r.Bilinear(draw(g, 3, 3)), r.Linear(draw(g, 3, 2), draw(g, 2))),
    "biases": lambda g: r.Attention(
        r.Dot(draw(g, 3, 2), draw(g, 3, 2), b_q=draw(g, 2), b_k=draw(g, 2)), r.Linear(draw(g, 3, 3))
    ),
    "temperature": lambda g: r.Attention(r.Dot(), normalizer=r.Softmax(0.4)),
    "side by side": lambda g: r.Attention(
        r.Dot(draw(g, 4, 3, 2), draw(g, 4, 3, 2)), r.Linear(draw(g, 4, 3, 2), draw(g, 4, 2))
    ),
    "grouped": lambda g: Heads(
        r.Attention(r.Dot(draw(g, 4, 3, 2), draw(g, 2, 3, 2)), r.Linear(draw(g, 2, 3, 2))),
        draw(g, 4, 2, 3),
        draw(g, 3),
    ),
    "one rank": lambda g: r.Attention(r.Bilinear(draw(g, 3, 1) @ draw(g, 1, 3))),
}


@pytest.mark.parametrize("norm", [r.TokenMax(), r.Frobenius()], ids=["token max", "frobenius"])
@pytest.mark.parametrize("name", CASES)
def test_random_instances_stay_below(name, norm):
    generator = torch.Generator().manual_seed(len(name))
    for trial in range(25):
        map = CASES[name](generator)
        size = 1 + trial % 6
        x = 10.0 ** float(torch.rand((), generator=generator) * 2 - 1.5) * draw(generator, size, 3) + draw(
            generator, 3
        )
        for center in (None, x[0], x.mean(0) + 0.3 * draw(generator, 3)):
            certificate = rank_collapse(map, x, center, norm)
            assert reached(map, x, center, norm) <= certificate.value + 1e-13


def test_weights_of_keys():
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        attention = CASES["biases"](generator)
        x = r.Measure(0.5 * draw(generator, 5, 3), 2 * draw(generator, 5))
        assert reached(attention, x) <= rank_collapse(attention, x).value + 1e-13


def test_gradient_ascent_stays_below():
    """The search moves tokens and scores; the ratio at small scores shows that the cube is right."""
    found = {}
    for scale in (0.05, 1.0):
        best = 0.0
        for start in range(3):
            generator = torch.Generator().manual_seed(start)
            z, m = draw(generator, 8, 2).requires_grad_(), draw(generator, 2, 2).requires_grad_()
            step = torch.optim.Adam([z, m], lr=0.05)
            for _ in range(120):
                step.zero_grad()
                x, a = z / z.norm(dim=-1).max(), scale * m / torch.linalg.matrix_norm(m, 2)
                law = (x @ a @ x.mT).softmax(-1)
                far = (law @ x - x.mean(0)).norm(dim=-1).max()  # about c = 0 the point c' is the plain mean
                (-far).backward()
                step.step()
            attention, center = r.Attention(r.Bilinear(a.detach())), torch.zeros(2, dtype=torch.float64)
            bound = rank_collapse(attention, x.detach(), center).value
            value = reached(attention, x.detach(), center)
            assert value <= bound
            best = max(best, value / bound)
        found[scale] = best
    assert found[0.05] > 0.95
    assert found[1.0] > 0.7


def test_layers_in_a_row():
    """κ^{(3^L - 1)/2} ρ^{3^L}, and tokens that really pass through stay below."""
    generator = torch.Generator().manual_seed(3)
    layers = [
        CASES["bilinear"](generator),
        r.Attention(r.Dot(draw(generator, 2, 2), draw(generator, 2, 2))),
        r.Attention(r.Dot()),
    ]
    x = 0.3 * draw(generator, 6, 3) + draw(generator, 3)
    center = x.mean(0)
    domain = Ball(float((x - center).norm(dim=-1).max()) * (1 + 1e-12), center)
    for depth in range(1, 4):
        certificate = collapse_after(layers[:depth], domain)
        y, middle = x, center
        for layer in layers[:depth]:
            y, middle = layer(y), consensus(layer, y, middle)
        assert float((y - middle).norm(dim=-1).max()) <= certificate.value
        assert len(certificate.parts) == depth


def test_doubly_exponential():
    layer = r.Attention(r.Bilinear(2 * torch.eye(2, dtype=torch.float64)))
    certificate = collapse_after([layer] * 4, Ball(0.5, torch.zeros(2)))
    assert certificate.value == pytest.approx(2.0**40 * 0.5**81, rel=1e-9)


@pytest.mark.parametrize(
    ("map", "sentence"),
    [
        (r.Attention(r.Dot(), support=r.Causal()), "the first token of a causal sequence never moves"),
        (r.Attention(r.Dot() + r.Alibi(0.5)), "every row a center of its own"),
        (r.Attention(r.Rotary(r.Dot())), "every row a center of its own"),
        (r.Attention(r.Gaussian(bandwidth=1.0)), "the scores of Gaussian are not bilinear"),
        (r.Attention(r.SoftCap(r.Dot(), 3.0)), "are not bilinear"),
        (r.Attention(r.Dot(), normalizer=r.Sparsemax()), "rows of Sparsemax are not Gibbs laws"),
        (r.Attention(r.Dot(), r.Table(torch.ones(3, 2))), "no known Lipschitz constant"),
        (r.Attention(r.Dot(), moment=r.Mode()), "the moment Mode has no theorem"),
        (Residual(r.Attention(r.Dot())), "skip connections"),
    ],
)
def test_refusals(map, sentence):
    x = torch.randn(3, 2, dtype=torch.float64)
    certificate = rank_collapse(map, x)
    assert certificate.value == math.inf
    assert sentence in certificate.refused[0]
    assert sentence in collapse_after([map], Ball(1.0, torch.zeros(2))).refused[0]


def test_bad_input():
    x = torch.ones(3, 2, dtype=torch.float64)
    with pytest.raises(r.errors.ArgumentError, match="center: has shape"):
        rank_collapse(r.Attention(r.Dot()), x, torch.ones(3))
    with pytest.raises(r.errors.RefusalError, match="are not bilinear"):
        consensus(r.Attention(r.Gaussian(bandwidth=1.0)), x)
    assert "TokenSum" in rank_collapse(r.Attention(r.Dot()), x, norm=r.TokenSum()).refused[0]
    with pytest.raises(r.errors.ArgumentError, match="give Ball"):
        collapse_after([r.Attention(r.Dot())], x)


@pytest.mark.parametrize("mixed", [False, True])
def test_the_bound_is_its_formula(mixed):
    """Σ_h |W_h||A_h| or |W_O| √Σ_h (|W_h||A_h|)², times ρ² and the norm of the offsets."""
    g = torch.Generator().manual_seed(9)
    a, w = draw(g, 2, 3, 3), draw(g, 2, 3, 2)
    w_o = draw(g, 2, 2, 3)
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    map = Heads(attention, w_o) if mixed else attention

    def two(matrix):
        return float(torch.linalg.matrix_norm(matrix, 2))

    joined_ = math.hypot(*(two(w[h]) * two(a[h]) for h in range(2)))
    stated = (
        min(two(w_o.reshape(4, 3)) * joined_, sum(two(w[h] @ w_o[h]) * two(a[h]) for h in range(2)))
        if mixed
        else joined_
    )
    x = draw(g, 5, 3)
    offsets = [(x - center).norm(dim=-1) for center in (x.mean(0), 0.5 * (x.amax(0) + x.amin(0)))]
    best = min(offsets, key=lambda lengths: float(lengths.max()))
    assert rank_collapse(map, x).value == pytest.approx(stated * float(best.max()) ** 3, rel=1e-9)
    own = x.norm(dim=-1)
    found = rank_collapse(map, x, torch.zeros(3, dtype=torch.float64), norm=r.Frobenius()).value
    assert found == pytest.approx(stated * float(own.max()) ** 2 * float(own.norm()), rel=1e-9)
    assert collapse_after([map], Ball(0.3, torch.zeros(3))).value == pytest.approx(stated * 0.3**3, rel=1e-9)


def test_tokens_on_a_line_are_closest_to_the_middle_of_their_box():
    """Three tokens together and one far away: the mean is the worse center."""
    x = torch.tensor([[0.0], [0.0], [0.0], [2.0]], dtype=torch.float64)
    map = r.Attention(r.Bilinear(torch.ones(1, 1, dtype=torch.float64)))
    assert rank_collapse(map, x).value == pytest.approx(1.0, rel=1e-9)
    triangle = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.5, math.sqrt(0.75)]], dtype=torch.float64)
    plane = r.Attention(r.Bilinear(torch.eye(2, dtype=torch.float64)))
    assert rank_collapse(plane, triangle).value == pytest.approx(3**-1.5, rel=1e-9)


def test_widths_follow_the_layers():
    """Heads side by side make wider tokens: 2 heads of 2 columns, so the next layer has the width 4."""
    g = torch.Generator().manual_seed(4)
    wide = r.Attention(r.Dot(draw(g, 2, 3, 2), draw(g, 2, 3, 2)), r.Linear(draw(g, 2, 3, 2)))
    found = collapse_after([wide, r.Attention(r.Bilinear(draw(g, 4, 4)))], Ball(0.3, torch.zeros(3)))
    assert math.isfinite(found.value)
    narrow = collapse_after([wide, r.Attention(r.Dot())], Ball(0.3, torch.zeros(3)))
    assert narrow.value == pytest.approx(narrow.parts[0].value ** 3 / 2, rel=1e-9)  # 1/√4 of dot products


def test_weights_are_repeated_tokens():
    """A token of twice the weight is two tokens, for the point of consensus too."""
    g = torch.Generator().manual_seed(8)
    x, w = torch.randn(3, 2, generator=g, dtype=torch.float64), torch.randn(2, 2, generator=g).double()
    weighted = r.Measure(x, torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64).log())
    center = torch.tensor([0.5, -1.0], dtype=torch.float64)
    map = r.Attention(r.Bilinear(w), r.Linear(w.mT.contiguous()))
    found = consensus(map, weighted, center)
    assert torch.allclose(found, consensus(map, torch.cat([x[:1], x]), center), rtol=1e-12, atol=0)
    law = ((x @ (center @ w)).exp() * torch.tensor([2.0, 1.0, 1.0], dtype=torch.float64)).unsqueeze(0)
    assert torch.allclose(found, (law / law.sum() @ x @ w.mT)[0], rtol=1e-12, atol=0)


def test_consensus_counts_the_bias_of_queries():
    """π = softmax(x · (Aᵀc + β)), with β = scale W_K b_q."""
    g = torch.Generator().manual_seed(9)
    x, w_q, w_k, b = (torch.randn(*shape, generator=g).double() for shape in ((4, 2), (2, 3), (2, 3), (3,)))
    center = torch.tensor([0.5, -1.0], dtype=torch.float64)
    found = consensus(r.Attention(r.Dot(w_q, w_k, scale=0.7, b_q=b)), x, center)
    law = (x @ (0.7 * w_k @ (center @ w_q + b))).softmax(0)
    assert torch.allclose(found, law @ x, rtol=1e-12, atol=0)
