"""`regard generate` as a user meets it."""

from tests.training.command import status


def test_the_default_prompt_is_in_every_alphabet(tmp_path, capsys):
    """A text of one line has no line break to begin with, and one of one word no space."""
    from regard.cli.generate import generate

    for index, text in enumerate(("to be or not to be " * 40, "abracadabra" * 60)):
        path, out = tmp_path / f"{index}.txt", tmp_path / f"run{index}"
        path.write_text(text.strip())
        tiny = ("--width", 8, "--layers", 1, "--heads", 1, "--context", 8, "--batch", 2)
        assert status("--data", path, "--out", out, *tiny, "--steps", 1, "--every", 1) == 0
        capsys.readouterr()
        generate(out, None, 5, 0.8, None, None, 0)
        written = capsys.readouterr().out.rstrip("\n")
        assert len(written) == 6
        assert set(written) <= set(text)
