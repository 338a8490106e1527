"""The monitor as a callback of transformers' Trainer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from regard.callbacks.bases import base
from regard.callbacks.numbers import scalars
from regard.errors import MissingExtraError
from regard.nn.monitors import Monitor, monitor

if TYPE_CHECKING:
    Base = object
else:
    Base = base(("transformers",), "TrainerCallback")  # without transformers any, and making one is an error


class TrainerMonitor(Base):
    """Watches the attention of the model that a Trainer trains, and logs what it measures by trainer.log: it
    is in the trainer's history, in TensorBoard, in Weights & Biases, in whatever the trainer reports to.

    options: those of regard.nn.monitor. `watch` is the monitor of the training that runs, or ran last.

    Examples:
        >>> watching = regard.callbacks.TrainerMonitor(None, heads=True, every=50)  # see watch_trainer
        >>> watching.heads, watching.options
        (True, {'every': 50})
    """

    def __init__(self, trainer: Any, *, heads: bool = False, **options: Any) -> None:
        if Base is object:
            raise MissingExtraError("transformers", "trainer")
        self.trainer, self.heads, self.options = trainer, heads, options
        self.watch: Monitor | None = None
        self._logged = 0

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        """Begin to watch; a training that was interrupted may have left hooks."""
        self.on_train_end(args, state, control)
        model = self.trainer.model if model is None else model
        self.watch = monitor(getattr(model, "module", model), **self.options)
        self._logged = 0
        self.watch.__enter__()

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Count an update of the weights, and log what is new; the trainer's own log stays due."""
        if self.watch is None:
            return
        self.watch.step()
        if len(self.watch.history) > self._logged:
            self._logged = len(self.watch.history)
            due = control.should_log
            self.trainer.log(scalars(self.watch.history[-1], heads=self.heads))
            control.should_log = due

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Take the hooks away."""
        if self.watch is not None:
            self.watch.__exit__(None, None, None)


def watch_trainer(trainer: Any, *, heads: bool = False, **options: Any) -> TrainerMonitor:
    """Let a Trainer of transformers watch the attention of its model while it trains; options: those of
    regard.nn.monitor (every, window, growth, level). heads=True logs every head.

    Examples:
        >>> class Trainer:  # as transformers has one
        ...     def add_callback(self, callback):
        ...         self.callback = callback
        >>> trainer = Trainer()
        >>> regard.callbacks.watch_trainer(trainer, every=50) is trainer.callback
        True
    """
    made = TrainerMonitor(trainer, heads=heads, **options)
    trainer.add_callback(made)
    return made
