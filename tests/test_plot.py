"""Pictures show the numbers that are there, and results show themselves in notebooks."""

import math
import xml.etree.ElementTree as xml

import pytest
import torch
from torch import nn

import regard as r
from regard.derive.influence import CELLS, Influence

matplotlib = pytest.importorskip("matplotlib")
matplotlib.use("Agg")

from matplotlib import pyplot  # noqa: E402 (after the backend is chosen)

from regard import plot  # noqa: E402

D = torch.float64
X = torch.randn(5, 4, generator=torch.Generator().manual_seed(0), dtype=D)
A = r.Attention(r.Dot(torch.eye(4, dtype=D), torch.eye(4, dtype=D)), support=r.Causal())
TOKENS = ["the", "cat", "<b>", "on", "it"]


@pytest.fixture(autouse=True)
def _closed():
    yield
    pyplot.close("all")


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    return r.audit(model, torch.randn(1, 6, 8), checks=["rows", "influence"])  # one input, no list


def drawn(axes):
    """The numbers of the picture in an axes."""
    axes.figure.canvas.draw()
    return torch.tensor(axes.images[0].get_array().filled(math.nan), dtype=D)


def test_an_influence_map_is_the_jacobian():
    jacobian = r.linearize(A, X)
    axes = plot.influence(jacobian, TOKENS)
    torch.testing.assert_close(drawn(axes), jacobian.influence().plain())
    assert [label.get_text() for label in axes.get_xticklabels()] == TOKENS
    assert float(drawn(axes)[0, 1]) == 0  # causal


def test_laws_are_the_weights():
    torch.testing.assert_close(drawn(plot.laws(A, X)), A.weights(X))
    with pytest.raises(r.errors.ArgumentError, match="x: is missing"):
        plot.laws(A)
    with pytest.raises(r.errors.ArgumentError, match=r"found: has shape \[2, 5, 5\]"):
        plot.laws(torch.ones(2, 5, 5))


def test_a_ladder_has_every_finite_rung():
    certificate = r.certify(A, r.Ball(1.0, tokens=5), r.Frobenius())
    axes = plot.ladder(certificate)
    widths = [bar.get_width() for bar in axes.patches]
    rungs = sorted(rung.value for rung in (certificate, *certificate.others) if math.isfinite(rung.value))
    assert widths == rungs
    assert len(rungs) > 1
    infinite = r.certify(A, r.Whole(), r.Frobenius())
    assert infinite.value == math.inf
    with pytest.raises(r.errors.ArgumentError, match="certificate: is infinite"):
        plot.ladder(infinite)


def test_a_head_map_is_the_report(report):
    found = drawn(plot.head_map(report, "entropy"))
    assert found.shape == (2, 2)
    wanted = [row.values["entropy"] for row in report.heads]
    torch.testing.assert_close(found.flatten().sort().values, torch.tensor(wanted, dtype=D).sort().values)
    with pytest.raises(r.errors.ArgumentError, match=r"entropyy.*use entropy"):
        plot.head_map(report, "entropyy")
    with pytest.raises(r.errors.ArgumentError, match="no head of this report has"):
        plot.head_map(report, "influence_share")


def test_laws_and_words_of_a_report(report):
    assert len(report.inputs) == 1
    site = report.covered[0].site
    entry = next(e for e in report.tables["rows"] if e["site"] == site)
    torch.testing.assert_close(
        drawn(plot.head_laws(report, site, 1)), torch.tensor(entry["laws"][1], dtype=D)
    )
    heights = [bar.get_height() for bar in plot.words(report).patches]
    assert heights == report.tables["influence"][0]["influence"]
    assert len(heights) == 6
    with pytest.raises(r.errors.ArgumentError, match="head: is 7"):
        plot.head_laws(report, site, 7)
    with pytest.raises(r.errors.ArgumentError, match=r"no rows of nowhere on input 0; it has layers\.0"):
        plot.head_laws(report, "nowhere", 0)


def test_a_spectrum_is_sorted():
    jacobian = r.linearize(A, X)
    axes = plot.spectrum(jacobian)
    found = torch.tensor(axes.lines[0].get_ydata(), dtype=D)
    torch.testing.assert_close(found, torch.linalg.svdvals(jacobian.dense()))
    shared = pyplot.subplots()[1]
    assert plot.spectrum(torch.tensor([1.0, 3.0]), axes=shared) is shared
    with pytest.raises(r.errors.ArgumentError, match=r"found: has shape \[2, 2\]"):
        plot.spectrum(torch.ones(2, 2))


# Notebooks


