"""regard cost: what does a model take to run and to train?"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from regard._files import write_text
from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.costs import Cost, Sizes

T = TypeVar("T")
MOST, USUAL = 10**15, 4096
LOADED = "load it yourself and call regard.cost(model, sizes, inputs=...)"
REMEDY = "give a config.json, the directory of a model, a hub id that has been downloaded, or nothing"

HELP = """What does a model take to run and to train: flops, bytes and parameters, part by part?

MODEL is a config.json, a local directory with one, or a hub id in the local cache; without one,
all-MiniLM-L6-v2 is counted. Weights are not read, nothing is computed and nothing is downloaded: widths are
enough.

Beside the exact count stand the approximation 2 N and 6 N tokens, and T*, the length at which pairs of tokens
cost as much as weights.

\b
Examples
  regard cost --tokens 512                                the demonstration model
  regard cost ./my-model --tokens 8192 --batch 4          a model you have
  regard cost config.json --tokens 4096 --full            every token sees every token
  regard cost config.json --tokens 4096 --out cost.svg    the picture of attention against weights (or .html)

\b
Exit status
  0 done   2 wrong arguments or files
"""


def cost(
    model: Annotated[
        str | None,
        typer.Argument(metavar="MODEL", help="A config.json, a directory or a hub id.", show_default=False),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Tokens of a sequence.", show_default="4096, or all that a model without a closed form takes"
        ),
    ] = None,
    batch: Annotated[int, typer.Option(help="How many sequences.")] = 1,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full", help="Whether a token sees its past only.", show_default="what the config says"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the picture to this .svg, or table and picture to this .html.",
            show_default=False,
        ),
    ] = None,
) -> None:
    """Check the arguments, count, print."""
    from regard.costs import Sizes
    from regard.costs.picture import drawing

    if out is not None and out.suffix.lower() not in (".svg", ".html"):
        raise ArgumentError("--out", f"is {out}", "give a file that ends in .svg or .html")
    config, name = _config(model)
    tokens = _usual(config) if tokens is None else tokens
    sizes = _sizes(Sizes, tokens, batch, causal)
    found = _count(config, sizes)
    _print(found, name)
    for note in _notes(config, tokens):
        typer.echo(note)
    if out is not None:
        _write(out, drawing(found, f"{name}: cost of {batch} × {tokens:,} tokens", out))


def _sizes(sizes: type[Sizes], tokens: int, batch: int, causal: bool | None) -> Sizes:
    for option, value in (("--tokens", tokens), ("--batch", batch)):
        if not 1 <= value <= MOST:
            raise ArgumentError(option, f"is {value}", "give a whole number from 1 to 10¹⁵")
    return sizes(tokens, batch, causal=causal)


def _config(model: str | None) -> tuple[dict[str, Any], str]:
    """The config of that name, and how it is called."""
    from regard.audits.checkpoint import read_json

    path, name = _path(model)
    return _typed(path, read_json(path, REMEDY)), name


def _typed(path: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The config with the type of its model, which is guessed where it says none, as regard audit does."""
    from regard.audits.files import guess_type
    from regard.audits.own import is_own

    if config.get("model_type") is not None or is_own(config):
        return config
    if importlib.util.find_spec("transformers") is None:
        raise MissingExtraError("transformers", "hf")
    weights = path.with_name("model.safetensors")
    return {**config, "model_type": guess_type(weights if weights.is_file() else path, config)}


def _notes(config: dict[str, Any], tokens: int) -> list[str]:
    """What the numbers leave out, and lengths that the model does not take."""
    notes = []
    if not config.get("architectures") and "model_type" in config:
        notes.append("no output head is counted: the config names no architecture")
    longest = _longest(config)
    if longest is not None and longest < tokens:
        notes.append(
            f"the model has {longest:,} positions: {tokens:,} tokens are what it "
            "would cost, not what it takes"
        )
    return notes


def _longest(config: dict[str, Any]) -> int | None:
    """Return how many positions a model has, where its config says it."""
    found = config.get("max_position_embeddings", config.get("n_positions"))
    return found if isinstance(found, int) and found > 0 else None


def _usual(config: dict[str, Any]) -> int:
    """Return the tokens that are counted where none are given: no more than a model takes that has to run."""
    runs = isinstance(config.get("model_type"), str) and not _has_closed_form(config)
    return min(USUAL, _longest(config) or USUAL) if runs else USUAL


def _path(model: str | None) -> tuple[Path, str]:
    from regard.audits.checkpoint import demo_directory
    from regard.audits.own import inside, name_of

    if model is None:
        return demo_directory() / "config.json", "all-MiniLM-L6-v2"
    path = inside(Path(model).expanduser())
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ArgumentError("MODEL", f"{model} is a directory without a config.json", REMEDY)
        return path / "config.json", name_of(path)
    if path.is_file():
        return path, path.resolve().parent.name if path.name == "config.json" else path.stem
    return _config_in_cache(model), model


