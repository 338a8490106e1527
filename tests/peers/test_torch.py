"""torch's own samples for scaled_dot_product_attention (its OpInfo), answered by attend: values, gradients of
first and second order, forward mode, batched gradients, all with torch's seed where weights are dropped.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import regard as r

pytest.importorskip("expecttest")  # torch's own tests need it

NAME = "nn.functional.scaled_dot_product_attention"


@cache
def operation() -> Any:
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == NAME)


def samples(dtype: torch.dtype, requires_grad: bool = False) -> list[Any]:
    torch.manual_seed(0)
    return list(operation().sample_inputs("cpu", dtype, requires_grad=requires_grad))


def translated(options: dict[str, Any]) -> dict[str, Any]:
    """torch's keyword arguments as regard writes them."""
    mask = options.get("attn_mask")
    boolean = isinstance(mask, Tensor) and mask.dtype == torch.bool
    support = r.Causal() if options.get("is_causal") else r.Where(mask) if boolean else r.Full()
    potential = r.Dot(scale=options.get("scale"))
    potential = potential if mask is None or boolean else potential + r.PairBias(mask)
    return {"support": support, "potential": potential, "dropout": options.get("dropout_p", 0.0)}


def seeded(function: Any, *arguments: Any, **options: Any) -> Tensor:
    torch.manual_seed(11)
    return function(*arguments, **options)


def test_there_are_samples_of_every_kind() -> None:
    options = [sample.kwargs for sample in samples(torch.float32)]
    assert len(options) >= 25
    assert any(o.get("dropout_p") for o in options)
    assert any(o.get("is_causal") for o in options)
    assert any(o.get("attn_mask") is not None for o in options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_values(dtype: torch.dtype) -> None:
    """As near to float64 as torch is, or nearer: entries up to nine make scores in which rounding shows."""
    for sample in samples(dtype):
        tensors = (sample.input, *sample.args)
        wide = {k: v.double() if _real(v) else v for k, v in sample.kwargs.items()}
        exact = seeded(F.scaled_dot_product_attention, *(t.double() for t in tensors), **wide)
        theirs = seeded(F.scaled_dot_product_attention, *tensors, **sample.kwargs)
        mine = seeded(r.attend, *tensors, **translated(sample.kwargs))
        assert mine.dtype == dtype
        errors = [float((found - exact).abs().max()) for found in (mine, theirs)]
        room = 64 if dtype == torch.float64 else 4  # there the yardstick is torch itself
        assert errors[0] <= 1.5 * errors[1] + room * torch.finfo(dtype).eps * float(exact.abs().max())


def _real(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point


def test_gradients() -> None:
    for sample in samples(torch.float64, requires_grad=True):
        tensors = (sample.input, *sample.args)
        wanted = seeded(F.scaled_dot_product_attention, *tensors, **sample.kwargs)
        found = seeded(r.attend, *tensors, **translated(sample.kwargs))
        cotangent = torch.randn_like(wanted)
        pairs = [torch.autograd.grad(value, tensors, cotangent) for value in (wanted, found)]
        for one, other in zip(*pairs, strict=True):
            torch.testing.assert_close(one, other)


def small() -> list[Any]:
    """One sample of each kind of arguments: second derivatives by finite differences take long."""
    kinds: dict[str, Any] = {}
    for sample in samples(torch.float64, requires_grad=True):
        options = {name: name if isinstance(o, Tensor) else o for name, o in sample.kwargs.items()}
        kinds.setdefault(repr(sorted(options.items())), sample)
    return list(kinds.values())


def cut(sample: Any) -> tuple[Tensor, ...]:
    """Two features and one element of the batch."""
    tensors = (sample.input, *sample.args)
    return tuple(t.detach()[(0,) * (t.ndim - 2)][..., :2].clone().requires_grad_() for t in tensors)


def test_derivatives_of_every_order() -> None:
    for sample in small():
        options = translated(sample.kwargs)

        def function(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any] = options) -> Tensor:
            return seeded(r.attend, q, k, v, **options)

        tensors = cut(sample)
        assert torch.autograd.gradcheck(function, tensors, check_forward_ad=True, check_batched_grad=True)
        if not options["dropout"]:
            assert torch.autograd.gradgradcheck(function, tensors)
