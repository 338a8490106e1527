"""Simulations: what they are told, what they keep, and that they are the flows of regard.dynamics."""

import base64
import math

import pytest
import torch

import regard as r
from regard._durations import spoken_time
from regard.dynamics import Clusters, Energy, Euler, Heun, MeanCosine, Sphere
from regard.flows import Recipe, Simulation
from regard.flows.cells import DenseRegions, density
from regard.flows.frames import Camera, camera_of, principal_camera
from regard.flows.recipe import recipe_of
from regard.measure import Measure
from tests.dynamics.systems import D, on_sphere


def circle(*angles):
    turns = torch.tensor(angles, dtype=D)
    return Measure(torch.stack([turns.cos(), turns.sin()], -1))


def test_a_simulation_is_the_flow_of_its_recipe():
    recipe = Recipe(beta=3.0, particles=40, dimension=3, until=1.0, step=0.1, frames=5, seed=7)
    simulation = Simulation(recipe)
    simulation.run()
    found = simulation.report()
    trajectory = r.flow(recipe.attention(), recipe.start(), Heun(0.1), 1.0, space=Sphere())
    table = trajectory.observe(Energy(3.0), MeanCosine(), times=5)
    (panel,) = found["panels"]
    assert found["times"] == table.times.tolist()
    for name, own in (("energy", "energy(3)"), ("mean cosine", "mean cosine")):
        assert panel["values"][name] == table[own].tolist()
    assert (panel["view"], panel["drawn"], len(panel["frames"])) == ("globe", 40, 6)
    drawn = torch.frombuffer(bytearray(base64.b64decode(panel["frames"][-1])), dtype=torch.int16)
    torch.testing.assert_close(
        drawn.reshape(40, 4)[:, :3].double() / 32767, trajectory.at(1.0), atol=2e-5, rtol=0
    )
    assert any("rises" in words and "never falls between frames" in words for words in found["words"])


def test_steps_that_are_too_long_are_said():
    recipe = Recipe(beta=4.0, particles=20, unnormalized=True, until=8.0, step=4.0, scheme="euler", frames=2)
    simulation = Simulation(recipe)
    simulation.run()
    assert any("the steps are too long" in words for words in simulation.report()["words"])


def test_what_leaves_the_numbers_is_shown_until_then():
    simulation = Simulation(Recipe(particles=5))
    hole = r.Attention(r.Potential.of(lambda x, y: (x * y).sum(-1) * float("nan")))
    simulation.recipe = type("Hole", (Recipe,), {"attention": lambda self: hole})(particles=5, until=2.0)
    simulation.run()
    found = simulation.report()
    assert found["times"] == [0.0]
    assert found["words"][-1].startswith(
        "It ended early: the flow leaves the range of floating-point numbers between t = 0 and 0.1"
    )


def test_particles_begin_on_the_sphere_and_their_seed_decides():
    recipe = Recipe(particles=50, dimension=4)
    assert float((recipe.start().norm(dim=-1) - 1).abs().max()) < 1e-15
    assert torch.equal(recipe.start(), Recipe(particles=50, dimension=4).start())
    assert not torch.equal(recipe.start(), Recipe(particles=50, dimension=4, seed=1).start())
    assert isinstance(recipe.attention().normalizer, r.Softmax)
    assert recipe.weights == "softmax weights"
    assert Recipe(unnormalized=True).weights == "unnormalized weights"


def test_what_is_not_given_fits():
    """USA is faster by the mass that softmax divides by: its energy rises at every frame for every β."""
    assert recipe_of({"scheme": "dormand-prince"}).step == 1e-6
    assert recipe_of({"beta": 2.0}) == Recipe(beta=2.0)
    for beta in (0.5, 4.0, 9.0, 40.0):
        recipe = recipe_of({"beta": beta, "unnormalized": True, "particles": 12})
        assert recipe.until < 20
        assert recipe.step <= 0.5 * math.exp(-beta)
        short = Recipe(**{**vars(recipe), "until": min(recipe.until, 40 * recipe.step), "frames": 20})
        simulation = Simulation(short)
        simulation.run()
        assert any("never falls between frames" in words for words in simulation.report()["words"])
    assert recipe_of({"unnormalized": True, "until": 1e-3}).step <= 1e-3


