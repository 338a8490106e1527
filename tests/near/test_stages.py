"""Maps at a value for tokens that move about it, and the Taylor model through several of them,
by their formulas.
"""

import math

import mpmath
import pytest
import torch

import regard as r
from regard._upper import UNIT, Upper, exact, relative_error
from regard.maps import (
    Added,
    Affine,
    Compose,
    Gelu,
    Normalize,
    Pointwise,
    Relu,
    Residual,
    Silu,
    Tanh,
    ToContext,
)
from regard.norms import Frobenius, TokenMax, TokenSum
from regard.proofs.near import taylor
from regard.proofs.near.context_head import ContextHead
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.linear import LinearMove, column_reach
from regard.proofs.near.moves import row_moves
from regard.proofs.near.stages import (
    FeedForward,
    _sharpest,
    _weighted_norm,
    curvature_of,
    group_feed_forward,
    stage,
)
from regard.proofs.near.steepness import derivative_change
from regard.proofs.near.taylor import Column, State, fresh, norm_of_rows, slopes, start, step, total_reach
from regard.proofs.subject import subject_of
from regard.proofs.theorem import Refusal
from tests.near.sequence import D, is_close, two, twos
from tests.theorems.exact import generator, normal

G = generator(41)
X = normal(G, 3, 4)
MOVES = torch.tensor([0.02, 0.3, 0.0], dtype=D)
TANGENTS = torch.tensor([1.0, 0.5, 2.0], dtype=D)


def largest(function, start_at):
    """The largest |f| of one number near a place, to thirty digits."""
    with mpmath.workdps(30):
        at = mpmath.findroot(lambda x: mpmath.diff(function, x), start_at)
        return abs(function(at))


