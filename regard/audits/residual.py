"""The residual stream around attention, found by what modules do: the input of a block plus a branch is what
comes next, in numbers.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call, NotCovered
from regard.audits.adapters.surroundings import ancestors
from regard.audits.calling import called, moving_tensors, path_and_turn
from regard.audits.capture import (
    branch,
    call_again,
    first_tensor,
    output_tensor,
    quiet,
    recording,
    tokens_in,
)
from regard.audits.failure import failure

EQUAL = 1e-5
"""How far a sum may be from what comes next, relative."""
SCALED = 1e-2
"""How much a norm layer may change when tokens double: there is a small number under its root."""
LEVELS = 4
"""How far above attention a block is looked for."""
Key = tuple[int, int]


@dataclass(frozen=True, eq=False)
class Step:
    """One call of a module inside a block: the tokens that entered it, and those that left it."""

    path: str
    entering: Tensor
    leaving: Tensor

    @property
    def source(self) -> Key:
        """The memory of what entered: the same for all views of a tensor."""
        return key_of(self.entering)

    @property
    def result(self) -> Key:
        """The memory of what left."""
        return key_of(self.leaving)


def key_of(tensor: Tensor) -> Key:
    """Equal for tensors that are one, while both are kept."""
    return tensor.data_ptr(), tensor.numel()


@dataclass(frozen=True, eq=False)
class Branch:
    """What is added to the stream: the memory it may start from, the module that ends it, the modules of
    attention in it, and the sum.
    """

    starts: set[Key]
    end: Step
    attentions: tuple[str, ...]
    after: Tensor


@dataclass(frozen=True)
class Stream:
    """The calls of all modules of a model on one input, in the order in which they returned, and the paths
    of the modules that compute attention.
    """

    calls: dict[str, Call]
    attentions: tuple[str, ...] = ()

    def block(self, path: str, turn: int) -> Block:
        """The block around the attention module at a path; NotCovered where no residual stream is found.

        It may hold a part that adds attention alone (BERT's relatives): the first with a second branch is the
        block, up to the element of a list, which is not passed. Where nothing smaller is a block, a module
        with several layers is returned as that.
        """
        reasons, found = [], None
        for above in [own for own in ancestors(path) if own][:LEVELS]:
            try:
                block = _Candidate(self, above, turn, path).block()
                found = block if found is None or block.mlp else found
            except NotCovered as reason:
                reasons.append(str(reason))
            ends = found is not None and (found.mlp or not found.single)
            if found is not None and (ends or above.rpartition(".")[2].isdigit()):
                return found
        if found is not None:
            return found
        why = ", or ".join(dict.fromkeys(reasons))
        raise NotCovered("no residual stream was found around it" + (f": modules there {why}" if why else ""))

    def steps(self, above: str, turn: int) -> list[Step]:
        """What happened inside a module, and last the module itself."""
        inside = (
            (path, self.calls[name])
            for path in self.paths
            if f"{path}.".startswith(f"{above}.")
            if (name := called(path, turn)) in self.calls
        )
        found = (_step(path, call) for path, call in inside)
        return [step for step in found if step is not None and step.source != step.result]

    @cached_property
    def paths(self) -> list[str]:
        """The modules that were called, in the order in which they first returned."""
        return [name for name in self.calls if not name.endswith(")")]

    def times(self, path: str) -> int:
        """How often a module was called."""
        return self._times[path]

    @cached_property
    def _times(self) -> Counter[str]:
        return Counter(path_and_turn(name)[0] for name in self.calls)

    def direct(self, path: str, turn: int) -> bool:
        """Whether what enters attention, plus what it returns, is what comes next: nothing stands before."""
        step = _step(path, self.calls[called(path, turn)]) if called(path, turn) in self.calls else None
        if step is None or not path:
            return not path
        others = (other for name, call in self.calls.items() if (other := _step(name, call)) is not None)
        sums = (tensor for other in others for tensor in (other.entering, other.leaving))
        return any(_is_sum(found, step.entering, step.leaving, True) for found in sums)

    def final(self, model: nn.Module, last: str) -> str | None:
        """The norm that reads what the last block of a stack returns, and belongs to no other attention."""
        own = _step(last, self.calls[last]) if last in self.calls else None
        for path in self.paths if own is not None else []:
            step = None if f"{path}.".startswith(f"{last}.") else _step(path, self.calls[path])
            reads = step is not None and own is not None and _same(step.entering, own.leaving)
            if reads and not self._attends(path, last) and _is_norm(model, path, self.calls[path]):
                return path
        return None

    def _attends(self, path: str, last: str) -> bool:
        """Whether a module stands in one that holds attention, and not the last block."""
        above = [f"{own}." for own in ancestors(path) if own and not last.startswith(f"{own}.")]
        return any(attention.startswith(own) for attention in self.attentions for own in above)


@dataclass(frozen=True)
class _Candidate:
    """A module that may be the block around attention."""

    stream: Stream
    path: str
    turn: int
    attention: str

    def block(self) -> Block:
        """The block with its two branches; without them where it holds several layers."""
        own = self.own
        if self.attention not in self.order:
            raise NotCovered("hold attention that takes or returns no tokens")
        if self.repeated and any(self.order[0] in added.attentions for added in self.branches):
            return self._holder()
        for place, added in enumerate(self.branches if not self.repeated else []):
            if self.attention in added.attentions:
                return self._found(place)
        for end in self._ends(0) if self.order == [self.attention] and not self.repeated else []:
            attends = self.attention in self._attending(0, end)
            other = self._beside(end) if attends else None  # both branches may read the same tokens
            if other is not None:
                return self._named(self._branch(end, {own.source}), self._branch(other, {own.source}))
        raise NotCovered("do not return their input plus a branch with this attention")

    def _found(self, place: int) -> Block:
        """The block by the branch of attention; an MLP is the one other branch where there is one, and where
        no more than these branches is between the two ends of the block.
        """
        known = {path for added in self.branches for path in added.attentions}
        if not known.issuperset(self.order):
            raise NotCovered("hold more attention than that of the branches that were found")
        attends = [bool(added.attentions) for added in self.branches]
        first, last = attends.index(True), len(attends) - attends[::-1].index(True)
        if not all(attends[first:last]):
            return self._holder()
        others = [added for added in self.branches if not added.attentions]
        alone = len(others) == 1 and first == 0 and self._ended
        mlp = self._named_branch(others[0]) if alone else ()
        return self._named(self._named_branch(self.branches[place]), mlp)

    @property
    def _ended(self) -> bool:
        """Whether the block returns the last sum, or what one module makes of it."""
        last = key_of(self.branches[-1].after)
        after = {step.result for step in self.steps if step.source == last and step.path != self.path}
        return self.own.result in {last, *after}

    def _holder(self) -> Block:
        return Block(called(self.path, self.turn), (), (), None, True, False)

    def _named_branch(self, added: Branch) -> tuple[str, ...]:
        return self._branch(added.end, added.starts)

    @cached_property
    def order(self) -> list[str]:
        """The modules in it that compute attention, in the order in which they returned."""
        known = {*self.stream.attentions, self.attention}
        return [step.path for step in self.steps if step.path in known and step.path != self.path]

    @property
    def repeated(self) -> bool:
        """Whether attention is in several elements of one list, or is called several times: these are layers
        of their own.
        """
        places = [re.sub(r"\b[0-9]+\b", "*", path) for path in self.order]
        again = any(self.stream.times(path) > self.stream.times(self.path) for path in self.order)
        return again or len(set(places)) < len(places)

    @cached_property
    def branches(self) -> list[Branch]:
        """What is added to the stream that enters the block, in order; of repeated layers the first alone."""
        found: list[Branch] = []
        starts = [self.own.entering]
        while starts and not (found and self.repeated):
            added = self._next(starts, found)
            if added is None:
                break
            found.append(added)
            key = key_of(added.after)
            starts = [added.after, *(step.leaving for step in self.steps if step.source == key)]
            starts = starts if key != self.own.result else []
        return found

    def _next(self, starts: list[Tensor], found: list[Branch]) -> Branch | None:
        """The branch that is added to the stream next; one whose sum has no factor first."""
        begin = 0 if not found else self.steps.index(found[-1].end) + 1
        ends = self._ends(begin)
        ends = ends if not found else ends[::-1]
        around = [end for end in ends if not any(end.path.startswith(f"{own}.") for own in self.order)]
        for exact in (True, False):
            for start in starts:
                for end in ends if bool(start.any()) else around:  # zero plus anything is that thing
                    new = end.result != key_of(start) and start.shape == end.leaving.shape
                    after = self._after(start, end.leaving, exact) if new else None
                    if after is not None:
                        return Branch({key_of(start)}, end, self._attending(begin, end), after)
        return None

    def _attending(self, begin: int, end: Step) -> tuple[str, ...]:
        """The attention that returned on the way to the end of a branch, or has the end in it."""
        inside = [step.path for step in self.steps[begin : self.steps.index(end) + 1]]
        return tuple(path for path in self.order if path in inside or f"{end.path}.".startswith(f"{path}."))

    @cached_property
    def steps(self) -> list[Step]:
        return self.stream.steps(self.path, self.turn)

    @cached_property
    def own(self) -> Step:
        """The block as a whole: as many tokens leave as enter, and as wide."""
        if called(self.path, self.turn) not in self.stream.calls:
            less = self.stream.times(self.path)
            raise NotCovered(
                "were called less often than this attention" if less else "were not called as modules"
            )
        found = next((step for step in self.steps if step.path == self.path), None)
        if found is None or found.entering.shape != found.leaving.shape:
            raise NotCovered("do not return new tokens of the shape they take")
        return found

    def _ends(self, begin: int) -> list[Step]:
        """What may end a branch: all that returned from a step on, the outermost of equal ones."""
        steps = [step for step in self.steps[begin:] if step.path != self.path]
        same = [step for step in steps if step.leaving.shape == self.own.leaving.shape]
        outermost = {step.result: step for step in same}  # of equal results the last contains the others
        return list(outermost.values())

    @cached_property
    def sums(self) -> list[Tensor]:
        """What a sum may be: all that enters a module, and what leaves the block."""
        shape = self.own.leaving.shape
        return [step.entering for step in self.steps if step.entering.shape == shape] + [self.own.leaving]

    def _after(self, stream: Tensor, branch: Tensor, exact: bool) -> Tensor | None:
        """The sum of the stream and a branch, where it is somewhere; exact: without a factor."""
        return next((found for found in self.sums if _is_sum(found, stream, branch, exact)), None)

    def _beside(self, attention: Step) -> Step | None:
        """A second branch that is added with that of attention."""
        rest = self.own.leaving - self.own.entering - attention.leaving
        others = [step for step in self.steps if step.leaving.shape == rest.shape and step.path != self.path]
        found = [step for step in others if close(rest, step.leaving) and step.result != attention.result]
        return found[-1] if found else None

    def _branch(self, end: Step, starts: set[Key]) -> tuple[str, ...]:
        """The first call that reads the stream on the way to the end of a branch, and the end; none where
        several read it, or something that is no module.
        """
        readers = [step for step in self.steps if step.source in starts and step.path != self.path]
        before = readers if end not in readers else [end]
        before = [step for step in before if self.steps.index(step) <= self.steps.index(end)]
        outermost = [
            step for step in before if not any(step.path.startswith(f"{other.path}.") for other in before)
        ]
        return tuple(dict.fromkeys([step.path for step in outermost[-1:]] + [end.path]))

    def _named(self, attention: tuple[str, ...], mlp: tuple[str, ...]) -> Block:
        first, second = (tuple(called(path, self.turn) for path in own) for own in (attention, mlp))
        return Block(called(self.path, self.turn), first, second, None, True)


def _step(path: str, call: Call) -> Step | None:
    """The tokens of a call, where there are some on both sides."""
    entering = next(moving_tensors((call.arguments, call.options)), None)
    leaving = next(moving_tensors(call.output), None)
    if entering is None or leaving is None or entering.ndim < 2 or leaving.ndim < 2:
        return None
    entering, leaving = (part.detach().reshape(-1, part.shape[-1]) for part in (entering, leaving))
    return Step(path, entering, leaving)


def _is_sum(found: Tensor, stream: Tensor, branch: Tensor, exact: bool) -> bool:
    """Whether found = stream + c · branch for a number c, which is one in most models."""
    if found.shape != stream.shape or branch.shape != stream.shape:
        return False
    moved = found - stream
    if exact:
        return float(moved.norm()) > 0 and close(moved, branch, stream)
    size = float(branch.norm()) ** 2
    if size == 0 or float(moved.norm()) == 0:
        return False
    factor = float((moved * branch).sum()) / size
    return abs(factor) > EQUAL and close(moved, factor * branch, stream)


def close(first: Tensor, second: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two tensors are equal up to rounding, that of a larger one where they are its differences."""
    size = float(second.norm()) + (0.0 if scale is None else EQUAL * float(scale.norm()))
    return float((first - second).norm()) <= EQUAL * 10 * size


def blocks_of(
    model: nn.Module,
    calls: dict[str, Call],
    spots: Iterable[tuple[str, int]],
    attentions: Iterable[str],
) -> dict[tuple[str, int], Block | str]:
    """For attention modules and their calls the block around each, with the norm after its stack, or the
    reason why there is none; attentions: all modules of the model that compute attention.
    """
    stream, found = Stream(calls, tuple(attentions)), {}  # type: Stream, dict[tuple[str, int], Block | str]
    for path, turn in spots:
        try:
            found[path, turn] = _confirmed(model, calls, stream.block(path, turn))
        except NotCovered as reason:
            found[path, turn] = str(reason)
        except Exception as error:  # a strange module must not take the audit with it: the page says why
            found[path, turn] = failure(error)
    return found


def final_norms(
    model: nn.Module, calls: dict[str, Call], blocks: Iterable[Block], attentions: Iterable[str]
) -> dict[str, str | None]:
    """For each stack of blocks the norm that reads what its last block returns."""
    stream, last = Stream(calls, tuple(attentions)), {block.stack: block.path for block in blocks}
    return {stack: stream.final(model, path) for stack, path in last.items()}


def _is_norm(model: nn.Module, path: str, call: Call) -> bool:
    """Whether a module has no matrix, and returns as many numbers as it takes, the same for tokens twice as
    long: so do norm layers, and no heads that compare angles.
    """
    if any(part.ndim > 1 for part in model.get_submodule(path).parameters()):
        return False
    try:
        with quiet(model), torch.no_grad():
            twice = call_again(model.get_submodule(path), call, {first_tensor(call): 2 * first_tensor(call)})
        found, wanted = output_tensor(twice), output_tensor(call.output)
    except Exception:  # what takes no other tokens is not known to be one
        return False
    if not found.shape == wanted.shape == tokens_in(call).shape:
        return False
    return float((found - wanted).norm()) <= SCALED * float(wanted.norm())


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one, other)


