"""The report page as a reader meets it: in a real browser, with real clicks,
and with texts that try to break it.
"""

import dataclasses
import json
import math
import os
import random
import re

import pytest

import regard
from regard.audits import card, page, series
from regard.audits.checks import checks
from regard.audits.checks.base import HEAD, LAYER, MEASURED, PROVED, SEARCHED, STACK, STATUSES, Column
from regard.audits.report import Coverage, InputEntry, Report, Row, Skipped
from regard.audits.screen import screen
from regard.audits.series import Series, Track
from regard.errors import ArgumentError
from tests.audits.browser import browser, executable

pytest.importorskip("jinja2")

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "watched", "rain", "."]
NASTY = (
    "</script><script>alert('x')</script> \"quoted\" & 'single' \u2028 \u2029 مرحبا بالعالم \u202e 👩‍👩‍👧 "
    "`code` | pipe"
)
SHOWN = NASTY.replace("\u202e", "\ufffd")
KINDS = ("typo", "replacement", "deletion")
STACK_NAME = "encoder.layer"


@dataclasses.dataclass(frozen=True)
class Model:
    """What a synthetic report is of."""

    heads: tuple[int, ...] = (3, 2)
    inputs: int = 2
    text: str = " ".join(WORDS)
    tokens: tuple[str, ...] = tuple(WORDS)


def pairs(size):
    """A number for every pair of tokens, some of them zero."""
    return [[max(0.0, 0.25 * (i + 1) - 0.125 * j) for j in range(size)] for i in range(size)]


def made(model: Model = Model(), seed: int = 0) -> Report:
    """A report with every column and every table of the current checks, filled with random numbers."""
    draw = random.Random(seed)
    columns = [column for check in checks() for column in check.columns]
    sites = [f"{STACK_NAME}.{layer}.attention" for layer in range(len(model.heads))]
    rows = [
        _row(draw, columns, HEAD, sites[layer], layer, head, model)
        for layer, count in enumerate(model.heads)
        for head in range(count)
    ]
    rows += [_row(draw, columns, LAYER, site, layer, -1, model) for layer, site in enumerate(sites)]
    rows.append(_row(draw, columns, STACK, STACK_NAME, -1, -1, model))
    return Report(
        model={
            "name": "tiny",
            "kind": "TinyModel",
            "parameters": 1234567,
            "attention_parameters": 4321,
            "dtype": "float32",
        },
        settings={"checks": [check.name for check in checks()], "arithmetic": "float64"},
        partial="",
        inputs=[InputEntry(model.text, list(model.tokens)) for _ in range(model.inputs)],
        coverage=[
            Coverage(s, i, "TinyAttention", model.heads[i], True, "", 1e-15, f"{STACK_NAME}.{i}")
            for i, s in enumerate(sites)
        ],
        columns=columns,
        rows=rows,
        tables=_tables(draw, sites, model),
        skipped=[],
    )


def _row(draw, columns, scope, site, layer, head, model):
    own = [column for column in columns if column.scope == scope]
    inputs = {
        c.name: [draw.lognormvariate(1, 1) for _ in range(1 if c.over == "only" else model.inputs)]
        for c in own
    }
    return Row(scope, site, layer, head, {c.name: c.combined(inputs[c.name]) for c in own}, inputs)


