"""A gate fails on what is bad, got worse or was not measured, and says which number, where and why."""

import dataclasses
import json
import math
import sys

import pytest
import torch

import regard as r
from regard.audits.checks.base import RUN, STACK, Check, Column, Result
from regard.audits.report import Skipped
from regard.cli import main
from tests.audits.checkpoints import save
from tests.audits.test_page import Model, changed_values, made, nothing_covered

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("jinja2")

MODEL = Model()
REPORT = made(MODEL)


def values(report, column):
    return [row.values[column] for row in report.rows if column in row.values]


def scaled(report, name, factor):
    return changed_values(report, lambda column, value: value * factor if column == name else value)


# Conditions


@pytest.mark.parametrize(
    ("address", "worst"),
    [
        ("rows.entropy", min),
        ("rows.largest_logit", max),
        ("geometry.effective_rank", min),
        ("words.expansion", max),
    ],
)
def test_the_worst_row_decides(address, worst):
    """By the direction of the column, whatever the sign; and at the limit itself."""
    value = worst(values(REPORT, address.partition(".")[2]))
    verdicts = {
        sign: bool(REPORT.gate(f"{address}{sign}{value!r}").failures) for sign in ("<", "<=", ">", ">=")
    }
    assert verdicts == {"<": False, "<=": True, ">": False, ">=": True}
    assert REPORT.gate(f"{address} < {math.nextafter(value, math.inf)!r}").failures
    assert REPORT.gate(f"{address}>{math.nextafter(value, -math.inf)!r}").failures


def test_the_sign_decides_for_a_column_without_a_direction():
    numbers = values(REPORT, "qk_norm_alone")
    between = (min(numbers) + max(numbers)) / 2
    assert len(REPORT.gate(f"weights.qk_norm_alone>{between}").failures) == 1
    assert len(REPORT.gate(f"weights.qk_norm_alone<{between}").failures) == 1
    assert not REPORT.gate([f"weights.qk_norm_alone<{min(numbers)!r}", "weights.qk_norm_alone>1e9"]).failures


def test_a_failure_names_the_number_and_where_it_is():
    row = max(REPORT.heads, key=lambda row: row.values["largest_logit"])
    value = row.values["largest_logit"]
    place = row.inputs["largest_logit"].index(value) + 1
    (said,) = REPORT.gate("rows.largest_logit > 0").failures
    assert said == f"rows.largest_logit > 0: the number is {value:.6g}, of {row.label} on input {place}."


def test_infinity_is_a_number():
    endless = changed_values(REPORT, lambda name, value: math.inf if name == "expansion" else value)
    assert "the number is infinity" in endless.gate("words.expansion>1e308").failures[0]
    assert not endless.gate(["words.expansion<1e308", "words.expansion>inf"]).failures
    assert endless.gate("words.expansion>=inf").failures


def test_what_was_not_measured_fails_with_the_reason():
    (said,) = nothing_covered().gate("words.expansion>1e9").failures
    assert said.startswith(
        "words.expansion>1e9: there is no number: inputs: are not texts; give texts (input 1)"
    )
    nothing = changed_values(REPORT, lambda name, value: math.nan if name == "expansion" else value)
    (said,) = nothing.gate("words.expansion>1e9").failures
    assert "there is no number: the check found nothing to measure on these inputs" in said


def test_what_was_not_measured_everywhere_is_said():
    skipped = [Skipped("rows", "encoder.layer.1.attention", 1, "it is too long")]
    found = dataclasses.replace(REPORT, skipped=skipped).gate(["rows.entropy<-1", "words.expansion<0"])
    assert found.failures == ()
    assert found.remarks == (
        "rows.entropy<-1: not measured everywhere: it is too long (encoder.layer.1.attention, input 2).",
    )


def test_a_partial_report_fails():
    partial = dataclasses.replace(REPORT, partial="stopped after 3 of 9 steps")
    assert partial.gate("words.expansion>1e9").failures == (
        "The report is partial: stopped after 3 of 9 steps.",
    )
    assert partial.gate(baseline=REPORT).failures
    assert partial.gate().failures == ()


WRONG = [
    ("words.expnsion>3", "there is no column 'words.expnsion'; use words.expansion"),
    ("wrods.expansion>3", "there is no column 'wrods.expansion'; use words.expansion"),
    ("expansion>3", "there is no column 'expansion'; use words.expansion"),
    ("words>3", "there is no column 'words'; use words."),
    ("qqq.zzz>3", "there is no column 'qqq.zzz'; use CHECK.COLUMN with a check of weights, rows"),
    (
        "words.expansion=3",
        "'words.expansion=3' is no condition; give CHECK.COLUMN, one of < <= > >= and a number",
    ),
    ("words.expansion>nan", "is no condition"),
    ("words.expansion>x", "is no condition"),
    ("words.expansion>1>2", "is no condition"),
    ("", "is no condition"),
]


