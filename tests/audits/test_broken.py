"""What is broken, too large or hostile ends in one sentence, before it takes memory."""

import json
import resource
import subprocess
import sys
from functools import partial

import pytest
import torch

import regard as r
from regard import _allocation
from regard._pages import embedded, environment
from regard._printable import printable
from regard.audits import load, terminal
from regard.audits.checkpoint import find
from regard.audits.inputs import beginning, inputs_of
from regard.audits.streaming import Streamed
from regard.cli import main
from regard.flows import Recipe, Simulation, recipe
from tests.audits.checkpoints import ENVIRONMENT, model_of, save, save_pickle, tokenizer

pytest.importorskip("typer")
pytest.importorskip("transformers")
ESCAPE = "\x1b[31mred\x9b0m\u202e"
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def failed(tmp_path, monkeypatch, capsys):
    """Runs the command in this process: gives the one line of its error, and nothing was written."""

    def run(*arguments, status=2):
        monkeypatch.setattr(sys, "argv", ["regard", *map(str, arguments)])
        before = set(tmp_path.rglob("*"))
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        assert (done.value.code, printed.out, len(printed.err.splitlines())) == (status, "", 1), printed
        assert set(tmp_path.rglob("*")) == before
        assert printable(printed.err) == printed.err
        return printed.err

    return run


def edit(directory, **changes):
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


# Sizes


@pytest.mark.parametrize(
    ("name", "value"),
    [("vocab_size", 10**8), ("num_hidden_layers", 10**5), ("hidden_size", 2**63), ("num_labels", 10**9)],
)
def test_a_size_that_the_weights_do_not_have(name, value, tmp_path, failed):
    directory = edit(save(tmp_path / "model"), **{name: value})
    for way in (("--text", "cat"), ("--weights-only",)):
        said = failed("audit", directory, *way, "--out", tmp_path / "out")
        assert f"has {value} for {name}, and the weights beside it are " in said


def test_a_config_is_compared_with_the_file_and_with_memory(tmp_path, monkeypatch):
    checkpoint = find(str(edit(save(tmp_path / "model"), vocab_size=5000)))
    with pytest.raises(r.errors.ArgumentError, match=r"has a config of 175,.* numbers and weights of 16,"):
        load.load_weights(checkpoint)
    checkpoint = find(str(edit(save(tmp_path / "long"), max_position_embeddings=10**9)))
    with pytest.raises(r.errors.ArgumentError, match=r"has a config of 32,000,.* numbers and weights of 16,"):
        Streamed(checkpoint)
    checkpoint = find(str(save(tmp_path / "whole")))
    needed = 4 * sum(parameter.numel() for parameter in load.load_weights(checkpoint).parameters())
    monkeypatch.setattr(load, "memory", lambda: needed - 1)
    with pytest.raises(r.errors.ArgumentError, match=r"GB in float32.*--weights-only"):
        load.load_weights(checkpoint)
    monkeypatch.setattr(load, "memory", lambda: 2 * needed)
    load.load_weights(checkpoint)


def test_memory_is_what_the_process_may_have(monkeypatch, tmp_path):
    machine = _allocation.memory()
    monkeypatch.setattr(_allocation, "CONTAINER", tmp_path / "memory.max")
    (tmp_path / "memory.max").write_text("max\n")
    assert _allocation.memory() == machine
    (tmp_path / "memory.max").write_text("5000000\n")
    assert _allocation.memory() == 5_000_000
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (4_000_000, 4_000_000))
    assert _allocation.memory() == 4_000_000


@pytest.mark.parametrize("text", ["the cat sat on the mat . " * 10_000, "c" * 200_000])
def test_a_long_text_is_cut_before_it_is_tokenized(text):
    """The tokens are those of the whole; a word without end is one token and is read whole."""
    seen, whole = [], tokenizer()

    class Watched:
        is_fast = True
        model_max_length = whole.model_max_length

        def __call__(self, words, **options):
            seen.append(len(words))
            return whole(words, **options)

        def convert_ids_to_tokens(self, numbers):
            return whole.convert_ids_to_tokens(numbers)

    model = model_of("bert", num_hidden_layers=1)
    (item,) = inputs_of(model, [text], Watched())
    wanted = whole(text, truncation=True, max_length=64)["input_ids"]
    assert item.options["input_ids"][0].tolist() == wanted
    assert item.cut is (len(wanted) == 64)
    assert max(seen) < 5000 or len(wanted) == 1


