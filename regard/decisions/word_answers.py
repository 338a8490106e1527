"""What changes the answer to a text: typos, each run, and small moves of one token, proved and attacked."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from regard._written import number, plain
from regard.audits.outputs import CLASSES, EMBEDDING, NEXT
from regard.audits.store import Store
from regard.decisions.asked import Asked
from regard.decisions.budget import Spent, budget
from regard.decisions.pairs import PairAnswer
from regard.decisions.typo_runs import Typos, run_typos, typos_from
from regard.decisions.typos import misspellings
from regard.domains import one_token
from regard.proofs import certified_cosine, certified_radius
from regard.proofs.decision_attack import lead

LEVEL = 0.9
"""A typo that takes the cosine below this changes an embedding, unless another level is given."""
QUESTIONS = {
    CLASSES: "Could a typo change this answer?",
    NEXT: "Could a typo change the next token?",
    EMBEDDING: "Could a typo change this embedding?",
}

Progress = Callable[[str, int, int], None]
"""Called with what is done now, how much is done, and how much there is."""


@dataclass(frozen=True)
class WordAnswer:
    """What is proved about one token, and what an attack found.

    place: of the token; length: of its vector. proved, attack: relative to it, the radius within which the
    answer certainly stays, and the shortest change that was found to change it; for embeddings the lower
    bound on the cosine, and the smallest cosine that was found. reason: why nothing is proved. nearest:
    the nearest other word in this place, and distance: of its vector, relative too.

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
    nearest: str = ""
    distance: float = math.nan


