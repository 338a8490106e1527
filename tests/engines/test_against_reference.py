"""Every engine equals the reference on every declaration it accepts: outputs, and gradients of everything."""

import itertools

import pytest
import torch
import torch.utils._pytree as pytree

import regard as r
from tests.nouns import NORMALIZERS, POTENTIALS, SUPPORTS, D

ENGINES = [r.engines.Sdpa(), r.engines.Tiled(), r.engines.Tiled(pairs=40), r.engines.LinearEngine()]
NOT_DOUBLY_STOCHASTIC = {
    "causal",
    "window or document",
    "causal and padding",
    "padding batched",
    "padding",
    "where",
    "nothing",
    "document batched",
}


def problem(heads=2):
    q, k = (torch.randn(2, heads, 6, 4, dtype=D).requires_grad_() for _ in range(2))
    v = torch.randn(2, heads, 6, 3, dtype=D).requires_grad_()
    log_weights = torch.randn(2, heads, 6, dtype=D)
    log_weights[0, 0, 2] = -torch.inf
    return q, k, v, log_weights.requires_grad_()


def differentiable(noun):
    return pytree.tree_map(
        lambda t: t.clone().requires_grad_() if isinstance(t, torch.Tensor) and t.dtype == D else t, noun
    )


def leaves(noun):
    return [t for t in pytree.tree_leaves(noun) if isinstance(t, torch.Tensor) and t.requires_grad]


def compare(potential, normalizer, support, weighted):
    potential, normalizer = differentiable(potential), differentiable(normalizer)
    q, k, v, log_weights = problem()
    log_weights = log_weights if weighted else None
    moving = [q, k, v, *([log_weights] if weighted else []), *leaves((potential, normalizer))]
    declared = {
        "potential": potential,
        "normalizer": normalizer,
        "support": support,
        "log_weights": log_weights,
    }
    expected = r.attend(q, k, v, engine=r.engines.ReferenceEngine(), **declared)
    upstream = torch.randn_like(expected)
    assert torch.isfinite(expected).all()
    gradients = torch.autograd.grad(expected, moving, upstream, allow_unused=True)
    accepted = 0
    for engine in ENGINES:
        try:
            found = r.attend(q, k, v, engine=engine, **declared)
        except r.errors.RefusalError:
            continue
        accepted += 1
        assert found.shape == expected.shape
        assert torch.allclose(found, expected, rtol=1e-9, atol=1e-10), engine.name
        for mine, theirs in zip(
            torch.autograd.grad(found, moving, upstream, allow_unused=True), gradients, strict=True
        ):
            mine = torch.zeros(()) if mine is None else mine
            theirs = torch.zeros(()) if theirs is None else theirs
            assert torch.isfinite(theirs).all()
            assert torch.allclose(mine.to(D), theirs.to(D), rtol=1e-6, atol=1e-8), engine.name
    assert accepted >= 1


@pytest.mark.parametrize("support", SUPPORTS)
@pytest.mark.parametrize("potential", POTENTIALS)
def test_potentials(potential, support):
    for weighted in (False, True):
        compare(POTENTIALS[potential], r.Softmax(), SUPPORTS[support], weighted)


@pytest.mark.parametrize(
    ("normalizer", "support"),
    [(n, s) for n, s in itertools.product(NORMALIZERS, SUPPORTS) if n != "sinkhorn"],
)
def test_normalizers(normalizer, support):
    for weighted in (False, True):
        compare(r.Dot(), NORMALIZERS[normalizer], SUPPORTS[support], weighted)


@pytest.mark.parametrize("support", [s for s in SUPPORTS if s not in NOT_DOUBLY_STOCHASTIC])
@pytest.mark.parametrize("iterations", [1, 4])
def test_sinkhorn(support, iterations):
    """Also before convergence: the engines run the same iteration, and differentiate it."""
    for weighted in (False, True):
        compare(r.Gaussian(bandwidth=1.0), r.Sinkhorn(0.0, iterations), SUPPORTS[support], weighted)


@pytest.mark.parametrize("seed", range(40))
def test_any_combination(seed):
    generator = torch.Generator().manual_seed(seed)

    def draw(nouns):
        return list(nouns.values())[int(torch.randint(len(nouns), (), generator=generator))]

    potential, support = draw(POTENTIALS), draw(SUPPORTS)
    normalizer = draw(
        {name: n for name, n in NORMALIZERS.items() if "linear" not in name and name != "sinkhorn"}
    )
    compare(potential, normalizer, support, bool(seed % 2))


@pytest.mark.parametrize("name", ["dot", "gaussian", "laplace", "additive", "relative logarithmic"])
def test_grouped_queries(name):
    """Two groups of keys for four heads of queries: the same as keys repeated."""
    q = torch.randn(3, 4, 6, 4, dtype=D)
    k, v = torch.randn(3, 2, 6, 4, dtype=D), torch.randn(3, 2, 6, 5, dtype=D)
    weights = torch.randn(3, 2, 6, dtype=D)
    repeated = [t.repeat_interleave(2, 1) for t in (k, v)]
    expected = r.attend(
        q,
        *repeated,
        potential=POTENTIALS[name],
        log_weights=weights.repeat_interleave(2, 1),
        engine=r.engines.ReferenceEngine(),
    )
    assert torch.allclose(
        r.attend(q, k, v, potential=POTENTIALS[name], log_weights=weights), expected, atol=1e-12
    )


def test_equals_torch():
    q, k, v = (torch.randn(2, 4, 9, 8, dtype=D) for _ in range(3))
    sdpa = torch.nn.functional.scaled_dot_product_attention
    assert torch.allclose(r.attend(q, k, v), sdpa(q, k, v), atol=1e-12)
    assert torch.allclose(r.attend(q, k, v, support=r.Causal()), sdpa(q, k, v, is_causal=True), atol=1e-12)
    assert torch.allclose(
        r.attend(q, k[:, :2], v[:, :2]), sdpa(q, k[:, :2], v[:, :2], enable_gqa=True), atol=1e-12
    )
    mask = torch.rand(9, 9) > 0.3
    mask[:, 0] = True
    assert torch.allclose(r.attend(q, k, v, support=r.Where(mask)), sdpa(q, k, v, attn_mask=mask), atol=1e-12)
    assert torch.allclose(r.attend(q[0, 0], k[0, 0], v[0, 0]), sdpa(q, k, v)[0, 0], atol=1e-12)


@pytest.mark.parametrize("name", ["dot", "gaussian heads", "alibi heads", "relative", "laplace"])
def test_marks_make_order_irrelevant(name):
    """A measure whose atoms are listed in another order, with their marks,
    is the same measure to every engine.
    """
    x = r.Measure(torch.randn(2, 6, 4, dtype=D), torch.randn(2, 6, dtype=D), torch.arange(6))
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    moved = r.Measure(x.points[:, order], x.log_weights[:, order], order)
    for support in (r.Causal(), r.Window(2, 1), r.Document(torch.tensor([0, 0, 1, 1, 2, 2]))):
        attention = r.Attention(POTENTIALS[name], support=support)
        for engine in (r.engines.ReferenceEngine(), r.engines.Tiled(), r.engines.Sdpa()):
            try:
                straight, turned = (r.apply(attention, m, engine=engine) for m in (x, moved))
            except r.errors.RefusalError:
                continue
            assert torch.allclose(turned.points, straight.points[..., order, :], atol=1e-11)