def _tables(draw, sites, model):
    size, places = (
        len(model.tokens),
        [(site, layer, i) for i in range(model.inputs) for layer, site in enumerate(sites)],
    )

    def law():
        return [[round(draw.random(), 3) for _ in range(size)] for _ in range(size)]

    def rungs():
        point = [["a local theorem", 2 + draw.random()], ["a loose one", math.inf]]
        return {"ball": [["a general theorem", 1e3 * draw.random() + 10]], "point": point}

    def moves():
        shares = (0.001, 0.01, 0.1, 1.0)
        return [
            {"share": s, "proved": 9 * s + draw.random(), "found": 5 * s, "theorem": "one token moves"}
            for s in shares
        ]

    def reverse(word):
        return model.text.replace(word, word[::-1], 1)

    def change(kind, word):
        return {
            "kind": kind,
            "word": word,
            "text": reverse(word),
            "distances": [1 + draw.random() for _ in range(len(sites) + 1)],
            "moved": draw.random(),
            "size": 3.0,
            "predicted": draw.random(),
        }

    def numbers(count):
        return [draw.lognormvariate(1, 1) for _ in range(count)]

    return {
        "rows": [
            {"site": s, "input": i, "laws": [law() for _ in range(model.heads[layer])]}
            for s, layer, i in places
        ],
        "bounds": [
            {"site": s, "input": i, "radius": 3.0, "heads": [rungs() for _ in range(model.heads[layer])]}
            for s, layer, i in places
        ],
        "one-token": [
            {"site": s, "input": i, "token": 1, "norm": 7.0, "moves": moves()} for s, _, i in places
        ],
        "constants": [
            {"site": s, "input": i, "mlp": numbers(size), "leaving": numbers(size)}
            for s, _, i in places
            if size > 1
        ],
        "geometry": [{"site": s, "input": i, "norms": numbers(size), "sinks": [0]} for s, _, i in places],
        "depth": [
            {
                "site": "",
                "input": i,
                "stacks": {
                    STACK_NAME: {"blocks": numbers(len(sites)), "so_far": numbers(len(sites)), "end": 4.0}
                },
            }
            for i in range(model.inputs)
        ],
        "influence": [
            {"site": "", "input": i, "influence": numbers(size), "map": pairs(size)}
            for i in range(model.inputs)
        ],
        "words": [
            {
                "site": "",
                "input": i,
                "measure": "embedding",
                "unit": "word",
                "words": 3,
                "possible": 3,
                "nearest": [0.58, 1.02],
                "changes": [
                    {"kind": kind, "word": w, "text": reverse(w), "cosine": draw.random()}
                    for kind in KINDS
                    for w in WORDS[1:4]
                ],
                "followed": [change(kind, w) for kind in KINDS for w in WORDS[1:4]],
            }
            for i in range(model.inputs)
        ],
    }


def changed_values(report, change):
    """The report with every row's numbers changed, input by input."""
    columns = {column.name: column for column in report.columns}

    def changed(row):
        inputs = {name: [change(name, value) for value in numbers] for name, numbers in row.inputs.items()}
        values = {name: columns[name].combined(numbers) for name, numbers in inputs.items()}
        return dataclasses.replace(row, values=values, inputs=inputs)

    return dataclasses.replace(report, rows=[changed(row) for row in report.rows])


def weights_only():
    whole = dataclasses.replace(made(Model(inputs=1)), inputs=[])
    names = {"qk_norm", "ov_norm"}
    kept = [column for column in whole.columns if column.name in names]
    rows = [
        dataclasses.replace(
            row, values=dict.fromkeys(names, 1.0 + row.head), inputs={n: [1.0 + row.head] for n in names}
        )
        for row in whole.rows
        if row.scope == HEAD
    ]
    coverage = [dataclasses.replace(entry, disagreement=math.nan) for entry in whole.coverage]
    return dataclasses.replace(
        whole, columns=kept, rows=rows, tables={}, coverage=coverage, settings={"checks": ["weights"]}
    )


def nothing_covered():
    whole = made(Model(heads=(1,)))
    coverage = [
        Coverage(
            "block", -1, "StrangeAttention", 0, False, "no adapter knows this kind of attention", math.nan, ""
        )
    ]
    skipped = [Skipped("words", "", index, "inputs: are not texts; give texts") for index in range(2)]
    return dataclasses.replace(whole, rows=[], tables={}, coverage=coverage, skipped=skipped)


def gaps():
    """Numbers that are missing, infinite or zero, a layer that is not covered, a report that is not whole."""
    whole = made(Model(heads=(3, 2, 1)))
    odd = [math.nan, math.inf, 0.0, 1e-12, 3e9]
    draw = random.Random(5)
    holes = changed_values(whole, lambda name, value: draw.choice(odd))
    lost = dataclasses.replace(
        whole.coverage[1], covered=False, reason="the declaration differs from the module"
    )
    left = [row for row in holes.rows if row.layer != 1]
    tables = {
        name: [entry for entry in found if entry["input"] == 1 or name == "depth"]
        for name, found in whole.tables.items()
    }
    coverage = [whole.coverage[0], lost, whole.coverage[2]]
    return dataclasses.replace(holes, rows=left, coverage=coverage, tables=tables, partial="it was stopped")


