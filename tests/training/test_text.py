"""Texts: what is read, what is held out, and every way in which a file is no text."""

import codecs

import pytest
import torch

from regard.errors import ArgumentError
from regard.training import Alphabet, Recipe, Text
from regard.training.batches import HELD_OUT_WINDOWS, batch_at, held_out_batches


@pytest.fixture
def file(tmp_path):
    def write(content):
        path = tmp_path / "text.txt"
        path.write_bytes(content)
        return path

    return write


def test_characters_are_numbered_and_come_back(file):
    text = Text.read(file("Zoë\r\nsaw a cat.\n".encode()))
    assert text.alphabet.characters == "".join(sorted(set("Zoë\nsaw a cat.\n")))
    assert text.alphabet.decode(text.tokens) == "Zoë\nsaw a cat.\n"
    assert Text.read(file(codecs.BOM_UTF8 + b"ab")).alphabet.characters == "ab"


def test_bytes_take_any_file(file):
    content = bytes(range(256)) * 2
    text = Text.read(file(content), as_bytes=True)
    assert bytes(text.tokens.tolist()) == content
    assert len(text.alphabet) == 256
    assert Alphabet(None).decode(list("né".encode())) == "né"
    assert Alphabet(None).decode([255]) == "\N{REPLACEMENT CHARACTER}"
    assert Alphabet(None).encode("né") == list("né".encode())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty; give a file with text"),
        (b" \n\t \n", "contains only whitespace"),
        ("naïve".encode("latin-1") * 100, r"is not UTF-8 \(byte 2 is 0xef\); .*--bytes"),
        ("text".encode("utf-16"), "is in UTF-16; .*iconv"),
        (b"\x7fELF\x00\x01" * 30, "has zero bytes, as binary files do; .*--bytes"),
        (b"\x89PNG\r\n\x1a\n", "is not UTF-8"),
    ],
    ids=["empty", "blank", "latin-1", "utf-16", "binary", "picture"],
)
def test_what_is_no_text_is_said(file, content, message):
    with pytest.raises(ArgumentError, match=f"^--data: .*{message}"):
        Text.read(file(content))


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(
        ArgumentError, match=r"^--data: .*nothing\.txt cannot be read \(No such file or directory\)"
    ):
        Text.read(tmp_path / "nothing.txt")
    with pytest.raises(ArgumentError, match=r"cannot be read \(Is a directory\)"):
        Text.read(tmp_path)


def test_held_out_is_the_end_and_at_least_a_window(file):
    text = Text.read(file(b"ab" * 500))
    own, held = text.split(context=10)
    assert (len(own), len(held)) == (900, 100)
    assert torch.equal(torch.cat([own, held]), text.tokens)
    assert len(text.split(context=200)[1]) == 201


def test_short_texts_are_refused(file):
    text = Text.read(file(b"ab" * 10))
    assert [len(part) for part in text.split(context=9)] == [10, 10]
    with pytest.raises(ArgumentError, match="has 20 tokens, and a context of 10 needs 22"):
        text.split(context=10)


def test_windows_depend_on_seed_and_step_alone():
    tokens, recipe = torch.arange(1000), Recipe(context=8, batch=3, width=8, heads=1)
    inputs, targets = batch_at(tokens, recipe, 5)
    assert torch.equal(targets, inputs + 1)
    assert inputs.shape == (3, 8)
    torch.rand(7)
    assert torch.equal(batch_at(tokens, recipe, 5)[0], inputs)
    assert not torch.equal(batch_at(tokens, recipe, 6)[0], inputs)
    assert not torch.equal(
        batch_at(tokens, Recipe(context=8, batch=3, width=8, heads=1, seed=1), 5)[0], inputs
    )


def test_every_place_of_a_text_can_be_drawn():
    recipe = Recipe(context=4, batch=50, width=8, heads=1)
    seen = torch.cat([batch_at(torch.arange(7), recipe, step)[1] for step in range(5)])
    assert set(seen.flatten().tolist()) == {1, 2, 3, 4, 5, 6}


def test_held_out_windows_do_not_overlap():
    recipe = Recipe(context=8, batch=3, width=8, heads=1)
    starts = torch.cat([inputs[:, 0] for inputs, _ in held_out_batches(torch.arange(100), recipe)])
    assert starts.tolist() == list(range(0, 96, 8))
    many = torch.cat([inputs[:, 0] for inputs, _ in held_out_batches(torch.arange(8 * 10_000), recipe)])
    assert len(many.unique()) == HELD_OUT_WINDOWS
    assert int(many.diff().min()) >= 8
