"""The call of a module, read by the names of its arguments; what an adapter cannot know is refused."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from regard.audits.adapters.base import Call, NotCovered, refuse_unknown
from regard.hf.plug import Plug

HARMLESS = {
    *("output_attentions", "output_hidden_states", "return_dict", "use_cache", "cache_position"),
    "num_items_in_batch",  # scales a loss: transformers' Trainer hands it to every module
}
"""What transformers passes along and attention without a cache does not use."""

IMPLEMENTATIONS = ("eager", "sdpa")
"""The implementations of transformers whose meaning is known here."""


def options_of(module: nn.Module, call: Call, known: set[str]) -> dict[str, Any]:
    """The arguments of a call by name; unknown ones and training mode are refused."""
    if module.training:
        raise NotCovered("the module is in training mode, where dropout is random; call model.eval() first")
    signature = inspect.signature(module.forward)
    try:
        bound = dict(signature.bind(*call.arguments, **call.options).arguments)
    except TypeError as error:
        raise NotCovered(f"the module was called in a way its signature does not show ({error})") from None
    rest = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
    for name in rest:
        bound |= bound.pop(name, {})
    refuse_unknown(bound, known | HARMLESS)
    return bound


def implementation_of(module: nn.Module) -> str:
    """eager or sdpa: how a transformers module computes. What regard.hf registers reads masks as sdpa does.
    Other implementations treat masks in their own way and are refused.
    """
    config: Any = module.config
    name: str = config._attn_implementation
    if plug_of(module) is not None:
        return "sdpa"
    if name not in IMPLEMENTATIONS:
        raise NotCovered(f"the attention implementation {name} is not known here")
    return name


def plug_of(module: nn.Module) -> Plug | None:
    """The attention that regard.hf registered and that a module of transformers runs; None for others."""
    name = getattr(getattr(module, "config", None), "_attn_implementation", None)
    if name is None or name in IMPLEMENTATIONS:
        return None
    from transformers import AttentionInterface

    found = AttentionInterface._global_mapping.get(name)
    return found if isinstance(found, Plug) else None


def refuse_cache(module: nn.Module, cache: Any, keys: int, cross: bool = False) -> None:
    """A cache that holds more than the keys of this call brings keys from earlier calls."""
    if cache is None:
        return
    cache = getattr(
        cache, "cross_attention_cache" if cross else "self_attention_cache", cache
    )  # encoder-decoder models keep two
    held = int(cache.get_seq_length(getattr(module, "layer_idx", 0) or 0))
    if held not in (0, keys):
        raise NotCovered(
            f"the module was called with a cache of {held} keys for {keys} tokens; call the model without "
            "past_key_values"
        )


def hidden_states(options: dict[str, Any], name: str = "hidden_states") -> Tensor:
    """The input (batch, n, d) of a module."""
    points = options[name]
    if not isinstance(points, Tensor) or points.ndim != 3:
        found = (
            f"of shape {list(points.shape)}" if isinstance(points, Tensor) else f"a {type(points).__name__}"
        )
        raise NotCovered(f"the input {name} is {found}, not (batch, tokens, width)")
    return points.detach()


def first_output(output: Any) -> Tensor:
    """The hidden states that a module returned, alone or first of several."""
    return (output[0] if isinstance(output, tuple) else output).detach()