def test_a_word_without_end_is_cut():
    """Its letters take fifty times their memory in a tokenizer, and no model has a token for them."""
    seen = []

    def one_token(letters, verbose):
        seen.append(len(letters))
        return {"input_ids": [0]}

    kept = beginning(one_token, "c" * 30_000_000, 64)
    assert len(kept) == 1 << 22
    assert max(seen) < 1 << 22


def test_roberta_has_fewer_positions_than_rows():
    """The first rows of its table are for padding: 18 rows hold 16 tokens."""
    import transformers

    sizes = {"vocab_size": 40, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.RobertaConfig(
        **sizes, intermediate_size=24, max_position_embeddings=18, pad_token_id=1
    )
    model = transformers.RobertaModel(config).eval()
    (item,) = inputs_of(model, ["the cat sat " * 20], tokenizer())
    assert (len(item.tokens), item.cut) == (16, True)
    model(**item.options)
    (item,) = inputs_of(model_of("bert"), ["the cat sat " * 40], tokenizer())
    assert len(item.tokens) == 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"dimension": 10**6}, r"--dimension: is 1000000, and a run takes at least 22\.4 GiB of memory"),
        ({"particles": 10**10}, "--particles: is 10000000000, and a run takes"),
        ({"frames": 10**9}, "--frames: is 1000000000; a page plays 10,000 at most"),
        ({"step": 1e-300}, "--step: is 1e-300, which takes"),
    ],
)
def test_simulations_that_nothing_holds(given, message, monkeypatch):
    monkeypatch.setattr(recipe, "memory", lambda: 2 << 30)
    with pytest.raises(r.errors.ArgumentError, match=message):
        Recipe(**given)
    Recipe(particles=1_000_000, frames=1000)  # 0.2 GB


def test_many_coordinates_take_time():
    """Which is said before the run."""
    assert Simulation(Recipe(particles=300, dimension=20_000)).seconds() > 60
    assert Simulation(Recipe(particles=300)).seconds() < 2


# Files


def nested(directory):
    (directory / "config.json").write_text(DEEP)
    return directory


def nested_tokenizer(directory):
    (directory / "tokenizer_config.json").write_text(DEEP)
    return directory


def nested_below(directory):
    return edit(directory, rope_scaling=json.loads("[" * 200 + "]" * 200))


def nested_index(directory):
    (directory / "model.safetensors").rename(directory / "part.safetensors")
    (directory / "model.safetensors.index.json").write_text(DEEP)
    return directory