def _config_in_cache(name: str) -> Path:
    """The config of a hub id in the local cache."""
    nothing = ArgumentError(
        "MODEL", f"there is nothing at {name}, and no downloaded model of that name", REMEDY
    )
    if not re.fullmatch(r"\w[\w.-]*(/\w[\w.-]*)?", name):
        raise ArgumentError("MODEL", f"there is nothing at {name}", REMEDY)
    try:
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.errors import HFValidationError
    except ImportError:
        raise nothing from None
    try:
        found = try_to_load_from_cache(name, "config.json")
    except HFValidationError:
        raise nothing from None
    if not isinstance(found, str):
        raise nothing
    return Path(found)


def _count(config: dict[str, Any], sizes: Sizes) -> Cost:
    """By closed form where the family has one, else by a run of its model without memory."""
    from regard.audits.own import build, is_own
    from regard.costs import cost as counted

    if is_own(config):
        return _about(lambda: counted(build(config), sizes))
    if _has_closed_form(config) or not isinstance(config.get("model_type"), str):
        return _about(lambda: counted(config, sizes))
    longest = _longest(config)
    few = longest is not None and longest < sizes.tokens
    with _quiet():
        return _about(lambda: counted(_build(config), sizes), f"give --tokens {longest}" if few else LOADED)


def _has_closed_form(config: dict[str, Any]) -> bool:
    from regard.costs.families import has_closed_form

    return _about(lambda: has_closed_form(config))


def _about(read: Callable[[], T], remedy: str = LOADED) -> T:
    """Errors name what the user gave; the remedy is for a model that does not run on shapes alone."""
    try:
        return read()
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        raise ArgumentError("--tokens", "is more than a tensor of shapes can have", "give fewer") from error
    except ArgumentError as error:
        if error.argument == "config":
            raise ArgumentError("MODEL", f"its config {error.found}", error.remedy) from error
        if error.argument == "inputs":
            raise ArgumentError("MODEL", error.found, remedy) from error
        raise


def _build(config: dict[str, Any]) -> Any:
    """The model of a config on a device without memory; code that the config names is never run."""
    from regard.audits.checkpoint import first_line
    from regard.audits.files import nearest_types
    from regard.costs.families import class_name, refuse_cross_attention

    try:
        import torch
        import transformers
    except ImportError:
        raise MissingExtraError("transformers", "hf") from None
    refuse_cross_attention(config)
    plain = {
        key: value for key, value in config.items() if key != "auto_map" and "attn_implementation" not in key
    }
    kind, maker = plain.pop("model_type"), _maker(class_name(config), transformers)
    try:
        with torch.device("meta"):
            made = transformers.AutoConfig.for_model(kind, **plain)
            _check_kind(maker, made)
            return (
                transformers.AutoModel.from_config(made, trust_remote_code=False)
                if maker is None
                else maker(made)
            ).eval()
    except Exception as error:  # a config is any JSON, and what is wrong with it decides who complains
        found = (
            f"transformers cannot build a model of the type {kind!r} from its config ({first_line(error)})"
        )
        near = ", ".join(nearest_types(kind))
        remedy = f"the nearest names are {near}: correct config.json" if near else REMEDY
        raise ArgumentError("MODEL", found, remedy) from error


def _maker(name: str | None, transformers: Any) -> Any:
    """The class of models of that name; none where the config names none,
    for another would have another head.
    """
    found = None if name is None else getattr(transformers, name, None)
    if name is not None and not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ArgumentError(
            "config",
            f"is of a {name}, which is not a transformers model",
            "load it yourself and call regard.cost(model, sizes)",
        )
    return found


def _check_kind(maker: Any, config: Any) -> None:
    """A class of another family would read the fields that it knows, and make up the rest."""
    if maker is not None and maker.config_class is not None and not isinstance(config, maker.config_class):
        raise TypeError(f"{maker.__name__} takes a {maker.config_class.__name__}")


@contextmanager
def _quiet() -> Iterator[None]:
    """Without what transformers and torch print about models that have no weights."""
    import logging
    import warnings

    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


def _print(found: Cost, name: str) -> None:
    """The table, what it does not say, and bars over length."""
    from regard.audits import terminal
    from regard.costs.picture import bars
    from regard.costs.wording import COLUMNS, remarks, rows

    console = terminal.output()
    title = f"{name}: {found.sizes.batch} × {found.sizes.tokens:,} tokens, in flops"
    body = rows(found)
    terminal.show_table(console, title, COLUMNS, body, bold=[len(body) - 1])
    for sentence in (*remarks(found), "", *bars(found)):
        terminal.say(console, sentence)


def _write(path: Path, text: str) -> None:
    try:
        write_text(path, text)
    except OSError as error:
        raise ArgumentError(
            "--out",
            f"{path} cannot be written ({error.strerror})",
            "give a file in a directory that exists",
        ) from error
    typer.echo(f"written: {path}", err=True)
