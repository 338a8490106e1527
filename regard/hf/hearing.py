"""listening: the queries of every layer while a model runs; and the same queries at later positions."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.hf.plug import Plug
from regard.hf.registration import guard, interfaces
from regard.normalizers import Softmax

NAME = "regard-listening"


class Heard:
    """Queries (h, n, c) of each call of attention, of one sequence that begins at position zero, with the
    scale in them.

    Examples:
        >>> heard = regard.hf.Heard()  # what `listening` fills
        >>> heard.count
        0
    """

    def __init__(self) -> None:
        self.queries: list[Tensor] = []
        self.modules: list[nn.Module] = []

    @property
    def count(self) -> int:
        """How many tokens were heard."""
        return self.queries[0].shape[-2] if self.queries else 0

    def after(self, model: nn.Module, number: int, count: int, seed: int = 0) -> Tensor:
        """The queries of a layer as if they were asked at positions after the first `count`, somewhere in
        the next half as many; where positions are in the tokens and not in the queries, as they are.
        """
        queries = self.queries[number]
        turning = next((m for name, m in model.named_modules() if name.split(".")[-1] == "rotary_emb"), None)
        if turning is None:
            return queries
        drawn = torch.Generator().manual_seed(seed)
        later = count + torch.randint(max(1, count // 2), (self.count,), generator=drawn)
        return turned(queries, self.modules[number], turning, torch.arange(self.count), later)


def turned(queries: Tensor, module: nn.Module, turning: Any, now: Tensor, later: Tensor) -> Tensor:
    """Rotated queries (h, n, c) at positions `now`, rotated on to positions `later`: by the difference of
    the angles, and by the rotation that the model's family has.
    """
    rotate = getattr(sys.modules[type(module).__module__], "apply_rotary_pos_emb", None)
    if rotate is None:
        found = f"of {type(module).__name__} are rotated in a way that is not known"
        raise ArgumentError("reference", found, "give a family with apply_rotary_pos_emb, as Llama has")
    whole = queries.double().unsqueeze(0)
    scaling = float(getattr(turning, "attention_scaling", 1.0))
    (cos, sin), (cos_later, sin_later) = (
        tuple(part.double() / scaling for part in turning(whole, positions.unsqueeze(0)))
        for positions in (now, later)
    )
    difference = cos_later * cos + sin_later * sin, sin_later * cos - cos_later * sin
    width = difference[0].shape[-1]
    moved = rotate(whole[..., :width], whole[..., :width], *difference)[0]
    return torch.cat([moved, whole[..., width:]], -1)[0].to(queries.dtype)


@contextmanager
def listening(model: Any) -> Iterator[Heard]:
    """While inside, the queries of one forward pass are kept; the attention is that of the model.

    Examples:
        >>> import transformers
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model = transformers.LlamaForCausalLM(config).eval()
        >>> with torch.no_grad(), regard.hf.listening(model) as heard:
        ...     _ = model(torch.tensor([[1, 2, 3]]))
        >>> heard.count
        3
    """
    attention, masks, mask_function = interfaces()
    before, heard = model.config._attn_implementation, Heard()
    inner = attention._global_mapping.get(before)
    inner = inner if isinstance(inner, Plug) else Plug(None, Softmax(), None)

    def attend(module: nn.Module, query: Tensor, *tensors: Any, **options: Any) -> Any:
        scaling = options.get("scaling")
        scale = 1 / math.sqrt(query.shape[-1]) if scaling is None else float(scaling)
        if len(query) != 1:
            raise ArgumentError("input_ids", f"have {len(query)} sequences", "listen to one sequence")
        heard.queries.append(scale * query[0].detach())
        heard.modules.append(module)
        return inner(module, query, *tensors, **options)

    attention.register(NAME, attend)
    masks.register(NAME, guard(mask_function))
    try:
        model.set_attn_implementation(NAME)
        yield heard
    finally:
        model.set_attn_implementation(before)