@pytest.mark.parametrize(("condition", "message"), WRONG)
def test_wrong_conditions(condition, message):
    with pytest.raises(r.errors.ArgumentError, match=r"^conditions: ") as found:
        REPORT.gate(condition)
    assert message in str(found.value)


def test_a_check_that_was_not_made_is_named():
    less = dataclasses.replace(REPORT, settings={**REPORT.settings, "checks": ["rows"]})
    with pytest.raises(
        r.errors.ArgumentError, match="of the check words, which is not made; add words to checks"
    ):
        less.gate("words.expansion>3")


def test_a_check_of_a_user_has_an_address():
    column = Column("own_number", "own", "A number.", RUN, STACK, True)
    own = Check("own", "What?", (column,), of_input=lambda scene: Result({"own_number": {"stack": 2.0}}))
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    report = r.audit(model, torch.randn(1, 4, 8), checks=[own])
    assert [len(report.gate(f"own.own_number>{limit}").failures) for limit in (1, 3)] == [1, 0]


# Baseline


def test_only_what_got_worse_by_more_than_the_tolerance_fails():
    worse = scaled(REPORT, "entropy", 0.9)  # small entropies are the bad ones
    (said,) = worse.gate(baseline=REPORT).failures
    row = max(REPORT.heads, key=lambda row: row.values["entropy"])
    before = row.values["entropy"]
    numbers = f"rows.entropy: {before:.6g} before, {0.9 * before:.6g} now, 10 % worse, of {row.label}; "
    assert said.startswith(numbers)
    assert said.endswith("rows are worse by more than 5 %.")
    assert worse.gate(baseline=REPORT, tolerance=0.11).failures == ()
    assert REPORT.gate(baseline=worse).failures == ()
    assert REPORT.gate(baseline=REPORT, tolerance=0.0) == r.audits.Gate()
    assert len(scaled(REPORT, "largest_logit", 1.2).gate(baseline=REPORT).failures) == 1
    assert not scaled(REPORT, "qk_norm_alone", 9.0).gate(baseline=REPORT).failures  # neither end is bad


@pytest.mark.parametrize(
    ("name", "bad", "good"), [("expansion", math.inf, 0.0), ("effective_rank", 0.0, math.inf)]
)
def test_infinite_numbers_are_compared(name, bad, good):
    worst, best = (
        changed_values(REPORT, lambda column, value, end=end: end if column == name else value)
        for end in (bad, good)
    )
    assert len(worst.gate(baseline=REPORT).failures) == len(worst.gate(baseline=best).failures) == 1
    for report, baseline in ((REPORT, worst), (best, REPORT), (best, worst), (worst, worst), (best, best)):
        assert report.gate(baseline=baseline).failures == ()


def test_numbers_are_compared_over_the_inputs_that_both_have():
    """An input that the new report lacks does not look like a change, nor hide one."""

    def without_the_second(report):
        def one(row):
            inputs = {n: [v[0], math.nan] if len(v) > 1 else v for n, v in row.inputs.items()}
            columns = {column.name: column for column in report.columns}
            found = {name: columns[name].combined(numbers) for name, numbers in inputs.items()}
            return dataclasses.replace(row, values=found, inputs=inputs)

        return dataclasses.replace(report, rows=[one(row) for row in report.rows])

    less = without_the_second(REPORT)
    assert [row.values for row in less.rows] != [row.values for row in REPORT.rows]
    found = less.gate(baseline=REPORT)
    assert found.failures == ()
    assert any("are compared over the inputs that both reports have" in one for one in found.remarks)
    (said,) = without_the_second(scaled(REPORT, "entropy", 0.5)).gate(baseline=REPORT).failures
    assert "50 % worse" in said


def test_a_number_that_is_gone_fails():
    less = changed_values(REPORT, lambda name, value: math.nan if name == "expansion" else value)
    less = dataclasses.replace(less, skipped=[Skipped("words", "", 0, "no fast tokenizer")])
    (said,) = less.gate(baseline=REPORT).failures
    assert said.startswith("words.expansion: 1 of the baseline's numbers are missing now; the stack")
    assert said.endswith("no fast tokenizer (input 1).")
    site = REPORT.coverage[0].site
    coverage = [dataclasses.replace(entry, covered=entry.site != site) for entry in REPORT.coverage]
    rows = [row for row in REPORT.rows if row.site != site]
    lost = dataclasses.replace(REPORT, coverage=coverage, rows=rows)
    assert lost.gate(baseline=REPORT).failures == (f"{site} was measured in the baseline, and is not now.",)


