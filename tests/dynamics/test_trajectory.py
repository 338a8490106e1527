"""Trajectories: lazy, the same whatever is asked, resumed bit for bit, with gradients and clear ends."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

import regard as r
from regard import _progress as progress
from regard.dynamics import (
    BlowUpError,
    Clusters,
    Displacement,
    DormandPrince,
    EffectiveRank,
    Energy,
    Entropy,
    Euclidean,
    Euler,
    Heun,
    Hull,
    Moved,
    Radius,
    Rescaled,
    RungeKutta,
    Sphere,
    resume,
)
from regard.maps import Affine, Compose, Gated, Heads, Map, Normalize, Relu, Residual, ToContext
from regard.measure import Measure
from tests.dynamics.systems import D, normal, on_sphere, sa, usa

ROOT = Path(__file__).parents[2]
X = on_sphere(6, 3)


def heads():
    return Heads(r.Attention(r.Dot(normal(2, 3, 2), normal(2, 3, 2, seed=1))), normal(2, 3, 3, seed=2) / 3)


def test_nothing_is_computed_before_it_is_asked():
    calls = []
    potential = r.Potential.of(lambda x, y: (calls.append(1), (x * y).sum(-1))[1])
    trajectory = r.flow(r.Attention(potential), X, Euler(0.1), 1.0)
    assert not calls
    first = trajectory.at(0.3)
    count = len(calls)
    assert torch.equal(trajectory.at(0.3), first)
    assert len(calls) == count


@pytest.mark.parametrize("scheme", [Euler(0.1), RungeKutta(0.1), DormandPrince(1e-5)])
def test_a_trajectory_is_the_same_whatever_is_asked(scheme):
    one, other = (r.flow(sa(2.0), X, scheme, 1.0, space=Sphere()) for _ in range(2))
    asked = [one.at(t) for t in (0.0, 0.123, 0.5, 1.0)]
    for t in (0.9, 0.35, 0.001):
        other.at(t)
    assert all(torch.equal(other.at(t), y) for t, y in zip((0.0, 0.123, 0.5, 1.0), asked, strict=True))


def test_states_that_nobody_asked_for_may_be_forgotten(monkeypatch):
    whole = r.flow(sa(2.0), X, Euler(0.05), 1.0).at(0.5)
    monkeypatch.setattr(r.dynamics.trajectory, "KEPT", 100)
    trajectory = r.flow(sa(2.0), X, Euler(0.05), 1.0)
    trajectory.at(1.0)
    assert torch.equal(trajectory.at(0.5), whole)
    chosen = r.flow(sa(2.0), X, DormandPrince(1e-6), 1.0)
    expected = chosen.steps()
    monkeypatch.setattr(r.dynamics.trajectory, "KEPT", 1 << 24)
    assert r.flow(sa(2.0), X, DormandPrince(1e-6), 1.0).steps() == expected
    assert len(r.flow(sa(2.0), X, Euler(0.3), 1.0).steps()) == 5


def test_iterate_is_the_map_again_and_again():
    layers = [Residual(heads()), Normalize()]
    trajectory = r.iterate(layers, X, 5)
    expected = X
    for k in range(5):
        expected = layers[k % 2](expected)
    torch.testing.assert_close(trajectory.at(5), expected)
    euler = r.flow(Displacement(sa(1.0)), X, Euler(1.0), 3.0).at(3.0)
    torch.testing.assert_close(r.iterate(sa(1.0), X, 3).at(3), euler)
    with pytest.raises(r.errors.ArgumentError, match=r"t: is 0.5; an iteration is known after whole steps"):
        trajectory.at(0.5)
    assert trajectory.observe(Radius()).times.tolist() == [0, 1, 2, 3, 4, 5]


def test_modules_are_declared():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dtype=D).eval()
    x = normal(5, 4)
    trajectory = r.iterate(r.declare(layer), x, 2)
    with torch.no_grad():
        torch.testing.assert_close(trajectory.at(2), layer(layer(x)))
    with pytest.raises(
        r.errors.ArgumentError, match=r"map: is a TransformerEncoderLayer; give regard.declare"
    ):
        r.iterate(layer, x, 2)


@pytest.mark.parametrize(
    "map",
    [
        sa(2.0),
        usa(0.2),
        Displacement(r.Attention(r.Gaussian(bandwidth=1.0))),
        heads(),
        Compose((Normalize(), heads(), Affine(normal(3, 3)))),
        Residual(Gated(Relu(), normal(3, 4), normal(3, 4, seed=1), normal(4, 3))),
        ToContext(sa(1.0), X),
        r.Attention(r.Dot(), normalizer=r.Sinkhorn(1e-12, 5000)),
        r.maps.Added((sa(1.0), Affine(-torch.eye(3, dtype=D)))),
    ],
)
def test_order_and_copies_of_particles_do_not_matter(map):
    x = X[:4]
    order = torch.tensor([2, 0, 3, 1])
    end = r.flow(map, x, Heun(0.2), 0.6).at(0.5)
    torch.testing.assert_close(r.flow(map, x[order], Heun(0.2), 0.6).at(0.5), end[order])
    copied = r.flow(map, x[[0, 1, 1, 1, 2, 3]], Heun(0.2), 0.6)
    merged = r.flow(map, copied.measure(0.0).merge(), Heun(0.2), 0.6)
    assert merged.at(0.5).shape == (4, 3)
    torch.testing.assert_close(merged.measure(0.5).mean(), copied.measure(0.5).mean(), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(
        merged.measure(0.5).merge().masses().sort().values[-1], torch.tensor(0.5, dtype=D)
    )


def test_marks_travel():
    map = sa(1.0).replace(support=r.Causal())
    order = torch.tensor([3, 1, 0, 2])
    plain = r.flow(map, X[:4], Euler(0.5), 1.0).at(1.0)
    moved = r.flow(map, Measure(X[order], marks=order), Euler(0.5), 1.0)
    torch.testing.assert_close(moved.at(1.0), plain[order])
    assert torch.equal(moved.measure(1.0).marks, order)


def test_batches_flow_side_by_side():
    x = torch.stack([X, on_sphere(6, 3, seed=5)])
    both = r.flow(sa(2.0), x, RungeKutta(0.25), 1.0, space=Sphere()).at(1.0)
    for k in range(2):
        torch.testing.assert_close(
            both[k], r.flow(sa(2.0), x[k], RungeKutta(0.25), 1.0, space=Sphere()).at(1.0)
        )


def test_engines_do_not_matter():
    x = X[:4]
    ends = [
        r.flow(heads(), x, Euler(0.5), 1.0, engine=engine).at(1.0)
        for engine in (None, r.engines.ReferenceEngine(), r.engines.Tiled())
    ]
    torch.testing.assert_close(ends[1], ends[0])
    torch.testing.assert_close(ends[2], ends[0])


@pytest.mark.parametrize(
    ("scheme", "space"),
    [(Euler(0.5), Euclidean()), (RungeKutta(0.5), Sphere()), (Heun(0.5), Rescaled(0.7))],
)
def test_gradients_flow_through(scheme, space):
    w = normal(2, 2) / 2

    def end(y, w):
        y = y / y.norm(dim=-1, keepdim=True)
        return r.flow(r.Attention(r.Dot(scale=0.8), r.Linear(w)), y, scheme, 1.0, space=space).at(0.75)

    torch.autograd.gradcheck(end, (normal(3, 2).requires_grad_(), w.requires_grad_()))


def test_gradients_do_not_depend_on_what_was_computed_without_them():
    x = normal(3, 2).requires_grad_()
    trajectory = r.flow(sa(1.0), x, DormandPrince(1e-6), 1.0)
    with torch.no_grad():
        plain = trajectory.at(1.0)
    trajectory.observe(Radius(), times=2)
    end = trajectory.at(1.0)
    assert not plain.requires_grad
    assert torch.equal(end.detach(), plain)
    (slope,) = torch.autograd.grad(end.sum(), x)
    (again,) = torch.autograd.grad(r.flow(sa(1.0), x, DormandPrince(1e-6), 1.0).at(1.0).sum(), x)
    assert torch.equal(slope, again)
    forward = torch.func.jvp(
        lambda y: r.flow(sa(1.0), y, RungeKutta(0.5), 1.0).at(1.0), (normal(3, 2),), (normal(3, 2, seed=1),)
    )[1]
    reverse = torch.func.vjp(lambda y: r.flow(sa(1.0), y, RungeKutta(0.5), 1.0).at(1.0), normal(3, 2))[1]
    u = normal(3, 2, seed=2)
    torch.testing.assert_close((u * forward).sum(), (reverse(u)[0] * normal(3, 2, seed=1)).sum())


# What can be observed


def test_observables():
    x = torch.tensor([[1.0, 0.0], [0.9999, 0.01], [0.0, 1.0], [0.0, 2.0]], dtype=D)
    mu = Measure(x)
    assert Clusters().number(mu, mu) == 2
    assert Entropy().number(mu, mu) == pytest.approx(torch.tensor(2.0).log().item())
    weighted = Measure(x, torch.tensor([0.25, 0.25, 0.5, 0.0], dtype=D).log())
    assert Entropy().number(weighted, mu) == pytest.approx(torch.tensor(2.0).log().item())
    assert EffectiveRank().number(Measure(x[2:]), mu) == pytest.approx(1.0)
    assert EffectiveRank().number(Measure(torch.eye(3, dtype=D)), mu) == pytest.approx(3.0)
    assert Radius().number(Measure(x[2:]), mu) == pytest.approx(0.5)
    assert Hull(torch.eye(2, dtype=D)).support(mu).tolist() == [1.0, 2.0]
    assert Moved(r.Wasserstein(2)).number(mu.push(lambda p: p + 3.0), mu) == pytest.approx(3 * 2**0.5)
    copies, merged = Measure(x[[0, 0, 2]]), Measure(x[[0, 2]], torch.tensor([2.0, 1.0], dtype=D).log())
    for observable in (Energy(2.0), Radius(), EffectiveRank(), Entropy(), Clusters()):
        assert observable.number(merged, mu) == pytest.approx(observable.number(copies, mu), rel=1e-12)


def test_chains_are_one_cluster():
    angles = torch.linspace(0, 3, 31, dtype=D)[torch.randperm(31)]
    arc = Measure(torch.stack([angles.cos(), angles.sin()], -1))
    assert Clusters(cosine=0.99).number(arc, arc) == 1
    assert Clusters(cosine=0.9999).number(arc, arc) == 31


def test_tables_print():
    table = r.flow(sa(9.0), X, RungeKutta(0.1), 1.0, space=Sphere()).observe(Radius(), Clusters(), times=2)
    lines = str(table).splitlines()
    assert lines[0].split() == ["t", "radius", "clusters"]
    assert [line.split()[0] for line in lines[1:]] == ["0", "0.5", "1"]
    assert len({len(line) for line in lines}) == 1
    assert table["clusters"][0] == 6
    with pytest.raises(r.errors.ArgumentError, match="name: is 'size'; give one of radius, clusters"):
        table["size"]


# Clear ends


@pytest.mark.parametrize("scheme", [Euler(0.5), DormandPrince(1e-3)])
def test_blow_up_ends_with_the_time(scheme):
    """x' = x² in disguise: velocities x² blow up at t = 1."""
    square = Gated(Relu(), *(torch.eye(1, dtype=D),) * 3)
    trajectory = r.flow(square, torch.ones(1, 1, dtype=D), scheme, 20.0)
    with pytest.raises(
        BlowUpError, match=r"leaves the range of floating-point numbers between t = .* shorten until="
    ) as caught:
        trajectory.at(20.0)
    last = caught.value.last
    assert last == pytest.approx(1.0, abs=1e-3) if isinstance(scheme, DormandPrince) else 1 < last < 20
    assert torch.isfinite(trajectory.at(last)).all()
    table = trajectory.observe(Radius(), times=[0.0, last / 2, 19.0])
    assert len(table.rows) == 2
    assert "leaves the range of floating-point numbers" in str(table).splitlines()[-1]
    with pytest.raises(BlowUpError):
        r.iterate(Affine(torch.tensor([[1e200]], dtype=D)), torch.ones(1, 1, dtype=D), 9).at(9)


