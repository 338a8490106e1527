"""Estimates: numbers that are close, and say from which side. They are never certificates."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from regard.norms import Norm


@dataclass(frozen=True)
class Estimate:
    """A largest singular value from below: the true one is at least `value`, up to rounding, and usually
    within `residual` of it.

    value, residual: one for each element of the batch; residual = |Jᵀu - σv| / σ, small where (u, σ, v) is a
    singular triple.
    iterations: how many products with J and with Jᵀ were taken.

    Examples:
        >>> j = regard.linearize(regard.Attention(regard.Dot()), torch.randn(4, 3, dtype=torch.float64))
        >>> found = j.norm()  # an Estimate, from below
        >>> bool(found.value <= torch.linalg.matrix_norm(j.dense().reshape(12, 12), 2) + 1e-12)
        True
    """

    value: Tensor
    residual: Tensor
    iterations: int

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        if self.value.numel() == 1:
            return (
                f"≥ {float(self.value):.6g} (residual {float(self.residual):.1e} "
                f"after {self.iterations} products)"
            )
        shown = ", ".join(f"{v:.4g}" for v in self.value.flatten()[:8].tolist())
        more = ", ..." if self.value.numel() > 8 else ""
        return (
            f"≥ [{shown}{more}] (residual at most {float(self.residual.max()):.1e} "
            f"after {self.iterations} products)"
        )

    __repr__ = __str__


@dataclass(frozen=True)
class UpperEstimate:
    """A number that is at least the true one in exact arithmetic; rounding was not accounted for,
    so it is not a certificate.

    Examples:
        >>> x = torch.randn(4, 3, dtype=torch.float64)
        >>> j = regard.linearize(regard.Attention(regard.Dot()), x)
        >>> above = j.norm(regard.TokenMax())
        >>> type(above).__name__, bool(j.mv(torch.ones_like(x) / 3**0.5).norm(dim=-1).max() <= above.value)
        ('UpperEstimate', True)
    """

    value: Tensor
    norm: Norm

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        shown = (
            f"{float(self.value):.6g}"
            if self.value.numel() == 1
            else f"{[round(v, 6) for v in self.value.flatten()[:8].tolist()]}"
        )
        return f"≲ {shown} in {type(self.norm).__name__} norm"

    __repr__ = __str__