def test_evaluations_are_those_of_the_scheme():
    assert Recipe(until=1.0, step=0.1, scheme="euler").evaluations() == 10
    assert Recipe(until=1.0, step=0.1).evaluations() == 20
    assert Recipe(until=1.0, step=0.3, scheme="runge-kutta").evaluations() == 16
    assert Recipe(scheme="dormand-prince", step=1e-6).evaluations() is None


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"particles": 0}, "--particles: is 0; give 1 or more"),
        ({"dimension": 1}, "--dimension: is 1; give 2 or more; the sphere of dimension 1 is two points"),
        ({"until": -1.0}, "--until: is -1.0"),
        ({"until": math.nan}, "--until: is nan"),
        ({"step": 0.0}, "--step: is 0.0"),
        ({"step": 30.0}, "--step: is 30.0, beyond the end 20.0"),
        ({"beta": math.inf}, "--beta: is inf"),
        ({"scheme": "magic"}, "--scheme: is magic; give euler, heun"),
        ({"noise": -1.0}, "--noise: is -1.0"),
        ({"noise": 0.1}, "--noise: is 0.1 with heun; with noise use --scheme euler"),
        ({"seed": -1}, "--seed: is -1"),
        ({"frames": 0}, "--frames: is 0"),
        ({"tolerance": 0.0}, "--tolerance: is 0.0"),
    ],
)
def test_bad_recipes_name_the_option(changes, match):
    with pytest.raises(r.errors.ArgumentError, match=match):
        Recipe(**changes)


def test_one_particle_rests():
    simulation = Simulation(Recipe(particles=1, until=1.0, frames=2))
    simulation.run()
    (panel,) = simulation.report()["panels"]
    assert panel["values"]["clusters"] == [1.0, 1.0, 1.0]
    assert len(set(panel["frames"])) == 1


def test_noise_is_looked_at_where_it_is_known():
    recipe = Recipe(particles=10, until=1.0, step=0.3, scheme="euler", noise=0.2, frames=7)
    simulation = Simulation(recipe)
    simulation.run()
    found = simulation.report()["times"]
    assert found == pytest.approx([0.0, 0.3, 0.6, 0.9, 1.0])
    end = r.flow(
        recipe.attention(), recipe.start(), Euler(0.3), 1.0, space=Sphere(), noise=0.2, seed=recipe.seed
    )
    assert simulation.report()["panels"][0]["values"]["mean cosine"][-1] == pytest.approx(
        MeanCosine().number(end.measure(1.0), end.measure(1.0))
    )


def test_many_particles_go_through_the_series_and_it_is_said():
    simulation = Simulation(Recipe(beta=4.0, particles=20_000, until=0.2, frames=1))
    first, second = simulation.announcement()
    assert first.startswith(
        "20,000 particles, softmax weights with β = 4: 4 evaluations of attention, predicted to take"
    )
    assert "Fourier series" in second
    assert "(--tolerance 1e-06)" in second
    assert simulation.engine == r.engines.Fourier(1e-6)
    assert simulation.plan.bound <= 1e-6
    simulation.run()
    (panel,) = simulation.report()["panels"]
    assert (panel["view"], panel["cells"]) == ("circle", (720,))
    energies = panel["values"]["energy"]
    assert energies[0] < energies[1]
    few = Simulation(Recipe(particles=300))
    assert few.engine is None
    assert len(few.announcement()) == 1
    other = Simulation(Recipe(particles=6000, unnormalized=True)).announcement()
    assert "All pairs are summed, because a Fourier series does not apply" in other[1]


def test_a_stopped_simulation_goes_on_where_it_was(tmp_path, monkeypatch):
    recipe = Recipe(beta=3.0, particles=30, until=2.0, frames=8, scheme="euler", noise=0.1, step=0.05)
    whole = Simulation(recipe)
    whole.run()
    part = Simulation(recipe, tmp_path / "kept")
    look = part._look

    def stop(index, t, measure):
        if index == 4:
            raise KeyboardInterrupt
        look(index, t, measure)

    monkeypatch.setattr(part, "_look", stop)
    with pytest.raises(KeyboardInterrupt):
        part.run()
    assert (tmp_path / "kept" / "trajectory-0.safetensors").exists()
    again = Simulation(recipe, tmp_path / "kept", resume=True)
    seen = []
    monkeypatch.setattr(again, "_look", lambda i, t, m, go=again._look: (seen.append(i), go(i, t, m)))
    again.run()
    assert seen == [4, 5, 6, 7, 8]
    assert again.report() == whole.report()
    with pytest.raises(r.errors.ArgumentError, match=r"of another run \(changed: --beta\)"):
        Simulation(Recipe(**{**vars(recipe), "beta": 2.0}), tmp_path / "kept", resume=True)
    again.finish(tmp_path / "state")
    assert not (tmp_path / "kept").exists()
    kept = r.dynamics.resume(tmp_path / "state", recipe.attention())
    assert torch.equal(kept.at(2.0), whole._trajectory(0)[1].at(2.0))


