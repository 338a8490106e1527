"""regard cheaper: calls that are answered otherwise, the whole model by hand, the page and the command."""

import json
import math
import re
import time

import pytest
import torch
import transformers
from typer.testing import CliRunner

from regard.audits.store import Store
from regard.choices import Choosing, Found, Text
from regard.choices.page import html
from regard.choices.seen import answering, dtype_of
from regard.choices.wording import shown_part
from regard.cli.application import application
from regard.cli.cheaper import _show
from regard.compression.choosing import dealt
from regard.errors import ArgumentError
from tests.audits.checkpoints import tokenizer

TOKENS, CONTEXT, WINDOW = 120, 61, 15
SIZES = {"vocab_size": 40, "max_position_embeddings": 160}
LAYERS = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
LLAMA = {"hidden_size": 16, "intermediate_size": 24} | LAYERS | SIZES


def _ids():
    return torch.randint(40, (1, TOKENS), generator=torch.Generator().manual_seed(3))


def _model(kind, **options):
    """Two layers with large weights, so that attention looks at something."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**LLAMA, **options})
    door = transformers.AutoModel if kind == "bert" else transformers.AutoModelForCausalLM
    model = door.from_config(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(6.0)
    return model


@pytest.fixture(scope="module")
def decoder():
    return _model("llama")


@pytest.fixture(scope="module")
def found(decoder):
    return Choosing(decoder, Text("a text", _ids()), error=0.1).run("tiny")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("mistral", {"sliding_window": 200}),
        ("bert", {}),
        ("gpt_neox", {}),
    ],
)
def test_everything_kept_is_the_model(kind, options):
    """All keys in the place of all keys: outputs as before; and the implementation is as it was."""
    model = _model(kind, **options)
    before = model.config._attn_implementation
    heard = []

    def answer(number, module, seen):
        groups = seen.groups()
        everyone = torch.arange(groups[0].queries.shape[1])
        heard.append(everyone.numel())
        return torch.stack([out for g in groups for out in g.outputs(g.everything(), everyone)])

    with torch.no_grad():
        exact = model(_ids())[0]
    with answering(model, answer, lambda number, why: pytest.fail(why)):
        again = model(_ids())[0]
    torch.testing.assert_close(again, exact, rtol=1e-4, atol=1e-4)
    assert heard == [TOKENS if kind == "bert" else TOKENS // 2] * 2
    assert model.config._attn_implementation == before


def _windowed(model):
    """The model where the later half sees the last keys of the context alone, by a mask of its own."""
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()
    seen[TOKENS // 2 :, : CONTEXT - WINDOW] = False
    mask = torch.zeros(1, 1, TOKENS, TOKENS).masked_fill(~seen, -math.inf)
    with torch.no_grad():
        return model(_ids(), attention_mask=mask).logits[0].double()


def test_the_whole_model_by_hand(decoder, found):
    """The divergence of the window in all layers is that of a mask."""
    window = next(one for one in found.applied if one.name == f"last {WINDOW}")
    with torch.no_grad():
        exact = decoder(_ids()).logits[0].double()
    rows = TOKENS // 2 + dealt(TOKENS // 2)[2]
    p, q = exact[rows].log_softmax(-1), _windowed(decoder)[rows].log_softmax(-1)
    gaps = (p.exp() * (p - q)).sum(-1)
    assert math.isclose(window.divergence, float(gaps.mean()), rel_tol=1e-3)
    assert math.isclose(window.deviation, float(gaps.std() / len(gaps) ** 0.5), rel_tol=1e-3)
    assert math.isclose(window.memory, WINDOW / CONTEXT)
    assert window.divergence > 1e-3


def test_choices_are_within_the_error_and_of_least_memory(found):
    assert [layer.keys for layer in found.layers] == [CONTEXT, CONTEXT]
    for layer, name in zip(found.layers, found.recommended, strict=True):
        assert layer.mixed
        good = {key: one for key, one in layer.choices.items() if one.get("quantile", 1) <= 0.1}
        assert layer.choices[name]["memory"] == min(one["memory"] for one in good.values())
        assert layer.choices["4 bits"]["quantile"] > layer.choices["8 bits"]["quantile"]
    assert found.applied[0].divergence < next(o for o in found.applied if o.name == "last 15").divergence
    assert found.applied[0].exact == 0
    assert len(found.sentences()) == 2


def test_no_choice_leaves_a_layer_exact(decoder):
    strict = Choosing(decoder, Text("a text", _ids()), error=1e-9).run("tiny")
    assert strict.recommended == (None, None)
    assert strict.applied[0].divergence == 0
    assert strict.applied[0].memory == 1
    assert strict.applied[0].exact == 2


def test_layers_that_are_more_than_dot_products_are_refused_by_name():
    capped = _model("gemma2", head_dim=4, sliding_window=200, query_pre_attn_scalar=4)
    with pytest.raises(ArgumentError, match="softcap"):
        Choosing(capped, Text("a text", _ids()), error=0.1).run("tiny")
    with pytest.raises(ArgumentError, match="the text: has 20 queries; give a longer one"):
        Choosing(_model("llama"), Text("a text", _ids()[:, :40]), error=0.1).run("tiny")


def test_a_layer_of_windows_is_left_as_it_is():
    """Mistral with a window of eight: nothing is seen by all who ask."""
    with pytest.raises(ArgumentError, match="window already"):
        Choosing(_model("mistral", sliding_window=8), Text("a text", _ids()), error=0.1).run("tiny")


class _Stopped(Exception):
    pass


def test_what_was_interrupted_goes_on(decoder, found, tmp_path):
    """Stopped in the second layer, then in the whole model: the same numbers as in one go."""
    runs = []

    def stop(where):
        def progress(what, done, total):
            runs.append(what)
            if what == where:
                raise _Stopped

        return progress

    for where in ("layer 1", "whole model, 15 atoms"):
        with pytest.raises(_Stopped):
            _resumed(decoder, tmp_path, resume=where != "layer 1").run("tiny", stop(where))
    assert runs.count("layer 0") == 2  # the second run passes it by, without work
    again = _resumed(decoder, tmp_path, resume=True).run("tiny")
    assert again == found


def _resumed(model, path, resume):
    store = Store(path / "units", {"of": "this"}, resume=resume)
    return Choosing(model, Text("a text", _ids()), error=0.1, store=store)


def test_the_page_runs_no_text_as_code(found):
    evil = Found("<script>alert(1)</script>", "<img src=x>", 5, 0.1, found.layers, found.applied)
    page = html(evil, "regard cheaper '<b>'")
    assert "<script" not in page
    assert "<img" not in page
    assert "&lt;script&gt;" in page
    for name in found.candidates:
        assert name in page
    assert page.count("best") >= 2 * len(found.layers)


def test_memory_is_relative_to_the_dtype_of_the_checkpoint(decoder, found):
    """Of sixteen bits eight are half, with the steps of the codes; what keeps numbers is the same share."""
    half = Choosing(decoder, Text("a text", _ids()), error=0.1, dtype=torch.bfloat16).run("tiny")
    for wide, narrow in zip(found.layers, half.layers, strict=True):
        for bits in (8, 4):
            ratios = [one.choices[f"{bits} bits"]["memory"] for one in (wide, narrow)]
            steps = ratios[0] - bits / 32
            assert math.isclose(ratios[1], bits / 16 + steps, rel_tol=1e-9)
        assert wide.choices["15 atoms"]["memory"] == narrow.choices["15 atoms"]["memory"]
    assert "float32 (32 bits per number)" in found.sentences()[0]
    assert "bfloat16 (16 bits per number)" in half.sentences()[0]
    assert "bfloat16 (16 bits per number)" in html(half)
    assert half.written()["dtype"] == "bfloat16"


def test_the_dtype_is_that_of_most_numbers():
    mixed = torch.nn.ModuleList([torch.nn.Linear(9, 9).bfloat16(), torch.nn.LayerNorm(9)])
    assert dtype_of(mixed) == torch.bfloat16
    assert dtype_of(torch.nn.Identity()) == torch.float32


def test_candidates_that_take_more_than_the_context_are_not_shown(capsys):
    """128 random features of 33 numbers are more than 61 keys and values of 64 together."""
    wide = _model("llama", hidden_size=64, num_attention_heads=2, num_key_value_heads=1)
    found = Choosing(wide, Text("a text", _ids()), error=0.1).run("tiny")
    assert found.refused["random features"] == "takes more memory than the context itself"
    assert "random features" not in [*found.candidates, *(one.name for one in found.applied)]
    everything = [numbers for layer in found.layers for numbers in layer.choices.values()]
    assert all(one["memory"] <= 1 for one in everything if "refused" not in one)
    _show(found)
    shown = [line for line in capsys.readouterr().out.splitlines() if "random features" in line]
    assert shown == ["Not shown: random features (takes more memory than the context itself)."]


@pytest.fixture(scope="module")
def encoder():
    return Choosing(_model("bert"), Text("a text", _ids()), error=0.1).run("tiny")


def test_no_column_is_without_numbers(encoder, found, capsys):
    """An encoder predicts no token: no column of KL on the screen, on the page and in the numbers."""
    for one, speaks in ((found, True), (encoder, False)):
        _show(one)
        assert ("KL of the next token" in capsys.readouterr().out) == speaks
        page = html(one)
        assert ("KL of the next token" in page) == ("most likely token" in page) == speaks
        assert any("divergence" in row for row in one.written()["applied"]) == speaks
        for table in re.findall(r"<tbody>(.*?)</tbody>", page, re.DOTALL):
            rows = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in table.split("<tr")[1:]]
            assert all(set(column) != {"–"} for column in zip(*rows, strict=True))


def test_percentages_are_capped():
    assert [shown_part(value) for value in (0.0034, 0.25, 1, 1.004, 1.02, 4447.05, None, math.nan)] == [
        "0.34 %", "25 %", "100 %", "100 %", "> 100 %", "> 100 %", "–", "–",
    ]  # fmt: skip


def test_the_time_is_predicted_from_a_few_heads(decoder, tmp_path):
    """About as long as it takes; less where something is in the store, and steps that are as long."""
    choosing = _resumed(decoder, tmp_path, resume=False)
    seconds = choosing.predicted()
    start = time.perf_counter()
    choosing.run("tiny")
    taken = time.perf_counter() - start
    assert taken / 10 < seconds < 10 * taken
    assert choosing.predicted() == 0
    assert Choosing(_model("mistral", sliding_window=8), Text("", _ids()), error=0.1).predicted() is None


def test_steps_are_of_one_length_after_a_prediction(decoder):
    choosing = Choosing(decoder, Text("a text", _ids()), error=0.1)
    before = choosing.sizes
    choosing.predicted()
    said = []
    choosing.run("tiny", lambda what, done, total: said.append((done, total)))
    assert {total for _, total in said} == {sum(choosing.sizes)}
    assert [done for done, _ in said] == sorted(done for done, _ in said)
    assert said[-1] == (sum(choosing.sizes),) * 2
    assert choosing.sizes[0] % before[0] == 0
    assert len(choosing.sizes) == 1 + 1 + 7  # tables, the recommended choices, the softmax candidates


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    words = tokenizer()
    _model("llama", vocab_size=len(words)).save_pretrained(path)
    words.save_pretrained(path)
    return path


def _run(*arguments):
    return CliRunner().invoke(application(), ["cheaper", *map(str, arguments)])


def test_the_command_writes_a_page_and_numbers(directory, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("The bank raised its rates after the river flooded the town and the bank. " * 20)
    given = (directory, "--text-file", text, "--tokens", 100, "--out", tmp_path / "out", "--error", 0.2)
    done = _run(*given)
    assert done.exit_code == 0, done.output
    assert done.stderr.startswith("predicted to take ")
    written = json.loads((tmp_path / "out" / "cheaper.json").read_text())
    assert len(written["layers"]) == 2
    assert written["applied"][0]["name"] == "recommended"
    assert (tmp_path / "out" / "cheaper.html").read_text().startswith("<!DOCTYPE html>")
    assert not (tmp_path / "out" / ".units").exists()
    assert json.loads(_run(*given, "--json").stdout) == written
    other = json.loads(_run(*given, "--json", "--seed", 1).stdout)
    assert other["applied"] != written["applied"]


def test_several_texts_are_joined(directory, tmp_path):
    text, words = tmp_path / "text.txt", "The bank raised its rates after the river flooded the town. " * 9
    text.write_text(f"{words}\n\n{words}\n")
    options = ("--tokens", 100, "--out", tmp_path / "out", "--json")
    (once, twice) = (
        json.loads(_run(directory, *given, *options).stdout)
        for given in (("--text-file", text), ("--text", words.strip(), "--text", words.strip()))
    )
    assert once["tokens"] == 100
    assert once["layers"] == twice["layers"]
    assert (once["text"], twice["text"]) == ("text.txt", ", ".join([words[:40]] * 2))


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "--text-file: is missing"),
        (("--text-file", "nowhere.txt"), "--text-file"),
        (("--text", __file__), "--text: is "),
        (("--text-file", __file__, "--error", 0), "--error"),
        (("--text-file", __file__, "--keep", 1), "--keep"),
        (("--text-file", __file__, "--tokens", 10), "--tokens"),
    ],
)
def test_bad_arguments_are_named(directory, arguments, named):
    done = _run(directory, *arguments)
    assert isinstance(done.exception, ArgumentError)
    assert str(done.exception).startswith(named)
