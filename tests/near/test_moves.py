"""How far rows move: the linear part, what is beyond it, and saturation; each by its equation,
and above moves of tokens.
"""

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

import regard as r
from regard._enclosed import Matrix, Vectors, exact_matrix
from regard._upper import UNIT, Upper, exact, relative_error
from regard.proofs.near import saturation as saturation_file
from regard.proofs.near.ellipsoids import (
    Covariances,
    Ellipsoid,
    HeadShape,
    ball,
    enclose,
    length_of_sum,
    normalize,
    sharpen,
    sum_to_less_than_one,
)
from regard.proofs.near.heads import LocalHeads
from regard.proofs.near.linear import LinearMove, _power_of_two, column_reach, shares
from regard.proofs.near.moves import (
    _bends,
    _curvature,
    _drift_deviation,
    _quadratic,
    _second_moment,
    _series,
    _third_cumulant,
    cubic_part,
    row_moves,
)
from regard.proofs.near.radii import TokenRadii
from regard.proofs.near.saturation import (
    _along_path,
    _pair_by_pair,
    _proved_inverse,
    _quadratic_form,
    longest_move,
    row_saturation,
    saturation,
)
from regard.proofs.near.steepness import _change, _drifts, _slope_spread, _whole, row_constants
from regard.proofs.subject import subject_of
from tests.near.sequence import CASES, LOOSE, D, is_close, loosen, plain, two, twos
from tests.theorems.exact import generator, normal

RADII = torch.tensor([0.3, 0.0, 0.2, 0.15, 0.05], dtype=D)


def phi(x, order):
    found = torch.expm1(x) - x
    return found if order == 2 else found - x.square() / 2


def numbers(name, size=1.0):
    s = plain(**CASES[name])
    rho = size * RADII[: s.n]
    return s, rho, TokenRadii(s.local, rho)


# Beyond the linear part


@pytest.mark.parametrize("size", [1.0, 8.0])
@pytest.mark.parametrize("name", CASES)
def test_parts_of_the_remainder(name, size):
    """(N13) to (N15), term by term, from the enclosure that has its own tests."""
    s, rho, scores = numbers(name, size)
    a, p, z = two(s.a), s.p, s.z.norm(dim=-1)
    drift, om, top = scores.drift.bound, scores.reach.bound, scores.top.bound
    sigma, eps, half = scores.deviation.bound, scores.excess.bound, scores.half.bound
    spread, largest = s.values.spread.bound, s.values.largest.bound
    drifted = (p * drift.square()).sum(-1).sqrt()
    is_close(_drift_deviation(scores), drifted)
    each, together = _curvature(s.values, scores)
    is_close(each, a * rho * (p * z * drift).sum(-1))
    is_close(together, a * rho * spread * drifted)
    weights = torch.tensor([(1 - (k + 0.5) / 6) / 6 for k in range(6)], dtype=D).unsqueeze(-1)
    bends = weights * torch.minimum(half.square(), 2 * half * scores.spreads.bound)
    is_close(_bends(scores), bends)
    counts = scores.half.square().roundings, (2 * scores.half * scores.spreads).roundings
    assert _bends(scores).roundings == 8 + max(counts) + 1
    is_close(_third_cumulant(s.values, scores), (scores.value_spreads(s.values)[0].bound * bends).sum(0))
    second = torch.minimum(largest * sigma.square(), spread * top * sigma)
    is_close(_second_moment(s.values, scores), second)
    by_key = (p * z * (phi(om, 3) + eps.unsqueeze(-1) * om)).sum(-1)
    over = torch.where(top > 1e-3, phi(top, 3) / top.square(), top / 6)
    cubic = torch.minimum(by_key, second * over + spread * eps * sigma)
    is_close(cubic_part(s.values, scores), cubic, rel=1e-3, abs=1e-9)
    own, rest = scores.by_own.bound, scores.beside_own.bound
    mixed = (p * z * (2 * own * rest + rest.square())).sum(-1) / 2
    quadratic = rho.square() / 2 * s.values.own_curvature.bound + mixed
    is_close(_quadratic(s.values, scores), quadratic)
    first = (p * z * (phi(om, 2) + eps.unsqueeze(-1) * om)).sum(-1)
    stated = torch.minimum(first, torch.minimum(quadratic, second / 2) + cubic)
    is_close(_series(s.values, scores), stated, rel=1e-3, abs=1e-9)


def test_without_a_move_of_its_own_a_row_has_no_own_curvature():
    s = plain()
    scores = TokenRadii(s.local, torch.zeros(4, dtype=D))
    is_close(_quadratic(s.values, scores), torch.zeros(4, dtype=D))


def test_the_variance_of_a_square_is_attained():
    """Var(x²) ≤ M⁴ for a centered variable within 2M:
    at ±M(1 ± √2/2) ... the two-sided check of (N14) on two- and three-point laws.
    """
    best, half = 0.0, 1.0
    for low in torch.linspace(0.05, 1.95, 77, dtype=D):
        high = 2 * half - low
        points = torch.tensor([-low, high, 0.0], dtype=D)
        for share in torch.linspace(0, 1, 41, dtype=D):
            law = (
                torch.tensor([high, low, 0.0], dtype=D) / 2 * (1 - share)
                + torch.tensor([0.0, 0.0, 1.0], dtype=D) * share
            )
            square = float(law @ points**4 - (law @ points**2) ** 2)
            sigma = float(law @ points**2) ** 0.5
            assert square**0.5 <= min(half**2, 2 * half * sigma) + 1e-12
            best = max(best, square**0.5)
    assert best > 0.9


def test_plain_sums_of_the_remainder():
    """Both ellipsoids of each head by their sizes; heads that are mixed add."""
    s, _, _ = numbers("full")
    rho = RADII[:4]
    found = row_moves(s.heads, LinearMove(s.heads), rho)
    is_close(found.plain, sum(part.length().bound for part in found.beyond))
    scores = TokenRadii(s.local, rho)
    is_close(found.beyond[0].size, two(s.matrix) * scores.total_change(scores.moves).bound)
    each, spread = (part.bound for part in _curvature(s.values, scores))
    series, cumulant = _series(s.values, scores).bound, _third_cumulant(s.values, scores).bound
    stated = torch.minimum(each, spread) + torch.minimum(series, cumulant)
    is_close(found.beyond[1].size, stated, rel=1e-7)


