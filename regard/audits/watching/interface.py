"""A call of transformers' attention interface, read as the plug for transformers reads it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from regard.audits.watching.seen import Seen, Sight, Tensors
from regard.hf.arguments import Arguments
from regard.hf.plug import Plug, reads_as_causal
from regard.normalizers import Softmax

NAME = "the attention interface of transformers"
Around = Callable[[Callable[[], Any], Callable[[Any, list[Sight]], Sight]], Any]
"""Runs a call, and makes a sight of what it returned and what was noticed inside."""


@contextmanager
def interface_watched(around: Around) -> Iterator[None]:
    """While inside, every function that a model asks the interface for is called through `around`."""
    from transformers import AttentionInterface

    ask = AttentionInterface.get_interface

    def get_interface(self: Any, *arguments: Any, **options: Any) -> Callable[..., Any]:
        return _watched(ask(self, *arguments, **options), around)

    AttentionInterface.get_interface = get_interface  # type: ignore[method-assign]
    try:
        yield
    finally:
        AttentionInterface.get_interface = ask  # type: ignore[method-assign]


def _watched(function: Callable[..., Any], around: Around) -> Callable[..., Any]:
    def call(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        def sight(result: Any, inside: list[Sight]) -> Sight:
            named = {**dict(zip(("attention_mask",), rest, strict=False)), **options}
            output = _output(result)
            return Sight(
                NAME,
                output,
                lambda: _readings(function, module, (query, key, value), named, output),
                inside,
            )

        return around(lambda: function(module, query, key, value, *rest, **options), sight)

    return call


def _output(result: Any) -> Tensor | None:
    """The heads (b, h, n, e) of what a function of the interface returns, (b, n, h, e) first of several."""
    found = result[0] if isinstance(result, (tuple, list)) and result else result
    return found.transpose(1, 2) if isinstance(found, Tensor) and found.ndim == 4 else None


def _readings(
    function: Any, module: nn.Module, tensors: Tensors, options: dict[str, Any], output: Tensor | None
) -> Iterator[Seen]:
    """What the call may mean: the order that the module asks for, or none, as eager attention reads it."""
    if output is None:
        return
    mask = options.pop("attention_mask", None)
    arguments = Arguments.of({name: value for name, value in options.items() if name != "output_attentions"})
    plug = function if isinstance(function, Plug) else Plug(None, Softmax(), None)
    for causal in dict.fromkeys((reads_as_causal(module, arguments), False)):
        posed = plug.pose(_spread(*tensors), mask, arguments, causal)
        yield Seen(posed.tensors, posed.potential, posed.normalizer, posed.support, output)


def _spread(query: Tensor, key: Tensor, value: Tensor) -> Tensors:
    """Every head for itself: keys and values that several heads share, once for each."""
    members = query.shape[1] // key.shape[1]
    return query, key.repeat_interleave(members, 1), value.repeat_interleave(members, 1)
