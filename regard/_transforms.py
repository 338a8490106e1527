"""What torch's derivative transforms are doing: rules that compose with them,
and whether a tensor is under one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake
from torch.autograd import forward_ad


@contextmanager
def forward_rule(ctx: Any) -> Iterator[tuple[Tensor, ...]]:
    """The saved tensors inside a forward derivative rule, such that the rule can itself be differentiated
    forward.

    torch runs such rules with forward mode off, which loses the tangents of outer levels without a word (jvp
    of jvp would be wrong). So it is switched on, and the saved tensors are stripped of the tangents of this
    level, which the rule gets anyway.
    """
    saved = tuple(forward_ad.unpack_dual(t).primal for t in ctx.saved_tensors)
    with forward_ad._set_fwd_grad_enabled(True):
        yield saved


def push(
    function: Callable[..., Any], primals: tuple[Tensor, ...], tangents: tuple[Tensor, ...]
) -> tuple[Any, Any]:
    """The value of a function and its change along tangents: torch.func.jvp, wherever it is called.

    torch.func.jvp does not run inside a plain torch.autograd.forward_ad level; there u ↦ Jᵀu, which is
    linear, is transposed.
    """
    from torch._functorch import eager_transforms

    if forward_ad._current_level < 0 or eager_transforms.JVP_NESTING > 0:
        value, change = torch.func.jvp(function, primals, tangents)[:2]
        return value, change
    value, pull = torch.func.vjp(function, *primals)[:2]
    zeros = pytree.tree_map(torch.zeros_like, value)
    transposed = torch.func.vjp(lambda u: pull(u), zeros)[1]
    return value, transposed(tangents)[0]


Backward = Callable[..., tuple[Any, ...]]


def batches_gradients(backward: Backward) -> Backward:
    """Decorator of a backward rule that uses torch.func: it also takes the batches of cotangents of
    torch.autograd.grad(is_grads_batched=True), which torch maps by an older vmap that knows no torch.func.
    """

    @wraps(backward)
    def rule(ctx: Any, *cotangents: Tensor | None) -> tuple[Any, ...]:
        if torch.compiler.is_compiling() or not any(map(_is_batch, cotangents)):
            return backward(ctx, *cotangents)
        level = torch._C._vmapmode_increment_nesting() - 1
        torch._C._vmapmode_decrement_nesting()
        places = [index for index, c in enumerate(cotangents) if _is_batch(c)]
        found: list[bool] = []

        def one(*some: Tensor) -> tuple[Tensor, ...]:
            every = list(cotangents)
            for place, cotangent in zip(places, some, strict=True):
                every[place] = cotangent
            gradients = backward(ctx, *every)
            found[:] = [gradient is not None for gradient in gradients]
            return tuple(gradient for gradient in gradients if gradient is not None)

        batches = (c for c in cotangents if c is not None and _is_batch(c))
        results = iter(torch.func.vmap(one)(*(torch._remove_batch_dim(b, level, 0, 0) for b in batches)))
        return tuple(torch._add_batch_dim(next(results), 0, level) if there else None for there in found)

    return rule


def _is_batch(value: Any) -> bool:
    return isinstance(value, Tensor) and torch._C._functorch.is_legacy_batchedtensor(value)


def moves(value: Tensor) -> bool:
    """Whether some derivative with respect to a tensor may be asked for: reverse or forward, by autograd
    or by any level of torch.func.
    """
    if torch.compiler.is_compiling():
        return value.requires_grad and torch.is_grad_enabled()
    top = torch._C._functorch.peek_interpreter_stack()
    if top is None:
        return (value.requires_grad and torch.is_grad_enabled()) or forward_ad.unpack_dual(
            value
        ).tangent is not None
    here = torch._C._functorch.maybe_get_level(value) == top.level()
    tracked = here and torch._C._functorch.is_gradtrackingtensor(value)
    if tracked and (value.requires_grad or forward_ad.unpack_dual(value).tangent is not None):
        return True
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    with temporarily_pop_interpreter_stack():
        return moves(torch._C._functorch.get_unwrapped(value) if here else value)


def is_recorded(value: Tensor) -> bool:
    """Whether a program is being recorded rather than run: compiled, exported or traced, or run on tensors
    that have shapes but no numbers.
    """
    return torch.compiler.is_compiling() or torch.jit.is_tracing() or value.is_meta or is_fake(value)


def is_shape_only(value: Tensor) -> bool:
    """Whether a program runs as it stands, on tensors of the device meta: shapes without numbers."""
    return value.is_meta and not (torch.compiler.is_compiling() or torch.jit.is_tracing() or is_fake(value))


def is_only_run(*tensors: Tensor | None) -> bool:
    """Whether a program is run and neither differentiated, mapped nor recorded."""
    return not (
        torch.compiler.is_compiling()
        or torch.jit.is_tracing()
        or torch._C._are_functorch_transforms_active()
        or forward_ad._current_level >= 0
        or (torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors))
    )


def no_transform_runs() -> bool:
    """Whether no transform of torch.func is at work, so that buffers may be written in place."""
    return torch._C._functorch.peek_interpreter_stack() is None and not torch.is_grad_enabled()


@dataclass(frozen=True)
class Duals:
    """Values and tangents as plain tensors."""

    primals: tuple[Tensor | None, ...]
    tangents: tuple[Tensor | None, ...]


def duals_of(*tensors: Tensor | None) -> Duals | None:
    """What one level of forward mode moves, where it is all that is at work; else None."""
    if torch.compiler.is_compiling() or torch.jit.is_tracing() or forward_ad._current_level < 0:
        return None
    top = torch._C._functorch.peek_interpreter_stack()
    if top is not None and not _is_only_jvp(top):
        return None
    pairs = [(None, None) if t is None else _unpacked(t, top) for t in tensors]
    inside = [t for pair in pairs for t in pair if t is not None]
    if any(_is_batch(t) or is_recorded(t) for t in inside):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in inside):
        return None
    return Duals(tuple(p for p, _ in pairs), tuple(t for _, t in pairs))


@contextmanager
def on_plain_tensors() -> Iterator[None]:
    """Outside the innermost transform and all derivatives, for what `duals_of` found."""
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    there = torch._C._functorch.peek_interpreter_stack() is not None
    outside = temporarily_pop_interpreter_stack() if there else nullcontext()
    with torch.no_grad(), forward_ad._set_fwd_grad_enabled(False), outside:
        yield


def _is_only_jvp(top: Any) -> bool:
    """Whether the innermost transform of torch.func is a jvp, and the only one."""
    from torch._functorch.pyfunctorch import temporarily_pop_interpreter_stack

    if top.key() != torch._C._functorch.TransformType.Jvp:
        return False
    with temporarily_pop_interpreter_stack():
        return torch._C._functorch.peek_interpreter_stack() is None


def _unpacked(value: Tensor, top: Any) -> tuple[Tensor, Tensor | None]:
    """A value and its tangent, without the wrapping of the innermost transform."""
    primal, tangent = forward_ad.unpack_dual(value)
    if top is None:
        return primal, tangent
    unwrap, level = torch._C._functorch._unwrap_for_grad, top.level()
    return unwrap(primal, level), None if tangent is None else unwrap(tangent, level)
