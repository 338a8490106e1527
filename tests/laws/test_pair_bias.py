"""Masks and dropout as torch has them: a bias on pairs, a boolean mask, weights that are dropped."""

import math

import pytest
import torch
import torch.nn.functional as F

import regard as r

D = torch.float64


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=D)


q, k, v = draw(2, 3, 5, 8), draw(2, 3, 7, 8, seed=1), draw(2, 3, 7, 4, seed=2)
MASKS = [(5, 7), (1, 7), (5, 1), (3, 5, 7), (2, 1, 5, 7), (2, 1, 1, 7)]


@pytest.mark.parametrize("shape", MASKS)
def test_a_mask_that_is_added_is_torchs(shape):
    mask = draw(*shape, seed=3)
    found = r.attend(q, k, v, potential=r.Dot() + r.PairBias(mask))
    torch.testing.assert_close(found, F.scaled_dot_product_attention(q, k, v, mask))


@pytest.mark.parametrize("shape", MASKS)
def test_a_boolean_mask_is_torchs(shape):
    mask = draw(*shape, seed=3) > -0.5
    found = r.attend(q, k, v, support=r.Where(mask))
    wanted = F.scaled_dot_product_attention(q, k, v, mask.expand(2, 3, 5, 7))
    torch.testing.assert_close(found, wanted.nan_to_num())


def test_infinities_hide_keys_and_empty_rows_are_zero():
    mask = torch.zeros(5, 7, dtype=D).masked_fill(draw(5, 7) > 0.3, -math.inf)
    mask[2] = -math.inf
    found = r.attend(q, k, v, potential=r.Dot() + r.PairBias(mask))
    torch.testing.assert_close(found, r.attend(q, k, v, support=r.Where(mask == 0)))
    assert float(found[..., 2, :].abs().max()) == 0


@pytest.mark.parametrize("normalizer", [r.Softmax(), r.Sparsemax(), r.Sigmoid()])
def test_the_bias_has_its_gradient(normalizer):
    mask, few = draw(3, 7).requires_grad_(), (q[0, 0, :3], k[0, 0], v[0, 0])
    assert torch.autograd.gradcheck(
        lambda bias: r.attend(*few, potential=r.Dot() + r.PairBias(bias), normalizer=normalizer), mask
    )


def test_marks_choose_entries():
    """A permuted sequence with its marks is the same sequence."""
    x, order = draw(7, 4), torch.tensor([3, 1, 6, 0, 5, 2, 4])
    attention = r.Attention(r.Dot() + r.PairBias(draw(7, 7, seed=5)))
    permuted = r.Measure(x[order], marks=order)
    torch.testing.assert_close(attention(permuted).points, attention(x)[order])


def test_half_precision_keeps_the_bias():
    low = [t.bfloat16() for t in (q, k, v)]
    mask = 5 * draw(5, 7, seed=3)
    found = r.attend(*low, potential=r.Dot() + r.PairBias(mask.bfloat16()))
    wanted = r.attend(*(t.double() for t in low), potential=r.Dot() + r.PairBias(mask.bfloat16().double()))
    assert float((found - wanted).abs().max()) < 2e-2


def test_what_is_no_bias_says_what_it_is():
    with pytest.raises(r.errors.ArgumentError, match=r"bias: is boolean.*regard.Where\(mask\)"):
        r.PairBias(torch.ones(3, 3, dtype=torch.bool))
    with pytest.raises(r.errors.ArgumentError, match=r"bias: has shape \[3\]"):
        r.PairBias(torch.ones(3))
    with pytest.raises(r.errors.ArgumentError, match=r"bias: covers the marks 0\.\.3"):
        r.attend(q, k, v, potential=r.PairBias(draw(4, 7)))


def test_certificates_know_the_bias():
    """A bias changes rows but not how scores move: the bound of masks applies, an attack stays below it, and
    what is infinite is refused.
    """
    mask = torch.zeros(4, 4, dtype=D).masked_fill(~torch.ones(4, 4).tril().bool(), -math.inf)
    domain, norm = r.Ball(0.7, tokens=4), r.Frobenius()
    biased = r.Attention(r.Dot(draw(4, 3), draw(4, 3, seed=1)) + r.PairBias(mask))
    masked = r.Attention(r.Dot(draw(4, 3), draw(4, 3, seed=1)), support=r.Causal())
    assert r.certify(biased, domain, norm).value == pytest.approx(r.certify(masked, domain, norm).value)
    learned = r.Attention(r.Dot(draw(4, 3), draw(4, 3, seed=1)) + r.PairBias(draw(4, 4, seed=6)))
    bound = r.certify(learned, domain, norm).value
    assert r.falsify(learned, domain, norm, steps=6, restarts=2).value <= bound < math.inf
    wrong = biased.replace(potential=masked.potential + r.PairBias(torch.full((4, 4), math.inf)))
    assert "infinite or not a number" in str(r.certify(wrong, domain, norm).ladder())


# Dropout


@pytest.mark.parametrize("share", [0.2, 0.5, 1.0])
@pytest.mark.parametrize("kind", [torch.float64, torch.float32, torch.bfloat16])
def test_dropout_draws_what_torch_draws(share, kind):
    tensors = [t.to(kind) for t in (q, k, v)]
    torch.manual_seed(3)
    found = r.attend(*tensors, dropout=share)
    torch.manual_seed(3)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*tensors, dropout_p=share))


def test_dropout_with_a_mask_and_a_gradient():
    mask = draw(5, 7, seed=3)
    gradients = []
    for call in (
        lambda x: r.attend(x, k, v, potential=r.Dot() + r.PairBias(mask), dropout=0.3),
        lambda x: F.scaled_dot_product_attention(x, k, v, mask, 0.3),
    ):
        torch.manual_seed(1)
        x = q.clone().requires_grad_()
        gradients.append(torch.autograd.grad(call(x).square().sum(), x)[0])
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("normalizer", [r.Softmax(), r.Entmax(1.5), r.Sigmoid()])
def test_dropout_is_right_in_the_mean(normalizer):
    """E of the output is the output: each weight is kept with probability 1 - p and divided by it;
    heads whose scores are the same draw apart.
    """
    torch.manual_seed(0)
    many = v[:1, :1].expand(4000, 1, -1, -1)
    found = r.attend(q[0, 0], k[0, 0], many, normalizer=normalizer, dropout=0.4)
    exact = r.attend(q[0, 0], k[0, 0], v[0, 0], normalizer=normalizer)
    spread = found.std(0) / math.sqrt(len(found))
    assert float(((found.mean(0) - exact).abs() / spread).max()) < 5
    assert float(spread.min()) > 0


@pytest.mark.parametrize("share", [-0.1, 1.1, "half", True, None])
def test_a_share_is_between_zero_and_one(share):
    with pytest.raises(r.errors.ArgumentError, match="dropout: is "):
        r.attend(q, k, v, dropout=share)


def test_an_engine_cannot_drop():
    with pytest.raises(r.errors.ArgumentError, match=r"engine: is Sdpa.*leave it out, or the dropout"):
        r.attend(q, k, v, dropout=0.1, engine=r.engines.Sdpa())
