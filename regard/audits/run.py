"""audit: find the attention of a model, declare it, prove the declaration on the audited inputs,
and measure it.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, Protocol

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters import Adapter, adapter_of
from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.adapters.columns import linear_layers
from regard.audits.adapters.general import General
from regard.audits.calling import called, moving_tensors, path_and_turn
from regard.audits.capture import capture, first_tensor, output_tensor, quiet
from regard.audits.checks import Check
from regard.audits.checks import checks as all_checks
from regard.audits.checks.base import Measurable, Result, Scene, Weights
from regard.audits.collect import TWIN, collect
from regard.audits.inputs import Input, inputs_of
from regard.audits.memory import give_back
from regard.audits.report import Report
from regard.audits.residual import blocks_of
from regard.audits.rounding import agreeing
from regard.audits.samples import samples
from regard.audits.site import Site
from regard.audits.store import Store
from regard.audits.twin import CHECKS, random_twin
from regard.audits.watching import ObservedSite, Sight, Spot, spots, watching
from regard.audits.yardstick import columns_of
from regard.errors import ArgumentError, MissingExtraError
from regard.proofs.near.facts import forget_facts

Progress = Callable[[str, int, int], None]
"""Called with what is done now, how much is done, and how much there is."""
Step = tuple[str, str, Callable[[], None]]
"""What is done at a time: a name, the key of its result, and the work."""
SEED = 20200706
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
    model: nn.Module,
    inputs: str | Tensor | dict[str, Tensor] | Sequence[str] | Sequence[Tensor] | Sequence[dict[str, Tensor]],
    *,
    tokenizer: Any = None,
    checks: Sequence[Check | str] | None = None,
    name: str = "model",
    twin: bool = False,
    progress: Progress | None = None,
) -> Report:
    """Measure the attention of a loaded model on these inputs: texts (with a tokenizer) or keyword arguments
    of the model, one or several.

    checks: which questions to ask, by name or as values; all by default (`regard checks` lists them). twin:
    measure the same architecture with random weights on the first input too, to compare with. The model is
    not changed.

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> report = regard.audit(model, torch.randn(1, 6, 8), checks=["rows"])
        >>> len(report.missing)  # nothing was left out
        0
    """
    several: Any = [inputs] if isinstance(inputs, (str, Mapping, Tensor)) else inputs
    run = Audit(model, several, tokenizer=tokenizer, checks=checks, name=name, twin=twin)
    run.measure(progress)
    report = run.report()
    if not report.coverage:
        found = f"{type(model).__name__} has no attention that regard finds: nothing was measured"
        warnings.warn(found, stacklevel=2)
    return report


class Audit:
    """An audit while it runs: places to measure, and the results so far."""

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
    ) -> None:
        self.checks = _check_all(checks)
        self.name, self.store = name, Store() if store is None else store
        self.disk: OnDisk | None = None if isinstance(model, nn.Module) else model
        self.original: nn.Module = model if isinstance(model, nn.Module) else model.original
        if self.disk is None:  # what is on disk is checked when it is read
            _finite(self.original)
        self.inputs: list[Input] = inputs_of(
            model if isinstance(model, nn.Module) else model.model, inputs, tokenizer
        )
        if not self.inputs and any(check.of_site or check.of_input for check in self.checks):
            raise ArgumentError("inputs", "are empty", "give at least one text")
        self.twin = twin and bool(self.inputs)

    @cached_property
    def places(self) -> list[Place]:
        """Where attention is: in modules that an adapter knows, and wherever the model is seen to compute it
        on its shortest input.
        """
        if self.disk is not None or not self.inputs:
            return list(places(self.original))
        shortest = min(self.inputs, key=lambda item: _size(item.options))
        options = self._options(shortest)
        noticed = _notice(self.model, options, shortest.index)
        found = list(all_places(self.original, noticed))
        alone = [place for place in found if place.block(self.model) is None]
        if not alone:
            return found
        calls = _run(self.model, options, list(_modules(self.model)), shortest.index)
        blocks = blocks_of(self.model, calls, ((place.path, place.spot.turn) for place in alone))
        return [
            _learned(
                self.model, replace(place, around=blocks.get((place.path, place.spot.turn))), calls, noticed
            )
            for place in found
        ]

    def _options(self, item: Input) -> dict[str, Any]:
        return _cast_options(item.options, next(self.model.parameters()).dtype)

    @cached_property
    def model(self) -> nn.Module:
        """The model in the arithmetic of the audit."""
        return working(self.original) if self.disk is None else self.disk.model

    def measure(self, progress: Progress | None = None) -> None:
        """Measure every place that is not in the store yet."""
        steps = self._steps()
        for done, (what, key, step) in enumerate(steps):
            if progress is not None:
                progress(what, done, len(steps))
            if key not in self.store:
                with torch.random.fork_rng(devices=[]):
                    torch.manual_seed(
                        SEED
                    )  # starts of randomized bounds: the same numbers whatever was done before
                    step()
        if progress is not None:
            progress("done", len(steps), len(steps))

    def report(self, unfinished: str = "") -> Report:
        """The report of what is in the store; `unfinished` says why it is not the whole."""
        return collect(self, unfinished)

    def _steps(self) -> list[Step]:
        """All that is to be done."""
        steps: list[Step] = []
        for place in self.places:
            steps.append((f"weights of {place.name}", weights_key(place), partial(self._weights, place)))
        for item in self.inputs:
            scene = _Lazy(partial(self._scene, item))
            for place in self.places:
                name = f"input {item.index + 1}, {place.name}"
                steps.append((name, site_key(item, place), partial(self._site, item, place, scene)))
            steps.append(
                (f"input {item.index + 1}, whole", input_key(item), partial(self._whole, item, scene))
            )
        if self.twin:
            steps.append(("the same architecture with random weights", TWIN, self._twin))
        return steps

    def _weights(self, place: Place) -> None:
        asked = [check for check in self.checks if check.of_weights is not None]
        if place.spot.turn or place.spot.part:  # shared weights are asked once
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
        options = self._options(item)
        with nullcontext(None) if self.disk is not None else watching(_modules(self.model)) as watch:
            trace = _run(self.model, options, sorted(paths), item.index)
        return Scene(
            self.model,
            options,
            trace,
            item.tokens,
            _chain(blocks, trace),
            item.index,
            item.text,
            item.words,
            item.encode,
            {} if watch is None else spots(watch.noticed),
            next((place.around for place in self.places if isinstance(place.around, str)), ""),
        )

    def _site(self, item: Input, place: Place, lazy: _Lazy) -> None:
        with nullcontext() if self.disk is None else self.disk.running():
            scene = lazy()
        with nullcontext() if self.disk is None else self.disk.hold_block(place.path):
            self._measure_one(item, place, scene)
        forget_facts()
        give_back()

    def _measure_one(self, item: Input, place: Place, scene: Scene) -> None:
        try:
            site, reason, found = self._judge(item, place, scene)
        except (NotCovered, ArgumentError) as error:
            self.store.put(site_key(item, place), {"reason": f"{error}, on input {item.index + 1}"})
            return
        asked = [check for check in self.checks if check.of_site is not None]
        results = {check.name: answer(check.of_site, scene, site) for check in asked}
        found |= {"heads": site.heads, "results": results}
        self.store.put(site_key(item, place), {**found, "observed": reason} if reason else found)

    def _judge(self, item: Input, place: Place, scene: Scene) -> tuple[Measurable, str, dict[str, Any]]:
        """The layer as a declaration that is proved to be the module; where there is none, as what was seen
        to happen, and why no more.
        """
        try:
            call = scene.trace.get(place.spot.call)
            call = None if call is None else replace(call, sight=scene.seen.get(place.spot))
            site, gap, rounding = place.agreeing_site(self.model, call)
            return site, "", {"disagreement": gap, "rounding": rounding}
        except (NotCovered, ArgumentError) as error:
            if place.spot not in scene.seen or place.spot.call not in scene.trace:
                raise
            observed = place.observe(scene, str(error))
            return observed, str(error), {"disagreement": observed.disagreement(), "rounding": 0.0}

    def _whole(self, item: Input, scene: _Lazy) -> None:
        asked = [check for check in self.checks if check.of_input is not None]
        if self.disk is None:
            results = {check.name: answer(check.of_input, scene()) for check in asked}
        else:
            results = {check.name: {"reason": BLOCKWISE} for check in asked}
        self.store.put(input_key(item), {"results": results})
        scene.forget()
        give_back()

    def _twin(self) -> None:
        """What the columns are with random weights, on the first input."""
        if self.disk is not None:
            self.store.put(TWIN, {"reason": BLOCKWISE})
            return
        asked = [check for check in self.checks if check.name in CHECKS]
        try:
            other = Audit(random_twin(self.model), [self.inputs[0].options], checks=asked)
            other.measure()
            self.store.put(TWIN, {"columns": columns_of(other.report())})
        except Exception as error:  # a strange model must not take the audit with it: the report says why
            why = (str(error).splitlines() or [""])[0]
            self.store.put(TWIN, {"reason": f"it could not be made ({type(error).__name__}: {why})"})
        give_back()


@dataclass(frozen=True)
class Place:
    """Where attention is in a model, and who knows it.

    around: the block around it, found by what modules do, or why none is known.
    """

    spot: Spot
    layer: int
    kind: str
    adapter: Adapter
    around: Block | str | None = None

    @property
    def path(self) -> str:
        """Of the module."""
        return self.spot.path

    @property
    def name(self) -> str:
        """What a report calls it."""
        return self.spot.name

    def block(self, model: nn.Module) -> Block | None:
        """What stands around it."""
        found = self.adapter.block(model, self.path, model.get_submodule(self.path))
        if found is not None:
            return block_in_call(found, self.spot.turn)
        return self.around if isinstance(self.around, Block) else None

    def site(self, model: nn.Module, call: Call | None) -> Site:
        """The declaration for one call."""
        if call is None:
            raise NotCovered("the module was not called on this input")
        with quiet(model):
            declared = self.adapter.declare(model, self.path, model.get_submodule(self.path), call)
        return Site(self.name, self.layer, self.kind, declared, self.block(model))

    def observe(self, scene: Scene, reason: str) -> ObservedSite:
        """What was seen to happen on an input."""
        block = self.block(scene.model)
        return ObservedSite(
            self.spot, self.layer, self.kind, reason, scene.model, scene.trace, scene.seen[self.spot], block
        )

    def agreeing_site(self, model: nn.Module, call: Call | None) -> tuple[Site, float, float]:
        """The declaration, how far it is from the module, and how far the module's rounding takes it."""
        if call is None:
            raise NotCovered("the module was not called")
        return agreeing(partial(self.site, model), model.get_submodule(self.path), call)


