"""ShapedCovariance: how the covariance of tokens moves through a deep and wide network of shaped attention.

Width n, m tokens, weights of independent normal numbers, Y = X W_Q W_Kᵀ Xᵀ / n, key width n_k:

    X' = λX + γ A X W_V/√n ,   A = 1 + softmax(Y/τ) - 11ᵀ/m ,   τ = τ_0 √(n n_k) ,   λ² + γ² = 1 .

With V = XXᵀ/n and time layer/n the limit of large width is dV = b(V) dt + Σ(V)^{1/2} dB (noci2023). With x̄
the average token and T^{ik} = V^{ik} - V^{ix̄} - V^{kx̄} + V^{x̄x̄},

    b^{ab} = (γ²/τ_0²) [ V^{ab} Σ_{ik} V^{ik}T^{ik} / m²
                         + Σ_i (V^{bi}V^{aa} + V^{ai}V^{bb})(T^{ii} - mean_k T^{kk}) / 2m ] ,
    Σ^{ab,cd} = γ²(2 - γ²)(V^{ac}V^{bd} + V^{ad}V^{bc})
                + (γ⁴/τ_0² m²)(q(ab;cd) + q(ab;dc) + q(ba;cd) + q(ba;dc)) ,  q(ab;cd) = V^{ac} (V T V)^{bd} .
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from regard import _check
from regard._object import Object
from regard.errors import ArgumentError


@dataclass(frozen=True, eq=False, repr=False)
class ShapedCovariance(Object):
    """The equation of the covariance V (m, m) of tokens under shaped attention: temperature τ_0, branch γ.

    Examples:
        >>> equation = regard.dynamics.ShapedCovariance(branch=0.6)
        >>> start = torch.tensor([[1.0, 0.3], [0.3, 1.0]], dtype=torch.float64)
        >>> equation.drift(start).shape, equation.paths(start, 0.2, steps=5, count=3).shape
        (torch.Size([2, 2]), torch.Size([3, 2, 2]))
    """

    temperature: float = 1.0
    branch: float = math.sqrt(0.5)

    def __post_init__(self) -> None:
        _check.positive("temperature", self.temperature)
        _check.between("branch", self.branch, 0.0, 1.0)

    def drift(self, v: Tensor) -> Tensor:
        """b(V), (..., m, m)."""
        count, t = v.shape[-1], _centered(v)
        diagonal, own = v.diagonal(dim1=-2, dim2=-1), t.diagonal(dim1=-2, dim2=-1)
        whole = (v * t).sum((-2, -1), keepdim=True) / count**2 * v
        uneven = own - own.mean(-1, keepdim=True)
        seen = (v * uneven.unsqueeze(-2)).sum(-1)  # Σ_i V^{ai}(T^{ii} - mean)
        pair = diagonal.unsqueeze(-1) * seen.unsqueeze(-2)
        return (self.branch / self.temperature) ** 2 * (whole + (pair + pair.mT) / (2 * count))

    def diffusion(self, v: Tensor) -> Tensor:
        """Σ(V), (..., m², m²): the covariance of dV, entry by entry."""
        count, square = v.shape[-1], self.branch**2
        inner = v @ _centered(v) @ v
        plain = _both(torch.einsum("...ac,...bd->...abcd", v, v))
        mixed = _both(torch.einsum("...ac,...bd->...abcd", v, inner))
        mixed = mixed + mixed.transpose(-4, -3)
        whole = square * (2 - square) * plain + square**2 / (self.temperature * count) ** 2 * mixed
        return whole.flatten(-4, -3).flatten(-2, -1)

    def paths(self, v: Tensor, until: float, steps: int, count: int, seed: int = 0) -> Tensor:
        """`count` solutions at time `until`, (count, m, m), by the method of Euler and Maruyama.

        The drift grows like V³, so a solution may explode; it stops at a thousand times the start.
        """
        state, generator = _start(v, count), torch.Generator().manual_seed(seed)
        step, most = until / steps, 1000 * float(v.abs().max())
        for _ in range(steps):
            inside = (state.abs().amax((-2, -1), keepdim=True) <= most).double()
            values, vectors = torch.linalg.eigh(self.diffusion(state))
            noise = torch.randn(count, len(v) ** 2, 1, generator=generator, dtype=torch.float64)
            moved = vectors @ (values.clamp_min(0).sqrt().unsqueeze(-1) * noise)
            change = step * self.drift(state) + math.sqrt(step) * moved.reshape(state.shape)
            state = state + inside * (change + change.mT) / 2
        return state

    def network(self, v: Tensor, width: int, layers: int, count: int, seed: int = 0) -> Tensor:
        """The covariances (count, m, m) of `count` random networks of this width after so many layers.

        Weights are never formed: X W has independent columns of covariance XXᵀ, so they are drawn from that.
        """
        generator, tokens = torch.Generator().manual_seed(seed), len(v)
        root = torch.linalg.cholesky(v.double())
        x = (math.sqrt(width) * root @ _frame(tokens, width)).expand(count, tokens, width)
        eye, even = torch.eye(tokens, dtype=torch.float64), 1 / tokens
        kept = math.sqrt(1 - self.branch**2)
        for _ in range(layers):
            factor = torch.linalg.cholesky(x @ x.mT)
            q, k, values = (factor @ _normal(count, tokens, width, generator) for _ in range(3))
            law = (q @ k.mT / (self.temperature * width**2)).softmax(-1)
            x = kept * x + self.branch * ((eye + law - even) @ values) / math.sqrt(width)
        return x @ x.mT / width


def _centered(v: Tensor) -> Tensor:
    """T: the covariance of tokens around their average."""
    row = v.mean(-1, keepdim=True)
    return v - row - row.mT + row.mean(-2, keepdim=True)


def _both(tensor: Tensor) -> Tensor:
    """The same, and with the last two indices exchanged."""
    return tensor + tensor.transpose(-2, -1)


def _start(v: Tensor, count: int) -> Tensor:
    _check.floating("v", v)
    if v.ndim != 2 or v.shape[0] != v.shape[1] or not torch.equal(v, v.mT):
        raise ArgumentError("v", f"has shape {list(v.shape)}", "give one covariance (m, m), symmetric")
    return v.double().expand(count, *v.shape)


def _frame(tokens: int, width: int) -> Tensor:
    if width < tokens:
        raise ArgumentError("width", f"is {width}", f"give at least the number of tokens, {tokens}")
    return torch.eye(tokens, width, dtype=torch.float64)


def _normal(count: int, tokens: int, width: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, tokens, width, generator=generator, dtype=torch.float64)
