"""Attention over several processes: each holds some tokens, queries stay and keys go round."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard import _check
from regard._object import Object
from regard._refused import Refused
from regard._transforms import is_recorded
from regard._types import over_rows
from regard.compute.engine import Engine, Marks, Plan, Prediction
from regard.compute.engines.reference import feature_width
from regard.compute.problem import Problem
from regard.compute.ring.connecting import line_of
from regard.compute.ring.line import Line
from regard.compute.ring.pieces import Attended, count_pairs_seen
from regard.compute.ring.places import Consecutive, Shards
from regard.compute.ring.ranks import Ranks
from regard.compute.ring.turns import Round, go_round, shapes_of_a_token
from regard.errors import ArgumentError, RefusalError
from regard.normalizers import Softmax
from regard.potentials.base import simple_parts
from regard.potentials.positions import NEAR, PositionPotential


@dataclass(frozen=True, eq=False, repr=False)
class Ring(Engine):
    """Softmax attention of tokens that are spread over the processes of a group, as in one process.

    Every rank makes the same calls with its own tokens. Keys and values travel from rank to rank, and with
    them, backward, their gradients (liu2023ring). group: a process group of torch.distributed, None for all;
    it is held weakly, because PyTorch ends a group's threads only where nothing else refers to the group.
    timeout: seconds after which a rank that sends nothing is lost. shards: which tokens a rank holds, where
    they come without marks. It must be asked for by name.

    Examples:
        >>> from regard.engines import Ring, ZigZag
        >>> ring = Ring(timeout=5.0, shards=ZigZag())  # for processes that torchrun started
        >>> ring.name, ring.timeout
        ('ring', 5.0)
    """

    group: Any = None
    timeout: float = 30.0
    shards: Shards = Consecutive()
    name: ClassVar[str] = "ring"
    rank: ClassVar[int] = 90

    def __post_init__(self) -> None:
        _check.positive("timeout", self.timeout)
        if _is_group(self.group):
            object.__setattr__(self, "group", weakref.ref(self.group))
        if not isinstance(self.shards, Shards):
            raise ArgumentError(
                "shards", f"is {self.shards!r}", "give Consecutive() or ZigZag() of regard.engines"
            )

    def shard(self, tokens: Tensor, dim: int = -2) -> Tensor:
        """The tokens that this rank holds, of all tokens of a sequence."""
        return tokens.index_select(dim, self.marks(tokens.shape[dim]).to(tokens.device))

    def marks(self, count: int) -> Tensor:
        """Their places in the sequence of `count` tokens."""
        line = self._line()
        return self.shards.marks(line.rank, line.world, count)

    def largest(self, value: float) -> float:
        """The largest of the numbers that the ranks give."""
        return max(one["value"] for one in self._line().meet({"value": value}, self.timeout))

    @property
    def over_processes(self) -> bool:
        return True

    @contextmanager
    def posing(self, queries: Tensor, keys: Tensor) -> Iterator[Marks]:
        """The marks of own tokens, from how many all ranks have; an error here is an error on every rank."""
        line = self._line()
        try:
            counts = _count(queries, keys)
        except Exception as error:
            line.excuse(error)
            raise
        every = line.meet({"counts": counts}, self.timeout)
        own, others = ([one["counts"][side] for one in every] for side in (0, 1))
        query_marks, key_marks = (
            self.shards.given(line.rank, lengths).to(keys.device) for lengths in (own, others)
        )
        try:
            yield query_marks, key_marks
        except Exception as error:  # whatever it is, the others must not wait for this rank
            line.excuse(error)
            raise

    def plan(self, problem: Problem) -> RingPlan | Refused:
        """The lengths of all shards, and that all ranks pose the same problem."""
        every = self._agree(problem, _why_not(problem))
        if isinstance(every, Refused):
            return every
        lengths = tuple(one["keys"] for one in every)
        group = weakref.ref(_group(self.group))
        return RingPlan(self, problem, Round(group, self._line(), self.timeout, problem, lengths))

    def gather(self, problem: Problem, refused: Refused | None, **more: str) -> Ranks | Refused:
        """The ranks as one, where all pose the same problem and none refuses; `more`: what else is shared."""
        every = self._agree(problem, refused or _why_not_now(problem), **more)
        if isinstance(every, Refused):
            return every
        return Ranks(weakref.ref(_group(self.group)), self._line(), self.timeout, problem.device)

    def _agree(
        self, problem: Problem, refused: Refused | None, **more: str
    ) -> list[dict[str, Any]] | Refused:
        """What every rank says of its problem."""
        told = {**_describe(problem), **more} if refused is None else {"refused": refused.why}
        every = self._line().meet(told, self.timeout)
        for rank, one in enumerate(every):
            if "refused" in one:
                return Refused(one["refused"] if refused is not None else f"on rank {rank}, {one['refused']}")
        _compare(every, *more)
        return every

    def offer(self, problem: Problem) -> Refused:
        """Only who asks for it by name gets it."""
        return Refused("it runs over several processes; ask for it with engine=Ring().")

    def _line(self) -> Line:
        return line_of(_group(self.group), self.timeout)


@dataclass(frozen=True, eq=False, repr=False)
class RingPlan(Plan):
    """One round of the keys.

    What is decided here: how many keys come from whom; blocks are planned as they come.
    """

    round: Round

    def run(self) -> Tensor:
        return self.run_with_free_energy()[0]

    def free_energy(self) -> Tensor:
        return self.run_with_free_energy()[1]

    def run_with_free_energy(self) -> Attended:
        assert isinstance(self.problem.normalizer, Softmax)
        temperature = self.problem.normalizer.temperature
        out, level = go_round(self.round)
        seen = level > -math.inf
        energy = (over_rows(temperature) * torch.where(seen, level, torch.zeros_like(level))).masked_fill(
            ~seen, -math.inf
        )
        return out.to(self.problem.dtype), energy

    def all_keys(self) -> Problem:
        why = "other moments than the mean need all keys in one process."
        raise RefusalError("engine ring", [why])

    def predict(self) -> Prediction:
        problem, lengths = self.problem, self.round.lengths
        pairs = float(math.prod(problem.batch_shape)) * problem.query_count * sum(lengths)
        width = feature_width(problem) + problem.values.shape[-1]
        held = 4.0 * math.prod(problem.batch_shape) * max(lengths) * width * 2
        own = count_pairs_seen(self.round.problem)
        how = f"keys of {len(lengths)} ranks, {min(lengths)} to {max(lengths)} each; {own} pairs of own keys"
        return Prediction(pairs * (2 * width + 5), held, how)


def _group(group: Any) -> Any:
    """The process group, where there is one."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        why = "torch.distributed has no group; under torchrun, call torch.distributed.init_process_group()."
        raise RefusalError("engine ring", [why])
    found = dist.group.WORLD if group is None else group
    if isinstance(found, weakref.ref):
        found = found()
        if found is None:
            raise RefusalError("engine ring", ["its process group was destroyed; make the Ring anew."])
    if not _is_group(found):
        raise ArgumentError(
            "group", f"is {found!r}", "give a process group of torch.distributed that this rank belongs to"
        )
    return found


