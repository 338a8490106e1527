"""What is learned about places while a model runs: where it computes attention, what was called, and which
weights are whose.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call
from regard.audits.adapters.columns import linear_layers
from regard.audits.adapters.general import General
from regard.audits.calling import moving_tensors, path_and_turn
from regard.audits.capture import capture, first_tensor, output_tensor
from regard.audits.inputs import Input
from regard.audits.places import Place
from regard.audits.residual import Stream, blocks_of, final_norms
from regard.audits.watching import Sight, Spot, spots, watching
from regard.errors import ArgumentError


@dataclass(frozen=True)
class Noticed:
    """Where a model computes attention and what was noticed there, and the modules that were called."""

    seen: dict[Spot, Sight] = field(default_factory=dict)
    called: frozenset[str] = frozenset()

    def __or__(self, other: Noticed) -> Noticed:
        """What was noticed on one input, and also on another."""
        return Noticed({**other.seen, **self.seen}, self.called | other.called)


def notice(model: nn.Module, options: dict[str, Any], index: int) -> Noticed:
    """What there is to notice on an input.

    Some models replace modules of theirs when they are first called, and are looked at again.
    """
    before = modules_of(model)
    with watching(before) as watch:
        run_on(model, options, [], index)
    same = all(before.get(path) is module for path, module in model.named_modules())
    return Noticed(spots(watch.noticed), watch.called) if same else notice(model, options, index)


def typical(inputs: Iterable[Input]) -> list[Input]:
    """The shortest input, and the shortest with each other set of arguments, which reaches other modules."""
    found: dict[frozenset[str], Input] = {}
    for item in sorted(inputs, key=lambda item: _size(item.options)):
        found.setdefault(frozenset(item.options), item)
    return list(found.values())


def _size(options: dict[str, Any]) -> int:
    return sum(leaf.numel() for leaf in pytree.tree_leaves(options) if isinstance(leaf, Tensor))


def around_blocks(model: nn.Module, found: list[Place]) -> list[str]:
    """The modules whose calls tell what is around attention: all where a block is unknown; else the last
    block of each stack that has no known norm after it, and what may be one, which keeps little.
    """
    blocks = [place.block(model) for place in found]
    known = [block for block in blocks if block is not None]
    if len(known) < len(blocks):
        return list(modules_of(model))
    last = {block.stack: path_and_turn(block.path)[0] for block in known if block.final is None}
    inside = tuple(f"{path_and_turn(block.path)[0]}." for block in known)
    norms = [path for path, module in model.named_modules() if _may_be_norm(module)]
    return [*last.values(), *(path for path in norms if not path.startswith(inside))] if last else []


def _may_be_norm(module: nn.Module) -> bool:
    """Whether a module has vectors for parameters and no modules in it."""
    return not list(module.children()) and all(part.ndim < 2 for part in module.parameters())


def with_blocks(model: nn.Module, calls: dict[str, Call], found: list[Place]) -> list[Place]:
    """Places with the blocks and the norms after stacks that no adapter names, found by what modules did."""
    own = {place.spot: place.block(model) for place in found}
    alone = [(place.path, place.spot.turn) for place in found if own[place.spot] is None]
    attentions = [place.path for place in found]
    around = blocks_of(model, calls, alone, attentions)
    known = [block for block in own.values() if block is not None]
    known += [block for block in around.values() if isinstance(block, Block)]
    norms = final_norms(model, calls, known, attentions)
    placed = []
    for place in found:
        block = own[place.spot] or around.get((place.path, place.spot.turn))
        if isinstance(block, Block) and not block.single and _holds(block, known):
            block = "the module around it holds the blocks of other attention too"
        named = replace(place, around=None if own[place.spot] is not None else block)
        final = norms.get(block.stack) if isinstance(block, Block) else None
        single = isinstance(block, Block) and block.single
        direct = not single and Stream(calls).direct(place.path, place.spot.turn)
        placed.append(replace(named, final=final, direct=direct))
    return placed


def _holds(block: Block, known: list[Block]) -> bool:
    return any(other.path.startswith(f"{block.path}.") for other in known)


def learned(model: nn.Module, place: Place, calls: dict[str, Call], noticed: dict[Spot, Sight]) -> Place:
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


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    return dict(model.named_modules())


def run_on(model: nn.Module, options: dict[str, Any], paths: list[str], index: int) -> dict[str, Call]:
    """What modules did on an input; errors of the model name the input."""
    try:
        return capture(model, options, paths)
    except ArgumentError:
        raise
    except (AttributeError, TypeError, ValueError, IndexError, KeyError, RuntimeError) as error:
        found = f"{index + 1} cannot be run ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
        remedy = "give what the model itself takes: its keyword arguments, or texts with its tokenizer"
        raise ArgumentError("inputs", found, remedy) from error
