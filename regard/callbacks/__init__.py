"""The monitor of attention in other people's training loops: transformers' Trainer, Lightning, any logger.

regard.callbacks.watch_trainer(trainer, every=10)          # transformers
Trainer(callbacks=[regard.callbacks.LightningMonitor()])   # Lightning
wandb.log(regard.callbacks.scalars(watch.history[-1]))     # a loop of your own
"""

import importlib
from typing import TYPE_CHECKING, Any

from regard.callbacks.numbers import scalars

if TYPE_CHECKING:
    from regard.callbacks.lightning_monitor import LightningMonitor
    from regard.callbacks.trainer_monitor import TrainerMonitor, watch_trainer

_LAZY = {
    "LightningMonitor": "lightning_monitor",
    "TrainerMonitor": "trainer_monitor",
    "watch_trainer": "trainer_monitor",
}
"""What needs a package of its own is loaded when it is asked for."""


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(f"regard.callbacks.{_LAZY[name]}"), name)
    raise AttributeError(f"module 'regard.callbacks' has no attribute {name!r}")


__all__ = ["LightningMonitor", "TrainerMonitor", "scalars", "watch_trainer"]
