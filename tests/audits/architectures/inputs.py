"""Inputs of a model by the names of what it takes: text, pictures, films and sound, with as many placeholders
in the text as the model makes features.
"""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.audits.architectures.special import ARGUMENTS, SHAPES

TOKENS = 9
TEXT = ("input_ids", "decoder_input_ids", "bbox")
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index", "image_patch_id", "media_token_id"),
    "video": ("video_token_id", "video_token_index"),
    "audio": ("audio_token_id", "audio_token_index", "speech_token_id"),
}
"""What the ids are called that features of pictures, films and sound stand for."""
MARKS = {"image": 1, "video": 2, "audio": 3}
PREFERRED = (
    ("image", "video", "audio"),
    ("image", "video"),
    ("image", "audio"),
    ("image",),
    ("video",),
    ("audio",),
    (),
)


def inputs_for(model: nn.Module) -> list[dict[str, Any]]:
    """Keyword arguments that may be what a model takes, the fullest first."""
    return [call for _, call in candidates(model)]


def candidates(model: nn.Module) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each with the kinds of input that are in it besides text."""
    names = set(inspect.signature(model.forward).parameters)
    config = model.config
    main = getattr(model, "main_input_name", "input_ids")
    text = _text(config, names | ({main} if isinstance(main, str) else set()))
    text |= {
        name: value
        for name, shape in ARGUMENTS.items()
        if name in names and (value := tensor(config, shape)) is not None
    }
    own = {name: tensor(config, shape) for name, shape in _particular(config).items()}
    makers = {"image": _images, "video": _films, "audio": _sounds}
    choices = {kind: list(make(config, names)) for kind, make in makers.items()}
    for wanted in PREFERRED:
        if all(choices[kind] for kind in wanted):
            for chosen in itertools.product(*(choices[kind] for kind in wanted)):
                merged = dict(text)
                for part in chosen:
                    merged |= part
                yield wanted, {name: value for name, value in (merged | own).items() if value is not None}
    if "input_ids" in names:
        yield (), {"input_ids": _tokens(TOKENS)}


def _particular(config: Any) -> dict[str, Any]:
    return SHAPES.get(getattr(config, "model_type", ""), {})


def tensor(config: Any, shape: Any) -> torch.Tensor | None:
    """From a template: a filling and sizes, numbers or names of sizes of the config; or the values."""
    if shape is None or isinstance(shape, bool):
        return shape
    if isinstance(shape, list):
        return torch.tensor(shape)
    filling, *sizes = shape
    lengths = [size(config, length) if isinstance(length, str) else length for length in sizes]
    if filling == "tokens":
        return torch.randint(5, 45, lengths, generator=torch.Generator().manual_seed(0))
    if filling == "normal":
        return _normal(*lengths)
    return torch.full(lengths, {"ones": 1, "zeros": 0, "true": True, "false": False}[filling])


def _tokens(count: int) -> torch.Tensor:
    return torch.randint(5, 45, (1, count), generator=torch.Generator().manual_seed(0))


def _normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def _text(config: Any, names: set[str]) -> dict[str, torch.Tensor]:
    ids = _tokens(TOKENS)
    known = {"input_ids": ids, "decoder_input_ids": ids[:, :5], "bbox": torch.zeros(1, TOKENS, 4).long()}
    return {name: known[name] for name in TEXT if name in names}


def _images(config: Any, names: set[str]) -> Iterator[dict[str, torch.Tensor]]:
    """Pictures as people give them, as patches with a grid, as tiles."""
    channels = size(config, "num_channels", 3)
    yield from _patches(config, names, "image", ("pixel_values", "hidden_states"))
    if "pixel_values" not in names:
        return
    if {"spatial_shapes", "pixel_position_ids"} & names:
        yield from _packed(config, names, channels)
    for side in dict.fromkeys((_side(config), (64, 64), (128, 128))):
        sizes = [{}, {"image_sizes": torch.tensor([side])}] if "image_sizes" in names else [{}]
        for shape in ((1,), (1, 1), (1, 2), (1, size(config, "num_frames", 4))):
            for said in sizes:
                yield {"pixel_values": _normal(*shape, channels, *side), **said}


def _side(config: Any) -> tuple[int, int]:
    """Height and width of a picture."""
    for own in _levels(config):
        found = getattr(own, "image_size", None)
        if isinstance(found, int):
            return found, found
        if isinstance(found, (list, tuple)) and len(found) == 2:
            return found[0], found[1]
    return 32, 32


def _packed(config: Any, names: set[str], channels: int) -> Iterator[dict[str, torch.Tensor]]:
    """Sixteen patches in a row, with their places."""
    patch = size(config, "patch_size", 8)
    rows = torch.cartesian_prod(torch.arange(4), torch.arange(4))[None]
    known = {
        "pixel_values": _normal(1, 16, channels * patch * patch),
        "pixel_attention_mask": torch.ones(1, 16).long(),
        "spatial_shapes": torch.tensor([[4, 4]]),
        "pixel_position_ids": rows,
        "image_position_ids": rows,
    }
    yield {name: value for name, value in known.items() if name in names}


def _patches(config: Any, names: set[str], kind: str, targets: tuple[str, ...]) -> Iterator[dict[str, Any]]:
    """Patches of one picture, four by four, and the grid that they are in."""
    grid = next((name for name in (f"{kind}_grid_thw", "grid_thw") if name in names), None)
    target = next((name for name in targets if name in names), None)
    if grid is None or target is None:
        return
    channels = (
        size(config, "in_channels", 0) or size(config, "in_chans", 0) or size(config, "num_channels", 3)
    )
    patch, frames = size(config, "patch_size", 8), size(config, "temporal_patch_size", 1)
    for shape in ((16, channels * frames * patch**2), (16, channels, patch, patch)):
        yield {target: _normal(*shape), grid: torch.tensor([[1, 4, 4]])}


def _films(config: Any, names: set[str]) -> Iterator[dict[str, Any]]:
    yield from _patches(config, names - {"grid_thw"}, "video", ("pixel_values_videos",))
    if "pixel_values_videos" in names and "video_grid_thw" not in names:
        channels, frames = size(config, "num_channels", 3), size(config, "num_frames", 4)
        yield {"pixel_values_videos": _normal(1, frames, channels, *_side(config))}


def _sounds(config: Any, names: set[str]) -> Iterator[dict[str, Any]]:
    """Spectrograms, either way round, or waves."""
    bins = (
        size(config, "num_mel_bins", 0)
        or size(config, "feature_size", 0)
        or size(config, "input_feat_per_channel", 16)
    )
    frames = 2 * size(config, "max_source_positions", 32)
    masks = [name for name in ("input_features_mask", "feature_attention_mask") if name in names]
    if "input_features" in names:
        for shape in ((1, bins, frames), (1, frames, bins)):
            yield {
                "input_features": _normal(*shape),
                **{mask: torch.ones(1, frames).long() for mask in masks},
            }
    if "input_values" in names:
        for shape in ((1, 800), (1, 1, 1600), (1, frames, bins)):
            yield {"input_values": _normal(*shape)}


def with_placeholders(config: Any, call: dict[str, Any], counts: dict[str, int]) -> dict[str, Any]:
    """Such a call with as many placeholders after the first token as features are made of each kind."""
    if "input_ids" not in call:
        return call
    ids, parts = call["input_ids"], []
    for kind, count in counts.items():
        token = next((found for name in PLACEHOLDERS[kind] if (found := _id(config, name)) is not None), None)
        if token is not None:
            ids = torch.where(ids == token, ids + 1, ids)  # of the text, which stands for itself
            parts.append(torch.full((1, count), token))
    full = {**call, "input_ids": torch.cat([ids[:, :1], *parts, ids[:, 1:]], 1)}
    mask = call.get("attention_mask")
    if mask is not None and mask.shape == ids.shape:
        full["attention_mask"] = torch.ones_like(full["input_ids"])
    if "mm_token_type_ids" in call:
        marks = [torch.full((1, count), MARKS[kind]) for kind, count in counts.items()]
        rest = torch.zeros_like(ids)
        full["mm_token_type_ids"] = torch.cat([rest[:, :1], *marks, rest[:, 1:]], 1)
    return full


def wanted_placeholders(error: Exception, counts: dict[str, int], width: int) -> dict[str, int] | None:
    """What a model says about the number of its features, where that is what it says: some count their
    coordinates, so many that as many placeholders are too many.
    """
    found = re.search(r"(\w+) features and .*?features:? *(\d+)", str(error))
    found = found or re.search(r"match number of (\w+) tokens .*?\((\d+)\)", str(error))
    if found is None or found[1].lower() not in counts:
        return None
    kind, said = found[1].lower(), int(found[2])
    if said != counts[kind]:
        return {**counts, kind: said}
    return {**counts, kind: said // width} if said >= width > 1 and said % width == 0 else None


def heeded(error: Exception, call: dict[str, Any]) -> dict[str, Any] | None:
    """The call with the size that a model says it wants in place of the one that it got, where it says so."""
    said = str(error)
    product = re.search(r"cannot be multiplied \((\d+)x(\d+) and (\d+)x\d+\)", said)
    channels = re.search(r"to have (\d+) channels, but got (\d+) channels", said)
    if product is not None:
        old, new = int(product[2]), int(product[3])
    elif channels is not None:
        new, old = int(channels[1]), int(channels[2])
    else:
        return None
    changed = {name: _resized(value, old, new) for name, value in call.items()}
    return changed if any(changed[name] is not call[name] for name in call) else None


def _resized(value: Any, old: int, new: int) -> Any:
    if not isinstance(value, torch.Tensor) or not value.is_floating_point() or old not in value.shape:
        return value
    return _normal(*(new if length == old else length for length in value.shape))


def _id(config: Any, name: str) -> int | None:
    for own in _levels(config):
        if isinstance(found := getattr(own, name, None), int):
            return found
    return None


def _levels(config: Any) -> list[Any]:
    """A config, and those inside it."""
    names = getattr(type(config), "sub_configs", None) or {}
    inside = [own for name in names if hasattr(own := getattr(config, name, None), "to_dict")]
    return [config, *(level for own in inside for level in _levels(own))]


def size(config: Any, name: str, default: int = 0) -> int:
    """A size of the config or of one inside it; a path names which."""
    *path, last = name.split(".")
    for step in path:
        config = getattr(config, step)
    for own in _levels(config):
        try:
            found = getattr(own, last, None)
        except Exception:
            continue
        if isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, int):
            return found
    return default
