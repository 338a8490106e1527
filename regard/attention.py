"""Attention: one frozen declaration — softmatch, lookup, moment — from which everything else follows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._verb import Verb
from regard.errors import ArgumentError
from regard.kernel import AnyLaw, Kernel
from regard.lookups import Identity, Lookup
from regard.measure import Measure
from regard.moments import Mean, Moment
from regard.normalizers import Normalizer, Reference, Softmax
from regard.parameters import part
from regard.potentials import Potential
from regard.supports import Full, Support

run = Verb("run")
free_energy = Verb("free_energy")
law_gap = Verb("law_gap")
weights = Verb("weights")
"""What a declaration can be asked for; the floor of the verbs registers how."""


@dataclass(frozen=True, eq=False, repr=False)
class Attention(Object):
    """x ↦ Π[Ψ_{G(x,·)}(μ) L]: reweight the context μ by the potential, look values up, take the moment
    (vuckovic2020, Definition 8).

    Heads and batches are leading dimensions and broadcast: with w_q of shape (h, d, c) and x (n, d) the
    output is (h, n, e).

    An Attention is a value: a torch.nn.Module that keeps one registers none of its parameters. Keep
    `regard.nn.Declared(attention)` instead, a module that computes the same and shares them.

    Examples:
        >>> x = torch.randn(5, 8)
        >>> layer = regard.Attention(regard.Dot(), regard.Linear(torch.randn(8, 3)), support=regard.Causal())
        >>> layer(x).shape
        torch.Size([5, 3])
    """

    potential: Potential = part()
    lookup: Lookup = part(default=Identity())
    normalizer: Normalizer = part(default=Softmax())
    support: Support = part(default=Full())
    moment: Moment = part(default=Mean())

    def __post_init__(self) -> None:
        kinds = {
            "potential": Potential,
            "lookup": Lookup,
            "normalizer": Normalizer,
            "support": Support,
            "moment": Moment,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                found = (
                    f"is a {value.__name__} class"
                    if isinstance(value, type)
                    else f"is a {type(value).__name__}"
                )
                raise ArgumentError(
                    name, found, f"give a {kind.__name__} value, e.g. one from regard.{name}s"
                )

    def __call__(self, x: Measure | Tensor, context: Measure | Tensor | None = None) -> Any:
        """Self-attention on x, or attention of x to a context.

        A Tensor means the uniform measure on its rows and gives a Tensor back.
        """
        return run.one(self, x, context)

    def kernel(self, context: Measure | Tensor) -> Kernel:
        """The attention kernel A_μ, literally the composition softmatch @ lookup @ moment."""
        return self.softmatch(context) @ self.lookup @ self.moment

    def softmatch(self, context: Measure | Tensor) -> Softmatch:
        """The kernel x ↦ Ψ_{G(x,·)}(μ)."""
        return Softmatch(self.potential, self.normalizer, self.support, as_measure("context", context))

    def free_energy(self, x: Measure | Tensor, context: Measure | Tensor | None = None) -> Tensor:
        """The maximum of ν(a(x,·)) - KL(ν | μ) over laws ν, one number a query: log μ(G(x,·)) for softmax,
        without an m × n matrix.
        """
        return free_energy.one(self, x, context)

    def weights(
        self, x: Measure | Tensor, context: Measure | Tensor | None = None, *, rows: Any = None
    ) -> Tensor:
        """The weights (..., m, n) of all queries, or of some: `rows` is a slice or a list of indices,
        and only these are computed.
        """
        return weights.one(self, x, context, rows)

    def law_gap(self, law: Tensor, x: Measure | Tensor, context: Measure | Tensor | None = None) -> Tensor:
        """How far rows `law` (..., m, n) are from optimal: exactly KL(law | attention row), by the Gibbs
        variational identity.

        It certifies any approximate row: |law - row|_1 ≤ √(2 gap).
        """
        return law_gap.one(self, law, x, context)


@dataclass(frozen=True, eq=False, repr=False)
class Softmatch(Kernel):
    """x ↦ Ψ_{G(x,·)}(μ), G = exp(potential), μ the context restricted to what x may see (vuckovic2020,
    Definition 4).

    Examples:
        >>> keys = torch.tensor([[0.0], [0.0]])
        >>> matched = regard.Attention(regard.Dot()).softmatch(keys)  # a Softmatch: a kernel
        >>> matched(torch.tensor([[5.0]])).masses().tolist()  # equal scores, equal shares
        [[0.5, 0.5]]
    """

    potential: Potential
    normalizer: Normalizer
    support: Support
    context: Measure

    def __post_init__(self) -> None:
        if not self.normalizer.laws:
            raise ArgumentError(
                "normalizer",
                f"{type(self.normalizer).__name__} rows are not probability laws",
                "a Markov kernel needs laws: use Softmax, Entmax, Sparsemax or LinearKernel",
            )
        if not self.normalizer.rowwise:
            raise ArgumentError(
                "normalizer",
                f"{type(self.normalizer).__name__} couples the queries, so a point alone has no law",
                "it is a coupling, not a kernel: run the attention, with the moment Law for its laws",
            )

    def __call__(self, points: Tensor, marks: Tensor | None = None) -> AnyLaw:
        marks = torch.arange(points.shape[-2], device=points.device) if marks is None else marks
        potential, normalizer = self.normalizer.acting(self.potential)
        scores = potential.scores(points, self.context.points, marks, self.context.positions())
        reference = Reference(log_counts(self.context), self.support.allows(marks, self.context.positions()))
        rows = normalizer.weights(scores, reference)
        if _check.holds((rows.sum(-1) == 0).any()):
            raise ArgumentError(
                "support",
                "leaves a query that sees nothing, which has no law",
                "run the attention instead, which gives zero there",
            )
        points = self.context.points.unsqueeze(-3)
        points = points.expand(*points.shape[:-3], *rows.shape[-2:], -1)
        return Measure(points, rows.log(), self.context.positions().unsqueeze(-2).expand(*points.shape[:-1]))


def as_measure(name: str, points: Measure | Tensor) -> Measure:
    """A Tensor (..., n, d) means the uniform measure on its rows.

    Examples:
        >>> regard.attention.as_measure("x", torch.zeros(4, 2)).masses().tolist()
        [0.25, 0.25, 0.25, 0.25]
    """
    if isinstance(points, Measure):
        return points
    if not isinstance(points, Tensor):
        raise ArgumentError(name, f"is a {type(points).__name__}", "give a Tensor (..., n, d) or a Measure")
    return Measure(points)


def log_counts(context: Measure) -> Tensor | None:
    """How often each key counts, as a logarithm: n·w_j, so that equal weights are the same as none.

    Examples:
        >>> heavy = regard.Measure(torch.zeros(2, 1), torch.tensor([0.75, 0.25]).log())
        >>> counts = regard.attention.log_counts(heavy).exp()
        >>> torch.allclose(counts, torch.tensor([1.5, 0.5]))  # of two keys, one counts 1.5 times
        True
    """
    if context.log_weights is None:
        return None
    return context.log_weights + torch.log(torch.tensor(float(context.size), dtype=context.log_weights.dtype))