# The linear part


def test_the_linear_part_is_within_a_known_factor_of_the_largest():
    """sup |Σ_j J_ij d_j| on a grid of the plane, one output: then it is Σ_j ρ_j |J_ij| exactly."""
    s = plain(d=3, seed=4)
    rho = RADII[:4]
    jacobian = torch.func.jacrev(s.attention)(s.x).permute(0, 2, 1, 3)
    bound = LinearMove(s.heads)(rho).bound
    exactly = (jacobian.square().sum((-2, -1)).sqrt() * rho).sum(-1)
    assert bool((bound <= exactly * (1 + 1e-9)).all())
    e = torch.linspace(0, math.pi, 721, dtype=D)
    e = torch.stack([e.cos(), e.sin()], -1)
    seen = (torch.einsum("ijed,ae->aijd", jacobian, e).norm(dim=-1) @ rho).amax(0)
    assert bool((seen <= bound * (1 + 1e-12)).all())
    assert bool((bound <= seen * 1.02).all())
    one = torch.tensor([0.0, 0.7, 0.0, 0.0], dtype=D)
    is_close(LinearMove(s.heads)(one), 0.7 * twos(jacobian[:, 1]))


def test_moves_in_the_same_proportions_share_an_ellipsoid():
    s = plain(seed=4)
    linear = LinearMove(s.heads)
    first = linear(RADII[:4]).bound
    assert torch.allclose(linear(4 * RADII[:4]).bound, 4 * first, rtol=1e-12)
    assert torch.allclose(linear(3 * RADII[:4]).bound, 3 * first, rtol=1e-6)
    assert (_power_of_two(0.3), _power_of_two(1.0), _power_of_two(5.0), _power_of_two(0.0)) == (
        0.25,
        1.0,
        4.0,
        1.0,
    )
    found = linear.ellipsoid(RADII[:4])
    error = float(relative_error(2 * 4 * 3))
    assert float(found.blur.bound.max()) <= 4 * error
    is_close(found.slack, s.heads.jacobian_error(RADII[:4]).bound)


def test_shares_of_columns_follow_their_directions():
    """Blocks along axes: λ = s²/Σs² = 0.9 is best, and steps swing about it, for any unit; one that the
    top does not see keeps a share.
    """
    blocks = torch.stack([torch.diag(torch.tensor(d, dtype=D)) for d in ([3.0, 0.0], [0.0, 1.0])]).unsqueeze(
        0
    )
    radii = exact(torch.ones(2, dtype=D))
    for steps, least in ((1, 3.370690e-4), (2, 0.01049040), (3, 0.06602636), (4, 0.1712764), (8, 0.1602040)):
        assert shares(blocks, steps)[0].tolist() == pytest.approx([1 - least, least], rel=1e-4)
    assert float(column_reach(blocks, radii, 8)) == pytest.approx((9 / (1 - 0.1602040)) ** 0.5, rel=1e-5)
    empty = torch.cat([blocks, torch.zeros(1, 1, 2, 2, dtype=D)], 1)
    for steps in (0, 8):
        found = float(column_reach(empty, exact(torch.ones(3, dtype=D)), steps))
        assert found == pytest.approx(float(column_reach(blocks, radii, steps)), rel=1e-5)
    small = blocks * torch.tensor([1.0, 1e-4], dtype=D)[None, :, None, None]
    for steps, least in ((1, 3.3333e-8), (2, 1.0541e-9), (8, 7.6841e-6)):
        assert float(shares(small, steps)[0, 1]) == pytest.approx(least, rel=1e-3)
    assert float(column_reach(blocks * 0, radii, 8)) <= 1e-140
    assert torch.allclose(shares(blocks * 1e-30, 8), shares(blocks, 8), rtol=1e-5)


def test_roundings_of_the_linear_part():
    """γ(e (n d + 8)) of the gram relative to its norm, and γ(4) of the quotient; counts of every product."""
    s = plain(seed=4)
    found = LinearMove(s.heads).ellipsoid(RADII[:4])
    blur = float(relative_error(2 * (4 * 3 + 8))) + float(relative_error(4)) * found.core.flatten(1).norm(
        dim=-1
    )
    assert torch.allclose(found.blur.bound, blur, rtol=1e-6, atol=0)
    gram, length = LinearMove(s.heads)._unit_ellipsoid(RADII[:4] / 0.25, slice(None))
    top = torch.linalg.eigvalsh(gram)[:, -1]
    trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert torch.allclose(
        length.value, (top + (16 * 2 + 2 * 3 * 3 + 2) * UNIT * trace).sqrt(), rtol=1e-15, atol=0
    )
    assert length.roundings == (2 + 4 + 1) // 2 + 1 + 4
    blocks, radii = normal(generator(5), 3, 4, 2, 3), torch.tensor([0.5, 1.0, 0.2, 2.0], dtype=D)
    sizes = (blocks * radii[None, :, None, None]).flatten(-2).norm(dim=-1)
    share = sum_to_less_than_one(sizes, -1)
    scaled = blocks * (radii / share.sqrt())[:, :, None, None]
    for turned in (False, True):
        blocks = blocks.mT if turned else blocks
        scaled = scaled.mT if turned else scaled
        wide = scaled.transpose(1, 2).flatten(-2)
        gram = wide @ wide.mT
        top, trace = torch.linalg.eigvalsh(gram)[:, -1], gram.diagonal(dim1=-2, dim2=-1).sum(-1)
        stated = (top + (16 * len(gram[0]) + 2 * wide.shape[-1] + 2) * UNIT * trace).sqrt()
        found = column_reach(blocks, exact(radii))
        assert torch.allclose(found.value, stated, rtol=2e-15, atol=0)
        assert found.roundings >= 8


