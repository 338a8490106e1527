"""Where robustness is lost: how far tokens can be from where they are, after every block of a network."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from regard._enclosed import spectral_norms
from regard.domains import Near
from regard.maps import Compose, Heads, Map, Residual
from regard.nonexpansive import MixTokens, Pool
from regard.proofs.ball_model.beginning import by_orders
from regard.proofs.ball_model.state import State
from regard.proofs.classifier import classifier
from regard.proofs.locating import steps
from regard.proofs.question import question
from regard.proofs.theorem import Refusal
from regard.proofs.theorems.ball_model import run, start


@dataclass(frozen=True)
class Spent:
    """After a block: at least how far tokens move to the first order, and at least how far beyond it, both
    over all tokens together.
    """

    block: int
    linear: float
    rest: float

    @property
    def share(self) -> float:
        """What is not the exact derivative, of all."""
        return self.rest / (self.linear + self.rest) if self.linear + self.rest > 0 else 0.0


def budget(model: Any, x: Tensor, domain: Near) -> list[Spent]:
    """The depth curve of a network on a neighborhood of x, by the order of the ball model that goes farther,
    or proves more of the last block; it ends where nothing more can be said.
    """
    with question():
        parts = blocks(classifier(model, x).exact)
        return max(by_orders(start(domain), lambda state: _along(parts, state)), key=_farther)


def _farther(curve: list[Spent]) -> tuple[int, float]:
    return len(curve), -(curve[-1].linear + curve[-1].rest) if curve else 0.0


def _along(parts: list[Map], state: State) -> list[Spent]:
    found = list[Spent]()
    for number, block in enumerate(parts):
        try:
            state = run(block, state)
        except Refusal:
            break
        if not bool((state.linear != 0).any()):  # forgotten (M10): there is no derivative to compare with
            break
        found.append(_spent(number, state))
    return found


def _spent(number: int, state: State) -> Spent:
    linear = spectral_norms(state.linear.flatten(0, 1))
    return Spent(number, float(linear), float(state.joint_rest()))


def blocks(map: Map) -> list[Map]:
    """A network cut where a block begins, at a residual connection around attention, up to its readout."""
    chain, found = steps(map), list[list[Map]]()
    for part in chain:
        if isinstance(part, (MixTokens, Pool)):
            break
        if not found or _is_attention(part):
            found.append([])
        found[-1].append(part)
    return [Compose(tuple(parts)) for parts in found]


def _is_attention(map: Map) -> bool:
    if isinstance(map, Heads):
        return True
    inner = map.map if isinstance(map, Residual) else None
    return inner is not None and any(isinstance(part, Heads) for part in steps(inner))
