"""Choosing: tables of cheaper attention for each layer of a model while it reads a text, kept as they come,
and the whole model with a choice in every layer.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered
from regard.audits.capture import capture, quiet
from regard.audits.places import places
from regard.audits.store import Store
from regard.choices.found import MEASURES, Applied, Found, LayerFound
from regard.choices.reading import Text
from regard.choices.seen import Seen, answering
from regard.choices.wording import named
from regard.compression.choosing import LEAST, Choice, Layer, dealt, usual
from regard.compression.groups import Group
from regard.errors import ArgumentError, RefusalError
from regard.proofs.theorem import Refusal

Progress = Callable[[str, int, int], None]
RECOMMENDED = "recommended"
PLANS = 10
"""Runs of the whole model: the recommended choices, and each candidate in all layers."""
TIMED = 2
"""Groups of heads that are timed to predict the rest."""
LARGE = "takes more memory than the context itself"
"""Why a candidate is not chosen, where it keeps more than all keys and values."""


class Choosing:
    """A model and a text; share: the fraction of a context that candidates keep. dtype: in which the model
    caches keys and values, which memory is relative to. Results are kept in the store, and what is there is
    not measured again.

    Examples:
        >>> import transformers
        >>> from regard.choices import Choosing, Text
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> choosing = Choosing(model, Text("a text", torch.randint(20, (1, 120))), error=0.2)
        >>> sum(choosing.sizes)  # steps that choosing.run("a model") would take
        11
    """

    def __init__(
        self,
        model: nn.Module,
        text: Text,
        *,
        error: float,
        share: float = 0.25,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
        store: Store | None = None,
    ) -> None:
        self.model, self.text, self.error, self.share = model, text, error, share
        self.seed, self.dtype = seed, dtype
        self.store = Store() if store is None else store
        self._weight, self._runs = 1, PLANS

    def predicted(self) -> float | None:
        """Seconds that `run` will take, extrapolated from a few groups of heads of the first layer and one
        run of the model, which are timed; None where the first layer cannot be measured.
        """
        groups, forward = self._first()
        if not groups or groups[0].queries.shape[1] < LEAST:
            return None
        table, answer, self._runs = self._timed(groups)
        count, plan = len(self._paths), 2 * forward + len(self._paths) * answer
        self._weight = max(1, round(count * table / plan))
        stored = self.store.keys()
        layers = sum(f"layer-{number}" not in stored for number in range(count))
        kept = sum(key.startswith("applied-") for key in stored)
        return layers * table + max(0, self._runs - kept) * plan

    def _first(self) -> tuple[list[Group], float]:
        """The groups of heads of the first layer, none where it cannot be measured; seconds of the run."""
        found: list[list[Group]] = []

        def note(number: int, module: nn.Module, seen: Seen) -> None:
            if number == 0:
                found.append(seen.groups())

        start = time.perf_counter()
        with answering(self.model, note, lambda number, why: None):
            self._forward()
        return found[0] if found else [], time.perf_counter() - start

    def _timed(self, groups: list[Group]) -> tuple[float, float, int]:
        """Seconds of the table of a layer and of one candidate in a layer, from those of a few groups of
        heads; how often the whole model is run.
        """
        few = groups[:TIMED]
        mixers = _mixers_of(self._mixers, self._paths[0], sum(len(one.queries) for one in groups))
        candidates, everyone = usual(few[0], self.share, self.seed), torch.arange(few[0].queries.shape[1])
        start = time.perf_counter()
        members = sum(len(one.queries) for one in few)
        layer = Layer(few, mixers[:members], dealt(len(everyone), self.seed), self.dtype)
        choices = layer.table(candidates).choices
        taken = [one.candidate for one in choices if "refused" not in _numbers(one)]
        middle = time.perf_counter()
        for candidate in taken:
            for group in few:
                group.outputs(group.fit(candidate, layer.fit), everyone)
        scale, end = len(groups) / len(few), time.perf_counter()
        return scale * (middle - start), scale * (end - middle) / max(1, len(taken)), 1 + len(taken)

    def run(self, name: str, progress: Progress | None = None) -> Found:
        """Measure what is not in the store yet, and return all that was found."""
        say = progress or (lambda what, done, total: None)
        count, weight, total = len(self._paths), self._weight, sum(self.sizes)
        self._layers(lambda layer: say(f"layer {layer}", weight * layer, total))
        layers = tuple(LayerFound(**self.store.get(f"layer-{number}")) for number in range(count))
        if all(layer.refused for layer in layers):
            raise ArgumentError("MODEL", f"has no layer to choose for: {layers[0].refused}", "see --help")
        found = Found(name, self.text.name, self.text.ids.shape[1], self.error, layers, (), self.dtype)
        plans = self._plans(found)
        for number, (plan, choices) in enumerate(plans.items()):
            step = partial(self._say, say, f"whole model, {plan}", count * (weight + number), total)
            self._apply(plan, choices, layers, step)
        say("done", total, total)
        return replace(found, applied=tuple(Applied(**self.store.get(_key(plan))) for plan in plans))

    @staticmethod
    def _say(say: Progress, what: str, before: int, total: int, layer: int) -> None:
        say(what, before + layer, total)

    # Layers

    @property
    def sizes(self) -> list[int]:
        """How many steps each part has: the tables, then each run of the whole model. After a prediction the
        steps of the tables are more, so that each step takes about as long.
        """
        return [self._weight * len(self._paths)] + [len(self._paths)] * self._runs

    @cached_property
    def _paths(self) -> list[str]:
        """The module of each call of attention."""
        paths = {module: path for path, module in self.model.named_modules()}
        found: list[str] = []

        def note(number: int, module: nn.Module, seen: Seen) -> None:
            found.append(paths.get(module, type(module).__name__))

        with answering(self.model, note, lambda number, why: found.append("")):
            self._forward()
        if not found:
            why = f"{type(self.model).__name__} never calls the attention interface of transformers"
            raise ArgumentError("MODEL", why, "use a family that does, or regard.compression.cheaper")
        return found

    def _layers(self, step: Callable[[int], None]) -> None:
        """The table of every layer that is not in the store."""
        if all(f"layer-{number}" in self.store for number in range(len(self._paths))):
            return
        mixers = self._mixers  # read by a run of the model, before the one below

        def measure(number: int, module: nn.Module, seen: Seen) -> None:
            step(number)
            if f"layer-{number}" not in self.store:
                self._put(self._layer(number, seen, mixers))

        def refuse(number: int, why: str) -> None:
            self._put(LayerFound(number, self._paths[number], refused=why))

        with answering(self.model, measure, refuse):
            self._forward()

    def _put(self, found: LayerFound) -> None:
        self.store.put(f"layer-{found.layer}", vars(found))

    def _layer(self, number: int, seen: Seen, known: dict[str, Tensor]) -> LayerFound:
        groups = seen.groups()
        count = groups[0].queries.shape[1]
        if count < LEAST:
            found = f"has {count} queries"
            remedy = f"give a longer one: {LEAST} queries or more fit, calibrate and test"
            raise ArgumentError("the text", found, remedy)
        path = self._paths[number]
        mixers = _mixers_of(known, path, len(seen.queries))
        layer = Layer(groups, mixers, dealt(count, self.seed), self.dtype)
        table = layer.table(usual(groups[0], self.share, self.seed))
        choices = {named(one.candidate): _numbers(one) for one in table.choices}
        return LayerFound(number, path, table.keys, table.queries, choices, mixers[0] is not None)

    @cached_property
    def _mixers(self) -> dict[str, Tensor]:
        return _mixers(self.model, self.text.options)

    # The whole

    def _plans(self, found: Found) -> dict[str, tuple[str | None, ...]]:
        """The recommended choices, and each candidate in all layers that take it."""
        plans: dict[str, tuple[str | None, ...]] = {RECOMMENDED: found.recommended}
        for name in found.candidates:
            taken = tuple(name if _takes(layer, name) else None for layer in found.layers)
            if any(taken):
                plans[name] = taken
        return plans

    def _apply(
        self,
        plan: str,
        choices: tuple[str | None, ...],
        layers: tuple[LayerFound, ...],
        step: Callable[[int], None],
    ) -> None:
        if _key(plan) in self.store:
            return
        exact, cheap = self._forward(), self._cheaply(choices, step)
        rows = self._tested(layers)
        memory = sum(layer.memory(name) for layer, name in zip(layers, choices, strict=True)) / len(layers)
        moved = (cheap.hidden[rows] - exact.hidden[rows]).norm() / exact.hidden[rows].norm()
        numbers = _laws(exact.logits, cheap.logits, rows)
        unchanged = sum(name is None for name in choices)
        self.store.put(
            _key(plan), vars(Applied(plan, memory, *numbers[:2], float(moved), numbers[2], unchanged))
        )

    def _cheaply(self, choices: tuple[str | None, ...], step: Callable[[int], None]) -> _Outputs:
        def answer(number: int, module: nn.Module, seen: Seen) -> Tensor | None:
            step(number)
            name = choices[number]
            return None if name is None else self._answered(seen.groups(), name)

        with answering(self.model, answer, lambda number, why: None):
            return self._forward()

    def _tested(self, layers: tuple[LayerFound, ...]) -> Tensor:
        """Positions whose queries no candidate was fitted to, nor calibrated by."""
        count = next((layer.queries for layer in layers if layer.queries), self.text.ids.shape[1])
        return self.text.ids.shape[1] - count + dealt(count, self.seed)[2]

    def _answered(self, groups: list[Group], name: str) -> Tensor:
        """Outputs (h, m, e) by the candidate of that name, fitted to a third of the queries."""
        usual_ones = usual(groups[0], self.share, self.seed)
        candidate = next(one for one in usual_ones if named(one) == name)
        count = groups[0].queries.shape[1]
        fit, everyone = dealt(count, self.seed)[0], torch.arange(count)
        outputs: list[Tensor] = []
        for group in groups:
            outputs += group.outputs(group.fit(candidate, fit), everyone)
        return torch.stack(outputs)

    def _forward(self) -> _Outputs:
        with quiet(self.model), torch.no_grad():
            out = self.model(**self.text.options, output_hidden_states=True)
        hidden = out.hidden_states[-1][0].detach().double()
        logits = getattr(out, "logits", None)
        vocabulary = getattr(self.model.config, "vocab_size", None)
        speaks = isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[-1] == vocabulary
        return _Outputs(hidden, logits[0].detach() if speaks else None)  # type: ignore[index]


class _Outputs:
    """The last hidden states (n, d), and logits of the next token (n, v) where there are some."""

    def __init__(self, hidden: Tensor, logits: Tensor | None) -> None:
        self.hidden, self.logits = hidden, logits


def _laws(
    exact: Tensor | None, cheap: Tensor | None, rows: Tensor
) -> tuple[float | None, float | None, float | None]:
    """The mean of KL(exact | cheap), its standard error, and how often the most likely token stays."""
    if exact is None or cheap is None:
        return None, None, None
    p, q = (logits[rows].double().log_softmax(-1) for logits in (exact, cheap))
    gaps = (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
    deviation = float(gaps.std() / math.sqrt(len(gaps))) if len(gaps) > 1 else math.nan
    return float(gaps.mean()), deviation, float((p.argmax(-1) == q.argmax(-1)).double().mean())


def _numbers(choice: Choice) -> dict[str, Any]:
    if choice.refused or choice.memory > 1:
        return {"refused": choice.refused or LARGE}
    return {name: getattr(choice, name) for name in MEASURES}


def _takes(layer: LayerFound, name: str) -> bool:
    numbers = (layer.choices or {}).get(name)
    return numbers is not None and not numbers.get("refused")


def _key(plan: str) -> str:
    return f"applied-{plan.replace(' ', '-')}"


def _mixers(model: nn.Module, options: dict[str, Any]) -> dict[str, Tensor]:
    """The output projections (h, e, d) of the layers that an adapter knows, by path."""
    found = list(places(model))
    calls = capture(model, options, [place.path for place in found])
    mixers = {}
    for place in found:
        try:
            mixers[place.path] = place.site(model, calls.get(place.path)).w_o
        except (NotCovered, ArgumentError, Refusal, RefusalError):
            continue
    return mixers


def _mixers_of(known: dict[str, Tensor], path: str, heads: int) -> list[Tensor | None]:
    """The output projection of each head of a layer, None where no adapter knows it."""
    mixer = next((w for name, w in known.items() if _related(name, path)), None)
    return [None] * heads if mixer is None or len(mixer) != heads else list(mixer)


def _related(one: str, other: str) -> bool:
    """Whether a path is the other, or one is inside the other."""
    return one == other or one.startswith(f"{other}.") or other.startswith(f"{one}.")