def test_shares_certify_whatever_they_are():
    g = generator(5)
    blocks, radii = normal(g, 3, 4, 2, 3), torch.tensor([0.5, 1.0, 0.2, 2.0], dtype=D)
    found = shares(blocks * radii[None, :, None, None], 8)
    assert bool((found > 0).all())
    assert bool((found.sum(-1) <= 1).all())
    assert bool((found.sum(-1) > 1 - 1e-9).all())
    for steps in (0, 6):
        bound = column_reach(blocks, exact(radii), steps).bound
        sizes = (blocks.square().sum((-2, -1)).sqrt() * radii).sum(-1)
        assert bool((bound <= sizes * (1 + 1e-12)).all())
        for _ in range(50):
            d = normal(g, 4, 3)
            d = radii.unsqueeze(-1) * d / d.norm(dim=-1, keepdim=True)
            assert bool((torch.einsum("ijed,jd->ie", blocks, d).norm(dim=-1) <= bound).all())
    weights = blocks.square().sum((-2, -1)).sqrt() * radii
    share = weights / weights.sum(-1, keepdim=True)
    scaled = blocks * (radii / share.sqrt())[:, :, None, None]
    stated = twos(scaled.transpose(1, 2).flatten(-2))
    is_close(column_reach(blocks, exact(radii)), torch.minimum(stated, weights.sum(-1)))
    assert bool(
        (
            column_reach(blocks, exact(radii), 6).bound <= column_reach(blocks, exact(radii)).bound * 1.001
        ).all()
    )
    assert (
        column_reach(blocks, Upper(radii, 50)).roundings == column_reach(blocks, exact(radii)).roundings + 50
    )


# Ellipsoids


def test_shares_that_sum_to_less_than_one():
    share = sum_to_less_than_one(torch.rand(5, 3, generator=generator(1), dtype=D), 0)
    assert bool((share.sum(0) < 1).all())
    assert bool((share.sum(0) > 1 - 1e-11).all())


def test_a_power_of_a_matrix_is_nearly_the_projection_on_its_top():
    matrix = torch.diag(torch.tensor([2.0, 1.0], dtype=D)).unsqueeze(0)
    found = sharpen(matrix)[0]
    weights = torch.tensor([1.0, 2.0**-32], dtype=D) / (1 + 2.0**-32)
    assert torch.allclose(found, torch.diag(weights), rtol=1e-9, atol=0)


def part(size, matrix, slack=0.0, blur=0.0):
    size = torch.tensor([size], dtype=D)
    return Ellipsoid(
        exact(size),
        matrix.unsqueeze(0),
        exact(torch.full_like(size, blur)),
        exact(torch.full_like(size, slack)),
    )


def test_sums_of_ellipsoids_attain_the_sum_and_the_root_of_squares():
    """The same direction adds, orthogonal directions add as squares; slack and blur are added."""
    one, other = torch.diag(torch.tensor([1.0, 0.0], dtype=D)), torch.diag(torch.tensor([0.0, 1.0], dtype=D))
    assert float(length_of_sum([part(3.0, one), part(4.0, one)])) == pytest.approx(7.0, rel=1e-3, abs=0)
    assert float(length_of_sum([part(3.0, one), part(4.0, one)])) >= 7.0
    assert 5.0 <= float(length_of_sum([part(3.0, one), part(4.0, other)])) <= 5.0 * math.sqrt(2)
    assert float(length_of_sum([part(3.0, one), part(3.0, other)])) == pytest.approx(
        3 * math.sqrt(2), rel=2e-3, abs=0
    )
    assert float(length_of_sum([part(3.0, one, slack=0.5)])) == pytest.approx(3.5, rel=1e-9, abs=0)
    assert float(length_of_sum([part(3.0, one, blur=0.44)])) == pytest.approx(3.6, rel=1e-9, abs=0)
    found = enclose([part(3.0, one), part(4.0, other)])
    assert found.matrices.shape == (1, 2, 2)
    shares_ = torch.tensor([9 / float(found.matrices[0, 0, 0]), 16 / float(found.matrices[0, 1, 1])], dtype=D)
    assert float(shares_.sum()) == pytest.approx(1.0, rel=1e-9, abs=0)
    assert float(part(3.0, one, slack=0.5).length()) == pytest.approx(3.5, rel=1e-12, abs=0)
    assert float(length_of_sum([ball(exact(torch.tensor([2.0], dtype=D)), 3)])) == pytest.approx(
        2.0, rel=1e-9, abs=0
    )


def test_normal_forms_of_ellipsoids():
    gram = torch.diag(torch.tensor([4.0, 1.0], dtype=D)).unsqueeze(0)
    core, blur = normalize(gram, exact(torch.tensor([2.0], dtype=D)), exact(torch.tensor([0.4], dtype=D)))
    assert torch.allclose(core[0], torch.diag(torch.tensor([1.0, 0.25], dtype=D)))
    assert float(blur) == pytest.approx(0.1, rel=1e-9, abs=0)
    counted = normalize(gram, exact(torch.tensor([2.0], dtype=D)), Upper(torch.tensor([0.4], dtype=D), 50))[1]
    assert counted.roundings == 50 + 2 + 1 + 1
    tiny, blur = normalize(gram * 0, exact(torch.tensor([0.0], dtype=D)), exact(torch.tensor([0.4], dtype=D)))
    assert torch.equal(tiny[0], torch.eye(2, dtype=D))
    assert float(blur) <= 1e-14