def test_what_cannot_be_compared_is_said():
    inputs = [dataclasses.replace(entry, name="another text") for entry in REPORT.inputs]
    other = dataclasses.replace(scaled(REPORT, "expansion", 9.0), inputs=inputs)
    found = other.gate(baseline=REPORT)
    assert found.failures == ()  # numbers of the weights are compared, and are equal
    assert any("because they depend on the inputs and the inputs differ" in one for one in found.remarks)
    assert scaled(other, "qk_norm", 2.0).gate(baseline=REPORT).failures
    columns = [column for column in other.columns if column.name not in ("qk_norm", "ov_norm")]
    rows = [dataclasses.replace(row, values={**row.values}) for row in other.rows]
    for row in rows:
        for name in ("qk_norm", "ov_norm"):
            row.values.pop(name, None)
    found = dataclasses.replace(other, columns=columns, rows=rows).gate(baseline=REPORT)
    assert found.failures == ("Nothing can be compared with the baseline: no number is in both reports.",)
    assert any("Only the baseline report has ov_norm, qk_norm" in one for one in found.remarks)
    quick = dataclasses.replace(
        scaled(REPORT, "expansion", 9.0), settings={**REPORT.settings, "quick": ["words"]}
    )
    found = quick.gate(baseline=REPORT)
    assert found.failures == ()
    assert any("Not compared, as one audit is a quick one: words." in one for one in found.remarks)


def test_a_baseline_of_another_model_fails():
    (said,) = made(dataclasses.replace(MODEL, heads=(2,))).gate(baseline=REPORT).failures
    assert "The baseline is of another model" in said
    assert "are different models" in said


def test_baselines_that_are_no_reports(tmp_path):
    (tmp_path / "report.json").write_text("{}")
    with pytest.raises(r.errors.ArgumentError, match=r"^baseline: .*has schema None"):
        REPORT.gate(baseline=tmp_path)
    with pytest.raises(r.errors.ArgumentError, match=r"^tolerance: is -1"):
        REPORT.gate(baseline=REPORT, tolerance=-1)
    (tmp_path / "report.json").write_text(json.dumps(REPORT.to_dict()))
    assert REPORT.gate(baseline=tmp_path / "report.json") == r.audits.Gate()


# The command line


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Runs the command in this process: its exit status, and the lines that begin with what it failed on."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["regard", "audit", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as done:
            code = done.code or 0
        printed = capsys.readouterr()
        assert "failed:" not in printed.out
        return code, printed.err.splitlines()

    return command


def failures(lines):
    return [line.removeprefix("failed: ") for line in lines if line.startswith("failed: ")]


def test_a_condition_is_an_exit_status(model, run, tmp_path):
    text = ("--text", "the cat sat", "--checks", "weights,rows")
    code, lines = run(model, *text, "--fail-if", "rows.entropy<-1", "--fail-if", "weights.qk_norm>1e9")
    assert (code, failures(lines)) == (0, [])
    code, lines = run(model, *text, "--fail-if", "rows.entropy<9", "--fail-if", "weights.qk_norm>0")
    assert code == 1
    assert [one.partition(":")[0] for one in failures(lines)] == ["rows.entropy<9", "weights.qk_norm>0"]
    assert (tmp_path / "here" / "audit-tiny" / "report.json").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("--fail-if", "words.expnsion>3"),
            "--fail-if: there is no column 'words.expnsion'; use words.expansion",
        ),
        (
            ("--checks", "rows", "--fail-if", "words.expansion>3"),
            "of the check words, which is not made; add words to --checks",
        ),
        (("--baseline", "missing.json"), "--baseline: missing.json cannot be read"),
        (("--tolerance", "0.1"), "--tolerance: is given without --baseline; leave it out"),
    ],
)
def test_arguments_are_checked_before_a_model_is_loaded(run, arguments, message):
    code, lines = run("/no/such/model", *arguments)
    assert (code, len(lines)) == (2, 1)
    assert message in lines[0]


def test_a_baseline_is_an_exit_status(model, run, tmp_path):
    """Also where the new report takes the place of the old one; what got worse is written all the same."""
    asked = ("--text", "the cat sat", "--checks", "weights,rows")
    assert run(model, *asked) == (0, [])
    kept = tmp_path / "here" / "audit-tiny"
    assert run(model, *asked, "--baseline", kept) == (0, [])
    save(model, gain=3.0)  # the same directory, after more training
    code, lines = run(model, *asked, "--baseline", kept / "report.json")
    said = failures(lines)
    assert code == 1
    assert {one.partition(":")[0] for one in said} >= {"weights.qk_norm", "weights.ov_norm"}
    assert all(" before, " in one and " now, " in one and " of head " in one for one in said)
    assert run(model, *asked, "--baseline", kept) == (0, [])
    save(model, gain=1.5)