FUNCTIONS = {
    "gelu": (Gelu(), lambda x: x * mpmath.ncdf(x), 0.0, 0.8),
    "tanh gelu": (
        Gelu(tanh=True),
        lambda x: x / 2 * (1 + mpmath.tanh(mpmath.sqrt(2 / mpmath.pi) * (x + mpmath.mpf("0.044715") * x**3))),
        0.0,
        0.8,
    ),
    "silu": (Silu(), lambda x: x / (1 + mpmath.exp(-x)), 0.0, 1.1),
    "steep silu": (Silu(2.0), lambda x: x / (1 + mpmath.exp(-2 * x)), 0.0, 0.55),
    "tanh": (Tanh(), mpmath.tanh, 0.66, 0.0),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_curvatures_of_activations_are_attained(name):
    """sup |φ''| and sup |φ'''| to five digits."""
    activation, function, second_at, third_at = FUNCTIONS[name]
    second = largest(lambda x: mpmath.diff(function, x, 2), second_at)
    third = largest(lambda x: mpmath.diff(function, x, 3), third_at)
    found = curvature_of(activation)
    assert second <= found[0] <= second * (1 + 2e-4)
    assert third <= found[1] <= third * (1 + 2e-4)


def test_an_activation_with_a_corner_has_no_curvature():
    assert curvature_of(Relu()) == (math.inf, math.inf)


def holds(map, found, moves=MOVES, x=X, factor=None):
    """Moves and derivatives of moved tokens stay below the remainder, the cap and the change;
    within a factor of it.
    """
    g, here = generator(1), map(x)
    seen = [torch.zeros(len(x), dtype=D) for _ in range(3)]
    for _ in range(40):
        d, e = (size.unsqueeze(-1) * unit(normal(g, *x.shape)) for size in (moves, TANGENTS[: len(x)]))
        linear = torch.func.jvp(map, (x,), (d,))[1]
        moved = map(x + d) - here
        turned = torch.func.jvp(map, (x + d,), (e,))[1] - torch.func.jvp(map, (x,), (e,))[1]
        for at, part in enumerate((moved - linear, moved, turned)):
            seen[at] = torch.maximum(seen[at], part.norm(dim=-1))
    bounds = (found.remainder, found.cap, found.change(exact(TANGENTS[: len(x)])))
    for part, bound in zip(seen, bounds, strict=True):
        assert bool((part <= bound.bound + 1e-12).all())
        if factor is not None:
            assert bool((bound.bound <= factor * part + 1e-9).all())
    tangent = normal(g, *x.shape)
    pushed = found.push(tangent[:, None, :, None].expand(len(x), 1, -1, 1))[:, 0, :, 0]
    assert torch.allclose(pushed, torch.func.jvp(map, (x,), (tangent,))[1], atol=1e-9)
    assert torch.allclose(found.value, here, atol=1e-12)


def unit(vectors):
    return (1 - 1e-12) * vectors / vectors.norm(dim=-1, keepdim=True)


def test_affine_stages():
    w, b = normal(G, 4, 3), normal(G, 3)
    found = stage.one(Affine(w, b), X, MOVES)
    is_close(found.remainder, torch.zeros(3, dtype=D))
    is_close(found.change(exact(TANGENTS)), torch.zeros(3, dtype=D))
    is_close(found.cap, two(w) * MOVES)
    holds(Affine(w, b), found)


@pytest.mark.parametrize("centered", [True, False])
@pytest.mark.parametrize(
    "weight", [None, torch.tensor([0.5, -2.0, 1.0, 1.0], dtype=D)], ids=["plain", "weights"]
)
def test_norm_stages(centered, weight):
    """max|γ| ρ²/√d (1/(s m) + s/m³) and 4 max|γ| ρτ/(√d m²), m = s - ρ/√d."""
    layer = Normalize(0.05, weight, centered=centered)
    found = stage.one(layer, X, MOVES)
    away = X - X.mean(-1, keepdim=True) if centered else X
    s = (away.square().mean(-1) + 0.05).sqrt()
    m, top = s - MOVES / 2, 1.0 if weight is None else 2.0
    is_close(found.remainder, top * MOVES.square() / 2 * (1 / (s * m) + s / m**3), rel=1e-8, abs=1e-11)
    is_close(
        found.change(exact(TANGENTS)), 4 * top * MOVES * TANGENTS / (2 * m.square()), rel=1e-8, abs=1e-10
    )
    holds(layer, found)


def test_a_norm_stage_where_tokens_may_become_constant():
    found = stage.one(Normalize(0.01), X, torch.full((3,), 50.0, dtype=D))
    assert bool(torch.isinf(found.remainder.bound).all())
    assert bool(torch.isinf(found.change(exact(TANGENTS)).bound).all())
    assert bool(torch.isfinite(found.cap.bound).all())


def test_roundings_of_a_norm_stage():
    """64 γ(d + 8)(1 + |x|/s) of its digits, times max|γ| (ρ/m + √d) in the value and max|γ|/m in the
    derivative.
    """
    far = X + 1e4
    found = stage.one(
        Normalize(0.05, torch.tensor([0.5, -2.0, 1.0, 1.0], dtype=D)), far, torch.zeros(3, dtype=D)
    )
    away = far - far.mean(-1, keepdim=True)
    s = (away.square().mean(-1) + 0.05).sqrt()
    blur = 64 * float(relative_error(12)) * (1 + far.norm(dim=-1) / s)
    assert torch.allclose(found.remainder.bound, 2 * blur * 2, rtol=1e-3, atol=0)
    assert torch.allclose(found.change(exact(torch.ones(3, dtype=D))).bound, 2 * blur / s, rtol=1e-3, atol=0)
    with pytest.raises(Refusal, match="no digits left"):
        stage.one(Normalize(1e-12), X * 0 + 1e8 + 1e-3 * X, MOVES)
    stage.one(Normalize(1e-12), X * 0 + 1e6 + X, MOVES)


@pytest.mark.parametrize("activation", [Gelu(), Silu(2.0), Tanh()], ids=repr)
def test_pointwise_stages(activation):
    """sup|φ''| ρ²/2 and min(sup|φ''| ρ, 2 sup|φ'|) τ."""
    found = stage.one(Pointwise(activation), X, MOVES)
    bend = curvature_of(activation)[0]
    is_close(found.remainder, bend * MOVES.square() / 2)
    is_close(found.change(exact(TANGENTS)), bend * MOVES * TANGENTS)
    holds(Pointwise(activation), found)
    far = stage.one(Pointwise(activation), X, torch.full((3,), 1e3, dtype=D))
    slope = {Gelu: 1.12891, Silu: 1.09984, Tanh: 1.0}[type(activation)]
    is_close(far.change(exact(TANGENTS)), 2 * slope * TANGENTS)


def feed_forward(activation, seed=2):
    g = generator(seed)
    return FeedForward(Affine(normal(g, 4, 6), normal(g, 6)), activation, Affine(normal(g, 6, 3)))


@pytest.mark.parametrize("activation", [Gelu(), Silu(), Tanh()], ids=repr)
@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_feed_forward_stages(activation, scale):
    """λ_max(w₂ᵀD[(w_k·w_l)²]D w₂)^{1/2} at the value, and the third derivative beside it;
    or sup|φ''| |w₁|²|w₂| anywhere.
    """
    layer, moves = feed_forward(activation), scale * MOVES
    w_1, w_2 = layer.first.w, layer.second.w
    hidden = layer.first(X)
    bend = torch.func.vmap(torch.func.vmap(torch.func.grad(torch.func.grad(lambda h: layer.activation(h)))))(
        hidden
    )
    second, third = curvature_of(activation)
    weighted = bend.unsqueeze(-1) * w_2
    sharp = torch.linalg.eigvalsh(weighted.mT @ (w_1.mT @ w_1).square() @ weighted)[:, -1].clamp_min(0).sqrt()
    columns, rows = w_1.norm(dim=0), w_2.norm(dim=-1)
    steepest = float(columns.max()) * two(w_1 * rows.sqrt()) ** 2
    bent = torch.minimum(
        torch.tensor(second * two(w_1) ** 2 * two(w_2), dtype=D), sharp + moves * third * steepest
    )
    slope = {Gelu: 1.12891, Silu: 1.09984, Tanh: 1.0}[type(activation)]
    most = two(w_1) * slope * two(w_2)
    found = stage.one(layer, X, moves)
    is_close(
        found.remainder,
        moves.square() / 2 * torch.minimum(bent, sharp + moves / 3 * third * steepest),
        rel=1e-7,
    )
    is_close(found.change(exact(TANGENTS)), (bent * moves).clamp(max=2 * most) * TANGENTS, rel=1e-7)
    is_close(found.cap, most * moves)
    holds(Compose((layer.first, Pointwise(activation), layer.second)), found, moves)


@pytest.mark.parametrize("scale", [0.1, 1.0, 20.0])
def test_feed_forward_stages_with_corners(scale):
    """Entries that can cross zero: what goes beyond it, through w₂ as a whole or entry by entry."""
    layer, moves = feed_forward(Relu(), 3), scale * MOVES
    w_1, w_2 = layer.first.w, layer.second.w
    hidden = layer.first(X)
    columns, rows = w_1.norm(dim=0), w_2.norm(dim=-1)
    beyond = (moves.unsqueeze(-1) * columns - hidden.abs()).clamp_min(0)
    found = stage.one(layer, X, moves)
    is_close(
        found.remainder, torch.minimum(two(w_2) * beyond.norm(dim=-1), beyond @ rows), rel=1e-7, abs=1e-10
    )
    crossing = ((columns * rows) * (beyond > 0)).sum(-1)
    most = two(w_1) * two(w_2)
    is_close(found.change(exact(TANGENTS)), crossing.clamp(max=2 * most) * TANGENTS, rel=1e-7)
    is_close(found.cap, most * moves)


def test_feed_forward_layers_are_found_in_compositions():
    a, b, c = Affine(normal(G, 4, 4)), Pointwise(Gelu()), Affine(normal(G, 4, 4))
    found = group_feed_forward((Normalize(), a, b, c, a, b))
    assert [type(part).__name__ for part in found] == ["Normalize", "FeedForward", "Affine", "Pointwise"]
    assert (found[1].first, found[1].second) == (a, c)


# What rounding hides


def gamma(count):
    return float(relative_error(count))


def equal(found, stated, rel=1e-9):
    """The same number, however small."""
    found = found.bound if hasattr(found, "bound") else found
    stated = torch.as_tensor(stated, dtype=D).expand_as(found)
    assert torch.allclose(found, stated, rtol=rel, atol=0), (found, stated)
    assert bool((found >= stated * (1 - 1e-13)).all())


ONE = exact(torch.ones(3, dtype=D))
BIG = torch.tensor([[1e8, -3e8, 2e8, 0.0], [1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 0.0]], dtype=D)


def test_what_affine_stages_lose():
    """γ(d + 4) |w|_F τ of a product, and γ(d + 4) (|w|_F |x| + |b|) of the value."""
    w, b = normal(G, 4, 3), normal(G, 3)
    found = stage.one(Affine(w, b), BIG, MOVES)
    equal(found.lost(exact(TANGENTS)), gamma(4 + 4) * float(w.norm()) * TANGENTS)
    equal(found.blur, gamma(4 + 4) * (float(w.norm()) * BIG.norm(dim=-1) + float(b.norm())))
    equal(stage.one(Affine(w), BIG[:2], MOVES[:2]).blur, gamma(8) * float(w.norm()) * BIG[:2].norm(dim=-1))


def test_what_activations_lose():
    """γ(64) sup|φ'| of a tangent, and of the value."""
    found = stage.one(Pointwise(Gelu()), BIG[:2], MOVES[:2])
    equal(found.lost(ONE[:2]), gamma(64) * 1.12891)
    equal(found.blur, gamma(64) * 1.12891 * BIG[:2].norm(dim=-1))


def test_what_norm_layers_lose_with_exact_means():
    """Tokens M ± 1, whose mean and deviation are exact: s from both sides, and each place where digits go."""
    far, rho = float(2**22), torch.tensor([0.5, 0.0], dtype=D)
    x = far + torch.tensor([[1.0, -1.0, 1.0, -1.0], [1.0, 1.0, -1.0, -1.0]], dtype=D)
    weight = torch.tensor([0.5, -2.0, 1.0, 1.0], dtype=D)
    off, long = gamma(4 + 4) * x.norm(dim=-1), x.norm(dim=-1)
    for eps in (0.0, 0.25):
        layer = Normalize(eps, weight)
        found = stage.one(layer, x, rho)
        low, high = ((2 - off).square() / 4 + eps).sqrt(), ((2 + off).square() / 4 + eps).sqrt()
        least, blur = low - rho / 2, 64 * gamma(4 + 8) * (1 + long / low)
        rounding = 2 * blur * (rho / least + 2)
        over = 1 / (low * least) + high / least**3
        equal(found.remainder, 2 * rho.square() / 2 * over + rounding, rel=1e-12)
        equal(
            found.change(exact(TANGENTS[:2])),
            2 * (4 * rho / (2 * least.square()) + blur / least) * TANGENTS[:2],
            rel=1e-12,
        )
        gains = torch.func.vmap(torch.func.jacrev(layer))(x)
        equal(found.lost(ONE[:2]), gamma(4 + 4) * gains.flatten(1).norm(dim=-1))
        assert found.blur.bound.tolist() == [0.0, 0.0]
    near = stage.one(Normalize(0.25, weight, centered=False), x - far, rho)
    s = math.sqrt(1 + 0.25)
    least, blur = s - rho / 2, 64 * gamma(12) * (1 + 2 / s)
    stated = 2 * rho.square() / 2 * (1 / (s * least) + s / least**3) + 2 * blur * (rho / least + 2)
    equal(near.remainder, stated, rel=1e-12)
    equal(near.remainder[1:], 4 * blur, rel=1e-9)
    tiny, still = torch.tensor([[1e-100, 0.0, 0.0, 0.0]], dtype=D), torch.zeros(1, dtype=D)
    small = stage.one(Normalize(0.0, centered=False), tiny, still)
    equal(small.change(ONE[:1]), 64 * gamma(12) * 3 / 0.5e-100)
    with pytest.raises(Refusal, match="no digits left"):  # a length that may be nothing but lifted squares
        stage.one(Normalize(0.0, centered=False), 1e-60 * tiny, still)


def test_when_a_norm_layer_has_no_digits_left():
    """64 γ(d + 8)(1 + |x|/s) beyond 1e-6 is refused."""
    limit = (1e-6 / (64 * gamma(12)) - 1) / 2  # |x| = 2 M and s = 1
    for far, fine in ((0.99 * limit, True), (1.01 * limit, False)):
        x = round(far) + torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=D)
        if fine:
            stage.one(Normalize(0.0), x, MOVES[:1])
        else:
            with pytest.raises(Refusal, match="no digits left"):
                stage.one(Normalize(0.0), x, MOVES[:1])