def test_roundings_of_sums_of_ellipsoids():
    """γ of each shape times what its share makes of it, in its frame; a blur and a gram that is off too."""
    core = torch.tensor([[[0.5, 0.2], [0.2, 0.3]]], dtype=D)
    frame = torch.tensor([[1.0, 2.0, 0.0], [0.0, 1.0, 3.0]], dtype=D)
    none, two_, three = (exact(torch.tensor([float(k)], dtype=D)) for k in (0, 2, 3))
    plain_part = Ellipsoid(three, torch.eye(3, dtype=D).unsqueeze(0), none, none)
    framed = Ellipsoid(two_, core, none, none, frame)
    found = enclose([plain_part, framed])
    top = float(found.matrices[0, 0, 2])  # of the framed part alone: its share is 4/λ
    factor = top / float((frame.mT @ core[0] @ frame)[0, 2])
    whole = (float(found.matrices[0].trace()) - factor * float((frame.mT @ core[0] @ frame).trace())) / 3
    assert 4 / factor + 9 / whole == pytest.approx(1.0, rel=1e-9, abs=0)
    blur = whole * float(relative_error(2 * 3 + 2 * (3 + 3) + 8)) * math.sqrt(3)
    blur += factor * float(relative_error(2 * 5 + 2 * (3 + 2) + 8)) * float(core.norm() * frame.norm() ** 2)
    assert float(found.blur) == pytest.approx(blur, rel=1e-9, abs=0)
    assert (
        3.5
        < float(found.length)
        == pytest.approx(float(torch.linalg.eigvalsh(found.matrices)[0, -1]) ** 0.5, rel=1e-9)
    )
    assert 0 <= float(length_of_sum([part(0.0, core[0]), part(0.0, core[0])])) <= 1e-140
    assert float(length_of_sum([part(3.0, 0 * core[0])])) <= 1e-6
    for endless in (2e100, math.inf):
        assert float(length_of_sum([part(endless, core[0]), part(1.0, core[0])])) == math.inf
    assert float(length_of_sum([part(5e99, torch.eye(2, dtype=D))])) == pytest.approx(5e99)
    gram = 3.0 * torch.eye(2, dtype=D).unsqueeze(0)
    blur = normalize(gram, two_, none)[1]
    assert float(blur) == pytest.approx(float(relative_error(4)) * 0.75 * math.sqrt(2), rel=1e-9, abs=0)
    assert blur.roundings >= 3
    small = exact(torch.tensor([2e-120], dtype=D))
    assert torch.allclose(normalize(gram * 1e-240, small, none)[0], gram / 4)
    smaller = exact(torch.tensor([0.7e-120], dtype=D))
    assert torch.equal(normalize(gram * 1e-240, smaller, none)[0][0], torch.eye(2, dtype=D))


def test_shares_of_sums_follow_their_directions():
    """Parts along axes: s²/Σs² is best, and three steps come close; the least share keeps a part."""
    one, other = torch.diag(torch.tensor([1.0, 0.0], dtype=D)), torch.diag(torch.tensor([0.0, 1.0], dtype=D))
    for sizes, share in (((3.0, 4.0), 0.6657871), ((4.0, 1.0), 0.0411779), ((3.0, 3e-6), 9.998001e-5)):
        found = enclose([part(sizes[0], one), part(sizes[1], other)]).matrices[0].diagonal()
        assert sizes[1] ** 2 / float(found[1]) == pytest.approx(share, rel=1e-4)
        assert sizes[0] ** 2 / float(found[0]) == pytest.approx(1 - share, rel=1e-4)


def lonely(matrix, error=0.0):
    """A head whose value matrix is given, and one row that sees two keys."""
    z = torch.tensor([[[1.0, 2.0], [4.0, -0.5]]], dtype=D)
    made = Matrix(matrix, exact(error), exact(two(matrix)))
    size, largest = Vectors(z, exact(error)).lengths(), exact(torch.tensor([7.0], dtype=D))
    return SimpleNamespace(
        matrix=made,
        w=made.norm,
        z=Vectors(z, exact(error)),
        size=size,
        largest=largest,
        local=SimpleNamespace(n=2),
    )


def test_what_a_frame_loses():
    """Directions of a mixer below 1e-14 of its largest are left out, and what that loses is slack."""
    values = lonely(torch.tensor([[1.0, 2.0], [0.5, 0.0]], dtype=D), 0.25)
    moved = exact(torch.tensor([0.5], dtype=D))
    for small, kept in ((1e-14, 1), (3e-14, 2), (0.0, 1)):
        mixer = torch.tensor([[2.0, 0.0, 0.0], [0.0, small, 0.0]], dtype=D)
        shape = HeadShape(values, SimpleNamespace(w=exact(4.0)), mixer, exact(2.0))
        assert len(shape.frame) == kept
        lost = (small if kept == 1 else 0.0) + float(relative_error(kept + 2)) * 2 * math.sqrt(kept)
        assert float(shape._lost) == pytest.approx(lost, rel=1e-6, abs=0)
        product = values.matrix.center @ shape._inside.mT
        error = float(relative_error(2 * (2 + kept) + 2 + 8)) * (float(values.matrix.center.norm()) * 2) ** 2
        core = product.mT @ product / 16
        ellipsoid = shape.move(moved)
        assert torch.allclose(ellipsoid.core[0], core)
        blur = error / 16 + float(relative_error(4)) * float(core.norm())
        assert float(ellipsoid.blur) == pytest.approx(blur, rel=1e-9, abs=0)
        assert float(ellipsoid.size) == pytest.approx(2.0, rel=1e-12)
        slack = 0.5 * (float(values.w) * lost + 0.25 * 2)
        assert float(ellipsoid.slack) == pytest.approx(slack, rel=1e-12, abs=0)
        without = HeadShape(lonely(values.matrix.center), SimpleNamespace(w=exact(4.0)), mixer, exact(2.0))
        slack = 0.5 * float(values.w) * lost
        assert float(without.move(moved).slack) == pytest.approx(slack, rel=1e-6, abs=0)
        ball_, weight, size, spread = (exact(torch.tensor([k], dtype=D)) for k in (0.7, 3.0, 0.2, 5.0))
        law = Upper(torch.tensor([[0.25, 0.5]], dtype=D), 40)
        boxes = [torch.tensor([True]), torch.tensor([False])]
        covariances = [Covariances(law, size, Upper(spread.value, 30), box) for box in boxes]
        inside = shape.within(ball_, weight, covariances)
        assert float(inside.size.value) == pytest.approx(0.7 + 2 * 0.2 * 5, rel=1e-12)
        assert inside.size.roundings == 40 + 2 * 30 + 16
        z = values.z.center[0] * torch.tensor([0.5, 0.5**0.5], dtype=D).unsqueeze(-1)
        factor, round_part = 1 / 2.7 / 25, (0.7 + 1.0) / 2.7
        inner = factor * shape._inside @ z.mT @ z @ shape._inside.mT
        assert torch.allclose(inside.core[0], inner + round_part * torch.eye(kept, dtype=D))
        mass = factor * float((law.value * values.size.value.square()).sum())
        blur = float(relative_error(2 + 2 * 5 + 64)) * (4 * mass + math.sqrt(kept) * round_part)
        assert float(inside.blur) == pytest.approx(blur, rel=1e-9, abs=0)
        slack = (3.0 + 2 * 0.2) * (0.25 * 2 + lost * 7)
        assert float(inside.slack) == pytest.approx(slack, rel=1e-9, abs=0)
        slack = (3.0 + 2 * 0.2) * lost * 7
        assert float(without.within(ball_, weight, covariances).slack) == pytest.approx(
            slack, rel=1e-6, abs=0
        )
    nothing = exact(torch.zeros(1, dtype=D))
    none = shape.within(nothing, nothing, [Covariances(law, nothing, nothing, boxes[0])])
    assert bool(torch.isfinite(none.core).all())
    assert bool(torch.isfinite(shape.within(nothing, nothing, []).core).all())
    thin = Covariances(law, size, exact(torch.tensor([1e-130], dtype=D)), boxes[0])
    assert torch.allclose(shape.within(nothing, nothing, [thin]).core[0], torch.eye(kept, dtype=D))
    assert float(none.size) <= 1e-280


