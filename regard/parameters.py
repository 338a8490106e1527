"""What the tensors of a noun are, said beside its fields, and the one visitor that reads it.

    @dataclass(frozen=True, eq=False, repr=False)
    class Salient(Potential):
        u: Tensor = parameter(rank=1)    # (d,), and (h, d) where there are h heads

A field that holds tensors is a `parameter`, a `projection`, a `number`, or `shared`; one that holds nouns may
be a `part`. They are ordinary fields of a dataclass. What takes a noun apart (heads, widths, changes of
basis) reads these words and never the names of fields; where a field says nothing, it refuses with the line
to add. Running an attention needs none of them: tensors broadcast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import MISSING, dataclass
from enum import Enum
from functools import cache
from typing import Any, TypeVar

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard._object import Object, rebuild
from regard.errors import ArgumentError

Noun = TypeVar("Noun", bound=Object)
Change = Callable[[Object, str, "Meaning | None", Any], Any]
"""(a noun, the name of a field, what the field is, what it holds) -> what the changed noun holds there."""


class Tokens(Enum):
    """Whose coordinates a dimension of a tensor runs over.

    Examples:
        >>> from regard.parameters import Tokens, projections
        >>> w_q, w_k = torch.randn(4, 2), torch.randn(4, 2)
        >>> [tokens is Tokens.QUERIES for tokens, _ in projections(regard.Dot(w_q, w_k))]
        [True, False]
    """

    QUERIES = "queries"
    KEYS = "keys"
    ALL = "tokens"


@dataclass(frozen=True)
class Meaning:
    """What a field is.

    rank: how many dimensions its tensors have for one head, None where they are the same for every head.
    widths: for each of these dimensions the tokens whose coordinates it runs over, or None.
    projects: the tokens that the noun sees as wᵀx, and in no other way.
    part: the field holds nouns, through which alone their owner sees tokens.
    moving: whose place the tokens of the owner take in that part.

    Examples:
        >>> regard.parameters.meanings(regard.Gaussian)["w_q"].projects
        <Tokens.QUERIES: 'queries'>
    """

    rank: int | None = None
    widths: tuple[Tokens | None, ...] = ()
    projects: Tokens | None = None
    part: bool = False
    moving: Tokens | None = None


def parameter(*, rank: int, default: Any = MISSING, widths: tuple[Tokens | None, ...] = ()) -> Any:
    """A field of tensors with `rank` dimensions for one head; dimensions before these are heads.

    widths=(Tokens.KEYS,) says that the one dimension runs over the coordinates of keys.

    Examples:
        >>> from dataclasses import dataclass
        >>> from regard.parameters import Tokens, meanings, parameter
        >>> @dataclass(frozen=True, eq=False, repr=False)
        ... class Salient(regard.Potential):
        ...     u: torch.Tensor = parameter(rank=1, widths=(Tokens.KEYS,))
        >>> meanings(Salient)["u"].rank
        1
    """
    if not isinstance(rank, int) or rank < 0:
        raise ArgumentError(
            "rank", f"is {rank!r}", "give the number of dimensions for one head, zero or more"
        )
    if widths and len(widths) != rank:
        found = f"names {len(widths)} dimensions of {rank}"
        raise ArgumentError("widths", found, "name all of them; None is a width of its own")
    return _field(Meaning(rank, widths), default)


def projection(of: Tokens, *, default: Any = MISSING) -> Any:
    """A field that is a matrix w (d, c) for one head; None is the identity.

    The noun sees these tokens as wᵀx, and in no other way.

    Examples:
        >>> from dataclasses import dataclass
        >>> from regard.parameters import Tokens, meanings, number, part, projection, shared
        >>> @dataclass(frozen=True, eq=False, repr=False)
        ... class Turned(regard.Potential):
        ...     w: torch.Tensor = projection(Tokens.QUERIES)
        ...     strength: float = number(default=1.0)
        ...     angles: torch.Tensor | None = shared(default=None)
        ...     inside: regard.Potential = part(default=regard.Dot())
        >>> {name: (one.rank, one.part) for name, one in meanings(Turned).items()}
        {'w': (2, False), 'strength': (0, False), 'angles': (None, False), 'inside': (None, True)}
    """
    return _field(Meaning(2, (of, None), projects=of), default)


def number(*, default: Any = MISSING) -> Any:
    """A field that is a number, or a tensor with one number for each head.

    Examples:
        >>> regard.parameters.meanings(regard.Gaussian)["bandwidth"].rank  # a number for each head
        0
    """
    return _field(Meaning(0), default)


def shared(*, default: Any = MISSING) -> Any:
    """A field that is the same for every head, whatever its shape; also a function that holds no heads.

    Examples:
        >>> from regard.dynamics import Condensed
        >>> regard.parameters.meanings(Condensed)["tolerance"].rank is None  # the same for every head
        True
    """
    return _field(Meaning(None), default)


def part(*, moving: Tokens | None = None, default: Any = MISSING) -> Any:
    """A field that is a noun, or a tuple of nouns, through which alone its owner sees tokens,
    as SoftCap has one.

    Examples:
        >>> regard.parameters.meanings(regard.SoftCap)["potential"].part  # a potential inside
        True
    """
    return _field(Meaning(None, part=True, moving=moving), default)


KEY = "regard"
SINGLE = (Object, Tensor, bool, int, float, str, type(None))
"""What holds nothing else."""


def _field(meaning: Meaning, default: Any) -> Any:
    return dataclasses.field(default=default, metadata={KEY: meaning})


# The visitor


@cache
def meanings(kind: type[Object]) -> dict[str, Meaning | None]:
    """What the fields of a class are, None where they do not say it.

    Examples:
        >>> from regard.parameters import meanings
        >>> sorted(name for name, one in meanings(regard.Dot).items() if one.projects)
        ['w_k', 'w_q']
    """
    return {field.name: field.metadata.get(KEY) for field in dataclasses.fields(kind)}


def held(noun: Object) -> Iterator[tuple[str, Meaning | None, Any]]:
    """(name, what the field is, item) for all that the fields of a noun hold; tuples, lists,
    ... are opened.

    Examples:
        >>> capped = regard.SoftCap(regard.Dot(), 5.0)
        >>> [(name, type(item).__name__) for name, _, item in regard.parameters.held(capped)]
        [('potential', 'Dot'), ('cap', 'float')]
    """
    for name, meaning in meanings(type(noun)).items():
        value = getattr(noun, name)
        for item in (value,) if isinstance(value, SINGLE) else pytree.tree_leaves(value, is_leaf=_is_noun):
            yield name, meaning, item


def children(noun: Object) -> list[Object]:
    """The nouns that a noun holds, in the order of its fields.

    Examples:
        >>> [type(one).__name__ for one in regard.parameters.children(regard.SoftCap(regard.Dot(), 5.0))]
        ['Dot']
    """
    return [item for _, _, item in held(noun) if isinstance(item, Object)]


def walk(noun: Object) -> Iterator[Object]:
    """A noun and all that it is made of, each before its children.

    Examples:
        >>> layer = regard.Attention(regard.Dot() + regard.Alibi(0.5))
        >>> [type(one).__name__ for one in regard.parameters.walk(layer)][:4]
        ['Attention', 'Sum', 'Dot', 'Alibi']
    """
    yield noun
    for child in children(noun):
        yield from walk(child)


def rebuilt(noun: Noun, change: Change) -> Noun:
    """The same noun, with all that is not a noun changed; the checks of construction do not run.

    Examples:
        >>> def doubled(noun, name, meaning, item):
        ...     return item.double() if isinstance(item, torch.Tensor) else item
        >>> regard.parameters.rebuilt(regard.Linear(torch.eye(2)), doubled).w_v.dtype
        torch.float64
    """
    known = meanings(type(noun))

    def changed(name: str, item: Any) -> Any:
        return rebuilt(item, change) if isinstance(item, Object) else change(noun, name, known[name], item)

    def opened(name: str) -> Any:
        value = getattr(noun, name)
        if isinstance(value, SINGLE):
            return changed(name, value)
        return pytree.tree_map(lambda item: changed(name, item), value, is_leaf=_is_noun)

    return rebuild(type(noun), tuple(known), tuple(opened(name) for name in known))


def with_parts(noun: Noun, kind: type[Object], change: Callable[[Any], Any]) -> Noun:
    """The same noun with each child of this kind replaced;
    refused where it may see tokens beside that child.

    Examples:
        >>> capped = regard.SoftCap(regard.Dot(), 5.0)
        >>> colder = regard.parameters.with_parts(capped, regard.Dot, lambda dot: dot.replace(scale=2.0))
        >>> colder.potential.scale
        2.0
    """
    new: dict[str, Any] = {}
    for field in dataclasses.fields(noun):
        value = getattr(noun, field.name)
        if not any(isinstance(item, kind) for item in pytree.tree_leaves(value, is_leaf=_is_noun)):
            continue
        meaning = field.metadata.get(KEY)
        if meaning is None or not meaning.part:
            raise ArgumentError(
                f"{type(noun).__name__}.{field.name}",
                "does not say that tokens are seen through it alone",
                f"if so, write `{field.name}: {kind.__name__} = part()` (from regard.parameters)",
            )
        new[field.name] = pytree.tree_map(
            lambda item: change(item) if isinstance(item, kind) else item, value, is_leaf=_is_noun
        )
    return noun.replace(**new) if new else noun


def _is_noun(value: Any) -> bool:
    return isinstance(value, Object)


# Heads


def leads(noun: Object) -> Iterator[tuple[Object, str, tuple[int, ...]]]:
    """(the noun, the name of its field, the dimensions that are heads) for each tensor in a declaration.

    Examples:
        >>> two_heads = regard.Dot(torch.randn(2, 4, 3), torch.randn(2, 4, 3))
        >>> [(name, lead) for _, name, lead in regard.parameters.leads(two_heads)]
        [('w_q', (2,)), ('w_k', (2,))]
    """
    for owner in walk(noun):
        for name, meaning, item in held(owner):
            if isinstance(item, Object) or not _may_have_heads(owner, name, meaning, item):
                continue
            assert meaning is not None
            yield owner, name, tuple(item.shape[: _lead(meaning, item)])


def one_head(noun: Noun, head: int, heads: int) -> Noun:
    """The declaration of one head; tensors with fewer heads are shared by groups of consecutive ones.

    Examples:
        >>> four = regard.Dot(torch.randn(4, 8, 2), torch.randn(2, 8, 2))  # two heads share each key
        >>> third = regard.parameters.one_head(four, 2, 4)
        >>> torch.equal(third.w_q, four.w_q[2]), torch.equal(third.w_k, four.w_k[1])
        (True, True)
    """

    def picked(owner: Object, name: str, meaning: Meaning | None, item: Any) -> Any:
        if not _may_have_heads(owner, name, meaning, item):
            return item
        assert meaning is not None
        lead = _lead(meaning, item)
        count = int(torch.Size(item.shape[:lead]).numel())
        return item.reshape(count, *item.shape[lead:])[head * count // heads] if lead else item

    return rebuilt(noun, picked)


def spread_heads(noun: Noun, heads: int) -> Noun:
    """The same declaration with groups written out: each tensor that groups of heads share, once a head.

    Examples:
        >>> grouped = regard.Dot(torch.randn(4, 8, 2), torch.randn(2, 8, 2))
        >>> regard.parameters.spread_heads(grouped, 4).w_k.shape
        torch.Size([4, 8, 2])
    """

    def spread(owner: Object, name: str, meaning: Meaning | None, item: Any) -> Any:
        if not _may_have_heads(owner, name, meaning, item):
            return item
        assert meaning is not None
        lead = _lead(meaning, item)
        grouped = lead and item.shape[lead - 1] not in (1, heads)
        return item.repeat_interleave(heads // item.shape[lead - 1], lead - 1) if grouped else item

    return rebuilt(noun, spread)


def _lead(meaning: Meaning, item: Tensor) -> int:
    """How many dimensions come before those of one head."""
    return 0 if meaning.rank is None else max(0, item.ndim - meaning.rank)


def _may_have_heads(owner: Object, name: str, meaning: Meaning | None, item: Any) -> bool:
    """Whether an item is a tensor that may have heads; an error where its field does not say what it is."""
    if meaning is not None:
        return isinstance(item, Tensor)
    if isinstance(item, Tensor) and item.ndim:
        raise _unsaid(owner, name, item)
    if not isinstance(
        item, (Tensor, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device, type(None))
    ):
        raise ArgumentError(
            f"{type(owner).__name__}.{name}",
            f"is a {type(item).__name__}, which may hold tensors with heads",
            f"if it is the same for every head, write `{name}: {type(item).__name__} = shared()` (from "
            "regard.parameters)",
        )
    return False


def _unsaid(owner: Object, name: str, item: Tensor) -> ArgumentError:
    where, shape = f"{type(owner).__name__}.{name}", list(item.shape)
    return ArgumentError(
        where,
        "does not say which of its dimensions are heads",
        f"write `{name}: Tensor = parameter(rank={item.ndim})` where none of {shape} are, "
        f"rank={item.ndim - 1} where the first is (from regard.parameters)",
    )


# Widths and projections


def width(noun: Object, tokens: Tokens | None = None) -> int | None:
    """How wide the tokens are that a noun reads, from the first tensor that runs over their coordinates.

    None where no tensor says it.

    Examples:
        >>> from regard.parameters import width
        >>> width(regard.Dot(torch.randn(4, 2), torch.randn(4, 2))), width(regard.Dot())
        (4, None)
    """
    for _, meaning, item in held(noun):
        if isinstance(item, Object):
            moving = tokens if meaning is None or meaning.moving is None or tokens is None else meaning.moving
            found = width(item, moving)
        else:
            found = _own_width(meaning, item, tokens)
        if found is not None:
            return found
    return None


def _own_width(meaning: Meaning | None, item: Any, tokens: Tokens | None) -> int | None:
    if meaning is None or not isinstance(item, Tensor) or item.ndim < len(meaning.widths):
        return None
    for place, whose in enumerate(meaning.widths):
        if whose is not None and (tokens is None or whose in (tokens, Tokens.ALL)):
            return int(item.shape[place - len(meaning.widths)])
    return None


def projections(noun: Object) -> list[tuple[Tokens, Tensor | None]]:
    """The projections of a noun itself, with the tokens they are of; None where one is the identity.

    Examples:
        >>> w = torch.randn(4, 2)
        >>> [tokens.name for tokens, _ in regard.parameters.projections(regard.Dot(w, w))]
        ['QUERIES', 'KEYS']
    """
    return [
        (meaning.projects, item)
        for _, meaning, item in held(noun)
        if meaning is not None and meaning.projects is not None
    ]


def in_basis(noun: Noun, basis: Tensor) -> Noun:
    """A declaration that reads z where the tokens are basis · z: every projection w becomes basisᵀ w.

    Examples:
        >>> w, basis, z = torch.randn(4, 2), torch.randn(4, 3), torch.randn(5, 3)
        >>> read = regard.parameters.in_basis(regard.Dot(w, w), basis)
        >>> torch.allclose(read.scores(z, z), regard.Dot(w, w).scores(z @ basis.T, z @ basis.T), atol=1e-4)
        True
    """

    def turned(owner: Object, name: str, meaning: Meaning | None, item: Any) -> Any:
        return (
            basis.mT @ item
            if meaning is not None and meaning.projects is not None and isinstance(item, Tensor)
            else item
        )

    return rebuilt(noun, turned)
