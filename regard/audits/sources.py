"""Sources: the tokens that a stack of blocks is computed from, and the arguments of the model that they are
made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.adapters.base import Call
from regard.audits.adapters.surroundings import elements
from regard.audits.calling import fresh, path_and_turn
from regard.audits.capture import (
    Function,
    Leaves,
    first_tensor,
    leaves_of,
    output_tensor,
    passage,
    quiet,
    recording,
    replaced,
)
from regard.audits.checks.base import Scene
from regard.audits.residual import close, key_of

NO_TOKENS = ("mask", "position", "token_type")
"""Arguments of a model with these in their names are not tokens."""


@dataclass(frozen=True, eq=False)
class Source:
    """Tokens (n, d) that enter a stack; leaves: where they are among the arguments of its blocks; made_of:
    the arguments of the model that change them; before: the stack, or the attention, whose output they are
    made of.
    """

    stack: str
    leaves: Leaves
    point: Tensor
    made_of: tuple[str, ...]
    before: str | None

    @property
    def given(self) -> bool:
        """Whether they are what the model was given, and not learned or the output of another stack."""
        return bool(self.made_of) and self.before is None

    @property
    def name(self) -> str:
        """How a reader finds it."""
        if self.before is not None:
            return f"the output of {self.before}"
        return ", ".join(self.made_of) or "learned tokens"

    def passage(self, scene: Scene, end: str) -> Function:
        """What a call returns as a function of them."""
        return passage(scene.model, scene.options, self.leaves, end)


def sources(scene: Scene, stack: str) -> list[Source]:
    """The tokens that enter a stack: those of its residual stream, and all others that its blocks read and
    that change with the input; computed once for an input.
    """
    known = _known.setdefault(scene, {})
    if stack not in known:
        known[stack] = _sources(scene, stack)
    return known[stack]


_known: WeakKeyDictionary[Scene, dict[str, list[Source]]] = WeakKeyDictionary()


def not_given(scene: Scene) -> str:
    """Why the tokens that enter the first stack are not those of the input, or not all that is read of it, or
    why its blocks are not all of it; nothing where they are.
    """
    stack = next(iter(scene.stacks))
    own = sources(scene, stack)[0]
    if not own.given:
        return f"the tokens that enter {stack} are {own.name}, and not those of the input"
    if missing := incomplete(scene, stack):
        return missing
    also = [name for name in beside(scene, stack) if name in own.made_of]
    return f"{stack} reads {also[0]} also in another way than as the tokens that enter it" if also else ""


def incomplete(scene: Scene, stack: str) -> str:
    """Why the blocks of a stack are not all that is between its ends; nothing where they are."""
    paths = [block.path for block in scene.stacks[stack]]
    known = {*paths, scene.end(stack)}
    kinds = {type(scene.model.get_submodule(path_and_turn(path)[0])) for path in paths}
    listed = isinstance(scene.model.get_submodule(stack), nn.ModuleList)
    for path in elements(scene.model, stack):
        if path in known or path not in scene.trace:
            continue
        outside = scene.follows(path, paths[0]) or scene.follows(paths[-1], path)
        attends = any(spot.path == path or spot.path.startswith(f"{path}.") for spot in scene.seen)
        if outside and (listed or attends or type(scene.model.get_submodule(path)) in kinds):
            what = "is no block that is known" if attends else "has no attention in it"
            return f"{path} stands next to the blocks and {what}"
    return ""


def beside(scene: Scene, stack: str) -> tuple[str, ...]:
    """The arguments of the model that change what a stack returns while all tokens that enter it are held:
    it reads them in another way, as from an attribute, or between two blocks; those of the stacks that its
    tokens are made of too.
    """
    own = sources(scene, stack)
    earlier = (beside(scene, other.before) for other in own if other.before in scene.stacks)
    return tuple(dict.fromkeys((*(name for names in earlier for name in names), *_held(scene, stack, own))))


def _held(scene: Scene, stack: str, own: list[Source]) -> tuple[str, ...]:
    """The arguments that change what a stack returns while its own tokens are held; computed once."""
    known = _beside.setdefault(scene, {})
    if stack not in known:
        known[stack] = _read_beside(scene, scene.end(stack), [one for one in own if "" not in one.leaves])
    return known[stack]


_beside: WeakKeyDictionary[Scene, dict[str, tuple[str, ...]]] = WeakKeyDictionary()


def _read_beside(scene: Scene, end: str, held: list[Source]) -> tuple[str, ...]:
    wanted = _returned(scene, end, held, scene.options)
    if wanted is None or not close(wanted, output_tensor(scene.trace[end].output)):
        return ()  # the model is random, or its calls change it
    found = []
    for name, options in _other_options(scene):
        other = _returned(scene, end, held, options)
        if other is not None and not (other.shape == wanted.shape and close(other, wanted)):
            found.append(name)
    if found:
        _returned(scene, end, held, scene.options)  # what a model keeps of its arguments is of these again
    return tuple(found)


def _returned(scene: Scene, end: str, held: list[Source], options: dict[str, Any]) -> Tensor | None:
    with ExitStack() as stack:
        for one in held:
            stack.enter_context(replaced(scene.model, one.leaves, one.point))
        calls = _run(scene, [end], options)
    return output_tensor(calls[end].output) if end in calls else None


def origins(scene: Scene, stack: str) -> dict[str, Source]:
    """By name, all sources that reach a stack: its own, and those of the stacks that these are made of."""
    own = sources(scene, stack)
    earlier = [
        replace(one, made_of=_made_of(scene, [one.leaves])[0])
        for before in dict.fromkeys(source.before for source in own if source.before in scene.stacks)
        for one in origins(scene, before).values()
    ]
    found: dict[str, Source] = {}
    for source in (*earlier, *own):
        name = source.name if source.name not in found else f"{source.name} as it enters {source.stack}"
        found[name] = source
    return found


def _sources(scene: Scene, stack: str) -> list[Source]:
    entering = _entering(scene, stack)
    branched = any(len(origins(scene, other)) > 1 for other in _earlier(scene, stack))
    reader = None if branched else _reader(scene, stack, entering[0][0])
    plain = Source(stack, *entering[0], ("its tokens",), reader)
    if len(entering) == 1 and not branched and reader is None:
        return [plain if not _held(scene, stack, [plain]) else _of_what(scene, plain)]
    made = _made_of(scene, [leaves for leaves, _ in entering])
    if reader is not None:
        return [replace(plain, made_of=made[0]), *_arguments(scene, stack, made[0])]
    kept = [0, *(place for place, names in enumerate(made) if names and place)]
    if len(kept) == 1 and not branched:
        return [plain if not _held(scene, stack, [plain]) else replace(plain, made_of=made[0])]
    own = [(*entering[place], made[place]) for place in kept]
    return [Source(stack, *one, _before(scene, stack, one[0])) for one in own]


def _of_what(scene: Scene, plain: Source) -> Source:
    return replace(plain, made_of=_made_of(scene, [plain.leaves])[0])


def _reader(scene: Scene, stack: str, leaves: Leaves) -> str | None:
    """Attention outside of all stacks that the tokens of a stack are made of, as of learned tokens that read
    the data.
    """
    order = list(scene.trace)
    paths = [block.path for blocks in scene.stacks.values() for block in blocks]
    for name in order[: order.index(scene.stacks[stack][0].path)]:
        outside = name in {spot.call for spot in scene.seen} and not any(
            f"{name}.".startswith(f"{path}.") for path in paths
        )
        if outside:
            call = scene.trace[name]
            tokens = first_tensor(call)
            changed = {name: leaves_of(call, tokens)}
            other = _run(scene, [next(iter(leaves))], scene.options, changed, _changed(tokens))
            if _differs(scene, leaves, other):
                return name
    return None


def _arguments(scene: Scene, stack: str, names: tuple[str, ...]) -> list[Source]:
    """Arguments of the model that are numbers, as sources of a stack."""
    leaves = pytree.tree_leaves(((), scene.options))
    found = [(name, scene.options[name]) for name in names]
    return [
        Source(stack, {"": (place,)}, leaf.reshape(-1, leaf.shape[-1]), (name,), None)
        for name, value in found
        for place, leaf in enumerate(leaves)
        if leaf is value and leaf.is_floating_point()
    ]


def _made_of(scene: Scene, several: list[Leaves]) -> list[tuple[str, ...]]:
    """For tokens at some leaves each: the arguments of the model that change them. Where the model takes no
    other argument, the first are what it was given.
    """
    paths = {next(iter(leaves)) for leaves in several}
    changed = {name: _run(scene, paths, options) for name, options in _other_options(scene)}
    found = [
        tuple(name for name, calls in changed.items() if _differs(scene, leaves, calls)) for leaves in several
    ]
    refused = tuple(name for name, calls in changed.items() if not calls)
    return [found[0] or refused, *found[1:]]


def _entering(scene: Scene, stack: str) -> list[tuple[Leaves, Tensor]]:
    """The different tokens among the arguments of the blocks of a stack that no block of it made, those of
    the residual stream first, and where they are.
    """
    calls = [scene.trace[block.path] for block in scene.stacks[stack]]
    first = first_tensor(calls[0])
    inside = {key_of(part) for call in calls for part in (*_tokens(call.output), first_tensor(call))}
    entering = [part for call in calls for part in _tokens((call.arguments, call.options))]
    different = {key_of(part): part for part in entering[::-1] if key_of(part) not in inside}
    found = []
    for part in [first, *different.values()]:
        leaves = {block.path: leaves_of(scene.trace[block.path], part) for block in scene.stacks[stack]}
        found.append(({path: own for path, own in leaves.items() if own}, part.reshape(-1, part.shape[-1])))
    return found


def _tokens(value: Any) -> Iterator[Tensor]:
    """What may be a sequence of tokens: real numbers (n, d) or (batch, n, d)."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.ndim in (2, 3):
            yield leaf


