"""Every sentence is made of data: on random reports, each number and name in the words is in the JSON, each
is what it is said to be, and no page is calm about what was not measured.
"""

import dataclasses
import json
import math
import re
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import regard
from regard.audits import Report
from regard.audits.card import markdown
from regard.audits.findings import ALARMING, findings
from regard.audits.page import html, verdict
from regard.audits.report import Skipped
from regard.audits.summary import sentences
from regard.audits.words import Proved, in_words, say
from regard.certificate import round_up
from regard.errors import ArgumentError
from tests.audits.test_page import Model, made, nothing_covered

pytest.importorskip("jinja2")

NUMBER = re.compile(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?![\w])")


def printed(value):
    """How a number may be written in a sentence."""
    if isinstance(value, int):
        return {f"{value:,}"}
    return {in_words(value), round_up(value), f"{value:,.0f}"} if value is not None else set()


def without(text, names):
    """A text with the names in it taken out, the longest first: they may hold digits. A name that is a point
    is part of numbers, and stays.
    """
    for name in sorted((name for name in names if name.strip(".,")), key=len, reverse=True):
        text = text.replace(name, " ").replace(name[:1].upper() + name[1:], " ")
    return text


def plain(value):
    return {"inf": math.inf, "-inf": -math.inf}.get(value, value) if isinstance(value, str) else value


def strings(value):
    """Every text of a JSON value."""
    if isinstance(value, dict):
        return {
            s
            for key, part in value.items()
            if key not in ("summary", "facts", "findings")
            for s in strings(part)
        }
    if isinstance(value, list):
        return {s for part in value for s in strings(part)}
    return {value} if isinstance(value, str) else set()


def check_words(text, facts):
    """Each number of a text is one of its facts."""
    allowed = {word for value in facts["numbers"].values() for word in printed(plain(value))}
    left = without(text, facts["names"].values())
    for number in NUMBER.findall(left):
        assert number.rstrip(",") in allowed, (number, text, facts)


draws = st.lists(
    st.sampled_from([0.0, 1e-9, 0.01, 0.5, 1.0, 3.0, 49.0, 51.0, 1234.5, 82200.0, 1e12, math.inf, math.nan]),
    min_size=7,
    max_size=7,
)


@st.composite
def reports(draw):
    """Reports with gaps, extreme numbers, layers that are not covered and checks that were not made."""
    heads = tuple(draw(st.lists(st.integers(1, 3), min_size=1, max_size=3)))
    whole = made(Model(heads=heads, inputs=draw(st.integers(1, 3))), seed=draw(st.integers(0, 1000)))
    values, turn = draw(draws), iter(range(10**9))

    def change(value):
        place = next(turn)
        return values[place % len(values)] if place % 3 == 0 else value

    rows = [
        dataclasses.replace(row, values={name: change(value) for name, value in row.values.items()})
        for row in whole.rows
    ]
    lost = draw(st.integers(0, len(heads)))
    coverage = [
        dataclasses.replace(entry, rounding=draw(st.sampled_from([0.0, 0.00014])))
        if place >= lost
        else dataclasses.replace(entry, covered=False, reason="its mask is not understood")
        for place, entry in enumerate(whole.coverage)
    ]
    kept = {entry.site for entry in coverage if entry.covered}
    names = draw(st.sets(st.sampled_from(sorted(whole.tables))))
    skipped = [Skipped("depth", "", 0, "the text is too long") for _ in range(draw(st.integers(0, 2)))]
    return dataclasses.replace(
        whole,
        rows=[row for row in rows if row.scope == "stack" or row.site in kept],
        coverage=coverage,
        tables={name: table for name, table in whole.tables.items() if name in names},
        skipped=skipped,
        partial=draw(st.sampled_from(["", "it was stopped"])),
    )


