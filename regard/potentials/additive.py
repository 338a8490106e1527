"""The additive score of the first attention mechanism."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from regard import _check
from regard._types import Features
from regard.errors import ArgumentError
from regard.parameters import Tokens, parameter, projection
from regard.potentials.base import Potential, project_both


@dataclass(frozen=True, eq=False, repr=False)
class Additive(Potential):
    """a(x, y) = Σ_c v_c tanh((w_qᵀx + w_kᵀy)_c) (bahdanau2015, A.1.2).

    Examples:
        >>> score = regard.Additive(w_q=torch.ones(2, 3), w_k=torch.ones(2, 3), v=torch.ones(3))
        >>> score.scores(torch.zeros(1, 2), torch.zeros(4, 2)).tolist()
        [[0.0, 0.0, 0.0, 0.0]]
    """

    w_q: Tensor | None = projection(Tokens.QUERIES)
    w_k: Tensor | None = projection(Tokens.KEYS)
    v: Tensor = parameter(rank=1)
    b_q: Tensor | None = parameter(rank=1, default=None)
    b_k: Tensor | None = parameter(rank=1, default=None)
    positional: ClassVar[bool] = False

    def __post_init__(self) -> None:
        _check.projections(self.w_q, self.w_k, self.b_q, self.b_k)
        _check.parameter("v", self.v, 1, "(..., c)")
        for name, weight in (("w_q", self.w_q), ("w_k", self.w_k)):
            if weight is not None and weight.shape[-1] != self.v.shape[-1]:
                raise ArgumentError(
                    "v",
                    f"has width {self.v.shape[-1]} and {name} projects to {weight.shape[-1]}",
                    "give one entry of v for each projected coordinate",
                )

    def features(self, x: Tensor, y: Tensor, x_marks: Tensor, y_marks: Tensor) -> tuple[Features, Features]:
        queries, keys = project_both(x, y, self.w_q, self.w_k, self.b_q, self.b_k)
        if queries.shape[-1] != self.v.shape[-1]:
            raise ArgumentError(
                "v",
                f"has width {self.v.shape[-1]} and the projected points {queries.shape[-1]}",
                "give one entry of v for each projected coordinate",
            )
        return queries, keys

    def pair(self, queries: Features, keys: Features) -> Tensor:
        hidden = (queries.unsqueeze(-2) + keys.unsqueeze(-3)).tanh()
        return (hidden * self.v[..., None, None, :]).sum(-1)

    def width(self, queries: Features, keys: Features) -> int:
        return 3 * queries.shape[-1]
