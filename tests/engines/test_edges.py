"""Where things end: no queries, no keys, empty supports, huge logits, zero weights, odd strides."""

import sys

import pytest
import torch

import regard as r
from tests.nouns import D

ENGINES = [
    r.engines.ReferenceEngine(),
    r.engines.Sdpa(),
    r.engines.Tiled(),
    r.engines.Tiled(pairs=5),
    r.engines.LinearEngine(),
]
DECLARED = {
    "dot": {},
    "gaussian": {"potential": r.Gaussian(bandwidth=1.0)},
    "laplace": {"potential": r.Laplace()},
    "additive": {"potential": r.Additive(None, None, torch.ones(4, dtype=D))},
    "alibi": {"potential": r.Dot() + r.Alibi(0.3)},
    "softcap": {"potential": r.SoftCap(r.Dot(), 2.0)},
    "entmax": {"normalizer": r.Entmax(1.5)},
    "sparsemax": {"normalizer": r.Sparsemax()},
    "sigmoid": {"normalizer": r.Sigmoid()},
    "elu": {"normalizer": r.LinearKernel(r.normalizers.Elu())},
    "sinkhorn": {"normalizer": r.Sinkhorn(0.0, 3)},
}


def run(declared, q, k, v, **more):
    """Outputs and gradients of every engine that accepts."""
    for engine in ENGINES:
        inputs = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        try:
            out = r.attend(*inputs, engine=engine, **declared, **more)
        except r.errors.RefusalError:
            continue
        yield engine, out, torch.autograd.grad(out.sum(), inputs, allow_unused=True)


@pytest.mark.parametrize("name", DECLARED)
def test_empty_support(name):
    """Query 2 sees nothing: its output is zero, it has no gradient, and nothing is NaN,
    in every engine alike.
    """
    q, k, v = (torch.randn(2, 5, 4, dtype=D) for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool)
    mask[2] = False
    for engine, out, gradients in run(DECLARED[name], q, k, v, support=r.Where(mask)):
        assert torch.equal(out[:, 2], torch.zeros(2, 4, dtype=D)), engine.name
        assert torch.isfinite(out).all()
        assert all(g is None or torch.isfinite(g).all() for g in gradients), engine.name
        assert gradients[0] is None or torch.equal(gradients[0][:, 2], torch.zeros(2, 4, dtype=D))


@pytest.mark.parametrize("name", DECLARED)
def test_nothing_is_visible(name):
    q, k, v = (torch.randn(2, 5, 4, dtype=D) for _ in range(3))
    for engine, out, gradients in run(DECLARED[name], q, k, v, support=r.Padding(torch.tensor(0))):
        assert torch.equal(out, torch.zeros_like(out)), engine.name
        assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in gradients), engine.name


@pytest.mark.parametrize("name", [n for n in DECLARED if n != "sinkhorn"])
def test_weights_of_zero(name):
    """A key with log-weight -inf is no key at all; if no key has weight, the output is zero."""
    q, k, v = (torch.randn(5, 4, dtype=D) for _ in range(3))
    gone = torch.tensor([0, -torch.inf, 0, 0, -torch.inf], dtype=D)
    kept = torch.tensor([0, 2, 3])
    without = (
        r.attend(q, k[kept], v[kept], engine=r.engines.ReferenceEngine(), **DECLARED[name])
        if name != "alibi"
        else None
    )
    for engine, out, gradients in run(DECLARED[name], q, k, v, log_weights=gone):
        assert without is None or torch.allclose(out, without, atol=1e-10), engine.name
        assert torch.equal(gradients[2][1], torch.zeros(4, dtype=D))
    for engine, out, gradients in run(
        DECLARED[name], q, k, v, log_weights=torch.full((5,), -torch.inf, dtype=D)
    ):
        assert torch.equal(out, torch.zeros_like(out)), engine.name
        assert all(g is None or torch.isfinite(g).all() for g in gradients), engine.name


@pytest.mark.parametrize("name", DECLARED)
@pytest.mark.parametrize(("m", "n"), [(0, 3), (3, 0), (0, 0), (1, 1), (1, 4), (4, 1)])
def test_few_tokens(name, m, n):
    q, k, v = torch.randn(2, m, 4, dtype=D), torch.randn(2, n, 4, dtype=D), torch.randn(2, n, 3, dtype=D)
    out = r.attend(q.requires_grad_(), k, v, **DECLARED[name])
    assert out.shape == (2, m, 3)
    assert torch.isfinite(out).all()
    assert n > 0 or torch.equal(out, torch.zeros_like(out))
    assert torch.isfinite(
        torch.autograd.grad(out.sum(), q, allow_unused=True, materialize_grads=True)[0]
    ).all()


