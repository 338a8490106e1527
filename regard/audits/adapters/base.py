"""Adapter: what a family of models must say about its attention modules.

Classes are known by name, so nothing is imported for them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from regard.attention import Attention
from regard.audits.adapters.norms import is_norm
from regard.potentials import Potential

_adapters: dict[str, Adapter] = {}
_packages: dict[str, str] = {}


class NotCovered(Exception):
    """Raised by an adapter that meets something it does not know;
    the message is the reason the report gives.
    """


@dataclass(frozen=True)
class Call:
    """What a module was called with, and what it returned; sight: the attention that was noticed in it."""

    arguments: tuple[Any, ...]
    options: dict[str, Any]
    output: Any
    sight: Any = None


@dataclass(frozen=True)
class Declared:
    """A module on one call, as a declaration, with the output it must reproduce.

    attention: heads in dimension -3, (h, ...) in the potential and (g, ...) in keys and lookup for grouped
    queries;
    w_o (h, e, d) and b_o (d,): how the heads are joined; points (batch, n, d): the hidden states that enter
    the module;
    context (batch, m, d): where keys and values come from, None for self-attention; marks (batch, n):
    positions, None means 0..n-1;
    own: the module's own output, (batch, h, n, e) where it stops before the output projection, (batch, n, d)
    otherwise. The support has dimensions (batch, 1 or h) in front where it differs between inputs, and none
    for a batch of one.
    """

    attention: Attention
    w_o: Tensor
    b_o: Tensor | None
    points: Tensor
    context: Tensor | None
    marks: Tensor | None
    own: Tensor


@dataclass(frozen=True)
class Matrices:
    """What weights alone say: w_q (h, d, c), w_k (g, d, c), w_v (g, d, e), w_o (h, e, d), their biases,
    scale and cap of the scores.

    potential: the scores before positions and the cap, where they are more than these matrices say.
    """

    w_q: Tensor
    w_k: Tensor
    w_v: Tensor
    w_o: Tensor
    scale: float
    b_q: Tensor | None = None
    b_k: Tensor | None = None
    b_v: Tensor | None = None
    b_o: Tensor | None = None
    softcap: float | None = None
    potential: Potential | None = None


@dataclass(frozen=True)
class Block:
    """Where attention stands, as module paths in the audited model.

    path: the enclosing block; attention and mlp: modules that, called one after the other, are a branch
    before its residual connection, with the norm in front where there is one (an mlp that is no chain of
    modules is empty);
    final: the norm after the last block;
    through: whether a branch is what happens in the block from its first module to its last, and not only a
    chain of modules;
    single: whether it holds the attention of one layer, of which its numbers are then.
    """

    path: str
    attention: tuple[str, ...]
    mlp: tuple[str, ...]
    final: str | None
    through: bool = False
    single: bool = True

    @property
    def stack(self) -> str:
        """What holds this block and those before and after it."""
        above, _, own = self.path.partition(" ")[0].rpartition(".")
        return above if self.single or own.isdigit() else self.path


class Adapter(ABC):
    """How one attention module becomes a declaration. `path` is the module's name in the model."""

    @abstractmethod
    def declare(self, model: nn.Module, path: str, module: nn.Module, call: Call) -> Declared:
        """The declaration of the module on the call that was captured;
        the module is still in the mode it was called in.
        """

    @abstractmethod
    def matrices(self, model: nn.Module, path: str, module: nn.Module) -> Matrices:
        """The matrices of the module, from its parameters alone."""

    @abstractmethod
    def block(self, model: nn.Module, path: str, module: nn.Module) -> Block | None:
        """What stands around the module; None where that is nothing known."""

    @abstractmethod
    def parameters(self, model: nn.Module, path: str, module: nn.Module) -> tuple[str, ...]:
        """The names, as in the model's state_dict, of the tensors that `matrices` reads."""

    def entering(self, model: nn.Module, path: str, module: nn.Module) -> str | None:
        """The norm whose output is all that the module reads, for every input; None where no norm is known to
        be that.

        Here it is the one in front of the module in its block; a second attention of a block reads another
        sequence too.
        """
        block = self.block(model, path, module)
        if block is None or block.attention[1:2] != (path,) or _attentions(model, block)[0] != path:
            return None
        norm = block.attention[0]
        return norm if is_published(model, block.path, path) and is_norm(model.get_submodule(norm)) else None


def register(*class_names: str, adapter: Adapter, package: str = "") -> None:
    """Make an adapter known for attention modules with these class names; of one package,
    where others use the same names.
    """
    for name in class_names:
        if name in _adapters:
            raise ValueError(f"there is an adapter for {name} already")
        _adapters[name], _packages[name] = adapter, package


def adapter_of(module: nn.Module) -> Adapter | None:
    """The adapter for a module, by the name of its class and where that was defined."""
    kind = type(module)
    elsewhere = not f"{kind.__module__}.".startswith(_packages.get(kind.__name__, ""))
    return None if elsewhere else _adapters.get(kind.__name__)


def adapters() -> dict[str, Adapter]:
    """All adapters by class name."""
    return dict(_adapters)


def is_published(model: nn.Module, above: str, path: str) -> bool:
    """Whether all from one module down to another are as torch or transformers wrote them:
    others may change what passes between.
    """
    names = path[len(above) :].strip(".").split(".")
    inside = [".".join([above, *names[:count]]) for count in range(len(names) + 1)]
    return all(
        type(model.get_submodule(inner.strip("."))).__module__.startswith(("torch.nn.", "transformers."))
        for inner in inside
    )


def _attentions(model: nn.Module, block: Block) -> list[str]:
    """The attention modules of a block, in its order."""
    inside = model.get_submodule(block.path).named_modules(prefix=block.path)
    return [path for path, module in inside if adapter_of(module) is not None]


def refuse_unknown(options: dict[str, Any], known: set[str]) -> None:
    """An argument that changes attention and that nobody here understands must not be ignored."""
    unknown = sorted(key for key, value in options.items() if key not in known and value is not None)
    if unknown:
        raise NotCovered(f"the module was called with {', '.join(unknown)}, which this adapter does not know")
