"""Trajectories on disk: one file, safetensors with JSON in its head, written whole or not at all."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from regard._files import write_whole
from regard._object import Object
from regard._written import parsed, read_object, write_object
from regard.compute import Engine
from regard.dynamics import schemes, spaces
from regard.dynamics.fields import read_maps
from regard.dynamics.motion import Flow, Motion, Node, Transport
from regard.dynamics.trajectory import Trajectory
from regard.errors import ArgumentError, MissingExtraError
from regard.maps import Mapping
from regard.measure import Measure

FORMAT = 1
NODE = ("index", "layer", "count", "time", "step")


def write(path: Path, motion: Motion, nodes: list[Node], asked: Collection[int]) -> None:
    """Write a motion and some of its nodes, and which of them are to be kept."""
    try:
        from safetensors.torch import save
    except ImportError:
        raise MissingExtraError("safetensors", "hf") from None
    source = motion.source
    tensors = {f"points.{n.index}": n.points for n in nodes if n.points is not source.points}
    tensors["points"] = source.points
    if source.log_weights is not None:
        tensors["log_weights"] = source.log_weights
    if source.marks is not None:
        tensors["marks"] = source.marks
    head: dict[str, Any] = {
        "format": FORMAT,
        "map": _fingerprint(motion.maps),
        "until": motion.until,
        "nodes": [{name: getattr(node, name) for name in NODE} for node in nodes],
        "asked": sorted(node.index for node in nodes if node.index in asked),
    }
    if isinstance(motion, Flow):
        head |= {
            "scheme": write_object(motion.scheme),
            "space": write_object(motion.space),
            "noise": motion.noise,
            "seed": motion.seed,
        }
    whole = {name: tensor.detach().contiguous().clone() for name, tensor in tensors.items()}
    write_whole(path, save(whole, {"trajectory": json.dumps(head)}))


def resume(
    path: str | os.PathLike[str], map: Mapping | Sequence[Mapping], *, engine: Engine | None = None
) -> Trajectory:
    """The trajectory that `Trajectory.save` wrote, continued from there.

    The map is given again, because a file holds no programs; another map than the one that made the file is
    an error.

    Examples:
        >>> import pathlib, tempfile
        >>> from regard.dynamics import Euler, resume
        >>> attention, x = regard.Attention(regard.Dot()), torch.randn(4, 2)
        >>> with tempfile.TemporaryDirectory() as place:
        ...     path = pathlib.Path(place, "run.safetensors")
        ...     first = regard.flow(attention, x, Euler(0.1), 1.0)
        ...     _ = first.at(0.5)
        ...     first.save(path)
        ...     torch.equal(resume(path, attention).at(1.0), first.at(1.0))
        True
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise MissingExtraError("safetensors", "hf") from None
    try:
        with safe_open(os.fspath(path), "pt") as file:
            head = parsed((file.metadata() or {})["trajectory"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except FileNotFoundError:
        raise ArgumentError("path", f"{path} is not there", "give a file that save() wrote") from None
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise ArgumentError("path", f"{path} is not a trajectory", "give a file that save() wrote") from error
    if head["format"] != FORMAT:
        found = f"has format {head['format']}, and this version reads {FORMAT}"
        raise ArgumentError("path", found, "start the flow again")
    maps = read_maps(map)
    if _fingerprint(maps) != head["map"]:
        raise ArgumentError(
            "map", "is not the one that made this file", "give the same map, or start a new flow"
        )
    source = Measure(tensors["points"], tensors.get("log_weights"), tensors.get("marks"))
    nodes = [
        Node(
            **{name: one[name] for name in NODE}, points=tensors.get(f"points.{one['index']}", source.points)
        )
        for one in head["nodes"]
    ]
    return Trajectory(_motion(head, maps, source, engine), nodes, head["asked"])


def _motion(
    head: dict[str, Any], maps: tuple[Mapping, ...], source: Measure, engine: Engine | None
) -> Motion:
    if "scheme" not in head:
        return Transport(maps, source, head["until"], engine)
    scheme, space = (read_object(head[name], (schemes, spaces)) for name in ("scheme", "space"))
    return Flow(maps, source, head["until"], engine, scheme, space, head["noise"], head["seed"])


def _fingerprint(value: Any) -> str:
    digest = hashlib.sha256()
    for piece in _pieces(value):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    """What a declaration is made of; functions by their names, because nothing else of them is lasting."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu().contiguous()
        yield f"{plain.dtype} {list(plain.shape)}".encode()
        yield plain.view(-1).numpy().tobytes()
    elif isinstance(value, Object):
        yield type(value).__qualname__.encode()
        for field in dataclasses.fields(value):
            yield field.name.encode()
            yield from _pieces(getattr(value, field.name))
    elif isinstance(value, (tuple, list)):
        yield f"{len(value)}".encode()
        for part in value:
            yield from _pieces(part)
    elif value is None or isinstance(value, (bool, int, float, str)):
        yield repr(value).encode()
    else:
        name = value.__qualname__ if callable(value) and not isinstance(value, type) else ""
        yield f"{type(value).__qualname__} {name}".encode()
