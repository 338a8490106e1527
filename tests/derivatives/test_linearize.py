"""The Jacobian of every declaration against finite differences, autograd and dense linear algebra."""

import itertools

import pytest
import torch
import torch.utils._pytree as pytree
from torch.func import jacrev, jvp

import regard as r
from regard.derive.blocks import largest_root
from regard.derive.heads import HeadsJacobian
from tests.nouns import LOOKUPS, NORMALIZERS, POTENTIALS, SUPPORTS, D


def random(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=D)


DECLARATIONS = (
    {f"potential {name}": r.Attention(potential) for name, potential in POTENTIALS.items()}
    | {
        f"normalizer {name}": r.Attention(r.Dot(), normalizer=normalizer)
        for name, normalizer in NORMALIZERS.items()
    }
    | {
        f"support {name}": r.Attention(r.Dot(), support=support)
        for name, support in SUPPORTS.items()
        if "batched" not in name
    }
    | {f"lookup {name}": r.Attention(r.Dot(), lookup) for name, lookup in LOOKUPS.items()}
    | {
        "heads": r.Attention(r.Dot(random(2, 4, 3), random(2, 4, 3)), r.Linear(random(2, 4, 5))),
        "grouped heads": r.Attention(r.Dot(random(4, 4, 3), random(2, 4, 3)), r.Linear(random(2, 4, 5))),
        "temperature of heads": r.Attention(
            r.Dot(random(2, 4, 3), random(2, 4, 3)), normalizer=r.Softmax(torch.tensor([0.5, 2.0], dtype=D))
        ),
        "rotary causal": r.Attention(
            r.Rotary(r.Dot(random(4, 4), random(4, 4))), r.Linear(random(4, 2)), support=r.Causal()
        ),
        "alibi sum": r.Attention(r.Dot() + r.Alibi.heads(2), support=r.Causal()),
    }
)


def definition(a):
    return lambda x: r.apply(a, x, engine=r.engines.ReferenceEngine())


@pytest.mark.parametrize("name", DECLARATIONS)
def test_products_and_blocks(name):
    """Adjointness, finite differences, every block, its norm, and the second derivative."""
    a, x = DECLARATIONS[name], torch.randn(6, 4, dtype=D)
    x = 0.2 * x if "sinkhorn" in name else x  # couplings of sharp scores take hundreds of steps
    check(definition(a), r.linearize(a, x), x)


def check(f, jacobian, x):
    """All that a Jacobian says, against f itself."""
    value = f(x)
    assert torch.allclose(jacobian.value, value, atol=1e-10)
    t, u, step = torch.randn_like(x), torch.randn_like(value), 1e-5
    pushed, pulled = jacobian.mv(t), jacobian.rmv(u)
    assert torch.allclose((u * pushed).sum(), (pulled * t).sum(), rtol=1e-9)
    difference = (f(x + step * t) - f(x - step * t)) / (2 * step)
    assert torch.allclose(pushed, difference, atol=1e-6 * (1 + float(difference.abs().max())))
    dense = jacrev(f)(x)  # (..., m, e, n, d)
    for i, j in ((0, 0), (2, 1), (1, 4), (5, 5), (-1, -6)):
        assert torch.allclose(jacobian.block(i, j), dense[..., i, :, j, :], atol=1e-9)
    assert torch.allclose(
        jacobian.influence(), torch.linalg.matrix_norm(dense.transpose(-3, -2), 2), atol=1e-8
    )
    second = jvp(lambda x: jvp(f, (x,), (t,))[1], (x,), (t,))[1]
    assert torch.allclose(jacobian.second(t), second, rtol=1e-6, atol=1e-8)
    exact = float(torch.linalg.matrix_norm(dense.reshape(value.numel(), x.numel()), 2))
    estimate = jacobian.norm(tolerance=1e-8)
    assert float(estimate) == pytest.approx(exact, rel=1e-7)
    assert float(estimate) <= exact * (1 + 1e-12)


