"""gathered: a module whose parameters lie over several processes, read as if they did not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Whole tensors in place of shards (DTensors of fully sharded and tensor parallel modules); all processes
    must ask, in the same order.
    """
    named = itertools.chain(module.named_parameters(), module.named_buffers())
    whole: dict[str, Any] = {
        name: tensor.detach().full_tensor()  # type: ignore[attr-defined]
        for name, tensor in named
        if type(tensor.detach()).__name__ == "DTensor"
    }
    if not whole:
        yield
        return
    from torch.nn.utils.stateless import _reparametrize_module

    with _reparametrize_module(module, whole):
        yield
