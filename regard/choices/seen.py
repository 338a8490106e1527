"""What a model of transformers hands to its attention, call by call, and another answer in its place."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.compression.groups import Group, of_tensors
from regard.errors import ArgumentError
from regard.hf.arguments import Arguments
from regard.hf.masks import split_mask, without_mask
from regard.hf.plug import Plug, reads_as_causal
from regard.hf.registration import guard, interfaces
from regard.normalizers import Softmax
from regard.proofs.theorem import Refusal

NAME = "regard-seen"
EXACT = Plug(None, Softmax(), None)
"""Attention as the model has it."""


@dataclass(frozen=True)
class Seen:
    """One call: queries (h, n, d), keys and values (g, n, ·) of one sequence, in float64, who sees whom
    (n, n), and what dot products are multiplied by.
    """

    queries: Tensor
    keys: Tensor
    values: Tensor
    allowed: Tensor
    scale: float

    @property
    def asking(self) -> slice:
        """The tokens that ask: the later half where order decides what they see, else all of them."""
        return slice(0, None) if bool(self.allowed.all()) else slice(len(self.allowed) // 2, None)

    def groups(self) -> list[Group]:
        """Heads that share keys, as candidates see them; a Refusal where nothing is seen by all."""
        asking, members = self.asking, len(self.queries) // len(self.keys)
        queries = self.queries[:, asking].unflatten(0, (-1, members))
        return [
            of_tensors(q, k, v, self.scale, self.allowed[asking])
            for q, k, v in zip(queries, self.keys, self.values, strict=True)
        ]

    @staticmethod
    def of(module: nn.Module, tensors: tuple[Tensor, ...], mask: Tensor | None, options: Any) -> Seen:
        """A Refusal where a call is more than a softmax of dot products under a mask."""
        query, key, value = (tensor.detach().double() for tensor in tensors)
        said = Arguments.of(options)
        for name in ("softcap", "position_bias", "s_aux"):
            if getattr(said, name) is not None:
                raise Refusal(f"scores have {name}, and candidates know dot products alone")
        if len(query) != 1 or query.shape[2] != key.shape[2]:
            raise Refusal(f"queries have shape {list(query.shape)}; give one sequence as a whole")
        count = query.shape[2]
        if mask is None:
            causal = reads_as_causal(module, said) and count > 1
            support, added = without_mask(causal, said.sliding_window, count, count), None
        else:
            support, added = split_mask(mask, count, count)
        if added is not None:
            raise Refusal("a mask adds numbers to scores, and candidates know dot products alone")
        marks = torch.arange(count)
        allowed = support.allows(marks, marks)
        if allowed.numel() != count * count and not bool((allowed == allowed.flatten(0, -3)[:1]).all()):
            raise Refusal("heads see different keys")
        allowed = allowed.expand(*allowed.shape[:-2], count, count).reshape(-1, count, count)[0]
        scale = 1 / math.sqrt(query.shape[-1]) if said.scaling is None else float(said.scaling)
        return Seen(query[0], key[0], value[0], allowed, scale)


def dtype_of(model: nn.Module) -> torch.dtype:
    """The dtype of most numbers of a model, in which it caches keys and values."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.dtype.is_floating_point:
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=counts.__getitem__, default=torch.float32)


Answer = Callable[[int, nn.Module, Seen], Tensor | None]
"""The number of a call, its module and what was seen, to outputs (h, m, e) of the tokens that ask; None
leaves the call as it is.
"""


@contextmanager
def answering(model: Any, answer: Answer, refused: Callable[[int, str], None]) -> Iterator[None]:
    """While inside, each attention of the model is what `answer` says; calls that candidates do not know are
    exact, and `refused` hears why.
    """
    attention, masks, mask_function = interfaces()
    calls = 0

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any = None, **options: Any
    ) -> Any:
        nonlocal calls
        number, calls = calls, calls + 1
        out, weights = EXACT(module, query, key, value, mask, **options)
        try:
            seen = Seen.of(module, (query, key, value), mask, options)
            other = answer(number, module, seen)
        except (Refusal, ArgumentError) as reason:
            refused(number, str(reason))
            other = None
        if other is not None:
            out = out.clone()
            out[0, seen.asking] = other.transpose(0, 1).to(out)
        return out, weights

    before = model.config._attn_implementation
    attention.register(NAME, attend)
    masks.register(NAME, guard(mask_function))
    try:
        model.set_attn_implementation(NAME)
        with torch.no_grad():
            yield
    finally:
        model.set_attn_implementation(before)
