"""Masks as modules receive them — boolean, additive,
absent — and the supports and position biases they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.calls import implementation_of, plug_of
from regard.hf.plug import Plug
from regard.potentials import Clipped, Potential, RelativeBias
from regard.supports import Causal, Full, Padding, Support, Where, Window

CLOSED = -1e9
"""Additive masks close a pair with numbers below this, or below half the range of their dtype:
no score makes up for that.
"""


ROOM = 1 << 20
"""Pairs that are looked at together: a table of all pairs of a long input would fill memory."""


@dataclass(frozen=True)
class Related:
    """Pairs (batch, 1, n, m) that are a relation of places 0, 1, 2, ...; no table of them is made."""

    relation: Support
    sizes: tuple[int, int, int]
    device: torch.device

    @property
    def shape(self) -> torch.Size:
        """That of the table."""
        batch, n, m = self.sizes
        return torch.Size((batch, 1, n, m))

    def rows(self, some: slice) -> Tensor:
        """The table of some queries, (batch, 1, r, m)."""
        batch, n, m = self.sizes
        queries = torch.arange(n, device=self.device)[some]
        found = self.relation.allows(queries, torch.arange(m, device=self.device))
        return found.expand(batch, 1, len(queries), m)


Allowed = Tensor | Related
"""Which query sees which key, as a table (batch, 1 or h, n, m) or by name."""


@dataclass(frozen=True)
class Pairs:
    """allowed (batch, 1 or h, n, m): which query sees which key; bias (batch, 1 or h, n, m):
    what is added to their scores; plug: what regard.hf registered to be done with them.
    """

    allowed: Allowed
    bias: Tensor | None = None
    plug: Plug | None = None


def row_parts(shape: torch.Size) -> Iterator[slice]:
    """All queries of a table (..., n, m), some at a time."""
    rows = max(1, ROOM // max(1, shape[:-2].numel() * shape[-1]))
    for low in range(0, shape[-2], rows):
        yield slice(low, low + rows)


def rows_of(allowed: Allowed, some: slice) -> Tensor:
    """Which keys some queries see."""
    return allowed.rows(some) if isinstance(allowed, Related) else allowed[..., some, :]


def masked_pairs(
    module: nn.Module, options: dict[str, Any], sizes: tuple[int, int, int], name: str = "attention_mask"
) -> Pairs:
    """What a module of transformers does with its mask, for sizes (batch, n, m)."""
    return replace(_masked_pairs(module, options, sizes, name), plug=plug_of(module))


def _masked_pairs(
    module: nn.Module, options: dict[str, Any], sizes: tuple[int, int, int], name: str
) -> Pairs:
    implementation, mask = implementation_of(module), options.get(name)
    if mask is None:
        causal = implementation == "sdpa" and sizes[1] > 1 and _is_causal(module, options)
        return unmasked_pairs(sizes, causal, next(module.parameters()).device)
    mask = _four_dimensional(mask, sizes)
    if mask.dtype != torch.bool:
        return additive_pairs(mask, sizes)
    if implementation == "eager":
        raise NotCovered(
            "eager attention adds a boolean mask to the scores as zeros and ones; give an additive mask, "
            "or load with sdpa"
        )
    return Pairs(_expanded(mask, sizes))


def unmasked_pairs(sizes: tuple[int, int, int], causal: bool, device: torch.device) -> Pairs:
    """All pairs, or those of the past."""
    past = causal and min(sizes[1:]) > 1
    if causal and not past:  # one query or one key: what is seen has a simpler name
        return Pairs(Related(Causal(), sizes, device).rows(slice(None)))
    return Pairs(Related(Causal() if past else Full(), sizes, device))


def additive_pairs(mask: Tensor, sizes: tuple[int, int, int] | None = None) -> Pairs:
    """An additive mask (batch, 1 or h, n, m), or one that is that for these sizes: very negative entries
    close a pair, other entries are a bias.
    """
    sizes = (mask.shape[0], *mask.shape[-2:]) if sizes is None else sizes
    closed = closing(mask)
    allowed = _expanded(~closed, sizes)
    refuse_blind(allowed)
    plain = bool((closed | (mask == 0)).all())
    return Pairs(allowed, None if plain else _expanded(mask.masked_fill(closed, 0.0), sizes))


def _expanded(mask: Tensor, sizes: tuple[int, int, int]) -> Tensor:
    """The same for all pairs; nothing is copied."""
    batch, n, m = sizes
    return mask.expand(batch, -1, n, m)


def closing(mask: Tensor) -> Tensor:
    """Where an additive mask is so negative that it closes the pair."""
    return mask <= max(torch.finfo(mask.dtype).min / 2, CLOSED)


def refuse_blind(allowed: Allowed) -> None:
    """A query that sees nothing has no law; what comes out of an additive mask there is an accident of
    rounding.
    """
    if isinstance(allowed, Related):  # the first key is seen by all
        return
    blind = int((~allowed.any(-1)).sum())
    if blind:
        raise NotCovered(
            f"an additive mask closes every key for {blind} queries, where the module averages over all "
            "keys or divides zero by zero; "
            "give inputs one at a time, without padding, or load the model with "
            "attn_implementation='sdpa', where such queries give zero"
        )


def support_of(allowed: Allowed, marks: Tensor | None = None) -> Support:
    """The support with these pairs (batch, 1 or h, n, m): full, causal or a window, and hidden keys,
    where that is what they are.
    """
    if isinstance(allowed, Related) and marks is None:
        return allowed.relation
    marks = marks[0] if marks is not None and allowed.shape[0] == 1 else marks
    visible = torch.stack([some.any(-2) for *_, some in _blocks(allowed, marks)]).any(0)
    for relation in _relations(allowed, marks):
        same = (
            bool(((relation.allows(*positions) & visible.unsqueeze(-2)) == some).all())
            for *positions, some in _blocks(allowed, marks)
        )
        if all(same):
            return relation if bool(visible.all()) else _both(relation, _hide_keys(visible, marks))
    return _pair_table(_narrow(rows_of(allowed, slice(None))), marks)


def bias_of(pairs: Pairs, heads: int) -> Potential | None:
    """An additive mask that depends on the offset of key and query alone, as a potential."""
    every = pairs.bias
    if every is None:
        return None
    n, m = every.shape[-2:]
    reach = max(n, m) - 1
    places = torch.arange(reach + 1, device=every.device)

    def block(rows: slice) -> tuple[Tensor, Tensor, Tensor]:
        bias = every[..., rows, :].expand(-1, heads, -1, -1)
        offset = places[:m] - places[:n][rows].unsqueeze(-1) + reach
        return bias, rows_of(pairs.allowed, rows).expand_as(bias), offset

    blocks = list(row_parts(every.shape))
    table = every.new_full((heads, 2 * reach + 1), -torch.inf)
    for bias, allowed, offset in map(block, blocks):
        table = _raised(table, bias.masked_fill(~allowed, -torch.inf), offset.expand_as(bias))
    table = table.masked_fill(table == -torch.inf, 0.0)  # where no pair is open
    if not all(
        bool(((table[:, offset] == bias) | ~allowed).all()) for bias, allowed, offset in map(block, blocks)
    ):
        raise NotCovered(
            "the attention mask adds numbers to the scores that are not a function of "
            "the offset between key and query"
        )
    return RelativeBias(table, Clipped(reach))


def _raised(table: Tensor, bias: Tensor, offset: Tensor) -> Tensor:
    """The largest bias of each head at each offset, (h, count), with those of more pairs."""
    places, values = (part.transpose(0, 1).flatten(1) for part in (offset, bias))
    return table.scatter_reduce(1, places, values, "amax")


def _is_causal(module: nn.Module, options: dict[str, Any]) -> bool:
    """As the fused implementation reads it: the argument, else the module's attribute, else yes."""
    given = options.get("is_causal")
    return bool(getattr(module, "is_causal", True) if given is None else given)


