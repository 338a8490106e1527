"""The check of decisions: made only when it is named, and said first."""

import pytest
import torch

from regard.audits import audit
from regard.audits.checkpoint import find
from regard.audits.checks import checks, decision
from regard.audits.load import load_head, tokenizer_of
from regard.audits.summary import summary
from tests.decisions.test_decide import SIZES, tiny

TEXT = "warm film"


@pytest.fixture(autouse=True)
def few_radii(monkeypatch):
    monkeypatch.setattr(decision, "RESOLUTION", 8.0)


def audited(tmp_path, kind):
    checkpoint = find(tiny(tmp_path, kind, **SIZES))
    model = load_head(checkpoint).double()
    return audit(model, [TEXT, "a film"], tokenizer=tokenizer_of(checkpoint), checks=["decision"])


def test_a_classifier_is_answered_in_one_sentence(tmp_path):
    report = audited(tmp_path, "BertForSequenceClassification")
    (row,) = report.ranked("answer_proved")
    assert 0 < row.values["answer_proved"] < row.values["answer_attack"]
    (table,) = report.tables["decision"]
    assert [one["word"] for one in table["words"]] == TEXT.split()
    assert min(one["proved"] for one in table["words"]) == row.values["answer_proved"]
    assert len(table["spent"]) == 2
    said = " ".join(summary(report))
    assert "One word cannot change the answer" in said
    assert "after the first block" in said


def test_an_embedding_is_too(tmp_path):
    report = audited(tmp_path, "BertModel")
    (row,) = report.ranked("answer_proved")
    assert 0.9 < row.values["answer_proved"] <= row.values["answer_attack"] <= 1
    assert "the cosine to the original stays above" in " ".join(summary(report))


def test_it_is_made_only_when_it_is_named(tmp_path):
    named = [check.name for check in checks() if check.named]
    assert named == ["decision"]
    checkpoint = find(tiny(tmp_path, "BertModel", **SIZES))
    report = audit(
        load_head(checkpoint), [{"input_ids": torch.tensor([[2, 5, 6, 3]])}], checks=["rows", "decision"]
    )
    assert any(entry.check == "decision" and "not texts" in entry.reason for entry in report.skipped)


def test_long_texts_are_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(decision, "LARGEST", 16)
    report = audited(tmp_path, "BertModel")
    said = next(entry.reason for entry in report.skipped if "regard decide" in entry.reason)
    assert "a bound through six layers would take" in said
    assert "extrapolated from 2,304 numbers" in said