def all_missing():
    return changed_values(made(), lambda name, value: math.nan)


def nasty():
    whole = made(Model(text=NASTY + " cat sat on", tokens=(NASTY, "<b>", '"', "👩‍👩‍👧", "ل", "&amp;")))
    coverage = [
        dataclasses.replace(entry, site=NASTY + entry.site, covered=entry.layer == 0, reason=NASTY)
        for entry in whole.coverage
    ]
    skipped = [Skipped(NASTY, NASTY, 0, NASTY)]
    return dataclasses.replace(
        whole, model={**whole.model, "name": NASTY}, coverage=coverage, skipped=skipped, partial=NASTY
    )


def large():
    """Eighty layers of sixty-four heads, without the tables of every head."""
    whole = made(Model(heads=(64,) * 80, inputs=1, tokens=("a", "b")))
    return dataclasses.replace(
        whole, tables={name: found for name, found in whole.tables.items() if name not in ("rows", "bounds")}
    )


REPORTS = {
    "whole": made,
    "one input": lambda: made(Model(inputs=1)),
    "one head": lambda: made(Model(heads=(1,), inputs=1, tokens=("one",))),
    "weights only": weights_only,
    "nothing covered": nothing_covered,
    "gaps": gaps,
    "all missing": all_missing,
    "nasty": nasty,
    "large": large,
}


@pytest.fixture(scope="module")
def chromium():
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed; set CHROMIUM to its path")
    with browser(path) as running:
        yield running


@pytest.fixture
def opened(chromium, tmp_path):
    """Opens a report; afterwards nothing may have complained,
    and nothing but the file may have been asked for.
    """
    pages = []

    def open_report(report, **options):
        path = page.save(report, tmp_path)[1]
        pages.append(chromium.open(path, **options))
        return pages[-1]

    yield open_report
    for one in pages:
        assert one.problems == []
        assert {url.partition("#")[0] for url in one.requests} == {
            (tmp_path / "report.html").resolve().as_uri()
        }
        one.close()


def shown(tab, selector):
    """The numbers of an element, as [what is meant, status, what is printed, the tip, on which side]."""
    read = "(e) => [e.dataset.number, e.dataset.kind, e.textContent, e.dataset.tip, e.dataset.side || '']"
    found = tab.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].map({read})")
    return [(number(value), *others) for value, *others in found]


def number(text):
    return {
        "Infinity": math.inf,
        "inf": math.inf,
        "-Infinity": -math.inf,
        "-inf": -math.inf,
        "NaN": math.nan,
    }.get(text) or float(text)


def numbers_in(value):
    """Every number of a JSON value."""
    if isinstance(value, dict):
        return {n for part in value.values() for n in numbers_in(part)}
    if isinstance(value, list):
        return {n for part in value for n in numbers_in(part)}
    if value in ("inf", "-inf"):
        return {float(value)}
    return {float(value)} if isinstance(value, (int, float)) and not isinstance(value, bool) else set()


@pytest.mark.parametrize("name", REPORTS)
@pytest.mark.parametrize("width", [360, 1400])
def test_every_report_renders(opened, name, width):
    """No complaint, no request, no sideways scrolling, at any width, in both schemes, with panels open."""
    report = REPORTS[name]()
    tab = opened(report, width=width, dark=width == 360)
    addresses = [page.place(row) for row in (report.heads[:1] + report.heads[-1:] + report.layers[-1:])]
    for address in ["", *addresses]:
        tab.go(address)
        assert tab.evaluate("document.documentElement.scrollWidth") <= width
        assert tab.evaluate(
            "document.getElementById('panel').scrollWidth <= document.getElementById('panel').clientWidth"
        )
        assert tab.evaluate("document.getElementById('panel').open") == bool(address)