def test_one_particle_and_one_dimension():
    x = torch.tensor([[2.0]], dtype=D)
    assert float(r.flow(sa(1.0), x, RungeKutta(0.01), 1.0).at(1.0)) == pytest.approx(
        2 * 2.718281828, rel=1e-8
    )
    signs = torch.tensor([[1.0], [-1.0]], dtype=D)
    assert torch.equal(r.flow(sa(1.0), signs, Euler(0.1), 1.0, space=Sphere()).at(1.0), signs)
    table = r.flow(Displacement(sa(1.0)), x, Euler(0.5), 1.0).observe(
        Energy(1.0), Clusters(), Radius(), EffectiveRank(), Entropy(), Hull(x), Moved()
    )
    assert len(table.rows) == 11


class Unknown(Map):
    def __call__(self, x):
        return x


BAD = torch.full((2, 2), float("nan"), dtype=D)
GOOD = {"map": sa(1.0), "x": X, "scheme": Euler(0.1), "until": 1.0}


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"x": BAD}, "x: has 4 non-finite entries"),
        ({"x": torch.zeros(0, 2, dtype=D)}, r"x: has shape \[0, 2\]; give at least one particle"),
        ({"x": torch.zeros(2, 0, dtype=D)}, "x: has shape"),
        ({"x": torch.zeros(3, dtype=D)}, r"x: has shape \[3\]"),
        ({"x": [1.0]}, "x: is a list"),
        ({"x": torch.zeros(3, 2, dtype=torch.long)}, "x: has dtype"),
        ({"x": 2 * X, "space": Sphere()}, "x: has a token of length 2, which is not on the sphere"),
        ({"map": ()}, "map: is an empty sequence"),
        ({"map": [sa(1.0), 3]}, "map: is a int"),
        ({"scheme": 0.1}, "scheme: is 0.1"),
        ({"scheme": DormandPrince(1e-30)}, "scheme: has tolerance 1e-30, and torch.float64 rounds by"),
        ({"until": -1.0}, "until: is -1.0"),
        ({"until": float("inf")}, "until: is inf"),
        ({"space": 3}, "space: is 3"),
        ({"space": Rescaled(torch.eye(2))}, r"v: has shape \[2, 2\] and the points have width 3"),
        ({"noise": -1.0}, "noise: is -1.0"),
        ({"noise": 0.1, "scheme": Heun(0.1)}, "noise: is 0.1 with Heun; with noise take Euler"),
        ({"seed": 0.5}, "seed: is 0.5"),
        ({"engine": "sdpa"}, "engine: is 'sdpa'"),
    ],
)
def test_bad_arguments_are_named(changes, match):
    with pytest.raises(r.errors.ArgumentError, match=match):
        r.flow(**{**GOOD, **changes})


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: Euler(-0.1), "step: is -0.1; give a positive"),
        (lambda: Heun(0.0), "step: is 0.0"),
        (lambda: RungeKutta(float("nan")), "step: is nan"),
        (lambda: DormandPrince(-1.0), "tolerance: is -1.0"),
        (lambda: Rescaled(torch.zeros(2)), "v: has shape"),
        (lambda: r.iterate(sa(1.0), X, 0), "steps: is 0"),
        (lambda: r.iterate(sa(1.0), X, -2), "steps: is -2"),
        (lambda: r.flow(**GOOD).at(1.5), "t: is 1.5; give a time between 0 and 1"),
        (lambda: r.flow(**GOOD).at(-0.5), "t: is -0.5"),
        (lambda: r.flow(**GOOD).at(float("nan")), "t: is nan"),
        (lambda: r.flow(**GOOD, noise=0.1).at(0.05), "t: is 0.05, between two steps"),
        (lambda: r.flow(**GOOD).observe(), "observables: are none"),
        (lambda: r.flow(**GOOD).observe(3), "observables: has a int"),
        (lambda: r.flow(**GOOD).observe(Radius(), times=0), "times: is 0"),
        (lambda: r.flow(**{**GOOD, "x": X.expand(2, 6, 3)}).observe(Radius()), "x: has batch shape"),
        (lambda: r.flow(**{**GOOD, "map": heads().attention}).at(1.0), "map: takes points .* mixed by"),
        (lambda: r.flow(**{**GOOD, "map": sa(1.0).replace(moment=r.SecondMoment())}).at(1.0), "map: has the"),
        (lambda: r.flow(**{**GOOD, "map": Unknown(), "x": Measure(X, X[:, 0])}).at(1.0), "x: has weights"),
        (lambda: r.flow(**GOOD).save("x", every=0), "every: is 0"),
        (lambda: resume("/nowhere/x", sa(1.0)), "path: /nowhere/x is not there"),
        (lambda: resume(__file__, sa(1.0)), "path: .* is not a trajectory"),
        (lambda: Energy(0.0), "beta: is 0"),
        (lambda: Clusters(2.0), "cosine: is 2.0"),
        (lambda: Moved(r.Frobenius()), "norm: is a Frobenius"),
        (lambda: Displacement(3), "map: has a int"),
    ],
)
def test_bad_questions_are_named(call, match):
    with pytest.raises(r.errors.ArgumentError, match=match):
        call()