@pytest.mark.parametrize("activation", [Gelu(), Relu()], ids=repr)
def test_what_feed_forward_stages_lose(activation):
    """Of hidden entries γ(2d + 4)(|x||w₁| + |b|), entry by entry; then of the value and of the derivative."""
    g = generator(2)
    first, second = Affine(normal(g, 4, 6), normal(g, 6)), Affine(normal(g, 6, 3), normal(g, 3))
    w_1, w_2 = first.w, second.w
    found = stage.one(FeedForward(first, activation, second), BIG, torch.zeros(3, dtype=D))
    hidden = gamma(2 * 4 + 4) * (BIG.abs() @ w_1.abs() + first.b.abs())
    steep, bend = (1.12891, 0.79789) if isinstance(activation, Gelu) else (1.0, 0.0)
    active = activation(first(BIG))
    blur = gamma(6 + 4) * (float(w_2.norm()) * active.norm(dim=-1) + float(second.b.norm()))
    equal(found.blur, blur + two(w_2) * steep * hidden.norm(dim=-1))
    off = float(w_1.norm() * w_2.norm()) * (gamma(4 + 6 + 64) * steep + bend * float(hidden.max()))
    map = Compose((first, Pointwise(activation), second))
    gains = torch.func.vmap(torch.func.jacrev(map))(BIG)
    equal(found.lost(exact(TANGENTS)), (gamma(4 + 4) * gains.flatten(1).norm(dim=-1) + off) * TANGENTS)
    still = stage.one(FeedForward(first, activation, second), BIG[1:2], torch.zeros(1, dtype=D))
    off = float(w_1.norm() * w_2.norm()) * (gamma(4 + 6 + 64) * steep + bend * float(hidden[1].max()))
    gains = gains[1].norm()
    equal(still.lost(exact(torch.ones(1, dtype=D))), gamma(4 + 4) * gains + off)


