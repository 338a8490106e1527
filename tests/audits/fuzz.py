"""Broken checkpoints, configs, texts and arguments, one after another in this process:

python -m tests.audits.fuzz SEED COUNT DIRECTORY [NUMBER]

Each case is a small checkpoint with one thing changed and one command on it. What went wrong is printed as
a line of JSON for each case that fails; the cases depend on the seed and their number alone.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

LIMIT = 2 << 30
"""Bytes of data that the process may have: torch maps its libraries besides, which RLIMIT_AS would count."""
ESCAPE = "\x1b[31mred\x9b0m\u202e\r"
DEEP = 100_000
PATIENCE = 15
"""Seconds of computing after which a case hangs; all of them together take about as long."""
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
TEXT = "the cat sat on the mat ."

STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, -2, 3, 5, 0.5, 1e308, 1e-320, float("nan"), float("inf")),
    *(10**5, 10**8, 10**9, 2**31, 2**63, 2**64, 10**30, -(10**9)),
    *("", "x", "gelu", "bert", "../../outside", "a" * 300, "\x00", ESCAPE, "\ud800", "n/a", "float8_e4m3fn"),
    *([], {}, [1, 2, 3], [[[]]], {"a": 1}, {ESCAPE: ESCAPE}, ["x"], [-1], {"0": None}, {"rope_type": "yarn"}),
)
"""Values for any field of a file."""
DTYPES = (torch.int8, torch.int32, torch.int64, torch.bool, torch.uint8, torch.float64, torch.bfloat16)


class Odd(dict[str, Any]):
    """A nested dictionary of the kind that pickles hold."""


def bases(directory: Path) -> dict[str, Path]:
    """Small checkpoints, as users have them."""
    import regard.nn
    from tests.audits.checkpoints import model_of, save, save_pickle, tokenizer

    small = {
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_attention_heads": 2,
        "max_position_embeddings": 16,
    }
    found = {
        "bert": save(directory / "bert", **small),
        "pickle": save_pickle(directory / "pickle"),
        "gpt2": save(directory / "gpt2", "gpt2"),
        "llama": save(directory / "llama", "llama"),
        "shards": directory / "shards",
        "own": directory / "own",
    }
    model_of("bert", **small).save_pretrained(found["shards"], max_shard_size="2KB")
    tokenizer().save_pretrained(found["shards"])
    (directory / "text.txt").write_text("the cat sat on the mat . " * 40)
    quietly("train", "--data", str(directory / "text.txt"), "--out", str(found["own"]), *TRAINING)
    quietly("audit", str(found["bert"]), "--out", str(directory / "report"), *ROWS)
    shutil.copy(directory / "report" / "report.json", found["bert"] / "report.json")
    assert isinstance(regard.nn.load(found["own"] / "step-000001" / "model"), torch.nn.Module)
    return found


TRAINING = ("--steps", "1", "--width", "8", "--layers", "1", "--heads", "1", "--context", "8", "--batch", "1")
ROWS = ("--text", TEXT, "--checks", "rows", "--no-twin")
WEIGHTS = ("--weights-only", "--checks", "weights")


# What is changed


def flip(random_: random.Random, path: Path) -> None:
    """Some bytes are others; the beginning, where headers are, is hit as often as all the rest."""
    content = bytearray(path.read_bytes() or b"x")
    for _ in range(random_.choice((1, 1, 3, 30))):
        reach = random_.choice((64, 1024, len(content)))
        content[random_.randrange(min(reach, len(content)))] = random_.randrange(256)
    path.write_bytes(content)


def cut(random_: random.Random, path: Path) -> None:
    """The end is missing, or there is more."""
    content = path.read_bytes()
    at = random_.choice((0, 1, 8, random_.randrange(len(content) + 1), len(content) - 1))
    path.write_bytes(random_.choice((content[:at], content + content[:at])))


def nest(random_: random.Random, path: Path) -> None:
    """Nested so deeply that reading it recursively fails, as a whole or in one field."""
    opening, closing = random_.choice((("[", "]"), ('{"a":', "}")))
    depth = random_.choice((200, 900, 3000, DEEP))
    nested = opening * depth + "1" + closing * depth
    with contextlib.suppress(ValueError, AttributeError):
        fields = json.loads(path.read_text())
        name = random_.choice(sorted(fields))
        whole = json.dumps({**fields, name: "HERE"}).replace('"HERE"', nested)
        nested = random_.choice((nested, whole, whole))
    path.write_text(nested)


def replace(random_: random.Random, path: Path) -> None:
    """One field, or two, has a value of another size or type."""
    try:
        found = json.loads(path.read_text())
    except ValueError:
        return flip(random_, path)
    for _ in range(random_.choice((1, 1, 2))):
        inner = found
        while True:
            keys = sorted(inner) if isinstance(inner, dict) else list(range(len(inner)))
            if not keys:
                break
            key = random_.choice(keys)
            if isinstance(inner[key], (dict, list)) and inner[key] and random_.random() < 0.7:
                inner = inner[key]
                continue
            value = random_.choice(STRANGE)
            if random_.random() < 0.1 and isinstance(inner, dict):
                inner[random_.choice((ESCAPE, "a" * 300, "auto_map", "num_labels"))] = value
            elif random_.random() < 0.1:
                del inner[key]
            else:
                inner[key] = value
            break
    path.write_text(json.dumps(found))
    return None


def retype(random_: random.Random, path: Path) -> None:
    """Tensors of other kinds of numbers, shapes or names, in a file that is whole."""
    from safetensors.torch import load_file, save_file

    if path.suffix != ".safetensors":
        return repickle(random_, path)
    tensors = load_file(path)
    for name in random_.sample(sorted(tensors), random_.choice((1, len(tensors)))):
        tensor = tensors.pop(name)
        other = random_.choice(
            (
                {name: tensor.to(random_.choice(DTYPES))},
                {name: tensor.flatten()[: tensor.numel() // 2].clone()},
                {name: tensor[None].clone()},
                {name: torch.zeros(0)},
                {name: tensor * random_.choice((float("nan"), float("inf"), 1e38))},
                {ESCAPE + name: tensor},
                {},
            )
        )
        tensors |= other
    save_file(tensors, path, metadata=random_.choice(({"format": "pt"}, {"format": "x"}, None)))
    return None


def repickle(random_: random.Random, path: Path) -> None:
    """A pickle of something else."""
    tensors = torch.load(path, weights_only=True)
    first = next(iter(tensors))
    huge = torch.empty(1).expand(10**5, 10**6)
    torch.save(
        random_.choice(
            (
                [1, 2, 3],
                {1: torch.ones(2), 2: torch.ones(2)},
                torch.ones(3),
                {"a": "text", "b": "more"},
                {**tensors, first: "text"},
                {**tensors, first: huge},
                {**tensors, first: {"nested": torch.ones(2)}},
                {**tensors, ESCAPE: torch.ones(2)},
                {**tensors, first: torch.ones(2, dtype=torch.int8)},
                {"state_dict": tensors},
                "text",
                None,
                {**tensors, first: tensors[first].to_sparse()},
                {**tensors, first: tensors[first].to(torch.complex64)},
            )
        ),
        path,
    )


def shard_names(random_: random.Random, path: Path) -> None:
    """An index that names other files."""
    index = path.parent / "model.safetensors.index.json"
    if not index.exists():
        return flip(random_, path)
    found = json.loads(index.read_text())
    name = random_.choice(sorted(found["weight_map"]))
    shard = ("a" * 5000, "a\x00b", ESCAPE, "../x", "", ".", 5, None, [], "/etc/hostname", "config.json")
    found["weight_map"][name] = random_.choice(shard)
    index.write_text(json.dumps(found))
    return None


def swap(random_: random.Random, path: Path) -> None:
    """The file of another checkpoint, a directory, a link to itself, or nothing."""
    path.unlink()
    kind = random_.randrange(4)
    if kind == 0:
        path.mkdir()
    elif kind == 1:
        path.symlink_to(path.name)
    elif kind == 2:
        path.write_text("version https://git-lfs.github.com/spec/v1\n")


CHANGES: tuple[Callable[[random.Random, Path], None], ...] = (
    *(flip, cut, nest, replace, replace, replace, retype, retype, shard_names, swap),
)


def changed(random_: random.Random, directory: Path) -> str:
    """One file is changed; in words, what."""
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    config = [path for path in files if path.name == "config.json"]
    weights = [path for path in files if path.suffix in (".safetensors", ".bin")]
    change = random_.choice(CHANGES)
    named = [path for path in files if path.suffix == ".json"] + 2 * config
    chosen = weights if change in (retype, shard_names) else named if change in (replace, nest) else files
    path = random_.choice(chosen)
    change(random_, path)
    return f"{change.__name__} {path.relative_to(directory)}"


def text_of(random_: random.Random) -> str:
    """A text that nobody would write."""
    return random_.choice(
        (
            "".join(chr(random_.randrange(32, 0xD7FF)) for _ in range(50)),
            ESCAPE + " cat",
            "the cat " * 100_000,
            "c" * 1_000_000,
            "\U0001f600" * 3,
            " \u00a0\u3000x",
            "[CLS] [SEP] [PAD]",
            "cat\udcff",
            "\x00",
        )
    )


def texts(random_: random.Random, place: Path) -> list[str]:
    """A text of an argument, or a file of texts."""
    if random_.random() < 0.5:
        return ["--text", text_of(random_).replace("\x00", "")[:50_000] or " "]
    path = place / "texts.txt"
    noise = bytes(random_.randrange(256) for _ in range(500))
    path.write_bytes(
        random_.choice((noise, text_of(random_).encode("utf-8", "surrogatepass"), b"", b"\xff\xfea"))
    )
    return ["--text-file", str(path)]


def numbers(random_: random.Random, *names: str) -> list[str]:
    """Options with sizes that nobody has memory or time for, and with no numbers at all."""
    values = (
        "0",
        "-1",
        "1000000000",
        "10000000000",
        "1" + "0" * 30,
        "nan",
        "inf",
        "1e-300",
        "1e300",
        "x",
        "",
    )
    chosen = random_.sample(names, random_.choice((1, 1, 2)))
    return [part for name in chosen for part in (name, random_.choice(values))]


SIMULATE = ("--particles", "--dimension", "--frames", "--seed", "--beta", "--tolerance", "--merge", "--step")
SHORT = ("--until", "0.5", "--step", "0.25", "--particles", "4", "--frames", "2")


def command(random_: random.Random, kind: str, path: Path, place: Path) -> tuple[str, list[str]]:
    """What is changed, and the command on it."""
    out = ["--out", str(place / "out")]
    way = random_.random()
    if way < 0.08:
        return "numbers", ["simulate", *SHORT, *numbers(random_, *SIMULATE), *out]
    if way < 0.11:
        return "numbers", ["cost", str(path), *numbers(random_, "--tokens", "--batch")]
    if way < 0.13:
        sizes = ("--width", "--layers", "--heads", "--context", "--batch", "--learning-rate", "--seed")
        data = ["--data", str(place.parent / "text.txt")]
        return "numbers", ["train", *data, *TRAINING, *numbers(random_, *sizes), *out]
    if way < 0.25:
        if kind == "own":  # which takes texts of any length, and time
            path = Path(shutil.copytree(place.parent / "bert", place / "bert"))
        return "text", ["audit", str(path), *texts(random_, place), "--checks", "rows", "--no-twin", *out]
    what = changed(random_, path)
    if kind == "own" and way < 0.6:
        return what, random_.choice(
            (
                ["generate", str(path), "--tokens", "3", "--prompt", "t"],
                ["train", "--out", str(path), "--resume"],
            )
        )
    named = what.split()[-1]
    if named == "report.json":
        return what, ["compare", str(path), str(place.parent / "report")]
    choices = (
        ["audit", str(path), *WEIGHTS, *out],
        ["audit", str(path), *WEIGHTS, *out],
        ["audit", str(path), *ROWS, *out],
        ["audit", str(path), *ROWS, "--low-memory", *out],
        ["cost", str(path), *out],
        ["flow", str(path), "--layer", "0", "--steps", "1", "--text", TEXT, *out],
        ["cheaper", str(path), "--text-file", str(place.parent / "text.txt"), "--tokens", "48", *out],
        ["decide", str(path), "--text", "cat", "--resolution", "100", *out],
    )
    return what, random_.choice(choices[:4] if way < 0.8 else choices)


# How it is run


def quietly(*arguments: str) -> int:
    """The command in this process; its exit status."""
    from regard.cli import main

    before, sys.argv = sys.argv, ["regard", *arguments]
    signal.setitimer(signal.ITIMER_PROF, PATIENCE)
    try:
        main()
    except SystemExit as done:
        return int(done.code or 0)
    except BaseException:
        traceback.print_exc()
        return -1
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.argv = before
    return 0


def hangs(number: int, frame: Any) -> None:
    raise GeneratorExit("it hangs")  # which no command catches


@contextlib.contextmanager
def captured(path: Path) -> Iterator[None]:
    """What is printed goes to a file, also by code that is not Python."""
    kept = [os.dup(1), os.dup(2)]
    streams = sys.stdout, sys.stderr
    with path.open("wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout, sys.stderr = (
            io.TextIOWrapper(os.fdopen(os.dup(number), "wb", 0), "utf-8", "strict", write_through=True)
            for number in (1, 2)
        )
        try:
            yield
        finally:
            for stream in (sys.stdout, sys.stderr):
                stream.close()
            sys.stdout, sys.stderr = streams
            for number, copy in enumerate(kept, 1):
                os.dup2(copy, number)
                os.close(copy)


def tree(directory: Path) -> set[str]:
    return {str(path.relative_to(directory)) for path in directory.rglob("*")}


def run(seed: int, number: int, found: dict[str, Path], place: Path) -> dict[str, Any]:
    """One case, and what is wrong with what happened."""
    random_ = random.Random(f"{seed} {number}")
    place.mkdir()
    kind = random_.choice(sorted(found))
    path = Path(shutil.copytree(found[kind], place / "model"))
    what, arguments = command(random_, kind, path, place)
    before, printed = tree(place), place.parent / f"{place.name}.txt"
    with captured(printed):
        status = quietly(*arguments)
    text = printed.read_bytes().decode("utf-8", "replace")
    for log in place.parent.glob("regard-*.log"):
        text += log.read_text()
        log.unlink()
    errors = [line for line in text.splitlines() if line.startswith("regard: ")]
    strange = {one for one in tree(place) - before if not re.match(r"out\b", one)}
    written = [one for one in place.rglob("*.html") if one.is_file()]
    whole = text + "".join(one.read_text(encoding="utf-8") for one in written)
    wrong = {
        "a status that is none of ours": status not in (0, 1, 2),
        "a traceback": "Traceback" in text or "panicked" in text,
        "an error that nobody foresaw": ".log" in text,
        "no sentence": status == 2 and len(errors) != 1 and "Usage:" not in text,
        "memory": re.search("MemoryError|can't allocate|bad_alloc", text) is not None,
        "an escape code": CONTROL.search(whole) is not None,
        "files outside --out": bool(strange) and arguments[0] != "train",
    }
    shutil.rmtree(place)
    printed.unlink()
    return {
        "number": number,
        "wrong": [name for name, holds in wrong.items() if holds],
        "what": f"{kind}: {what}",
        "command": [one[:80] for one in arguments],
        "status": status,
        "printed": text[-1500:],
    }


def main(seed: int, count: int, directory: Path, only: list[int]) -> None:
    resource.setrlimit(resource.RLIMIT_DATA, (LIMIT, LIMIT))
    signal.signal(signal.SIGPROF, hangs)
    torch.set_num_threads(1)
    tempfile.tempdir = str(directory)
    printed = directory / "bases.txt"
    with captured(printed):
        found = bases(directory)
    for number in only or range(count):
        case = run(seed, number, found, directory / f"case-{number}")
        if case["wrong"] or only:
            print(json.dumps(case, indent=1 if only else None), flush=True)
    print(f"{count} cases", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), list(map(int, sys.argv[4:])))
