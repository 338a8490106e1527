"""The residual stream around attention, found by what modules do: the input of a block plus a branch is what
comes next, in numbers.
"""

from __future__ import annotations

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

EQUAL = 1e-5
"""How far a sum may be from what comes next, relative."""
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


@dataclass(frozen=True)
class Stream:
    """The calls of all modules of a model on one input, in the order in which they returned."""

    calls: dict[str, Call]

    def block(self, path: str, turn: int) -> Block:
        """The block around the attention module at a path; NotCovered where no residual stream is found.

        It may hold a part that adds attention alone (BERT's relatives): the first with a second branch is the
        block, up to the element of a list, which is not passed.
        """
        reasons, found = [], None
        for above in [own for own in ancestors(path) if own][:LEVELS]:
            try:
                block = _Candidate(self, above, turn, path).block()
                found = block if found is None or block.mlp else found
            except NotCovered as reason:
                reasons.append(f"{above}: {reason}")
            if found is not None and (found.mlp or above.rpartition(".")[2].isdigit()):
                return found
        if found is not None:
            return found
        raise NotCovered(
            "no residual stream was found around it" + "".join(f"; {one}" for one in reasons[:2])
        )

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

    def final(self, blocks: list[Block]) -> str | None:
        """The norm that reads what the last block of a stack gives, and nothing else."""
        last = _step(blocks[-1].path, self.calls[blocks[-1].path])
        for path in self.paths if last is not None else []:
            step = None if path.startswith(blocks[-1].path) else _step(path, self.calls[path])
            if (
                step is not None
                and last is not None
                and step.source == last.result
                and "norm" in path.lower()
            ):
                return path
        return None


@dataclass(frozen=True)
class _Candidate:
    """A module that may be the block around attention."""

    stream: Stream
    path: str
    turn: int
    attention: str

    def block(self) -> Block:
        """The block with its two branches."""
        own, ends = self.own, self.ends
        for end in ends:
            after = self._after(own.entering, end.leaving)
            if after is not None:
                mlp = self._mlp(after, end)
                return self._named(self._branch(end, {own.source}), mlp)
        for end in ends:  # both branches may read the same tokens
            other = self._beside(end)
            if other is not None:
                return self._named(self._branch(end, {own.source}), self._branch(other, {own.source}))
        raise NotCovered("its output is not its input plus a branch with attention in it")

    @cached_property
    def steps(self) -> list[Step]:
        return self.stream.steps(self.path, self.turn)

    @cached_property
    def own(self) -> Step:
        """The block as a whole: as many tokens leave as enter, and as wide."""
        found = next((step for step in self.steps if step.path == self.path), None)
        if found is None or found.entering.shape != found.leaving.shape:
            raise NotCovered("it does not return tokens of the shape it takes")
        return found

    @cached_property
    def ends(self) -> list[Step]:
        """What may end the branch of attention: all that returned since, the outermost of equal ones."""
        paths = [step.path for step in self.steps]
        if self.attention not in paths:
            raise NotCovered("attention in it takes or gives no tokens")
        inside = [step for step in self.steps if step.path.startswith(f"{self.attention}.")]
        later = [*inside, *self.steps[paths.index(self.attention) :]]
        later = [
            step for step in later if step.path != self.path and step.leaving.shape == self.own.leaving.shape
        ]
        outermost = {
            step.result: step for step in later
        }  # of equal results the last, which contains the others
        return list(outermost.values())

    @cached_property
    def sums(self) -> list[Tensor]:
        """What a sum may be: all that enters a module, and what leaves the block."""
        shape = self.own.leaving.shape
        return [step.entering for step in self.steps if step.entering.shape == shape] + [self.own.leaving]

    def _after(self, stream: Tensor, branch: Tensor) -> Tensor | None:
        """The sum of the stream and a branch, where it is somewhere."""
        return next((found for found in self.sums if _is_sum(found, stream, branch)), None)

    def _mlp(self, after: Tensor, attention: Step) -> tuple[str, ...]:
        """The other branch, which starts where attention was added, or at the norm of that."""
        norms = [step.leaving for step in self.steps if step.source == key_of(after)]
        for start in [after, *norms]:
            for end in self.ends[::-1]:
                new = end.result not in (attention.result, key_of(start))
                if new and start.shape == end.leaving.shape and self._after(start, end.leaving) is not None:
                    return self._branch(end, {key_of(start)})
        return ()

    def _beside(self, attention: Step) -> Step | None:
        """A second branch that is added with that of attention."""
        rest = self.own.leaving - self.own.entering - attention.leaving
        others = [step for step in self.steps if step.leaving.shape == rest.shape and step.path != self.path]
        found = [step for step in others if _close(rest, step.leaving) and step.result != attention.result]
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
    return Step(path, entering.reshape(-1, entering.shape[-1]), leaving.reshape(-1, leaving.shape[-1]))


def _is_sum(found: Tensor, stream: Tensor, branch: Tensor) -> bool:
    """Whether found = stream + c · branch for a number c, which is one in most models."""
    if found.shape != stream.shape or branch.shape != stream.shape:
        return False
    moved = found - stream
    size = float(branch.norm()) ** 2
    if size == 0 or float(moved.norm()) == 0:
        return False
    factor = float((moved * branch).sum()) / size
    return abs(factor) > EQUAL and _close(moved, factor * branch, stream)


def _close(first: Tensor, second: Tensor, scale: Tensor | None = None) -> bool:
    """Whether two tensors are equal up to rounding, that of a larger one where they are its differences."""
    size = float(second.norm()) + (0.0 if scale is None else EQUAL * float(scale.norm()))
    return float((first - second).norm()) <= EQUAL * 10 * size


def blocks_of(
    model: nn.Module, calls: dict[str, Call], spots: Iterable[tuple[str, int]]
) -> dict[tuple[str, int], Block | str]:
    """For attention modules and their calls the block around each, with the norm after its stack, or the
    reason why there is none.
    """
    stream, found = Stream(calls), {}  # type: Stream, dict[tuple[str, int], Block | str]
    for path, turn in spots:
        try:
            found[path, turn] = _confirmed(model, calls, stream.block(path, turn))
        except NotCovered as reason:
            found[path, turn] = str(reason)
    return {spot: _ended(stream, block, found) for spot, block in found.items()}


def _ended(stream: Stream, block: Block | str, every: dict[tuple[str, int], Block | str]) -> Block | str:
    if isinstance(block, str):
        return block
    stack = block.path.rpartition(".")[0]
    blocks = [
        own for own in every.values() if isinstance(own, Block) and own.path.rpartition(".")[0] == stack
    ]
    return replace(block, final=stream.final(blocks))


def _confirmed(model: nn.Module, calls: dict[str, Call], block: Block) -> Block:
    """The block with those branches that are functions of what enters their first module: on other tokens
    they give what the block itself gives there.
    """
    tokens = first_tensor(calls[block.path])
    drawn = torch.randn(tokens.shape, generator=torch.Generator().manual_seed(0)).to(tokens)
    other = (tokens + 0.1 * tokens.std() * drawn).reshape(-1, tokens.shape[-1])
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
    return _close(found, output_tensor(last.output))
