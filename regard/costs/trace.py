"""Trace: what a computation would do, from shapes alone.

Tensors have no memory, so that the largest model is counted on any machine.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from regard.costs.account import size
from regard.costs.formulas import register_flop_formulas

_aten: Any = torch.ops.aten
KERNELS = {
    _aten._scaled_dot_product_flash_attention_for_cpu,
    _aten._scaled_dot_product_flash_attention,
    _aten._scaled_dot_product_efficient_attention,
}
"""Fused attention: scores, softmax and mixing in one."""
COPIES = {_aten.clone, _aten._to_copy}
"""What leaves the entries of a tensor as they are."""
SOFTMAXES = {_aten._softmax, _aten._safe_softmax}


@dataclass(frozen=True)
class Event:
    """One operation that counts. varying: how many of its operands depend on the input; weights: the
    parameters it reads, by name.

    moved: bytes read and written that depend on the input; fixed: bytes read that do not.
    rows, columns: the shape of the matrices it makes, for a fused kernel of its scores; scores: the flops of
    these.
    """

    operation: Any
    path: str
    flops: int = 0
    moved: int = 0
    fixed: int = 0
    varying: int = 0
    weights: tuple[str, ...] = ()
    rows: int = 0
    columns: int = 0
    batch: int = 1
    scores: int = 0
    causal: bool = False


class Trace(TorchDispatchMode):
    """Lists the events of what runs inside it, and which storages depend on the inputs."""

    def __init__(self, inputs: Any = (), names: dict[int, str] | None = None) -> None:
        from torch.utils.flop_counter import flop_registry

        super().__init__()
        register_flop_formulas()
        self.events: list[Event] = []
        self.path: list[str] = [""]
        self._registry: dict[Any, Any] = flop_registry
        self._names = names or {}
        self._varying: dict[
            int, Tensor
        ] = {}  # by storage; the tensor keeps the storage alive, so that no other takes its number
        self._padded: dict[int, Padded] = {}
        self._vary(inputs)

    @property
    def flops(self) -> int:
        """Of all products."""
        return sum(event.flops for event in self.events)

    def varies(self, tensor: Tensor) -> bool:
        """Whether a tensor depends on the inputs."""
        return storage(tensor) in self._varying

    def width(self, tensor: Tensor) -> int:
        """The last dimension, without the zeros that were added to it."""
        padded = self._padded.get(storage(tensor))
        there = padded is not None and tensor.shape[-1] == padded.tensor.shape[-1] and tensor.stride(-1) == 1
        return padded.width if padded is not None and there else tensor.shape[-1]

    def _follow_padding(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note which storages hold zeros on the right; what is written to no longer counts as such."""
        for tensor in _tensors(_outputs_among(func, args)):
            self._padded.pop(storage(tensor), None)
        packet = func._overloadpacket
        copied = packet in COPIES and storage(args[0]) in self._padded
        if copied or (packet is _aten.constant_pad_nd and _on_the_right(*args[1:], **kwargs)):
            self._padded[storage(out)] = Padded(out, self.width(args[0]))

    def _vary(self, tensors: Any) -> None:
        self._varying.update((storage(tensor), tensor) for tensor in _tensors(tensors))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func._overloadpacket
        if packet not in self._registry and func.namespace == "aten":
            with self:  # what is made of other operations is counted by these
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        given = [tensor for tensor in _tensors((args, kwargs)) if self.varies(tensor)]
        if given:
            self._vary((out, _outputs_among(func, args)))
        self._follow_padding(func, args, kwargs, out)
        if packet in self._registry or packet in SOFTMAXES or packet is _aten.embedding:
            self.events.append(self._event(packet, args, kwargs, out))
        return out

    def _event(self, packet: Any, args: Any, kwargs: Any, out: Any) -> Event:
        operands = [tensor for tensor in _tensors(args) if tensor.ndim > 1]
        varying = [tensor for tensor in operands if self.varies(tensor)]
        first = _tensors(out)[0]
        moved, everything = sum(map(size, varying)), sum(map(size, operands))
        found = Event(
            packet,
            self.path[-1],
            int(self._registry[packet](*args, **kwargs, out_val=out)) if packet in self._registry else 0,
            moved + size(first),
            everything - moved,
            len(varying),
            tuple(
                self._names[storage(tensor)] for tensor in _tensors(args) if storage(tensor) in self._names
            ),
            *_matrix(first),
        )
        return (
            _add_scores(found, args, (self.width(args[0]), self.width(args[2])))
            if packet in KERNELS
            else found
        )


@dataclass(frozen=True)
class Padded:
    """A tensor whose last dimension is zero from `width` on; it keeps its storage alive."""

    tensor: Tensor
    width: int


def _on_the_right(pad: Sequence[int], value: float = 0) -> bool:
    """Whether a pad adds zeros at the end of the last dimension, and nothing else."""
    return value == 0 and pad[0] == 0 and pad[1] > 0 and not any(pad[2:])


def _add_scores(event: Event, args: Any, widths: tuple[int, int]) -> Event:
    """The same with the scores that a fused kernel makes inside; queries and values have these widths,
    padding apart.
    """
    query, key = args[:2]
    rows, columns, batch = query.shape[-2], key.shape[-2], query.shape[:-2].numel()
    causal = bool(args[4]) if len(args) > 4 else False
    scores, mixing = (2 * batch * rows * columns * width for width in widths)
    return replace(
        event, flops=scores + mixing, rows=rows, columns=columns, batch=batch, scores=scores, causal=causal
    )


def _matrix(out: Tensor) -> tuple[int, int, int]:
    return (out.shape[-2], out.shape[-1], out.shape[:-2].numel()) if out.ndim > 1 else (1, out.numel(), 1)


def _outputs_among(func: Any, args: Any) -> list[Any]:
    """The arguments that an operation writes to."""
    arguments = func._schema.arguments
    return [
        value
        for value, argument in zip(args, arguments, strict=False)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in pytree.tree_leaves(values) if isinstance(value, Tensor)]


def storage(tensor: Tensor) -> int:
    """What views of one tensor share."""
    return int(tensor.untyped_storage()._cdata)


@contextmanager
def without_memory() -> Iterator[Any]:
    """Tensors that are made here have a shape, a dtype and a device, and no entries;
    others may be read along with them.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@contextmanager
def following(trace: Trace, module: nn.Module) -> Iterator[None]:
    """Events get the path of the module in which they happen."""
    paths = {id(inner): name for name, inner in module.named_modules()}
    begin = register_module_forward_pre_hook(
        lambda inner, _: trace.path.append(paths.get(id(inner), trace.path[-1]))
    )
    end = register_module_forward_hook(lambda inner, _, __: _leave(trace))
    try:
        yield
    finally:
        begin.remove()
        end.remove()


def _leave(trace: Trace) -> None:
    trace.path.pop()
