"""flow.html as a reader meets it: in a real browser, with keys and clicks, and texts that try to break it."""

import base64
import json
import math
import os

import pytest
import torch

from regard.flows import Recipe, Simulation, phases
from regard.flows import page as pages
from regard.flows.cells import density
from regard.flows.frames import camera_of, principal_camera
from regard.measure import Measure
from tests.audits.browser import browser, executable

pytest.importorskip("jinja2")

NASTY = "</script><script>alert('x')</script> \"q\" & ' \u2028 مرحبا \u202e `c`"
SHOWN = NASTY.replace("\u202e", "\ufffd")


def simulated(**changes):
    simulation = Simulation(Recipe(**{"beta": 3.0, "particles": 20, "until": 1.0, "frames": 4, **changes}))
    simulation.run()
    return simulation.report()


def layered():
    """Two layers of three tokens whose names try to break out; the second ends early."""
    states = [torch.eye(3, dtype=torch.float64) + k for k in range(3)]
    camera = principal_camera(states)

    def panel(name, count):
        return {
            "name": name,
            "path": NASTY,
            **camera.written(),
            "frames": [camera.frame(Measure(x)) for x in states[:count]],
            "values": {"clusters": [3.0, 2.0, 1.0][:count], "mean cosine": [0.0, math.nan, 1.0][:count]},
            "labels": [[0, 1, 2], [0, 0, 1], [0, 0, 0]][:count],
            "note": NASTY,
        }

    columns = [
        {"name": n, "meaning": NASTY, "logarithmic": n == "clusters"} for n in ("clusters", "mean cosine")
    ]
    return {
        "kind": "layers", "model": NASTY, "text": NASTY, "tokens": [NASTY, "cat", "<b>"], "times": [0, 1, 2],
        "columns": columns, "panels": [panel("layer 0", 3), panel("layer 1", 2)], "words": [NASTY],
    }  # fmt: skip


def test_files_are_written_together(tmp_path):
    found = pages.save(simulated(), tmp_path / "new" / "out", "regard flow <b>")
    assert [path.name for path in found] == ["flow.html", "flow.json"]
    assert sorted(os.listdir(tmp_path / "new" / "out")) == ["flow.html", "flow.json"]
    text = found[0].read_text()
    assert "regard flow &lt;b&gt;" in text
    assert "http" not in text.split('<script type="application/json"')[0].replace("http-equiv", "")
    assert json.loads(found[1].read_text())["kind"] == "simulation"


def test_texts_are_texts():
    text = pages.html(pages.plain(layered()))
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    data = text.split('id="flow">')[1].split("</script>")[0]
    assert json.loads(data)["model"] == SHOWN


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed")
    directory = tmp_path_factory.mktemp("pages")
    with browser(path) as running:

        def show(report, **options):
            pages.save(report, directory)
            return running.open(directory / "flow.html", **options)

        yield show


def pixels(page):
    """How many pixels of the first canvas are drawn."""
    return page.evaluate(
        "(() => { const c = document.querySelector('canvas'); return c.getContext('2d').getImageData(0, 0, "
        "c.width, c.height).data.filter((v, i) => i % 4 === 3 && v > 0).length; })()"
    )


@pytest.mark.parametrize(
    "changes",
    [{}, {"dimension": 3}, {"dimension": 6}, {"particles": 2400, "until": 0.1}],
    ids=["circle", "globe", "ball", "density"],
)
@pytest.mark.parametrize(("width", "dark"), [(1280, False), (390, True)])
def test_a_simulation_is_drawn(opened, changes, width, dark):
    page = opened(simulated(**changes), fragment="#at-2", width=width, dark=dark)
    page.settle()
    assert page.problems == []
    assert len(page.requests) == 1  # the page itself
    assert pixels(page) > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.texts("output") == [f"t = {0.05 if changes.get('until') else 0.5}"]
    page.close()