def shaped(seed=6):
    g = generator(seed)
    w_q, w_k, w_v, w_o = normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 3, 2), normal(g, 2, 2, 3)
    attention, x = r.Attention(r.Dot(w_q, w_k), r.Linear(w_v)), normal(g, 4, 3)
    return r.maps.Heads(attention, w_o), x, w_v, w_o


def test_shapes_of_heads_in_the_output():
    """Moves of values are the ellipsoid VVᵀ/|V|² with the size |V| times the move;
    covariances are [√P z] in the frame.
    """
    map, x, w_v, w_o = shaped()
    heads = LocalHeads(subject_of(map), r.Neighborhood(x, 0.0))
    for h, shape in enumerate(heads.shapes):
        assert isinstance(shape, HeadShape)
        v = w_v[h] @ w_o[h]
        moved = shape.move(exact(torch.tensor([0.5], dtype=D)))
        is_close(moved.size, torch.tensor([0.5 * two(v)], dtype=D))
        made = shape.frame.mT @ moved.core[0] @ shape.frame
        assert torch.allclose(made, v.mT @ v / two(v) ** 2, atol=1e-10)
        assert float(moved.slack) <= 1e-12
        assert float(moved.blur) <= 1e-11
        values = heads.folded[h]
        law = heads.heads[h].law
        none = exact(torch.zeros(4, dtype=D))
        size = exact(torch.full((4,), 0.7, dtype=D))
        inside = shape.within(
            none, none, [Covariances(law, size, values.spread, torch.ones(4, dtype=torch.bool))]
        )
        is_close(inside.size, 0.7 * values.spread.bound)
        z = heads.separate[h].z.center @ w_o[h]
        gram = torch.einsum("ik,ika,ikb->iab", law.bound, z, z) / values.spread.bound.square()[:, None, None]
        made = shape.frame.mT @ inside.core @ shape.frame
        assert torch.allclose(made, gram, atol=1e-9)
        known = shape.within(
            size, size, [Covariances(law, size, values.spread, torch.zeros(4, dtype=torch.bool))]
        )
        is_close(known.size, 0.7 + 0.7 * values.spread.bound)
        assert torch.allclose(
            known.core, torch.eye(len(shape.frame), dtype=D).expand_as(known.core), atol=1e-9
        )
        assert float(known.slack.bound.max()) <= 1e-11


def test_slack_of_the_remainder():
    """What is outside of the frame: errors of z times all that z is multiplied with."""
    s = loosen(plain(seed=3))
    rho = 2.0 * RADII[:4]
    scores = TokenRadii(s.local, rho)
    first, second = row_moves(s.heads, LinearMove(s.heads), rho).beyond
    is_close(first.slack, scores.total_change(scores.moves).bound * LOOSE["matrix"], rel=1e-9)
    each, spread = (part.bound for part in _curvature(s.values, scores))
    series, cumulant = _series(s.values, scores).bound, _third_cumulant(s.values, scores).bound
    turn, law = two(s.a) * rho, s.local.law.bound
    weight = (
        scores.swap.bound + (law * scores.reach.bound).sum(-1) + turn * (law * scores.drift.bound).sum(-1)
    )
    known = weight + torch.where(each < spread, 0.0, turn * _drift_deviation(scores).bound)
    known = known + torch.where(series < cumulant, 0.0, _bends(scores).bound.sum(0))
    assert bool((series < cumulant).any() and (each < spread).any())
    is_close(second.slack, known * float(s.values.z.error), rel=1e-7)
    far = TokenRadii(s.local, 8 * rho)
    second = row_moves(s.heads, LinearMove(s.heads), 8 * rho).beyond[1]
    series, cumulant = _series(s.values, far).bound, _third_cumulant(s.values, far).bound
    each, spread = (part.bound for part in _curvature(s.values, far))
    assert bool((series > cumulant).any())
    stated = torch.minimum(each, spread) + torch.minimum(series, cumulant)
    is_close(second.size, stated, rel=1e-7)


# Saturation


