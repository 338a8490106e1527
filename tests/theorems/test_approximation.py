"""Approximate rows: the certified error is above the measured one, for sparse, random and feature rows,
masks, weights and heads.
"""

import math

import pytest
import torch

import regard as r
import regard.proofs.approximation as bounds
from regard._upper import exact as upper
from regard._upper import relative_error
from regard.proofs.approximation import approximation_error, kernel_error, row_errors
from regard.proofs.theorems.approximation import total_variation_bound


def draw(generator, *shape):
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def sparse(weights, count):
    """The `count` heaviest keys of each row, renormalized."""
    level = weights.topk(min(count, weights.shape[-1]), -1).values[..., -1:]
    kept = torch.where(weights >= level, weights, torch.zeros_like(weights))
    return kept / kept.sum(-1, keepdim=True)


def blurred(weights, generator, share=0.2):
    """A mixture with a random law on the same keys."""
    noise = torch.rand(weights.shape, generator=generator, dtype=torch.float64) * (weights > 0)
    return (1 - share) * weights + share * noise / noise.sum(-1, keepdim=True)


def measured(attention, law, x, context=None):
    """|Σ_j law_ij v_j - output_i| with heads side by side."""
    keys = x if context is None else context
    points = keys.points if isinstance(keys, r.Measure) else keys
    values = attention.lookup.values(points, None)
    outputs = attention(x, context)
    outputs = outputs.points if isinstance(outputs, r.Measure) else outputs
    difference = law @ values - outputs
    return difference.square().sum(-1) if difference.ndim == 2 else difference.square().sum(-1).sum(0)


CASES = {
    "dot": lambda g: r.Attention(
        r.Dot(draw(g, 3, 2), draw(g, 3, 2), b_q=draw(g, 2)), r.Linear(draw(g, 3, 4), draw(g, 4))
    ),
    "causal": lambda g: r.Attention(r.Dot() + r.Alibi(0.3), r.Linear(draw(g, 3, 2)), support=r.Causal()),
    "window": lambda g: r.Attention(r.Bilinear(draw(g, 3, 3)), support=r.Window(2, 1)),
    "temperature": lambda g: r.Attention(r.Dot(), normalizer=r.Softmax(0.3)),
    "gaussian": lambda g: r.Attention(r.Gaussian(bandwidth=0.7), r.Factored(draw(g, 3, 2), draw(g, 2, 2))),
    "heads": lambda g: r.Attention(r.Dot(draw(g, 4, 3, 2), draw(g, 2, 3, 2)), r.Linear(draw(g, 4, 3, 2))),
}


@pytest.mark.parametrize("name", CASES)
def test_certified_above_measured(name):
    generator = torch.Generator().manual_seed(len(name))
    best = 0.0
    for trial in range(8):
        attention = CASES[name](generator)
        x = draw(generator, 7, 3) * (0.2 + trial % 4) + draw(generator, 3)
        weights = attention.weights(x)
        for law in (
            sparse(weights, 2),
            sparse(weights, 5),
            blurred(weights, generator),
            blurred(weights, generator, 1e-4),
        ):
            errors = measured(attention, law, x).sqrt()
            certificate = approximation_error(attention, law, x)
            assert float(errors.max()) <= certificate.value < math.inf
            rows = row_errors(attention, law, x)
            rows = rows if rows.ndim == 1 else rows.square().sum(0).sqrt()
            assert bool((errors <= rows).all())
            best = max(best, float(errors.max()) / certificate.value)
    assert best > 0.25


def test_context_and_weights():
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        attention = CASES["dot"](generator)
        x = draw(generator, 4, 3)
        context = r.Measure(draw(generator, 6, 3) + draw(generator, 3), 2 * draw(generator, 6))
        law = sparse(attention.weights(x, context), 3)
        assert (
            float(measured(attention, law, x, context).sqrt().max())
            <= approximation_error(attention, law, x, context).value
        )


def test_random_features():
    """FAVOR+ rows are laws, so their error has a certificate whatever the features were."""
    generator = torch.Generator().manual_seed(1)
    attention = CASES["dot"](generator)
    x = 0.5 * draw(generator, 8, 3)
    found = []
    for count in (4, 64, 1024):
        linear = attention.replace(
            normalizer=r.LinearKernel(r.normalizers.PositiveRandom.draw(2, count, 0, torch.float64))
        )
        law = linear.weights(x)
        certificate = approximation_error(attention, law, x)
        assert float(measured(attention, law, x).sqrt().max()) <= certificate.value
        found.append(certificate.value)
    assert found[0] > found[1] > found[2]