MIXED = {
    "heads": r.maps.Heads(DECLARATIONS["heads"], random(2, 5, 3), random(3)),
    "grouped": r.maps.Heads(DECLARATIONS["grouped heads"], random(4, 5, 4)),
    "rotary": r.maps.Heads(DECLARATIONS["rotary causal"], random(1, 2, 4)),
    "sparse": r.maps.Heads(
        r.Attention(r.Dot(random(2, 4, 3), random(2, 4, 3)), normalizer=r.Sparsemax()),
        random(2, 4, 4),
        random(4),
    ),
    "one matrix for many heads": r.maps.Heads(DECLARATIONS["heads"], random(1, 5, 3)),
    "one value for many matrices": r.maps.Heads(r.Attention(r.Dot()), random(3, 4, 2)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_heads(name):
    """Joined heads have the closed forms of their attention, and all that follows."""
    x, map = torch.randn(6, 4, dtype=D), MIXED[name]
    jacobian = r.linearize(map, x)
    assert isinstance(jacobian, HeadsJacobian)
    check(map, jacobian, x)
    narrow = r.linearize(pytree.tree_map(torch.Tensor.float, map), x.float())
    whole = narrow.norm_certificate()  # in float64, with nudged inputs
    assert jacobian.norm(tolerance=1e-9).value == pytest.approx(whole.value, rel=1e-5)
    batch = torch.randn(3, 1, 6, 4, dtype=D)
    t = torch.randn_like(batch)
    assert torch.allclose(
        r.linearize(map, batch).mv(t)[1], r.linearize(map, batch[1, 0]).mv(t[1, 0]), atol=1e-9
    )


def test_mixed_heads_of_another_moment():
    """The likeliest value of each row is a point too, and is differentiated as any function."""
    map = r.maps.Heads(
        r.Attention(r.Dot(random(2, 4, 3), random(2, 4, 3)), r.Linear(random(2, 4, 3)), moment=r.Mode()),
        random(2, 3, 4),
    )
    x, t = torch.randn(5, 4, dtype=D), torch.randn(5, 4, dtype=D)
    assert torch.allclose(r.linearize(map, x).mv(t), jvp(map, (x,), (t,))[1], atol=1e-10)


def test_mixed_heads_keep_marks_and_forget_their_tensors():
    map = r.maps.Heads(
        r.Attention(r.Rotary(r.Dot()), r.Linear(random(2, 4, 3)), support=r.Causal()), random(2, 3, 4)
    )
    x, marks = torch.randn(5, 4, dtype=D), torch.tensor([0, 3, 4, 9, 11])
    jacobian, t = r.linearize(map, r.Measure(x, marks=marks)), torch.randn(5, 4, dtype=D)
    expected = jvp(lambda x: map.attention(r.Measure(x, marks=marks)).points, (x,), (t,))[1]
    moved = (expected @ map.w_o).sum(-3)
    assert torch.allclose(jacobian.mv(t), moved, atol=1e-10)
    assert not torch.allclose(r.linearize(map, x).mv(t), moved, atol=1e-3)
    map.w_o.zero_()
    assert torch.allclose(jacobian.mv(t), moved, atol=1e-10)
    with pytest.raises(r.errors.ArgumentError, match="cotangent"):
        jacobian.rmv(torch.zeros(5, 3, dtype=D))
    with pytest.raises(r.errors.ArgumentError, match="context"):
        r.linearize(map, x, x)


def test_second_derivative_formula():
    """u'' = 2 Cov(d, s') + Cov(x, s'') + E[(x - m)(s' - E s')²] for each row."""
    x, t, a = torch.randn(5, 3, dtype=D), torch.randn(5, 3, dtype=D), torch.randn(3, 3, dtype=D)
    attention = r.Attention(r.Bilinear(a))
    rows = attention.weights(x)
    first = t @ a @ x.T + x @ a @ t.T
    second = 2 * t @ a @ t.T
    mean = lambda z: torch.einsum("ij,ij...->i...", rows, z)  # noqa: E731
    spread = lambda z: z - (rows * z).sum(-1, keepdim=True)  # noqa: E731
    centered = x.unsqueeze(0) - (rows @ x).unsqueeze(1)
    expected = 2 * mean(t.unsqueeze(0) * spread(first).unsqueeze(-1))
    expected = (
        expected
        + mean(centered * second.unsqueeze(-1))
        + mean(centered * spread(first).square().unsqueeze(-1))
    )
    assert torch.allclose(r.linearize(attention, x).second(t), expected)


def test_known_values():
    """A worked example: X = sin(1+3i+j), A = cos(2+3i+j)/2, W = sin(3+2(3i+j)); |J|₂ = 2.8106266806294307."""
    grid = lambda rows: torch.arange(rows * 3, dtype=D).reshape(rows, 3)  # noqa: E731
    x, a, w = torch.sin(1 + grid(4)), torch.cos(2 + grid(3)) / 2, torch.sin(3 + 2 * grid(3))
    attention = r.Attention(r.Bilinear(a), r.Linear(w))
    jacobian = r.linearize(attention, x)
    assert float(jacobian.norm(tolerance=1e-10)) == pytest.approx(2.8106266806294307, rel=1e-12)
    certificate = jacobian.norm_certificate()
    assert 2.8106266806294307 <= certificate.value <= 2.8106266806294307 * (1 + 1e-9)
    assert r.derive.row_statistics(attention, x).softmax_norm.tolist() == pytest.approx(
        [0.2705313688, 0.2677829279, 0.2650230857, 0.2626308644]
    )


SHAPES = {"random": (6, 4), "one token": (1, 4), "wide": (3, 12)}


@pytest.mark.parametrize(
    "kind",
    [
        "random",
        "peaked 3",
        "peaked 10",
        "causal",
        "identical tokens",
        "zero values",
        "rank one",
        "one token",
        "wide",
    ],
)
def test_singular_values(kind):
    """Against the dense matrix, where power iteration would stall as well."""
    n, d = SHAPES.get(kind, (7, 4))
    x = torch.randn(n, d, dtype=D)
    w = [torch.randn(d, d, dtype=D) for _ in range(3)]
    scale = {"peaked 3": 3.0, "peaked 10": 10.0}.get(kind, 1.0)
    if kind == "identical tokens":
        x = x[:1].expand(n, d).clone()
    if kind == "zero values":
        w[2] = torch.zeros(d, d, dtype=D)
    if kind == "rank one":
        x, w = torch.ones(n, 1, dtype=D) * x[:1], [torch.outer(z[0], z[1]) for z in w]
    a = r.Attention(
        r.Dot(w[0], w[1], scale=scale), r.Linear(w[2]), support=r.Causal() if kind == "causal" else r.Full()
    )
    dense = jacrev(definition(a))(x).reshape(n * d, n * d)
    exact = torch.linalg.svdvals(dense)
    count = min(5, n * d)
    found = r.linearize(a, x).singular(count, tolerance=1e-9)
    assert torch.allclose(found.value, exact[:count], rtol=1e-7, atol=1e-10)
    assert float(found.value[0]) <= float(exact[0]) * (1 + 1e-12)
    assert torch.isfinite(found.residual).all()
    certificate = r.linearize(a, x).norm_certificate()
    assert float(exact[0]) <= certificate.value <= float(exact[0]) * (1 + 1e-8) + 1e-12


def test_multiple_singular_values():
    """A Krylov space sees each value once; fresh directions find its copies."""
    found = r.linearize(
        lambda x: x @ torch.diag(torch.tensor([3.0, 3.0, 1.0, 0.0], dtype=D)), torch.randn(2, 4, dtype=D)
    ).singular(8)
    assert torch.allclose(found.value, torch.tensor([3.0, 3, 3, 3, 1, 1, 0, 0], dtype=D), atol=1e-10)


def test_batches_are_operators_of_their_own():
    x = torch.randn(3, 6, 4, dtype=D)
    a = r.Attention(r.Gaussian(bandwidth=1.5))
    together = r.linearize(a, x).norm(tolerance=1e-9)
    alone = torch.stack([r.linearize(a, z).norm(tolerance=1e-9).value for z in x])
    assert torch.allclose(together.value, alone, rtol=1e-8)
    assert torch.allclose(r.linearize(a, x, batch=0).norm(tolerance=1e-9).value, alone.max(), rtol=1e-8)
    heads = r.Attention(
        r.Dot(torch.randn(2, 4, 3, dtype=D), torch.randn(2, 4, 3, dtype=D)),
        r.Linear(torch.randn(2, 4, 3, dtype=D)),
    )
    tokens = x.unsqueeze(1)  # a batch of three with two heads each
    dense = [jacrev(definition(heads))(z).reshape(-1, 24) for z in x]
    exact = torch.stack([torch.linalg.matrix_norm(m, 2) for m in dense])
    jacobian = r.linearize(heads, tokens)
    assert jacobian.batch_shape == (3, 1)
    assert torch.allclose(jacobian.norm(tolerance=1e-9).value.squeeze(-1), exact, rtol=1e-8)
    assert torch.allclose(jacobian.dense().squeeze(1), torch.stack(dense), atol=1e-10)
    certificate = jacobian.norm_certificate()
    assert len(certificate.parts) == 3
    assert float(exact.max()) <= certificate.value <= float(exact.max()) * (1 + 1e-8)
    assert jacobian.influence().shape == (3, 2, 6, 6)


def test_context_is_held_fixed():
    x, y = torch.randn(4, 3, dtype=D), torch.randn(6, 3, dtype=D)
    for a in (
        r.Attention(r.Dot()),
        r.Attention(r.Laplace(), r.Linear(torch.randn(3, 2, dtype=D))),
        r.Attention(r.Dot(), normalizer=r.Entmax(1.5)),
    ):
        f = lambda x, a=a: r.apply(a, x, y, engine=r.engines.ReferenceEngine())  # noqa: E731
        dense, jacobian = jacrev(f)(x), r.linearize(a, x, y)
        t = torch.randn_like(x)
        assert torch.allclose(jacobian.mv(t), torch.einsum("meqd,qd->me", dense, t))
        assert torch.allclose(
            jacobian.influence(), torch.linalg.matrix_norm(dense.transpose(1, 2), 2), atol=1e-8
        )
        assert torch.equal(jacobian.block(1, 2), torch.zeros_like(jacobian.block(1, 2)))
        assert torch.allclose(jacobian.block(2, 2), dense[2, :, 2, :])


def test_measures_keep_weights_and_marks():
    points, weights = torch.randn(5, 3, dtype=D), torch.randn(5, dtype=D).log_softmax(-1)
    mu = r.Measure(points, weights, torch.tensor([4, 2, 0, 1, 3]))
    a = r.Attention(r.Dot(), support=r.Causal())
    f = lambda p: r.apply(a, r.Measure(p, weights, mu.marks), engine=r.engines.ReferenceEngine()).points  # noqa: E731
    dense, jacobian = jacrev(f)(points), r.linearize(a, mu)
    t = torch.randn_like(points)
    assert torch.allclose(jacobian.mv(t), torch.einsum("meqd,qd->me", dense, t))
    assert torch.allclose(jacobian.second(t), jvp(lambda p: jvp(f, (p,), (t,))[1], (points,), (t,))[1])
    assert torch.allclose(jacobian.influence(), torch.linalg.matrix_norm(dense.transpose(1, 2), 2), atol=1e-8)


def test_modules_and_functions():
    """A whole block: built once, then only passes through its graph."""

    class Counted(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True, dtype=D)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return self.layer(x)

    module, x = Counted(), torch.randn(1, 5, 8, dtype=D)
    jacobian = r.linearize(module, x)
    dense = torch.autograd.functional.jacobian(module.layer, x).reshape(40, 40)
    calls = module.calls
    t = torch.randn_like(x)
    assert torch.allclose(jacobian.mv(t).flatten(), dense @ t.flatten())
    assert torch.allclose(jacobian.rmv(t).flatten(), dense.T @ t.flatten())
    assert float(jacobian.norm(tolerance=1e-9)) == pytest.approx(
        float(torch.linalg.matrix_norm(dense, 2)), rel=1e-8
    )
    assert module.calls == calls
    assert torch.allclose(jacobian.block(1, 2), dense.reshape(5, 8, 5, 8)[1, :, 2, :])
    assert torch.allclose(
        jacobian.influence(), torch.linalg.matrix_norm(dense.reshape(5, 8, 5, 8).transpose(1, 2), 2)
    )
    assert all(p.grad is None for p in module.parameters())
    vector = r.linearize(lambda z: z.sin(), torch.zeros(3, dtype=D))
    assert torch.allclose(vector.singular(3).value, torch.ones(3, dtype=D))
    constant = r.linearize(lambda z: torch.ones(2, dtype=D), torch.zeros(3, dtype=D))
    assert float(constant.norm()) == 0
    assert torch.equal(constant.mv(torch.ones(3, dtype=D)), torch.zeros(2, dtype=D))


def test_torch_attention_inside_a_module():
    """torch's fused kernel has no forward mode; linearize runs it in the form that has."""
    w = torch.randn(8, 8, dtype=D)
    f = lambda x: torch.nn.functional.scaled_dot_product_attention(x @ w, x, x)  # noqa: E731
    x, t = torch.randn(1, 2, 5, 8, dtype=D), torch.randn(1, 2, 5, 8, dtype=D)
    step = 1e-6
    assert torch.allclose(
        r.linearize(f, x).mv(t), (f(x + step * t) - f(x - step * t)) / (2 * step), atol=1e-7
    )


@pytest.mark.parametrize("norm", [r.TokenMax(), r.TokenSum()], ids=repr)
def test_other_norms(norm):
    """Upper estimates hold for every direction, and a search comes close."""
    w = torch.randn(2, 4, 3, dtype=D)
    for a in (
        r.Attention(r.Dot(), support=r.Causal()),
        r.Attention(r.Dot(w, w), r.Linear(w)),
        r.Attention(r.Laplace()),
    ):
        x = torch.randn(6, 4, dtype=D)
        jacobian = r.linearize(a, x)
        bound = jacobian.norm(norm)
        assert isinstance(bound, r.derive.UpperEstimate)
        best = 0.0
        for _ in range(200):
            t = torch.randn_like(x)
            t = (
                t / torch.linalg.vector_norm(t, dim=-1, keepdim=True)
                if isinstance(norm, r.TokenMax)
                else t * (torch.rand(6, 1) < 0.3)
            )
            moved = jacobian.mv(t)
            moved = moved if moved.ndim == 2 else moved.movedim(0, -2).flatten(-2)
            best = max(best, float(norm.of(moved) / norm.of(t).clamp_min(1e-300)))
        assert best <= float(bound)
    with pytest.raises(r.errors.ArgumentError, match="Frobenius"):
        jacobian.norm(r.Wasserstein(2))


def test_randomized_bound_holds():
    """Hundreds of operators, as many draws: at one in a million each, none may fail.

    Wide, tall, rank one, clustered.
    """
    generator = torch.Generator().manual_seed(1)
    for trial in range(400):
        rows, columns = (int(torch.randint(1, 9, (), generator=generator)) for _ in range(2))
        matrix = torch.randn(rows, columns, generator=generator, dtype=D)
        if trial % 4 == 1:
            matrix = torch.outer(matrix[:, 0], matrix[0])
        if trial % 4 == 2:
            u, s, v = torch.linalg.svd(matrix, full_matrices=False)
            matrix = u @ torch.diag(1 + 1e-3 * s) @ v
        if trial % 4 == 3:
            matrix = matrix * 10.0 ** float(torch.randint(-6, 7, (), generator=generator))
        jacobian = r.linearize(lambda x, m=matrix: m @ x, torch.zeros(columns, dtype=D))
        certificate = jacobian.norm_certificate(1e-6, steps=8, dense=0, generator=generator)
        exact = float(torch.linalg.matrix_norm(matrix, 2))
        assert exact <= certificate.value, trial
        assert certificate.probability == pytest.approx(1 - 1e-6, abs=1e-12)


def test_randomized_bound_is_a_probability_and_tightens():
    """With a large allowed failure and one step the bound does fail sometimes,
    and never more often than it says.
    """
    matrix = torch.diag(torch.tensor([1.0] + [0.0] * 15, dtype=D))
    jacobian = r.linearize(lambda x: matrix @ x, torch.zeros(16, dtype=D))
    generator = torch.Generator().manual_seed(0)
    failures = sum(
        jacobian.norm_certificate(0.5, steps=1, dense=0, generator=generator).value < 1 for _ in range(800)
    )
    assert 0 < failures <= 0.5 * 800 + 4 * 14.2
    values = [
        jacobian.norm_certificate(1e-6, steps=s, dense=0, generator=generator).value for s in (4, 40, 400)
    ]
    assert values[0] > values[1] > values[2]
    assert values[2] < 1.05
    with pytest.raises(r.errors.ArgumentError, match="rounding alone"):
        jacobian.norm_certificate(1e-12, steps=1000, dense=0)
    assert "assumed: the start is drawn once" in str(jacobian.norm_certificate(dense=0))


def test_certificate_of_attention_without_the_matrix():
    """Larger than the dense limit, in float32: the certificate computes in float64."""
    a, x = r.Attention(r.Dot(), support=r.Causal()), torch.randn(64, 40)
    certificate = r.linearize(a, x).norm_certificate(1e-6, steps=60)
    estimate = r.linearize(a, x.double()).norm(tolerance=1e-6)
    assert float(estimate) <= certificate.value <= 1.4 * float(estimate)
    assert certificate.probability == 1 - 1e-6
    with pytest.raises(r.errors.ArgumentError, match="float64"):
        r.linearize(lambda x: 2 * x, torch.randn(2, 4)).norm_certificate()


def test_streamed_products_equal_held_ones():
    """Above the size where weights are held, everything is computed again from the log-sum-exps."""
    x = torch.randn(900, 8, dtype=D)
    t = torch.randn_like(x)
    for a in (
        r.Attention(r.Dot(), support=r.Causal()),
        r.Attention(r.Gaussian(bandwidth=2.0), support=r.Window(50, 3)),
    ):
        streamed = r.linearize(a, x)
        f = definition(a)
        assert torch.allclose(streamed.mv(t), jvp(f, (x,), (t,))[1], atol=1e-10)
        assert torch.allclose(streamed.rmv(t), torch.func.vjp(f, x)[1](t)[0], atol=1e-10)


def test_secular_equation():
    """The largest eigenvalue of a diagonal plus a rank-one matrix, hard cases included."""
    levels = torch.randn(50, 6, dtype=D).square().sort(-1).values
    step = torch.randn(50, 6, dtype=D)
    step[:10, -1] = 0  # nothing along the largest level
    step[10:20, :-1] = 0
    step[20:30] *= 1e-9
    levels[30:40] = 1.0  # all equal
    step[40:45] = 0
    exact = torch.linalg.eigvalsh(torch.diag_embed(levels) + step.unsqueeze(-1) * step.unsqueeze(-2))[:, -1]
    assert torch.allclose(largest_root(levels, step.square()), exact, rtol=1e-12)


def test_bad_input():
    x = torch.randn(4, 3, dtype=D)
    jacobian = r.linearize(r.Attention(r.Dot()), x)
    with pytest.raises(r.errors.ArgumentError, match=r"tangent.*\[2, 3\].*\[4, 3\]"):
        jacobian.mv(x[:2])
    with pytest.raises(r.errors.ArgumentError, match="cotangent"):
        jacobian.rmv(x[:2])
    with pytest.raises(r.errors.ArgumentError, match="there are 4 tokens"):
        jacobian.block(4, 0)
    with pytest.raises(r.errors.ArgumentError, match="between 1 and 12"):
        jacobian.singular(13)
    with pytest.raises(r.errors.ArgumentError, match="failure_probability"):
        jacobian.norm_certificate(2.0)
    with pytest.raises(r.errors.ArgumentError, match=r"map.*is a int"):
        r.linearize(3, x)
    with pytest.raises(r.errors.ArgumentError, match="only attention has a context"):
        r.linearize(torch.sin, x, x)
    with pytest.raises(r.errors.ArgumentError, match="returns a tuple"):
        r.linearize(lambda z: (z, z), x)
    with pytest.raises(r.errors.ArgumentError, match="batch"):
        r.linearize(torch.sin, x, batch=3)
    with pytest.raises(r.errors.ArgumentError, match="batch"):
        r.linearize(lambda z: z.sum(0), x, batch=1)
    with pytest.raises(r.errors.ArgumentError, match="returns a GaussianMeasure"):
        r.linearize(r.Attention(r.Dot(), moment=r.SecondMoment()), x)


def test_empty_rows_and_saturation():
    """Queries that see nothing, logits of ten thousand: finite, and zero where nothing can move."""
    x = torch.randn(4, 3, dtype=D)
    blind = r.linearize(r.Attention(r.Dot(), support=r.Window(0, 0) & r.Padding(torch.tensor(2))), x)
    assert torch.equal(blind.mv(torch.ones_like(x))[2:], torch.zeros(2, 3, dtype=D))
    assert torch.isfinite(blind.influence()).all()
    sharp = r.linearize(r.Attention(r.Dot(scale=1e4)), x)
    assert torch.isfinite(sharp.influence()).all()
    assert torch.isfinite(sharp.second(torch.ones_like(x))).all()
    assert all(torch.isfinite(z).all() for z in (sharp.norm().value, sharp.mv(x), sharp.rmv(x)))
    single = r.linearize(r.Attention(r.Dot()), x[:1])
    assert torch.allclose(single.dense(), torch.eye(3, dtype=D))


def test_reproducible():
    x = torch.randn(6, 4)
    first, second = (
        r.linearize(r.Attention(r.Dot()), x).norm(generator=torch.Generator().manual_seed(3))
        for _ in range(2)
    )
    assert torch.equal(first.value, second.value)
    assert str(first).startswith("≥ ")
    for a, b in itertools.pairwise([repr(first), repr(second)]):
        assert a == b