@pytest.mark.parametrize("size", [1.0, 20.0])
@pytest.mark.parametrize("name", CASES)
def test_saturated_rows(name, size):
    """(N19): |V| E'[ρ] and the least of what means of z can be, or E'[|z + Vᵀd|] as a whole."""
    s, _, scores = numbers(name, size)
    z = exact(s.z.norm(dim=-1))
    laws = scores.laws
    tilted = (scores.value_spreads(s.values)[0].bound * scores.spreads.bound).sum(0) / 6
    turned = torch.stack(
        [
            laws.most(z).bound,
            laws.total_change(z).bound,
            s.values.spread.bound * scores.relative.bound,
            tilted,
        ]
    ).amin(0)
    apart = two(s.matrix) * laws.most(scores.moves).bound + turned
    whole = laws.most(longest_move(s.values, scores.moves)).bound
    is_close(row_saturation(s.values, scores), torch.minimum(apart, whole), rel=1e-7)


def test_the_longest_move_is_attained():
    """|z + Vᵀd| over |d| ≤ ρ, on the circle: at least the largest, and within a tenth of it."""
    s = plain(d=2, values=False, seed=5)
    stretch = torch.diag(torch.tensor([3.0, 0.5], dtype=D))
    attention = r.Attention(s.attention.potential, r.Linear(stretch))
    heads = LocalHeads(subject_of(attention), r.Neighborhood(s.x, 0.0))
    values = heads.separate[0]
    rho = torch.tensor([0.3, 0.01, 2.0, 0.7], dtype=D)
    angles = torch.linspace(0, 2 * math.pi, 3601, dtype=D)
    circle = torch.stack([angles.cos(), angles.sin()], -1) @ stretch
    z = values.z.center
    seen = (z.unsqueeze(2) + rho[None, :, None, None] * circle).norm(dim=-1).amax(-1)
    bound = longest_move(values, exact(rho)).bound
    assert bool((seen <= bound).all())
    assert bool((bound <= 1.06 * seen).all())
    s_max, levels = 3.0, (1.003, 1.01, 1.03, 1.1, 1.2, 1.5, 2.0, 4.0, 16.0)
    for z_error, v_error in ((0.0, 0.0), (0.01, 0.0), (0.0, 0.02)):
        values.__dict__["z"] = Vectors(z, exact(z_error))
        values.__dict__.pop("size", None)
        values.matrix = Matrix(stretch, exact(v_error), exact(3.0))
        backward = float(relative_error(64 * 4))
        turned = z_error + backward * float(z.norm(dim=-1).max())
        bent = v_error + backward * float(stretch.norm())
        best = z.norm(dim=-1) + z_error + 3 * rho
        for factor in levels:
            level = factor * s_max**2
            gain = level / (level - torch.tensor([9.0, 0.25], dtype=D))
            outside = float(relative_error(4 * 2 + 8)) * z.square().sum(-1)
            stated = ((z.square() * gain).sum(-1) + outside + level * rho.square()).sqrt()
            best = torch.minimum(best, stated + turned * float(gain.max()) ** 0.5 + bent * rho)
        found = longest_move(values, exact(rho))
        assert torch.allclose(found.value, best, rtol=3e-15, atol=0)
        assert found.roundings > 500 + 2 * 2 // 2


def test_the_longest_move_counts_the_roundings_of_wide_values():
    """2 e + 4 of coordinates, 1000 of the gain, e of their sum."""
    wide, z = torch.eye(16, dtype=D), torch.ones(1, 2, 16, dtype=D)
    basis = SimpleNamespace(
        singular=torch.ones(16, dtype=D), inside=z, outside=exact(torch.zeros(1, 2, dtype=D))
    )
    values = SimpleNamespace(
        singular=basis,
        matrix=exact_matrix(wide),
        z=Vectors(z, exact(0.0)),
        size=exact(4 * z[..., 0]),
        w=exact(1.0),
    )
    stretched = (2 * 16 + 4) + (1000 + 1) + 1 + 15
    found = longest_move(values, exact(torch.ones(2, dtype=D)))
    assert found.roundings == (stretched + 2 + 1) // 2 + 1 + 2


def test_a_proved_inverse():
    g = generator(2)
    matrix = torch.eye(3, dtype=D) + 0.1 * (lambda m: m + m.mT)(normal(g, 3, 3))
    inverse, error = _proved_inverse(matrix)
    exactly = torch.linalg.inv(matrix)
    assert two(inverse - exactly) <= float(error) <= 1e-12
    assert torch.equal(inverse, inverse.mT)
    rounding = float(relative_error(7)) * (float(inverse.norm() * matrix.norm()) + 1)
    residual = float((inverse @ matrix - torch.eye(3, dtype=D)).norm()) + rounding
    assert float(error) == pytest.approx(residual * float(inverse.norm()) / (1 - residual), rel=1e-3, abs=0)
    singular = torch.diag(torch.tensor([1.0, 1e-17, 1.0], dtype=D))
    assert float(_proved_inverse(singular + 1e-16)[1]) >= 1