def _is_group(value: object) -> bool:
    """Whether a value is a process group that this rank belongs to."""
    import torch.distributed as dist

    return dist.is_available() and isinstance(value, dist.ProcessGroup)


def _count(queries: Any, keys: Any) -> tuple[int, int]:
    """How many queries and keys a rank has; what cannot travel is named."""
    for name, tokens in (("queries", queries), ("keys", keys)):
        if not isinstance(tokens, Tensor) or tokens.ndim < 2:
            raise ArgumentError(name, f"are {_check.describe(tokens)}", "give tensors (..., tokens, width)")
        if type(tokens).__name__ == "DTensor":
            raise ArgumentError(
                name,
                f"are a DTensor {list(tokens.shape)}",
                "give the shard of this rank, tokens.to_local(), and Ring(mesh.get_group())",
            )
        if tokens.shape[-2] == 0:
            raise ArgumentError(name, "are a shard without tokens", "give every rank one token or more")
    return queries.shape[-2], keys.shape[-2]


def _why_not(problem: Problem) -> Refused | None:
    """Why a problem of this rank cannot go round."""
    if not isinstance(problem.normalizer, Softmax):
        kind = type(problem.normalizer).__name__
        return Refused(f"shards of keys are joined by their log-sum-exps, and {kind} is not a softmax.")
    marks = (problem.query_marks, problem.key_marks)
    if any(one is None for one in marks):
        return Refused("its tokens have no places in a sequence; call attend or apply with engine=Ring().")
    if any(isinstance(part, PositionPotential) for part in simple_parts(problem.potential)) and not all(
        _is_whole(one) for one in marks
    ):
        return Refused(f"position biases over several processes need whole positions below {NEAR}.")
    return _why_not_now(problem)


