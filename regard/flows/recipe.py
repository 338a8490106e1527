"""Recipe: everything that decides what a simulation does."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from regard._allocation import memory
from regard.attention import Attention
from regard.dynamics import DormandPrince, Euler, Heun, RungeKutta, Scheme
from regard.errors import ArgumentError
from regard.normalizers import Exponential, Softmax
from regard.potentials import Dot

SCHEMES: dict[str, type[Euler] | type[Heun] | type[RungeKutta]] = {
    "euler": Euler,
    "heun": Heun,
    "runge-kutta": RungeKutta,
}
ADAPTIVE = "dormand-prince"
LARGEST_SEED = 2**31
NUMBER, COPIES = 8, 10
"""Bytes of a coordinate, and how many tensors of all coordinates there are at once, at the least."""
MOST_FRAMES, MOST_STEPS = 10_000, 1e12
STEEPEST = 300.0
"""e^β is a number of float64 far beyond this, and no step is short enough for it."""


@dataclass(frozen=True)
class Recipe:
    """beta: the inverse temperature; particles begin independent and uniform on the sphere of that dimension.

    unnormalized: weights e^{β⟨x,y⟩}/n in place of softmax. step: of a scheme, or the tolerance of
    dormand-prince. tolerance: of sums over many particles, relative to the radius. frames: how often it is
    looked at. merge: particles within this distance become one with the sum of their weights; 0 for never.

    Examples:
        >>> from regard.flows import Recipe
        >>> recipe = Recipe(beta=2.0, particles=20, until=1.0, frames=2)
        >>> recipe.start().shape, recipe.attention().potential.scale
        (torch.Size([20, 2]), 2.0)
    """

    beta: float = 4.0
    particles: int = 300
    dimension: int = 2
    until: float = 20.0
    scheme: str = "heun"
    step: float = 0.1
    unnormalized: bool = False
    noise: float = 0.0
    seed: int = 0
    tolerance: float = 1e-6
    frames: int = 60
    merge: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("particles", 1), ("dimension", 2), ("frames", 1)):
            if (value := getattr(self, name)) < least:
                more = "; the sphere of dimension 1 is two points, where nothing moves" if least == 2 else ""
                raise ArgumentError(option(name), f"is {value}", f"give {least} or more{more}")
        for name in ("until", "step", "tolerance"):
            if not 0 < (value := getattr(self, name)) < math.inf:
                raise ArgumentError(option(name), f"is {value}", "give a positive number")
        for name in ("noise", "merge"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise ArgumentError(option(name), f"is {value}", "give a number that is not negative")
        if not -STEEPEST <= self.beta <= STEEPEST:
            raise ArgumentError("--beta", f"is {self.beta}", f"give a number of at most {STEEPEST:g} in size")
        if not self.step <= self.until:
            raise ArgumentError(
                "--step", f"is {self.step}, beyond the end {self.until}", "give a smaller one"
            )
        if self.scheme != ADAPTIVE and self.until / self.step > MOST_STEPS:
            found = f"is {self.step}, which takes {self.until / self.step:.1e} steps"
            raise ArgumentError("--step", found, f"give a larger one: {MOST_STEPS:.0e} steps take years")
        if self.scheme not in (*SCHEMES, ADAPTIVE):
            raise ArgumentError("--scheme", f"is {self.scheme}", f"give {', '.join(SCHEMES)} or {ADAPTIVE}")
        if self.noise > 0 and self.scheme != "euler":
            raise ArgumentError(
                "--noise", f"is {self.noise} with {self.scheme}", "with noise use --scheme euler"
            )
        if not 0 <= self.seed < LARGEST_SEED:
            raise ArgumentError("--seed", f"is {self.seed}", f"give a number from 0 to {LARGEST_SEED - 1}")
        self._refuse_large()

    def _refuse_large(self) -> None:
        """Compare the particles with memory before they take any, and the frames with what a page plays."""
        if self.frames > MOST_FRAMES:
            raise ArgumentError("--frames", f"is {self.frames}", f"a page plays {MOST_FRAMES:,} at most")
        name = "dimension" if self.dimension > self.particles else "particles"
        if (needed := COPIES * NUMBER * self.particles * self.dimension) > memory():
            found = f"is {getattr(self, name)}, and a run takes at least {needed / 2**30:,.1f} GiB of memory"
            remedy = f"this process may have {memory() / 2**30:,.1f}: give a smaller number"
            raise ArgumentError(option(name), found, remedy)

    def attention(self) -> Attention:
        """The field, before it is projected to the sphere."""
        return Attention(Dot(scale=self.beta), normalizer=Exponential() if self.unnormalized else Softmax())

    def start(self) -> Tensor:
        """Where particles begin, (n, d)."""
        drawn = torch.randn(
            self.particles,
            self.dimension,
            generator=torch.Generator().manual_seed(self.seed),
            dtype=torch.float64,
        )
        return drawn / torch.linalg.vector_norm(drawn, dim=-1, keepdim=True)

    def steps(self) -> Scheme:
        """The scheme as a value."""
        return DormandPrince(self.step) if self.scheme == ADAPTIVE else SCHEMES[self.scheme](self.step)

    def evaluations(self) -> int | None:
        """How often attention is computed; None where the scheme chooses its steps."""
        if self.scheme == ADAPTIVE:
            return None
        return math.ceil(self.until / self.step - 1e-9) * len(SCHEMES[self.scheme].tableau.nodes)

    def times(self) -> list[float]:
        """When it is looked at; with noise at steps, where alone it is known."""
        wanted = [self.until * k / self.frames for k in range(self.frames + 1)]
        if self.noise == 0:
            return wanted
        return sorted({min(round(t / self.step) * self.step, self.until) for t in wanted} | {self.until})

    def subject(self) -> dict[str, str]:
        """What results are of, option by option."""
        return {option(name): str(value) for name, value in asdict(self).items()}

    @property
    def weights(self) -> str:
        """The weights of the mean that particles follow (geshkovski2023, SA and USA), in words."""
        return "unnormalized weights" if self.unnormalized else "softmax weights"


def recipe_of(given: dict[str, Any]) -> Recipe:
    """A recipe of the given options. The others are chosen to fit: dormand-prince has the tolerance 1e-6, and
    times with unnormalized weights are shorter by ∫ e^{β⟨x,y⟩}, at the start I_0(β), and e^β where particles
    have met.
    """
    found: dict[str, Any] = {}
    if given.get("unnormalized"):
        beta = float(min(max(given.get("beta", Recipe.beta), -STEEPEST), STEEPEST))
        spread = float(torch.special.i0(torch.tensor(beta, dtype=torch.float64)))
        found["until"] = Recipe.until / spread
        found["step"] = min(Recipe.step / spread, 0.5 * math.exp(-abs(beta)), given.get("until", math.inf))
    if given.get("scheme") == ADAPTIVE:
        found["step"] = 1e-6
    return Recipe(**{**found, **given})


def option(name: str) -> str:
    """A field as it is written at the command line."""
    return f"--{name.replace('_', '-')}"
