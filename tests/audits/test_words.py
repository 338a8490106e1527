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
from regard.audits.checks import checks
from regard.audits.checks.base import MEASURED, STATUSES
from regard.audits.findings import ALARMING, findings
from regard.audits.page import html
from regard.audits.rates import upper_limit
from regard.audits.report import Skipped
from regard.audits.screen import marked, screen
from regard.audits.summary import sentences
from regard.audits.words import Proved, in_words, say
from regard.certificate import round_up
from regard.errors import ArgumentError
from tests.audits.test_page import Model, changed_values, made, nothing_covered

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

    whole = changed_values(whole, lambda name, value: change(value))
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
        rows=[row for row in whole.rows if row.scope == "stack" or row.site in kept],
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
            varying = [
                min(r.values[column], r.values.get("logit_spread", math.inf))
                for r in report.rows
                if not math.isnan(r.values.get(column, math.nan))
            ]
            constant = [whole - part for whole, part in zip(known, varying, strict=True)]
            spread = min(own[0].values[column], own[0].values.get("logit_spread", math.inf))
            assert facts["logit"] == own[0].values[column]
            assert facts["spread"] == spread
            if "constant" in facts:
                assert facts["constant"] == facts["logit"] - spread > 65504
            else:
                assert spread > 50
                large = [not off > 65504 and part > 50 for part, off in zip(varying, constant, strict=True)]
                assert facts["count"] == sum(large)
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
    first = screen(report)
    calm = "No head and no layer is alarming." in first.verdict
    alarmed = any(finding.level == ALARMING for finding in findings(report))
    assert calm == (measured and not alarmed and not report.missing)
    assert (first.level == "note") == calm
    assert ("Nothing was measured" in first.verdict) == (not measured)


@given(reports())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_largest_gain_of_all_parts_is_named(report):
    """Attention, MLPs and blocks are ranked together, and each sort is named."""
    gains = {
        name: [row.values[name] for row in report.ranked(name)]
        for name in ("attention_branch_constant", "mlp_branch_constant", "block_constant")
    }
    if any(gains.values()):
        (said,) = [one for one in sentences(report) if one.text.startswith("Parts that amplify most")]
        printed = list(said.numbers.values())
        assert printed[:3] == sorted((gain for own in gains.values() for gain in own), reverse=True)[:3]
        assert all(max(own) in printed for own in gains.values() if own)


def test_a_block_with_two_attentions_is_named_once():
    """Self- and cross-attention of a decoder layer have one block around them, and one MLP."""
    report = made(Model(heads=(1, 1), inputs=1))
    coverage = [dataclasses.replace(entry, block="decoder.0") for entry in report.coverage]
    rows = [
        dataclasses.replace(row, values={**row.values, "block_constant": 900.0, "mlp_branch_constant": 800.0})
        if row.scope == "layer"
        else row
        for row in report.rows
    ]
    told = sentences(dataclasses.replace(report, coverage=coverage, rows=rows))
    (said,) = [one.text for one in told if one.text.startswith("Parts that amplify most")]
    assert (
        said.count("the block decoder.0 (900), the MLP of decoder.0 (800), attention in encoder.layer.") == 1
    )
    assert said.count("decoder.0") == 2


@given(st.lists(st.floats(-1, 1), min_size=1, max_size=9))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_the_change_that_is_named_is_the_worst_of_what_is_printed(found):
    """The sentence and the first screen name the change with the smallest cosine, and count all of them."""
    report = made(Model(inputs=1))
    (table,) = report.tables["words"]
    entries = [
        {**table["changes"][0], "word": f"word {place}", "cosine": one} for place, one in enumerate(found)
    ]
    report = dataclasses.replace(report, tables={**report.tables, "words": [{**table, "changes": entries}]})
    (said,) = [s for s in sentences(report) if "changes the answer most" in s.text]
    assert said.numbers["number"] == min(found)
    assert said.numbers["count"] == len(found)
    (line,) = screen(report).blocks[0].lines
    assert line.cells == (str(len(found)), f"{statistics.median(found):.2f}", f"{min(found):.2f}")
    low = sum(one < 0.9 for one in found)
    limit = math.ceil(100 * upper_limit(low, len(found)))
    said = f"{low} of {len(found)} typos (95 % limit: {limit} %) take{'s' * (low == 1)} the cosine below 0.9."
    assert said in screen(report).verdict


