"""Pairs of the user's own, an original and a changed text, each run by the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from regard.audits.outputs import EMBEDDING, cosines
from regard.decisions.asked import Asked
from regard.errors import ArgumentError


@dataclass(frozen=True)
class PairAnswer:
    """The answers of a model to an original and a changed text.

    before, after: the label or the next token of each; empty for an embedding. cosine: of the two embeddings;
    NaN where there are none. differs: whether the answer is another, or the cosine is below the level.

    Examples:
        >>> from regard.decisions import PairAnswer
        >>> PairAnswer("it was weak", "it was wezk", "negative", "positive", differs=True).shown
        'negative → positive'
    """

    original: str
    changed: str
    before: str = ""
    after: str = ""
    cosine: float = math.nan
    differs: bool = False

    @property
    def shown(self) -> str:
        """The effect of the change, in the measure of the model."""
        if not math.isnan(self.cosine):
            return f"cosine {self.cosine:.3f}"
        return f"{self.before} → {self.after}" if self.differs else self.before


def run_pairs(asked: Asked, pairs: Sequence[tuple[str, str]], level: float) -> list[PairAnswer]:
    """Run both texts of each pair and compare the answers.

    Examples:
        >>> from regard.decisions import run_pairs, shipped_on
        >>> pairs = [("the soup was good", "the soup was dull"), ("it was good", "it was goood")]
        >>> [one.shown for one in run_pairs(shipped_on("it was good"), pairs, level=0.9)]
        ['positive → negative', 'positive']
    """
    if asked.run is None:
        return []
    try:
        outputs = [asked.run([text])[0] for pair in pairs for text in pair]
    except ArgumentError as error:
        argument = "--pairs" if error.argument == "--text" else error.argument
        raise ArgumentError(argument, error.found, error.remedy) from None
    found = []
    for (original, changed), before, after in zip(pairs, outputs[::2], outputs[1::2], strict=True):
        if asked.kind == EMBEDDING:
            cosine = float(cosines(before, after[None]))
            found.append(PairAnswer(original, changed, cosine=cosine, differs=cosine < level))
        else:
            first, second = int(before.argmax(-1)), int(after.argmax(-1))
            names = asked.names(first), asked.names(second)
            found.append(PairAnswer(original, changed, *names, differs=first != second))
    return found