def test_a_click_opens_a_head(opened):
    """The numbers of the panel are those of the JSON, the address is stable, back and Escape close it."""
    report = made()
    row = next(row for row in report.heads if (row.layer, row.head) == (1, 0))
    tab = opened(report)
    tab.click("a.cell[href='#head-1-0']")
    tab.until("document.getElementById('panel').open")
    assert tab.evaluate("location.hash") == "#head-1-0"
    assert tab.texts("#panel h2") == [f"{row.site}, head 0"]
    for column in (column for column in report.columns if column.scope == HEAD):
        found = shown(tab, f"#panel tr[data-column={column.name}] .number")
        every = row.inputs[column.name]
        assert [entry[0] for entry in found] == [row.values[column.name], every[0]]
        assert [entry[2] for entry in found] == [
            card.three_digits(value, column.side) for value in (row.values[column.name], every[0])
        ]
    tab.press("Escape")
    tab.until("!document.getElementById('panel').open && location.hash === ''")
    tab.evaluate("history.back()")
    tab.until("document.getElementById('panel').open")
    tab.evaluate("history.back()")
    tab.until("!document.getElementById('panel').open")


def test_the_ladder_shows_every_rung(opened):
    report = made()
    tab = opened(report, fragment="#head-0-1")
    rungs = report.tables["bounds"][0]["heads"][1]
    exact = next(row for row in report.heads if (row.layer, row.head) == (0, 1)).inputs["head_constant"][0]
    found = shown(tab, "#panel .ladder .number")
    assert [entry[0] for entry in found] == [exact, *(rung[1] for rung in rungs["point"] + rungs["ball"])]
    assert [entry[1] for entry in found] == [MEASURED, PROVED, PROVED, PROVED]
    assert tab.texts("#panel .ladder .kind") == [MEASURED, PROVED, PROVED, PROVED]
    assert tab.texts("#panel .ladder li:nth-child(3) b") == ["≤ ∞"]


def test_another_input_changes_the_panel(opened):
    report = made()
    tab = opened(report, fragment="#head-0-0")
    tab.choose("#panel select", "1")
    found = shown(tab, "#panel tr[data-column=entropy] .number")
    assert found[1][0] == report.heads[0].inputs["entropy"][1]
    influence = next(entry for entry in report.tables["influence"] if entry["input"] == 1)["influence"]
    assert [entry[0] for entry in shown(tab, "#panel .sentence .number")] == influence


def on_first_input(report, names):
    """The report with columns that only the first input has, as proofs are."""
    nan = math.nan
    rows = [
        dataclasses.replace(
            row,
            inputs={
                name: [own[0], *[nan] * (len(own) - 1)] if name in names else own
                for name, own in row.inputs.items()
            },
        )
        for row in report.rows
    ]
    return changed_values(dataclasses.replace(report, rows=rows), lambda name, value: value)


def test_a_proof_stands_beside_the_number_of_the_same_input(opened):
    """A bound of the first input is shown with its input and with the constant measured there, and not in the
    map beside medians over all inputs.
    """
    limited = ("point_bound", "ball_bound", "word_deviation", "word_attack", "product")
    report = on_first_input(made(Model(inputs=3)), limited)
    tab = opened(report, fragment="#head-1-0")
    row = next(row for row in report.heads if (row.layer, row.head) == (1, 0))
    bound, measured = row.inputs["point_bound"][0], row.inputs["head_constant"][0]
    cell = "#panel tr[data-column=point_bound] td:nth-child(2)"
    assert [entry[0] for entry in shown(tab, f"{cell} .number")] == [bound, measured]
    assert tab.texts(cell)[0].startswith("input 1 ")
    alone = "#panel tr[data-column=head_constant] td:nth-child(2)"
    assert [entry[0] for entry in shown(tab, f"{alone} .number")] == [row.values["head_constant"]]
    assert tab.texts(alone)[0].startswith("median ")
    (stack,) = report.stacks
    product, network = stack.inputs["product"][0], stack.inputs["network_constant"][0]
    found = [entry[0] for entry in shown(tab, "#depth table .number")]
    assert [found[0], *found[2:4]] == [stack.values["network_constant"], product, network]

    def titles():
        return tab.texts("#heads table.map th.layer-title")

    proved = report.column("word_deviation").title
    assert titles()
    assert proved not in titles()
    tab.choose("#heads .controls label:nth-child(2) select", "0")
    assert proved in titles()


