"""The encoder and decoder of examples/sequence_to_sequence.py: its data, a short training,
and the weights that it draws.
"""

from __future__ import annotations

import datetime
import importlib.util
import itertools
import random
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

pytest.importorskip("rich")

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "sequence_to_sequence.py"
SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture(scope="module")
def example() -> ModuleType:
    specification = importlib.util.spec_from_file_location("example_sequence_to_sequence", EXAMPLE)
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module  # dataclasses look their module up
    specification.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def short(example: ModuleType) -> Any:
    """Four or five digits, to be reversed."""
    return example.Digits("reverse", lambda text: text[::-1], 0, longest=5)


@pytest.fixture(scope="module")
def trained(example: ModuleType, short: Any) -> Any:
    """A model of one layer after 220 small steps that left a thousand strings out."""
    torch.manual_seed(0)
    kept, model = example.held_out(short, 1000, 0), example.build(short, width=32, layers=1)
    example.train(short, model, example.training_pairs(short, kept, 0), 220, batch=64, rate=1e-2)
    return model.eval()


def test_no_string_is_two_dates(example: ModuleType) -> None:
    """Every form of every date of the hundred years, and no string stands for two of them."""
    first, meaning = example.FIRST, {}
    for days in range((example.LAST - first).days + 1):
        date = first + datetime.timedelta(days=days)
        for form in example.FORMS:
            assert meaning.setdefault(form(date), date) == date
    assert set("".join(meaning)) == set(example.TASKS["dates"].characters)


def test_the_forms_of_one_date(example: ModuleType) -> None:
    found = [form(datetime.date(1994, 3, 3)) for form in example.FORMS]
    assert found[:4] == [
        "March 3, 1994",
        "3 March 1994",
        "Thursday, 3 March 1994",
        "Thursday, March 3rd, 1994",
    ]
    assert "3.3.94" in found
    assert example.TASKS["dates"].shown == (datetime.date(1994, 3, 3), found[2])
    assert len(set(found)) == len(found)
    assert [example.ordinal(day) for day in (1, 2, 3, 4, 11, 12, 13, 21, 22, 23, 31)] == (
        ["1st", "2nd", "3rd", "4th", "11th", "12th", "13th", "21st", "22nd", "23rd", "31st"]
    )


@pytest.mark.parametrize("name", ["reverse", "sort", "dates"])
def test_what_is_held_out_is_not_trained_on(example: ModuleType, name: str) -> None:
    """Neither the pairs nor, for dates, another form of a date."""
    task = example.TASKS[name]
    kept = example.held_out(task, 2000, 0)
    tested, seen = (
        example.test_pairs(task, kept),
        list(itertools.islice(example.training_pairs(task, kept, 0), 20000)),
    )
    assert len(kept) == len(tested) == 2000
    assert task.shown[0] in kept  # and the picture shows what was never seen
    assert not {source for source, _ in tested} & {source for source, _ in seen}
    if name == "dates":
        assert not {target for _, target in tested} & {target for _, target in seen}


def test_tasks_are_what_they_are_called(example: ModuleType) -> None:
    dice = random.Random(0)
    assert example.TASKS["reverse"].write("3141", dice) == ("3141", "1413")
    assert example.TASKS["sort"].write("3141", dice) == ("3141", "1134")
    assert example.TASKS["dates"].write(datetime.date(1994, 3, 3), dice)[1] == "1994-03-03"


def test_pairs_as_numbers_and_back(example: ModuleType, short: Any) -> None:
    batch = example.encode(short, [("1234", "4321"), ("56789", "98765")])
    assert batch.lengths.tolist() == [4, 5]
    assert batch.target[0].tolist() == [example.START, 6, 5, 4, 3, example.END, example.END]
    assert [example.decode(short, row[1:]) for row in batch.target] == ["4321", "98765"]


def test_the_padding_is_not_read(example: ModuleType, trained: Any, short: Any) -> None:
    """A short source beside a long one gives the logits that it gives alone."""
    alone, both = (
        example.encode(short, pairs) for pairs in ([("1234", "4321")], [("1234", "4321"), ("56789", "98765")])
    )
    with torch.no_grad():
        expected = trained(alone.source, alone.target, source_support=alone.support)[0]
        found = trained(both.source, both.target, source_support=both.support)[0]
    torch.testing.assert_close(found[: len(expected)], expected, atol=1e-4, rtol=1e-4)


def test_it_learns(example: ModuleType, trained: Any, short: Any) -> None:
    """At least 97 of 100 strings that it never saw, exactly; an untrained model gets none."""
    pairs = example.test_pairs(short, example.held_out(short, 1000, 0))
    right = [
        mine == target
        for mine, (_, target) in zip(example.predict(short, trained, pairs), pairs, strict=True)
    ]
    torch.manual_seed(0)
    before = example.predict(short, example.build(short, width=32, layers=1).eval(), pairs)
    assert sum(right) >= 0.97 * len(pairs)
    assert sum(mine == target for mine, (_, target) in zip(before, pairs, strict=True)) <= 0.01 * len(pairs)


def test_weights_are_those_of_the_layer(example: ModuleType, trained: Any, short: Any) -> None:
    """What the cross-attention gives is its weights times the values of the source, head by head."""
    batch = example.encode(short, [("12345", "54321")])
    (layer,), given = trained.decoder.layers, batch.target[:, :-1]
    with torch.no_grad():
        x, context = trained.embedding(given), trained.encode(batch.source)
        x = layer.attention_branch.after(x, layer.attention(layer.attention_branch.before(x)))
        expected = layer.cross_attention(layer.cross_branch.before(x), context)[0].double()
    cross = layer.cross_attention.double()
    weights = example.cross_weights(trained.double(), batch.source, given)
    values = (
        (context[0].double() @ cross.projection.weight[64:].mT + cross.projection.bias[64:])
        .unflatten(-1, (4, 8))
        .transpose(0, 1)
    )
    mixed = (weights[0] @ values).transpose(0, 1).flatten(-2)
    trained.float()
    assert weights.shape == (1, 4, 6, 5)
    torch.testing.assert_close(
        mixed @ cross.output.weight.mT.double() + cross.output.bias.double(), expected, atol=1e-4, rtol=1e-4
    )


def test_it_looks_backwards(example: ModuleType, trained: Any, short: Any) -> None:
    """While it reverses a string, the place with the most weight in some head goes from the last character
    to the first.
    """
    batch = example.encode(short, [("31425", "52413")])
    weights = example.cross_weights(trained, batch.source, batch.target[:, :-1])[0]
    hits = (weights[:, :5].argmax(-1) == torch.arange(4, -1, -1)).sum(-1)
    assert int(hits.max()) >= 4


def test_the_program(tmp_path: Path) -> None:
    """It runs in any directory, says how often it was right, and draws a cell for each pair of characters."""
    out = tmp_path / "new" / "cross.svg"
    command = [sys.executable, str(EXAMPLE), "--tasks", "sort", "--steps", "3", "--out", str(out)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    first, *_, last = done.stdout.splitlines()
    assert first.startswith("sort: ")
    assert " of 2000 exact (" in first
    assert last == f"saved to {out}"
    cells = xml.parse(out).getroot().findall(f".//{SVG}rect[@class='cell']")
    assert cells
    assert len(cells) % len("3141592653") == 0
    assert all(0 <= float(cell.attrib["fill-opacity"]) <= 1 for cell in cells)


def test_a_training_has_steps(tmp_path: Path) -> None:
    command = [sys.executable, str(EXAMPLE), "--steps", "1"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--steps: is 1; give two or more" in done.stderr
