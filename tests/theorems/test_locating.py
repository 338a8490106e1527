"""located: values in float64 are within their margin of values to fifty digits;
and the margin is the one that is stated.
"""

import math

import mpmath
import pytest
import torch

import regard as r
from regard._upper import exact, relative_error
from regard.maps import (
    Added,
    Affine,
    Compose,
    Gated,
    Heads,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    ToContext,
)
from regard.measure import Measure
from regard.nonexpansive import Reflected
from regard.proofs.locating import locate, score_size, slip
from regard.proofs.theorem import Refusal
from tests.theorems.exact import D, generator, normal

G = generator(31)
X = normal(G, 4, 3, scale=3.0)
W, B = normal(G, 3, 3), normal(G, 3)
ALLOWED = 1e-6
LONGEST = float(X.norm(dim=-1).max())


def margin(map, x=X):
    return float(locate.one(map, Measure(x))[1])


def gamma(roundings):
    return float(relative_error(roundings))


def size(tensor):
    return float(tensor.norm())


def test_affine_maps():
    """γ(2d + 8) (|w|_F |x| + |b|)."""
    assert margin(Affine(W, B)) == pytest.approx(
        gamma(14) * (size(W) * LONGEST + size(B)), rel=ALLOWED, abs=0
    )
    assert margin(Affine(W)) == pytest.approx(gamma(14) * size(W) * LONGEST, rel=ALLOWED, abs=0)
    true = mpmath.matrix(X.tolist()) * mpmath.matrix(W.tolist())
    value, allowed = locate.one(Affine(W), Measure(X))
    seen = max(abs(true[i, j] - value.points[i, j].item()) for i in range(4) for j in range(3))
    assert seen <= float(allowed)


def test_activations():
    assert margin(Pointwise(Silu())) == pytest.approx(gamma(1024) * LONGEST, rel=ALLOWED, abs=0)


@pytest.mark.parametrize("centered", [True, False])
def test_norm_layers(centered):
    """4 (max|γ| √d γ(8d + 64) (1 + |x|/√(s² + ε)) + γ(8) |β|)."""
    weight = torch.tensor([0.5, -2.0, 1.0], dtype=D)
    away = X - X.mean(-1, keepdim=True) if centered else X
    s = away.norm(dim=-1) / math.sqrt(3)
    relative = float((1 + X.norm(dim=-1) / (s.square() + 0.01).sqrt()).max()) * gamma(8 * 3 + 64)
    for bias in (None, B):
        stated = 4 * (2 * math.sqrt(3) * relative + gamma(8) * (0 if bias is None else size(bias)))
        assert margin(Normalize(0.01, weight, bias, centered=centered)) == pytest.approx(
            stated, rel=ALLOWED, abs=0
        )


def test_a_norm_layer_whose_rounding_is_all_there_is():
    constant = torch.full((1, 3), 1e9, dtype=D) + torch.tensor([0.0, 1e-7, 0.0], dtype=D)
    with pytest.raises(Refusal, match="rounding decides"):
        margin(Normalize(1e-30), constant)
    assert margin(Normalize(1e-30), constant - 1e9 + 1.0) < 1e-2


def test_gated_layers():
    """8 γ(2 (d + c) + 1024) |w_out|_F max_i (|w|_F |x_i| + |b|)(|w_gate|_F |x_i| + |b_gate|)."""
    g = generator(1)
    w, gate, out, b = normal(g, 3, 5), normal(g, 3, 5), normal(g, 5, 2), normal(g, 5)
    stated = 8 * gamma(2 * 8 + 1024) * size(out) * (size(w) * LONGEST + size(b)) * size(gate) * LONGEST
    assert margin(Gated(Silu(), w, gate, out, b)) == pytest.approx(stated, rel=ALLOWED, abs=0)


def test_sums():
    """Margins add, and so do roundings of the sum: γ(k) Σ_k |f_k|, and γ(4) |x + f| of a residual."""
    first, second = Affine(W, B), Affine(2 * W)
    lengths = [float(map(X).norm(dim=-1).max()) for map in (first, second)]
    stated = margin(first) + margin(second) + gamma(2) * sum(lengths)
    assert margin(Added((first, second))) == pytest.approx(stated, rel=ALLOWED, abs=0)
    total = float((X + first(X)).norm(dim=-1).max())
    assert margin(Residual(first)) == pytest.approx(margin(first) + gamma(4) * total, rel=ALLOWED, abs=0)


@pytest.mark.parametrize("step", [0.25, -3.0])
def test_reflections(step):
    """The margin of the attention times the step, and γ(8) max(|x| + |step||f|)."""
    head = r.Attention(r.Dot(0.1 * W, W), r.Linear(W))
    lengths = X.norm(dim=-1) + abs(step) * head(X).norm(dim=-1)
    stated = abs(step) * margin(head) + gamma(8) * float(lengths.max())
    assert margin(Reflected(head, step)) == pytest.approx(stated, rel=ALLOWED, abs=0)
    value = locate.one(Reflected(head, step), Measure(X))[0].points
    assert torch.allclose(value, X - step * head(X), rtol=1e-12, atol=1e-13)


