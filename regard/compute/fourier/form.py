"""Form: softmax scores as Gaussians of distances, with weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._transforms import moves
from regard.compute.fourier.processes import Processes
from regard.compute.problem import Problem
from regard.errors import ArgumentError
from regard.normalizers import Softmax
from regard.potentials import Dot, Gaussian


@dataclass(frozen=True, eq=False, repr=False)
class Form(Object):
    """Scores with log-counts as -|q_i - k_j|²/2s² + log w_j + row_i, temperature included, in float64.

    queries (b, m, d), keys (b, n, d), values (b, n, e), bandwidth s (b, 1), log_weights (b, n) or None.
    `level`: the largest log w (b, 1). `size`: how large the terms of log w are, for their rounding. `same`:
    queries are the keys themselves.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    bandwidth: Tensor
    log_weights: Tensor | None
    level: Tensor
    row: Callable[[], Tensor] | None
    size: float
    same: bool

    def tensors(self) -> tuple[Tensor, ...]:
        """Queries, keys, values and the bandwidth."""
        return self.queries, self.keys, self.values, self.bandwidth

    def over(self, processes: Processes) -> Form:
        """The same with the level of all processes, whose bandwidths must be one."""
        scale = self.bandwidth.detach()
        if not torch.equal(processes.largest(scale), processes.smallest(scale)):
            raise ArgumentError(
                "the bandwidth", "is not the same on all ranks", "give all ranks the same parameters"
            )
        return self.replace(level=processes.largest(self.level), size=processes.most(self.size))

    def points(self, center: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys around a center, in bandwidths."""
        scale = self.bandwidth.unsqueeze(-1)
        keys = _scaled(self.keys - center, scale)
        return (keys if self.same else _scaled(self.queries - center, scale)), keys

    def weights(self) -> tuple[Tensor, Tensor]:
        """w_j over the largest of them (b, n), and the logarithm of that (b, 1)."""
        if self.log_weights is None:
            return self.keys.new_ones(()).expand(self.keys.shape[:-1]), self.level
        return (self.log_weights - self.level).exp(), self.level


def _scaled(points: Tensor, scale: Tensor) -> Tensor:
    """Points in bandwidths, in their own memory where nobody differentiates."""
    return points / scale if moves(points) or moves(scale) else points.div_(scale)


def form_of(problem: Problem) -> Form | Refused:
    """Scores as Gaussians: a Gaussian is one, and q·k = -|q - k|²/2 + |k|²/2 + |q|²/2 is one with weights."""
    potential = problem.potential
    if not isinstance(potential, (Gaussian, Dot)):
        return Refused(
            f"{type(potential).__name__} scores are neither a Gaussian of a distance nor a dot product."
        )
    width = problem.keys.shape[-1]
    if not 1 <= width <= 3:
        return Refused(f"points have {width} features, and a series is short for at most three.")
    wide = problem.to(torch.float64)
    potential, normalizer, batch = wide.potential, wide.normalizer, wide.batch_shape
    assert isinstance(normalizer, Softmax)
    temperature = torch.as_tensor(normalizer.temperature, dtype=torch.float64, device=problem.device)
    queries, keys, values = (
        t.expand(*batch, *t.shape[-2:]).flatten(0, -3) if batch else t.unsqueeze(0)
        for t in (wide.queries, wide.keys, wide.values)
    )
    logs, size = wide.log_counts, 0.0
    row: Callable[[], Tensor] | None = None
    if isinstance(potential, Gaussian):
        scale = torch.as_tensor(potential.bandwidth_at(width), dtype=torch.float64, device=problem.device)
        scale = scale * temperature.sqrt()
    else:
        assert isinstance(potential, Dot)
        factor = torch.as_tensor(potential.factor(width), dtype=torch.float64, device=problem.device)
        factor = (factor / temperature).unsqueeze(-1)
        if _check.holds((factor > 0).all()) is not True:
            return Refused(
                "a dot product is a Gaussian where its scale is positive, and known before the run."
            )
        bias = 0.5 * factor * wide.keys.square().sum(-1)
        size = float(bias.detach().abs().amax())
        scale, logs = 1 / factor.squeeze(-1).sqrt(), bias if logs is None else bias + logs
        row = lambda: 0.5 * factor * wide.queries.square().sum(-1)  # noqa: E731
    scale = scale.expand(batch).reshape(-1, 1)
    logs = None if logs is None else logs.expand(*batch, -1).reshape(len(scale), -1)
    level = torch.zeros_like(scale) if logs is None else logs.detach().amax(-1, keepdim=True)
    return Form(queries, keys, values, scale, logs, level, row, size, problem.queries is problem.keys)
