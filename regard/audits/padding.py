"""Padding: tokens of an input that its mask hides are omitted before the model runs, so that nothing counts
them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor

from regard.audits.adapters.base import NotCovered
from regard.errors import ArgumentError
from regard.supports import Support

if TYPE_CHECKING:
    from regard.audits.watching import Sight

KEEPS, HIDES = "attention_mask", "key_padding_mask"
"""How the names of masks (1, n) end: in the first 1 is a token; in the second True, or a number that is not
zero, is padding.
"""
SIDES = ("decoder", "encoder", "tgt", "memory", "pixel", "image", "video", "audio")
"""How the names of arguments begin that belong to a sequence of their own."""
KEYS = ("key", "value", HIDES)
"""Arguments of nn.MultiheadAttention."""
AGREES = 1e-3
"""How much the output at the other tokens may change where padding is omitted, relative."""


@dataclass(frozen=True, eq=False)
class Padded:
    """The keyword arguments of one sequence as they were given, and which of its tokens were kept."""

    given: dict[str, Any]
    kept: tuple[Tensor, ...]


def without_padding(options: dict[str, Any], index: int) -> tuple[dict[str, Any], Padded | None]:
    """The keyword arguments of one sequence without the tokens that its masks hide, and what was cut."""
    given, every = options, []
    for name in options:
        kept = _kept(name, options[name])
        if kept is None:
            continue
        if not bool(kept.any()):
            raise ArgumentError("inputs", f"{index + 1} has nothing but padding by its {name}", "remove it")
        options, before = _cut(options, name, kept), options
        every += [kept] if options is not before else []
    return options, Padded(given, tuple(every)) if every else None


def without_unseen(options: dict[str, Any], sights: Iterable[Sight]) -> tuple[dict[str, Any], Padded | None]:
    """The same without the tokens that none of a sequence sees, itself included, in any layer: padding that
    the model finds without a mask that is known here. So are those that see none but themselves and are seen
    by no other. Of several sequences of one length those that end alike are cut.
    """
    seen: dict[int, list[Tensor]] = {}
    for sight in sights:
        with suppress(NotCovered):
            found = sight.resolve()[0]
            batch, _, n, m = found.sizes
            if batch == 1 and n == m:
                seen.setdefault(n, []).append(_met(found.allowed))
    given, every = options, []
    for several in seen.values():
        union = torch.stack(several).any(0)
        own = [union] if not bool(union.all()) else several
        for kept in {tuple(one.tolist()): one for one in own if not bool(one.all())}.values():
            if bool(kept.any()):
                options, before = _cut(options, "", kept, alike=own is several), options
                every += [kept] if options is not before else []
    return options, Padded(given, tuple(every)) if every else None


def _met(allowed: Tensor) -> Tensor:
    """Which tokens (n,) some query sees; of those that see themselves alone, those that another sees."""
    own = allowed.diagonal(dim1=-2, dim2=-1) & (allowed.sum(-1) == 1) & (allowed.sum(-2) == 1)
    return allowed.flatten(0, -2).any(0) & ~own.flatten(0, -2).all(0)


def may_be_padded(options: dict[str, Any]) -> bool:
    """Whether an argument of a sequence may hide tokens: one that ends alike or in zero, its length, or a
    support.
    """
    for leaf in pytree.tree_leaves(options, is_leaf=lambda value: isinstance(value, Support)):
        if isinstance(leaf, Support):
            return True
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != 1:
            continue
        real = leaf.dtype.is_floating_point
        if leaf.ndim == 1 and not real:  # as how many tokens there are
            return True
        if leaf.ndim == (3 if real else 2) and leaf.shape[1] > 1:
            rows = leaf[0].reshape(leaf.shape[1], -1)
            pairs = ((rows[0], rows[1]), (rows[-1], rows[-2]))
            alike = any(bool((end == other).all()) or not bool(end.any()) for end, other in pairs)
            if alike and not bool((rows == rows[0]).all()):
                return True
    return False


def _kept(name: str, mask: Any) -> Tensor | None:
    """Which tokens (n,) a mask keeps; None where it is no mask of tokens, or hides none."""
    known = name.endswith((KEEPS, HIDES)) and not name.startswith("global")
    if not known or not isinstance(mask, Tensor) or mask.ndim != 2 or len(mask) != 1:
        return None
    kept = (mask[0] == 0) if name.endswith(HIDES) else (mask[0] != 0)
    return None if bool(kept.all()) else kept


def _cut(options: dict[str, Any], mask: str, kept: Tensor, alike: bool = False) -> dict[str, Any]:
    """All arguments of the sequence of a mask at the tokens that it keeps, or all as they are where nothing
    but masks has as many tokens; alike: only those that are the same at all the others.
    """
    side, found = _side(mask, options), {}
    for name, value in options.items():
        if alike and not _ends_alike(value, kept):
            found[name] = value
            continue
        axes = partial(_axes, name, options=options, side=side)
        found[name] = pytree.tree_map(lambda leaf, axes=axes: _at(leaf, kept, axes(leaf)), value)
    moved = [name for name in found if "mask" not in name and _sizes(found[name]) != _sizes(options[name])]
    return found if moved else options


def _ends_alike(value: Any, kept: Tensor) -> bool:
    """Whether tensors have the same at all tokens (1, n, ...) that are not kept."""
    leaves = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor) and leaf.ndim in (2, 3)]
    ends = [leaf[:, ~kept.to(leaf.device)] for leaf in leaves if leaf.shape[1] == len(kept)]
    return bool(ends) and all(bool((end == end[:, :1]).all()) for end in ends)


def answered_otherwise(kept: Sequence[Tensor], padded: Any, alone: Any) -> str:
    """Why numbers of the tokens alone are not those of the padded call; nothing where the model gives these
    tokens the same output in both.
    """
    pairs = zip(pytree.tree_leaves(padded), pytree.tree_leaves(alone), strict=False)
    apart = max((_apart(one, other, kept) for one, other in pairs), default=0.0)
    if apart <= AGREES:
        return ""
    return (
        f"with its padding the model gives these tokens another output, which differs by {apart:.1e} "
        "(relative): it reads the padding, or counts positions from it; all numbers are of the tokens alone"
    )


def _apart(padded: Any, alone: Any, masks: Sequence[Tensor]) -> float:
    """How far two outputs are apart at the tokens that masks keep; zero where they cannot be compared."""
    if not isinstance(padded, Tensor) or not isinstance(alone, Tensor) or padded.ndim != alone.ndim:
        return 0.0
    for axis, (long, short) in enumerate(zip(padded.shape, alone.shape, strict=True)):
        kept = next((kept for kept in masks if (len(kept), int(kept.sum())) == (long, short)), None)
        if kept is not None:
            padded = _at(padded, kept, [axis])
    if padded.shape != alone.shape or not alone.dtype.is_floating_point or not float(alone.norm()) > 0:
        return 0.0
    return float((padded - alone).norm() / alone.norm())


def _side(name: str, options: dict[str, Any]) -> str:
    """The sequence that an argument belongs to, where a model takes several."""
    same = name == "query" and _memory(options.get(name)) == _memory(options.get("key"))
    if same or (name in KEYS and "key" in options):
        return "key"
    if name == "labels" and any(other.startswith("decoder") for other in options):
        return "decoder"
    side = next((side for side in SIDES if name.startswith(side)), "")
    own = [other for other in options if other.startswith(side) and "mask" not in other]
    return side if own else ""  # as the memory of a whole nn.Transformer, which is made of src


def _axes(name: str, leaf: Any, options: dict[str, Any], side: str) -> list[int]:
    """The dimensions of a tensor that may be the tokens of a sequence."""
    if not isinstance(leaf, Tensor):
        return []
    if "mask" in name and leaf.ndim >= 2:  # of pairs, or of one token
        of_pairs = {"memory_mask": ("tgt", "memory"), "attn_mask": ("query", "key")}.get(name, (name, name))
        return [axis for axis, one in zip((-2, -1), of_pairs, strict=True) if _side(one, options) == side]
    if _side(name, options) != side or leaf.ndim > 3:
        return []
    if leaf.ndim < 3:
        return [-1] if leaf.ndim else []
    return [1] if len(leaf) == 1 else [0] if leaf.dtype.is_floating_point else [-1]


def _at(leaf: Any, kept: Tensor, axes: list[int]) -> Any:
    """A tensor at the tokens that are kept, along those of its axes that have as many."""
    for axis in axes:
        if leaf.shape[axis] == len(kept):
            leaf = leaf.index_select(axis, kept.nonzero().flatten().to(leaf.device))
    return leaf


def _sizes(value: Any) -> list[Any]:
    return [leaf.shape for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor)]


def _memory(value: Any) -> Any:
    return (value.data_ptr(), value.shape) if isinstance(value, Tensor) else value
