"""Masks as modules receive them — boolean, additive,
absent — and the supports and position biases they are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.calls import implementation_of
from regard.potentials import Clipped, Potential, RelativeBias
from regard.supports import Causal, Full, Padding, Support, Where, Window

CLOSED = -1e9
"""Additive masks close a pair with numbers below this, or below half the range of their dtype:
no score makes up for that.
"""


@dataclass(frozen=True)
class Pairs:
    """allowed (batch, 1 or h, n, m): which query sees which key; bias (batch, 1 or h, n, m):
    what is added to their scores.
    """

    allowed: Tensor
    bias: Tensor | None = None


def masked_pairs(
    module: nn.Module, options: dict[str, Any], sizes: tuple[int, int, int], name: str = "attention_mask"
) -> Pairs:
    """What a module of transformers does with its mask, for sizes (batch, n, m)."""
    implementation, mask = implementation_of(module), options.get(name)
    if mask is None:
        causal = implementation == "sdpa" and sizes[1] > 1 and _is_causal(module, options)
        return unmasked_pairs(sizes, causal, next(module.parameters()).device)
    mask = _four_dimensional(mask, sizes)
    if mask.dtype != torch.bool:
        return additive_pairs(mask)
    if implementation == "eager":
        raise NotCovered(
            "eager attention adds a boolean mask to the scores as zeros and ones; give an additive mask, "
            "or load with sdpa"
        )
    return Pairs(mask)


def unmasked_pairs(sizes: tuple[int, int, int], causal: bool, device: torch.device) -> Pairs:
    """All pairs, or those of the past."""
    batch, n, m = sizes
    every = torch.ones(n, m, dtype=torch.bool, device=device)
    return Pairs((every.tril() if causal else every).expand(batch, 1, n, m))


def additive_pairs(mask: Tensor) -> Pairs:
    """An additive mask (batch, 1 or h, n, m): very negative entries close a pair,
    other entries are a bias.
    """
    closed = closing(mask)
    refuse_blind(~closed)
    bias = None if bool((closed | (mask == 0)).all()) else mask.masked_fill(closed, 0.0)
    return Pairs(~closed, bias)


def closing(mask: Tensor) -> Tensor:
    """Where an additive mask is so negative that it closes the pair."""
    return mask <= max(torch.finfo(mask.dtype).min / 2, CLOSED)


def refuse_blind(allowed: Tensor) -> None:
    """A query that sees nothing has no law; what comes out of an additive mask there is an accident of
    rounding.
    """
    blind = int((~allowed.any(-1)).sum())
    if blind:
        raise NotCovered(
            f"an additive mask closes every key for {blind} queries, where the module averages over all "
            "keys or divides zero by zero; "
            "give inputs one at a time, without padding, or load the model with "
            "attn_implementation='sdpa', where such queries give zero"
        )


def support_of(allowed: Tensor, marks: Tensor | None = None) -> Support:
    """The support with these pairs (batch, 1 or h, n, m): full, causal or a window, and hidden keys,
    where that is what they are.
    """
    if len(allowed) == 1:  # one input: nothing differs between inputs
        allowed, marks = allowed[0], None if marks is None else marks[0]
    allowed = allowed[0] if allowed.ndim == 3 and len(allowed) == 1 else allowed
    positions = _positions(allowed, marks)
    visible = allowed.any(-2)
    for relation in _relations(allowed, positions):
        if bool(((relation.allows(*positions) & visible.unsqueeze(-2)) == allowed).all()):
            return relation if bool(visible.all()) else _both(relation, _hide_keys(visible, marks))
    return _pair_table(allowed, marks)


def bias_of(pairs: Pairs, heads: int) -> Potential | None:
    """An additive mask that depends on the offset of key and query alone, as a potential."""
    if pairs.bias is None:
        return None
    n, m = pairs.bias.shape[-2:]
    reach = max(n, m) - 1
    offset = (
        torch.arange(m, device=pairs.bias.device)
        - torch.arange(n, device=pairs.bias.device).unsqueeze(-1)
        + reach
    )
    bias = pairs.bias.expand(-1, heads, -1, -1)
    allowed = pairs.allowed.expand_as(bias)
    table = _bias_table(bias, allowed, offset.expand_as(bias), 2 * reach + 1)
    if not bool(((table[:, offset] == bias) | ~allowed).all()):
        raise NotCovered(
            "the attention mask adds numbers to the scores that are not a function of "
            "the offset between key and query"
        )
    return RelativeBias(table, Clipped(reach))


def _bias_table(bias: Tensor, allowed: Tensor, offset: Tensor, count: int) -> Tensor:
    """The largest bias of each head at each offset, (h, count); zero where no pair is open."""
    flat = bias.masked_fill(~allowed, -torch.inf).transpose(0, 1).flatten(1)
    table = bias.new_full((bias.shape[1], count), -torch.inf)
    table = table.scatter_reduce(1, offset.transpose(0, 1).flatten(1), flat, "amax")
    return table.masked_fill(table == -torch.inf, 0.0)


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
    return mask.detach().expand(batch, -1, n, m)


def _positions(allowed: Tensor, marks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The marks of queries and keys, shaped to meet the pairs (n, m), (1 or h, n, m) or (batch, 1 or h, n,
    m).
    """
    if marks is None:
        return torch.arange(allowed.shape[-2], device=allowed.device), torch.arange(
            allowed.shape[-1], device=allowed.device
        )
    marks = marks.unsqueeze(-2) if marks.ndim == 2 else marks
    return marks, marks


def _relations(allowed: Tensor, positions: tuple[Tensor, Tensor]) -> list[Support]:
    """What the pairs may be but for hidden keys, the simplest first."""
    offset = (positions[1].unsqueeze(-2) - positions[0].unsqueeze(-1)).expand_as(allowed)[allowed]
    if not offset.numel():
        return [Full()]
    left, right = max(0, -int(offset.min())), max(0, int(offset.max()))
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