def test_time_is_moved_by_keys_and_by_the_slider(opened):
    page = opened(simulated(), fragment="#at-1")
    assert page.texts("output") == ["t = 0.25"]
    page.press("ArrowRight")
    assert page.texts("output") == ["t = 0.5"]
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.texts("output") == ["t = 0"]
    before = page.evaluate("document.querySelector('canvas').toDataURL()")
    page.evaluate(
        "(() => { const s = document.querySelector('input[type=range]'); s.value = 4; "
        "s.dispatchEvent(new Event('input')); })()"
    )
    assert page.texts("output") == ["t = 1"]
    assert page.evaluate("document.querySelector('canvas').toDataURL()") != before
    assert page.evaluate("document.querySelectorAll('tr.now th')[0].textContent") == "1"
    page.click(".transport .button")
    page.until("document.querySelector('output').textContent !== 't = 1'")  # it plays from the start
    page.click(".transport .button")
    assert page.problems == []
    page.close()


def test_nothing_moves_for_those_who_want_no_motion(opened):
    page = opened(simulated(), fragment="#at-0")
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-reduced-motion", "value": "reduce"}])
    page.call("Page.navigate", url=page.evaluate("location.href.split('#')[0]"))
    page.until("document.querySelector('output') && document.querySelector('output').textContent")
    page.settle()
    assert page.texts(".transport .button") == ["Play"]
    assert page.texts("output") == ["t = 0"]
    page.close()


def test_layers_are_chosen_and_their_tokens_shown(opened):
    page = opened(layered(), fragment="#at-1")
    assert page.problems == []
    assert page.texts("h1 bdi") == [SHOWN]
    assert page.texts("#tokens bdi") == [SHOWN, "cat", "<b>"]
    assert page.evaluate("[...document.querySelectorAll('#tokens li')].map((o) => o.className)") == [
        "c0",
        "c0",
        "alone",
    ]
    assert page.evaluate("document.querySelector('[aria-pressed=true] b').textContent") == "layer 0"
    page.press("ArrowDown")
    assert (
        page.evaluate("document.querySelector('button.panel[aria-pressed=true] b').textContent") == "layer 1"
    )
    page.press("ArrowRight")  # beyond the end of this layer: its last step stays
    assert page.texts("output") == ["step 2"]
    page.click("button.panel")
    assert (
        page.evaluate("document.querySelector('button.panel[aria-pressed=true] b').textContent") == "layer 0"
    )
    assert page.texts("#tokens li.c0 bdi") == [SHOWN, "cat", "<b>"]
    assert page.problems == []
    page.close()


@pytest.mark.parametrize("axis", ["beta", "gamma"])
def test_the_diagram_has_its_prediction(opened, axis):
    report = phases(1000, 5.0, size=8).report(axis)
    page = opened(report, width=390)
    assert page.problems == []
    assert page.evaluate("document.querySelectorAll('rect.at').length") == 64
    drawn = page.evaluate(
        "document.querySelector('polyline.predicted').getAttribute('points').split(' ').length"
    )
    assert drawn > 100
    page.choose("select", "own")
    assert page.evaluate("document.querySelector('rect.at').style.getPropertyValue('--s')") == (
        f"{report['own'][0][0]:.3f}"
    )
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    page.close()


def test_frames_are_small():
    (panel,) = simulated(particles=2400, until=0.1)["panels"]
    assert all(len(base64.b64decode(frame)) == math.prod(panel["cells"]) for frame in panel["frames"])


def test_bytes_of_a_density_are_its_logarithms():
    """What the page draws is exp(b/255 · log(1 + cells)) - 1, the density, to the last bit of a byte."""
    x = Simulation(Recipe(particles=4000))._begin
    camera = camera_of(4000, 2)
    cells = math.prod(camera.cells)
    drawn = torch.frombuffer(bytearray(base64.b64decode(camera.frame(x))), dtype=torch.uint8).double()
    found = (drawn / 255 * math.log1p(cells)).expm1()
    step = math.log1p(cells) / 255 / 2
    exact = density(x, cells)
    assert bool(((found - exact).abs() <= step * (1 + exact) * 1.05).all())
    assert float(exact.std()) > 0.1