@dataclass(frozen=True)
class Answers:
    """Everything that was found about one text.

    typos: of each word, run; None where the model was given without texts. words: of each token, proved and
    attacked. radius: how far a token of an embedding moves, relative to its length; level: below which cosine
    an embedding counts as changed. refused: why nothing is proved. unit: what the text is made of, words or
    tokens. pairs: changes of the user's own, run; text is empty where only they are. source: tells the model
    from others of its name.

    Examples:
        >>> from regard.decisions import Answers, Typos, WordAnswer
        >>> typos = [Typos("dull", 0, count=233, changed=2, examples=[("dulb", "positive")])]
        >>> dull = WordAnswer(place=1, word="dull", length=2.0, proved=0.12, attack=0.15)
        >>> found = Answers("classes", "a model", "dull", "negative", 3.0, typos, [dull])
        >>> found.sentences()[0]
        'Yes: 2 of 233 one-letter typos change the answer “negative”.'
    """

    kind: str
    model: str
    text: str
    label: str
    margin: float
    typos: list[Typos] | None
    words: list[WordAnswer]
    spent: list[Spent] = field(default_factory=list)
    radius: float = 1e-3
    level: float = LEVEL
    refused: str = ""
    unit: str = "word"
    pairs: list[PairAnswer] = field(default_factory=list)
    source: str = ""

    @property
    def question(self) -> str:
        """What the first sentence answers."""
        return QUESTIONS[self.kind] if self.text else "Which of these pairs have different answers?"

    @property
    def measure(self) -> str:
        """What is compared of two texts, as the head of a column."""
        return {CLASSES: "answer", NEXT: "next token", EMBEDDING: "cosine"}[self.kind]

    @property
    def effect(self) -> str:
        """What is counted of typos, as the head of a column."""
        return f"cosine below {self.level:g}" if self.kind == EMBEDDING else "change it"

    @property
    def weakest(self) -> WordAnswer:
        """The token about which the least is proved."""
        return min(self.words, key=lambda one: one.proved)

    @property
    def attacked(self) -> WordAnswer:
        """The token whose shortest change, or smallest cosine, is the least."""
        return min(self.words, key=lambda one: one.attack)

    def sentences(self) -> list[str]:
        """What was found, in words: the typos that were run, then what is proved."""
        ran = [self._compared()] if self.pairs else []
        ran += [] if self.typos is None else [self._ran(self.typos)]
        if self.refused:
            return [*ran, f"Nothing is proved: {self.refused}."]
        return [*ran, f"{self._proved()} {self._beyond()}"] if self.words else ran

    def _ran(self, typos: list[Typos]) -> str:
        count, changed = sum(one.count for one in typos), sum(one.changed for one in typos)
        if not count:
            words = "word of the text consists of letters alone"
            tokens = "token of the text has a typo that the tokenizer knows"
            return f"No typo was run: no {words if self.unit == 'word' else tokens}."
        many = f"Yes: {changed:,}" if changed else "None"
        said = f"{many} of {count:,} one-letter typos {self._did('' if changed > 1 else 's')}"
        if self.kind == EMBEDDING:
            worst = min(typos, key=lambda one: one.examples[0][1])
            typo, cosine = worst.examples[0]
            return f"{said}; the lowest is {cosine:.3f}, with “{typo}” for “{worst.word}”."
        most = max(typos, key=lambda one: one.changed)
        where = f", most often in “{most.word}” ({most.changed} of {most.count})"
        return f"{said}{where if changed > 1 and len(typos) > 1 else ''}."

    def _compared(self) -> str:
        count = sum(one.differs for one in self.pairs)
        said = f"{count} of {len(self.pairs)} pairs {'changes' if count == 1 else 'change'}"
        if self.kind == EMBEDDING:
            worst = min(self.pairs, key=lambda one: one.cosine)
            took = f"{count} of {len(self.pairs)} pairs {'has' if count == 1 else 'have'} a cosine"
            return f"{took} below {self.level:g}; the lowest is {worst.cosine:.3f}, with “{worst.changed}”."
        return f"{said} the {'answer' if self.kind == CLASSES else 'next token'}."

    def _did(self, s: str) -> str:
        if self.kind == EMBEDDING:
            return f"take{s} {self._answer} below {self.level:g}"
        return f"change{s} {self._answer}"

    @property
    def _answer(self) -> str:
        if self.kind == EMBEDDING:
            return "the cosine to the original"
        return f"the {'answer' if self.kind == CLASSES else 'next token'} “{self.label}”"

    def _proved(self) -> str:
        weakest, found = self.weakest, self.attacked
        least, seen = shown_proved(self, weakest), f"attack: {shown_attack(self, found)} at “{found.word}”"
        if weakest.reason or (self.kind != EMBEDDING and not weakest.proved > 0):
            why = f": {weakest.reason}" if weakest.reason else ""
            where = f"when the vector of “{weakest.word}” moves{why} ({seen})"
            return f"Nothing is proved about {self._answer} {where}."
        if self.kind == EMBEDDING:
            moves = f"the vector of one token moves by at most {percent(self.radius)} of its length"
            return f"Proved: if {moves}, {self._answer} stays above {least} ({seen})."
        moves = f"the vector of one token moves by at most {least} of its length"
        return f"Proved: {self._answer} stays if {moves} (least at “{weakest.word}”; {seen})."

    def _beyond(self) -> str:
        known = [one for one in self.words if one.nearest]
        if not known:
            return "This does not cover typos."
        near = min(known, key=lambda one: one.distance)
        away = f"“{near.nearest}” for “{near.word}”, is a move of {percent(near.distance)}"
        return f"This does not cover typos: the nearest other {self.unit}, {away}."

    def written(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        said = {"question": self.question, "sentences": self.sentences()}
        return {**said, **plain(asdict(self))}


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


def shown_nearest(one: WordAnswer) -> str:
    """The nearest other word, and how far away it is."""
    return f"{one.nearest}, {percent(one.distance)} away" if one.nearest else "–"


def percent(value: float, up: bool = False) -> str:
    """Rounded to three digits, down or up."""
    if not math.isfinite(value) or value <= 0:
        return "no change that was found" if value > 0 else "0 %"
    unit = 10.0 ** (math.floor(math.log10(value * 100)) - 2)
    rounded = (math.ceil if up else math.floor)(value * 100 / unit * (1 - 1e-15 if up else 1.0)) * unit
    return f"{rounded:,.0f} %" if rounded >= 1000 else f"{rounded:.3g} %"


def answers(
    asked: Asked,
    progress: Progress | None = None,
    *,
    radius: float = 1e-3,
    resolution: float = 1.04,
    level: float = LEVEL,
    store: Store | None = None,
) -> Answers:
    """Run the typos of a text, then prove what moves of single vectors can do.

    store: keeps results, and has those of an earlier run.

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
    found = try_typos(asked, progress, level=level, store=store)
    return prove_moves(asked, found, progress, radius=radius, resolution=resolution, store=store)


def try_typos(
    asked: Asked, progress: Progress | None = None, *, level: float = LEVEL, store: Store | None = None
) -> Answers:
    """Run every one-letter typo of every word of a text; nothing is proved yet.

    Examples:
        >>> from regard.decisions import shipped_on, try_typos
        >>> try_typos(shipped_on("it was good")).sentences()
        ['Yes: 17 of 541 one-letter typos change the answer “positive”, most often in “was” (13 of 181).']
    """
    label, margin = _label(asked)
    name = "" if asked.kind == EMBEDDING else asked.names(label)
    store = Store() if store is None else store
    typos = None if asked.run is None else _run_all(asked, level, store, progress)
    return Answers(asked.kind, asked.name, asked.text, name, margin, typos, [], level=level, unit=asked.unit)


def _run_all(asked: Asked, level: float, store: Store, progress: Progress | None) -> list[Typos]:
    ends = dict(asked.spans)
    others = _spelled(asked, misspellings(asked.text, asked.spans))
    total = sum(len(words) for start, words in others.items() if f"typos-{start}" not in store)
    found, done, what = list[Typos](), 0, ""

    def ran(count: int) -> None:
        nonlocal done
        done += count
        if progress is not None:
            progress(what, done, total)

    for start, words in others.items():
        if (key := f"typos-{start}") in store:
            found.append(typos_from(store.get(key)))
            continue
        what = f"typos of “{asked.text[start : ends[start]]}”"
        ran(0)
        found.append(run_typos(asked, start, words, level, ran))
        store.put(key, asdict(found[-1]))
    return found


def _spelled(asked: Asked, others: dict[int, list[str]]) -> dict[int, list[str]]:
    """The typos that the model can read: an unknown token says nothing about a residue or an atom."""
    if asked.spells is None:
        return others
    spells, ends, text = asked.spells, dict(asked.spans), asked.text
    read = {
        start: [one for one in typos if spells(text[:start] + one + text[ends[start] :])]
        for start, typos in others.items()
    }
    return {start: typos for start, typos in read.items() if typos}


def prove_moves(
    asked: Asked,
    found: Answers,
    progress: Progress | None = None,
    *,
    radius: float = 1e-3,
    resolution: float = 1.04,
    store: Store | None = None,
) -> Answers:
    """Prove how far each token may move, or what a move by the radius can do to an embedding, and attack it.

    Examples:
        >>> from regard.decisions import prove_moves, shipped_on, try_typos
        >>> asked = shipped_on("good")
        >>> prove_moves(asked, try_typos(asked), resolution=4.0).sentences()[1][:50]
        'Proved: the answer “positive” stays if the vector '
    """
    if asked.refused:
        return replace(found, refused=asked.refused)
    store, words = Store() if store is None else store, list[WordAnswer]()
    for done, place in enumerate(asked.moving):
        if progress is not None:
            progress(f"proofs, “{asked.words[place]}”", done, len(asked.moving))
        if (key := f"word-{place}") not in store:
            store.put(key, asdict(_word(asked, place, radius, resolution)))
        words.append(_word_from(store.get(key)))
    return replace(found, words=words, spent=_spent(asked, words, radius), radius=radius)


def _word_from(kept: dict[str, Any]) -> WordAnswer:
    """A result from its JSON, where NaN is null and infinity a word."""
    names = ("length", "proved", "attack", "distance")
    return WordAnswer(**{**kept, **{name: number(kept[name]) for name in names}})


def _label(asked: Asked) -> tuple[int, float]:
    if asked.kind == EMBEDDING:
        return 0, 0.0
    from regard.proofs.classifier import classifier

    if asked.refused and asked.run is not None:
        logits = asked.run([asked.text])[0]
    else:
        logits = classifier(asked.model, asked.x, asked.readout).run(asked.x).double()
    label = int(logits.argmax(-1))
    return label, float(lead(logits, (label,)))


def _word(asked: Asked, place: int, radius: float, resolution: float) -> WordAnswer:
    length, word = float(asked.x[place].norm()), asked.words[place]
    other = ("", math.nan) if asked.nearest is None else asked.nearest(place)
    if asked.kind == EMBEDDING:
        found = certified_cosine(asked.model, asked.x, one_token(asked.x, place, radius * length))
        return WordAnswer(place, word, length, found.cosine, found.attack.value, found.reason, *other)
    far = certified_radius(asked.model, asked.x, place, readout=asked.readout, resolution=resolution)
    return WordAnswer(place, word, length, float(far.value) / length, float(far.attack) / length, "", *other)


def _spent(asked: Asked, words: list[WordAnswer], radius: float) -> list[Spent]:
    """The depth curve, where the word about which the least is proved moves so far."""
    weakest = min(words, key=lambda one: one.proved)
    far = radius if asked.kind == EMBEDDING else weakest.proved
    if not far > 0:
        return []
    return budget(asked.model, asked.x, one_token(asked.x, weakest.place, far * weakest.length))
