"""The audit of weights alone: one attention layer at a time is read from a checkpoint,
and the model is never loaded.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import NotCovered
from regard.audits.adapters.projections import parameter_names
from regard.audits.answers import answer, weights_key
from regard.audits.checkpoint import Checkpoint, read_pickle
from regard.audits.checks import Check
from regard.audits.checks import checks as all_checks
from regard.audits.checks.base import Weights
from regard.audits.collect import collect
from regard.audits.dequantizing import beside, matrix, packed_names, unpacked
from regard.audits.inputs import Input
from regard.audits.load import architecture, config_of, plain_config
from regard.audits.noticing import Noticed
from regard.audits.outlines import Outline, outline_of
from regard.audits.places import Place, places
from regard.audits.quantized import refuse_parts
from regard.audits.report import Report
from regard.audits.steps import Progress, Step, in_order
from regard.audits.store import Store
from regard.errors import ArgumentError

READABLE = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
"""What a matrix may be stored as; narrower numbers mean nothing without scales that are stored elsewhere."""


class WeightAudit:
    """An audit of a checkpoint by its weights: places to measure, and the results so far."""

    def __init__(
        self,
        checkpoint: Checkpoint,
        *,
        checks: Sequence[Check] | None = None,
        store: Store | None = None,
        device: str = "cpu",
        seed: int = 0,
    ) -> None:
        self.seed = seed
        asked = all_checks() if checks is None else checks
        self.checks = tuple(check for check in asked if check.of_weights is not None)
        self.name, self.store = checkpoint.name, Store() if store is None else store
        self.inputs: list[Input] = []
        self._tensors, self._device, self.noticed = Tensors(checkpoint), device, Noticed()
        if not self._take(outline_of(plain_config(checkpoint))):
            self._take(architecture(config_of(checkpoint)))
        self.model = copy.deepcopy(self.original).to(torch.float64)
        stored = self._tensors.dtype(next(iter(self._keys.values()))) if self._keys else torch.int8
        if stored.is_floating_point:  # whole numbers are no matrix: measuring says so
            self.original.to(stored)

    def _take(self, original: nn.Module | None) -> bool:
        """Read the checkpoint as that of this model; whether it has every tensor that is to be read."""
        if original is None:
            return False
        self.original, self.places = original, list(places(original))
        wanted = [name for place in self.places for name in self._names(place)]
        self._keys = self._tensors.match_names(original, wanted)
        return len(self._keys) == len(set(wanted))

    def measure(self, progress: Progress | None = None) -> None:
        """Measure every layer that is not in the store yet."""
        in_order(self.steps(), self.store, progress)

    def steps(self) -> list[Step]:
        """All that is to be done, in any order."""
        return [
            Step(f"weights of {place.path}", weights_key(place), partial(self._keep_one, place), self.seed)
            for place in self.places
        ]

    def report(self, unfinished: str = "") -> Report:
        """The report of what is in the store; `unfinished` says why it is not the whole."""
        return collect(self, unfinished)

    def _names(self, place: Place) -> tuple[str, ...]:
        module = self.original.get_submodule(place.path)
        try:
            norm = place.adapter.entering(self.original, place.path, module)
            before = () if norm is None else parameter_names("", self.original, norm)
            return place.adapter.parameters(self.original, place.path, module) + before
        except NotCovered:
            return ()  # measuring it says why

    def _keep_one(self, place: Place) -> None:
        self.store.put(weights_key(place), self._measure_one(place))

    def _measure_one(self, place: Place) -> dict[str, Any]:
        try:
            with with_weights(self.model, self._read(place)):
                weights = Weights.of(place.adapter, self.model, place.path, place.layer)
                return {"results": {check.name: answer(check.of_weights, weights) for check in self.checks}}
        except NotCovered as reason:
            return {"reason": str(reason)}

    def _read(self, place: Place) -> dict[str, Tensor]:
        """The tensors of one layer, by their names in the model, in float64."""
        names = self._names(place)
        missing = [name for name in names if name not in self._keys]
        if missing:
            raise NotCovered(
                f"the checkpoint has no tensor {missing[0]} in the form the model uses; audit it without "
                "--weights-only"
            )
        read = self._tensors.read([self._keys[name] for name in names])
        return {
            name: self._check_tensor(name, tensor).to(self._device, torch.float64)
            for name, tensor in zip(names, read, strict=True)
        }

    def _check_tensor(self, name: str, tensor: Tensor) -> Tensor:
        wanted = self.model.get_parameter(name).shape
        if tensor.dtype not in READABLE:
            raise NotCovered(
                f"{name} is stored as {str(tensor.dtype).removeprefix('torch.')}, which is not a matrix "
                "without its scales"
            )
        if tensor.shape != wanted:
            raise NotCovered(
                f"{name} has shape {list(tensor.shape)} in the checkpoint and {list(wanted)} in the model"
            )
        if not bool(tensor.isfinite().all()):
            raise ArgumentError(
                "MODEL",
                f"has NaN or infinity in {name}",
                "repair or retrain it: nothing can be said about such a layer",
            )
        return tensor


@dataclass(frozen=True)
class Tensors:
    """The tensors of a checkpoint, read when asked for; nothing stays open,
    so that nothing stays in memory. Quantized matrices are matrices again, one at a time.
    """

    checkpoint: Checkpoint

    @cached_property
    def files(self) -> dict[str, Path]:
        """The file of each tensor, by its name in the checkpoint; packed ones by that of the matrix too."""
        stored = {key: path for path in self.checkpoint.weights for key in self._keys_of(path)}
        return {**{name: stored[key] for name, key in packed_names(stored).items()}, **stored}

    def _keys_of(self, path: Path) -> list[str]:
        refuse_parts(path)
        if path.suffix != ".safetensors":
            return list(read_pickle(path))
        with _open(path) as file:
            return list(file.keys())

    def read(self, keys: Sequence[str]) -> list[Tensor]:
        """Some tensors, in the numbers of the checkpoint, or in float32 where these are quantized."""
        packed = packed_names(self.files)
        plain = iter(self._stored([key for key in keys if key not in packed]))
        return [self._unpacked(key) if key in packed else self._matrix(key, next(plain)) for key in keys]

    def _matrix(self, key: str, stored: Tensor) -> Tensor:
        if stored.dtype in READABLE:
            return stored
        scales = beside(key, self.files)
        return matrix(key, stored, dict(zip(scales, self._stored(scales), strict=True)), self._quantization)

    def _unpacked(self, key: str) -> Tensor:
        return unpacked(key, lambda name: self._stored([name])[0], self._quantization)

    @cached_property
    def _quantization(self) -> dict[str, Any]:
        """What the config says of how matrices are stored."""
        return dict(plain_config(self.checkpoint).get("quantization_config") or {})

    def _stored(self, keys: Sequence[str]) -> list[Tensor]:
        """Some tensors as they are stored."""
        found: dict[str, Tensor] = {}
        for path in sorted({self.files[key] for key in keys}):
            found.update(self._read_from(path, [key for key in keys if self.files[key] == path]))
        return [found[key] for key in keys]

    def _read_from(self, path: Path, keys: list[str]) -> dict[str, Tensor]:
        if path.suffix != ".safetensors":
            whole = read_pickle(path)
            return {key: whole[key] for key in keys}
        with _open(path) as file:
            return {key: file.get_tensor(key) for key in keys}

    def dtype(self, key: str) -> torch.dtype:
        """How a tensor is stored."""
        return self.read([key])[0].dtype

    def match_names(self, model: nn.Module, wanted: Sequence[str]) -> dict[str, str]:
        """For names in the model their names in the checkpoint: the same up to one prefix, after the
        renaming that transformers does.
        """
        renamed = _rename_keys(model, sorted(self.files))
        prefix = _prefix(list(renamed), wanted)
        return {name: renamed[prefix + name] for name in wanted if prefix + name in renamed}


def _open(path: Path) -> Any:
    from safetensors import safe_open

    return safe_open(path, framework="pt")


def _rename_keys(model: nn.Module, keys: list[str]) -> dict[str, str]:
    """Keys of a checkpoint by today's names; those that must be converted, and not renamed alone,
    are left out.
    """
    if isinstance(model, Outline) or type(model).__module__.startswith("regard.nn."):
        return {key: key for key in keys}
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    transforms = get_model_conversion_mapping(model)  # type: ignore[arg-type]
    renamings = [entry for entry in transforms if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in transforms if isinstance(entry, WeightConverter)]
    found = {key: rename_source_key(key, renamings, converters) for key in keys}
    return {name: key for key, (name, converted) in found.items() if converted is None}


def _prefix(keys: list[str], wanted: Sequence[str]) -> str:
    """What a checkpoint puts before the names of a model: "bert.", "model.", or nothing."""
    if not wanted:
        return ""
    known = set(keys)
    ends = tuple(f".{name}" for name in wanted)
    prefixes = {key[: -len(end) + 1] for key in keys for end in ends if key.endswith(end)} | {""}
    counts = {prefix: sum(prefix + name in known for name in wanted) for prefix in sorted(prefixes)}
    best = [prefix for prefix, count in counts.items() if count == max(counts.values())]
    if len(best) > 1 and counts[best[0]]:
        raise ArgumentError(
            "MODEL",
            f"has two models in one checkpoint ({', '.join(map(repr, best))})",
            "save the one to audit alone",
        )
    return best[0]


@contextmanager
def with_weights(model: nn.Module, tensors: dict[str, Tensor]) -> Iterator[None]:
    """While inside, a model that was built without weights has these tensors as its parameters."""
    old = {
        name: _exchange(model, name, nn.Parameter(tensor, requires_grad=False))
        for name, tensor in tensors.items()
    }
    try:
        yield
    finally:
        for name, parameter in old.items():
            _exchange(model, name, parameter)


def _exchange(model: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
    """Put a parameter in the place of another, which is returned."""
    owner, _, leaf = name.rpartition(".")
    old = model.get_parameter(name)
    setattr(model.get_submodule(owner), leaf, parameter)
    return old