def _confirmed(model: nn.Module, calls: dict[str, Call], block: Block) -> Block:
    """The block with those branches that are functions of what enters their first module: on other tokens
    they give what the block itself gives there.
    """
    tokens = first_tensor(calls[block.path])
    drawn = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
    other = (tokens + 0.1 * tokens.std() * drawn).reshape(-1, tokens.shape[-1])
    if not block.single:
        return block
    path = path_and_turn(block.path)[0]
    inner = sorted({path_and_turn(name)[0] for name in (*block.attention, *block.mlp)})
    with recording(model, inner) as there, quiet(model), torch.no_grad():
        call_again(model.get_submodule(path), calls[block.path], {tokens: other})
        kept = [names if _agrees(model, calls, block, names, there) else () for names in _branches(block)]
    return replace(block, attention=kept[0], mlp=kept[1])


def _branches(block: Block) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return block.attention, block.mlp


def _agrees(
    model: nn.Module, calls: dict[str, Call], block: Block, names: tuple[str, ...], there: dict[str, Call]
) -> bool:
    """Whether a branch gives what the block gives on other tokens."""
    if not names:
        return False
    first, last = (there[path_and_turn(name)[0]] for name in (names[0], names[-1]))
    found = branch(model, calls, block, names)(tokens_in(first))
    return close(found, output_tensor(last.output))