def shard(name):
    def change(directory):
        (directory / "model.safetensors").rename(directory / "part.safetensors")
        index = {"weight_map": {"a": "part.safetensors", "b": name}}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
        return directory

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (nested, "cannot be read as JSON (it is nested too deeply)"),
        (nested_below, "cannot be read as JSON (it is nested too deeply)"),
        (nested_index, "cannot be read as JSON (it is nested too deeply)"),
        (nested_tokenizer, "has a tokenizer that cannot be loaded"),
        (shard("a" * 5000), "which is not beside it"),
        (shard(ESCAPE), "names \ufffd[31mred\ufffd0m\ufffd, which is not beside it"),
        (lambda directory: edit(directory, dtype=5), "MODEL: "),
        (lambda directory: edit(directory, num_attention_heads=-2), "MODEL: "),
        (lambda directory: edit(directory, model_type=ESCAPE), "model_type '"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_files_of_checkpoints(change, message, tmp_path, failed):
    directory = change(save(tmp_path / "model"))
    assert message in failed("audit", directory, "--text", "cat", "--out", tmp_path / "out")


@pytest.mark.parametrize(
    "content",
    [
        [1, 2],
        {1: torch.ones(2)},
        torch.ones(2),
        {"a": "text"},
        {"a": torch.ones(1).expand(10**5, 10**6)},
        {"a": torch.ones(2).to_sparse()},
    ],
    ids=["list", "numbers", "tensor", "strings", "stretched", "sparse"],
)
def test_pickles_of_other_things(content, tmp_path, failed):
    directory = save_pickle(tmp_path / "model")
    torch.save(content, directory / "pytorch_model.bin")
    assert "save a state_dict there" in failed(
        "audit", directory, "--weights-only", "--out", tmp_path / "out"
    )


def test_whole_numbers_are_no_weights(tmp_path):
    from safetensors.torch import load_file, save_file

    from regard.audits.weights import WeightAudit

    path = save(tmp_path / "model") / "model.safetensors"
    tensors = {name: tensor.to(torch.int8) for name, tensor in load_file(path).items()}
    save_file(tensors, path, metadata={"format": "pt"})
    run = WeightAudit(find(str(path.parent)))
    run.measure()
    assert {entry.reason.partition(" is stored as ")[2][:4] for entry in run.report().missing} == {"int8"}


def test_reports_and_configs_of_regard(tmp_path, failed):
    (tmp_path / "report.json").write_text(DEEP)
    assert "is not JSON (it is nested too deeply)" in failed("compare", tmp_path, tmp_path)
    r.nn.save(r.nn.Encoder(r.nn.Design(8, 2), 1), tmp_path / "own")
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    config["arguments"]["design"]["width"] = 10**9
    (tmp_path / "own" / "config.json").write_text(json.dumps(config))
    said = failed("audit", tmp_path / "own", "--weights-only", "--out", tmp_path / "out")
    assert "has 1000000000 for width" in said
    (tmp_path / "own" / "config.json").write_text(DEEP)
    assert "nested too deeply" in failed("cost", tmp_path / "own")


def test_texts_that_are_no_text(tmp_path, failed):
    out = ("--out", tmp_path / "out")
    directory = save(tmp_path / "model")
    assert "--text: is not UTF-8 text" in failed("audit", directory, "--text", "cat\udcff", *out)
    with pytest.raises(r.errors.ArgumentError, match="inputs: is not UTF-8 text"):
        r.audit(model_of("bert"), "cat\udcff", tokenizer=tokenizer())


def test_a_tokenizer_of_special_tokens_alone():
    import tokenizers
    import transformers

    from regard.audits.samples import known_samples

    names = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    inner = tokenizers.Tokenizer(
        tokenizers.models.WordPiece({name: k for k, name in enumerate(names.values())}, unk_token="[UNK]")
    )
    found = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **names)
    with pytest.raises(r.errors.ArgumentError, match="has 4 tokens, all of them special"):
        known_samples(found)


@pytest.mark.parametrize("named", [5, [5], "BertModel", [], [["BertModel"]]])
def test_a_class_that_a_config_does_not_name(named, tmp_path):
    """It only says how a model answers: without its name the model is audited."""
    report = r.audit(edit(save(tmp_path / "model"), architectures=named), "the cat", checks=["rows"])
    assert report.rows
    assert load.load_head(find(str(tmp_path / "model"))).config.architectures == named


def test_a_config_without_a_type_is_guessed_for_costs_too(tmp_path, monkeypatch, capsys):
    directory = edit(save(tmp_path / "model"), model_type=None)
    monkeypatch.setattr(sys, "argv", ["regard", "cost", str(directory), "--tokens", "8"])
    monkeypatch.setattr("warnings.filters", [])
    with pytest.raises(SystemExit) as done:
        main()
    printed = capsys.readouterr()
    assert done.value.code == 0
    assert (
        printed.err == "warning: config.json has no model_type: assumed to be bert, from its architectures\n"
    )


# The machine


def test_what_nobody_foresaw_is_one_line_and_a_log(tmp_path, failed, monkeypatch):
    def broken():
        raise KeyError(ESCAPE)

    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr("regard.cli._run", broken)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    monkeypatch.setattr("sys.argv", ["regard"])
    with pytest.raises(SystemExit) as done:
        main()
    assert done.value.code == 3
    (log,) = (tmp_path / "temporary").iterdir()
    text = log.read_text()
    assert "in broken" in text
    assert printable(text) == text


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")])
def test_too_little_memory_is_said(error, failed, monkeypatch):
    def broken():
        raise error

    monkeypatch.setattr("regard.cli._run", broken)
    assert "there is not enough memory" in failed()


