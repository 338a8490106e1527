"""Reversed attention: a signed measure with the support of the row and mass zero; the gradients it carries;
rows on demand.
"""

import pytest
import torch

import regard as r
from tests.nouns import NORMALIZERS, SUPPORTS, D

ROWWISE = {name: n for name, n in NORMALIZERS.items() if n.rowwise and n.laws}


def loss_gradients(a, x, u):
    """∂⟨u, out⟩/∂(scores), by autograd through the definition."""
    potential, normalizer = a.normalizer.acting(a.potential)
    marks = torch.arange(x.shape[-2])
    scores = potential.scores(x, x).detach().requires_grad_()
    weights = normalizer.weights(scores, r.normalizers.Reference(None, a.support.allows(marks, marks)))
    return torch.autograd.grad(weights @ a.lookup.values(x, None), scores, u)[0], weights.detach()


@pytest.mark.parametrize("name", ROWWISE)
def test_rows_are_signed_measures_of_mass_zero(name):
    a, x, u = (
        r.Attention(r.Dot(scale=1.0), normalizer=ROWWISE[name], support=r.Causal()),
        torch.randn(6, 4, dtype=D),
        torch.randn(6, 4, dtype=D),
    )
    rows = r.derive.reversed_attention(a, x, u).rows()
    expected, weights = loss_gradients(a, x, u)
    assert torch.allclose(rows, expected, atol=1e-12)
    assert torch.allclose(rows.sum(-1), torch.zeros(6, dtype=D), atol=1e-12)
    assert (rows[weights == 0] == 0).all()
    assert torch.allclose(
        rows[0], torch.zeros(6, dtype=D), atol=1e-14
    )  # one visible key cannot be reweighted
    assert torch.allclose(rows.triu(1), torch.zeros(6, 6, dtype=D))


@pytest.mark.parametrize(
    "support",
    [s for name, s in SUPPORTS.items() if "batched" not in name and name != "causal and padding"],
    ids=repr,
)
def test_streamed_products(support):
    x, w = torch.randn(6, 4, dtype=D), torch.randn(2, 2, 4, 3, dtype=D)
    a = r.Attention(r.Dot(w[0], w[1]), r.Linear(torch.randn(2, 4, 3, dtype=D)), support=support)
    u = torch.randn(2, 6, 3, dtype=D)
    back = r.derive.reversed_attention(a, x, u)
    matrix = back.rows()
    assert torch.allclose(back.times_keys(), matrix @ (x @ w[1]), atol=1e-12)
    assert torch.allclose(back.times_queries(), matrix.mT @ (x @ w[0]), atol=1e-12)
    assert torch.allclose(back.rows(slice(2, 4)), matrix[..., 2:4, :])
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(a(leaf), leaf, u)
    carried = (
        matrix @ (x @ w[1]) @ w[0].mT
        + matrix.mT @ (x @ w[0]) @ w[1].mT
        + a.weights(x).mT @ u @ a.lookup.w_v.mT
    )
    assert torch.allclose(gradient, carried.sum(0), atol=1e-10)


def test_other_potentials():
    x, u = torch.randn(5, 4, dtype=D), torch.randn(5, 4, dtype=D)
    back = r.derive.reversed_attention(r.Attention(r.Cosine(scale=3.0)), x, u)
    unit = r.Cosine(scale=3.0).normalized(x)
    assert torch.allclose(back.times_keys(), back.rows() @ unit)
    laplace = r.derive.reversed_attention(r.Attention(r.Laplace()), x, u)
    assert torch.allclose(laplace.rows().sum(-1), torch.zeros(5, dtype=D), atol=1e-12)
    with pytest.raises(r.errors.ArgumentError, match="not an inner product"):
        laplace.times_keys()
    with pytest.raises(r.errors.ArgumentError, match="couples the rows"):
        r.derive.reversed_attention(r.Attention(r.Dot(), normalizer=r.Sinkhorn()), x, u)
    with pytest.raises(r.errors.ArgumentError, match=r"cotangent.*\[5, 4\]"):
        r.derive.reversed_attention(r.Attention(r.Dot()), x, u[:3])


