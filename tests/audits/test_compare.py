"""Two reports side by side: what changed is found, what cannot be compared is said."""

import dataclasses
import io
import json
import math

import pytest
from rich.console import Console

import regard as r
from regard.audits.checkpoint import find
from regard.audits.compare import compare, read
from regard.audits.report import InputEntry
from regard.audits.terminal import output, show, show_comparison
from regard.audits.weights import WeightAudit
from tests.audits.checkpoints import regard, save
from tests.audits.test_page import Model, changed_values, made

pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    audit = WeightAudit(find(str(save(tmp_path_factory.mktemp("model") / "model"))))
    audit.measure()
    return audit.report()


def changed(report, values):
    """The report with other numbers: values by (layer, head)."""

    def one(row):
        return dataclasses.replace(
            row, values={**row.values, "qk_norm": values.get((row.layer, row.head), row.values["qk_norm"])}
        )

    rows = [one(row) for row in report.rows]
    return dataclasses.replace(report, rows=rows)


def write(report, directory):
    directory.mkdir()
    (directory / "report.json").write_text(json.dumps(report.to_dict()))
    return directory


def test_the_largest_change_comes_first(report):
    old = {(row.layer, row.head): row.values["qk_norm"] for row in report.heads}
    found = compare(report, changed(report, {(0, 1): old[0, 1] * 1.01, (1, 3): old[1, 3] + 100.0}))
    moved = found.changed("qk_norm")
    assert [(change.row.layer, change.row.head) for change in moved] == [(1, 3), (0, 1)]
    assert moved[0].after - moved[0].before == pytest.approx(100.0)
    assert found.changed("ov_norm") == ()
    assert found.remarks == found.gained == found.lost == ()


def test_infinities(report):
    endless = changed(report, {(0, 0): math.inf})
    assert compare(endless, endless).changed("qk_norm") == ()
    assert compare(report, endless).changed("qk_norm")[0].moved == math.inf


def test_numbers_that_one_report_lacks(report):
    found = compare(report, changed(report, {(0, 0): math.nan, (1, 1): math.nan}))
    assert found.remarks == ("2 numbers of qk_norm are in one report only and omitted.",)
    assert len(found.changes["qk_norm"]) == len(report.heads) - 2


def with_inputs(report, names):
    return dataclasses.replace(report, inputs=[InputEntry(name, [name]) for name in names])


def test_numbers_of_other_texts_are_not_compared(capsys):
    """Of reports on other texts only what the weights say is set side by side; one line says what is not."""
    before = with_inputs(made(Model(inputs=2)), ("a", "b"))
    after = changed_values(before, lambda name, value: 2 * value)
    other = with_inputs(after, ("a", "another"))
    found = compare(before, other)
    assert {column.name for column in found.columns} >= {"qk_norm", "ov_norm"}
    assert {column.over for column in found.columns} == {"only"}
    (remark,) = found.remarks
    every = len(before.columns)
    assert remark.startswith(f"Omitted: {every - len(found.columns)} of {every} columns, because they depend")
    assert "the inputs differ (2 each)" in remark
    assert "audit both models with the same --text or --text-file" in remark
    show_comparison(found, output())
    printed = capsys.readouterr().out
    assert all(column.title not in printed for column in before.columns if column.over != "only")
    assert compare(before, after).remarks == ()
    assert len(compare(before, after).columns) == every


def test_the_same_text_in_other_tokens_is_another_input():
    before = with_inputs(made(), ("a",))
    after = dataclasses.replace(before, inputs=[InputEntry("a", ["##a"])])
    assert {column.over for column in compare(before, after).columns} == {"only"}