def test_worked_example():
    """Two keys at ±1 with equal scores, the law (1/2 + t, 1/2 - t): the error is 2t, the gap 2t² + O(t⁴),
    the bound √(2 gap) ≈ 2t.
    """
    x = torch.tensor([[-1.0], [1.0]], dtype=torch.float64)
    flat = r.Attention(r.Bilinear(torch.zeros(1, 1, dtype=torch.float64)))
    t = 1e-3
    law = torch.tensor([[0.5 + t, 0.5 - t]] * 2, dtype=torch.float64)
    certificate = approximation_error(flat, law, x)
    assert 2 * t <= certificate.value <= 2 * t * (1 + 1e-5)
    assert certificate.quantity == "output error"
    assert "tsybakov2009" in certificate.theorem


def test_one_key_alone_uses_the_second_inequality():
    """For a law on one key, KL = log n grows, and 2√(1 - 1/n) < √(2 log n)."""
    assert float(total_variation_bound(upper(3.0))) == pytest.approx(2 * math.sqrt(1 - math.exp(-3.0)))
    assert float(total_variation_bound(upper(0.1))) == pytest.approx(math.sqrt(0.2))
    assert float(total_variation_bound(upper(0.0))) == 0.0
    assert 2.0 <= float(total_variation_bound(upper(math.inf))) <= 2.0 * (1 + 1e-14)


def test_rows_in_single_precision():
    """Rows that sum to one up to rounding: what they miss is added."""
    generator = torch.Generator().manual_seed(2)
    attention = CASES["dot"](generator)
    x = draw(generator, 6, 3) + 1e3
    law = attention.weights(x).float()
    law = law * (1 + 1e-4)
    exact = measured(attention, law.double(), x).sqrt().max()
    assert float(exact) <= approximation_error(attention, law, x).value


def test_exact_rows_cost_rounding_only():
    generator = torch.Generator().manual_seed(3)
    attention = CASES["dot"](generator)
    x = draw(generator, 6, 3)
    assert approximation_error(attention, attention.weights(x), x).value < 1e-4


def test_mass_where_there_is_none():
    x = torch.randn(4, 2, dtype=torch.float64)
    attention = r.Attention(r.Dot(), support=r.Causal())
    certificate = approximation_error(attention, torch.full((4, 4), 0.25, dtype=torch.float64), x)
    assert certificate.value == math.inf
    assert "3 of 4 rows have mass on keys that the query does not see" in certificate.refused[0]
    assert "3 of 4 rows" in str(certificate)


@pytest.mark.parametrize(
    ("attention", "sentence"),
    [
        (r.Attention(r.Dot(), normalizer=r.Sparsemax()), "rows of Sparsemax have no variational gap"),
        (r.Attention(r.Dot(), moment=r.Mode()), "the moment Mode has no theorem"),
    ],
)
def test_refusals(attention, sentence):
    x = torch.randn(3, 2, dtype=torch.float64)
    certificate = approximation_error(attention, torch.full((3, 3), 1 / 3, dtype=torch.float64), x)
    assert certificate.value == math.inf
    assert sentence in certificate.refused[0]


def test_what_is_assumed_is_said():
    x = torch.randn(3, 2, dtype=torch.float64)
    law = torch.full((3, 3), 1 / 3, dtype=torch.float64)
    known = approximation_error(r.Attention(r.Dot()), law, x)
    assert all(hypothesis.checked for hypothesis in known.hypotheses)
    other = approximation_error(r.Attention(r.Laplace()), law, x)
    assert not all(hypothesis.checked for hypothesis in other.hypotheses)


def test_bad_input():
    x = torch.randn(3, 2, dtype=torch.float64)
    with pytest.raises(r.errors.ArgumentError, match="not probability laws"):
        approximation_error(r.Attention(r.Dot()), torch.ones(3, 3), x)
    with pytest.raises(r.errors.ArgumentError, match=r"give rows on the keys: \(3, 3\)"):
        approximation_error(r.Attention(r.Dot()), torch.ones(3, 2), x)
    with pytest.raises(r.errors.ArgumentError, match="bound batches one by one"):
        approximation_error(r.Attention(r.Dot()), torch.ones(3, 3), x.expand(2, 3, 2))


