"""Derivatives of fixed points without the iterations that found them: only the point is kept (bai2019).

z = f(z, θ) + u. A gradient v of z becomes a = Jᵀa + v, which contracts as f does, in the dual norm; a is the
gradient of u, and that of θ is (∂f/∂θ)ᵀa. The backward pass is differentiable once more in the same way.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from regard.nn.contraction import dual
from regard.nn.fixed_points import Acceleration, solve
from regard.norms import SequenceNorm


@dataclass(frozen=True)
class Equation:
    """z = sign · f(z) + u, with what is proved of f and how exactly derivatives are wanted.

    tolerance: that of the backward pass, relative to the gradient that comes in.
    """

    f: nn.Module
    sign: float
    names: tuple[str, ...]
    constant: float
    norm: SequenceNorm
    tolerance: float
    acceleration: Acceleration

    def at(self, z: Tensor, tensors: Sequence[Tensor]) -> Tensor:
        """sign · f(z) with these tensors in place of its own."""
        held = dict(zip(self.names, tensors, strict=True))
        value: Tensor = torch.func.functional_call(self.f, held, (z,))
        return self.sign * value

    def settle(self, product: Callable[[Tensor], Tensor], v: Tensor, norm: SequenceNorm) -> Tensor:
        """a = product(a) + v, to the tolerance times the norm of v."""
        size = float(norm.of(v).max())
        if size == 0:
            return torch.zeros_like(v)
        found = solve(
            lambda a: product(a) + v / size,
            v / size,
            constant=self.constant,
            norm=norm,
            tolerance=max(self.tolerance, 64 * torch.finfo(v.dtype).eps / (1 - self.constant) ** 2),
            acceleration=self.acceleration,
        )
        return size * found.value


def attach(equation: Equation, z: Tensor, u: Tensor, tensors: Sequence[Tensor]) -> Tensor:
    """The fixed point z of u with its derivatives with respect to u and to the tensors of f."""
    made: Tensor = _Point.apply(equation, z, u, *tensors)
    return made


def differentiable(f: nn.Module) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    """The names and tensors of a module that gradients are wanted of."""
    held = {**dict(f.named_parameters()), **dict(f.named_buffers())}
    found = {name: tensor for name, tensor in held.items() if tensor.requires_grad}
    return tuple(found), tuple(found.values())


def _leaf(tensor: Tensor) -> Tensor:
    """An alias that derivatives end at, connected to what the tensor came from where second derivatives are
    wanted.
    """
    if torch.is_grad_enabled() and tensor.requires_grad:
        return tensor.view_as(tensor)
    return tensor.detach().requires_grad_()


def _filled(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    return [torch.zeros_like(t) if g is None else g for g, t in zip(grads, tensors, strict=True)]


class _Point(torch.autograd.Function):
    """(z, u, θ) ↦ z, whose derivatives are those of the solution of z = f(z, θ) + u."""

    @staticmethod
    def forward(ctx: Any, equation: Equation, z: Tensor, u: Tensor, *tensors: Tensor) -> Tensor:
        value = z.detach().clone()
        ctx.equation = equation
        ctx.save_for_backward(value, *tensors)
        return value

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> Any:
        equation: Equation = ctx.equation
        z, *tensors = ctx.saved_tensors
        a: Tensor = _Adjoint.apply(equation, v, z, *tensors)
        if not tensors:
            return None, None, a
        again = torch.is_grad_enabled()
        leaves = [_leaf(tensor) for tensor in tensors]
        with torch.enable_grad():
            value = equation.at(z if again else z.detach(), leaves)
        found = torch.autograd.grad(value, leaves, a, create_graph=again, allow_unused=True)
        return None, None, a, *_filled(found, tensors)


class _Adjoint(torch.autograd.Function):
    """(v, z, θ) ↦ a with a = Jᵀa + v, J the Jacobian of f at z."""

    @staticmethod
    def forward(ctx: Any, equation: Equation, v: Tensor, z: Tensor, *tensors: Tensor) -> Tensor:
        with torch.enable_grad():
            at = z.detach().requires_grad_()
            value = equation.at(at, [tensor.detach() for tensor in tensors])

        def transposed(a: Tensor) -> Tensor:
            return torch.autograd.grad(value, at, a, retain_graph=True)[0]

        a = equation.settle(transposed, v, dual(equation.norm)) if value.requires_grad else v.clone()
        ctx.equation = equation
        ctx.save_for_backward(a, z, *tensors)
        return a

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, w: Tensor) -> Any:
        """b = J b + w is the gradient of v, and that of z and θ is that of aᵀJ(z, θ)b."""
        equation: Equation = ctx.equation
        a, z, *tensors = ctx.saved_tensors
        with torch.enable_grad():
            at, cotangent = z.detach().requires_grad_(), a.detach().requires_grad_()
            leaves = [tensor.detach().requires_grad_() for tensor in tensors]
            value = equation.at(at, leaves)
            (pulled,) = torch.autograd.grad(value, at, cotangent, create_graph=True)

        def product(b: Tensor) -> Tensor:
            return torch.autograd.grad(pulled, cotangent, b, retain_graph=True)[0]

        b = equation.settle(product, w, equation.norm)
        found = torch.autograd.grad(pulled, [at, *leaves], b, allow_unused=True)
        return None, b, *_filled(found, [z, *tensors])
