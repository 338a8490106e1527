"""LipschitzNorm: self-attention whose scores are divided by the sizes of its inputs,
so that one constant holds everywhere.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard.errors import ArgumentError
from regard.maps import Map
from regard.parameters import Tokens, projection


@dataclass(frozen=True, eq=False, repr=False)
class LipschitzNorm(Map):
    """x ↦ softmax(Q Kᵀ / max(uv, uw, vw)) V, Q = x w_q, K = x w_k, V = x w_v (dasoulas2021).

    u = |Q|_F, v = max_j |k_j|, w = max_j |v_j|. Where all three products are zero all scores are zero. w_q,
    w_k (d, c), w_v (d, e).

    Examples:
        >>> eye = torch.eye(2, dtype=torch.float64)
        >>> layer = regard.lipschitz_norm.LipschitzNorm(eye, eye, eye)
        >>> regard.certify(layer, regard.Whole(tokens=4), regard.Frobenius()).value < 20  # everywhere
        True
    """

    w_q: Tensor = projection(Tokens.ALL)
    w_k: Tensor = projection(Tokens.ALL)
    w_v: Tensor = projection(Tokens.ALL)

    def __post_init__(self) -> None:
        for name in ("w_q", "w_k", "w_v"):
            _check.parameter(name, getattr(self, name), 2, "(d, c)")
        widths = {self.w_q.shape[-2], self.w_k.shape[-2], self.w_v.shape[-2]}
        if len(widths) > 1 or self.w_q.shape[-1] != self.w_k.shape[-1]:
            shapes = [list(weight.shape) for weight in (self.w_q, self.w_k, self.w_v)]
            raise ArgumentError("w_q, w_k and w_v", f"have shapes {shapes}", "give (d, c), (d, c) and (d, e)")

    def __call__(self, x: Tensor) -> Tensor:
        queries, keys, values = x @ self.w_q, x @ self.w_k, x @ self.w_v
        u = torch.linalg.vector_norm(queries, dim=(-2, -1))
        v, w = (torch.linalg.vector_norm(rows, dim=-1).amax(-1) for rows in (keys, values))
        size = torch.maximum(torch.maximum(u * v, u * w), v * w)[..., None, None]
        scores = queries @ keys.mT / torch.where(size > 0, size, torch.ones_like(size))
        return scores.softmax(-1) @ values