def test_a_partial_report_is_compared_over_the_inputs_that_both_have():
    """The largest of one text is not set beside the largest of two."""
    whole = with_inputs(made(Model(inputs=2)), ("a", "b"))
    column = next(c.name for c in whole.columns if c.over == "largest" and c.scope == "head")
    row = next(row for row in whole.rows if column in row.values)
    inputs = {**row.inputs, column: [row.inputs[column][0], math.nan]}
    values = {**row.values, column: row.inputs[column][0]}
    less = dataclasses.replace(row, inputs=inputs, values=values)
    partial = dataclasses.replace(whole, rows=[less if one is row else one for one in whole.rows])
    longer = dataclasses.replace(row, inputs={**row.inputs, column: [row.inputs[column][0], 1e9]})
    grown = dataclasses.replace(longer, values={**row.values, column: 1e9})
    found = compare(partial, dataclasses.replace(whole, rows=[grown if r is row else r for r in whole.rows]))
    assert found.changed(column) == ()
    assert len(found.changes[column]) == len([r for r in whole.rows if column in r.values])


def test_coverage_and_remarks(report, capsys):
    site = report.coverage[0].site
    coverage = [
        dataclasses.replace(entry, covered=entry.site != site, reason="why") for entry in report.coverage
    ]
    less = dataclasses.replace(
        report,
        coverage=coverage,
        rows=[row for row in report.rows if row.site != site],
        columns=report.columns[:1],
        partial="stopped",
        model={**report.model, "name": "other"},
    )
    found = compare(report, less)
    assert (found.lost, found.gained) == ((site,), ())
    assert compare(less, report).gained == (site,)
    only = "Only the first report has any_input_bound, ov_norm, ov_norm_alone and 2 more; they"
    for words in ("second report is partial: stopped", "names differ: model, then other", only):
        assert any(words in remark for remark in found.remarks), words
    show_comparison(found, output())
    assert f"No longer covered: {site}" in capsys.readouterr().out


def test_other_models_are_refused(report):
    other = dataclasses.replace(report, coverage=report.coverage[:1])
    with pytest.raises(
        r.errors.ArgumentError, match=r"are different models; compare reports of one architecture"
    ):
        compare(report, other)
    heads = dataclasses.replace(
        report, coverage=[dataclasses.replace(entry, heads=3) for entry in report.coverage]
    )
    with pytest.raises(r.errors.ArgumentError, match="different models"):
        compare(report, heads)


def test_files(report, tmp_path):
    directory = write(report, tmp_path / "a")
    assert read(directory).to_dict() == read(directory / "report.json").to_dict() == report.to_dict()
    with pytest.raises(r.errors.ArgumentError, match="cannot be read"):
        read(tmp_path / "missing")
    for text, words in (
        ("{", "is not JSON"),
        ("[]", "is not a report"),
        ('{"schema": 99}', "has schema 99; this version of regard reads"),
        (json.dumps({**report.to_dict(), "rows": 3}), "is not a complete report"),
    ):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(r.errors.ArgumentError, match=words):
            read(tmp_path / "bad.json")


def test_the_command(report, tmp_path):
    first, second = write(report, tmp_path / "a"), write(changed(report, {(1, 3): 123.0}), tmp_path / "b")
    done = regard("compare", first, second)
    assert done.returncode == 0, done.stderr
    assert "head 3 of encoder.layer.1" in done.stdout
    assert "123" in done.stdout
    data = json.loads(regard("compare", first, second, "--json").stdout)
    (change,) = data["columns"].pop("qk_norm")
    assert (change["row"], change["after"]) == ("head 3 of encoder.layer.1.attention.self", 123.0)
    assert not any(data["columns"].values())
    assert "No number changed in 6 columns." in regard("compare", first, first).stdout
    (second / "report.json").write_text('{"schema": 1}')
    done = regard("compare", first, second)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (2, "", 1)
    assert "has schema 1" in done.stderr


def test_a_report_without_numbers_of_layers_shows_no_table_of_them(report):
    for rows, shown in ((report.rows, True), ([], False)):
        console = Console(file=io.StringIO(), width=100)
        unnumbered = [dataclasses.replace(row, values={}) for row in report.rows]
        show(dataclasses.replace(report, rows=rows or unnumbered), [], console)
        assert ("┃" in console.file.getvalue()) is shown