def _four_dimensional(mask: Any, sizes: tuple[int, int, int]) -> Tensor:
    """The mask as (batch, 1 or h, n, m)."""
    batch, n, m = sizes
    if not isinstance(mask, Tensor):
        raise NotCovered(
            f"the attention mask is a {type(mask).__name__}, not a tensor; load the model with "
            "attn_implementation='sdpa'"
        )
    shape = list(mask.shape)
    if mask.ndim != 4 or shape[0] not in (1, batch) or shape[2] not in (1, n) or shape[3] not in (1, m):
        raise NotCovered(
            f"the attention mask has shape {shape} for {batch} inputs with {n} queries and {m} keys"
        )
    if not (mask.dtype == torch.bool or mask.dtype.is_floating_point):
        raise NotCovered(f"the attention mask has dtype {mask.dtype}, which adds integers to the scores")
    return mask.detach()


def _narrow(allowed: Tensor) -> Tensor:
    """Pairs without the batch of one input, and without heads where these do not differ either."""
    if len(allowed) == 1:
        allowed = allowed[0]
    return allowed[0] if allowed.ndim == 3 and len(allowed) == 1 else allowed


def _blocks(allowed: Allowed, marks: Tensor | None) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """The marks of some queries, those of all keys, and their pairs (r, m), (1 or h, r, m) or (batch, 1 or h,
    r, m), which they are shaped to meet.
    """
    n, m = allowed.shape[-2:]
    queries, keys = (torch.arange(count, device=allowed.device) for count in (n, m))
    if marks is not None:
        queries = keys = marks.unsqueeze(-2) if marks.ndim == 2 else marks
    for rows in row_parts(allowed.shape):
        yield queries[..., rows], keys, _narrow(rows_of(allowed, rows))


