"""Inputs of an audit: texts or keyword arguments of the model, one sequence each."""

from __future__ import annotations

import inspect
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from regard.audits.changes import Reading, Unit
from regard.audits.padding import Padded, without_padding
from regard.audits.samples import LOWER_CASED, UNKNOWN, RandomTokens, loses_capitals, repair_of, unknown_share
from regard.errors import ArgumentError

FILES = (".txt", ".md", ".csv", ".tsv", ".json", ".jsonl")
"""How names of files with texts end."""
ENDLESS = 10**9
"""Tokenizers that do not know how much their model takes say a number beyond this."""
LONGEST, LETTERS = 1 << 15, 16
"""Tokens of a text where neither model nor tokenizer says how many, and letters of a token to begin with."""
MOST_LETTERS = 1 << 22
"""Letters of a text that are tokenized at most where they make few tokens, as one endless word does."""


@dataclass(frozen=True)
class Input:
    """One sequence: the keyword arguments of the model, names of its tokens, and for texts their units and
    how to encode another.

    cut: whether the text was longer than the model takes, and was cut off; unknown: the share of tokens that
    the tokenizer does not know, and repair: what makes it know them; random: whether the tokens were drawn at
    random; padded: what was given, where padding was omitted.
    """

    index: int
    name: str
    options: dict[str, Any]
    tokens: list[str]
    text: str | None = None
    reading: Reading | None = None
    encode: Callable[[str], dict[str, Any]] | None = None
    cut: bool = False
    unknown: float = 0.0
    repair: str = ""
    random: bool = False
    padded: Padded | None = None

    @property
    def units(self) -> tuple[Unit, ...]:
        """The words of the text, or its tokens where it has no words."""
        return () if self.reading is None else self.reading.units


def read_texts(texts: Sequence[str], files: Sequence[Path] = ()) -> list[str]:
    """The texts of `--text`, then those of each `--text-file`, one per line."""
    return [*map(_text, texts), *(line for path in files for line in _lines(path))]


def read_pairs(path: Path) -> list[tuple[str, str]]:
    """The pairs of `--pairs`: on each line an original text, a TAB, and the changed text."""
    return [
        _pair(f"line {number} of {path}", line)
        for number, line in enumerate(read_file(path, "--pairs").splitlines(), 1)
        if line.strip()
    ]