@pytest.mark.parametrize("residual", [False, True])
def test_levels_of_pairs(residual, monkeypatch):
    """√(μ + yᵀNy) at two levels μ, with the slack of values and errors of z; of many rows at two others."""
    map, x, _, w_o = shaped()
    s = loosen(SimpleNamespace(heads=LocalHeads(subject_of(map, residual), r.Neighborhood(x, 0.0))))
    heads, rho = s.heads, 3.0 * RADII[:4]
    scores = [TokenRadii(local, rho) for local in heads.heads]
    largest = exact(torch.tensor([float(rho.max())], dtype=D))
    parts = [shape.move(largest) for shape in heads.shapes] + ([ball(largest, 3)] if residual else [])
    found = enclose(parts)
    reach, eye = float(found.length), torch.eye(3, dtype=D)
    ahead = float(_quadratic_form(heads.shapes, scores, eye).value.sqrt().median()) / reach
    slack = sum(float(part.slack) for part in parts)
    missed = two(w_o.reshape(4, 3)) * sum(float(values.z.error) for values in heads.separate)
    assert missed > 0.01
    assert slack > 0.001
    given = []
    invert = saturation_file._proved_inverse
    monkeypatch.setattr(
        saturation_file, "_proved_inverse", lambda matrix: given.append(matrix) or invert(matrix)
    )
    for few, factors in ((100, (0.6, 0.45)), (3, (1.1, 0.7))):
        monkeypatch.setattr(saturation_file, "FEW", few)
        best = torch.full((4,), math.inf, dtype=D)
        for factor in factors:
            level = (1.02 + factor * ahead) * reach**2
            inverse = torch.linalg.inv(eye - found.matrices[0] / level)
            square = level + _quadratic_form(heads.shapes, scores, inverse).bound
            best = torch.minimum(best, square.sqrt() + slack + missed)
        is_close(_pair_by_pair(heads, scores), best, rel=1e-9)
        inner = (
            1 - (found.matrices[0] + float(found.blur) * eye) / level
        ).diagonal()  # 8 d u more is taken away, for rounding
        assert bool((given[-1].diagonal() <= inner - 20 * UNIT).all())
        beside = given[-1] + found.matrices[0] / level  # and nothing beside the diagonal
        assert float((beside - torch.diag(beside.diagonal())).abs().max()) <= 8 * UNIT
    used, form = [], _quadratic_form
    with monkeypatch.context() as told:  # an inverse that is known badly: twice its error is added
        told.setattr(saturation_file, "_proved_inverse", lambda matrix: (2.0 * eye, exact(0.25)))
        told.setattr(
            saturation_file, "_quadratic_form", lambda *given: used.append(given[-1]) or form(*given)
        )
        _pair_by_pair(heads, scores)
    assert [torch.equal(matrix, 2.5 * eye) for matrix in used] == [False, True, True]
    monkeypatch.setattr(saturation_file, "enclose", lambda parts: replace(found, length=exact(0.0)))
    assert _pair_by_pair(heads, scores).bound.tolist() == [math.inf] * 4


def test_pairs_are_asked_where_a_head_is_near_saturation(monkeypatch):
    """Where 2M of any head is more than two."""
    for name, value in (("_head_by_head", 3.0), ("_along_path", 2.0), ("_pair_by_pair", 1.0)):
        found = exact(torch.tensor([value], dtype=D))
        monkeypatch.setattr(saturation_file, name, lambda heads, scores, found=found: found)
    for halves, least in (((0.5, 0.9), 2.0), ((0.5, 1.1), 1.0), ((1.1, 0.5), 1.0)):
        scores = [SimpleNamespace(half=exact(torch.tensor([0.1, half], dtype=D))) for half in halves]
        assert float(saturation(None, scores)) == least


def test_roundings_of_a_quadratic_form():
    """γ |N|_F (|W|_F |z|)² for each key, twice that of each pair; nothing else where z is orthogonal."""
    z = [torch.tensor([[[1e4, 0.0], [0.0, 0.0]]], dtype=D), torch.tensor([[[0.0, 3e4], [0.0, 0.0]]], dtype=D)]
    form = torch.diag(torch.tensor([0.0, 0.0, 2.0], dtype=D))
    mixer = torch.tensor([[1.0, 0.0, 0.0], [0.0, 2.0, 0.0]], dtype=D)
    seen = torch.ones(1, 2, dtype=torch.bool)
    laws = SimpleNamespace(most=lambda worth: worth.sum(-1))
    scores = [
        SimpleNamespace(laws=laws, half=exact(torch.ones(1, dtype=D)), local=SimpleNamespace(seen=seen))
        for _ in range(2)
    ]
    shapes = []
    for part in z:
        values = SimpleNamespace(z=Vectors(part, exact(0.0)), size=Vectors(part, exact(0.0)).lengths())
        values.largest = values.size.amax(-1)
        shapes.append(SimpleNamespace(mixer=mixer, separate=values, thickness=exact(3.0)))
    gamma = float(relative_error(4 * (2 + 3) + 16)) * 2
    stated = gamma * 9 * (1e8 + 9e8) + 2 * gamma * 9 * 3e8  # the second head, once each: 3e4 with 1e4
    found = _quadratic_form(shapes, scores, form)
    assert float(found) == pytest.approx(stated, rel=1e-9, abs=0)
    assert found.roundings >= 4
    scores[0].local.seen = torch.tensor([[False, True]])
    form = torch.ones(3, 3, dtype=D)
    own = torch.einsum("ka,ab,kb->k", z[1][0] @ mixer, form, z[1][0] @ mixer).sum()
    own = own + torch.einsum("ka,ab,kb->k", z[0][0] @ mixer, form, z[0][0] @ mixer).sum()
    assert float(_quadratic_form(shapes, scores, form)) == pytest.approx(float(own), rel=1e-9)
    shapes[1].separate.z.center.neg_()
    scores[0].local.seen = seen
    assert float(_quadratic_form(shapes, scores, form)) == pytest.approx(float(own), rel=1e-9)


@pytest.mark.parametrize("residual", [False, True])
def test_heads_by_pairs(residual):
    """yᵀNy over the laws: E'[zᵀNz] of each head and 2 max zᵀNz' of pairs; and the rows stay below."""
    map, x, _, w_o = shaped()
    heads = LocalHeads(subject_of(map, residual), r.Neighborhood(x, 0.0))
    rho = 3.0 * RADII[:4]
    scores = [TokenRadii(local, rho) for local in heads.heads]
    form = torch.eye(3, dtype=D) + 0.2
    z = [values.z.center @ w_o[h] for h, values in enumerate(heads.separate)]
    first = torch.einsum("ika,ab,ikb->ik", z[0], form, z[0])
    second = torch.einsum("ika,ab,ikb->ik", z[1], form, z[1])
    cross = torch.einsum("ika,ab,ilb->ikl", z[1], form, z[0]).amax(-1).clamp_min(0)
    stated = scores[0].laws.most(exact(first)).bound + scores[1].laws.most(exact(second + 2 * cross)).bound
    is_close(_quadratic_form(heads.shapes, scores, form), stated, rel=1e-7)
    whole, g = r.maps.Residual(map) if residual else map, generator(4)
    here = whole(x)
    bounds = [
        found.bound
        for found in (_pair_by_pair(heads, scores), _along_path(heads, scores), saturation(heads, scores))
    ]
    apart = sum(
        row_saturation(values, score).bound for values, score in zip(heads.folded, scores, strict=True)
    ) + (rho if residual else 0)
    largest = max(float(score.half.bound.max()) for score in scores)
    least = torch.minimum(apart, bounds[1])
    is_close(bounds[2], torch.minimum(least, bounds[0]) if largest > 1 else least, rel=1e-7)
    seen = torch.zeros(4, dtype=D)
    for _ in range(100):
        step = normal(g, 4, 3)
        d = rho.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True)
        seen = torch.maximum(seen, (whole(x + d) - here).norm(dim=-1))
    for bound in bounds:
        assert bool((seen <= bound).all())
        assert bool((bound[rho > 0] <= 12 * seen[rho > 0]).all())