def test_compositions():
    """What was not known before is carried by the constant of the next map."""
    first, second = Affine(W, B), Affine(2 * W)
    norm = float(torch.linalg.matrix_norm(2 * W, 2))
    stated = margin(second, first(X)) + norm * margin(first)
    assert margin(Compose((first, second))) == pytest.approx(stated, rel=ALLOWED, abs=0)
    assert float(slip(second, Measure(X), exact(0.0))) == 0
    assert float(slip(second, Measure(X), exact(0.25))) == pytest.approx(0.25 * norm, rel=ALLOWED, abs=0)
    third = Compose((first, Pointwise(Relu()), second))
    inner = first(X)
    before = margin(first) + gamma(1024) * float(inner.norm(dim=-1).max())
    stated = margin(second, inner.relu()) + norm * before
    assert margin(third) == pytest.approx(stated, rel=ALLOWED, abs=0)


def head_margin(score, value, width=3, tokens=4):
    """(4 γ(8d + 256)(|s| + 1) + γ(8d + 8n + 256)) times the longest value."""
    return (4 * gamma(8 * width + 256) * (score + 1) + gamma(8 * width + 8 * tokens + 256)) * value


def test_attention():
    """With the longest value |W|_F |x| + |b|."""
    w_q, w_k, b_q = normal(G, 3, 2), normal(G, 3, 2), normal(G, 2)
    dot = r.Dot(w_q, w_k, scale=-0.3, b_q=b_q)
    score = 0.3 * (size(w_q) * LONGEST + size(b_q)) * size(w_k) * LONGEST
    stated = head_margin(score, size(W) * LONGEST + size(B))
    assert margin(r.Attention(dot, r.Linear(W, B))) == pytest.approx(stated, rel=ALLOWED, abs=0)
    factored = r.Attention(dot, r.Factored(W, 2 * W))
    assert margin(factored) == pytest.approx(
        head_margin(score, 2 * size(W) ** 2 * LONGEST), rel=ALLOWED, abs=0
    )
    positions = r.Attention(dot + r.Alibi(0.7), support=r.Causal())
    assert margin(positions) == pytest.approx(head_margin(score + 0.7 * 3, LONGEST), rel=ALLOWED, abs=0)


def test_attention_with_heads():
    """Σ_h margin_h |W_O,h|_F + γ(h + 8) |b_o|."""
    w, w_o = normal(G, 2, 3, 2), normal(G, 2, 2, 3)
    heads = r.Attention(r.Dot(scale=0.5), r.Linear(w))
    each = [head_margin(0.5 * LONGEST**2, size(w[h]) * LONGEST) * size(w_o[h]) for h in range(2)]
    assert margin(Heads(heads, w_o)) == pytest.approx(sum(each), rel=ALLOWED, abs=0)
    assert margin(Heads(heads, w_o, B)) == pytest.approx(sum(each) + gamma(10) * size(B), rel=ALLOWED, abs=0)


def test_attention_to_a_context():
    """Queries and keys together: longer, and more of them."""
    context = normal(G, 6, 3, scale=9.0)
    longest = float(context.norm(dim=-1).max())
    stated = head_margin(0.1 * longest**2, longest, tokens=10)
    assert margin(ToContext(r.Attention(r.Dot(scale=0.1)), context)) == pytest.approx(
        stated, rel=ALLOWED, abs=0
    )


def test_scores_without_digits_are_refused():
    with pytest.raises(Refusal, match="rounding decides the weights"):
        margin(r.Attention(r.Dot(scale=1e12)))
    assert margin(r.Attention(r.Dot(scale=1e8))) < 1e-2 * LONGEST


def test_sizes_of_scores():
    """What roundings of scores are relative to: products of lengths, each potential with its own."""
    measure, a, w, b = Measure(X), normal(G, 3, 3), normal(G, 3, 2), normal(G, 2)
    longest, wide = 1.7, torch.cat([w, 2 * w], -1)
    projected = size(w) * longest + size(b)
    for potential, stated in (
        (r.Dot(w, w, b_q=b, b_k=b), projected**2 / math.sqrt(2)),
        (r.Dot(scale=-2.0), 2 * longest**2),
        (r.Dot(), longest**2 / math.sqrt(3)),
        (r.Bilinear(a), size(a) * longest**2),
        (r.Gaussian(w_q=w, w_k=w, bandwidth=0.5, b_q=b), ((projected + size(w) * longest) / 0.5) ** 2),
        (r.Rotary(r.Dot(w, w)), (1 + 3) * (size(w) * longest) ** 2 / math.sqrt(2)),
        (
            r.Rotary(r.Dot(w, w), frequencies=torch.tensor([2.0], dtype=D)),
            (1 + 6) * (size(w) * longest) ** 2 / math.sqrt(2),
        ),
        (  # the fastest turn counts, and none counts less than one
            r.Rotary(r.Dot(wide, wide), frequencies=torch.tensor([-2.0, 0.5], dtype=D)),
            (1 + 6) * (size(wide) * longest) ** 2 / 2,
        ),
        (
            r.Rotary(r.Dot(wide, wide), frequencies=torch.tensor([0.25, 0.5], dtype=D)),
            (1 + 3) * (size(wide) * longest) ** 2 / 2,
        ),
        (r.potentials.base.Scaled(r.Dot(scale=1.0), -3.0), 3 * longest**2),
        (r.Dot(scale=1.0) + r.Bilinear(a) + r.Alibi(0.5), (1 + size(a)) * longest**2),
        (r.SoftCap(r.Dot(scale=1.0), 5.0), longest**2),
    ):
        assert float(score_size(potential, exact(longest), measure)) == pytest.approx(
            stated, rel=ALLOWED, abs=0
        )