def test_kernel_error_is_sharp():
    """Two values at ±1 and kernels wrong by exactly ±η: the best law reaches the bound."""
    for eta in (1e-6, 0.1, 0.5, 0.99):
        bound = kernel_error(eta, 1.0).value
        best = 0.0
        for share in torch.linspace(1e-4, 1 - 1e-4, 20001, dtype=torch.float64).tolist():
            up, down = share * (1 + eta), (1 - share) * (1 - eta)
            best = max(best, 2 * (up / (up + down) - share))
        assert best <= bound * (1 + 1e-9)
        assert best > 0.999 * bound


def test_kernel_error_against_noise():
    generator = torch.Generator().manual_seed(4)
    for _ in range(100):
        scores, values = 2 * draw(generator, 6), draw(generator, 6, 3)
        noise = 0.6 * (2 * torch.rand(6, generator=generator, dtype=torch.float64) - 1)
        kernel = scores.exp()
        wrong = kernel * (1 + noise)
        radius = float((values - values.mean(0)).norm(dim=-1).max())
        error = float(((wrong / wrong.sum()) @ values - (kernel / kernel.sum()) @ values).norm())
        assert error <= kernel_error(float(noise.abs().max()), radius).value
    with pytest.raises(r.errors.ArgumentError, match="relative_error: is 1"):
        kernel_error(1.0, 1.0)


@pytest.mark.parametrize("gap", [1e-12, 1e-3, 0.3, 2.0, 50.0])
def test_the_mass_moved_is_the_smaller_of_two_inequalities(gap):
    """√(2 gap) by Pinsker, 2√(1 - e^{-gap}) by Bretagnolle and Huber."""
    stated = min(math.sqrt(2 * gap), 2 * math.sqrt(-math.expm1(-gap)))
    assert stated * (1 - 1e-15) <= float(total_variation_bound(upper(gap))) <= stated * (1 + 1e-14)
    assert float(total_variation_bound(upper(0.0))) == 0
    assert 2.0 <= float(total_variation_bound(upper(math.inf))) <= 2.0 * (1 + 1e-14)


@pytest.mark.parametrize("error", [0.0, 1e-3, 0.5, 0.999])
def test_kernel_error_is_its_formula(error):
    """2η/(1 + √(1 - η²)) times the radius."""
    stated = 3.0 * 2 * error / (1 + math.sqrt(1 - error**2))
    assert kernel_error(error, 3.0).value == pytest.approx(stated, rel=1e-9)
    assert kernel_error(error, 3.0).value <= 6.0


def test_errors_of_rows_are_their_formula():
    """√(2 gap_i) times the radius of the values that row i sees: the middle of their box,
    their mean or half their diameter.
    """
    g = torch.Generator().manual_seed(7)
    w_v, x = draw(g, 3, 2), draw(g, 6, 3)
    attention = r.Attention(r.Bilinear(draw(g, 3, 3)), r.Linear(w_v), support=r.Causal())
    exact = attention.weights(x)
    law = blurred(exact, g, 0.05)
    values, found = x @ w_v, row_errors(attention, law, x)
    for i in range(6):
        seen = values[: i + 1]
        gap = float((law[i, : i + 1] * (law[i, : i + 1] / exact[i, : i + 1]).log()).sum())
        centers = (seen.mean(0), 0.5 * (seen.amax(0) + seen.amin(0)))
        radius = min(float((seen - center).norm(dim=-1).max()) for center in centers)
        radius = min(radius, float(torch.cdist(seen, seen).max()) / 2)
        stated = float(total_variation_bound(upper(max(gap, 0.0)))) * radius
        assert float(found[i]) == pytest.approx(stated, rel=1e-4, abs=1e-5)
    assert approximation_error(attention, law, x).value == pytest.approx(float(found.max()), rel=1e-9)


def test_rows_that_do_not_sum_to_one_pay_for_it():
    """|Σ - 1| times the longest value."""
    x = torch.tensor([[3.0], [4.0]], dtype=torch.float64)
    attention = r.Attention(r.Dot(scale=0.0))
    law = torch.full((2, 2), 0.5 * (1 + 8e-4), dtype=torch.float64)
    assert float(row_errors(attention, law, x).max()) == pytest.approx(8e-4 * 4.0, rel=1e-2)


