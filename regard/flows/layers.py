"""Layers of a trained model as maps that are iterated: what would a network of this layer alone do?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from regard.audits.adapters.base import Block, Call
from regard.audits.capture import capture, output_tensor, replay, tokens_in
from regard.audits.inputs import Input
from regard.audits.places import Place, places
from regard.audits.run import working
from regard.audits.site import TOLERANCE
from regard.dynamics import BlowUpError, Clusters, EffectiveRank, MeanCosine, Observable, iterate
from regard.errors import ArgumentError
from regard.flows.columns import COSINE, column_of
from regard.flows.frames import principal_camera
from regard.maps import Map
from regard.measure import Measure
from regard.parameters import shared

OBSERVED: tuple[Observable, ...] = (Clusters(COSINE), EffectiveRank(), MeanCosine())


@dataclass(frozen=True, eq=False, repr=False)
class Replayed(Map):
    """A module as its model called it, with other tokens in place of those that entered it.

    residual: whether the tokens are added to what comes out.
    """

    path: str = shared()
    function: Callable[[Tensor], Tensor] = shared()
    residual: bool = False

    def __call__(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            value = self.function(x)
        return x + value if self.residual else value


@dataclass(frozen=True)
class Layer:
    """number: its place in the model; map: what is iterated; tokens (n, d): what enters it on the text; gap:
    how far the map is from what the layer itself gave there, relative.

    Examples:
        >>> from regard.audits.inputs import inputs_of
        >>> from regard.flows import layers_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> (item,) = inputs_of(model, [torch.randn(1, 5, 8)], None)
        >>> first = layers_of(model, item)[0]  # a Layer
        >>> first.number, first.tokens.shape, first.gap < 1e-6
        (0, torch.Size([5, 8]), True)
    """

    number: int
    map: Replayed
    tokens: Tensor
    gap: float


@dataclass(frozen=True)
class Iterated:
    """What a layer did to the tokens when it was repeated.

    values: a number of each step for each column; labels: for each step the cluster of each token, the
    largest cluster first; note: why it ended early, if it did.

    Examples:
        >>> from regard.audits.inputs import inputs_of
        >>> from regard.flows import iterated, layers_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> (item,) = inputs_of(model, [torch.randn(1, 5, 8)], None)
        >>> found = iterated(layers_of(model, item)[0], steps=3)  # an Iterated
        >>> len(found.states), sorted(found.values)
        (4, ['clusters', 'effective rank', 'mean cosine'])
    """

    number: int
    path: str
    gap: float
    states: list[Tensor]
    values: dict[str, list[float]]
    labels: list[list[int]]
    note: str

    @property
    def collapsed(self) -> int | None:
        """The step from which all tokens are one cluster until the end; None where they are not."""
        counts = self.values["clusters"]
        alone = next((k for k, count in enumerate(reversed(counts)) if count != 1), len(counts))
        return len(counts) - alone if alone and not self.note else None

    def end(self) -> str:
        """What became of the tokens, in a few words."""
        if self.note:
            return self.note
        if self.collapsed is not None:
            return f"one cluster from step {self.collapsed} on"
        last = {name: values[-1] for name, values in self.values.items()}
        return f"{last['clusters']:g} clusters are left, mean cosine {last['mean cosine']:.2f}"

    def panel(self) -> dict[str, Any]:
        """What a page draws of it."""
        camera = principal_camera(self.states)
        return {
            "name": f"layer {self.number}",
            "path": self.path,
            **camera.written(),
            "frames": [camera.frame(Measure(x)) for x in self.states],
            "values": self.values,
            "labels": self.labels,
            "gap": self.gap,
            "note": self.end(),
        }


def layers_of(
    model: nn.Module, item: Input, numbers: Sequence[int] | None = None, *, attention: bool = False
) -> list[Layer]:
    """The blocks of a model, in its order, as they are called on an input; some of them by number, counted
    from 0. attention: not the whole block, but what it has around its attention.

    Examples:
        >>> from regard.audits.inputs import inputs_of
        >>> from regard.flows import layers_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> (item,) = inputs_of(model, [torch.randn(1, 5, 8)], None)
        >>> [one.number for one in layers_of(model, item)]
        [0, 1]
    """
    model = working(model)
    stands = list(_blocks(model))
    if not stands:
        raise ArgumentError("MODEL", "has no block that an adapter knows", "regard audit says what it found")
    wanted = range(len(stands)) if numbers is None else numbers
    for number in wanted:
        if not 0 <= number < len(stands):
            raise ArgumentError("--layer", f"is {number}", f"give a number from 0 to {len(stands) - 1}")
    chosen = {number: _part(*stands[number], attention) for number in wanted}
    paths = sorted({path for part in chosen.values() for path in part.paths})
    trace = capture(model, item.options, paths)
    return [_layer(model, number, part, trace) for number, part in chosen.items()]


def iterated(layer: Layer, steps: int) -> Iterated:
    """Repeat a layer, and look after every step.

    Examples:
        >>> from regard.audits.inputs import inputs_of
        >>> from regard.flows import iterated, layers_of
        >>> layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        >>> model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
        >>> (item,) = inputs_of(model, [torch.randn(1, 5, 8)], None)
        >>> iterated(layers_of(model, item)[0], steps=3).values["clusters"][0]
        5.0
    """
    states: list[Tensor] = []
    values: dict[str, list[float]] = {one.name: [] for one in OBSERVED}
    labels: list[list[int]] = []
    note = ""
    try:
        for _, measure in iterate(layer.map, layer.tokens, steps).walk(range(steps + 1)):
            states.append(measure.points)
            labels.append(_ranked(Clusters(COSINE).labels(measure)))
            for one in OBSERVED:
                values[one.name].append(one.number(measure, measure))
    except BlowUpError as error:
        note = f"after {error.last:g} steps the tokens leave the range of floating-point numbers"
    return Iterated(layer.number, layer.map.path, layer.gap, states, values, labels, note)


def report(found: Sequence[Iterated], name: str, item: Input, steps: int) -> dict[str, Any]:
    """Everything that was seen, as plain values."""
    return {
        "kind": "layers",
        "model": name,
        "text": item.name,
        "tokens": item.tokens,
        "times": list(range(steps + 1)),
        "columns": [column_of(one).written() for one in OBSERVED],
        "panels": [one.panel() for one in found],
        "words": sentences(found, len(item.tokens), steps),
    }


def sentences(found: Sequence[Iterated], tokens: int, steps: int) -> list[str]:
    """What was observed, in words."""
    collapsed = [one for one in found if one.collapsed is not None]
    within = max((one.collapsed or 0 for one in collapsed), default=steps)
    words = [
        f"Observed on one text of {tokens} tokens, {steps} steps: {len(collapsed)} of {len(found)} layers "
        f"take all tokens to one cluster{f', within {within} steps' if collapsed else ''}."
    ]
    return words + [f"Layer {one.number}: {one.end()}." for one in found]


@dataclass(frozen=True)
class _Part:
    """Modules that are called one after the other."""

    paths: tuple[str, ...]
    residual: bool


def _blocks(model: nn.Module) -> Iterator[tuple[Place, Block | None]]:
    """Every block once, in the order of the model; an attention module without one stands for itself."""
    seen = set()
    for place in places(model):
        block = place.block(model)
        path = place.path if block is None else block.path
        if path not in seen:
            seen.add(path)
            yield place, block


def _part(place: Place, block: Block | None, attention: bool) -> _Part:
    """The whole block; or the module that its attention and the residual connection around it are in, and
    where there is none, the branch with the tokens added.
    """
    if block is None:
        return _Part((place.path,), True)
    if not attention:
        return _Part((block.path,), False)
    around = os.path.commonpath([path.replace(".", "/") for path in block.attention]).replace("/", ".")
    whole = len(block.attention) > 1 and around.startswith(f"{block.path}.")
    return _Part((around,), False) if whole else _Part(block.attention, True)


def _layer(model: nn.Module, number: int, part: _Part, trace: dict[str, Call]) -> Layer:
    missing = [path for path in part.paths if path not in trace]
    if missing:
        raise ArgumentError("--layer", f"{number}: the model did not call {missing[0]}", "leave it out")
    tokens = tokens_in(trace[part.paths[0]])
    function = replay(model, trace, part.paths)
    own = output_tensor(trace[part.paths[-1]].output)
    with torch.no_grad():
        again = function(tokens)
    gap = float((again - own).norm() / own.norm().clamp_min(1e-300))
    if not gap <= TOLERANCE:
        found = f"{number}: repeated on its own tokens it is off by {gap:.1e} (relative)"
        raise ArgumentError("--layer", found, "leave it out: it does not depend on its tokens alone")
    if again.shape != tokens.shape:
        found = f"{number}: takes {list(tokens.shape)} to {list(again.shape)}"
        raise ArgumentError("--layer", found, "only a layer that keeps the shape can be repeated")
    return Layer(number, Replayed(part.paths[-1], function, part.residual), tokens, gap)


def _ranked(labels: Tensor) -> list[int]:
    """Clusters by size: 0 is the largest."""
    _, places_, counts = labels.unique(return_inverse=True, return_counts=True)
    rank = counts.argsort(descending=True, stable=True).argsort()
    return [int(k) for k in rank[places_]]
