"""The derivative of any differentiable map from its autograd graph, which is built once.

Products with the Jacobian are passes through that graph, without a new forward pass.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from regard._object import Object
from regard._transforms import moves
from regard.certificate import Hypothesis
from regard.derive.differences import APART, DIRECTIONS, disagreement
from regard.derive.jacobian import Jacobian
from regard.derive.long_attention import LongAttention
from regard.errors import ArgumentError

Function = Callable[[Tensor], Tensor]


class Graph:
    """x ↦ tensors, with both products from retained graphs.

    Jᵀu is a backward pass. u ↦ Jᵀu is linear, so its own backward pass along t gives J t: that graph is built
    once as well.
    """

    def __init__(self, point: Tensor, outputs: list[Tensor]) -> None:
        self.point, self.outputs = point, outputs
        self._moving = [index for index, output in enumerate(outputs) if output.requires_grad]
        self._dual: tuple[list[Tensor], Tensor | None] | None = None

    def pull(self, cotangents: list[Tensor]) -> Tensor:
        """Σ Jᵀu over the outputs."""
        live, pulls = [self.outputs[i] for i in self._moving], [cotangents[i] for i in self._moving]
        found = (
            torch.autograd.grad(live, self.point, pulls, retain_graph=True, allow_unused=True)[0]
            if live
            else None
        )
        return torch.zeros_like(self.point) if found is None else found

    def push(self, tangent: Tensor) -> list[Tensor | None]:
        """J t for each output; None where an output does not move."""
        dummies, gradient = self._dual or self._transpose()
        moved: list[Tensor | None] = [None] * len(self.outputs)
        if gradient is None or not gradient.requires_grad:
            return moved
        found = torch.autograd.grad(gradient, dummies, tangent, retain_graph=True, allow_unused=True)
        for index, change in zip(self._moving, found, strict=True):
            moved[index] = change
        return moved

    def _transpose(self) -> tuple[list[Tensor], Tensor | None]:
        """The graph of u ↦ Jᵀu."""
        dummies = [torch.zeros_like(self.outputs[i]).requires_grad_() for i in self._moving]
        gradient = None
        if dummies:
            with torch.enable_grad():
                live = [self.outputs[i] for i in self._moving]
                gradient = torch.autograd.grad(
                    live, self.point, dummies, create_graph=True, allow_unused=True
                )[0]
        self._dual = (dummies, gradient)
        return self._dual


class GraphJacobian(Jacobian):
    """The derivative of a function, a torch.nn.Module or a declaration without a closed form here."""

    def __init__(self, function: Function, point: Tensor, batch: int) -> None:
        self._function = function
        self._trusted = False
        self.batch_leads = True
        self.point = point.detach().clone()
        self.batch_shape = self.point.shape[:batch]
        leaf, value = self._run(self.point)
        if not isinstance(value, Tensor):
            remedy = "linearize a function whose value is one tensor, e.g. lambda x: model(x)[0]"
            raise ArgumentError("map", f"returns a {type(value).__name__}", remedy)
        if value.shape[:batch] != self.batch_shape:
            found = f"has value {list(value.shape)} at a point {list(point.shape)}"
            raise ArgumentError(
                "batch",
                f"is {batch}, and the map {found}",
                "these leading dimensions must be the same, or give batch=0",
            )
        self._graph = Graph(leaf, [value])
        self.value = value.detach()

    def _run(self, point: Tensor) -> tuple[Tensor, Any]:
        """A leaf at a point and the function's value there, with its graph."""
        leaf = point.clone().requires_grad_()
        with torch.enable_grad(), twice_differentiable():
            return leaf, self._function(leaf)

    def trusted(self) -> tuple[Hypothesis, ...]:
        return (self._agreement,)

    @cached_property
    def _agreement(self) -> Hypothesis:
        """That autograd differentiates the map; an error where values of the map say something else."""
        apart = disagreement(lambda z: self._run(z)[1].detach(), self.point, self.value, self.mv)
        if apart > APART:
            found = f"has another derivative than autograd takes; values differ from it by {apart:.1%}"
            remedy = (
                "remove detach, no_grad, .data and numpy from it, repair its backward pass, call eval() if "
                "it is random, or move the point off a kink; norm() and singular() are of the derivative "
                "that autograd takes"
            )
            raise ArgumentError("map", found, remedy)
        seen = f"differences of values agree with it to {APART:.1%} in {DIRECTIONS} random directions"
        return Hypothesis(f"autograd's derivative is that of the map; {seen}", False)

    def mv(self, tangent: Tensor) -> Tensor:
        check_vector("tangent", tangent, self.shape_in)
        if not self._trusted:
            self._compare()
        return self._push(tangent)

    def _push(self, tangent: Tensor) -> Tensor:
        with twice_differentiable():
            moved = self._graph.push(tangent)[0]
        return torch.zeros_like(self.value) if moved is None else moved.clone()

    def _compare(self) -> None:
        """⟨u, J t⟩ = ⟨Jᵀu, t⟩ once: a backward pass that cannot be differentiated would lose its part of J
        t without a word.
        """
        generator = torch.Generator(self.device).manual_seed(0)
        t, u = (
            torch.randn(z.shape, generator=generator, dtype=z.dtype, device=z.device)
            for z in (self.point, self.value)
        )
        pushed, pulled = self._push(t), self.rmv(u)
        terms = (u * pushed).double(), (pulled * t).double()
        size = sum(float(z.square().sum()) for z in terms) ** 0.5
        eps = torch.finfo(self.dtype).eps
        zero = 100 * eps * float(self.value.norm() * u.norm() * t.norm())  # no more than rounding
        if abs(float(terms[0].sum() - terms[1].sum())) > max(100 * eps**0.5 * size, zero):
            found = (
                "has a backward pass that cannot be differentiated "
                "(once_differentiable, or run without a graph)"
            )
            raise ArgumentError(
                "map", found, "write the backward pass in differentiable operations; rmv works as it is"
            )
        self._trusted = True

    def rmv(self, cotangent: Tensor) -> Tensor:
        return self._graph.pull([check_vector("cotangent", cotangent, self.shape_out)])

    def second(self, tangent: Tensor) -> Tensor:
        return second_derivative(self._function, self.point, check_vector("tangent", tangent, self.shape_in))

    def block(self, i: int, j: int) -> Tensor:
        i, j = check_index("i", i, self.value.shape[-2]), check_index("j", j, self.point.shape[-2])
        return self._tokens(slice(i, i + 1))[..., 0, j, :, :]

    def rows(self) -> Iterator[tuple[slice, Tensor]]:
        for i in range(self.value.shape[-2]):
            yield slice(i, i + 1), self._tokens(slice(i, i + 1))

    def _tokens(self, tokens: slice) -> Tensor:
        """The blocks of one output token, (..., 1, n, d_out, d_in):
        one backward pass for each output and each head.
        """
        shape, lead = self.value.shape, len(self.batch_shape)
        if len(shape) < 2 or self.point.ndim < 2:
            raise ArgumentError(
                "map",
                f"takes {list(self.shape_in)} to {list(shape)}",
                "blocks are between tokens: use shapes (..., n, d)",
            )
        found = []
        for head in itertools.product(*(range(size) for size in shape[lead:-2])):
            for c in range(shape[-1]):
                unit = torch.zeros_like(self.value)
                unit[(Ellipsis, *head, tokens, c)] = 1  # type: ignore[index]
                found.append(self.rmv(unit).reshape(*self.batch_shape, *self.point.shape[-2:]))
        rows = torch.stack(found, -2).unflatten(-2, (-1, shape[-1]))  # (*batch, n, heads, d_out, d_in)
        blocks = (
            rows.movedim(-3, lead).unflatten(lead, shape[lead:-2])
            if len(shape) > lead + 2
            else rows.squeeze(-3)
        )
        return blocks.unsqueeze(-4)

    def in_double(self) -> Jacobian:
        """Of a module or a map with the same numbers; nobody can say what a function would do in float64."""
        point, batch = self.point.double(), len(self.batch_shape)
        if isinstance(self._function, nn.Module):
            return GraphJacobian(copy.deepcopy(self._function).double(), point, batch)
        if isinstance(self._function, Object):
            return GraphJacobian(pytree.tree_map(double, self._function), point, batch)
        remedy = "a certificate needs float64: write the function and the point in it, with .double()"
        raise ArgumentError("map", f"computes in {self.dtype}", remedy)

    def nudge(self, relative: float, generator: torch.Generator) -> Jacobian:
        return GraphJacobian(
            self._function, nudge_tensor(self.point, relative, generator), len(self.batch_shape)
        )