# How steep rows can be


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("size", [0.1, 1.0, 8.0])
def test_constants_of_rows(size, residual):
    """(N34), and as a whole; derivatives at moved tokens stay below."""
    s = plain(seed=3, residual=residual, values=not residual)
    rho = size * RADII[:4]
    scores = TokenRadii(s.local, rho)
    one = torch.ones(4, dtype=D)
    w, a = two(s.matrix), two(s.a)
    wide = scores.value_spreads(s.values)[0].bound
    eye = torch.eye(4, dtype=torch.bool)
    slopes = []
    for station in range(1, 7):
        laws = scores.at(station)
        own = twos(laws.high.bound.sqrt().unsqueeze(-1) * s.own)
        slopes.append(own + laws.most(exact(s.alpha.square().masked_fill(eye, 0.0))).bound.sqrt())
    is_close(_slope_spread(scores, scores.laws, exact(one)), slopes[-1], rel=1e-8)
    far = scores.laws.most(exact(rho.square())).bound.sqrt()
    bend = a * (far + rho * scores.laws.most(exact(one)).bound.sqrt())
    pieces = sum(wide[k] * slopes[k] for k in range(6)) / 6
    change = (
        w * scores.total_change(exact(one)).bound
        + 2 * scores.half.bound * pieces
        + w * far * (slopes[-1] + bend)
        + wide[-1] * bend
    )
    is_close(_change(s.values, scores, exact(one)), change, rel=1e-7)
    whole = w + (wide[-1] + w * far) * (slopes[-1] + bend)
    is_close(_whole(s.values, scores), whole, rel=1e-7)
    linear = LinearMove(s.heads)
    near = linear(one).bound + change
    found = row_constants(s.heads, linear, [scores])
    is_close(found, torch.minimum(near, whole + 1 if residual else whole), rel=1e-7)
    map, g = r.maps.Residual(s.attention) if residual else s.attention, generator(7)
    for _ in range(30):
        step, e = normal(g, 4, 3), normal(g, 4, 3)
        d = rho.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True) * (1 - 1e-12)
        e = e / e.norm(dim=-1, keepdim=True)
        turned = torch.func.jvp(map, (s.x + d,), (e,))[1].norm(dim=-1)
        assert bool((turned <= found.bound).all())


def test_changes_of_a_derivative_along_tangents_of_all_lengths():
    """(N34) where tangents differ from token to token: own moves by far, others by their own lengths."""
    s = plain(seed=3)
    rho, tau = RADII[:4], torch.tensor([0.5, 2.0, 0.0, 3.0], dtype=D)
    scores = TokenRadii(s.local, rho)
    eye = torch.eye(4, dtype=torch.bool)
    own = twos(scores.laws.high.bound.sqrt().unsqueeze(-1) * s.own)
    steps = (s.alpha * tau).square().masked_fill(eye, 0.0)
    slope = tau * own + scores.laws.most(exact(steps)).bound.sqrt()
    is_close(_slope_spread(scores, scores.laws, exact(tau)), slope, rel=1e-8)
    far, bend = _drifts(s.values, scores, exact(tau))
    is_close(far, scores.laws.most(exact(rho.square())).bound.sqrt(), rel=1e-8)
    others = scores.laws.most(exact(tau.square())).bound.sqrt()
    is_close(bend, two(s.a) * (tau * far.bound + rho * others), rel=1e-8)


@pytest.mark.parametrize("size", [0.2, 1.0, 8.0])
@pytest.mark.parametrize("name", CASES)
def test_rows_stay_below_all_bounds(name, size):
    s, rho, _ = numbers(name, size)
    found = row_moves(s.heads, LinearMove(s.heads), rho)
    g, here = generator(3), s.attention(s.x)
    seen = [torch.zeros(s.n, dtype=D) for _ in range(3)]
    for _ in range(30):
        step = normal(g, s.n, 3)
        d = rho.unsqueeze(-1) * step / step.norm(dim=-1, keepdim=True) * (1 - 1e-12)
        linear = torch.func.jvp(s.attention, (s.x,), (d,))[1]
        moved = s.attention(s.x + d) - here
        for at, part in enumerate((linear, moved - linear, moved)):
            seen[at] = torch.maximum(seen[at], part.norm(dim=-1))
    for part, bound in zip(seen, (found.linear, found.remainder, found.best), strict=True):
        assert bool((part <= bound.bound + 1e-13).all())
    assert bool((seen[2] <= found.saturation.bound + 1e-13).all())
    assert bool((found.linear.bound[rho > 0] <= 3 * seen[0][rho > 0]).all())
    if size == 0.2:
        assert bool((found.best.bound <= found.linear.bound * 1.6).all())
    remainder, plain_ = length_of_sum(list(found.beyond)).bound, found.plain.bound
    is_close(found.remainder, torch.minimum(remainder, plain_))
    joined = torch.minimum(length_of_sum([found.straight, *found.beyond]).bound, found.linear.bound + plain_)
    slight = bool((joined <= 1.05 * found.straight.size.bound).all())
    is_close(found.best, joined if slight else torch.minimum(joined, found.saturation.bound), rel=1e-7)