def test_streaming_holds_no_matrix():
    """A million pairs of float64 would be 8 MB a matrix;
    the largest tensor that appears is a fraction of that.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    class Largest(TorchDispatchMode):
        size = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, (tuple, list)) else [out]:
                if isinstance(t, torch.Tensor):
                    self.size = max(self.size, t.numel())
            return out

    x = torch.randn(1500, 8)
    u = torch.randn(1500, 8)
    with Largest() as seen:
        r.derive.reversed_attention(r.Attention(r.Dot(), support=r.Causal()), x, u).times_keys()
        r.derive.row_statistics(r.Attention(r.Dot(), support=r.Causal()), x)
        r.Attention(r.Dot()).weights(x, rows=[3, 900])
        jacobian = r.linearize(r.Attention(r.Dot()), x)
        jacobian.mv(x)
        jacobian.rmv(x)
        jacobian.second(x)
    assert seen.size < 1500 * 1500 / 2


def test_lens():
    """Two keys, a loss that wants the value of the second:
    the query is pulled to the second key and pushed from the first.
    """
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=D)
    wanted = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=D)
    lens = r.derive.backward_lens(
        r.Attention(r.Dot()), x, r.Attention(r.Dot())(x) - wanted, 0, names=["first", "second"]
    )
    assert [name for name, _ in lens.towards] == ["second"]
    assert [name for name, _ in lens.away] == ["first"]
    assert "towards second" in str(lens)
    step = 1e-3
    a, u = r.Attention(r.Dot()), r.Attention(r.Dot())(x) - wanted
    pull = r.derive.reversed_attention(a, x, u).times_keys()
    moved = r.attend(x[:1] - step * pull[:1], x, x)
    assert (moved - wanted[:1]).norm() < (a(x)[:1] - wanted[:1]).norm()
    with pytest.raises(r.errors.ArgumentError, match="there are 2 queries"):
        r.derive.backward_lens(a, x, u, 2)
    with pytest.raises(r.errors.ArgumentError, match="names"):
        r.derive.backward_lens(a, x, u, 0, names=["one"])


def test_rows_on_demand():
    x = torch.randn(2, 7, 4, dtype=D)
    a = r.Attention(r.Gaussian(bandwidth=1.0), support=r.Causal())
    every = a.weights(x)
    assert torch.allclose(every @ x, a(x))
    for rows in (slice(2, 5), [6, 0], torch.tensor([1]), torch.arange(7) > 4):
        assert torch.equal(a.weights(x, rows=rows), every[..., rows, :])
    coupled = r.Attention(r.Dot(), normalizer=r.Sinkhorn(1e-10, 2000))
    assert torch.allclose(coupled.weights(x, rows=[1, 3]), coupled.weights(x)[..., [1, 3], :])
    assert a.weights(x, torch.randn(2, 3, 4, dtype=D)).shape == (2, 7, 3)
    with pytest.raises(r.errors.ArgumentError, match="rows"):
        a.weights(x, rows=[7])


def test_row_statistics():
    x = torch.randn(3, 40, 4, dtype=D)
    for a in (r.Attention(r.Dot(), support=r.Causal()), r.Attention(r.Laplace(), normalizer=r.Entmax(1.5))):
        found, rows = r.derive.row_statistics(a, x, sinks=2), a.weights(x)
        assert torch.allclose(found.entropy, -torch.xlogy(rows, rows).sum(-1))
        assert torch.allclose(found.effective_support, 1 / rows.square().sum(-1))
        assert torch.allclose(found.sink_mass, rows[..., :2].sum(-1))
        top = rows.topk(2, -1).values
        assert torch.allclose(found.softmax_norm, top[..., 0] * (1 - top[..., 0] + top[..., 1]), atol=1e-12)
        norms = torch.linalg.matrix_norm(torch.diag_embed(rows) - rows.unsqueeze(-1) * rows.unsqueeze(-2), 2)
        assert (norms <= found.softmax_norm + 1e-12).all()
        visible = (
            torch.ones(40, 40, dtype=torch.bool).tril()
            if isinstance(a.support, r.Causal)
            else torch.ones(40, 40, dtype=torch.bool)
        )
        assert torch.allclose(
            found.max_logit, a.potential.scores(x, x).masked_fill(~visible, -torch.inf).amax(-1)
        )
    assert "entropy" in repr(found)
    sharp = torch.tensor([[1 - 1e-12, 1e-12]], dtype=D)
    from regard.derive.rows import softmax_norm

    assert float(softmax_norm(sharp)) == pytest.approx(2e-12, rel=1e-9)
    with pytest.raises(r.errors.ArgumentError, match="sinks"):
        r.derive.row_statistics(a, x, sinks=41)