@pytest.mark.parametrize("measure", ["classes", "next token"])
@pytest.mark.parametrize("changed", [0, 2, 9])
def test_labels_and_tokens_are_counted_with_their_limit(measure, changed):
    """0 of 9 is at most 29 %: of a rate the first screen prints the 95 % limit."""
    report = made(Model(inputs=1))
    (table,) = report.tables["words"]
    entries = [
        {
            "kind": "typo",
            "word": "cat",
            "text": table["changes"][0]["text"],
            "answer": "other",
            "changed": place < changed,
            "divergence": 0.5 + place,
        }
        for place in range(9)
    ]
    tables = {"words": [{**table, "measure": measure, "answer": "own", "changes": entries}]}
    found = screen(dataclasses.replace(report, tables=tables))
    limit = {0: 29, 2: 55, 9: 100}[changed]
    (line,) = found.blocks[0].lines
    assert line.cells[0] == f"{changed} of 9, at most {limit} %"
    assert line.cells[1:] == (() if measure == "classes" else ("4.5", "8.5"))
    what = "label" if measure == "classes" else "next token"
    assert f"{changed} of 9 typos (95 % limit: {limit} %) change the {what}." in found.verdict
    assert ("typos matter here" in found.actions[0]) == (changed > 0)


def test_limits_of_rates():
    """Clopper and Pearson: at the limit, so few cases have a probability of 5 %."""
    assert upper_limit(0, 10) == pytest.approx(1 - 0.05 ** (1 / 10))
    assert upper_limit(10, 10) == 1.0
    for count, cases in [(1, 10), (3, 92), (76, 299)]:
        limit = upper_limit(count, cases)
        below = sum(math.comb(cases, k) * limit**k * (1 - limit) ** (cases - k) for k in range(count + 1))
        assert below == pytest.approx(0.05)


@given(st.text("ab c.", max_size=9), st.text("ab c.", max_size=9), st.text("ab c.", max_size=9))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_a_marked_change_is_the_change(left, old, right):
    """Both texts can be read off the marked one."""
    before, after = f"{left}{old}{right}", f"{left}{right}"
    shown = marked(before, after, around=100)
    start, _, rest = shown.partition("(")
    first, _, rest = rest.partition("→")
    second, _, end = rest.partition(")")
    for text, middle in ((before, first), (after, second)):
        assert f"{start}{middle}{end}".replace(" ", "") == text.replace(" ", "")


def every_column():
    return {column.name: column for check in checks() for column in check.columns}


def test_what_is_compared_is_combined_alike():
    """The rule about columns: what stands beside a number is of the same places, and combined as it is."""
    known = every_column()
    pairs = [(column, known[column.beside]) for column in known.values() if column.beside]
    assert len(pairs) > 8
    for column, other in pairs:
        assert (column.scope, column.over) == (other.scope, other.over), column.name
    gains = [column for column in known.values() if column.kind == MEASURED and "constant" in column.name]
    assert {column.over for column in gains} == {"median"}
    assert known["point_bound"].beside == known["ball_bound"].beside == "head_constant"
    assert known["product"].beside == "network_constant"


numbers = st.lists(
    st.tuples(st.floats(1e-3, 1e3), st.floats(1, 50), st.booleans(), st.booleans()), min_size=1, max_size=6
)


@given(st.sampled_from([column for column in every_column().values() if column.beside]), numbers)
@settings(max_examples=80, deadline=None, derandomize=True)
def test_numbers_that_stand_together_are_of_the_same_inputs(column, drawn):
    """On inputs that have both; so what is at least another number on each input is so as it is printed,
    whichever inputs lack one of them.
    """
    report = made(Model(inputs=len(drawn)))
    other = report.column(column.beside)
    small = [value if known else math.nan for value, _, known, _ in drawn]
    large = [value * factor if known else math.nan for value, factor, _, known in drawn]
    row = dataclasses.replace(report.rows[0], inputs={column.name: large, other.name: small})
    values, inputs = report.together(row, column.name, other.name)
    both = [place for place, (_, _, *known) in enumerate(drawn) if all(known)]
    assert inputs == both
    assert (values == []) == (both == [])
    if both:
        assert values[0] >= values[1]
        assert values == [c.combined(own[k] for k in both) for c, own in ((column, large), (other, small))]
        written = dataclasses.replace(report, rows=[row], tables={}, coverage=[]).to_dict()["rows"][0]
        if column.name in row.values:
            assert [written["beside"][column.name][key] for key in ("value", "other")] == values