@dataclass
class _Lazy:
    """A scene that is made when somebody needs it, and forgotten when its input is done."""

    make: Callable[[], Scene]
    found: list[Scene] = field(default_factory=list)

    def __call__(self) -> Scene:
        if not self.found:
            self.found.append(self.make())
        return self.found[0]

    def forget(self) -> None:
        self.found.clear()


def places(model: nn.Module) -> Iterator[Place]:
    """The attention modules that an adapter knows, in the order of the model."""
    return all_places(model, ())


def all_places(model: nn.Module, noticed: Iterable[Spot]) -> Iterator[Place]:
    """The same and where attention was noticed: every call of a module, in the order of the model."""
    modules = dict(model.named_modules())
    known = [Spot(path) for path, module in modules.items() if adapter_of(module) is not None]
    order = {path: number for number, path in enumerate(modules)}
    found = sorted({*known, *noticed}, key=lambda spot: (order[spot.path], spot.turn, spot.part))
    for layer, spot in enumerate(found):
        module = modules[spot.path]
        yield Place(spot, layer, type(module).__name__, adapter_of(module) or General())


def sites(model: nn.Module, options: dict[str, Any]) -> list[Site]:
    """Every attention layer of a model, as a declaration, on the input with these keyword arguments;
    NotCovered where one is not.
    """
    found = list(places(model))
    trace = capture(model, options, [place.path for place in found])
    return [place.site(model, trace.get(place.path)) for place in found]