def in_a_full_disk(*arguments, limit, **options):
    """The command where files cannot grow beyond a limit, as on a disk that is almost full."""
    program = f"import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit})); "
    program += (
        f"sys.argv = {['regard', *map(str, arguments)]!r}; runpy.run_module('regard', alter_sys=False, "
    )
    program += "run_name='__main__')"
    command = [sys.executable, "-c", program]
    return subprocess.run(command, text=True, timeout=170, env=ENVIRONMENT, **options)


def test_a_full_disk_in_a_simulation(tmp_path):
    asked = ("simulate", "--particles", "50", "--until", "0.5", "--frames", "3", "--out", tmp_path / "out")
    done = in_a_full_disk(*asked, limit=400, capture_output=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("regard: --out: ")
    assert "File too large" in done.stderr


def test_a_stdout_that_is_closed(monkeypatch):
    """Python has None in place of a stream that the shell closed with `>&-`."""
    monkeypatch.setattr("regard.cli._run", lambda: None)
    monkeypatch.setattr(sys, "stdout", None)
    main()


def test_a_stdout_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "regard", "audit", "--list-checks"]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=170, env=ENVIRONMENT
        )
    assert done.returncode == 2
    assert done.stderr == "regard: the output cannot be written (No space left on device)\n"


# What is printed


def test_names_of_strangers_do_not_command_the_terminal(capsys):
    from rich.table import Table

    console = terminal.output()
    terminal.say(console, f"a {ESCAPE} b")
    table = Table("name", title=ESCAPE)
    table.add_row(ESCAPE)
    console.print(table)
    shown = capsys.readouterr().out
    assert "a \ufffd[31mred\ufffd0m\ufffd b" in shown
    assert printable(shown) == shown


def test_pages_are_clean(tmp_path):
    (tmp_path / "page.j2").write_text("<p>{{ name }}</p>")
    page = environment(tmp_path).get_template("page.j2").render(name=f"<{ESCAPE}>")
    assert page == "<p>&lt;\ufffd[31mred\ufffd0m\ufffd&gt;</p>"
    assert json.loads(embedded({ESCAPE: [ESCAPE]})) == {printable(ESCAPE): [printable(ESCAPE)]}


def test_a_directory_is_audited_from_python(tmp_path):
    """By the loading of the command line: with the tokenizer beside it, and under its name."""
    directory = save(tmp_path / "tiny")
    for place in (directory, str(directory)):
        report = r.audit(place, "the cat sat", checks=["rows"])
        assert (report.name, report.inputs[0].tokens) == ("tiny", ["the", "cat", "sat"])
    ids = {"input_ids": torch.tensor([[5, 6, 8]])}
    own = r.audit(model_of("bert").bert, ids, checks=["rows"])
    assert [row.values for row in own.rows] == [row.values for row in report.rows]
    with pytest.raises(r.errors.ArgumentError, match="model: is a dict; give a torch"):
        r.audit({}, "the cat")
    with pytest.raises(r.errors.ArgumentError, match=r"for a module of your own call regard\.audit"):
        r.audit(tmp_path, "the cat")


def test_a_hub_id_is_audited_from_python(tmp_path, monkeypatch):
    """From the cache of the hub, as the hub lays it out, under the whole id."""
    import huggingface_hub

    cache = tmp_path / "models--me--tiny"
    save(cache / "snapshots" / ("0" * 40))
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("0" * 40)
    download = partial(huggingface_hub.snapshot_download, cache_dir=tmp_path, local_files_only=True)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    report = r.audit("me/tiny", ["the cat sat", "a dog"], checks=["rows"])
    assert (report.name, [len(entry.tokens) for entry in report.inputs]) == ("me/tiny", [3, 2])
    assert report.measured


def test_a_layer_that_is_called_twice_is_misspelled():
    import transformers

    from tests.audits.families import enlivened

    sizes = {"vocab_size": 40, "hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2}
    config = transformers.AlbertConfig(**sizes, num_attention_heads=4, intermediate_size=24)
    model = enlivened(transformers.AlbertModel(config))
    report = r.audit(model, "the cat", tokenizer=tokenizer(), checks=["words"])
    assert not report.skipped
    assert report.stacks[0].values["expansion"] > 0
