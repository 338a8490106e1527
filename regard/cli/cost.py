"""regard cost: what does a model take to run and to train?"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from regard.cli.options import Json, Open, OutIfGiven, announce, print_json
from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.costs import Cost, Sizes
    from regard.costs.context import Context

T = TypeVar("T")
MOST = 10**15
REMEDY = "give a config.json, the directory of a model, a hub id that has been downloaded, or nothing"

HELP = """What does a model take to run and to train: flops, bytes and parameters, part by part?

MODEL is a config.json, a local directory with one, or a hub id in the local cache; without one,
all-MiniLM-L6-v2 is counted. Weights are not read, nothing is computed and nothing is downloaded: widths are
enough. --tokens is the model's own context unless you give another length; more than the model takes is
refused where positions are a table.

Printed next to the exact count: the approximations 2 N and 6 N tokens, and T*, the length at which pairs of
tokens cost as much as weights.

\b
Examples
  regard cost                                     the demonstration model
  regard cost ./my-model --tokens 8192 --batch 4  a model you have
  regard cost config.json --full                  every token sees every token
  regard cost config.json --out cost              table and picture

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
        int | None, typer.Option(help="Tokens of a sequence.", show_default="the model's context")
    ] = None,
    batch: Annotated[int, typer.Option(help="How many sequences.")] = 1,
    causal: Annotated[
        bool | None,
        typer.Option(
            "--causal/--full", help="Whether a token sees its past only.", show_default="what the config says"
        ),
    ] = None,
    json_: Json = False,
    open_: Open = False,
    out: OutIfGiven = None,
) -> None:
    """Check the arguments, count, print."""
    from regard._files import check_writable
    from regard.costs.wording import written

    for option, value in (("--tokens", tokens), ("--batch", batch)):
        if value is not None and not 1 <= value <= MOST:
            raise ArgumentError(option, f"is {value}", "give a whole number from 1 to 10¹⁵")
    if open_ and out is None:
        raise ArgumentError("--open", "is given without --out, and no page is written", "add --out DIRECTORY")
    if out is not None:
        check_writable(out)
    config, path, name = _config(model)
    subject = _subject(config)
    context = _context(config, subject, path)
    sizes = _sizes(tokens, context, name, (batch, causal))
    found = _about(lambda: _counted(subject, sizes))
    notes = _notes(config, context, tokens, sizes.tokens)
    data = {"model": name, **written(found), "notes": notes}
    if json_:
        print_json(data)
    else:
        _print(found, name, notes)
    if out is not None:
        announce(_write(out, found, name, data), json_=json_, open_=open_)


def _sizes(tokens: int | None, context: Context | None, name: str, more: tuple[int, bool | None]) -> Sizes:
    """The given number of tokens, or the model's context; more than its table of positions has is refused."""
    from regard.costs import Sizes

    batch, causal = more
    if tokens is None and context is None:
        found = f"is missing, and the config of {name} names no length of its context"
        raise ArgumentError("--tokens", found, "give the number of tokens of a sequence")
    if context is not None and context.table and tokens is not None and tokens > context.tokens:
        found = f"is {tokens:,}, and {name} has a table of {context.tokens:,} positions"
        remedy = f"give at most {context.tokens}, or leave it out"
        raise ArgumentError("--tokens", f"{found} ({context.source})", remedy)
    return Sizes(context.tokens if tokens is None and context else tokens or 1, batch, causal=causal)


def _context(config: dict[str, Any], subject: Any, path: Path) -> Context | None:
    """The context of a model: its config names it, or the training that wrote it."""
    from regard.audits.own import is_own
    from regard.costs.context import Context, context_of

    if not is_own(config):
        return context_of(config, None if isinstance(subject, dict) else subject)
    from regard.training.reading import context_in

    try:
        return Context(context_in(path.resolve().parent.parent), "the context of its training", False)
    except ArgumentError:  # a model of regard.nn that no command trained
        return None


def _config(model: str | None) -> tuple[dict[str, Any], Path, str]:
    """The config of that name, its file, and the name of the model."""
    from regard.audits.checkpoint import read_json

    path, name = _path(model)
    return _typed(path, read_json(path, REMEDY)), path, name


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


def _notes(config: dict[str, Any], context: Context | None, given: int | None, tokens: int) -> list[str]:
    """Where the number of tokens is from, and what the numbers leave out."""
    notes = []
    if context is not None and given is None:
        notes.append(
            f"{tokens:,} tokens are the context of the model ({context.source}); --tokens sets another"
        )
    elif context is not None and tokens > context.tokens:
        notes.append(
            f"{tokens:,} tokens are more than the context of the model, {context.tokens:,} ({context.source})"
        )
    if not config.get("architectures") and "model_type" in config:
        notes.append("no output head is counted: the config names no architecture")
    return notes


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


def _subject(config: dict[str, Any]) -> Any:
    """What is counted: the config where its family has a closed form, else its model without memory."""
    from regard.audits.own import build, is_own
    from regard.costs.families import has_closed_form

    if is_own(config):
        return _about(lambda: build(config))
    if _about(lambda: has_closed_form(config)) or not isinstance(config.get("model_type"), str):
        return config
    with _quiet():
        return _about(lambda: _build(config))


def _counted(subject: Any, sizes: Sizes) -> Cost:
    from regard.costs import cost as counted

    with nullcontext() if isinstance(subject, dict) else _quiet():
        return counted(subject, sizes)


def _about(read: Callable[[], T]) -> T:
    """Errors name what the user gave."""
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
            raise ArgumentError(
                "MODEL", error.found, "load it yourself and call regard.cost(model, sizes, inputs=...)"
            ) from error
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


def _print(found: Cost, name: str, notes: list[str]) -> None:
    """The table, the sentences below it, and bars over length."""
    from regard.audits import terminal
    from regard.costs.picture import bars
    from regard.costs.wording import COLUMNS, remarks, rows

    console = terminal.output()
    body = rows(found)
    terminal.show_table(console, _title(found, name), COLUMNS, body, bold=[len(body) - 1])
    for sentence in (*notes, *remarks(found), "", *bars(found)):
        terminal.say(console, sentence)


def _title(found: Cost, name: str) -> str:
    return f"{name}: {found.sizes.batch} × {found.sizes.tokens:,} tokens, in flops"


def _write(directory: Path, found: Cost, name: str, data: dict[str, Any]) -> list[Path]:
    """Write cost.html, cost.svg and cost.json, all or none, and return their paths."""
    from regard._files import write_together, writing
    from regard._written import plain
    from regard.costs.picture import page, svg

    title = f"{name}: cost of {found.sizes.batch} × {found.sizes.tokens:,} tokens"
    texts = {
        "cost.html": page(found, title, data["notes"]),
        "cost.svg": svg(found, title),
        "cost.json": json.dumps(plain(data), indent=1, ensure_ascii=False),
    }
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({directory / file: text.encode() for file, text in texts.items()})
    return [directory / file for file in texts]