@given(reports())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_number_and_name_is_in_the_json(report):
    data = json.loads(json.dumps(report.to_dict()))
    known = strings(data)
    for text, facts in zip(data["summary"], data["facts"], strict=True):
        check_words(text, facts)
    for finding in data["findings"]:
        check_words(f"{finding['what']} {finding['why']}", finding)
    sites = {entry["site"] for entry in data["coverage"]} | {row["site"] for row in data["rows"]}
    for facts in [*data["facts"], *data["findings"]]:
        for name in facts["names"].values():
            place = re.sub(r"^(head \d+ of|the stack) ", "", name)
            assert name == "the model" or name in known or place in sites or re.fullmatch(r"token \d+", name)
    assert Report.from_dict(data).to_dict() == report.to_dict()


@given(reports())
@settings(max_examples=60, deadline=None, derandomize=True)
def test_every_claim_is_counted_again(report):
    """What findings say is recomputed from the rows alone."""
    for finding in findings(report):
        own = [
            r for r in report.rows if (r.site, r.head) == (finding.site, finding.head) and r.scope != "stack"
        ]
        facts, column = finding.numbers, finding.column
        known = [r.values[column] for r in report.rows if not math.isnan(r.values.get(column, math.nan))]
        if column == "entropy":
            assert facts["entropy"] == own[0].values["entropy"] < 0.05
            assert facts["count"] == sum(value < 0.05 for value in known)
            assert facts["heads"] == len(known)
            every = [r.values["head_branch_constant"] for r in report.heads]
            if "median" in facts:
                exact = [value for value in every if not math.isnan(value)]
                assert facts["median"] == statistics.median(exact)
                assert facts["constant"] == own[0].values["head_branch_constant"]
                assert ("flatter" in finding.why) == (facts["constant"] < 0.5 * facts["median"])
        if column == "qk_norm":
            assert facts["ratio"] == pytest.approx(facts["norm"] / statistics.median(known))
            assert facts["norm"] == own[0].values["qk_norm"]
        if column == "largest_logit":
            assert facts["logit"] == own[0].values["largest_logit"] > 50
            assert facts["count"] == sum(value > 50 for value in known)
            assert facts["heads"] == len(known)
        if column == "mlp_branch_constant":
            assert facts["mlp"] == own[0].values[column]
            tables = [t for t in report.tables.get("constants", []) if t["site"] == finding.site]
            assert ("was not measured" in finding.why) == (not tables)
            if tables:
                index, token = int(facts["input"]) - 1, int(facts["position"]) - 1
                (table,) = [t for t in tables if t["input"] == index]
                assert facts["amplified"] == table["mlp"][token] == max(max(t["mlp"]) for t in tables)
                assert finding.names["token"] == report.inputs[index].tokens[token]
                others = [value for place, value in enumerate(table["mlp"]) if place != token]
                assert facts["second"] == max(others)
                assert finding.why.startswith("One token") == (facts["amplified"] > 4 * facts["second"])
                typical = statistics.median(table["leaving"])
                assert facts["ratio"] == pytest.approx(table["leaving"][token] / typical)
                assert ("massive" in finding.why) == (facts["ratio"] > 20)
        if column == "token_ratio":
            assert facts["count"] == sum(value > 20 for value in known)
            assert facts["layers"] == len(known)


@given(reports())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_headlines_are_the_largest(report):
    said = " ".join(sentence.text for sentence in sentences(report))
    heads = [r for r in report.heads if not math.isnan(r.values.get("head_branch_constant", math.nan))]
    if heads:
        worst = max(heads, key=lambda row: row.values["head_branch_constant"])
        value = worst.values["head_branch_constant"]
        tied = [row.label for row in heads if row.values["head_branch_constant"] == value]
        assert any(f"{label} ({in_words(value)})" in said for label in tied)
    measured = any(not math.isnan(v) for row in report.rows for v in row.values.values())
    calm = "Nothing is alarming by the limits" in said
    alarmed = any(finding.level == ALARMING for finding in findings(report))
    assert calm == (measured and not alarmed and not report.missing)
    assert (verdict(report).level == "note") == calm
    assert ("Nothing was measured" in said) == (not measured)