def test_entries_whose_sign_may_be_a_rounding():
    """An entry of ReLU that is within 2 γ of zero may be on either side, without any move."""
    g = generator(3)
    w_1, w_2 = normal(g, 4, 6), normal(g, 6, 3)
    layer = FeedForward(Affine(w_1, -(X[1] @ w_1)), Relu(), Affine(w_2))
    found = stage.one(layer, X, torch.zeros(3, dtype=D))
    hidden = gamma(12) * (X[1].abs() @ w_1.abs() + layer.first.b.abs())
    rows = w_2.norm(dim=-1)
    stated = min(two(w_2) * 2 * float(hidden.norm()), float(2 * hidden @ rows))
    assert float(found.remainder.bound[1]) == pytest.approx(stated, rel=1e-9, abs=0)
    crossing = float((w_1.norm(dim=0) * rows).sum())
    assert float(found.change(ONE).bound[1]) == pytest.approx(
        min(crossing, 2 * two(w_1) * two(w_2)), rel=1e-9
    )
    assert found.change(ONE).bound[0] <= 1e-280


def test_curvatures_that_cancel_keep_their_roundings():
    """Two equal hidden entries with opposite outputs: √γ of the terms is left; and the bend of entries that
    are uncertain themselves, far out.
    """
    w_1, w_2 = (
        torch.tensor([[3.0, 3.0], [4.0, 4.0]], dtype=D),
        torch.tensor([[2.0, 1.0], [-2.0, -1.0]], dtype=D),
    )
    bend, columns, rows = torch.full((1, 2), 0.5, dtype=D), exact(w_1.norm(dim=0)), exact(w_2.norm(dim=-1))
    found = _sharpest(w_1, w_2, bend, columns, rows)
    whole = 2 * 0.5 * 25 * math.sqrt(5)
    equal(found, math.sqrt(gamma(4 * 2 + 2 * 2 + 64)) * whole, rel=1e-6)
    layer, moves = feed_forward(Gelu()), torch.full((1,), 1e-13, dtype=D)
    w_1, w_2 = layer.first.w, layer.second.w
    hidden = gamma(12) * (BIG[:1].abs() @ w_1.abs() + layer.first.b.abs())
    uncertain = 0.77877 * (hidden * w_1.norm(dim=0).square() * w_2.norm(dim=-1)).sum(-1)
    far = stage.one(layer, BIG[:1], moves)
    equal(far.remainder, moves.square() / 2 * uncertain, rel=1e-5)
    equal(far.change(ONE[:1]), moves * uncertain, rel=1e-5)
    scaled = w_1 * w_2.norm(dim=-1).sqrt()
    norm = _weighted_norm(w_1, Upper(w_2.norm(dim=-1), 50))
    assert float(norm.value) == pytest.approx(two(scaled) ** 2, rel=1e-12)
    counted = _weighted_norm(w_1, exact(w_2.norm(dim=-1))).roundings
    assert norm.roundings == counted + 50
    assert counted >= 4 + 9