def check_pairs(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[tuple[str, str], ...]:
    """The pairs of an original and a changed text, where they are pairs of texts and can be read."""
    remedy = "give pairs of texts, such as [('a cat', 'a cta')]"
    for position, pair in enumerate(pairs):
        texts = isinstance(pair, (tuple, list)) and [isinstance(side, str) for side in pair] == [True, True]
        if not texts or not all(side.strip() for side in pair):
            raise ArgumentError("pairs", f"have {pair!r} at {position}", remedy)
    if pairs and tokenizer is None:
        raise ArgumentError("tokenizer", "is missing and pairs are texts", "give the model's tokenizer")
    return tuple((refuse_halves("pairs", one), refuse_halves("pairs", other)) for one, other in pairs)


def _pair(where: str, line: str) -> tuple[str, str]:
    sides = [side.strip() for side in line.split("\t")]
    remedy = "write the original text, one TAB and the changed text on each line"
    if len(sides) != 2:
        found = f"has {len(sides) - 1} TABs" if len(sides) > 1 else "has no TAB"
        raise ArgumentError("--pairs", f"{where} {found}", remedy)
    for side, name in zip(sides, ("original", "changed"), strict=True):
        if not side:
            raise ArgumentError("--pairs", f"{where} has no {name} text", remedy)
    return sides[0], sides[1]


def refuse_file_names(items: Sequence[Any]) -> None:
    """Refuse a text that is the name of a file, whose words nobody wants to be audited."""
    for item in items:
        if isinstance(item, str) and os.path.isfile(item):
            remedy = f"give its texts, such as pathlib.Path({item!r}).read_text().splitlines()"
            raise ArgumentError("inputs", f"have {item!r}, the name of a file", remedy)


def read_file(path: Path, option: str = "--text-file") -> str:
    """The text in a UTF-8 file; a file without any is refused. option: what errors name."""
    try:
        text = path.expanduser().read_text(encoding="utf-8-sig")
    except OSError as error:
        found = f"{path} cannot be read ({error.strerror})"
        raise ArgumentError(option, found, "give the path of a text file") from error
    except UnicodeDecodeError:
        raise ArgumentError(option, f"{path} is not UTF-8 text", "save the file as UTF-8") from None
    if not text.strip():
        raise ArgumentError(option, f"{path} has no text in it", "give a file with a text")
    return text


def _text(value: str) -> str:
    """The text that `--text` gives; the name of a file is refused, also where that file is missing."""
    if not value.strip():
        raise ArgumentError("--text", "is empty", "write a text, or name a file of texts with --text-file")
    if _is_file(value):
        remedy = f"give the texts in it with --text-file {shlex.quote(value)}"
        raise ArgumentError("--text", f"is {value}, the name of a file", remedy)
    return refuse_halves("--text", value)


def _is_file(value: str) -> bool:
    """A file, or so plainly the name of one that a missing file must not be taken for a text."""
    path = value.strip()
    named = not re.search(r"\s", path) and (path.startswith(("/", "./", "../", "~/")) or path.endswith(FILES))
    return named or os.path.isfile(value)  # which knows that a long text is no name, where Path raises


def refuse_halves(argument: str, text: str) -> str:
    """The text, where it is one: bytes that are no UTF-8 become halves of characters in an argument."""
    if re.search("[\ud800-\udfff]", text):
        raise ArgumentError(argument, "is not UTF-8 text", "write it in UTF-8")
    return text


def _lines(path: Path) -> list[str]:
    """The texts of a file, one a line."""
    return [line.strip() for line in read_file(path).splitlines() if line.strip()]


def inputs_of(model: nn.Module, items: Sequence[Any], tokenizer: Any) -> list[Input]:
    """The inputs, checked; a batch of several sequences becomes several inputs, without their padding."""
    found: list[Input] = []
    for position, item in enumerate(items):
        for given, text in _options(model, item, tokenizer, position):
            options, padded = without_padding(given, len(found))
            names = _tokens(options, tokenizer)
            encode = None if text is None else (lambda other: encoded(model, tokenizer, other))
            reading = None if text is None else Reading.of(text, tokenizer, longest(model, tokenizer))
            cut = (
                text is not None
                and len(tokenizer(text, verbose=False)["input_ids"]) > options[ids_name(model)].shape[-1]
            )
            unknown = unknown_share(tokenizer, _ids(options))
            name = text or f"input {len(found) + 1}"
            found.append(
                Input(
                    len(found),
                    name,
                    options,
                    names,
                    text,
                    reading,
                    encode,
                    cut,
                    unknown,
                    repair=_repair(item, tokenizer, text, unknown),
                    random=isinstance(item, RandomTokens),
                    padded=padded,
                )
            )
    return found


def _repair(item: Any, tokenizer: Any, text: str | None, unknown: float) -> str:
    """What makes the tokenizer know a text, or read one at all where tokens had to be drawn."""
    if isinstance(item, RandomTokens):
        return LOWER_CASED if tokenizer is not None and loses_capitals(tokenizer) else ""
    return repair_of(tokenizer, text) if text is not None and unknown > UNKNOWN else ""


def notes_on(inputs: Sequence[Input], tokenizer: Any) -> list[str]:
    """What is wrong with how a tokenizer reads these inputs, with the repair; each repair once."""
    worst: dict[str, Input] = {}
    for item in sorted(inputs, key=lambda item: item.unknown):
        if item.repair and not item.random:
            worst[item.repair] = item
    found = [
        f"{round(100 * item.unknown)} % of the tokens of text {item.index + 1} are unknown to the tokenizer: "
        + repair
        for repair, item in worst.items()
    ]
    return found if found or tokenizer is None or not loses_capitals(tokenizer) else [LOWER_CASED]


def _options(
    model: nn.Module, item: Any, tokenizer: Any, position: int
) -> list[tuple[dict[str, Any], str | None]]:
    if isinstance(item, str):
        if tokenizer is None:
            remedy = "give the model's tokenizer, or inputs as dictionaries of tensors"
            raise ArgumentError("tokenizer", "is missing and the inputs are texts", remedy)
        if not item.strip():
            raise ArgumentError("inputs", f"text {position + 1} is empty", "remove it or write something")
        text = beginning(tokenizer, refuse_halves("inputs", item), longest(model, tokenizer))
        return [(encoded(model, tokenizer, text), text)]
    named = _by_name(model, item, position)
    _one_sequence(model, named)
    return [(options, None) for options in _separate(named, _device(model), _time_first(model))]


def _by_name(model: nn.Module, item: Any, position: int) -> dict[str, Any]:
    """What a model is called with as keyword arguments: a dictionary is that, a tensor is its first argument,
    several are its first ones.
    """
    parameters = inspect.signature(model.forward).parameters.values()
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    free = any(p.kind is p.VAR_KEYWORD for p in parameters)
    if isinstance(item, (Tensor, tuple)):
        several = (item,) if isinstance(item, Tensor) else item
        if len(several) <= len(known):
            return dict(zip(known, several, strict=False))
    if not isinstance(item, (dict, Mapping)):
        found = f"have a {type(item).__name__} at {position}"
        raise ArgumentError("inputs", found, "give texts, tensors, or dictionaries of the model's arguments")
    strange = [name for name in item if name not in known]
    if strange and not free:
        takes = f"its forward takes {', '.join(known) or 'no names'}"
        raise ArgumentError("inputs", f"{position + 1} names {strange[0]}", takes)
    return dict(item)


def _device(model: nn.Module) -> torch.device:
    return next((parameter.device for parameter in model.parameters()), torch.device("cpu"))


def _time_first(model: nn.Module) -> bool:
    """Whether tokens come before batches."""
    return any(
        isinstance(module, nn.MultiheadAttention) and not module.batch_first for module in model.modules()
    )


def _one_sequence(model: nn.Module, item: dict[str, Any]) -> None:
    """Modules of torch may have tokens before batches, where a batch cannot be told from a sequence."""
    time_first = _time_first(model)
    wide = [
        name
        for name, value in item.items()
        if isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] > 1
    ]
    if time_first and wide:
        found = f"has {item[wide[0]].shape[1]} sequences in {wide[0]}, tokens first"
        raise ArgumentError(
            "inputs", found, "give one sequence at a time, (n, 1, d), or use batch_first=True"
        )