def double(value: Any) -> Any:
    """Real numbers in float64, everything else as it is."""
    return value.double() if isinstance(value, Tensor) and value.dtype.is_floating_point else value


def nudge_tensor(value: Tensor, relative: float, generator: torch.Generator) -> Tensor:
    """Every entry moved by up to `relative` of its size, one way or the other."""
    drawn = torch.rand(value.shape, generator=generator, dtype=value.dtype, device=value.device)
    return value * (1 + relative * (2 * drawn - 1))


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """torch's own attention in the form that has second derivatives (of long inputs in O(n) memory),
    and errors that say what else may lack them.
    """
    try:
        with sdpa_kernel(SDPBackend.MATH), LongAttention():
            yield
    except (RuntimeError, NotImplementedError) as error:
        if (
            "derivative" not in str(error)
            and "forward AD" not in str(error)
            and "forward-mode" not in str(error)
        ):
            raise
        raise ArgumentError(
            "map",
            f"uses an operation without the derivative that is needed ({error})",
            "replace it, e.g. by attention in plain torch operations",
        ) from error


def second_derivative(function: Function, point: Tensor, tangent: Tensor) -> Tensor:
    """D²f[t, t], by forward mode over forward mode."""

    def slope(x: Tensor) -> Tensor:
        return torch.func.jvp(function, (x,), (tangent,))[1]

    with twice_differentiable():
        return torch.func.jvp(slope, (point,), (tangent,))[1]


def check_index(name: str, index: int, count: int) -> int:
    """An index of `count` tokens, counted from the end if negative."""
    if not -count <= index < count:
        raise ArgumentError(name, f"is {index}", f"there are {count} tokens")
    return range(count)[index]


def check_vector(name: str, value: Tensor, shape: torch.Size) -> Tensor:
    """A tangent or cotangent must have the shape of what it moves,
    and must not be under differentiation itself.
    """
    if not isinstance(value, Tensor) or value.shape != shape:
        found = (
            f"has shape {list(value.shape)}" if isinstance(value, Tensor) else f"is a {type(value).__name__}"
        )
        raise ArgumentError(name, found, f"give a tensor of shape {list(shape)}")
    if moves(value):
        remedy = "a Jacobian is linear: apply it to the tangent's own tangent, or detach it"
        raise ArgumentError(name, "is being differentiated", remedy)
    return value