def test_heads_side_by_side_add_as_squares():
    g = torch.Generator().manual_seed(3)
    attention = r.Attention(r.Dot(draw(g, 2, 3, 2), draw(g, 2, 3, 2)), r.Linear(draw(g, 2, 3, 2)))
    x = draw(g, 5, 3)
    law = blurred(attention.weights(x), g)
    rows = row_errors(attention, law, x)
    assert approximation_error(attention, law, x).value == pytest.approx(
        float(rows.square().sum(0).sqrt().max()), rel=1e-9
    )


def test_what_rounding_may_take_from_a_gap():
    """γ(16 (n + 2d) + 1024) (|s| + log(n + 1) + 1): exact rows cost √(2 slack) times the radius,
    and no less.
    """
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    w, b = (
        torch.tensor([[2.0, 0.0], [0.0, 1.0]], dtype=torch.float64),
        torch.tensor([1.0, 0.0], dtype=torch.float64),
    )
    size_w, longest = math.sqrt(5), 2.0
    rotary = r.potentials.base.Scaled(r.Bilinear(w) + r.Alibi(0.7), -2.0)
    for potential, score in (
        (r.Dot(scale=3.0), 3 * longest**2),
        (r.Dot(w, w, scale=-0.5, b_q=b, b_k=3 * b), 0.5 * (size_w * longest + 1) * (size_w * longest + 3)),
        (r.Bilinear(w), size_w * longest**2),
        (rotary, 2 * (size_w * longest**2 + 0.7 * 2)),
    ):
        attention = r.Attention(potential)
        slack = float(relative_error(16 * (3 + 2 + 2) + 1024)) * (score + math.log(4) + 1)
        radius = math.sqrt(5) / 2
        law = attention.weights(x)
        found = float(row_errors(attention, law, x).max())
        assert found == pytest.approx(math.sqrt(2 * slack) * radius, rel=2e-3)


def test_rounding_of_scores_that_are_not_known():
    """Ten digits of the largest are assumed beside the roundings that are counted; zeros have these only."""
    x = torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
    counted = float(relative_error(16 * (3 + 2 + 2) + 1024))
    for scale, largest in ((0.0, 0.0), (3.0, 12.0)):
        attention = r.Attention(r.Potential.of(lambda q, k, scale=scale: scale * (q * k).sum(-1)))
        slack = counted * (largest + math.log(4) + 1) + 1e-10 * largest
        found = float(row_errors(attention, attention.weights(x), x).max())
        assert found == pytest.approx(math.sqrt(2 * slack) * math.sqrt(5) / 2, rel=2e-3)


def test_rows_must_nearly_sum_to_one():
    """To a thousandth, above and below; and no entry is negative."""
    x, flat = torch.tensor([[3.0], [4.0]], dtype=torch.float64), r.Attention(r.Dot(scale=0.0))
    for total, allowed in ((1 + 9e-4, True), (1 - 9e-4, True), (1 + 1.5e-3, False), (1 - 1.5e-3, False)):
        law = torch.full((2, 2), 0.5 * total, dtype=torch.float64)
        if allowed:
            assert math.isfinite(approximation_error(flat, law, x).value)
        else:
            with pytest.raises(r.errors.ArgumentError, match="not probability laws"):
                approximation_error(flat, law, x)
    with pytest.raises(r.errors.ArgumentError, match="not probability laws"):
        approximation_error(flat, torch.tensor([[1.5, -0.5]] * 2, dtype=torch.float64), x)


def test_rows_of_heads_have_one_shape():
    """(m, n) and (1, m, n) serve all heads, (h, m, n) has one law for each; nothing else."""
    g = torch.Generator().manual_seed(3)
    attention = r.Attention(r.Dot(draw(g, 2, 3, 2), draw(g, 2, 3, 2)))
    x, law = draw(g, 5, 3), torch.full((5, 5), 0.2, dtype=torch.float64)
    found = [
        approximation_error(attention, law.expand(shape), x).value for shape in ((5, 5), (1, 5, 5), (2, 5, 5))
    ]
    assert found[0] == found[1] == found[2] < math.inf
    for shape in ((3, 5, 5), (1, 2, 5, 5), (2, 5, 4), (4, 5)):
        with pytest.raises(r.errors.ArgumentError, match="give rows on the keys"):
            approximation_error(attention, torch.full(shape, 1 / shape[-1], dtype=torch.float64), x)


