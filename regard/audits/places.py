"""Places: where attention is in a model, and which adapter knows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import nn

from regard.audits.adapters import Adapter, adapter_of
from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.adapters.general import General
from regard.audits.calling import called
from regard.audits.capture import capture, quiet
from regard.audits.checks.base import Scene
from regard.audits.rounding import agreeing
from regard.audits.site import Site
from regard.audits.watching import ObservedSite, Spot

BESIDE = ("Output", "Norm", "Mask", "Bias", "Embedding", "Embeddings", "Structure")
"""How the names end of modules that stand beside attention and have its name in theirs."""


NO_BLOCK = "no residual stream was found around it"


@dataclass(frozen=True)
class Place:
    """Where attention is in a model, and who knows it.

    around: the block around it, found by what modules do, or why none is known; final: the norm that was
    found after its stack; direct: whether it was seen to read the residual stream itself.
    """

    spot: Spot
    layer: int
    kind: str
    adapter: Adapter
    around: Block | str | None = None
    final: str | None = None
    direct: bool = False

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
        block = self.around if found is None else block_in_call(found, self.spot.turn)
        if not isinstance(block, Block):
            return None
        return replace(block, final=self.final) if block.final is None else block

    def alone(self, model: nn.Module, trace: dict[str, Call]) -> str:
        """Why there are no numbers of a block around it; nothing where there are."""
        block = self.block(model)
        if block is None:
            return self.around if isinstance(self.around, str) else NO_BLOCK
        if not block.single:
            return "the module around it holds the attention of several layers"
        return not_called(block, trace)

    def site(self, model: nn.Module, call: Call | None) -> Site:
        """The declaration for one call."""
        if call is None:
            raise NotCovered("the module was not called on this input")
        if self.spot.part and not isinstance(self.adapter, General):
            raise NotCovered("its module computes several attentions, and the adapter declares the first")
        with quiet(model):
            declared = self.adapter.declare(model, self.path, model.get_submodule(self.path), call)
        return Site(self.name, self.layer, self.kind, declared, self.block(model))

    def observe(self, scene: Scene, reason: str) -> ObservedSite:
        """What was seen to happen on an input."""
        return ObservedSite(
            self.spot,
            self.layer,
            self.kind,
            reason,
            scene.model,
            scene.trace,
            scene.seen[self.spot],
            self.block(scene.model),
            any(spot != self.spot and spot.call == self.spot.call for spot in scene.seen),
        )

    def agreeing_site(self, model: nn.Module, call: Call | None) -> tuple[Site, float, float]:
        """The declaration, how far it is from the module, and how far the module's rounding takes it."""
        if call is None:
            raise NotCovered("the module was not called")
        return agreeing(partial(self.site, model), model.get_submodule(self.path), call)


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

    Examples:
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> found = regard.audits.sites(model, {"src": torch.randn(1, 6, 8)})
        >>> len(found), type(found[0]).__name__
        (2, 'Site')
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
        name = type(module).__name__
        if "attention" in name.lower() and not name.endswith(BESIDE) and not related:
            yield path, name


def block_paths(block: Block) -> tuple[str, ...]:
    """Every module that a block names."""
    return (block.path, *block.attention, *block.mlp, *(() if block.final is None else (block.final,)))


def not_called(block: Block, trace: dict[str, Call]) -> str:
    """Which module of a block was not called as a module; nothing where each was."""
    missing = [name for name in block_paths(block) if name not in trace]
    return f"{missing[0]} was not called as a module" if missing else ""


def whole_stacks(blocks: list[Block], trace: dict[str, Call]) -> list[Block]:
    """The blocks of stacks all of which were called: others are no chain of maps."""
    bad = {block.stack for block in blocks if not_called(block, trace)}
    return [block for block in blocks if block.stack not in bad]


def block_in_call(block: Block, turn: int) -> Block:
    """The block in a later call of it; the norm after the last block is called once."""
    if turn == 0:
        return block
    attention, mlp = (tuple(called(path, turn) for path in part) for part in (block.attention, block.mlp))
    return replace(block, path=called(block.path, turn), attention=attention, mlp=mlp)
