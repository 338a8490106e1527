"""A series: each head along checkpoints, the fastest first, and only where heads are each other's past."""

import base64
import dataclasses
import hashlib
import json
import math

import pytest
import torch

import regard as r
from regard.audits.checkpoint import find
from regard.audits.series import LARGE, Track, log_ratio, runaway, save, series
from regard.audits.series_page import Scale, verdict
from regard.audits.weights import WeightAudit
from tests.audits.checkpoints import model_of, regard, tokenizer
from tests.audits.checkpoints import save as save_checkpoint

pytest.importorskip("transformers")


def grown(directory, factor, layer=1, head=2):
    """A checkpoint in which the queries of one head are longer by a factor."""
    model = model_of("bert")
    with torch.no_grad():
        model.bert.encoder.layer[layer].attention.self.query.weight[8 * head : 8 * head + 8] *= factor
    model.save_pretrained(directory)
    return directory


def report_of(directory):
    audit = WeightAudit(find(str(directory)))
    audit.measure()
    return audit.report()


def test_growth_is_found_where_it_was_put(tmp_path):
    factors = (1.0, 0.5, 8.0, 4.0)  # powers of two, which float32 multiplies exactly
    reports = [report_of(grown(tmp_path / f"step-{i}", factor)) for i, factor in enumerate(factors)]
    found = series(reports, [f"step-{i}" for i in range(4)])
    first = found.ranked("qk_norm")[0]
    assert (first.layer, first.head, first.fast, first.steepest) == (1, 2, True, 1)
    assert first.growth == pytest.approx(math.log(4.0), rel=1e-10)
    assert first.steps == pytest.approx([math.log(0.5), math.log(16.0), math.log(0.5)], rel=1e-10)
    assert all(track.growth == 0 and not track.fast for track in found.ranked("qk_norm")[1:])
    assert all(track.growth == 0 for track in found.ranked("ov_norm"))
    data = json.loads(save(found, tmp_path / "out")[0].read_text())
    assert data["checkpoints"] == ["step-0", "step-1", "step-2", "step-3"]
    assert [entry["fast"] for entry in data["tracks"]].count(True) == 1
    assert data["tracks"][0]["growth"] == pytest.approx(math.log(4.0))


def test_the_page(tmp_path):
    """One file that needs nothing else, with every head, and safe whatever a directory is called."""
    nasty = "<script>alert(1)</script>"
    reports = [report_of(grown(tmp_path / "a", 1.0)), report_of(grown(tmp_path / "b", 3.0))]
    page = save(series(reports, ["first", nasty]), tmp_path / "out")[1].read_text()
    style = page.partition("<style>")[2].partition("</style>")[0]
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    assert f"default-src 'none'; style-src 'sha256-{digest}'; base-uri" in page
    assert "style=" not in page
    assert "<script" not in page
    assert "&lt;script&gt;" in page
    assert page.count("<polyline") == 2 * (8 + 1)  # every head, and the median one
    assert page.count("<title>head") == 2 * (8 + 2 * 8)  # curves, and a square for each checkpoint
    assert "src=" not in page
    assert "http://" not in page.replace("http-equiv", "")
    assert page.count('class="fast"') == 1


def test_other_architectures_are_refused(tmp_path):
    first, heads = (
        report_of(save_checkpoint(tmp_path / "a")),
        report_of(save_checkpoint(tmp_path / "b", num_attention_heads=2)),
    )
    layers = "attention layers of"
    with pytest.raises(
        r.errors.ArgumentError,
        match=rf"a \(BertModel, 2 {layers} 4 heads.*and b \(BertModel, 2 {layers} 2 heads",
    ):
        series([first, heads], ["a", "b"])
    with pytest.raises(r.errors.ArgumentError, match=r"BertModel.*GPT2Model"):
        series([first, report_of(save_checkpoint(tmp_path / "c", "gpt2"))], ["a", "c"])
    with pytest.raises(r.errors.ArgumentError, match="a series has 1 checkpoint"):
        series([first], ["a"])


