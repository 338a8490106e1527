"""Long runs: states that are forgotten, files between frames, pictures in a notebook, odd fields."""

import xml.etree.ElementTree as xml

import pytest
import torch

import regard as r
from regard._progress import Bar
from regard.dynamics import (
    BlowUpError,
    DormandPrince,
    Euler,
    Heun,
    MeanCosine,
    Radius,
    RungeKutta,
    Sphere,
    resume,
)
from regard.maps import Affine
from regard.measure import Measure
from tests.dynamics.systems import D, normal, on_sphere, sa

X = on_sphere(6, 3)


@pytest.mark.parametrize("scheme", [Euler(0.1), DormandPrince(1e-5)])
def test_a_walk_sees_what_is_asked_and_keeps_two_states(scheme):
    whole = r.flow(sa(2.0), X, scheme, 1.0, space=Sphere())
    trajectory = r.flow(sa(2.0), X, scheme, 1.0, space=Sphere())
    times = [0.0, 0.05, 0.35, 0.35, 1.0]
    for (t, measure), wanted in zip(trajectory.walk(times), times, strict=True):
        assert t == wanted
        assert torch.equal(measure.points, whole.at(wanted))
        assert len(trajectory._list()) <= 3  # the start, and the two around this time
    assert torch.equal(trajectory.at(0.35), whole.at(0.35))  # what was forgotten is computed again
    assert [t for t, _ in r.iterate(sa(1.0), X, 3).walk(3)] == [0, 1, 2, 3]


def test_a_walk_carries_no_graph_and_leaves_gradients_on():
    x = X.clone().requires_grad_()
    for _, measure in r.flow(sa(2.0), x, Euler(0.25), 1.0).walk(2):
        assert not measure.points.requires_grad
        assert torch.is_grad_enabled()
    with pytest.raises(r.errors.ArgumentError, match="times: are not in order"):
        next(r.flow(sa(2.0), X, Euler(0.5), 1.0).walk([0.5, 0.0]))


def test_a_walk_tells_a_bar_that_is_given(monkeypatch):
    told = []
    bar = Bar(0.0, 1.0)
    monkeypatch.setattr(bar, "reached", told.append)
    list(r.flow(sa(2.0), X, Euler(0.25), 1.0).walk([0.0, 1.0], bar))
    assert told == [0.25, 0.5, 0.75, 1.0]


def test_a_file_between_two_steps_goes_on_without_beginning_again(tmp_path):
    """The last step lies beyond the time that was asked for: the one before it is in the file too."""
    trajectory = r.flow(sa(2.0), X, Heun(0.3), 3.0, space=Sphere())
    for t, _ in trajectory.walk([0.0, 1.0, 1.3]):
        if t == 1.3:
            trajectory.save(tmp_path / "run")
    again = resume(tmp_path / "run", sa(2.0))
    assert [node.index for node in again._list()] == [0, 4, 5]
    whole = r.flow(sa(2.0), X, Heun(0.3), 3.0, space=Sphere())
    assert torch.equal(again.at(1.4), whole.at(1.4))
    assert torch.equal(again.at(3.0), whole.at(3.0))
    for _ in range(2):  # what nobody asked for does not pile up in files
        later = resume(tmp_path / "run", sa(2.0))
        list(later.walk([2.0, 2.9]))
        later.save(tmp_path / "run")
    assert [node.index for node in resume(tmp_path / "run", sa(2.0))._list()] == [0, 9, 10]


@pytest.mark.parametrize("x", [X, X[:1, :1] * 0 + 1, X[:, :2], torch.stack([X, X])])
def test_notebooks_show_what_is_computed(x):
    trajectory = r.flow(sa(2.0), x, Euler(0.1), 1.0)
    fresh = trajectory._repr_html_()
    assert "computed until 0 of 1" in fresh
    trajectory.at(0.5)
    shown = xml.fromstring(trajectory._repr_html_())
    assert "computed until 0.5 of 1" in "".join(shown.itertext())
    circles = shown.findall(".//circle")
    assert len(circles) == (0 if x.ndim == 3 else 2 * len(x))
    assert len(repr(trajectory)) < 200


def test_notebooks_show_noise_and_few_of_many():
    many = r.flow(sa(1.0), on_sphere(5000, 3), Euler(0.5), 1.0, noise=0.1, seed=3, space=Sphere())
    text = many._repr_html_()
    assert "noise" in text
    assert "seed 3" in text
    assert text.count("<circle") <= 2 * 400
    assert "5,000 in dimension 3" in text
    assert "steps" not in r.iterate(sa(1.0), X, 2)._repr_html_()


def test_mean_cosine_is_that_of_two_draws():
    x = normal(7, 3)
    unit = x / x.norm(dim=-1, keepdim=True)
    assert MeanCosine().number(Measure(x), None) == pytest.approx(float((unit @ unit.mT).mean()), rel=1e-12)
    copies, merged = Measure(x[[0, 0, 2]]), Measure(x[[0, 2]], torch.tensor([2.0, 1.0], dtype=D).log())
    assert MeanCosine().number(merged, None) == pytest.approx(MeanCosine().number(copies, None), rel=1e-12)
    assert MeanCosine().number(Measure(3 * x[:1].expand(4, 3)), None) == pytest.approx(1.0, rel=1e-14)


# Fields that would leave the sphere


@pytest.mark.parametrize("scheme", [Euler(0.5), RungeKutta(0.5), DormandPrince(1e-3)])
def test_a_radial_field_moves_nothing_on_the_sphere(scheme):
    still = r.flow(Affine(5 * torch.eye(3, dtype=D)), X, scheme, 2.0, space=Sphere()).at(2.0)
    torch.testing.assert_close(still, X, atol=1e-14, rtol=0)


@pytest.mark.parametrize("size", [1e6, 1e100, 1e155, 1e200, 1e300])
def test_a_field_that_is_huge_stays_on_the_sphere(size):
    """Squares of its lengths overflow; the point on the sphere does not."""
    end = r.flow(Affine(size * normal(3, 3, seed=1)), X, Euler(0.5), 1.0, space=Sphere()).at(1.0)
    assert float((end.norm(dim=-1) - 1).abs().max()) < 1e-14


def test_a_field_without_numbers_ends_with_the_time():
    hole = r.Potential.of(lambda x, y: (x * y).sum(-1) * float("nan"))
    with pytest.raises(
        BlowUpError, match=r"leaves the range of floating-point numbers between t = 0 and 0\.25"
    ) as caught:
        r.flow(r.Attention(hole), X, Heun(0.25), 1.0, space=Sphere()).at(1.0)
    assert (caught.value.last, caught.value.beyond) == (0.0, 0.25)
    table = r.flow(r.Attention(hole), X, Heun(0.25), 1.0).observe(Radius(), times=[0.0, 1.0])
    assert len(table.rows) == 1
    assert "leaves the range of floating-point numbers" in table.note


def test_layers_of_regard_declare_themselves():
    from regard.nn import Design, Encoder

    torch.manual_seed(0)
    layer = Encoder(Design(width=8, heads=2), layers=1).layers[0].double().eval()
    x = normal(5, 8)
    with torch.no_grad():
        expected = layer(layer(x))
    torch.testing.assert_close(r.iterate(layer.declare(), x, 2).at(2).detach(), expected)