def unknown(model: nn.Module, found: Iterable[Place] | None = None) -> Iterator[tuple[str, str]]:
    """Modules that call themselves attention, and are neither known nor wrap or sit inside what is known."""
    known = [place.path for place in (places(model) if found is None else found)]
    for path, module in model.named_modules():
        related = any(
            path in ("", own) or own.startswith(f"{path}.") or path.startswith(f"{own}.") for own in known
        )
        if "attention" in type(module).__name__.lower() and not related:
            yield path, type(module).__name__


def block_paths(block: Block) -> tuple[str, ...]:
    """Every module that a block names."""
    return (block.path, *block.attention, *block.mlp, *(() if block.final is None else (block.final,)))


def block_in_call(block: Block, turn: int) -> Block:
    """The block in a later call of it; the norm after the last block is called once."""
    if turn == 0:
        return block
    attention, mlp = (tuple(called(path, turn) for path in part) for part in (block.attention, block.mlp))
    return Block(called(block.path, turn), attention, mlp, block.final)


def weights_key(place: Place) -> str:
    """The name of a result in the store."""
    return f"weights-{place.layer}"


def site_key(item: Input, place: Place) -> str:
    """The name of a result in the store."""
    return f"input-{item.index}-site-{place.layer}"


def input_key(item: Input) -> str:
    """The name of a result in the store."""
    return f"input-{item.index}-whole"


