"""Certificate: a number that is proved, with what it rests on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from regard.norms import Norm


@dataclass(frozen=True)
class Hypothesis:
    """A condition of a theorem; `checked` says whether it was verified here or is assumed."""

    statement: str
    checked: bool

    def __str__(self) -> str:
        return f"{'checked' if self.checked else 'assumed'}: {self.statement}"


@dataclass(frozen=True)
class Certificate:
    """An upper bound that holds with the given probability, over the randomness of its own proof and nothing else.

    value: the bound. domain: where it holds. theorem: what proves it. parts: the certificates it was built from.
    refused: theorems that do not apply, each with a sentence.
    """

    value: float
    domain: Any
    norm: Norm
    theorem: str
    hypotheses: tuple[Hypothesis, ...] = ()
    parts: tuple[Certificate, ...] = ()
    refused: tuple[str, ...] = ()
    probability: float = 1.0

    def __str__(self) -> str:
        return "\n".join(self._lines(0))

    __repr__ = __str__

    def _lines(self, depth: int) -> list[str]:
        indent = "  " * depth
        chance = "" if self.probability == 1 else f", with probability at least {self.probability:.9g}"
        lines = [f"{indent}≤ {self.value:.6g} in {type(self.norm).__name__} norm, {self.domain}{chance}, by {self.theorem}"]
        lines += [f"{indent}  {hypothesis}" for hypothesis in self.hypotheses]
        for part in self.parts:
            lines += part._lines(depth + 1)
        return lines + [f"{indent}  refused: {why}" for why in self.refused]
