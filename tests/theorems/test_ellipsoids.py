"""Parts of moves that are added with their directions,
and the exact second derivative of the row of a token that moves.
"""

import torch

import regard as r
from regard._enclosed import Vectors, half_diameters
from regard._upper import Upper, exact
from regard.proofs.near.ellipsoids import Ellipsoid, enclose, length_of_sum
from regard.proofs.near.frobenius import FrobeniusScores
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.linear import LinearMove
from regard.proofs.near.moves import row_moves
from regard.proofs.near.own_row import OwnRow
from regard.proofs.near.radii import TokenRadii
from regard.proofs.near.saturation import _head_by_head, _pair_by_pair
from regard.proofs.subject import subject_of
from tests.theorems.exact import D, generator, normal


def local(g, heads=2, n=4, d=4, residual=False):
    w_q, w_k, w_v = (normal(g, heads, d, 2) for _ in range(3))
    map = r.maps.Heads(r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), normal(g, heads, 2, d))
    x = normal(g, n, d)
    return map, x, LocalHeads(subject_of(map, residual), r.Neighborhood(x, 1.0))


def ellipsoid(root, size, frame=None):
    none = exact(torch.zeros_like(size))
    return Ellipsoid(
        exact(size),
        root @ root.mT / torch.linalg.matrix_norm(root, 2).square()[:, None, None],
        none,
        none,
        frame,
    )


def shape(part):
    return part.core if part.frame is None else part.frame.mT @ part.core @ part.frame


def test_a_sum_of_parts_stays_below_and_is_at_most_the_sum_of_sizes():
    """Parts of all directions, of one row for all, and of a few directions that some of them share."""
    g = generator(0)
    frames = [torch.linalg.qr(normal(g, 4, rank))[0].mT for rank in (2, 3)]
    kinds = [(4, 5, None), (4, 1, None), (2, 5, frames[0]), (2, 1, frames[0]), (3, 5, frames[1])]
    roots = [normal(g, rows, wide, wide) * torch.logspace(0, -2, wide, dtype=D) for wide, rows, _ in kinds]
    for chosen in ((0, 1, 2, 3, 4), (2, 3, 4), (0, 1), (3,)):
        parts = [ellipsoid(roots[kind], normal(g, 5).abs(), kinds[kind][2]) for kind in chosen]
        enclosing = enclose(parts)
        found, spread = enclosing.length.bound, enclosing.matrices
        for _ in range(200):
            e = normal(g, 5, 4)
            e = e / e.norm(dim=-1, keepdim=True)
            squares = [
                torch.einsum("ia,iab,ib->i", e, shape(part).expand(5, 4, 4), e).clamp_min(0) for part in parts
            ]
            support = sum(
                part.size.value * square.sqrt() for part, square in zip(parts, squares, strict=True)
            )
            assert bool((support <= found).all())
            assert bool(
                (support.square() <= torch.einsum("ia,iab,ib->i", e, spread, e) * (1 + 1e-9) + 1e-18).all()
            )
        assert bool((found <= 1.01 * sum(part.size.value for part in parts)).all())


def test_parts_in_orthogonal_directions_add_as_squares():
    one, other = torch.zeros(1, 2, 2, dtype=D), torch.zeros(1, 2, 2, dtype=D)
    one[0, 0, 0] = other[0, 1, 1] = 1.0
    size, none = exact(torch.ones(1, dtype=D)), exact(torch.zeros(1, dtype=D))
    assert (
        2**0.5
        <= float(length_of_sum([Ellipsoid(size, one, none, none), Ellipsoid(size, other, none, none)]))
        <= 1.415
    )


def test_a_part_without_a_bound_has_none():
    size, none = Upper(torch.tensor([torch.inf, 1.0], dtype=D)), exact(torch.zeros(2, dtype=D))
    found = length_of_sum([Ellipsoid(size, torch.eye(2, dtype=D).unsqueeze(0), none, none)]).bound
    assert bool(torch.isinf(found[0]))
    assert 1 <= float(found[1]) < 1.001


def test_no_law_deviates_more_than_half_the_diameter():
    g = generator(1)
    points, seen = normal(g, 1, 6, 3), torch.ones(2, 6, dtype=torch.bool)
    seen[1, 3:] = False
    half = half_diameters(Vectors(points, exact(0.0)), seen).bound
    for row in range(2):
        for _ in range(100):
            law = torch.distributions.Dirichlet(torch.full((int(seen[row].sum()),), 0.2, dtype=D)).sample()
            away = points[0, seen[row]] - law @ points[0, seen[row]]
            assert float(torch.linalg.matrix_norm(law.sqrt().unsqueeze(-1) * away, 2)) <= float(half[row])
    pair = torch.zeros(6, dtype=torch.bool)
    pair[:2] = True
    found = half_diameters(Vectors(points, exact(0.0)), pair.unsqueeze(0)).bound
    assert torch.allclose(found, (points[0, 0] - points[0, 1]).norm() / 2)


def test_variances_of_every_law_of_the_box():
    g = generator(2)
    map, x, heads = local(g, n=5)
    for radius in (0.05, 0.5, 5.0):
        scores = FrobeniusScores(heads.heads[0], radius)
        for _ in range(40):
            step = normal(g, *x.shape)
            y = x + radius * (1 - 1e-9) * step / step.norm()
            s = map.attention.potential.scores(y, y, torch.arange(5), torch.arange(5))[0]
            p = s.softmax(-1)
            spread = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
            assert float(torch.linalg.eigvalsh(torch.diag_embed(scores.split.bound) - spread).min()) >= -1e-12
            assert bool((torch.linalg.eigvalsh(spread)[:, -1].sqrt() <= scores.apart.bound + 1e-9).all())


def test_the_second_derivative_of_the_row_of_a_token():
    g = generator(3)
    map, x, heads = local(g)
    delta = normal(g, 4)
    step = torch.zeros_like(x)
    step[1] = delta
    h = 1e-4
    seen = (map(x + h * step) + map(x - h * step) - 2 * map(x))[1] / (2 * h * h)
    assert torch.allclose(torch.einsum("cab,a,b->c", OwnRow(heads, 1).form, delta, delta), seen, atol=1e-5)


def test_the_row_of_a_token_stays_below_its_remainder():
    g = generator(4)
    map, x, heads = local(g)
    for radius in (1e-3, 0.1, 1.0):
        bound = float(OwnRow(heads, 1).remainder(radius))
        for _ in range(60):
            step = torch.zeros_like(x)
            step[1] = normal(g, 4)
            step = radius * step / step.norm()
            linear = torch.func.jvp(map, (x,), (step,))[1]
            assert float((map(x + step) - map(x) - linear)[1].norm()) <= bound + 1e-14


def test_heads_together_move_less_than_heads_apart():
    g = generator(5)
    map, x, heads = local(g, heads=3)
    moves = torch.full((4,), 3.0, dtype=D)
    scores = [TokenRadii(one, moves) for one in heads.heads]
    assert bool((_pair_by_pair(heads, scores).bound < _head_by_head(heads, scores).bound).all())
    best = row_moves(heads, LinearMove(heads), moves).best.bound
    for _ in range(300):
        step = normal(g, 4, 4)
        moved = (map(x + 3.0 * step / step.norm(dim=-1, keepdim=True)) - map(x)).norm(dim=-1)
        assert bool((moved <= best).all())