def test_displacements_keep_shapes():
    map = Displacement(r.Attention(r.Dot(), r.Linear(normal(3, 2))))
    with pytest.raises(r.errors.ArgumentError, match="map: takes"):
        map(X)
    torch.testing.assert_close(Displacement(sa(1.0))(X), sa(1.0)(X) - X)


# On disk


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        (Euler(0.1), {"noise": 0.2, "seed": 5, "space": Sphere()}),
        (RungeKutta(0.1), {"space": Rescaled(torch.eye(3, dtype=D) / 3)}),
        (DormandPrince(1e-6), {}),
    ],
)
def test_what_is_saved_goes_on_bit_for_bit(tmp_path, scheme, options):
    maps = (sa(2.0), usa(0.2))
    x = Measure(X, X[:, 0].sigmoid().log())
    whole = r.flow(maps, x, scheme, 1.0, **options)
    part = r.flow(maps, x, scheme, 1.0, **options)
    part.at(whole.steps()[3])
    path = tmp_path / "run.safetensors"
    part.save(path)
    again = resume(path, maps)
    assert "computed until 0" in repr(again)
    assert again.steps()[-1] == 1.0
    assert torch.equal(again.at(1.0), whole.at(1.0))
    assert torch.equal(again.at(0.0), whole.at(0.0))
    assert torch.equal(again.measure(1.0).log_weights, whole.measure(1.0).log_weights)
    assert again.seed == whole.seed
    with pytest.raises(r.errors.ArgumentError, match="map: is not the one that made this file"):
        resume(path, sa(2.0))
    with pytest.raises(r.errors.ArgumentError, match="map: is not the one that made this file"):
        resume(path, (sa(2.0), usa(0.201)))
    assert [p.name for p in tmp_path.iterdir()] == ["run.safetensors"]


