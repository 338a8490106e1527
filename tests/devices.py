"""OnDevice: the tests on another device, as they stand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

RANDOM = {torch.rand, torch.randn, torch.randint, torch.randperm, torch.normal}


class OnDevice(TorchFunctionMode):
    """Tensors that are made without a device are made on this one; random numbers are those of a CPU, so that
    a test draws the same ones everywhere.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.device = device

    def __torch_function__(
        self, function: Callable[..., Any], types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = options or {}
        if function not in _device_constructors() or options.get("device") is not None:
            return function(*arguments, **options)
        if function not in RANDOM:
            return function(*arguments, **{**options, "device": self.device})
        moving = options.get("requires_grad", False)
        drawn = function(*arguments, **{**options, "device": "cpu", "requires_grad": False})
        return drawn.to(self.device).requires_grad_(moving)