def _why_not_now(problem: Problem) -> Refused | None:
    """Why other processes cannot be asked while this call runs."""
    if is_recorded(problem.values):
        return Refused("other processes answer while a program runs, and this one is only recorded.")
    if torch._C._are_functorch_transforms_active() or torch.autograd.forward_ad._current_level >= 0:
        return Refused("it has first derivatives by autograd, and none of torch.func or forward mode.")
    return None


def _is_whole(marks: Tensor | None) -> bool:
    """Whether positions are counted from the same origin on every rank."""
    return (
        marks is not None
        and not marks.dtype.is_floating_point
        and bool((marks >= 0).all() and (marks < NEAR).all())
    )


def _describe(problem: Problem) -> dict[str, Any]:
    """What all ranks must have in common, and how many tokens this one has."""
    nouns = (problem.potential, problem.normalizer, problem.support)
    return {
        "keys": problem.key_count,
        "dtype": str(problem.dtype).removeprefix("torch."),
        "device": problem.device.type,
        "batch shape": list(problem.batch_shape),
        "width of queries and keys": [t.shape[-1] for t in pytree.tree_leaves(problem.keys)],
        "width of values": problem.values.shape[-1],
        "shape of a token's keys and values": shapes_of_a_token(problem),
        "counts": "no counts" if problem.log_counts is None else "counts",
        "declaration": " ".join(type(noun).__name__ for noun in nouns),
        "parameters": str(_structure(nouns)),
    }


COMPARED = (
    "dtype",
    "device",
    "batch shape",
    "width of queries and keys",
    "width of values",
    "shape of a token's keys and values",
    "counts",
    "declaration",
    "parameters",
)
"""What all ranks must have in common, in the order in which it is compared."""


def _structure(value: Any) -> Any:
    """Types, shapes and numbers of a declaration, but not those in tensors: what ranks can compare."""
    if isinstance(value, Tensor):
        return list(value.shape)
    if isinstance(value, Object):
        return [type(value).__name__, *map(_structure, vars(value).values())]
    if isinstance(value, (tuple, list)):
        return [*map(_structure, value)]
    return value if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


def _compare(every: list[dict[str, Any]], *more: str) -> None:
    """An error where ranks do not pose one problem; all of them see the same."""
    for name in (*COMPARED, *more):
        ranks: dict[str, list[int]] = {}
        for rank, one in enumerate(every):
            ranks.setdefault(str(one[name]), []).append(rank)
        if len(ranks) > 1:
            found = " and ".join(
                f"{value} on rank {', '.join(map(str, who))}" for value, who in ranks.items()
            )
            raise ArgumentError(f"the {name} of the problem", f"is {found}", "give all ranks the same")
