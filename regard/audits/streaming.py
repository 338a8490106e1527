"""The audit of a model that does not fit in memory:
each block is read from the checkpoint when it runs or is measured, and freed after.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from regard._allocation import memory
from regard.audits.checkpoint import Checkpoint
from regard.audits.checks import Check
from regard.audits.load import architecture, config_of, refuse_other_sizes, skeleton
from regard.audits.memory import give_back
from regard.audits.places import places
from regard.audits.report import Report
from regard.audits.run import Audit
from regard.audits.steps import Progress, Step, in_order
from regard.audits.store import Store
from regard.audits.weights import READABLE, Tensors, WeightAudit, with_weights
from regard.errors import ArgumentError

SHARE = 0.6
"""Weights that take more of the machine's memory than this are read block by block."""
WHOLE = "audit it whole (--no-low-memory), or by its weights alone (--weights-only)"


class StreamedAudit:
    """An audit of a checkpoint on texts that holds one block at a time: places to measure,
    and the results so far.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        texts: Sequence[Any],
        *,
        tokenizer: Any,
        checks: Sequence[Check] | None = None,
        device: str = "cpu",
        thorough: bool = False,
        pairs: Sequence[tuple[str, str]] = (),
        seed: int = 0,
    ) -> None:
        self._checkpoint, self._device = checkpoint, device
        self._run = Audit(
            Streamed(checkpoint, device),
            texts,
            tokenizer=tokenizer,
            checks=checks,
            name=checkpoint.name,
            thorough=thorough,
            pairs=pairs,
            seed=seed,
        )
        self.places, self.inputs = self._run.places, self._run.inputs

    @property
    def store(self) -> Store:
        """The results so far."""
        return self._run.store

    @store.setter
    def store(self, store: Store) -> None:
        self._run.store = store

    def measure(self, progress: Progress | None = None) -> None:
        """Measure every place that is not in the store yet: weights from their tensors alone,
        then the inputs.
        """
        in_order(self.steps(), self.store, progress)

    def steps(self) -> list[Step]:
        """All that is to be done, in any order."""
        asked = [check for check in self._run.checks if check.of_weights is not None]
        if not asked:
            return self._run.steps()
        weights = WeightAudit(
            self._checkpoint, checks=asked, store=self.store, device=self._device, seed=self._run.seed
        )
        alone = {step.key: step for step in weights.steps()}
        return [alone.get(step.key, step) for step in self._run.steps()]

    def report(self, unfinished: str = "") -> Report:
        """The report of what is in the store; `unfinished` says why it is not the whole."""
        return self._run.report(unfinished)


class Streamed:
    """A model whose blocks stay in the checkpoint until they are needed; the rest of it is in memory,
    in float32 or float64.
    """

    def __init__(self, checkpoint: Checkpoint, device: str = "cpu") -> None:
        _refuse_old_pickles(checkpoint)
        config, self._tensors, self._device = config_of(checkpoint), Tensors(checkpoint), device
        if isinstance(config, dict):
            found = "is a model of regard.nn, which is loaded whole"
            raise ArgumentError("MODEL", found, "leave --low-memory out, or give --no-low-memory")
        self._stored = config.dtype = _stored_dtype(config, self._tensors)
        self._dtype = torch.promote_types(self._stored, torch.float32)
        self.original = architecture(config)
        refuse_other_sizes(checkpoint, config, self.original)
        self._wanted = self.original.state_dict()
        self.model = skeleton(config).to(self._dtype)
        self._blocks = _blocks(self.model)
        self._keys = self._match_names(checkpoint)
        for names in [*self._blocks.values(), self._rest()]:
            self._check(names)
        self._settle()

    @contextmanager
    def hold_block(self, path: str) -> Iterator[None]:
        """While inside, the block around a module is in memory;
        afterwards its memory is returned to the system.
        """
        names = next(
            (names for block, names in self._blocks.items() if f"{path}.".startswith(f"{block}.")), []
        )
        try:
            with with_weights(self.model, self._read(names)):
                yield
        finally:
            give_back()

    @contextmanager
    def running(self) -> Iterator[None]:
        """The model may be called: a block is in memory from its call to its return."""
        with ExitStack() as hooks, ExitStack() as block:
            for path in self._blocks:
                module = self.model.get_submodule(path)
                hooks.callback(module.register_forward_pre_hook(self._entering(path, block)).remove)
                hooks.callback(module.register_forward_hook(lambda *call: block.close()).remove)
            yield

    def _entering(self, path: str, block: ExitStack) -> Callable[..., None]:
        def enter(module: nn.Module, arguments: Any) -> None:
            block.enter_context(self.hold_block(path))

        return enter

    def _match_names(self, checkpoint: Checkpoint) -> dict[str, str]:
        """For every tensor that the checkpoint has, its name there;
        tied parameters may be there by one of their names.
        """
        keys = self._tensors.match_names(self.model, list(self.model.state_dict()))
        lacking = [
            names[0]
            for names in _names_of_each(self.model)
            if not any(name in keys for name in names) and not _after_attention(names[0])
        ]
        if lacking:
            found = (
                f"{checkpoint.directory} has no tensor {lacking[0]} in the form the model uses, so no "
                "block can be read alone"
            )
            raise ArgumentError("MODEL", found, WHOLE)
        return keys

    def _rest(self) -> list[str]:
        """The tensors of the checkpoint that belong to no block."""
        return sorted(self._keys.keys() - {name for names in self._blocks.values() for name in names})

    def _check(self, names: Sequence[str]) -> None:
        """Look at every number once, before the work begins."""
        for name, tensor in zip(names, self._read_tensors(names), strict=True):
            _refuse_broken(name, tensor, self._wanted[name])

    def _settle(self) -> None:
        """Read what belongs to no block into memory, where it stays."""
        in_blocks = {name for names in self._blocks.values() for name in names}
        for names in _names_of_each(self.model):
            if not in_blocks.intersection(names):
                parameter = nn.Parameter(self._resident(names), requires_grad=False)
                for name in names:
                    _put(self.model, name, parameter)
        for name, buffer in list(self.model.named_buffers()):
            _put(
                self.model, name, self._read([name])[name] if name in self._keys else buffer.to(self._device)
            )

    def _resident(self, names: Sequence[str]) -> Tensor:
        """A tensor under that of its names which the checkpoint has; zeros for a pooler that it lacks,
        which acts after all attention.
        """
        known = [name for name in names if name in self._keys]
        if known:
            return self._read(known[:1])[known[0]]
        return torch.zeros(self._wanted[names[0]].shape, dtype=self._dtype, device=self._device)

    def _read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Tensors by their names in the model, in its arithmetic;
        until they are cast they are pages of the file, not memory.
        """
        return {
            name: self._cast_tensor(tensor)
            for name, tensor in zip(names, self._read_tensors(names), strict=True)
        }

    def _read_tensors(self, names: Sequence[str]) -> list[Tensor]:
        return self._tensors.read([self._keys[name] for name in names])

    def _cast_tensor(self, tensor: Tensor) -> Tensor:
        """As loading does: first to the numbers of the model, then to those of the audit."""
        real = tensor.dtype.is_floating_point
        return tensor.to(self._stored).to(self._device, self._dtype) if real else tensor.to(self._device)


