"""Every one-letter typo of a text, run by the model itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard.audits.outputs import EMBEDDING, cosines
from regard.decisions.asked import Asked
from regard.proofs.decision_attack import lead

BATCH = 256
SHOWN = 6
"""How many typos of a word are named."""


@dataclass(frozen=True)
class Typos:
    """The result of running every one-letter typo of a word of the text.

    start: where the word begins in the text. count: how many typos it has. changed: how many of them change
    the answer; of an embedding, how many take the cosine to the original below the level. examples: the
    typos with the largest effect, each with the class, the token or the cosine that it gives.

    Examples:
        >>> from regard.decisions import Typos
        >>> Typos("weak", 47, count=233, changed=122, examples=[("beak", "negative")]).share > 0.5
        True
    """

    word: str
    start: int
    count: int
    changed: int
    examples: list[tuple[str, str | float]]

    @property
    def share(self) -> float:
        """The share of the typos that change the answer."""
        return self.changed / self.count


def typos_from(plain: dict[str, Any]) -> Typos:
    """A result from its JSON."""
    return Typos(**{**plain, "examples": [(typo, answer) for typo, answer in plain["examples"]]})


def shown_examples(one: Typos) -> str:
    """The typos with the largest effect, with the cosines of an embedding."""
    named = [typo if isinstance(gives, str) else f"{typo} {gives:.3f}" for typo, gives in one.examples]
    return ", ".join(named) + (", …" if one.changed > len(named) > 0 else "")


def run_typos(asked: Asked, start: int, others: list[str], level: float, ran: Callable[[int], None]) -> Typos:
    """Run every typo of the word that begins at `start`; `ran` is told how many each batch had."""
    assert asked.run is not None
    end = dict(asked.spans)[start]
    original, kept, given = asked.run([asked.text])[0], list[float](), list[str | float]()
    for k in range(0, len(others), BATCH):
        group = others[k : k + BATCH]
        outputs = asked.run([asked.text[:start] + one + asked.text[end:] for one in group])
        kept += _kept(asked.kind, original, outputs).tolist()
        given += [] if asked.kind == EMBEDDING else map(asked.names, outputs.argmax(-1).tolist())
        ran(len(group))
    limit = level if asked.kind == EMBEDDING else 0.0
    worst = sorted(range(len(others)), key=kept.__getitem__)[:SHOWN]
    shown = [k for k in worst if asked.kind == EMBEDDING or kept[k] < limit]
    examples = [(others[k], kept[k] if asked.kind == EMBEDDING else given[k]) for k in shown]
    return Typos(asked.text[start:end], start, len(others), sum(one < limit for one in kept), examples)


def _kept(kind: str, original: Tensor, outputs: Tensor) -> Tensor:
    """The cosine of each output to the original, or the lead that the original class still has."""
    if kind == EMBEDDING:
        return cosines(original, outputs)
    return lead(outputs, (int(original.argmax(-1)),))
