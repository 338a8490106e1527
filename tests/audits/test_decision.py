"""The check of decisions: made only when it is named, and said first."""

import pytest
import torch

from regard._durations import spoken_time
from regard.audits import audit, page
from regard.audits.checkpoint import find
from regard.audits.checks import answer_radius, checks
from regard.audits.inputs import inputs_of
from regard.audits.load import load_head, load_weights, tokenizer_of
from regard.audits.summary import summary
from tests.audits.browser import browser, executable
from tests.decisions.test_decide import SIZES, tiny

TEXT = "warm film"


@pytest.fixture(autouse=True)
def few_radii(monkeypatch):
    monkeypatch.setattr(answer_radius, "RESOLUTION", 8.0)


def audited(tmp_path, kind):
    checkpoint = find(tiny(tmp_path, kind, **SIZES))
    model = load_head(checkpoint).double()
    return audit(model, [TEXT, "a film"], tokenizer=tokenizer_of(checkpoint), checks=["radius"])


def test_a_classifier_is_answered_in_one_sentence(tmp_path):
    report = audited(tmp_path, "BertForSequenceClassification")
    (row,) = report.ranked("answer_proved")
    assert 0 < row.values["answer_proved"] < row.values["answer_attack"]
    (table,) = report.tables["radius"]
    assert [one["word"] for one in table["words"]] == TEXT.split()
    assert min(one["proved"] for one in table["words"]) == row.values["answer_proved"]
    assert len(table["spent"]) == 2
    said = " ".join(summary(report))
    assert "Could a typo change this answer?" in said
    assert (
        said.index("one-letter typos") < said.index("Proved: the answer") < said.index("nearest other word")
    )
    assert [one["word"] for one in table["typos"]] == TEXT.split()
    assert "after the first block" in said


def test_an_embedding_is_too(tmp_path):
    report = audited(tmp_path, "BertModel")
    (row,) = report.ranked("answer_proved")
    assert 0.9 < row.values["answer_proved"] <= row.values["answer_attack"] <= 1
    said = " ".join(summary(report))
    assert said.index("one-letter typos") < said.index("the cosine to the original stays above")


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertModel"])
def test_the_page_counts_blocks_and_moves_as_the_sentence_does(tmp_path, kind):
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed; set CHROMIUM to its path")
    report = audited(tmp_path, kind)
    with browser(path) as running:
        tab = running.open(page.save(report, tmp_path / "out")[1])
        found = tab.evaluate("document.querySelector('#radius').textContent")
        blocks = tab.evaluate("[...document.querySelectorAll('#radius tbody th')].map((e) => e.textContent)")
        assert tab.problems == []
        tab.close()
    assert [one for one in blocks if one.isdigit()] == ["1", "2"]
    assert ("moves by a thousandth of its length" in found) == (kind == "BertModel")
    assert ("moves by as much as is proved for it" in found) == (kind != "BertModel")


def test_it_is_made_only_when_it_is_named(tmp_path):
    named = [check.name for check in checks() if check.named]
    assert named == ["radius"]
    checkpoint = find(tiny(tmp_path, "BertModel", **SIZES))
    report = audit(
        load_head(checkpoint), [{"input_ids": torch.tensor([[2, 5, 6, 3]])}], checks=["rows", "radius"]
    )
    assert any(entry.check == "radius" and "not texts" in entry.reason for entry in report.skipped)


def test_long_texts_are_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(answer_radius, "LARGEST", 16)
    report = audited(tmp_path, "BertModel")
    said = next(entry.reason for entry in report.skipped if "regard decide" in entry.reason)
    assert report.ranked("typos_changed")
    assert report.ranked("answer_proved") == []
    told = " ".join(summary(report))
    assert told.count("the first text has 2 tokens of width 16") == 1
    assert "one-letter typos" in told
    assert "a bound through six layers would take" in said
    assert "extrapolated from 2,304 numbers" in said


def test_the_way_through_the_words_is_shown(tmp_path):
    """One step of the audit takes minutes: what is done within it is told."""
    checkpoint = find(tiny(tmp_path, "BertModel", **SIZES))
    shown = []
    audit(
        load_head(checkpoint),
        [TEXT],
        tokenizer=tokenizer_of(checkpoint),
        checks=["radius"],
        progress=lambda *line: shown.append(line),
    )
    whole = [what for what, *_ in shown if what.startswith("input 1, whole: ")]
    assert whole[0].startswith("input 1, whole: typos of “warm” (0 of ")
    assert whole[-1] == "input 1, whole: proofs, “film” (1 of 2)"


def hint(report):
    return [sentence for sentence in summary(report) if "--checks radius" in sentence]


def test_the_hint_is_shown_where_it_leads_somewhere(tmp_path, monkeypatch):
    """With its time; not where the check would refuse the text, was made, or does not read the model."""
    checkpoint = find(tiny(tmp_path, "BertForSequenceClassification", **SIZES))
    model, tokenizer = load_weights(checkpoint), tokenizer_of(checkpoint)

    def report(checks):
        return audit(model, [TEXT], tokenizer=tokenizer, checks=checks)

    (said,) = hint(report(["words"]))
    taken = 2 * answer_radius.OF_ANSWERS * answer_radius.LEAST * 2 / answer_radius.LAYERS
    assert f"--checks radius ({spoken_time(taken)} of one core)" in said
    assert hint(report(["words", "radius"])) == []
    monkeypatch.setattr(answer_radius, "LARGEST", 16)
    assert hint(report(["words"])) == []
    monkeypatch.undo()
    model.config.model_type = "deberta"
    assert answer_radius.predicted_seconds(model, inputs_of(model, [TEXT], tokenizer)[0]) is None


def test_predicted_times_grow_with_the_text(tmp_path):
    checkpoint = find(tiny(tmp_path, "BertModel", **{**SIZES, "hidden_size": 512}))
    model, tokenizer = load_weights(checkpoint), tokenizer_of(checkpoint)
    short, long = (
        answer_radius.predicted_seconds(model, inputs_of(model, [text], tokenizer)[0])
        for text in ("warm film", "a warm film a warm film")
    )
    numbers = 6 * 512
    assert long == pytest.approx(6 * answer_radius.OF_EMBEDDINGS * 20 * (numbers / 2304) ** 3 * 2 / 6)
    assert short < long / 10