def answer(measure: Any, *arguments: Any) -> dict[str, Any]:
    """A result for the store, and the reason where there is none or something of it is missing."""
    try:
        result: Result = measure(*arguments)
    except (NotCovered, ArgumentError, MissingExtraError) as reason:
        return {"reason": str(reason)}
    except (
        Exception
    ) as error:  # a strange module must not take the other checks with it: what went wrong is in the report
        return {"reason": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    found = {"numbers": result.numbers, "table": result.table}
    return {**found, "reason": result.reason} if result.reason else found


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


def _run(model: nn.Module, options: dict[str, Any], paths: list[str], index: int) -> dict[str, Call]:
    """What modules did on an input; errors of the model name the input."""
    try:
        return capture(model, options, paths)
    except ArgumentError:
        raise
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        found = f"{index + 1} cannot be run ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        remedy = "give what the model itself takes: its keyword arguments, or texts with its tokenizer"
        raise ArgumentError("inputs", found, remedy) from error


def _notice(model: nn.Module, options: dict[str, Any], index: int) -> dict[Spot, Sight]:
    """Where a model computes attention on an input, and what was noticed there.

    Some models replace modules of theirs when they are first called, and are looked at again.
    """
    before = _modules(model)
    with watching(before) as watch:
        _run(model, options, [], index)
    same = all(before.get(path) is module for path, module in model.named_modules())
    return spots(watch.noticed) if same else _notice(model, options, index)


def _learned(model: nn.Module, place: Place, calls: dict[str, Call], noticed: dict[Spot, Sight]) -> Place:
    """A place that no family's adapter knows, with what its call says about its weights."""
    if not isinstance(place.adapter, General) or place.spot.call not in calls:
        return place
    call = replace(calls[place.spot.call], sight=noticed.get(place.spot))
    module = model.get_submodule(place.path)
    before, after = _giving(place, calls), _taking(model, place, calls)
    return replace(place, adapter=place.adapter.learn(model, place.path, module, call, before, after))


def _giving(place: Place, calls: dict[str, Call]) -> str | None:
    """The module right before attention in its block, whose output the attention was given as it is."""
    names = place.around.attention if isinstance(place.around, Block) else ()
    if not names or names[0] == place.spot.call or names[0] not in calls:
        return None
    given, taken = output_tensor(calls[names[0]].output), first_tensor(calls[place.spot.call])
    return path_and_turn(names[0])[0] if _same(given, taken) else None


def _taking(model: nn.Module, place: Place, calls: dict[str, Call]) -> str | None:
    """The linear layer beside attention that was given all that it returned, as it was, and nothing else."""
    given = next(moving_tensors(calls[place.spot.call].output), None)
    if given is None or place.spot.turn or place.spot.part:
        return None
    above = place.path.rpartition(".")[0]
    for path, module in model.get_submodule(above).named_modules(prefix=above):
        if path in calls and not path.startswith(f"{place.path}.") and not list(module.children()):
            taken = list(moving_tensors((calls[path].arguments, calls[path].options)))
            if linear_layers(module) and len(taken) == 1 and _same(taken[0], given):
                return path
    return None


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _modules(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())


def _size(options: dict[str, Any]) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(options) if isinstance(leaf, Tensor))


def _chain(blocks: list[Block], trace: dict[str, Call]) -> list[Block]:
    """The blocks of stacks all of which were called: others are no chain of maps."""
    bad = {
        block.path.rpartition(".")[0]
        for block in blocks
        if any(name not in trace for name in block_paths(block))
    }
    return [block for block in blocks if block.path.rpartition(".")[0] not in bad]


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
    """The sentences that come with the package."""
    return samples("sentences")
