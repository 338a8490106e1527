"""compress: a cache of few atoms in the place of many tokens, with what that gets wrong: measured on
reference queries, and calibrated for others. Nothing here is proved.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.compression.batched import HeadAtoms, merge_heads
from regard.errors import ArgumentError
from regard.hf.atoms import atom_cache
from regard.hf.hearing import Heard, listening
from regard.hf.plug import Plug
from regard.hf.registration import interfaces

FITTED, CALIBRATING = 512, 256
"""Reference tokens, at most: what atoms are fitted to, and what errors are measured on."""


FILLED = "give a filled DynamicCache of one sequence, without windows"


@dataclass(frozen=True)
class LayerError:
    """One layer. measured: the root mean square of the output's error over that of the output, on reference
    queries that the atoms were not fitted to, before the output projection; calibrated: what 95 % of fresh
    queries like these stay below. size: the root mean square that both are relative to, of all heads.

    Examples:
        >>> regard.hf.LayerError(measured=0.04, calibrated=0.09, size=1.5).calibrated
        0.09
    """

    measured: float
    calibrated: float
    size: float


@dataclass(frozen=True)
class CompressedCache:
    """cache: for past_key_values, with the positions of all `count` tokens; size: atoms of each head.
    layers: what it gets wrong.

    Examples:
        >>> error = regard.hf.LayerError(measured=0.04, calibrated=0.09, size=1.5)
        >>> small = regard.hf.CompressedCache(cache=None, count=1024, size=128, layers=(error,))
        >>> small.count // small.size
        8
    """

    cache: Any
    count: int
    size: int
    layers: tuple[LayerError, ...]

    def __repr__(self) -> str:
        worst = max(self.layers, key=lambda layer: layer.calibrated)
        return (
            f"CompressedCache({self.count} tokens in {self.size} atoms; measured error up to "
            f"{max(layer.measured for layer in self.layers):.2g}, 95 % of fresh queries below "
            f"{worst.calibrated:.2g} (calibrated, not proved))"
        )


def compress(
    model: nn.Module, cache: Any, size: int, reference: Heard | Tensor, *, seed: int = 0
) -> CompressedCache:
    """The cache of one sequence with `size` atoms for each head of keys, fitted to reference queries.

    reference: what `with listening(model) as heard:` heard while the cache was filled, or token ids (1, m)
    like those to come, which are run once. Queries are turned to positions after the cache. Half of them fit,
    the newest of the others calibrate. The model must run an attention that `register` made.

    Examples:
        >>> import transformers
        >>> sizes = {"vocab_size": 20, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        >>> config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
        >>> model, ids = transformers.LlamaForCausalLM(config).eval(), torch.randint(20, (1, 60))
        >>> model.set_attn_implementation(regard.hf.register())
        >>> cache = transformers.DynamicCache(config=config)
        >>> with torch.no_grad(), regard.hf.listening(model) as heard:
        ...     _ = model(ids, past_key_values=cache)
        >>> small = regard.hf.compress(model, cache, 20, heard)  # a CompressedCache
        >>> small.count, small.size, type(small.layers[0]).__name__
        (60, 20, 'LayerError')
    """
    _check_model(model)
    layers = _layers(cache)
    count = layers[0][0].shape[-2]
    _check_size(size, count)
    heard = _listen(model, reference)
    if len(heard.queries) != len(layers):
        found = f"has {len(heard.queries)} calls of attention and the cache {len(layers)} layers"
        raise ArgumentError("reference", found, "listen to one forward pass of this model")
    fit, rest = _dealt(heard.count, seed)
    made, errors = [], []
    for number, (keys, values) in enumerate(layers):
        queries = heard.after(model, number, count, seed)
        keys, values, queries = (_at_least_float32(tensor) for tensor in (keys, values, queries))
        atoms, error = _layer(keys, values, queries, (fit, rest), size)
        made.append(atoms)
        errors.append(error)
    kept = atom_cache(made, count, layers[0][0].dtype, len(heard.queries[0]))
    return CompressedCache(kept, count, size, tuple(errors))


def _layer(
    keys: Tensor, values: Tensor, queries: Tensor, parts: tuple[Tensor, Tensor], count: int
) -> tuple[HeadAtoms, LayerError]:
    """Atoms of one layer, and their errors: keys (g, n, c), queries (h, m, c) with the scale in them."""
    fit, rest = (grouped(queries[:, part], len(keys)) for part in parts)
    atoms = merge_heads(keys, values, fit, count)
    exact, nearly = (rest @ keys.mT).softmax(-1) @ values, atoms.outputs(rest)
    tokens = len(parts[1])
    moved, whole = (
        tensor.unflatten(1, (-1, tokens)).square().sum((0, 1, 3)) for tensor in (nearly - exact, exact)
    )
    size = float(whole.mean().sqrt())
    errors = (moved.sqrt() / size).sort().values
    place = min(tokens, math.ceil(0.95 * (tokens + 1))) - 1
    return atoms, LayerError(float(errors.square().mean().sqrt()), float(errors[place]), size)


def grouped(queries: Tensor, groups: int) -> Tensor:
    """Queries (h, m, c) of heads that share keys side by side, (g, h/g · m, c)."""
    return queries.unflatten(0, (groups, -1)).flatten(1, 2)


def _at_least_float32(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


# Arguments


def _check_model(model: Any) -> None:
    name = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(interfaces()[0]._global_mapping.get(name), Plug):
        remedy = (
            "call model.set_attn_implementation(regard.hf.register()): other implementations take no biases"
        )
        raise ArgumentError("model", f"runs the attention {name!r}", remedy)


def _layers(cache: Any) -> list[tuple[Tensor, Tensor]]:
    """Keys and values (g, n, ·) of each layer of one sequence."""
    found = []
    for layer in getattr(cache, "layers", ()):
        keys, values = getattr(layer, "keys", None), getattr(layer, "values", None)
        sliding = getattr(layer, "is_sliding", False)
        if keys is None or values is None or keys.ndim != 4 or len(keys) != 1 or sliding:
            what = "a sliding window" if sliding else "no keys of one sequence"
            raise ArgumentError("cache", f"has a layer with {what}", FILLED)
        found.append((keys[0].detach(), values[0].detach()))
    if not found:
        raise ArgumentError("cache", f"is a {type(cache).__name__}", FILLED)
    return found


def _check_size(size: object, count: int) -> None:
    if isinstance(size, bool) or not isinstance(size, int) or not 16 <= size <= count:
        raise ArgumentError("size", f"is {size!r}", f"give atoms for each head, 16 to {count} for this cache")


def _listen(model: nn.Module, reference: Heard | Tensor) -> Heard:
    if isinstance(reference, Heard):
        return reference
    if not isinstance(reference, Tensor) or reference.ndim != 2 or len(reference) != 1:
        raise ArgumentError(
            "reference", "is neither a Heard nor token ids (1, m)", "give what `listening` heard"
        )
    with listening(model) as heard, torch.no_grad():
        model(reference, use_cache=False)
    return heard


def _dealt(count: int, seed: int) -> tuple[Tensor, Tensor]:
    """Tokens that fit, and others that calibrate: the newest of these, which are most like those to come."""
    if count < 32:
        raise ArgumentError("reference", f"has {count} tokens", "give at least 32")
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    half = min(FITTED, count // 2)
    return order[:half], order[half:].sort().values[-CALIBRATING:]
