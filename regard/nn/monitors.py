"""monitor: how regular every head of a model is while it trains, and a warning where one grows too fast."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from regard._kinds import names_wrong_kinds
from regard._written import plain
from regard.audits.adapters import Call, NotCovered
from regard.audits.adapters.base import Declared
from regard.audits.capture import quiet
from regard.audits.places import Place, places, unknown
from regard.derive import Estimate
from regard.errors import ArgumentError
from regard.nn.monitoring.gathered import gathered
from regard.nn.monitoring.readings import first_sequences, jacobian_norm, keep, of_call, of_weights
from regard.nn.monitoring.rule import Entry, Growth, Rule, as_entry, check_history, suspect
from regard.nn.monitoring.table import as_text

UNSEEN = (
    "no forward pass with gradients was seen, or the model is compiled: weights alone are read, and their "
    "growth is not judged"
)
ADVICE = "a lower learning rate, a longer warm-up, or norms of queries and keys hold scores back"
SEQUENCES = 4
"""How many sequences of a batch are read: a part of the cost of a pass."""
SEED = 20200706


class RegularityWarning(UserWarning):
    """The scores of a head grow so fast that training may soon fail; `growth` has the numbers.

    Examples:
        >>> issubclass(regard.nn.RegularityWarning, UserWarning)  # a filter may make it an error
        True
    """

    def __init__(self, growth: Growth) -> None:
        self.growth = growth
        super().__init__(f"{growth}; {ADVICE}")


@names_wrong_kinds
def monitor(
    model: nn.Module,
    *,
    window: int = 10,
    growth: float = 2.0,
    level: float = 50.0,
    every: int = 10,
    history: Sequence[Entry] = (),
) -> Monitor:
    """Watch the attention of a model while it trains: `with monitor(model) as watch: ...;
    watch.step(loss=...)` after each update.

    Every `every` steps, and at the first: |W_Q W_Kᵀ|₂ and |W_V W_O|₂ of each head from its weights; mean
    entropy and largest logit from the first forward pass with gradients of that step (its first four
    sequences, without dropout). A head warns where its largest logit is at least `level` and `growth` times
    the smallest of `window` measurements before, or its QK norm grew as much and the logit is at least `level
    / growth`.
    `history`: of an earlier part of the same training, to go on from.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> with regard.nn.monitor(layer, every=1) as watch:
        ...     for _ in range(2):
        ...         layer(torch.randn(2, 4, 8)).sum().backward()
        ...         watch.step()
        >>> [entry["step"] for entry in watch.history], watch.warnings
        ([1, 2], [])
    """
    _positive("window", window)
    _positive("every", every)
    if not _is_number(growth) or not growth > 1:
        raise ArgumentError(
            "growth", f"is {growth!r}", "give how many times as large a quantity must become, more than 1"
        )
    if not _is_number(level) or not level >= 0:
        raise ArgumentError("level", f"is {level!r}", "give a logit below which growth does not matter")
    return Monitor(model, Rule(window, growth, level), every, check_history(history))


class Monitor:
    """What `monitor` gives: history, warnings, and the table of the last measurement.

    history: a plain dictionary for each measurement: step, loss, layers (numbers by head), warnings.
    not_covered: what could not be read, and why. Steps count from the last of the history.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        >>> with regard.nn.monitor(layer, every=1) as watch:  # a Monitor
        ...     layer(torch.randn(2, 4, 8)).sum().backward()
        ...     watch.step(loss=0.5)
        >>> len(watch.history), sorted(next(iter(watch.history[0]["layers"].values())))[:2]
        (1, ['entropy', 'max_logit'])
    """

    def __init__(self, model: nn.Module, rule: Rule, every: int, history: Sequence[Entry] = ()) -> None:
        self.model, self.rule, self.every = model, rule, every
        self.history: list[Entry] = list(history)
        self.warnings: list[RegularityWarning] = []
        self.not_covered = {path: f"no adapter knows {kind}" for path, kind in unknown(model)}
        self.count = self.history[-1]["step"] if self.history else 0
        self._places = list(places(model))
        if not self._places:
            raise ArgumentError("model", "has no attention that regard knows", _remedy())
        self._read: dict[str, dict[str, Any]] = {}
        self._seen: dict[str, Declared] = {}
        self._handles: list[Any] = []
        self._asked = False

    def __enter__(self) -> Monitor:
        if self._handles:
            raise ArgumentError(
                "monitor",
                "is entered already, and would read each pass twice",
                "make another with monitor(model)",
            )
        self._handles = [
            self.model.get_submodule(place.path).register_forward_hook(
                self._recorder(place), with_kwargs=True
            )
            for place in self._places
        ]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles, self._seen = [], {}

    def step(self, *, loss: float | Tensor | None = None) -> None:
        """Count an update of the weights, and measure where one is due."""
        due, value = self._due(), _plain_loss(loss)
        self.count += 1
        if due:
            self.measure(loss=value, stacklevel=3)

    def look(self) -> None:
        """Read the next forward pass, whatever the step; `measure` then has it."""
        self._asked = True
        self._read = {}

    def measure(self, *, loss: float | Tensor | None = None, stacklevel: int = 2) -> Entry:
        """Measure now: the weights as they are, and the pass that was seen for this step."""
        value = _plain_loss(loss)
        self._asked = False
        layers = {place.path: self._weights(place) | self._read.pop(place.path, {}) for place in self._places}
        for path, numbers in layers.items():
            if "entropy" not in numbers:
                self.not_covered.setdefault(path, UNSEEN)
            elif self.not_covered.get(path) == UNSEEN:
                del self.not_covered[path]
        entry: Entry = plain({"step": self.count, "loss": value, "layers": layers, "warnings": []})
        self.history.append(entry)
        self._warn(entry, stacklevel + 1)
        return entry

    def jacobians(self) -> dict[str, Estimate]:
        """The Jacobian norm of each attention layer at the first sequence of the pass that was read last,
        from below.

        Weights are those of that pass or of now: ask right after a step. The last measurement gets them as
        `jacobian_norm`.
        """
        found = {place.path: self._jacobian(place) for place in self._places if place.path in self._seen}
        made = {path: estimate for path, estimate in found.items() if estimate is not None}
        for path, estimate in made.items():
            if self.history:
                self.history[-1]["layers"][path]["jacobian_norm"] = plain(float(estimate))
        return made

    def suspect(self) -> Growth | None:
        """The head whose scores grew most over the window:
        where to look when a loss has become NaN or infinite.
        """
        return suspect(self.rule, self.history)

    def table(self) -> str:
        """The last measurement, a line for each layer."""
        return as_text(self.history[-1], self.not_covered) if self.history else "nothing was measured yet"

    def __repr__(self) -> str:
        heads = len(self.warnings)
        return (
            f"Monitor of {len(self._places)} layers, {len(self.history)} measurements, {heads} warnings\n"
            f"{self.table()}"
        )

    def _due(self) -> bool:
        """Whether the step that is under way is measured at its end."""
        return self._asked or not self.history or (self.count + 1) % self.every == 0

    def _recorder(self, place: Place) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            if (
                torch.compiler.is_compiling()
                or not torch.is_grad_enabled()
                or place.path in self._read
                or not self._due()
            ):
                return
            try:
                self._look(place, module, Call(arguments, options, output))
                self.not_covered.pop(place.path, None)  # what kept an earlier pass from being read
            except NotCovered as reason:
                self.not_covered[place.path] = str(reason)
            except (
                Exception
            ) as error:  # a strange module must not end a training: what went wrong is said with the table
                self.not_covered[place.path] = (
                    f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
                )

        return record

    def _look(self, place: Place, module: nn.Module, call: Call) -> None:
        """Read a call while the weights are those it was made with."""
        with torch.no_grad(), quiet(module), gathered(module):
            declared = place.adapter.declare(self.model, place.path, module, call)
            with torch.autocast(declared.points.device.type, enabled=False):
                self._read[place.path] = of_call(first_sequences(declared, SEQUENCES))
                self._seen[place.path] = keep(first_sequences(declared, 1))

    def _weights(self, place: Place) -> dict[str, Any]:
        module = self.model.get_submodule(place.path)
        try:
            with gathered(module):
                return dict(of_weights(place.adapter.matrices(self.model, place.path, module)))
        except NotCovered as reason:
            self.not_covered[place.path] = str(reason)
            return {}

    def _jacobian(self, place: Place) -> Estimate | None:
        generator = torch.Generator().manual_seed(SEED)  # the random numbers of the training are left alone
        try:
            return jacobian_norm(place, self._seen[place.path], generator)
        except Exception as error:
            self.not_covered[place.path] = (
                f"no Jacobian norm: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
            )
            return None

    def _warn(self, entry: Entry, stacklevel: int) -> None:
        """All is kept before the first warning is raised: a filter may turn it into an error."""
        found = [RegularityWarning(growth) for growth in self.rule.found(self.history)]
        entry["warnings"] = [as_entry(warning.growth) for warning in found]
        self.warnings += found
        for warning in found:
            warnings.warn(warning, stacklevel=stacklevel)


def _positive(name: str, value: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ArgumentError(name, f"is {value!r}", "give a positive integer")


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain_loss(loss: float | Tensor | None) -> float | None:
    if loss is None:
        return None
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError):
        found = f"has shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"is {loss!r}"
        raise ArgumentError("loss", found, "give one number, such as loss.mean(), or leave it out") from None


def _remedy() -> str:
    return (
        "give a model of regard.nn, of torch.nn.MultiheadAttention, or of a family of transformers that "
        "regard audits"
    )