def test_keys_alone(opened):
    """Arrow keys move between heads, Enter opens one, the law is read with arrow keys,
    and focus comes back.
    """
    report = made()
    tab = opened(report)
    tab.evaluate("document.querySelector('a.cell[tabindex=\"0\"]').focus()")
    tab.press("ArrowRight")
    tab.press("ArrowDown")
    assert tab.evaluate("document.activeElement.getAttribute('href')") == "#head-1-1"
    assert tab.evaluate("document.getElementById('tip').hidden") is False
    tab.press("Enter")
    tab.until("document.getElementById('panel').open")
    tab.evaluate("document.querySelector('#panel .law').focus()")
    tab.press("ArrowDown")
    law = next(entry for entry in report.tables["rows"] if entry["site"].endswith("1.attention"))["laws"][1]
    assert shown(tab, "#panel .readout .number")[0][0] == law[1][0]
    tab.press("Escape")
    tab.until("!document.getElementById('panel').open")
    assert tab.evaluate("document.activeElement.getAttribute('href')") == "#head-1-1"


def test_the_map_marks_what_to_look_at(opened):
    """The first three of the ranking are marked, by a symbol and not by color alone;
    another column has others.
    """
    report = made(Model(heads=(6, 4)))
    tab = opened(report)
    for name in ("head_branch_constant", "entropy"):
        tab.choose("#heads select", name)
        marked = tab.evaluate(
            "[...document.querySelectorAll('a.cell.first')].map((e) => e.getAttribute('href'))"
        )
        assert all("◆" in text for text in tab.texts("a.cell.first"))
        assert set(marked) == {page.place(row) for row in report.ranked(name)[:3]}
    tab.choose("#heads select", "sink_mass")
    assert tab.texts("a.cell.first") == []
    asked = [check for check in checks() if any(column.scope == HEAD for column in check.columns)]
    assert tab.evaluate("[...document.querySelectorAll('#heads optgroup')].map((e) => e.label)") == [
        check.question for check in asked
    ]


def test_words_are_sorted_and_drawn(opened):
    report = made()
    tab = opened(report)
    tab.click("[data-sort=predicted]")
    values = [entry[0] for entry in shown(tab, ".changes tbody td:last-child .number")]
    changes = [change for entry in report.tables["words"] for change in entry["followed"]]
    every = [change["predicted"] for change in changes]
    assert values == sorted(every, reverse=True)
    tab.click("[data-sort=predicted]")
    assert [entry[0] for entry in shown(tab, ".changes tbody td:last-child .number")] == sorted(every)
    least = min(changes, key=lambda change: change["predicted"])
    tab.click(".changes tbody tr:first-child .choose")
    assert [entry[0] for entry in shown(tab, "#words details .number")] == least["distances"]
    expansion, share = (one[0] for one in shown(tab, ".changes tbody tr:first-child .derived .number"))
    assert expansion == pytest.approx(least["distances"][-1] / least["distances"][0], rel=1e-12)
    assert share == pytest.approx(least["moved"] / least["size"], rel=1e-12)


def test_the_first_screen_is_the_terminal_s(opened):
    """The page prints the blocks of the terminal, in the same order, with the same numbers."""
    report = made()
    tab = opened(report)
    blocks = [block for block in screen(report).blocks if block.kind]
    assert [text.split("\n")[0] for text in tab.texts(".block caption")] == [
        f"{block.title} {block.kind} {block.how}" for block in blocks
    ]
    cells = [cell for block in blocks if block.headings for line in block.lines for cell in line.cells]
    assert tab.texts(".block tbody td.right") == cells