def test_empty_batch():
    assert r.attend(torch.randn(0, 5, 4), torch.randn(0, 6, 4), torch.randn(0, 6, 3)).shape == (0, 5, 3)


@pytest.mark.parametrize(
    "name", ["dot", "gaussian", "laplace", "entmax", "sparsemax", "sigmoid", "softcap", "alibi"]
)
@pytest.mark.parametrize("dtype", [torch.float32, D])
def test_huge_logits(name, dtype):
    """Scores of ±1e4 and more saturate; they do not overflow."""
    q, k, v = (
        1e3 * torch.randn(6, 4, dtype=dtype),
        1e2 * torch.randn(7, 4, dtype=dtype),
        torch.randn(7, 3, dtype=dtype),
    )
    outputs = [
        out
        for _, out, gradients in run(DECLARED[name], q, k, v)
        if all(torch.isfinite(g).all() for g in gradients)
    ]
    assert len(outputs) >= 3
    for out in outputs:
        assert torch.allclose(out, outputs[0], atol=1e-4)


def test_one_dimension():
    x = torch.randn(7, 1, dtype=D)
    for engine, out, _ in run({"potential": r.Gaussian(bandwidth=1.0)}, x, x, x):
        assert torch.allclose(out, (-0.5 * (x - x.T).square()).softmax(-1) @ x, atol=1e-12), engine.name


def test_strides():
    """Transposed, sliced and expanded inputs give what their contiguous copies give."""
    base = torch.randn(3, 4, 8, 2, 5, dtype=D)
    q = base[..., 0, :].transpose(1, 2)[:, ::2]
    k, v = (
        base[:1, :, :, 1, :4].transpose(-1, -2)[0].expand(3, 4, 4, 8).transpose(-1, -2)[..., :3],
        torch.randn(3, 1, 1, 5, dtype=D).expand(3, 4, 8, 5),
    )
    q = torch.randn(8, 3, 4, 6, dtype=D).permute(1, 2, 0, 3)[..., ::2]
    for declared in (DECLARED["dot"], DECLARED["gaussian"], DECLARED["laplace"], DECLARED["entmax"]):
        plain = r.attend(*(t.contiguous() for t in (q, k, v)), **declared)
        assert torch.allclose(r.attend(q, k, v, **declared), plain, atol=1e-12)


def test_nan_propagates():
    """attend checks shapes, not values: a NaN in a query spoils its row and no other, as in torch."""
    q, k, v = (torch.randn(5, 4) for _ in range(3))
    q[1, 0] = torch.nan
    for name, engine in (
        ("dot", r.engines.Tiled()),
        ("laplace", r.engines.Tiled()),
        ("dot", r.engines.ReferenceEngine()),
        ("entmax", r.engines.Tiled()),
    ):
        out = r.attend(q, k, v, engine=engine, **DECLARED[name])
        assert torch.isnan(out[1]).all()
        assert torch.isfinite(out[[0, 2, 3, 4]]).all()
    q, k, v = (torch.randn(1, 1, 5, 16) for _ in range(3))
    for spoiled in (q, k, v):
        kept = spoiled[0, 0, 1, 0].clone()
        spoiled[0, 0, 1, 0] = torch.nan
        theirs = torch.nn.functional.scaled_dot_product_attention(q, k, v)
        assert torch.equal(r.attend(q, k, v).nan_to_num(7.0), theirs.nan_to_num(7.0))
        spoiled[0, 0, 1, 0] = kept


def test_a_fall_back_to_all_pairs_is_said():
    """No engine but the reference takes an empty problem's opposite: make every other engine refuse,
    and a warning follows.
    """
    from regard.compute.tensors import pose_tensors

    module = sys.modules["regard.compute.selection"]

    q = torch.zeros(1, 4)
    problem = pose_tensors(q, q[:0], q[:0], r.Laplace(), r.Softmax(), r.Full(), None)
    large, module.LARGE = module.LARGE, -1
    try:
        with pytest.warns(r.errors.PerformanceWarning, match="explain"):
            assert module.select(problem).engine.name == "reference"
    finally:
        module.LARGE = large
