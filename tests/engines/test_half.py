"""Half precision: every declaration in bfloat16 and float16 is as exact as torch's own attention is.

Torch's own error is that of F.scaled_dot_product_attention on the same points, against float64; no result can
be nearer than the rounding of the exact one, so that counts too.
"""

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree

import regard as r
from tests.nouns import NORMALIZERS, POTENTIALS, SUPPORTS

HALVES = pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
MARGIN = 1.5
SPREAD = 9.0
PRODUCTS = (r.Dot, r.Bilinear)


def cast(value, kind):
    return pytree.tree_map(
        lambda t: t.to(kind) if isinstance(t, torch.Tensor) and t.dtype.is_floating_point else t, value
    )


def points(kind, width=4):
    generator = torch.Generator().manual_seed(0)
    return tuple(
        ((2 * torch.rand(2, 2, 6, width, generator=generator) - 1) * SPREAD).to(kind) for _ in range(3)
    )


def worst(found, exact):
    return float((found.double() - exact).abs().max())


def torch_error(q, k, v, potential):
    """What torch loses on the same points, projected in the same half precision where they are projected."""

    def run(*tensors, noun):
        marks = torch.arange(q.shape[-2])
        x, y = noun.features(*tensors[:2], marks, marks) if isinstance(noun, PRODUCTS) else tensors[:2]
        return F.scaled_dot_product_attention(x, y, tensors[2])

    exact = run(*(t.double() for t in (q, k, v)), noun=cast(cast(potential, q.dtype), torch.float64))
    return worst(run(q, k, v, noun=cast(potential, q.dtype)), exact)


def keep_the_law(kind, declared, width=4):
    q, k, v = points(kind, width)
    given = {name: cast(value, kind) for name, value in declared.items()}
    exact = r.attend(
        *(t.double() for t in (q, k, v)),
        engine=r.engines.ReferenceEngine(),
        **{name: cast(value, torch.float64) for name, value in given.items()},
    )
    found = r.attend(q, k, v, **given)
    assert found.dtype == kind
    allowed = max(torch_error(q, k, v, declared.get("potential", r.Dot())), worst(exact.to(kind), exact))
    assert worst(found, exact) <= MARGIN * allowed


@HALVES
@pytest.mark.parametrize("name", POTENTIALS)
def test_potentials(kind, name):
    keep_the_law(kind, {"potential": POTENTIALS[name]})


@HALVES
@pytest.mark.parametrize("name", NORMALIZERS)
def test_normalizers(kind, name):
    normalizer = r.Sinkhorn(0.0, 8) if name == "sinkhorn" else NORMALIZERS[name]  # far points converge slowly
    keep_the_law(kind, {"normalizer": normalizer})
    keep_the_law(kind, {"normalizer": normalizer, "potential": r.Rotary(r.Dot())})


@HALVES
@pytest.mark.parametrize("name", SUPPORTS)
def test_supports(kind, name):
    keep_the_law(kind, {"support": SUPPORTS[name]})
    keep_the_law(kind, {"support": SUPPORTS[name], "potential": r.Rotary(r.Dot())})


@HALVES
def test_a_bias_of_zero_costs_nothing(kind):
    """Dot() + Alibi(0.0) is Dot(): the error of the one is that of the other."""
    keep_the_law(kind, {"potential": r.Dot() + r.Alibi(0.0)}, width=8)
    keep_the_law(kind, {"potential": r.Rotary(r.Dot())}, width=8)