def _other_options(scene: Scene) -> Iterator[tuple[str, dict[str, Any]]]:
    """The call of the model with one argument after the other changed."""
    for name, value in scene.options.items():
        tensors = any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(value))
        if tensors and not any(part in name for part in NO_TOKENS):
            yield name, {**scene.options, name: pytree.tree_map(_changed, value)}


def _changed(value: Any) -> Any:
    """Other numbers in a tensor; ids in another order, so that they stay what the model knows."""
    if not isinstance(value, Tensor) or value.dtype == torch.bool or value.numel() == 0:
        return value
    if value.is_floating_point():
        drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0)).to(value)
        return value + 0.1 * (1 + value.abs()) * drawn
    other = value.clone()
    for place in range(value.shape[-1] - 1, 0, -1) if value.ndim else ():
        other[..., place], other[..., place - 1] = value[..., place - 1], value[..., place]
        if not torch.equal(other, value):
            return other
    return torch.where(value > 0, value - 1, value + 1)


def _run(
    scene: Scene, paths: Iterable[str], options: dict[str, Any], leaves: Leaves | None = None, x: Any = None
) -> dict[str, Call]:
    """The calls of modules on other arguments, or with other tokens somewhere; none where the model does not
    take them.
    """
    modules = sorted({path_and_turn(path)[0] for path in paths})
    try:
        with (
            recording(scene.model, modules) as calls,
            replaced(scene.model, leaves or {}, x),
            quiet(scene.model),
            torch.no_grad(),
        ):
            scene.model(**fresh(options))
    except Exception:  # what a model does not take says nothing about what its tokens are made of
        return {}
    return calls


def _differs(scene: Scene, leaves: Leaves, calls: dict[str, Call]) -> bool:
    """Whether tokens are others in other calls."""
    path, places = next(iter(leaves.items()))
    if path not in calls:
        return False
    both = (scene.trace[path], calls[path])
    old, new = (pytree.tree_leaves((call.arguments, call.options))[places[0]] for call in both)
    return old.shape != new.shape or not torch.equal(old, new)


def _earlier(scene: Scene, stack: str) -> list[str]:
    """The stacks that had returned when this one began, in order."""
    order = {name: place for place, name in enumerate(scene.trace)}
    ends = {other: order[blocks[-1].path] for other, blocks in scene.stacks.items()}
    before = [other for other, end in ends.items() if end < order[scene.stacks[stack][0].path]]
    return sorted(before, key=lambda other: ends[other])


def _before(scene: Scene, stack: str, leaves: Leaves) -> str | None:
    """The last earlier stack whose tokens change these."""
    first = [next(iter(leaves))]
    for other in _earlier(scene, stack)[::-1]:
        (entering, point), *_ = _entering(scene, other)
        if _differs(scene, leaves, _run(scene, first, scene.options, entering, _changed(point))):
            return other
    return None