def test_no_page_is_calm_when_nothing_was_measured():
    report = nothing_covered()
    for text in (" ".join(report.summary()), html(report), markdown(report)):
        assert "Nothing was measured" in text
        assert "Nothing is alarming" not in text
    assert verdict(report).level == ALARMING


def test_typos_are_counted():
    """Three of ten inputs have changed words, and not every word of them: the sentence says so."""
    report = made(Model(inputs=10))
    tables = report.tables["misspecification"][:3]
    tables[0]["changes"] = tables[0]["changes"][1:]
    told = dataclasses.replace(report, tables={**report.tables, "misspecification": tables})
    said = " ".join(told.summary())
    assert "Of 8 typos, 9 replaced words, 9 deleted words in 3 of 10 inputs" in said
    assert "very word" not in html(told)


def test_a_fact_is_kept_as_it_is():
    found = say(
        "{place} is {number}, at most {bound} in {count} places",
        place="here",
        number=1234.567,
        bound=Proved(1.000001),
        count=12345,
    )
    assert found.text == "here is 1,230, at most 1.0001 in 12,345 places"
    assert found.numbers == {"number": 1234.567, "bound": 1.000001, "count": 12345}
    assert found.names == {"place": "here"}


def test_progress_in_logs():
    """Without a terminal a line is said at most every half minute, with what is done and what is left."""
    from io import StringIO

    from rich.console import Console

    from regard.audits.terminal import Bars

    now, out = [0.0], StringIO()
    with Bars(Console(file=out, width=120), [3, 97], clock=lambda: now[0]) as bars:
        for done, at in ((0, 0.0), (1, 29.0), (20, 40.0), (21, 45.0), (50, 100.0), (100, 200.0)):
            now[0] = at
            bars(f"step {done}", done, 100)
    assert out.getvalue().splitlines() == [
        "20 of 100 steps after 0:40, about 2:40 left: step 20",
        "50 of 100 steps after 1:40, about 1:40 left: step 50",
    ]


# What people call


def test_a_report_shows_itself():
    report = made()
    assert len(repr(report)) < 300
    assert "2 of 2 attention layers, 5 heads" in repr(report)
    shown = dataclasses.replace(report, model={**report.model, "name": "<b>&"})._repr_html_()
    assert "&lt;b&gt;&amp;" in shown
    assert "<b>&" not in shown
    assert len(shown) < 20_000
    with pytest.raises(ArgumentError, match="scope"):
        report.table("heads")


def test_a_table_of_heads():
    pandas = pytest.importorskip("pandas")
    report = made()
    frame = report.table()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame["entropy"]) == [row.values["entropy"] for row in report.heads]
    assert len(report.table("layer")) == len(report.layers)


def test_a_column_that_is_none():
    with pytest.raises(ArgumentError, match="'entropyy', which is not a column; use entropy"):
        made().ranked("entropyy")
    assert dataclasses.replace(made(), columns=[], rows=[]).ranked("entropy") == []


def test_checks_by_name_and_one_input():
    layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(1, 4, 8)
    call = {"query": x, "key": x, "value": x}
    report = regard.audit(layer, call, checks=["rows"])
    assert report.settings["checks"] == ["rows"]
    assert len(report.inputs) == 1
    with pytest.raises(ArgumentError, match="checks: has 'row', a str; give names of weights, rows"):
        regard.audit(layer, call, checks=["row"])


def test_a_model_without_attention():
    with pytest.warns(UserWarning, match="Linear has no attention that regard can find"):
        report = regard.audit(torch.nn.Linear(2, 2), {"input": torch.ones(1, 3, 2)})
    assert "no attention found" in repr(report)
    assert "Nothing was measured" in " ".join(report.summary())


def test_saving_blames_the_directory(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError) as error:
        made().save(tmp_path / "file")
    assert str(error.value).startswith("directory:")