def test_particles_that_meet_become_one(tmp_path, monkeypatch):
    """Where the distance is small the numbers stay, and fewer are counted; a stop changes nothing."""
    told = {"beta": 3.0, "particles": 24, "until": 24.0, "frames": 24, "dimension": 3, "seed": 2}
    recipe = Recipe(**told, merge=1e-3)
    plain, merged = Simulation(Recipe(**told)), Simulation(recipe)
    plain.run()
    merged.run()
    before, after = (one.report()["panels"][0]["values"] for one in (plain, merged))
    atoms = after["atoms"]
    assert atoms[0] == 24
    assert atoms[-1] < 12
    assert atoms == sorted(atoms, reverse=True)
    for name in ("energy", "mean cosine", "effective rank"):
        assert after[name] == pytest.approx(before[name], rel=1e-3)
    part = Simulation(recipe, tmp_path / "kept")
    united = next(k for k in range(24) if atoms[k + 1] < atoms[k]) + 2
    look = part._look
    monkeypatch.setattr(
        part,
        "_look",
        lambda i, t, m: look(i, t, m) if i < united else (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        part.run()
    assert [path.name for path in (tmp_path / "kept").glob("*.safetensors")] != ["trajectory-0.safetensors"]
    again = Simulation(recipe, tmp_path / "kept", resume=True)
    again.run()
    assert again.report() == merged.report()
    killed = Simulation(recipe, tmp_path / "kept")  # between a frame and the merge that follows it
    unite = killed._unite
    monkeypatch.setattr(
        killed,
        "_unite",
        lambda i, m: unite(i, m) if i < united - 2 else (_ for _ in ()).throw(KeyboardInterrupt),
    )
    with pytest.raises(KeyboardInterrupt):
        killed.run()
    again = Simulation(recipe, tmp_path / "kept", resume=True)
    again.run()
    assert again.report() == merged.report()


# Cells and frames


def test_densities_have_the_mean_one():
    even = circle(*((torch.arange(720, dtype=D) + 0.5) / 720 * 2 * math.pi).tolist())
    torch.testing.assert_close(density(even, 36), torch.ones(36, dtype=D))
    x = Measure(on_sphere(4000, 3))
    found = density(x, 200)
    assert found.shape == (10, 20)
    assert float(found.mean()) == pytest.approx(1.0)
    assert float(found.std()) < 0.4  # cells have one area: 4000/200 particles each, twenty percent about
    with pytest.raises(r.errors.ArgumentError, match="dimension: is 4"):
        density(Measure(on_sphere(5, 4)), 10)


def test_dense_regions_are_counted_around_the_circle_and_over_the_pole():
    assert DenseRegions(12).number(circle(3.1, -3.1, 0.0), None) == 2  # the first two are neighbors
    assert DenseRegions(12).number(circle(0.0, 1.5, 3.0), None) == 3
    near_pole = torch.tensor([[0.1, 0.0, 1.0], [-0.1, 0.0, 1.0], [0.0, 0.0, -1.0]], dtype=D)
    unit = near_pole / near_pole.norm(dim=-1, keepdim=True)
    assert DenseRegions(200).number(Measure(unit), None) == 2
    heavy = Measure(circle(0.0, 1.5).points, torch.tensor([0.99, 0.01], dtype=D).log())
    assert DenseRegions(10).number(heavy, None) == 1


def test_clusters_of_the_circle_are_those_of_all_pairs():
    """Sorting finds the same groups as comparing all pairs does: the same points in a plane of space."""
    for seed in range(6):
        x = on_sphere(60, 2, seed=seed)
        flat = Measure(torch.nn.functional.pad(x, (0, 1)))
        for cosine in (-0.99, 0.0, 0.9, 0.99, 0.999, 0.99999):
            labels = Clusters(cosine).labels(Measure(x))
            assert torch.equal(labels, Clusters(cosine).labels(flat))


def test_cameras():
    assert camera_of(100, 2) == Camera("circle", 100)
    assert camera_of(10**6, 2).cells == (720,)
    assert camera_of(10**6, 3).cells == (64, 128)
    assert camera_of(10**6, 5).drawn == 2000  # some of them
    assert len(base64.b64decode(Camera("globe", 20).frame(Measure(on_sphere(100, 5))))) == 20 * 4 * 2
    states = [torch.diag(torch.tensor([3.0, 2.0, 0.5, 0.1])), torch.eye(4)]
    camera = principal_camera(states)
    assert camera.axes.shape == (4, 2)
    assert float((torch.nn.functional.normalize(states[0], dim=-1).double() @ camera.axes).abs().max()) <= 1


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.2, "less than a second"),
        (1.0, "about 1 second"),
        (80.0, "about 80 seconds"),
        (150, "about 2 minutes"),
        (7300.0, "about 2 hours"),
        (8.64e6, "about 100 days"),
    ],
)
def test_durations_are_said_as_people_do(seconds, words):
    assert spoken_time(seconds) == words
