"""Edits: one word more, one word less, a typo; how far the attention of the other tokens moves."""

from __future__ import annotations

import inspect
import math
from typing import Any

import torch
from torch import Tensor

from regard._enclosed import lengths
from regard._heads import mix_heads
from regard.audits.capture import entering
from regard.audits.changes import typo
from regard.audits.checks.base import (
    LAYER,
    PROVED,
    RUN,
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
from regard.audits.inputs import longest
from regard.audits.site import Site
from regard.domains import Edited, Radii, Vocabulary
from regard.errors import ArgumentError
from regard.maps import Heads
from regard.normalizers import Softmax
from regard.norms import TokenSum
from regard.parameters import walk
from regard.potentials import Potential
from regard.proofs.certification import deviation
from regard.supports import Full

INPUTS = Limit(3, 1_000_000)
"""On how many inputs."""
LONGEST = Limit(128, 512, Cost("for a first layer of twelve heads and 30,522 words", 512, 70.0, 0.5))
"""Up to how many tokens: laws of all rows of all heads are held, and in the first layer every word is tried
on every token; another layer takes a second.
"""
IN_PLACE = 128
"""Up to how many tokens it is proved what typos do that move each token in its place: 40 s and 2.2 GB for a
word there, and four times the memory for twice the tokens.
"""
MISSPELLED = Limit(1, 1_000_000)
"""On how many inputs words are put in and misspelled."""
TYPOS = 4
"""How many words of the first input are misspelled."""
ROOM = 4_000_000
"""Numbers that one block of words may take."""


def edits(scene: Scene, site: Measurable) -> Result:
    """A token less in every layer; any word more, and typos, in the first layer on the first input (of a
    thorough audit on all).
    """
    declared = provable(scene, site, INPUTS.of(scene))
    if declared is None:
        return Result()
    reason = too_long(scene, len(declared.points), LONGEST, "edits are left out")
    if reason:
        return Result(reason=reason)
    if not isinstance(declared.attention.normalizer, Softmax):
        name = type(declared.attention.normalizer).__name__
        raise ArgumentError(
            "site", f"has rows of {name}", "leaving a token out is understood for softmax rows only"
        )
    size = float(mix_heads(declared.value(), declared.w_o).norm(dim=-1).mean())
    gone = deletions(declared)
    numbers: dict[str, Any] = {"deleted": _part(gone, size)}
    table: dict[str, Any] = {"size": size, "deleted": as_list(gone.nan_to_num().mean(0))}
    if scene.index < MISSPELLED.of(scene) and declared.layer == 0:
        try:
            more = _first_layer(scene, declared, size)
        except ArgumentError as refusal:
            why = f"inserting a token was not tried: the {refusal.argument} {refusal.found}; {refusal.remedy}"
            return Result(numbers, table, why)
        numbers, table = {**numbers, **more[0]}, {**table, **more[1]}
    return Result(numbers, table)


def deletions(site: Site) -> Tensor:
    """|Δ_i| (n, n) where token j is left out and the others stay where they are; nan of j itself, and where a
    token sees no other.

    Δ_i = Σ_h P_ij / (1 - P_ij) (o_i - v_j). The heaviest token of a row may leave no digits beside it, so
    the row is run without it.
    """
    mixed = _values(site, site.points) @ site.w_o
    scores = (site.scores / _temperature(site)).masked_fill(~site.allowed, -math.inf)
    laws = scores.softmax(-1)
    means, top = laws @ mixed, laws.argmax(-1, keepdim=True)
    without = scores.scatter(-1, top, -math.inf).softmax(-1) @ mixed - means
    odds = (laws / (1 - laws)).scatter(-1, top, 0.0)
    found = torch.empty_like(odds[0])
    for rows in torch.arange(len(found)).split(max(1, ROOM // mixed[0].numel())):
        moves = torch.einsum("hij,hid->ijd", odds[:, rows], means[:, rows])
        moves -= torch.einsum("hij,hjd->ijd", odds[:, rows], mixed)
        for head, heaviest in zip(without[:, rows], top[:, rows, 0], strict=True):
            moves[torch.arange(len(rows)), heaviest] += head
        found[rows] = moves.norm(dim=-1)
    return found.fill_diagonal_(math.nan)


def _part(moves: Tensor, size: float) -> float:
    """The largest, in lengths of a mean output."""
    known = moves[moves.isfinite()]
    return float(known.max()) / size if len(known) and size > 0 else math.nan


# The first layer


def _first_layer(scene: Scene, site: Site, size: float) -> tuple[dict[str, float], dict[str, Any]]:
    embed = Embedding(scene, site)
    if len(embed.ids) >= longest(scene.model, None):
        raise ArgumentError("text", "has as many tokens as the model takes", "give a shorter first text")
    moves, words = insertions(embed, site)
    numbers = {"inserted": _part(moves, size)}
    worst = int(words[int(moves.argmax())])
    found = misspelled(embed, scene, site)
    if found:
        numbers["typo_certified"] = max(one["certified"] for one in found) / size
        numbers["typo_moved"] = max(one["moved"] for one in found) / size
    return numbers, {"inserted": as_list(moves), "worst": worst, "typos": found}


class Embedding:
    """Tokens of words at positions, as they enter the first layer."""

    def __init__(self, scene: Scene, site: Site) -> None:
        ids = scene.options.get("input_ids")
        takes = inspect.signature(scene.model.forward).parameters
        table = getattr(scene.model, "get_input_embeddings", lambda: None)()
        if not isinstance(ids, Tensor) or "position_ids" not in takes or table is None:
            found = "takes no input_ids with position_ids"
            raise ArgumentError("model", found, "words at positions are embedded by these")
        if not isinstance(site.attention.support, Full) or not isinstance(site.map, Heads):
            raise ArgumentError("layer", "has a mask", "this is done only where every token sees every other")
        if any(part.positional for part in walk(site.attention.potential) if isinstance(part, Potential)):
            raise ArgumentError("layer", "has positions in its scores", "an inserted token would shift them")
        self.scene, self.path, self.ids = scene, site.path, ids[0]
        self.vocabulary = int(table.weight.shape[0])
        here = self(self.ids, torch.arange(len(self.ids)))
        if not torch.allclose(here, site.points, rtol=1e-4, atol=1e-5):
            raise ArgumentError("model", "counts positions in its own way", "inserting a token is not tried")

    def __call__(self, ids: Tensor, positions: Tensor) -> Tensor:
        """(n, d) in float64."""
        options = {"input_ids": ids.unsqueeze(0), "position_ids": positions.unsqueeze(0)}
        return entering(self.scene.model, options, self.path).detach().double().cpu()


def insertions(embed: Embedding, site: Site) -> tuple[Tensor, Tensor]:
    """For each token the farthest that one word of the embedding table moves it, and that word: every word
    is tried, all heads together, before the last token, which shifts by one place.
    """
    count = len(embed.ids)
    places = torch.arange(count)
    places[-1] += 1
    rows = Joining(site, embed(embed.ids, places))
    words = torch.arange(embed.vocabulary)
    best = torch.zeros(count, dtype=torch.float64)
    found = torch.zeros(count, dtype=torch.long)
    size = max(1, ROOM // (count * site.w_o.shape[-1]))
    for block in words.split(size):
        moves = rows.moved(embed(block, torch.full_like(block, count - 1)))
        most, which = moves.max(-1)
        found = torch.where(most > best, block[which], found)
        best = torch.maximum(best, most)
    return best, found


class Joining:
    """Rows over the tokens as they are afterwards, (h, n), and what a word that joins does to them:
    δ_i + Σ_h σ(s_i(y) - lse_i) (V(y) - u_i).
    """

    def __init__(self, site: Site, after: Tensor) -> None:
        self.site, self.after = site, after
        scores = self._scores(after)
        self.log_sums = scores.logsumexp(-1)
        self.means = scores.softmax(-1) @ self._values(after)
        self.shift = self.means.sum(0) - mix_heads(site.value(), site.w_o)

    def moved(self, words: Tensor) -> Tensor:
        """|Δ_i| (n, N) for every word."""
        weights = (self._scores(words) - self.log_sums.unsqueeze(-1)).sigmoid()
        joined = torch.einsum("hnw,hwd->nwd", weights, self._values(words))
        left = torch.einsum("hnw,hnd->nwd", weights, self.means)
        return (self.shift.unsqueeze(1) + joined - left).norm(dim=-1)

    def _scores(self, keys: Tensor) -> Tensor:
        nowhere = torch.arange(len(self.after)), torch.arange(len(keys))
        scores = self.site.attention.potential.scores(self.after, keys, *nowhere)
        return scores / _temperature(self.site)

    def _values(self, keys: Tensor) -> Tensor:
        return _values(self.site, keys) @ self.site.w_o


def misspelled(embed: Embedding, scene: Scene, site: Site) -> list[dict[str, Any]]:
    """Real typos of the first words: the mean move of the tokens that stay, and the best that is proved of
    it, with the name of the theorem.
    """
    found: list[dict[str, Any]] = []
    reading, encode = scene.reading, scene.encode
    if reading is None or encode is None:
        return found
    for word in reading.units:
        other = typo(reading, word)
        if other is None or len(found) == TYPOS:
            continue
        ids = encode(other)["input_ids"][0]
        edit = Rewritten(embed, site, ids)
        theorem, certified = edit.proved()
        found.append(
            {
                "word": reading.letters(word),
                "text": other,
                "certified": certified,
                "moved": edit.moved(),
                "theorem": theorem,
            }
        )
    return found


class Rewritten:
    """A text beside another: what is between a common beginning and a common end goes and comes."""

    def __init__(self, embed: Embedding, site: Site, ids: Tensor) -> None:
        old, new = embed.ids.tolist(), ids.tolist()
        least = min(len(old), len(new))
        head = next((k for k in range(least) if old[k] != new[k]), least)
        tail = next((k for k in range(least - head) if old[-1 - k] != new[-1 - k]), least - head)
        self.site, self.tokens = site, embed(ids, torch.arange(len(ids)))
        self.gone = tuple(range(head, len(old) - tail))
        self.come = self.tokens[head : len(new) - tail]
        self.stays = [k for k in range(len(old)) if k not in self.gone]
        self.now = [*range(head), *range(len(new) - tail, len(new))]

    def moved(self) -> float:
        """The mean move of the tokens that stay, as it is."""
        before, after = (
            self.site.joined(self.site.points)[self.stays],
            self.site.joined(self.tokens)[self.now],
        )
        return float((after - before).norm(dim=-1).mean())

    def proved(self) -> tuple[str, float]:
        """The smaller of what is proved of tokens that come and go, and of tokens that move, each in its
        place. All laws as near say far less of a trained layer, and take seconds each.
        """
        map, norm, points = self.site.map, TokenSum(), self.site.points
        place = Vocabulary(self.come) if len(self.come) else None
        edited = Edited(points, self.gone, len(self.come), place, self.tokens[self.now])
        found = {"tokens that come and go": deviation(map, edited, norm).value / len(self.stays)}
        if self.tokens.shape == points.shape and len(points) <= IN_PLACE:
            radii = lengths(self.tokens - points, 1).bound
            near = deviation(map, Radii(points, radii), norm).value
            found["tokens that move, each in its place"] = near / len(self.stays)
        name = min(found, key=lambda key: found[key])
        return name, found[name] * (1 + 1e-15)


def _temperature(site: Site) -> float:
    assert isinstance(site.attention.normalizer, Softmax)
    return float(site.attention.normalizer.temperature)


def _values(site: Site, tokens: Tensor) -> Tensor:
    """Of each head before it is mixed, (h, n, e)."""
    found = site.attention.lookup.values(tokens, torch.arange(len(tokens)))
    found = found if found.ndim > 2 else found.unsqueeze(0)
    return found.repeat_interleave(site.heads // len(found), 0)


register(
    Check(
        "edits",
        "What does adding or removing one token do to the others?",
        (
            Column(
                "deleted",
                "a token is left out: others move by",
                "How far the attention output of another token moves when one token is left out of the "
                "layer's input and all others stay where they are, in lengths of a mean output; the largest "
                f"over all pairs, each run. "
                f"Measured on the first {INPUTS.usual} inputs (all of them in a thorough audit).",
                RUN,
                LAYER,
                True,
            ),
            Column(
                "inserted",
                "any token is inserted: others move by",
                "The same when one token is inserted before the last one, which shifts: the largest over "
                "all entries of the embedding table, each of them run. The first layer, on the first input, "
                "where all tokens see each other.",
                RUN,
                LAYER,
                True,
            ),
            Column(
                "typo_certified",
                "typos: proved",
                "Two letters change places, their word becomes other tokens, and the rest shifts: the mean "
                "move of the tokens that stay is at most this, in lengths of a mean output, for the worst "
                f"of {TYPOS} typos. The table says by which theorem.",
                PROVED,
                LAYER,
                True,
                beside="typo_moved",
            ),
            Column(
                "typo_moved",
                "typos: what they did",
                "The same, as it actually happened.",
                RUN,
                LAYER,
                None,
            ),
        ),
        of_site=edits,
        order=55,
    )
)
