"""audit: find the attention of a model, declare it, prove the declaration on the audited inputs,
and measure it.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from os import PathLike, fspath
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Call, NotCovered
from regard.audits.adapters.general import General
from regard.audits.adapters.surroundings import elements
from regard.audits.answers import answer, input_key, site_key, weights_key
from regard.audits.calling import path_and_turn
from regard.audits.checks import Check
from regard.audits.checks import checks as all_checks
from regard.audits.checks.base import Measurable, Scene, Weights
from regard.audits.checks.pairs import pairs
from regard.audits.collect import PAIRS, TWIN, collect
from regard.audits.failure import failure
from regard.audits.inputs import Input, check_pairs, encoded, inputs_of, notes_on, refuse_file_names
from regard.audits.memory import give_back
from regard.audits.noticing import (
    Noticed,
    around_blocks,
    learned,
    modules_of,
    notice,
    run_on,
    typical,
    with_blocks,
)
from regard.audits.padding import Padded, answered_otherwise, may_be_padded, without_unseen
from regard.audits.places import Place, all_places, block_paths, whole_stacks
from regard.audits.report import Report
from regard.audits.samples import samples
from regard.audits.steps import Progress, Step, in_order
from regard.audits.store import Store
from regard.audits.twin import CHECKS, random_twin
from regard.audits.watching import spots, watching
from regard.audits.yardstick import columns_of
from regard.errors import ArgumentError
from regard.proofs.near.facts import forget_facts

PASSES, TIMED = 900, 5
"""All checks of an audit take about so many forward passes of its inputs (python -m benchmarks.audit), which
are timed on so many of them.
"""
SETUP = 15.0
"""Seconds that an audit takes whatever the texts are: the vocabulary, random weights, the first proofs."""
AT_ONCE = 1 << 20
"""How many numbers are looked at together."""
BLOCKWISE = "the model is read block by block: this needs all of its blocks in memory at once"


class OnDisk(Protocol):
    """A model whose blocks are read when they are needed.

    original: the model as it is stored, without weights; model: the same in the arithmetic of the audit, with
    what is not in blocks.
    """

    original: nn.Module
    model: nn.Module

    def running(self) -> AbstractContextManager[None]:
        """A context in which the model can be called: each block is read when its turn comes."""

    def hold_block(self, path: str) -> AbstractContextManager[None]:
        """A context in which the block around a module is in memory."""


def audit(
    model: nn.Module | str | PathLike[str],
    inputs: str | Tensor | dict[str, Tensor] | Sequence[str] | Sequence[Tensor] | Sequence[dict[str, Tensor]],
    *,
    tokenizer: Any = None,
    checks: Sequence[Check | str] | None = None,
    name: str | None = None,
    twin: bool = False,
    thorough: bool = False,
    every_word: bool = False,
    pairs: Sequence[tuple[str, str]] = (),
    seed: int = 0,
    progress: Progress | None = None,
) -> Report:
    """Measure the attention of a model on these inputs: texts (with a tokenizer) or keyword arguments of the
    model, one or several.

    model: a module, or what `regard audit` takes: the directory of a checkpoint or a hub id, which is loaded
    with its tokenizer and names the report.
    checks: which checks to make, by name or as values; all by default (`regard audit --list-checks` lists
    them). twin: measure the same architecture with random weights on the first input too, to compare with.
    thorough: prove on long inputs too, however long it takes. every_word: change every word of the texts,
    where a sample is changed otherwise. pairs: changes of your own, each an original text and a changed one.
    seed: of all random numbers; the same seed gives the same report. The model is not changed.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])
        >>> len(report.missing)  # nothing was left out
        0
    """
    several: Any = [inputs] if isinstance(inputs, (str, Mapping, Tensor)) else inputs
    headed = not isinstance(model, nn.Module)
    refuse_file_names(several)
    if not isinstance(model, nn.Module):
        reads = tokenizer is None and any(isinstance(item, str) for item in several)
        model, own, called = _loaded(model, checks, reads)
        tokenizer, name = own if reads else tokenizer, called if name is None else name
    name = "model" if name is None else name
    how: dict[str, Any] = {"thorough": thorough, "every_word": every_word, "pairs": pairs, "headed": headed}
    how |= {"twin": twin, "seed": seed}
    run = Audit(model, several, tokenizer=tokenizer, checks=checks, name=name, **how)
    for note in notes_on(run.inputs, tokenizer):
        warnings.warn(note, stacklevel=2)
    run.measure(progress)
    report = run.report()
    if not report.coverage:
        found = f"{type(model).__name__} has no attention that regard can find: nothing was measured"
        warnings.warn(found, stacklevel=2)
    return report


def _loaded(model: Any, checks: Any, reads: bool) -> tuple[nn.Module, Any, str]:
    """A checkpoint as the command line loads it, its tokenizer where texts are read, and its name."""
    from regard.audits.checkpoint import find
    from regard.audits.load import load_head, tokenizer_of

    if not isinstance(model, (str, PathLike)):
        remedy = "give a torch.nn.Module, the directory of a checkpoint, or a hub id"
        raise ArgumentError("model", f"is a {type(model).__name__}", remedy)
    checkpoint = find(fspath(model))
    tokenizer = tokenizer_of(checkpoint) if reads else None
    return load_head(checkpoint), tokenizer, checkpoint.name


class Audit:
    """An audit while it runs: places to measure, and the results so far.

    Examples:
        >>> from regard.audits import Audit
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> audit = Audit(model, [torch.randn(1, 6, 8)], checks=["rows"])
        >>> audit.measure()
        >>> len(audit.places), len(audit.report().rows) > 0
        (2, True)
    """

    def __init__(
        self,
        model: nn.Module | OnDisk,
        inputs: Sequence[Any],
        *,
        tokenizer: Any = None,
        checks: Sequence[Check | str] | None = None,
        name: str = "model",
        store: Store | None = None,
        twin: bool = False,
        thorough: bool = False,
        every_word: bool = False,
        headed: bool = False,
        pairs: Sequence[tuple[str, str]] = (),
        seed: int = 0,
    ) -> None:
        self.thorough, self.every_word, self.seed = thorough, every_word, seed
        self.tokenizer, self.pairs = tokenizer, check_pairs(pairs, tokenizer)
        self.checks = tuple(with_pairs(_check_all(checks), bool(self.pairs)))
        self.name, self.store = name, Store() if store is None else store
        self.disk: OnDisk | None = None if isinstance(model, nn.Module) else model
        self._whole_original = model if headed and isinstance(model, nn.Module) else None
        model = body_of(model) if headed and isinstance(model, nn.Module) else model
        self.original: nn.Module = model if isinstance(model, nn.Module) else model.original
        if self.disk is None:  # what is on disk is checked when it is read
            _finite(self.original)
        self.inputs: list[Input] = inputs_of(
            model if isinstance(model, nn.Module) else model.model, inputs, tokenizer
        )
        if not self.inputs and any(check.of_site or check.of_input for check in self.checks):
            raise ArgumentError("inputs", "are empty", "give at least one text")
        if self.disk is None:
            self.inputs = [self._unpadded(item) for item in self.inputs]
        self.twin = twin and bool(self.inputs)

    @cached_property
    def noticed(self) -> Noticed:
        """What is seen of attention while the model runs on its shortest input of each kind."""
        found = Noticed()
        for item in () if self.disk is not None else typical(self.inputs):
            found |= notice(self.model, self._options(item), item.index)
        return found

    @cached_property
    def places(self) -> list[Place]:
        """Where attention is: in modules that an adapter knows, and wherever it is seen to be computed."""
        found = list(all_places(self.original, self.noticed.seen))
        if self.disk is not None or not self.inputs:
            return found
        calls: dict[str, Call] = {}
        wanted = around_blocks(self.model, found)
        for item in typical(self.inputs) if wanted else []:
            calls = run_on(self.model, self._options(item), wanted, item.index) | calls
        around = with_blocks(self.model, calls, found)
        return [learned(self.model, place, calls, self.noticed.seen) for place in around]

    def _options(self, item: Input) -> dict[str, Any]:
        return self._cast(item.options)

    def _cast(self, options: dict[str, Any]) -> dict[str, Any]:
        return _cast_options(options, next(self.model.parameters()).dtype)

    @cached_property
    def model(self) -> nn.Module:
        """The model in the arithmetic of the audit."""
        if self.disk is not None:
            return self.disk.model
        return working(self.original) if self.head is None else body_of(self.head)

    @cached_property
    def head(self) -> nn.Module | None:
        """The model with its head, in the arithmetic of the audit; None where the audited model is all."""
        return None if self._whole_original is None else working(self._whole_original)

    def measure(self, progress: Progress | None = None) -> None:
        """Measure every place that is not in the store yet."""
        in_order(self.steps(), self.store, progress)

    def predicted_seconds(self) -> float:
        """Estimate of the time of all checks, from the fastest of three forward passes of some inputs."""
        some = self.inputs[:TIMED]
        if self.disk is not None or not some:
            return math.nan
        taken = sum(min(self._forward_seconds(self._options(item)) for _ in range(3)) for item in some)
        tokens = [max(1, len(item.tokens)) for item in self.inputs]
        return SETUP + PASSES * taken * sum(tokens) / sum(tokens[:TIMED])

    def _forward_seconds(self, options: dict[str, Any]) -> float:
        started = time.perf_counter()
        with torch.no_grad():
            self.model(**options)
        return time.perf_counter() - started

    def report(self, unfinished: str = "") -> Report:
        """The report of what is in the store; `unfinished` says why it is not the whole."""
        return collect(self, unfinished)

    def steps(self) -> list[Step]:
        """All that is to be done, in any order."""
        scenes = _Scenes(self._scene)
        steps = [
            Step(f"weights of {place.name}", weights_key(place), partial(self._weights, place))
            for place in self.places
        ]
        for item in self.inputs:
            where = f"input {item.index + 1}"
            for place in self.places:
                work = partial(self._site, item, place, scenes)
                steps.append(Step(f"{where}, {place.name}", site_key(item, place), work))
            steps.append(Step(f"{where}, whole", input_key(item), partial(self._whole, item, scenes)))
        if self.pairs:
            steps.append(Step("pairs of texts", PAIRS, self._pairs))
        if self.twin:
            steps.append(Step("the same architecture with random weights", TWIN, self._twin))
        return [step._replace(seed=self.seed) for step in steps]

    def _weights(self, place: Place) -> None:
        asked = [check for check in self.checks if check.of_weights is not None]
        if place.spot.turn or (place.spot.part and not isinstance(place.adapter, General)):  # asked once
            self.store.put(weights_key(place), {"results": {}})
            return
        try:
            weights = Weights.of(place.adapter, self.model, place.path, place.layer) if asked else None
        except NotCovered as reason:
            self.store.put(weights_key(place), {"reason": str(reason)})
            return
        results = {c.name: answer(c.of_weights, weights) for c in asked}
        self.store.put(weights_key(place), {"results": results})

    def _scene(self, item: Input) -> Scene:
        blocks = [block for place in self.places if (block := place.block(self.model)) is not None]
        paths = {place.path for place in self.places}
        paths |= {path_and_turn(name)[0] for block in blocks for name in block_paths(block)}
        paths |= {path for stack in {block.stack for block in blocks} for path in elements(self.model, stack)}
        options = self._options(item)
        with nullcontext(None) if self.disk is not None else watching(modules_of(self.model)) as watch:
            trace = run_on(self.model, options, sorted(paths), item.index)
        return Scene(
            self.model,
            options,
            trace,
            item.tokens,
            whole_stacks(blocks, trace),
            item.index,
            item.text,
            item.reading,
            item.encode,
            {} if watch is None else spots(watch.noticed),
            {place.name: why for place in self.places if (why := place.alone(self.model, trace))},
            frozenset(place.name for place in self.places if place.direct),
            self.thorough,
            self.seed,
            self.head,
            self.every_word,
            len(self.inputs),
        )

    def _site(self, item: Input, place: Place, scenes: _Scenes) -> None:
        with nullcontext() if self.disk is None else self.disk.running():
            scene = scenes.of(item)
        with nullcontext() if self.disk is None else self.disk.hold_block(place.path):
            self._measure_one(item, place, scene)
        forget_facts()
        give_back()

    def _measure_one(self, item: Input, place: Place, scene: Scene) -> None:
        try:
            site, reason, found = self._judge(item, place, scene)
        except (NotCovered, ArgumentError) as error:
            found = {"reason": f"{error}, on input {item.index + 1}"}
            absent = {} if place.spot.call in scene.trace else {"absent": True}
            self.store.put(site_key(item, place), {**found, **absent})
            return
        asked = [check for check in self.checks if check.of_site is not None]
        results = {check.name: answer(check.of_site, scene, site) for check in asked}
        found |= {"heads": site.heads, "results": results}
        self.store.put(site_key(item, place), {**found, "observed": reason} if reason else found)

    def _judge(self, item: Input, place: Place, scene: Scene) -> tuple[Measurable, str, dict[str, Any]]:
        """The layer as a declaration that agrees with the module; where there is none, as what was seen to
        happen, and why no more.
        """
        try:
            return self._declared(place, scene)
        except (NotCovered, ArgumentError) as error:
            reason: Exception = error
        except Exception as error:  # a strange module must not take the audit with it: the page says why
            reason = NotCovered(f"it was not declared: {failure(error)}")
        if place.spot not in scene.seen or place.spot.call not in scene.trace:
            raise reason
        observed = place.observe(scene, str(reason))
        return observed, str(reason), {"disagreement": observed.disagreement(), "rounding": 0.0}

    def _declared(self, place: Place, scene: Scene) -> tuple[Measurable, str, dict[str, Any]]:
        call = scene.trace.get(place.spot.call)
        call = None if call is None else replace(call, sight=scene.seen.get(place.spot))
        site, gap, rounding = place.agreeing_site(self.model, call)
        return site, "", {"disagreement": gap, "rounding": rounding}

    def _whole(self, item: Input, scenes: _Scenes) -> None:
        asked = [check for check in self.checks if check.of_input is not None]
        if self.disk is None:
            results = {check.name: answer(check.of_input, scenes.of(item)) for check in asked}
        else:
            results = {check.name: {"reason": BLOCKWISE} for check in asked}
        padding = "" if item.padded is None else self._padding(item.padded, item)
        self.store.put(input_key(item), {"results": results, **({"padding": padding} if padding else {})})
        scenes.forget()
        give_back()

    def _unpadded(self, item: Input) -> Input:
        """An input without the tokens that the model hides although no mask that is known here names them."""
        if item.padded is not None or item.text is not None or not may_be_padded(item.options):
            return item
        seen = notice(self.model, self._options(item), item.index).seen
        options, padded = without_unseen(item.options, seen.values())
        if padded is None:
            return item
        names = item.tokens
        for kept in padded.kept:
            if len(kept) == len(names):
                names = [name for name, own in zip(names, kept.tolist(), strict=True) if own]
        return replace(item, options=options, tokens=names, padded=padded)

    def _padding(self, padded: Padded, item: Input) -> str:
        """What is to be said about an input whose padding was omitted."""
        with nullcontext() if self.disk is None else self.disk.running():
            given, alone = (
                run_on(self.model, self._cast(options), [""], item.index)[""].output
                for options in (padded.given, item.options)
            )
        return answered_otherwise(padded.kept, given, alone)

    def _pairs(self) -> None:
        """Compare the answers to the pairs of texts that the user gave."""
        if self.disk is not None:
            self.store.put(PAIRS, {"results": {"pairs": {"reason": BLOCKWISE}}})
            return
        model = self.model if self.head is None else self.head
        encode = partial(encoded, model, self.tokenizer)
        self.store.put(
            PAIRS, {"results": {"pairs": answer(pairs, model, self.tokenizer, self.pairs, encode)}}
        )

    def _twin(self) -> None:
        """What the columns are with random weights, on the first input."""
        if self.disk is not None:
            self.store.put(TWIN, {"reason": BLOCKWISE})
            return
        asked = [check for check in self.checks if check.name in CHECKS]
        try:
            other = Audit(
                random_twin(self.model, self.seed), [self.inputs[0].options], checks=asked, seed=self.seed
            )
            other.measure()
            self.store.put(TWIN, {"columns": columns_of(other.report())})
        except Exception as error:  # a strange model must not take the audit with it: the report says why
            self.store.put(TWIN, {"reason": f"it could not be made: {failure(error)}"})
        give_back()


@dataclass
class _Scenes:
    """The scene of one input at a time, made when somebody needs it."""

    make: Callable[[Input], Scene]
    held: dict[int, Scene] = field(default_factory=dict)

    def of(self, item: Input) -> Scene:
        if item.index not in self.held:
            self.forget()
            self.held[item.index] = self.make(item)
        return self.held[item.index]

    def forget(self) -> None:
        self.held.clear()


def body_of(model: nn.Module) -> nn.Module:
    """The part of a transformers model below its head; the model itself where it has none."""
    return getattr(model, "base_model", model)


def working(model: nn.Module) -> nn.Module:
    """The model in float32 or float64, as it is; a copy in float32 where its weights are shorter."""
    if all(
        p.dtype in (torch.float32, torch.float64) for p in model.parameters() if p.dtype.is_floating_point
    ):
        return model
    other = copy.deepcopy(model)
    for mine, theirs in zip(model.modules(), other.modules(), strict=True):
        if isinstance(mine, nn.TransformerDecoderLayer):  # torch forgets its activation on the way
            setattr(theirs, "activation", mine.activation)  # noqa: B010 (the type of a module does not know it)
    return other.to(torch.float32)


def _check_all(checks: Sequence[Check | str] | None) -> tuple[Check, ...]:
    known = {check.name: check for check in all_checks()}
    usual = [check for check in known.values() if not check.named]
    found = usual if checks is None else [checks] if isinstance(checks, str) else list(checks)
    for check in found:
        if not isinstance(check, (Check, str)) or (isinstance(check, str) and check not in known):
            remedy = f"give names of {', '.join(known)}"
            raise ArgumentError("checks", f"has {check!r}, a {type(check).__name__}", remedy)
    return tuple(known[check] if isinstance(check, str) else check for check in found)


def with_pairs(asked: Sequence[Check], given: bool) -> list[Check]:
    """Return the checks, with the one of the user's own pairs exactly where pairs are given."""
    others = [check for check in asked if check.name != PAIRS]
    return [*others, *(check for check in all_checks() if given and check.name == PAIRS)]


def _cast_options(options: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """Keyword arguments in the arithmetic of the model."""

    def cast(leaf: Any) -> Any:
        return leaf.to(dtype) if isinstance(leaf, Tensor) and leaf.dtype.is_floating_point else leaf

    return {name: pytree.tree_map(cast, value) for name, value in options.items()}


def _finite(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            raise ArgumentError(
                "model", f"has no numbers in {name} (it is on the meta device)", "load its weights first"
            )
        parts = parameter.detach().flatten().split(AT_ONCE)  # a copy of the largest would be a peak of memory
        if not all(bool(part.isfinite().all()) for part in parts):
            raise ArgumentError(
                "model",
                f"has NaN or infinity in {name}",
                "repair or retrain it: nothing can be said about such a layer",
            )


def included_sentences() -> list[str]:
    """The sentences that come with the package.

    Examples:
        >>> sentences = regard.audits.included_sentences()
        >>> len(sentences) > 3, all(sentence.strip() for sentence in sentences)
        (True, True)
    """
    return samples("sentences")