def test_an_influence_is_a_tensor_that_shows_itself():
    found = r.linearize(A, X).influence()
    assert isinstance(found, Influence)
    assert type(found * 2) is type(found[0]) is type(found.plain()) is torch.Tensor
    assert len(repr(found)) < 120
    row, column = divmod(int(found.plain().argmax()), 5)
    assert f"of token {column} on token {row}" in repr(found)
    svg = xml.fromstring(found._repr_html_()).find("svg")
    squares = [child for child in svg if child.get("fill") == "#a63c08"]
    assert len(squares) == int((found.plain() / found.plain().max() >= 0.005).sum())
    wide = Influence.of(torch.rand(200, 130, dtype=D))
    assert len(wide._repr_html_()) < 150 * CELLS**2
    assert "without numbers" in repr(Influence.of(torch.zeros(0, 0)))


def test_certificates_and_costs_show_themselves():
    certificate = r.certify(A, r.Ball(1.0, tokens=5), r.Frobenius())
    shown = xml.fromstring(certificate._repr_html_())
    assert shown.find("p/b").text == r.certificate.round_up(certificate.value)
    assert all(rung.theorem in shown.find("details/pre").text for rung in certificate.others)
    infinite = r.certify(A, r.Whole(), r.Frobenius())
    assert len(repr(infinite)) < 1500
    assert "refused: see ladder()" in repr(infinite)
    cost = r.cost(A, 8)
    table = xml.fromstring(cost._repr_html_()).find("table")
    assert len(table) == len(cost.parts) + 2


def test_tables_of_pandas():
    pandas = pytest.importorskip("pandas")
    found = r.linearize(A, X).influence()
    frame = found.table(TOKENS)
    assert isinstance(frame, pandas.DataFrame)
    assert frame.loc["it", "the"] == float(found[4, 0])
    cost = r.cost(A, 8)
    assert int(cost.frame()["matmul"].sum()) == cost.forward
    assert list(cost.frame()["part"]) == [part.name for part in cost.parts]
    with pytest.raises(r.errors.ArgumentError, match="tokens: has 2 names for 5 tokens"):
        found.table(["a", "b"])


# Certificates as numbers


def test_a_certificate_is_a_number():
    points = torch.randn(3, 4, dtype=D)
    certificate = r.certify(A, r.Neighborhood(points, 0.1), r.Frobenius())
    assert float(certificate) == certificate.value
    moved = certificate.to("meta")
    assert moved.value == certificate.value
    assert moved.domain.points.device.type == "meta"
    assert certificate.domain.points.device.type == "cpu"
    assert certificate.to("cpu").tree() == certificate.tree()


def test_the_domain_may_say_the_width():
    bare, domain = r.Attention(r.Dot()), r.Ball(1.0, tokens=4)
    refused = r.certify(bare, domain, r.Frobenius())
    assert refused.value == math.inf
    assert "Ball(radius, width=d)" in refused.ladder()
    said = r.certify(bare, r.Ball(1.0, tokens=4, width=3), r.Frobenius())
    known = r.certify(bare, r.Ball(1.0, torch.zeros(3, dtype=D), tokens=4), r.Frobenius())
    assert said.value == known.value < math.inf
    assert r.falsify(bare, said.domain, r.Frobenius(), steps=8, restarts=2).value <= said.value
    assert r.Ball(1.0, width=3) == r.Ball(1.0, torch.zeros(3, dtype=D))
    for wrong in (0, 2.5, True):
        with pytest.raises(r.errors.ArgumentError, match="width: is "):
            r.Ball(1.0, width=wrong)
    with pytest.raises(r.errors.ArgumentError, match=r"width: is 2 and the center has shape \[3\]"):
        r.Ball(1.0, torch.zeros(3), width=2)


def test_proofs_about_float32_are_about_the_same_numbers():
    """certify reads a module of float32 as it is, and so does a certificate at a point."""
    module = nn.Linear(4, 4)
    low = r.linearize(module, X.float()).norm_certificate()
    exact = nn.Linear(4, 4).double()
    exact.load_state_dict({name: tensor.double() for name, tensor in module.state_dict().items()})
    assert low.value == r.linearize(exact, X.float().double()).norm_certificate().value
    anywhere = r.certify(module, r.Ball(1.0, tokens=5), r.Frobenius()).value
    assert low.value == pytest.approx(anywhere, rel=1e-6)
    assert module.weight.dtype == torch.float32
    composed = r.maps.Compose((r.maps.Affine(torch.eye(4)), r.maps.Pointwise(r.maps.Relu())))
    assert r.linearize(composed, X.float()).norm_certificate().value < 1.01
    with pytest.raises(r.errors.ArgumentError, match=r"computes in torch\.float32"):
        r.linearize(lambda x: 2 * x, X.float()).norm_certificate()
