"""The monitor as a callback of Lightning."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.callbacks.bases import base
from regard.callbacks.numbers import scalars
from regard.errors import MissingExtraError
from regard.nn.monitors import Monitor, monitor

PLACES = ("lightning.pytorch.callbacks", "pytorch_lightning.callbacks")
"""One library under two names."""

if TYPE_CHECKING:
    Base = object
else:
    Base = base(PLACES, "Callback")  # without Lightning any, and making one is an error


class LightningMonitor(Base):
    """Watches the attention of the module that Lightning trains, and gives what it measures to every logger
    of the trainer, by log_metrics.

    options: those of regard.nn.monitor. `watch` is the monitor of the training that runs, or ran last.

    Examples:
        >>> try:
        ...     callback = regard.callbacks.LightningMonitor(every=50)  # for Trainer(callbacks=[callback])
        ... except regard.errors.MissingExtraError:
        ...     pass  # pip install 'regard[lightning]'
    """

    def __init__(self, *, heads: bool = False, **options: Any) -> None:
        if Base is object:
            raise MissingExtraError("lightning", "lightning")
        super().__init__()
        self.heads, self.options = heads, options
        self.watch: Monitor | None = None
        self._updates = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Begin to watch."""
        self.teardown(trainer, pl_module, "fit")
        self.watch = monitor(pl_module, **self.options)
        self._updates = trainer.global_step
        self.watch.__enter__()

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count an update of the weights, of which several batches may make one."""
        if self.watch is None or trainer.global_step == self._updates:
            return
        self._updates, known = trainer.global_step, len(self.watch.history)
        self.watch.step(loss=_loss(outputs))
        if len(self.watch.history) > known:
            numbers = scalars(self.watch.history[-1], heads=self.heads)
            for logger in trainer.loggers:
                logger.log_metrics(numbers, step=trainer.global_step)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks away."""
        self.teardown(trainer, pl_module, "fit")

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """The same when a training was interrupted."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)


def _loss(outputs: Any) -> Tensor | None:
    found = outputs.get("loss") if isinstance(outputs, dict) else outputs
    return found if isinstance(found, Tensor) and found.numel() == 1 else None