def test_what_attention_stages_lose():
    """Twice the errors of blocks for a tangent, and 4 |V| times the error of means for the value."""
    g = generator(12)
    map = r.Attention(r.Dot(normal(g, 4, 2), normal(g, 4, 2)), r.Linear(normal(g, 4, 3)))
    found = stage.one(map, X, MOVES)
    heads = LocalHeads(subject_of(map), r.Neighborhood(X, 0.0))
    equal(found.lost(exact(TANGENTS)), 2 * heads.jacobian_error(TANGENTS).bound)
    values = heads.separate[0]
    equal(found.blur, 4 * float(values.w) * float(values.local.means.error))
    moved = row_moves(heads, LinearMove(heads), MOVES)
    equal(found.remainder, moved.remainder.bound)
    equal(found.cap, moved.best.bound)
    equal(found.change(exact(TANGENTS)), derivative_change(heads, moved.scores, exact(TANGENTS)).bound)
    holds(map, found)


def test_what_contexts_lose():
    """Errors of scores, of their form and biases, of weights and of V, for tokens far out."""
    g = generator(6)
    keys, w_q, w_k, b_q = normal(g, 5, 4), normal(g, 4, 2), normal(g, 4, 2), normal(g, 2)
    w = normal(g, 4, 3), normal(g, 3, 2)
    potential, x = r.Dot(w_q, w_k, scale=0.5, b_q=b_q), 1e3 * X
    map = ToContext(r.Attention(potential + r.Alibi(1e4), r.Factored(*w)), keys)
    head = ContextHead(map, x)
    centers = (torch.zeros(4, dtype=D), keys.mean(0), (keys.amax(0) + keys.amin(0)) / 2)
    center = min(centers, key=lambda c: float((keys - c).norm(dim=-1).max()))
    longest = float((keys - center).norm(dim=-1).max())
    a, beta = 0.5 * w_q @ w_k.mT, 0.5 * w_k @ b_q
    form = head.head.form(4)
    far = float(x.norm(dim=-1).max())
    scores = (far * two(a) + float(beta.norm())) * longest
    more = (float(form.error) * far + float(form.error_beta)) * longest
    places = torch.arange(3, dtype=D).unsqueeze(-1), torch.arange(5, dtype=D)
    biased = (x @ a + beta) @ (keys - center).mT - 1e4 * (places[0] - places[1]).abs()
    eta = 8 * gamma(4 * 4 + 16) * 2 * scores + more + 16 * UNIT * float(biased.abs().max())
    error = 16 * (4 * eta + gamma(4 * (5 + 4) + 64)) * 2
    error += gamma(3 + 2) * float(w[0].norm() * w[1].norm()) / two(w[0] @ w[1])
    assert float(head.error) == pytest.approx(error, rel=1e-6, abs=0)
    near = ContextHead(map, 0 * X)
    small = 8 * gamma(32) * 2 * float(beta.norm()) * longest + float(form.error_beta) * longest
    biased = beta @ (keys - center).mT - 1e4 * (places[0] - places[1]).abs()
    small += 16 * UNIT * float(biased.abs().max())
    error = 16 * (4 * small + gamma(100)) * 2
    error += gamma(5) * float(w[0].norm() * w[1].norm()) / two(w[0] @ w[1])
    assert float(near.error) == pytest.approx(error, rel=1e-6, abs=0)
    found = stage.one(map, x, MOVES)
    spread, kappa = two(w[0] @ w[1]) * longest, two(a) * longest
    lost = float(head.error) * spread
    equal(found.remainder, spread * kappa**2 * MOVES.square() + lost * (1 + kappa * MOVES), rel=1e-9)
    equal(found.change(exact(TANGENTS)), (2 * spread * kappa**2 * MOVES + lost * kappa) * TANGENTS, rel=1e-9)
    plain = ToContext(r.Attention(potential, r.Factored(*w)), keys)
    gains = torch.stack([torch.func.jacrev(plain)(X)[i, :, i].flatten() for i in range(3)])
    equal(stage.one(plain, X, MOVES).lost(exact(TANGENTS)), gamma(4 + 4) * gains.norm(dim=-1) * TANGENTS)
    assert found.blur.bound.tolist() == [0.0] * 3
    limit = 1e-3 / (8 * gamma(32) * 2 * two(a) * longest)
    for factor, fine in ((0.95, True), (1.02, False)):
        at = torch.zeros(3, 4, dtype=D)
        at[:, 0] = factor * limit
        if fine:
            ContextHead(ToContext(r.Attention(r.Dot(w_q, w_k, scale=0.5)), keys), at)
        else:
            with pytest.raises(Refusal, match="no digits"):
                ContextHead(ToContext(r.Attention(r.Dot(w_q, w_k, scale=0.5)), keys), at)