def encoded(model: nn.Module, tokenizer: Any, text: str) -> dict[str, Any]:
    """A single text needs no padding and so no mask;
    an encoder-decoder model is given the text on both sides, shifted by one.
    """
    most = longest(model, tokenizer)
    numbers = tokenizer(text, truncation=True, max_length=most)["input_ids"]
    ids = torch.tensor([_check_tokens(model, text, numbers)], device=_device(model))
    config = getattr(model, "config", None)
    if not getattr(config, "is_encoder_decoder", False):
        return {ids_name(model): ids}
    start = getattr(config, "decoder_start_token_id", None)
    first = torch.full_like(ids[:, :1], 0 if start is None else start)
    return {"input_ids": ids, "decoder_input_ids": torch.cat([first, ids[:, :-1]], 1)}


def ids_name(model: nn.Module) -> str:
    """How a model calls its tokens: ids in regard.nn, input_ids elsewhere."""
    return "ids" if "ids" in inspect.signature(model.forward).parameters else "input_ids"


def longest(model: nn.Module, tokenizer: Any) -> int:
    """How many tokens of a text are read: as many as model and tokenizer take."""
    config = getattr(model, "config", None)
    limits = [getattr(config, "max_position_embeddings", None), getattr(tokenizer, "model_max_length", None)]
    known = [limit for limit in [*limits, *_offset_tables(model)] if isinstance(limit, int)]
    return min((limit for limit in known if 0 < limit < ENDLESS), default=LONGEST)


def _offset_tables(model: nn.Module) -> list[int]:
    """The room in tables of positions whose first rows are for padding, as RoBERTa has them."""
    return [
        module.num_embeddings - module.padding_idx - 1
        for name, module in model.named_modules()
        if name.endswith("position_embeddings")
        and isinstance(module, nn.Embedding)
        and module.padding_idx is not None
    ]


