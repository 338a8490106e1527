"""regard flow: attention as motion, of simulated particles or of the layers of a trained model."""

from __future__ import annotations

import importlib.util
import shlex
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from regard.errors import ArgumentError, MissingExtraError

if TYPE_CHECKING:
    from regard.audits.inputs import Input
    from regard.flows import Recipe

STOPPED = 130
"""The exit status of a process that was interrupted."""
STEPS = 32
"""How often a layer is repeated, unless another number is asked for."""

HELP = """Attention as motion: particles on a sphere, or tokens under a layer that is repeated.

With MODEL (a directory or a hub id, as for regard audit; without one, all-MiniLM-L6-v2) each layer is
applied to its own output again and again, from the tokens that enter it on a text: clusters, effective rank
and mean cosine after every step. That is an observation on this text, not a theorem.

With any option of a simulation (--beta, --particles, ...) particles begin independent and uniform on the
sphere and follow SA, x' = the projected mean of softmax(β⟨x, y⟩), or with --unnormalized USA. More than 5,000
particles in dimension 2 or 3 are summed by Fourier series in linear time, to --tolerance, proved before each
step.

With --phase the phase diagram of long contexts: β (or γ = β / log n) against the cosine at the start, with
the predicted transition.

--out gets flow.html, which plays from disk, and flow.json with every number.

\b
Examples
  regard flow                                              every layer of the demonstration model
  regard flow ./my-model --layer 3 --text "A text."        one layer of yours
  regard flow ./my-model --attention --steps 64            attention alone, without the feed-forward
  regard flow --beta 4 --particles 300                     clusters on the circle
  regard flow --beta 4 --dimension 2 --particles 1000000   a million
  regard flow --beta 9 --dimension 3 --until 40            the sphere, for longer
  regard flow --beta 9 --until 400 --merge 1e-6            clusters that become single particles
  regard flow --beta 4 --particles 1000000 --resume        go on after Ctrl-C, a crash or a kill
  regard flow --phase gamma --particles 1000000            when do tokens meet?

\b
Exit status
  0 done   2 wrong arguments or files   130 stopped by Ctrl-C: --resume continues
"""


def flow(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A directory or a hub id.", show_default=False)
    ] = None,
    layer: Annotated[
        list[int] | None,
        typer.Option(help="Which layer, from 0; may be repeated.", show_default="every layer"),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TEXT|FILE", help="What the tokens come from; lines are joined.", show_default=False
        ),
    ] = None,
    steps: Annotated[
        int | None, typer.Option(help="How often a layer is repeated.", show_default=str(STEPS))
    ] = None,
    attention: Annotated[
        bool,
        typer.Option(
            "--attention", help="Attention with its norm and residual connection, without the feed-forward."
        ),
    ] = False,
    beta: Annotated[
        float | None, typer.Option(help="Inverse temperature of a simulation.", show_default="4")
    ] = None,
    particles: Annotated[int | None, typer.Option(help="How many particles.", show_default="300")] = None,
    dimension: Annotated[
        int | None,
        typer.Option(help="Dimension of the space around the sphere.", show_default="2, the circle"),
    ] = None,
    until: Annotated[
        float | None, typer.Option(help="The last time.", show_default="20; USA: 20/I₀(β)")
    ] = None,
    scheme: Annotated[
        str | None,
        typer.Option(help="euler, heun, runge-kutta or dormand-prince.", show_default="heun"),
    ] = None,
    step: Annotated[
        float | None,
        typer.Option(
            help="The time step; for dormand-prince, its tolerance.", show_default="0.1, or 1e-6; USA: less"
        ),
    ] = None,
    unnormalized: Annotated[
        bool | None, typer.Option("--unnormalized", help="USA: weights exp(β⟨x, y⟩)/n.", show_default=False)
    ] = None,
    noise: Annotated[
        float | None, typer.Option(help="Adds noise · dW; with --scheme euler.", show_default="0")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Random seed of the start and of the noise.", show_default="0")
    ] = None,
    tolerance: Annotated[
        float | None, typer.Option(help="Tolerance of sums over many particles.", show_default="1e-6")
    ] = None,
    frames: Annotated[int | None, typer.Option(help="How many frames are kept.", show_default="60")] = None,
    merge: Annotated[
        float | None,
        typer.Option(
            help="Particles this close become one, with their weight; looked for at frames.",
            show_default="never",
        ),
    ] = None,
    save: Annotated[
        bool | None,
        typer.Option("--save", help="Keep the last state: trajectory.safetensors.", show_default=False),
    ] = None,
    phase: Annotated[
        str | None,
        typer.Option(metavar="beta|gamma", help="The phase diagram, over β or over γ.", show_default=False),
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue where an earlier run stopped.")] = False,
    out: Annotated[Path, typer.Option(help="The directory for flow.html and flow.json.")] = Path("flow"),
) -> None:
    """Check every argument before the work begins, then do it."""
    from regard._files import check_writable
    from regard.flows.recipe import recipe_of

    if importlib.util.find_spec("jinja2") is None:
        raise MissingExtraError("jinja2", "report")
    simulated = {
        "beta": beta, "particles": particles, "dimension": dimension, "until": until, "scheme": scheme,
        "step": step, "unnormalized": unnormalized, "noise": noise, "seed": seed, "tolerance": tolerance,
        "frames": frames, "merge": merge, "save": save,
    }  # fmt: skip
    given = {name: value for name, value in simulated.items() if value is not None}
    repeated = {"MODEL": model, "--layer": layer, "--text": text, "--steps": steps, "--attention": attention}
    of_model = [name for name, value in repeated.items() if value]
    _refuse_mixed(of_model, given, phase)
    if resume and (phase is not None or not given):
        raise ArgumentError("--resume", "is given, and only a simulation is kept on the way", "leave it out")
    check_writable(out)
    if phase is not None:
        _phase(phase, given, out)
    elif given:
        keep = bool(given.pop("save", False))
        _simulate(recipe_of(given), out, resume, keep)
    else:
        _repeat(model, layer, (text or [], STEPS if steps is None else steps, attention), out)