def test_numbers_at_the_edge():
    assert log_ratio(2.0, 1.0) == -math.log(2.0)
    assert log_ratio(0.0, 1.0) == math.inf
    assert log_ratio(1.0, 0.0) == -math.inf
    assert math.isnan(log_ratio(0.0, 0.0))
    assert not Track("qk_norm", "", 0, 0, (0.0, 0.0)).fast
    assert Track("qk_norm", "", 0, 0, (0.0, 0.0, 1.0)).steepest == 1
    scale = Scale(1.0, 100.0)
    assert [scale.share(value) for value in (0.0, 1.0, 10.0, 100.0, 1e9)] == [0.0, 0.0, 0.5, 1.0, 1.0]
    assert Scale(1.0, 1.0).share(1.0) == 0.0


def test_what_all_heads_do_is_no_sign(tmp_path):
    """All heads double, and one grows by eight more: it alone runs ahead, and the verdict names it."""
    own = [report_of(grown(tmp_path / name, factor)) for name, factor in (("a", 1.0), ("b", 8.0))]
    double = {id(row): {name: 2 * value for name, value in row.values.items()} for row in own[1].rows}
    rows = [dataclasses.replace(row, values=double[id(row)]) for row in own[1].rows]
    found = series([own[0], dataclasses.replace(own[1], rows=rows)], ["a", "b"])
    fast = [track for track in found.tracks if track.fast]
    assert len(fast) == 1
    assert fast[0].ahead == pytest.approx([math.log(8.0)])
    said = verdict(found)
    assert said.names["place"] == fast[0].label
    assert said.numbers["times"] == pytest.approx(8.0)
    calm = series([own[0], own[0]], ["a", "b"])
    assert verdict(calm).text == "No head runs ahead of the others."


def test_the_command(tmp_path):
    for name, factor in (("step-1", 1.0), ("step-2", 4.0)):
        grown(tmp_path / name, factor)
    done = regard("track", tmp_path / "step-1", tmp_path / "step-2", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    assert all("steps after" in line for line in done.stderr.splitlines())  # on a slow machine
    assert "step-1 → step-2" in done.stdout
    assert "QK norm (measured): 1 of 8 heads runs ahead of the median head." in done.stdout
    html, written = sorted((tmp_path / "out").iterdir())
    assert (html.name, written.name) == ("series.html", "series.json")
    assert json.loads(written.read_text())["columns"]["qk_norm"] == "measured"
    assert "Measured: from the weights" in html.read_text()


def logits(head, *values):
    return Track("largest_logit", "layers.0", 0, head, values)


def test_logits_that_run_away():
    """The first checkpoint after which one had grown beyond the limit, and the largest that grew there."""
    calm, large, away = logits(0, 1.0, 2.0, 4.0), logits(1, 9e3, 9e3, 8e3), logits(2, 30.0, 500.0, 5000.0)
    assert runaway([]) is None
    assert runaway([calm, large]) is None  # large from the beginning, and not growing
    assert runaway([calm, large, away]) == (2, away)
    assert runaway([calm, away, logits(3, 1.0, 1.0, 6000.0)])[1].head == 3
    assert runaway([away, logits(3, 1.0, LARGE, 1.0)]) == (2, away)  # at the limit is not beyond it
    assert runaway([away], 400.0) == (1, away)
    assert runaway([logits(0, 1.0, math.nan, 1.0)]) is None


def test_a_series_on_texts_names_the_head_whose_logits_run_away(tmp_path):
    """`regard track A B --text TEXT`, with the queries of one head made longer."""
    for name, factor in (("step-1", 1.0), ("step-2", 2.0**20)):
        grown(tmp_path / name, factor)
        tokenizer().save_pretrained(tmp_path / name)
    steps = [tmp_path / name for name in ("step-1", "step-2")]
    done = regard("track", *steps, "--text", "the cat sat on the red mat", "--out", tmp_path / "out")
    assert done.returncode == 0, done.stderr
    data = json.loads((tmp_path / "out" / "series.json").read_text())
    site = "encoder.layer.1.attention.self"
    assert data["runaway"] == {"checkpoint": "step-2", "site": site, "head": 2}
    said = " ".join(done.stdout.split())
    assert f"Look at head 2 of {site}: its largest logit went from" in said
    assert "float16 ends at 65,504" in said
    values = next(
        track["values"]
        for track in data["tracks"]
        if (track["column"], track["site"], track["head"]) == ("largest_logit", site, 2)
    )
    assert values[1] > LARGE > values[0]
    assert {track["column"] for track in data["tracks"]} == {
        "qk_norm",
        "ov_norm",
        "largest_logit",
        "logit_spread",
    }