def beginning(tokenizer: Any, text: str, most: int) -> str:
    """The part of a text that its first tokens are from: a long rest takes memory and is cut off anyway."""
    size = LETTERS * most
    while (
        size < min(len(text), MOST_LETTERS)
        and len(tokenizer(text[:size], verbose=False)["input_ids"]) <= 2 * most
    ):
        size *= 2
    return text[:size]


def _check_tokens(model: nn.Module, text: str, numbers: list[int]) -> list[int]:
    """The ids of a text, refused where there is none or where the model has no embedding for one."""
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if not numbers:
        raise ArgumentError("inputs", f"the text {text!r} has no tokens", "remove it or write something")
    if isinstance(size, int) and max(numbers) >= size:
        found = f"gives token {max(numbers)} and the model knows {size}"
        raise ArgumentError("tokenizer", found, "give the tokenizer that the model was trained with")
    return numbers


PAIRS = ("mask", "attn_mask", "src_mask", "tgt_mask", "memory_mask")
"""Masks of modules of torch that are of pairs of tokens: (n, n) is for the whole batch."""
PACKED = ("grid_thw", "image_grid_thw", "video_grid_thw", "cu_seqlens")
"""With these, the rows of another tensor are the patches of all pictures, one after the other."""


def _separate(options: dict[str, Any], device: torch.device, time_first: bool) -> list[dict[str, Any]]:
    """One dictionary for each sequence of a batch; tensors may be inside tuples, lists and dictionaries."""
    tensors = [leaf for leaf in pytree.tree_leaves(options) if isinstance(leaf, Tensor)]
    first = next((leaf for leaf in tensors if leaf.ndim > 1), tensors[0] if tensors else None)
    if first is None:
        raise ArgumentError(
            "inputs",
            f"has no tensor ({', '.join(options) or 'it is empty'})",
            "give the keyword arguments of the model",
        )
    packed = any(name in options for name in PACKED)
    if packed:
        _one_text(options)
    batch = 1 if time_first or packed or first.ndim < 2 else len(first)
    _one_meaning(options, batch, first)

    def one(name: str, value: Any, element: int) -> Any:
        if not isinstance(value, Tensor):
            return value
        square = value.ndim == 2 and (name != "mask" or len(value) == value.shape[1])  # else (batch, n)
        whole = time_first or value.ndim < 1 or len(value) != batch or (name in PAIRS and square)
        return (value if whole else value[element : element + 1]).to(device)

    return [
        {
            name: pytree.tree_map(lambda leaf, name=name, b=b: one(name, leaf, b), value)
            for name, value in options.items()
        }
        for b in range(batch)
    ]


def _one_meaning(options: dict[str, Any], batch: int, first: Tensor) -> None:
    """As many numbers as sequences are one for each, if sequences have another number of tokens."""
    if batch > 1 and first.shape[1] == batch:
        for name, value in options.items():
            if isinstance(value, Tensor) and value.ndim == 1 and len(value) == batch:
                found = f"has {batch} numbers in {name}, which are of {batch} sequences or of {batch} tokens"
                raise ArgumentError("inputs", found, "give one sequence at a time")


def _one_text(options: dict[str, Any]) -> None:
    """Pictures that are packed into one tensor cannot be told apart by sequences."""
    ids = options.get("input_ids")
    if isinstance(ids, Tensor) and ids.ndim == 2 and len(ids) > 1:
        found = f"has {len(ids)} sequences in input_ids, and the patches of their pictures in one tensor"
        raise ArgumentError("inputs", found, "give one sequence at a time, with its own pictures")


def _ids(options: dict[str, Any]) -> list[int]:
    ids = options.get("input_ids", options.get("ids"))
    return [] if ids is None else [int(number) for number in ids.flatten()]


def _tokens(options: dict[str, Any], tokenizer: Any) -> list[str]:
    """Names of the tokens, where there is a tokenizer."""
    numbers = _ids(options)
    if not numbers:
        return []
    return (
        [str(i) for i in numbers]
        if tokenizer is None
        else [str(t) for t in tokenizer.convert_ids_to_tokens(numbers)]
    )