# Through several maps


def test_columns():
    """Σ_j |B_ij|_F ρ_j, and the reach of (N18) with the rounding that is assumed."""
    g = generator(8)
    column = Column(normal(g, 3, 2, 4, 4), exact(torch.tensor([0.5, 2.0], dtype=D)))
    sizes = (column.blocks.square().sum((-2, -1)).sqrt() * torch.tensor([0.5, 2.0], dtype=D)).sum(-1)
    is_close(column.size(), sizes)
    stated = column_reach(column.blocks, column.radii).bound * (1 + 1e-11)
    assert torch.allclose(column.reach().bound, stated, rtol=1e-13)
    still = Column(column.blocks, exact(torch.zeros(2, dtype=D)))
    assert still.reach().bound.tolist() == [0.0] * 3
    some = Column(column.blocks, exact(torch.tensor([0.0, 2.0], dtype=D)))
    is_close(some.reach(), 2 * twos(column.blocks[:, 1]) * (1 + 1e-11))
    endless = Column(column.blocks, exact(torch.tensor([math.inf, 1.0], dtype=D)))
    assert endless.reach().bound.tolist() == endless.size().bound.tolist() == [math.inf] * 3
    assert torch.equal(column.plus(some).blocks, 2 * column.blocks)


def test_the_start_of_a_state():
    state = start(X, MOVES)
    assert state.columns[0].blocks.shape == (3, 2, 4, 4)
    is_close(state.moves(), MOVES, rel=1e-8)
    is_close(state.deviation(TokenMax()), 0.3, rel=1e-8)
    is_close(state.deviation(Frobenius()), math.hypot(0.3, 0.02), rel=1e-8)
    is_close(state.deviation(TokenSum()), 0.32, rel=1e-8)
    is_close(state.remainder(), torch.zeros(3, dtype=D))
    eye = fresh(2, 3, exact(torch.ones(2, dtype=D)))
    assert torch.equal(eye.blocks[0, 0], torch.eye(3, dtype=D))
    assert torch.equal(eye.blocks[0, 1], torch.zeros(3, 3, dtype=D))
    lengths = exact(torch.tensor([3.0, 4.0], dtype=D))
    assert [
        float(norm_of_rows(norm, lengths)) for norm in (Frobenius(), TokenSum(), TokenMax())
    ] == pytest.approx([5.0, 7.0, 4.0])