def test_numbers_that_are_combined_differently_are_not_compared():
    report = made()
    with pytest.raises(ArgumentError, match="entropy the mean, largest_logit the largest"):
        report.together(report.heads[0], "entropy", "largest_logit")


@given(reports(), st.lists(st.booleans(), min_size=3, max_size=3))
@settings(max_examples=60, deadline=None, derandomize=True)
def test_a_network_and_its_product_are_of_the_same_inputs(report, known):
    """End to end beside the product of the blocks, which is measured on some inputs only."""
    report = changed_values(report, lambda name, value: value)
    rows = [
        dataclasses.replace(
            row,
            inputs={
                **row.inputs,
                "product": [
                    value if keep else math.nan
                    for value, keep in zip(row.inputs["product"], known, strict=False)
                ],
            },
        )
        if row.scope == "stack"
        else row
        for row in report.rows
    ]
    report = changed_values(dataclasses.replace(report, rows=rows), lambda name, value: value)
    (row,) = report.stacks
    both = [
        pair
        for pair in zip(row.inputs["network_constant"], row.inputs["product"], strict=True)
        if not any(map(math.isnan, pair))
    ]
    found = [said for said in sentences(report) if said.text.startswith("End to end")]
    assert bool(found) == (not math.isnan(row.values["network_constant"]))
    for said in found:
        facts = {name.rpartition(" ")[0]: value for name, value in said.numbers.items()}
        assert ("product" in facts) == bool(both)
        if both:
            network, product = (statistics.median(own) for own in zip(*both, strict=True))
            assert facts["product"] == product
            assert facts.get("alike", facts["constant"]) == network


@given(reports())
@settings(max_examples=30, deadline=None, derandomize=True)
def test_the_twin_stands_beside_numbers_of_its_own_input(report):
    """It is measured on the first input alone, so this model's numbers are those of the first input."""
    names = ("head_branch_constant", "attention_branch_constant", "network_constant")
    twin = {name: [0.1, 0.2, 0.3, 0.4 + place] for place, name in enumerate(names)}
    report = dataclasses.replace(report, twin=twin)
    own = {
        name: [
            row.inputs[name][0] for row in report.rows if not math.isnan(row.inputs.get(name, [math.nan])[0])
        ]
        for name in names
    }
    found = [said for said in sentences(report) if "untrained twin" in said.text]
    assert bool(found) == any(own.values())
    for said in found:
        printed = [value for name, value in said.numbers.items() if name.startswith("own")]
        assert printed == [max(values) for values in own.values() if values]
        assert ("on input 1" in said.text) == (len(report.inputs) > 1)


def test_four_words():
    """Run, measured, searched, proved: every column has one of them, but a promise, which was not found. They
    are all that a page, a card and a notebook show.
    """
    known = every_column()
    assert {column.kind for column in known.values()} == {*STATUSES, ""}
    assert [name for name, column in known.items() if not column.kind] == ["promised"]
    assert known["expansion"].kind == known["entropy"].kind == "run"
    assert known["product"].kind == known["head_constant"].kind == known["qk_norm"].kind == "measured"
    report = made()
    page, card = html(report), markdown(report)
    assert set(re.findall(r'class="kind (\w*)"', page)) == set(STATUSES)
    assert set(re.findall(r'(?:data-kind="|kind: ")(\w+)"', page)) <= set(STATUSES)
    assert all(f"*{word}*: {meaning}." in card for word, meaning in STATUSES.items())
    cells = re.findall(r">([^<]*)</td>", report._repr_html_())
    assert {cell.split(",")[0] for cell in cells[2::4]} == {"run", "measured", "proved"}


def test_no_page_is_calm_when_nothing_was_measured():
    report = nothing_covered()
    for text in (" ".join(report.summary()), html(report), markdown(report)):
        assert "Nothing was measured" in text
        assert "No head and no layer is alarming" not in text
    assert screen(report).level == ALARMING


def test_changes_are_counted():
    """Three of ten texts have changed words, and of one only a sample: the first screen says so."""
    report = made(Model(inputs=10))
    tables = report.tables["words"][:3]
    tables[0]["changes"] = tables[0]["changes"][1:]
    tables[0]["possible"] = 40
    told = dataclasses.replace(report, tables={**report.tables, "words": tables})
    (how,) = [block.how for block in screen(told).blocks if block.title == "A changed word"]
    assert how.startswith("26 changes in 3 of 10 texts (a sample of 9 of 46 words; --every-word: all)")
    assert [line.cells[0] for line in screen(told).blocks[0].lines] == ["8", "9", "9"]


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