def _refuse_mixed(of_model: list[str], given: dict[str, Any], phase: str | None) -> None:
    """Options of one kind of flow are not those of another."""
    from regard.flows.recipe import option

    simulated = [option(name) for name in given]
    if of_model and (given or phase is not None):
        other = "--phase" if phase is not None else simulated[0]
        found = f"is given with {other}, which is of a simulation"
        raise ArgumentError(of_model[0], found, "iterate a model, or simulate: one of them at a time")
    unused = [name for name in simulated if name not in ("--particles", "--until")]
    if phase is not None and unused:
        raise ArgumentError(unused[0], "is given with --phase", "it takes --particles and --until alone")
    if phase is not None and phase not in ("beta", "gamma"):
        raise ArgumentError("--phase", f"is {phase}", "give beta or gamma")


def _simulate(recipe: Recipe, out: Path, resume: bool, keep: bool) -> None:
    """A simulation, from where an earlier one stopped if that is asked."""
    from regard.audits.terminal import messages, say
    from regard.flows import Simulation
    from regard.flows import save as save_page

    simulation = Simulation(recipe, out / ".frames", resume=resume)
    for sentence in simulation.announcement():
        say(messages(), sentence)
    try:
        simulation.run()
    except KeyboardInterrupt:
        say(messages(), "stopped; run the same command with --resume to continue")
        raise typer.Exit(STOPPED) from None
    report = simulation.report()
    paths = save_page(report, out, _command())
    simulation.finish(out / "trajectory.safetensors" if keep else None)
    _show(report["words"], paths)


def _repeat(
    model: str | None, numbers: list[int] | None, how: tuple[list[str], int, bool], out: Path
) -> None:
    """Every layer that was asked for, repeated."""
    from regard.audits.terminal import messages, say
    from regard.flows import iterated, layers_of
    from regard.flows import save as save_page
    from regard.flows.layers import report

    texts, steps, attention = how
    if steps < 1:
        raise ArgumentError("--steps", f"is {steps}", "give one or more")
    loaded, item, name = _loaded(model, texts)
    if item.cut:
        say(messages(), f"the text is longer than the model takes: cut to {len(item.tokens)} tokens")
    layers = layers_of(loaded, item, numbers, attention=attention)
    found = [iterated(layer, steps) for layer in _watched(layers)]
    data = report(found, name, item, steps)
    _show(data["words"], save_page(data, out, _command()))


def _loaded(model: str | None, texts: list[str]) -> tuple[Any, Input, str]:
    """The model, the one text as its input, and its name."""
    from regard.audits.inputs import inputs_of, read_texts
    from regard.audits.load import load
    from regard.audits.run import included_sentences
    from regard.audits.terminal import messages

    joined = " ".join(read_texts(texts) if texts else included_sentences())
    console = messages()
    with console.status("loading the model") if console.is_terminal else nullcontext():
        loaded, tokenizer, name = load(model)
    (item,) = inputs_of(loaded, [joined], tokenizer)
    return loaded, item, name


def _watched(layers: list[Any]) -> Any:
    """The layers with a bar on a terminal."""
    from rich.progress import track

    from regard.audits.terminal import messages

    console = messages()
    return track(layers, "layers", console=console, transient=True, disable=not console.is_terminal)


def _phase(axis: str, given: dict[str, Any], out: Path) -> None:
    from regard.flows import Recipe, phases
    from regard.flows import save as save_page

    recipe = Recipe(**{"particles": 1_000_000, **given})
    data = phases(recipe.particles, recipe.until).report(axis)
    _show(data["words"], save_page(data, out, _command()))


def _show(words: list[str], paths: list[Path]) -> None:
    from regard.audits.terminal import output, say

    for sentence in words:
        say(output(), sentence)
    say(output(), f"written: {', '.join(str(path) for path in paths)}")


def _command() -> str:
    """What was typed, for the foot of the page."""
    return shlex.join(["regard", *sys.argv[1:]])
