"""One word moves: how far the output of an attention layer can go, proved, beside the worst that an attack finds."""

from __future__ import annotations

import torch

from regard.audit.checks.base import ESTIMATED, LAYER, PROVED, Check, Column, Result, Scene, register
from regard.audit.site import Site
from regard.certify import deviation, falsify_deviation
from regard.derive import linearize
from regard.domains import one_token
from regard.errors import ArgumentError
from regard.norms import Frobenius

SHARES = (0.001, 0.01, 0.1, 1.0)
"""How far the word moves, relative to the norm of its token."""
INPUTS = 1
"""On how many inputs."""
LONGEST = 64
"""Up to how many tokens: bounds near an input keep a vector for each pair of tokens."""


def moved_word(scene: Scene, site: Site) -> Result:
    """The certified deviation for each share, and the attack."""
    if scene.index >= INPUTS:
        return Result()
    if site.context is not None:
        raise ArgumentError("site", "is cross-attention", "its constants are in the column of the layer")
    if site.blind:
        raise ArgumentError("inputs", f"{scene.index + 1} has tokens that see no key", "give the text without padding")
    if len(site.points) > LONGEST:
        found = f"{scene.index + 1} has {len(site.points)} tokens"
        raise ArgumentError("inputs", found, f"give a text of at most {LONGEST} tokens: memory grows as n²d")
    token = _strongest(scene, site)
    norm = float(site.points[token].norm())
    entries = []
    for share in SHARES:
        near = one_token(site.source, token, share * norm)
        proved = deviation(site.map, near, Frobenius())
        seen = falsify_deviation(site.map, near, Frobenius(), restarts=1, steps=15, generator=scene.generator(site.layer))
        entries.append({"share": share, "proved": proved.value, "found": seen.value, "theorem": proved.theorem})
    numbers = {"word_deviation": entries[1]["proved"], "word_attack": entries[1]["found"]}
    return Result(numbers, {"token": token, "norm": norm, "moves": entries})


def _strongest(scene: Scene, site: Site) -> int:
    """The token whose moves the layer hears most, from a few random directions of the output."""
    jacobian = linearize(site.joined, site.points)
    generator = scene.generator(site.layer)
    pulled = [jacobian.rmv(torch.randn(jacobian.shape_out, generator=generator, dtype=torch.float64)) for _ in range(8)]
    return int(torch.stack(pulled).square().sum((0, 2)).argmax())


register(
    Check(
        "deviation",
        "How far can the output of a layer go when one word moves?",
        (
            Column(
                "word_deviation",
                "one word moves 1 %: proved",
                "A certificate: when the token that the layer hears most moves by 1 % of its norm, in any direction, "
                "the output of the layer moves by no more than this (Frobenius norm).",
                PROVED,
                LAYER,
                True,
            ),
            Column(
                "word_attack",
                "one word moves 1 %: found",
                "The farthest that an attack by gradient ascent moved the output, for the same moves of the same token. "
                "The truth is between this and what is proved.",
                ESTIMATED,
                LAYER,
                None,
            ),
        ),
        of_site=moved_word,
        order=50,
    )
)