def test_one_token_is_measured_for_all_rows_together():
    """In Frobenius norm the column of one token has one norm,
    less than the root of squares of its rows' reaches.
    """
    g = generator(9)
    blocks = normal(g, 3, 1, 4, 4)
    state = State(
        X, (Column(blocks, exact(torch.tensor([0.5], dtype=D))),), exact(torch.full((3,), math.inf, dtype=D))
    )
    is_close(state.deviation(Frobenius()), 0.5 * two(blocks[:, 0].flatten(0, 1)), rel=1e-8)
    is_close(state.deviation(TokenMax()), 0.5 * float(twos(blocks[:, 0]).max()), rel=1e-8)


def test_a_step_adds_a_column_for_its_remainder():
    """The derivative goes on, and the remainder of the map, or what its cap leaves of it,
    starts a column of its own.
    """
    layer = Pointwise(Gelu())
    before = start(X, MOVES)
    after = step(layer, before)
    assert len(after.columns) == 2
    slope = torch.func.vmap(torch.func.vmap(torch.func.grad(lambda h: Gelu()(h))))(X)
    assert torch.allclose(after.columns[0].blocks[0, 0].diagonal(), slope[0])
    rounding = 1e-11 * Gelu()(X).norm(dim=-1)
    is_close(after.columns[1].radii, 0.79789 * MOVES.square() / 2 + rounding, rel=1e-8)
    is_close(after.cap, 1.12891 * MOVES + rounding, rel=1e-8)
    is_close(after.remainder(), 0.79789 * MOVES.square() / 2 + rounding, rel=1e-8)
    far = step(layer, start(X, torch.full((3,), 1e3, dtype=D)))
    reach = total_reach(far.columns[:1]).bound
    is_close(far.columns[1].radii, 1128.91 + reach + rounding, rel=1e-8)
    is_close(far.moves(), torch.full((3,), 1128.91, dtype=D) + rounding, rel=1e-8)


def test_residuals_and_sums_add_columns_of_one_origin():
    """x + wᵀx has the derivative I + wᵀ, with its directions; caps add,
    and roundings of sums are a column.
    """
    w = -0.5 * torch.eye(4, dtype=D)
    after = step(Residual(Affine(w)), start(X, MOVES))
    assert torch.allclose(after.columns[0].blocks[0, 0], 0.5 * torch.eye(4, dtype=D))
    is_close(after.moves(), 0.5 * MOVES, rel=1e-6, abs=1e-9)
    is_close(after.cap, 1.5 * MOVES, rel=1e-8, abs=1e-9)
    sizes = 2 * MOVES * 1.5 + 1e-11 * 2 * 0.5 * X.norm(dim=-1)
    assert torch.allclose(after.columns[-1].radii.bound, 1e-11 * sizes, rtol=1e-3, atol=0)
    added = step(Added((Affine(w), Affine(2 * torch.eye(4, dtype=D)))), start(X, MOVES))
    is_close(added.moves(), 1.5 * MOVES, rel=1e-6, abs=1e-9)
    is_close(added.cap, 2.5 * MOVES, rel=1e-8, abs=1e-9)


def test_tangents_go_the_same_way():
    """Through the derivative at the center, and what the derivative may change."""
    layer = Pointwise(Gelu())
    found = slopes(layer, start(X, MOVES))
    assert len(found) == 2
    change = 0.79789 * MOVES * (1 + 1e-11) + 1e-11
    assert torch.allclose(found[1].radii.bound, change, rtol=1e-8)
    both = slopes(Residual(layer), start(X, MOVES))
    assert torch.allclose(both[0].blocks[0, 0].diagonal(), 1 + found[0].blocks[0, 0].diagonal())