def test_keys_without_mass_are_not_seen():
    """A far key of weight zero does not widen the values; a query that sees nothing has no error."""
    x = torch.tensor([[0.0], [2.0], [1e6]], dtype=torch.float64)
    keys = r.Measure(x, torch.tensor([0.0, 0.0, -math.inf], dtype=torch.float64))
    flat = r.Attention(r.Dot(scale=0.0))
    law = torch.tensor([[0.75, 0.25, 0.0]], dtype=torch.float64)
    gap = 0.75 * math.log(1.5) + 0.25 * math.log(0.5)
    found = float(row_errors(flat, law, x[:1], keys)[0])
    assert found == pytest.approx(float(total_variation_bound(upper(gap))), rel=1e-6)
    assert found >= 0.5  # the law moves a quarter of the mass by two


@pytest.mark.parametrize("name", ["linear", "factored"])
def test_values_are_known_up_to_their_rounding(name):
    """Equal scores and values that are all the same: the radius is γ(2d + 64) (|x||w|_F + |v|)."""
    g = torch.Generator().manual_seed(4)
    w, u = draw(g, 3, 2), draw(g, 2, 2)
    lookup, size, units = r.Linear(w), float(w.norm()), float(relative_error(2 * 3 + 64))
    if name == "factored":
        lookup, size, units = r.Factored(w, u), float(w.norm() * u.norm()), float(relative_error(2 * 5 + 64))
    x = draw(g, 1, 3).expand(4, 3).contiguous()
    law = torch.tensor([[0.7, 0.1, 0.1, 0.1]] * 4, dtype=torch.float64)
    moved = float(total_variation_bound(upper(0.7 * math.log(2.8) + 0.3 * math.log(0.4))))
    found = approximation_error(r.Attention(r.Dot(scale=0.0), lookup), law, x).value
    value = float(lookup.values(x[:1], None).norm())
    error = units * (float(x[0].norm()) * size + value)
    assert found == pytest.approx(
        moved * error + float(relative_error(4 * 4 + 64)) * (value + error), rel=0.05
    )


def test_rows_that_are_exact_pay_for_the_rounding_of_their_sum():
    """Halves of two values that are equal and exact: no gap, no radius, γ(4n + 64) of the longest value."""
    x = torch.tensor([[3.0, 4.0], [3.0, 4.0]], dtype=torch.float64)
    law = torch.full((1, 2), 0.5, dtype=torch.float64)
    found = float(row_errors(r.Attention(r.Dot(scale=0.0)), law, x[:1], x)[0])
    assert found == pytest.approx(5 * float(relative_error(4 * 2 + 64)), rel=1e-9, abs=0)


def test_many_values_have_a_center(monkeypatch):
    """Half the diameter; where pairs are too many, the radius about the mean or the middle of the box."""
    x = torch.tensor([[0.0, 0.0], [2.0, 3.0], [0.0, 1.0]], dtype=torch.float64)
    far = torch.tensor([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [3.0, 0.0]], dtype=torch.float64)
    law_of = {3: [0.5, 0.25, 0.25], 5: [0.6, 0.1, 0.1, 0.1, 0.1]}
    for values, half, middle in ((x, math.sqrt(13) / 2, [1.0, 1.5]), (far, 2.5, [1.5, 2.0])):
        values = values + 5.0
        centers = (values.mean(0), torch.tensor(middle, dtype=torch.float64) + 5.0)
        law = torch.tensor([law_of[len(values)]], dtype=torch.float64)
        gap = float((law * (law * len(values)).log()).sum())
        flat, moved = r.Attention(r.Dot(scale=0.0)), float(total_variation_bound(upper(gap)))
        around = min(float((values - center).norm(dim=-1).max()) for center in centers)
        for pairs, radius in ((len(values), half), (len(values) - 1, around)):
            monkeypatch.setattr(bounds, "_PAIRS", pairs)
            found = float(row_errors(flat, law, values[:1], values)[0])
            assert found == pytest.approx(moved * radius, rel=1e-6)
