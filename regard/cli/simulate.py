"""regard simulate: particles on a sphere that attend to each other."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.cli.options import Json, Open, Out, Resume, Seed, announce, print_json
from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.flows import Recipe

STOPPED = 130
"""The exit status of a process that was interrupted."""

HELP = """Particles on a sphere that attend to each other: clusters, their number and energy over time.

Particles begin independent and uniform. Each moves along the mean of all others with weights
softmax(β⟨x, y⟩), projected to the sphere; with --unnormalized the weights are exp(β⟨x, y⟩)/n. More than 5,000
particles in dimension 2 or 3 are summed by Fourier series in linear time, to --tolerance, proved before each
step.

With --phase the phase diagram of long contexts: β (or γ = β / log n) against the cosine at the start, with
the predicted transition. It takes --particles and --until alone.

--out gets flow.html, which plays from disk, and flow.json with every number.

\b
Examples
  regard simulate                               300 particles on the circle
  regard simulate --particles 1000000           a million
  regard simulate --particles 1000000 --resume  continue after Ctrl-C, a kill
  regard simulate --beta 9 --dimension 3        the sphere
  regard simulate --until 400 --merge 1e-6      clusters become particles
  regard simulate --phase gamma                 when do tokens meet?

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped: --resume continues
"""


def simulate(
    beta: Annotated[float | None, typer.Option(help="Inverse temperature.", show_default="4")] = None,
    particles: Annotated[
        int | None, typer.Option(help="How many particles.", show_default="300; --phase: 1000000")
    ] = None,
    dimension: Annotated[
        int | None,
        typer.Option(help="Dimension of the space around the sphere.", show_default="2, the circle"),
    ] = None,
    until: Annotated[
        float | None, typer.Option(help="The last time.", show_default="20; --unnormalized: 20/I₀(β)")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="euler, heun, runge-kutta or dormand-prince.", show_default="heun"),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            help="The time step; for dormand-prince, its tolerance.",
            show_default="0.1, or 1e-6; --unnormalized: less",
        ),
    ] = None,
    unnormalized: Annotated[
        bool | None, typer.Option("--unnormalized", help="Weights exp(β⟨x, y⟩)/n.", show_default=False)
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Adds noise · dW; with --scheme euler.", show_default="0")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Tolerance of sums over many particles.", show_default="1e-6")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="How many frames are saved.", show_default="60")] = None,
    merge: Annotated[
        float | None,
        typer.Option(
            help="Particles this close become one, with the sum of their weights; checked at frames.",
            show_default="never",
        ),
    ] = None,
    save: Annotated[
        bool, typer.Option("--save", help="Write the last state to trajectory.safetensors.")
    ] = False,
    phase: Annotated[
        str | None,
        typer.Option(metavar="beta|gamma", help="The phase diagram, over β or over γ.", show_default=False),
    ] = None,
    seed: Seed = None,
    resume: Resume = False,
    json_: Json = False,
    open_: Open = False,
    out: Out = Path("simulation"),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.audits.terminal import output, say
    from regard.flows import save as save_page
    from regard.flows.recipe import recipe_of

    options = {
        "beta": beta, "particles": particles, "dimension": dimension, "until": until, "scheme": scheme,
        "step": step, "unnormalized": unnormalized, "noise": noise, "seed": seed, "tolerance": tolerance,
        "frames": frames, "merge": merge,
    }  # fmt: skip
    given = {name: value for name, value in options.items() if value is not None}
    command = shlex.join(["regard", *sys.argv[1:]])
    if phase is not None:
        flags = {name: True for name, value in {"resume": resume, "save": save}.items() if value}
        _refuse_with_phase(phase, given | flags)
        check_writable(out)
        data = _phase(phase, given)
        paths = save_page(data, out, command)
    else:
        recipe = recipe_of(given)
        check_writable(out)
        data, paths = _simulated(recipe, out, (resume, save), command)
    if json_:
        print_json(data)
    else:
        for sentence in data["words"]:
            say(output(), sentence)
    announce(paths, json_=json_, open_=open_)


def _refuse_with_phase(phase: str, given: dict[str, Any]) -> None:
    """The phase diagram takes few options."""
    from regard.flows.recipe import option

    if phase not in ("beta", "gamma"):
        raise ArgumentError("--phase", f"is {phase}", "give beta or gamma")
    unused = [option(name) for name in given if name not in ("particles", "until")]
    if unused:
        raise ArgumentError(unused[0], "is given with --phase", "it takes --particles and --until alone")


def _phase(axis: str, given: dict[str, Any]) -> dict[str, Any]:
    from regard.flows import Recipe, phases

    recipe = Recipe(**{"particles": 1_000_000, **given})
    return phases(recipe.particles, recipe.until).report(axis)


def _simulated(
    recipe: Recipe, out: Path, ways: tuple[bool, bool], command: str
) -> tuple[dict[str, Any], list[Path]]:
    """The report of a simulation and its files. ways: whether to continue where an earlier run stopped, and
    whether to save the last state.
    """
    from regard.audits.terminal import messages, say
    from regard.flows import Simulation, save

    resume, keep = ways
    simulation = Simulation(recipe, out / ".frames", resume=resume)
    for sentence in simulation.announcement():
        say(messages(), sentence)
    try:
        simulation.run()
    except KeyboardInterrupt:
        say(messages(), "stopped; run the same command with --resume to continue")
        raise typer.Exit(STOPPED) from None
    data = simulation.report()
    paths = save(data, out, command)
    simulation.finish(out / "trajectory.safetensors" if keep else None)
    return data, paths