def is_quantized(checkpoint: Checkpoint) -> bool:
    """Whether the config says that matrices are stored as something else."""
    return getattr(config_of(checkpoint), "quantization_config", None) is not None and all(
        path.suffix == ".safetensors" for path in checkpoint.weights
    )


def exceeds_memory(checkpoint: Checkpoint) -> bool:
    """Whether the weights in float32 would take most of the machine's memory."""
    numbers = sum(parameter.numel() for parameter in architecture(config_of(checkpoint)).parameters())
    return 4 * numbers > SHARE * memory()


def _blocks(model: nn.Module) -> dict[str, list[str]]:
    """The blocks around attention, with the names of what is read with them.

    Tables of positions stay in memory: T5 has one in its first block that attention in all blocks uses.
    """
    paths = dict.fromkeys(
        block.path for place in places(model) for block in [place.block(model)] if block is not None
    )
    if not paths:
        raise ArgumentError(
            "MODEL", "has no blocks around attention that regard knows, so nothing to read one by one", WHOLE
        )
    return {path: _matrices(model.get_submodule(path), path) for path in paths}


def _matrices(block: nn.Module, path: str) -> list[str]:
    owners = [
        (prefix, module)
        for prefix, module in block.named_modules(prefix=path)
        if not isinstance(module, nn.Embedding)
    ]
    return [
        f"{prefix}.{name}" for prefix, module in owners for name, _ in module.named_parameters(recurse=False)
    ]


def _names_of_each(model: nn.Module) -> list[list[str]]:
    """The names of each parameter."""
    found: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(parameter), []).append(name)
    return list(found.values())


def _after_attention(name: str) -> bool:
    return "pooler" in name.split(".")


def _refuse_broken(name: str, tensor: Tensor, wanted: Tensor) -> None:
    if wanted.dtype.is_floating_point and tensor.dtype not in READABLE:
        found = (
            f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which "
            "is not a matrix without its scales"
        )
        raise ArgumentError("MODEL", found, WHOLE)
    if tensor.shape != wanted.shape:
        found = (
            f"{name} has shape {list(tensor.shape)} in the checkpoint and {list(wanted.shape)} in the model"
        )
        raise ArgumentError("MODEL", found, "check that config and weights belong together")
    if not _finite(tensor):
        raise ArgumentError(
            "MODEL",
            f"has NaN or infinity in {name}",
            "repair or retrain it: nothing can be said about such a layer",
        )


def _finite(tensor: Tensor) -> bool:
    """Whether there is neither NaN nor infinity, found without a copy:
    both reach the smallest or the largest number.
    """
    return not tensor.numel() or all(bool(end.isfinite()) for end in tensor.aminmax())


def _put(model: nn.Module, name: str, value: Tensor) -> None:
    owner, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(owner), leaf, value)


def _stored_dtype(config: Any, tensors: Tensors) -> torch.dtype:
    """The numbers of the model: those that its config names,
    or those of the first tensor that has real ones.
    """
    if config.dtype is not None:
        return getattr(torch, config.dtype) if isinstance(config.dtype, str) else config.dtype
    return next(
        (dtype for dtype in map(tensors.dtype, tensors.files) if dtype.is_floating_point), torch.float32
    )


def _refuse_old_pickles(checkpoint: Checkpoint) -> None:
    old = [
        path for path in checkpoint.weights if path.suffix != ".safetensors" and not zipfile.is_zipfile(path)
    ]
    if old:
        found = f"{old[0]} is a pickle in an old format, which can only be read whole"
        raise ArgumentError("MODEL", found, "save it as safetensors, or audit it whole (--no-low-memory)")
