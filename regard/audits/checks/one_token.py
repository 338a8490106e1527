"""One token moves: how far the output of an attention layer can go, proved,
beside the worst that an attack finds.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard._round import EPS, up
from regard.audits.checks.base import (
    LAYER,
    PROVED,
    SEARCHED,
    Check,
    Column,
    Cost,
    Limit,
    Measurable,
    Result,
    Scene,
    as_list,
    provable,
    register,
    too_long,
)
from regard.audits.site import Site
from regard.domains import one_token
from regard.norms import Frobenius
from regard.proofs import deviation
from regard.proofs.scores import bilinear

SHARES = (0.001, 0.01, 0.1, 1.0)
"""How far the token moves, relative to its norm."""
SHOWN = 0.01
"""The entry of SHARES that the columns of the report show."""
DEEP = 6
"""From which attention layer on the other shares are left out: each takes seconds in a wide model."""
INPUTS = 1
"""On how many of the inputs deviations are certified and attacked."""
LONGEST = Limit(256, 2048, Cost("for a layer of twelve heads", 2048, 58.0, 4.0))
"""Up to how many tokens: the other rows are looked at one by one, each in the width of a token squared,
which then takes minutes.
"""
NUMBERS = 40_000_000
"""How many numbers the matrices of all heads may hold,
or the slopes of all scores where they differ from pair to pair.
"""
STEPS = 18
"""Steps of gradient ascent of the attack."""


def word_deviation(scene: Scene, place: Measurable) -> Result:
    """The certified deviation for each share, and the attack."""
    site = provable(scene, place, INPUTS)
    if site is None:
        return Result()
    reason = _too_large(scene, site)
    if reason:
        return Result(reason=reason)
    token, direction = _strongest(scene, site)
    norm = float(site.points[token].norm())
    shares = SHARES if site.layer < DEEP else (SHOWN,)
    found = attack(site, token, direction, norm * torch.tensor(shares, dtype=torch.float64))
    entries, numbers = [], {}
    for share, seen in zip(shares, found, strict=True):
        proved = deviation(site.map, one_token(site.source, token, share * norm), Frobenius())
        entries.append({"share": share, "proved": proved.value, "found": seen, "theorem": proved.theorem})
        if share == SHOWN and norm > 0:
            numbers = {
                "word_deviation": up(proved.value / (share * norm)),
                "word_attack": seen / (share * norm),
            }
    return Result(numbers, {"token": token, "norm": norm, "moves": entries})


def _too_large(scene: Scene, site: Site) -> str:
    """Why nothing is proved, or nothing where it can be."""
    what, (tokens, width) = "nothing is proved about one token that moves", site.points.shape
    if site.heads * width**2 > NUMBERS:
        size = 8 * site.heads * width**2 / 2**30
        return (
            f"{what}: the matrices of {site.heads} heads on tokens of width {width} would take {size:.2g} GiB"
        )
    one_form = bilinear.one(site.singles[0].potential, width) is not None
    return too_long(
        scene,
        tokens,
        LONGEST if one_form else LONGEST.at_most(math.isqrt(NUMBERS // (site.heads * width))),
        what,
    )


def attack(site: Site, token: int, direction: Tensor, radii: Tensor) -> list[float]:
    """The farthest that the output is seen to go when the token moves by each radius: uphill, for all radii
    together.

    A step is to where the gradient points on the sphere, or a part of the way where that is not uphill.
    """
    only = torch.zeros_like(site.points[:, :1])
    only[token] = 1.0
    here, radii = site.joined(site.points), radii.unsqueeze(-1)

    def climb(moves: Tensor) -> tuple[Tensor, Tensor]:
        leaf = moves.detach().requires_grad_()
        heights = (
            (site.joined(site.points + only * leaf[:, None, None, :]) - here)
            .flatten(1)
            .norm(dim=-1, keepdim=True)
        )
        (uphill,) = torch.autograd.grad(heights.sum(), leaf)
        return heights.detach(), uphill / uphill.norm(dim=-1, keepdim=True).clamp_min(1e-300)

    moves, rate = radii * direction, torch.ones_like(radii)
    best, uphill = climb(moves)
    for _ in range(STEPS):
        other = moves + rate * (radii * uphill - moves)
        height, next_uphill = climb(other)
        higher = height > best
        moves, best, uphill = (
            torch.where(higher, a, b) for a, b in ((other, moves), (height, best), (next_uphill, uphill))
        )
        rate = torch.where(higher, (2 * rate).clamp(max=1.0), rate / 2)
    rounding = 8 * EPS * float(here.abs().max()) * math.sqrt(here.numel())  # what is seen must not rest on it
    return as_list((best - rounding).clamp_min(0.0))


def _strongest(scene: Scene, site: Site) -> tuple[int, Tensor]:
    """The token whose moves change the output of the layer most, and the direction of that move, from a
    few random directions of the output.
    """
    jacobian = site.jacobian()
    generator = scene.generator(site.layer)
    drawn = (torch.randn(jacobian.shape_out, generator=generator, dtype=torch.float64) for _ in range(8))
    pulled = torch.stack([jacobian.rmv(one) for one in drawn])
    token = int(pulled.square().sum((0, 2)).argmax())
    return token, torch.linalg.svd(pulled[:, token], full_matrices=False)[2][0]


register(
    Check(
        "one-token",
        "How far can the output of a layer go when one token moves?",
        (
            Column(
                "word_deviation",
                "one token moves 1 %: proved",
                "A certificate: when the token that the layer listens to most moves by 1 % "
                "of its norm, in any direction, "
                "the output of the layer moves by no more than this many times as far (Frobenius norm). "
                "Computed for the first "
                f"input, if it has at most {LONGEST}.",
                PROVED,
                LAYER,
                True,
                beside="word_attack",
            ),
            Column(
                "word_attack",
                "one token moves 1 %: found",
                "How many times as far as the token an attack by gradient ascent moved the output, for the "
                "same moves of the same "
                "token. The truth is between this and what is proved.",
                SEARCHED,
                LAYER,
                None,
            ),
        ),
        of_site=word_deviation,
        order=50,
    )
)
