"""Linear layers of torch as layers with a promise, and back."""

from __future__ import annotations

import torch
from torch import nn

from regard._enclosed import product_norm
from regard.errors import ArgumentError
from regard.nn.digits import below_one, working
from regard.nn.interchange import reading, writing
from regard.nn.orthogonal import NormBounded, Orthogonal
from regard.nn.promises import check_finite
from regard.nn.structure import intrusions


@reading.rule(nn.Linear)
def _read_linear(module: nn.Linear) -> NormBounded:
    """The same map, with the promise of its own norm: it may be trained on and grows no longer than it is."""
    check_finite(module)
    with torch.no_grad():
        weight = module.weight.detach().to(working(module.weight))
        room = below_one(weight.dtype)
        bound = float(product_norm(weight.double())) / room
        if not bound > 0:
            raise ArgumentError(
                "module", "has the weight zero", "a promise is above zero; leave the layer out"
            )
        made = NormBounded(module.in_features, module.out_features, bound, bias=module.bias is not None)
        made.to(weight)
        made.raw.copy_(weight / room)
        if module.bias is not None:
            assert made.bias is not None
            made.bias.copy_(module.bias)
    return made


@writing.rule(NormBounded)
@writing.rule(Orthogonal)
def _write_linear(module: NormBounded | Orthogonal) -> nn.Linear:
    """The matrix as it is; torch does not keep it so."""
    wrong = next(intrusions(module), None)
    if wrong is not None:
        name = type(module).__name__
        raise ArgumentError("module", f"is a {name} that {wrong}", "remove what was put in: it would be lost")
    weight = module.weight.detach()
    made = nn.Linear(module.inputs, module.outputs, module.bias is not None, dtype=weight.dtype)
    made.to(weight.device)
    with torch.no_grad():
        made.weight.copy_(weight)
        if module.bias is not None:
            made.bias.copy_(module.bias)
    return made
