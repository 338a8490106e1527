"""How far each word may move before the answer changes: proved, attacked, and typo by typo."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

from regard.decisions.asked import EMBEDDING, NEXT, Asked
from regard.decisions.budget import Spent, budget
from regard.decisions.kept import Kept
from regard.domains import one_token
from regard.proofs import certified_cosine, certified_radius
from regard.proofs.decision_attack import lead

BATCH = 256
SHOWN = 6
"""How many typos that change the answer are named."""

Watched = Callable[[list[int]], Iterable[int]]
"""Places, one after another, with a bar beside them."""


@dataclass(frozen=True)
class Typos:
    """All words that are one letter away, each run: how many there are, how many change the answer, and some
    of those with what the answer becomes.
    """

    count: int
    changed: int
    examples: list[tuple[str, str]]


@dataclass(frozen=True)
class WordAnswer:
    """place: of the token; length: of its vector. proved, attack: relative to it, up to where nothing changes
    the answer, and the shortest change that was found; for embeddings the cosine that is proved, and the
    smallest that was found. reason: why nothing is proved.

    Examples:
        >>> from regard.decisions import WordAnswer
        >>> dull = WordAnswer(place=1, word="dull", length=2.0, proved=0.12, attack=0.15)
        >>> dull.proved <= dull.attack  # the truth is between the two
        True
    """

    place: int
    word: str
    length: float
    proved: float
    attack: float
    reason: str = ""
    typos: Typos | None = None


@dataclass(frozen=True)
class Answers:
    """Everything that was found about one text; radius: of embeddings, relative to a token.

    Examples:
        >>> from regard.decisions import Answers, WordAnswer
        >>> dull = WordAnswer(place=1, word="dull", length=2.0, proved=0.12, attack=0.15)
        >>> found = Answers("classes", "a model", "dull", "negative", 3.0, 0.001, [dull], ["dull"])
        >>> found.sentences()[0][:60]
        'One word cannot change the answer “negative” if it moves by '
    """

    kind: str
    model: str
    text: str
    label: str
    margin: float
    radius: float
    words: list[WordAnswer]
    tokens: list[str]
    spent: list[Spent] = field(default_factory=list)

    @property
    def weakest(self) -> WordAnswer:
        """The word about which the least is proved."""
        return min(self.words, key=lambda one: one.proved)

    @property
    def attacked(self) -> WordAnswer:
        """The word whose shortest change, or smallest cosine, is the least."""
        return min(self.words, key=lambda one: one.attack)

    def sentences(self) -> list[str]:
        """What was found, in words."""
        proved, found = self.weakest, self.attacked
        least, seen = shown_proved(self, proved), f"attack: {shown_attack(self, found)} at “{found.word}”"
        if self.kind == EMBEDDING:
            moved = f"If one word moves by {percent(self.radius)} of its length, "
            if proved.reason:
                told = f"nothing is proved about the cosine to the original at “{proved.word}”"
                return [f"{moved}{told}: {proved.reason} ({seen})."]
            return [f"{moved}the cosine to the original stays above {least} (proved; {seen})."]
        lines = [
            f"One word cannot change the answer “{self.label}” if it moves by at most {least} of its length "
            f"(proved, least at “{proved.word}”; {seen})."
        ]
        typed = [one.typos for one in self.words if one.typos is not None]
        if typed:
            count, changed = sum(one.count for one in typed), sum(one.changed for one in typed)
            said = ("none changes", "1 changes")[changed] if changed < 2 else f"{changed} change"
            lines.append(f"All {count} typos of one letter were run: {said} it.")
        return lines

    def written(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        found = asdict(self)
        return {**found, "sentences": self.sentences()}


def shown_proved(found: Answers, one: WordAnswer) -> str:
    """What is proved of a word as people read it, never more than it is."""
    if found.kind == EMBEDDING:
        return "open" if one.reason else f"{math.floor(one.proved * 1e6) / 1e6:.6f}"
    return percent(one.proved)


def shown_attack(found: Answers, one: WordAnswer) -> str:
    """What an attack found, never less than it is."""
    if found.kind == EMBEDDING:
        return f"{math.ceil(one.attack * 1e6) / 1e6:.6f}"
    return percent(one.attack, up=True)


def percent(value: float, up: bool = False) -> str:
    """Rounded to three digits, down or up."""
    if not math.isfinite(value) or value <= 0:
        return "no change that was found" if value > 0 else "0 %"
    unit = 10.0 ** (math.floor(math.log10(value * 100)) - 2)
    rounded = (math.ceil if up else math.floor)(value * 100 / unit * (1 - 1e-15 if up else 1.0)) * unit
    return f"{rounded:,.0f} %" if rounded >= 1000 else f"{rounded:.3g} %"


def answers(
    asked: Asked,
    watched: Watched = iter,
    *,
    radius: float = 1e-3,
    resolution: float = 1.04,
    kept: Kept | None = None,
) -> Answers:
    """Each word of a text; kept: where answers are written down, and those of an earlier run are found.

    Examples:
        >>> from regard.decisions import Asked, answers
        >>> from regard.maps import Affine, Compose
        >>> from regard.nonexpansive import Pool
        >>> eye, x = torch.eye(2, dtype=torch.float64), torch.tensor([[1.0, 0.0], [1.0, 0.0]]).double()
        >>> readout = Compose((Pool(), Affine(eye)))
        >>> asked = Asked("classes", "a model", "a b", ["a", "b"], [0], x, Affine(eye), readout, str)
        >>> (word,) = answers(asked, resolution=4.0).words
        >>> 0 < word.proved <= word.attack
        True
    """
    label, margin = _label(asked)

    def answered(place: int) -> WordAnswer:
        known = None if kept is None else kept.get(place)
        if known is not None:
            return known
        found = _word(asked, place, label, radius, resolution)
        return found if kept is None else kept.put(found)

    words = [answered(place) for place in watched(asked.moving)]
    spent = _spent(asked, words, radius)
    name = "" if asked.kind == EMBEDDING else asked.names(label)
    return Answers(asked.kind, asked.name, asked.text, name, margin, radius, words, asked.words, spent)


def _label(asked: Asked) -> tuple[int, float]:
    if asked.kind == EMBEDDING:
        return 0, 0.0
    from regard.proofs.classifier import classifier

    logits = classifier(asked.model, asked.x, asked.readout).run(asked.x).double()
    label = int(logits.argmax(-1))
    return label, float(lead(logits, (label,)))


def _word(asked: Asked, place: int, label: int, radius: float, resolution: float) -> WordAnswer:
    length, word = float(asked.x[place].norm()), asked.words[place]
    if asked.kind == EMBEDDING:
        found = certified_cosine(asked.model, asked.x, one_token(asked.x, place, radius * length))
        return WordAnswer(place, word, length, found.cosine, found.attack.value, found.reason)
    far = certified_radius(asked.model, asked.x, place, readout=asked.readout, resolution=resolution)
    proved, attack = float(far.value) / length, float(far.attack) / length
    return WordAnswer(place, word, length, proved, attack, "", _typos(asked, place, label))


def _typos(asked: Asked, place: int, label: int) -> Typos | None:
    """Every typo of a word, run."""
    if asked.logits is None or asked.typos is None or asked.kind == NEXT:
        return None
    others, words, changed = asked.typos(asked.words[place]), asked.words[1:], list[tuple[str, str]]()
    for k in range(0, len(others), BATCH):
        group = others[k : k + BATCH]
        with torch.no_grad():
            logits = asked.logits([[*words[: place - 1], one, *words[place:]] for one in group])
        best = logits.argmax(-1).tolist()
        changed += [(one, asked.names(k)) for one, k in zip(group, best, strict=True) if k != label]
    return Typos(len(others), len(changed), changed[:SHOWN])


def _spent(asked: Asked, words: list[WordAnswer], radius: float) -> list[Spent]:
    """The depth curve, where the word about which the least is proved moves so far."""
    weakest = min(words, key=lambda one: one.proved)
    far = radius if asked.kind == EMBEDDING else weakest.proved
    if not far > 0:
        return []
    return budget(asked.model, asked.x, one_token(asked.x, weakest.place, far * weakest.length))
