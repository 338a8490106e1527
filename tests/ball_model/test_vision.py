"""Pictures whose pixels move in boxes, as `benchmarks.vision` puts them into the ball model."""

import gzip

import pytest
import torch

import regard as r
from benchmarks.vision import ImagePart, Vision, _whitened, begin, margin, read_picture
from regard import maps
from regard.nonexpansive import MixTokens
from regard.proofs.ball_model.ellipsoids import longest
from tests.ball_model.networks import D, drawn

WIDE, PATCH = 6, 16


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def vision(seed):
    """A small network on pictures of 32 × 32 pixels: four patches and one token more."""
    g = generator(seed)
    pixels = 3 * PATCH * PATCH
    heads = r.Attention(r.Dot(drawn(g, 2, WIDE, 3), drawn(g, 2, WIDE, 3)), r.Linear(drawn(g, 2, WIDE, 3)))
    neurons = maps.Compose(
        (maps.Affine(drawn(g, WIDE, 8) / 2), maps.Pointwise(maps.Relu()), maps.Affine(drawn(g, 8, WIDE) / 3))
    )
    body = (maps.Residual(maps.Heads(heads, drawn(g, 2, 3, WIDE) / 2)), maps.Residual(neurons))
    mean = MixTokens(torch.full((1, 5), 0.2, dtype=D))
    return Vision(
        drawn(g, pixels, WIDE) / pixels**0.5,
        drawn(g, WIDE),
        drawn(g, WIDE),
        drawn(g, 5, WIDE),
        maps.Compose((*body, mean)),
        maps.Affine(drawn(g, WIDE, 3), drawn(g, 3)),
        PATCH,
    )


def box(seed, far):
    g = generator(100 + seed)
    picture, radius = drawn(g, 3, 32, 32), far * torch.rand(3, 32, 32, generator=g, dtype=D)
    return picture - radius, picture + radius


def test_the_image_of_a_box_lies_in_its_ellipsoid_and_reaches_are_attained():
    g = generator(1)
    columns = drawn(g, WIDE, 40)
    factor, inside = _whitened(columns)
    assert torch.allclose(factor @ inside, columns, rtol=1e-9, atol=1e-9)
    part, a = ImagePart(WIDE, inside), drawn(g, WIDE)
    corner = (a @ inside).sign()
    assert float(part.reach(a)) == pytest.approx(float(a @ inside @ corner), rel=1e-9)
    corners = (torch.rand(4000, 40, generator=g, dtype=D) > 0.5).double() * 2 - 1
    lengths = (corners @ inside.mT).norm(dim=-1)
    assert 0.5 < float(lengths.max()) <= 1  # an ellipsoid that is not far too large


@pytest.mark.parametrize("seed", range(4))
def test_pictures_of_a_box_are_in_the_state(seed):
    """Every token is c + Au but for rounding."""
    network, (low, high) = vision(seed), box(seed, 0.05)
    state = begin(network, low, high)
    g = generator(seed)
    for _ in range(20):
        t = (torch.rand(low.shape, generator=g, dtype=D) > 0.5).double() * 2 - 1
        moved = network.tokens((low + high) / 2 + t * (high - low) / 2) - state.center
        parts = zip(network.patches(t), state.inputs.parts, state.inputs.shares, strict=True)
        u = torch.cat([share * (part.columns @ one) for one, part, share in parts])
        assert float(u.norm()) <= 1
        left = (moved - state.linear @ u).norm(dim=-1)
        assert bool((left <= longest(state.shape).bound).all())


@pytest.mark.parametrize("far", [0.003, 0.03])
@pytest.mark.parametrize("seed", range(4))
def test_no_corner_that_an_attack_finds_is_below_what_is_proved(seed, far):
    network, (low, high) = vision(seed), box(seed, far)
    label = int(network.logits((low + high) / 2).argmax())
    proved = margin(network, begin(network, low, high), label)
    x, seen = (low + high) / 2, []
    for _ in range(15):
        leaf = x.detach().requires_grad_()
        logits = network.logits(leaf)
        lead = logits[label] - torch.cat([logits[:label], logits[label + 1 :]]).max()
        seen.append(float(lead.detach()))
        (slope,) = torch.autograd.grad(lead, leaf)
        x = torch.where(slope > 0, low, high)
    assert proved <= min(seen)
    if far < 0.01:  # and it is worth something
        assert seen[0] - proved < 3 * (seen[0] - min(seen))


def test_a_picture_is_read_with_its_label(tmp_path):
    lines = [f"(assert (<= X_{k} {k + 0.5}))\n(assert (>= X_{k} {k - 0.5}))" for k in range(3 * 32 * 32)]
    rivals = "(assert (or\n    (and (>= Y_0 Y_2))\n    (and (>= Y_1 Y_2))\n))"
    path = tmp_path / "one.vnnlib.gz"
    path.write_bytes(gzip.compress("\n".join([*lines, rivals]).encode()))
    low, high, label = read_picture(path)
    assert label == 2
    assert float(low[0, 1, 0]) == 31.5
    assert float(high[2, 31, 31]) == 3071.5
    path.write_bytes(gzip.compress(b"(assert (or (and (>= Y_0 Y_2)) (and (>= Y_0 Y_1))))"))
    with pytest.raises(ValueError, match="2 labels"):
        read_picture(path)