def test_iterations_are_saved(tmp_path):
    map = Residual(heads())
    trajectory = r.iterate(map, X, 6)
    trajectory.save(tmp_path / "a", every=2)
    trajectory.at(5)
    again = resume(tmp_path / "a", map)
    assert "computed until 4" in repr(again)
    assert torch.equal(again.at(6), r.iterate(map, X, 6).at(6))


PROGRAM = """
import sys, time, torch, regard as r
from regard.dynamics import RungeKutta, Sphere
x = torch.load(sys.argv[1] + "/x.pt")
slow = r.flow(r.Attention(r.Dot(scale=2.0)), x, RungeKutta(0.01), 1000.0, space=Sphere())
slow.save(sys.argv[1] + "/run", every=3)
slow.at(1000.0)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="there is no kill -9")
def test_a_killed_flow_goes_on(tmp_path):
    torch.save(X, tmp_path / "x.pt")
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, str(tmp_path)], cwd=ROOT)
    try:
        while not _reached(tmp_path / "run") > 5:
            assert process.poll() is None
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
    finally:
        process.kill()
        process.wait()
    again = resume(tmp_path / "run", sa(2.0))
    reached = again._list()[-1].time
    assert 0.05 < reached < 1000
    whole = r.flow(sa(2.0), X, RungeKutta(0.01), 1000.0, space=Sphere())
    assert torch.equal(again.at(reached), whole.at(reached))
    assert torch.equal(again.at(reached + 0.1), whole.at(reached + 0.1))


def _reached(path):
    """How many steps a file has seen; the file appears whole."""
    return resume(path, sa(2.0))._list()[-1].index if path.exists() else 0


def test_progress_tells_the_simulated_time(monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.setattr(progress, "PATIENCE", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "xterm")
    with progress.Bar(0.0, 2.0) as bar:
        bar.reached(0.5)
    printed = capsys.readouterr()
    assert not printed.out
    assert "t = 0.5 of 2" in printed.err
    r.flow(sa(1.0), X, Euler(0.5), 4.0).observe(Radius(), times=4)
    assert "of 4" in capsys.readouterr().err  # one bar for the whole table, not one for each row
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False, raising=False)
    with progress.Bar(0.0, 2.0) as bar:
        bar.reached(0.5)
    assert not capsys.readouterr().err