@pytest.mark.parametrize("name", ["whole", "gaps", "weights only"])
def test_every_number_is_in_the_json_and_explained(opened, name):
    """What the page prints is in report.json, rounded to three digits, proved numbers upward;
    each says what it is.
    """
    report = REPORTS[name]()
    tab = opened(report)
    known = numbers_in(report.to_dict())
    found = shown(tab, ".number")
    for address in (page.place(row) for row in report.heads + report.layers):
        tab.go(address)
        found += shown(tab, "#panel .number")
    derived = {entry[0] for entry in shown(tab, ".derived .number")}
    assert len(found) > 10
    for value, status, text, tip, side in found:
        assert math.isnan(value) or value in known or value in derived, value
        assert text == card.three_digits(value, side) or re.fullmatch(r"\d\.\d{3}", text)
        assert status.capitalize() in tip
        assert status in STATUSES or "promise" in tip
        assert (side != "") == (status in (PROVED, SEARCHED))


def test_findings_lead_to_their_place(opened):
    """Alarming findings come first, and each opens the head or the layer it is about."""
    large = {"largest_logit": 77.0, "mlp_branch_constant": 77.0, "promised": 99.0}  # a promise that is kept
    report = changed_values(made(), lambda name, value: large.get(name, value))
    data = report.to_dict()["findings"]
    assert data[0]["level"] == "alarming"
    tab = opened(report)
    assert "alarming." in tab.texts(".verdict")[0]
    assert tab.texts("#summary .finding bdi") == [entry["what"] for entry in data]
    tab.click("#summary .finding a")
    tab.until("document.getElementById('panel').open")
    assert data[0]["what"] in tab.texts("#panel")[0]


def test_the_map_of_influence_reads_its_numbers(opened):
    """A cell for every pair, and the arrow keys read them with the names of both tokens."""
    report = made()
    tab, own = opened(report), report.tables["influence"][0]["map"]
    size = len(own)
    assert tab.evaluate("document.querySelectorAll('#influence svg.law rect:not(.cursor)').length") == size**2
    tab.evaluate("document.querySelector('#influence svg.law').focus()")
    assert shown(tab, "#influence .readout .number")[0][:2] == (own[0][0], "measured")
    tab.press("ArrowDown")
    assert shown(tab, "#influence .readout .number")[0][0] == own[1][0]
    assert tab.texts("#influence .readout bdi") == report.inputs[0].tokens[1::-1]


def test_texts_are_never_markup(opened):
    """A text with a script in it is shown as it is, everywhere, and nothing of it runs."""
    report = nasty()
    tab = opened(report, fragment="#head-0-0")
    assert tab.texts("h1") == [SHOWN]
    assert tab.evaluate("document.querySelectorAll('script').length") == 2
    assert tab.texts("#influence .token bdi") == [SHOWN, *report.inputs[0].tokens[1:]]
    text = page.html(report)
    assert "<script>alert" not in text
    assert text.count("</script") == 2
    assert not re.search("[<>&\u2028\u2029]", page.embed(report.to_dict()))
    assert json.loads(page.embed(report.to_dict()))["model"]["name"] == SHOWN


@pytest.mark.parametrize("dark", [False, True])
def test_text_on_colors_can_be_read(opened, dark):
    """Every cell of the map has a contrast of 4.5 or more with its number, whatever its shade."""
    tab = opened(made(Model(heads=(12,) * 6)), dark=dark)
    contrast = """(() => {
      const ink = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
      const light = (color) => {
        ink.fillStyle = color; ink.fillRect(0, 0, 1, 1);
        const linear = (v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
        const [r, g, b] = [...ink.getImageData(0, 0, 1, 1).data].map((v) => linear(v / 255));
        return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
      };
      return [...document.querySelectorAll('.map .cell:not(.unknown), #influence .token bdi')].map((cell) => {
        const style = getComputedStyle(cell);
        const [a, b] = [light(style.color), light(style.backgroundColor)];
        return Math.max(a, b) / Math.min(a, b);
      });
    })()"""
    found = tab.evaluate(contrast)
    assert len(found) > 80
    assert min(found) >= 4.5


