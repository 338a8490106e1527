"""What torch's derivative transforms are doing: rules that compose with them,
and whether a tensor is under one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor
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


def no_transform_runs() -> bool:
    """Whether no transform of torch.func is at work, so that buffers may be written in place."""
    return torch._C._functorch.peek_interpreter_stack() is None and not torch.is_grad_enabled()