def _relations(allowed: Allowed, marks: Tensor | None) -> list[Support]:
    """What the pairs may be but for hidden keys, the simplest first."""
    left = right = -1
    for queries, keys, some in _blocks(allowed, marks):
        offset = (keys.unsqueeze(-2) - queries.unsqueeze(-1)).expand_as(some)[some]
        if offset.numel():
            left, right = max(left, 0, -int(offset.min())), max(right, 0, int(offset.max()))
    if left < 0:
        return [Full()]
    return [Full(), Causal(), Window(left, None), Window(None, right), Window(left, right)]


def _both(relation: Support, hidden: Support) -> Support:
    """A relation among the keys that are not hidden."""
    return hidden if isinstance(relation, Full) else relation & hidden


def _hide_keys(visible: Tensor, marks: Tensor | None) -> Support:
    """Keys that nobody sees, from visible (..., m): padding on the right where they are that."""
    lengths = visible.sum(-1)
    places = torch.arange(visible.shape[-1], device=visible.device)
    if marks is None and bool((visible == (places < lengths.unsqueeze(-1))).all()):
        return Padding(lengths)
    return _pair_table(visible.unsqueeze(-2), marks)


def _pair_table(allowed: Tensor, marks: Tensor | None) -> Support:
    """Any pairs, as a table over positions."""
    if marks is None:
        return Where(allowed)
    if int(marks.min()) < 0 or any(
        len(row.unique()) < len(row) for row in marks.reshape(-1, marks.shape[-1])
    ):
        raise NotCovered(
            "two tokens that see each other differently share a position, so the mask is not a relation "
            "of positions"
        )
    size = int(marks.max()) + 1
    rows = marks.unsqueeze(-2) if marks.ndim == 2 else marks
    table = torch.zeros(*allowed.shape[:-1], size, dtype=torch.bool, device=allowed.device)
    table = table.scatter(-1, rows.unsqueeze(-2).expand_as(allowed), allowed)
    if allowed.shape[-2] == 1:
        return Where(table)
    square = torch.zeros(*allowed.shape[:-2], size, size, dtype=torch.bool, device=allowed.device)
    return Where(square.scatter(-2, rows.unsqueeze(-1).expand_as(table), table))