def test_many_numbers_are_merged(monkeypatch):
    """Old remainders become one column, of the sum of their reaches."""
    state = start(X, MOVES)
    for _ in range(3):
        state = step(Pointwise(Tanh()), state)
    assert len(state.columns) == 4
    monkeypatch.setattr(taylor, "NUMBERS", 10)
    merged = taylor._merge(state.columns)
    assert len(merged) == 2
    is_close(merged[1].radii, total_reach(state.columns[1:]).bound)
    monkeypatch.setattr(taylor, "NUMBERS", sum(column.blocks.numel() for column in state.columns))
    assert len(taylor._merge(state.columns)) == 4
    monkeypatch.setattr(taylor, "NUMBERS", 10)
    assert len(taylor._merge(state.columns[:2])) == 2


def test_a_block_stays_below_its_model():
    g = generator(10)
    w = [normal(g, 4, 4, scale=0.5) for _ in range(5)]
    block = Compose(
        (
            Residual(Compose((Normalize(0.1), r.Attention(r.Dot(w[0], w[1]), r.Linear(w[2]))))),
            Residual(Compose((Normalize(0.1), Affine(w[3]), Pointwise(Gelu()), Affine(w[4])))),
        )
    )
    for size in (0.01, 0.1):
        moves = size * torch.tensor([1.0, 0.0, 0.5], dtype=D)
        state = step(block, start(X, moves))
        here, bound, seen = block(X), state.moves().bound, torch.zeros(3, dtype=D)
        assert torch.allclose(state.value, here, atol=1e-12)
        for _ in range(60):
            d = moves.unsqueeze(-1) * unit(normal(g, 3, 4))
            seen = torch.maximum(seen, (block(X + d) - here).norm(dim=-1))
        assert bool((seen <= bound).all())
        if size == 0.01:
            assert bool((bound <= 2.5 * seen).all())


def test_context_stages():
    """wRκ ρ and 2wR for the move, wRκ² ρ² beyond the linear part, 2wRκ² ρτ for the derivative; κ = |A|R."""
    g = generator(6)
    keys, a, w = normal(g, 5, 4), normal(g, 4, 4, scale=0.5), normal(g, 4, 3)
    map = ToContext(r.Attention(r.Bilinear(a), r.Linear(w)), keys)
    radius = min(
        float((keys - c).norm(dim=-1).max()) for c in (0, keys.mean(0), (keys.amax(0) + keys.amin(0)) / 2)
    )
    spread, kappa = two(w) * radius, two(a) * radius
    found = stage.one(map, X, MOVES)
    is_close(found.cap, (spread * kappa * MOVES).clamp(max=2 * spread))
    is_close(found.remainder, spread * kappa**2 * MOVES.square(), rel=1e-6, abs=1e-9)
    is_close(found.change(exact(TANGENTS)), 2 * spread * kappa**2 * MOVES * TANGENTS, rel=1e-6, abs=1e-7)
    holds(map, found)
    far = stage.one(map, X, torch.full((3,), 1e3, dtype=D))
    is_close(far.cap, torch.full((3,), 2 * spread, dtype=D))
    head = ContextHead(map, X)
    centers = (torch.zeros(4, dtype=D), keys.mean(0), (keys.amax(0) + keys.amin(0)) / 2)
    away = keys - min(centers, key=lambda c: float((keys - c).norm(dim=-1).max()))
    scores = float(X.norm(dim=-1).max()) * two(a) * float(away.norm(dim=-1).max())
    eta = 8 * float(relative_error(4 * 4 + 16)) * 2 * scores
    error = 16 * (4 * eta + float(relative_error(4 * (5 + 4) + 64))) * 2
    assert error < float(head.error) <= 1.02 * error  # and what the form and the biases of the scores lose
    error = float(head.error)
    still = stage.one(map, X, torch.zeros(3, dtype=D))
    assert torch.allclose(still.remainder.bound, torch.full((3,), error * spread, dtype=D), rtol=1e-5, atol=0)
    assert torch.allclose(
        still.change(exact(torch.ones(3, dtype=D))).bound,
        torch.full((3,), error * spread * kappa, dtype=D),
        rtol=1e-5,
        atol=0,
    )


def test_contexts_with_positions_weights_and_masks():
    g = generator(7)
    keys = r.Measure(normal(g, 3, 4), normal(g, 3))
    map = ToContext(r.Attention(r.Dot(scale=0.3) + r.Alibi(0.5), support=r.Causal()), keys)
    found = stage.one(map, X, MOVES)
    assert torch.allclose(found.value, map(X), atol=1e-12)
    holds(map, found)
    with pytest.raises(Refusal, match="no digits"):
        stage.one(ToContext(r.Attention(r.Dot(scale=1e11)), normal(g, 3, 4)), X, MOVES)