def test_size():
    """Six layers of twelve heads, ten texts of forty tokens, laws and bounds of three of them,
    as an audit keeps them.
    """
    report = made(Model(heads=(12,) * 6, inputs=10, tokens=tuple(WORDS) * 4))
    kept = {
        name: [e for e in found if e["input"] < 3 or name not in ("rows", "bounds")]
        for name, found in report.tables.items()
    }
    assert len(page.html(dataclasses.replace(report, tables=kept)).encode()) < 5_000_000
    short = made(Model(heads=(12,) * 6, inputs=10))
    assert len(page.html(short).encode()) < 5_000_000


def test_policy():
    """The page allows its own script and style by their hashes, and nothing from anywhere else."""
    text = page.html(made())
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', text)[1]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert not re.search(r"""(src|href)=["'](?!#)""", text)
    assert "http:" not in text.replace("http://www.w3.org/2000/svg", "")


def test_files(tmp_path):
    """Three files, each whole: the JSON reads back as the same report, and nothing is left beside them."""
    report = gaps()
    directory = tmp_path / "new" / "folder"
    paths = page.save(report, directory)
    assert [path.name for path in paths] == ["report.json", "report.html", "card.md"]
    assert sorted(path.name for path in directory.iterdir()) == ["card.md", "report.html", "report.json"]
    data = json.loads(paths[0].read_text(encoding="utf-8"))
    assert Report.from_dict(data).to_dict() == data == report.to_dict()


def test_a_failed_write_leaves_the_old_files(tmp_path, monkeypatch):
    paths = page.save(made(), tmp_path)
    before = [path.read_bytes() for path in paths]

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(ArgumentError, match="cannot be written"):
        page.save(gaps(), tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize(
    ("kind", "fails_at"), [("report", 1), ("report", 2), ("report", 3), ("series", 1), ("series", 2)]
)
def test_a_disk_that_fills_up_leaves_no_mixture(tmp_path, monkeypatch, kind, fails_at):
    """Whichever file finds no room, all files are those of the old report, and nothing is beside them."""
    tracks = tuple(Track("qk_norm", "a", 0, head, (1.0, 2.0)) for head in range(2))
    columns = tuple(column for column in made().columns if column.name == "qk_norm")
    old, new = (Series("Bert", (name, "last"), columns, tracks, ()) for name in ("old", "new"))
    saved = {"report": (page.save, made(), gaps()), "series": (series.save, old, new)}
    save, first, second = saved[kind]
    paths, sync, calls = save(first, tmp_path), os.fsync, iter(range(1, 100))
    before = [path.read_bytes() for path in paths]

    def fills_up(descriptor):
        if next(calls) == fails_at:
            raise OSError(28, "No space left on device")
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", fills_up)
    with pytest.raises(ArgumentError, match="No space left on device"):
        save(second, tmp_path)
    assert [path.read_bytes() for path in paths] == before
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ArgumentError, match="cannot be written"):
        page.save(made(), tmp_path / "file")


def test_card():
    """The numbers of the card are in the JSON, what is proved is rounded up,
    and what is not covered is said.
    """
    report = gaps()
    text = card.markdown(report)
    lines = [line.split(" | ") for line in text.splitlines() if line.startswith("| ")][1:]
    entries = card.figures(report)
    assert len(lines) == len(entries) > 3
    known = numbers_in(report.to_dict())
    for (_, value, sort, *_), entry in zip(lines, entries, strict=True):
        assert entry.value in known
        assert value.removeprefix("≤ ") == card.three_digits(entry.value, entry.column.side)
        assert sort.startswith(entry.column.kind)
        assert value.startswith("≤") == (entry.column.kind == PROVED)
    assert "the declaration differs from the module" in text
    assert "it was stopped" in text
    assert "`regard audit tiny`" in text
    for finding in report.to_dict()["findings"]:
        assert card.escape(finding["what"]) in text


def test_a_card_of_nothing():
    text = card.markdown(nothing_covered())
    assert "0 of 1 attention layer covered" in text
    assert "Nothing was measured." in text
    assert "StrangeAttention" not in card.markdown(made())


def test_a_card_is_not_markup():
    text = card.markdown(nasty())
    assert "<script>" not in re.sub(r"\\<", "", re.sub(r"`[^`]*`", "", text))
    assert all(line.count("|") == 5 for line in text.splitlines() if line.startswith("| "))


@pytest.mark.parametrize(
    ("value", "side", "text"),
    [
        (1.8788448, "", "1.88"),
        (1.8711, "≤", "1.88"),
        (1.87, "≤", "1.88"),
        (9.991, "≤", "10.0"),
        (3342.3, "", "3340"),
        (3342.3, "≤", "3350"),
        (226662.9, "", "2.27·10⁵"),
        (226001.0, "≤", "2.27·10⁵"),
        (0.00131, "", "0.00131"),
        (1.31e-7, "", "1.31·10⁻⁷"),
        (math.inf, "≤", "∞"),
        (math.nan, "", "–"),
        (0.0, "≤", "0"),
        (-0.721, "", "−0.721"),
        (99999.0, "", "1.00·10⁵"),
        (0.25, "≤", "0.250"),
        (0.013579, "≥", "0.0135"),
        (1.0, "≥", "1.00"),
        (0.9999, "≥", "0.999"),
    ],
)
def test_three_digits(value, side, text):
    assert card.three_digits(value, side) == text


def test_the_browser_prints_as_python_does(opened):
    """Both ways to print a number agree, on numbers of every size and status; a radius that is proved is
    rounded down.
    """
    draw = random.Random(1)
    kinds = [(MEASURED, True), (PROVED, True), (PROVED, False), (SEARCHED, True), (SEARCHED, False)]
    columns = [
        Column(f"{place}", f"{place}", "A.", kind, HEAD, high) for place, (kind, high) in enumerate(kinds)
    ]
    assert [column.side for column in columns] == ["", "≤", "≥", "≥", "≤"]
    whole = weights_only()
    values = [
        {c.name: math.copysign(10 ** draw.uniform(-9, 9), draw.random() - 0.1) for c in columns}
        for _ in range(60)
    ]
    rows = [
        Row(HEAD, "x", 0, head, own, {name: [value] for name, value in own.items()})
        for head, own in enumerate(values)
    ]
    report = dataclasses.replace(
        whole,
        columns=columns,
        rows=rows,
        coverage=[dataclasses.replace(whole.coverage[0], site="x", heads=60)],
    )
    tab = opened(report)
    for head in range(0, 60, 3):
        tab.go(f"#head-0-{head}")
        found = [entry[2] for entry in shown(tab, "#panel .numbers .number")]
        assert found == [card.three_digits(values[head][column.name], column.side) for column in columns]


def test_a_real_audit(opened):
    """A small model, audited: what the checks of today write is what the page reads."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 50,
        "hidden_size": 12,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "intermediate_size": 16,
    }
    model = transformers.BertModel(transformers.BertConfig(**sizes, max_position_embeddings=32)).eval()
    report = regard.audit(model, [{"input_ids": torch.arange(3, 8).unsqueeze(0)}], name="tiny")
    tab = opened(report, fragment="#head-1-2")
    row = next(row for row in report.heads if (row.layer, row.head) == (1, 2))
    rungs = next(entry for entry in report.tables["bounds"] if entry["site"] == row.site)["heads"][2]
    values = [row.values["head_constant"], *(value for _, value, _ in rungs["point"] + rungs["ball"])]
    assert [entry[0] for entry in shown(tab, "#panel .ladder .number")] == values
    assert len(tab.texts("#panel .law text")) >= 2 * len(report.inputs[0].tokens)
    tab.go("#layer-1")
    moves = next(entry for entry in report.tables["one-token"] if entry["site"] == row.site)["moves"]
    assert [entry[0] for entry in shown(tab, "#panel td:nth-child(2) .number[data-kind=proved]")][-4:] == [
        move["proved"] for move in moves
    ]
    assert tab.texts("nav li:not([hidden])") == [
        "Summary",
        "Heads",
        "Depth",
        "Geometry",
        "Influence",
        "Coverage",
        "Reading",
    ]
