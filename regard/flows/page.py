"""flow.html and flow.json: a flow as one self-contained page that plays from disk."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard._files import write_together, writing
from regard._pages import content_hash, embedded, environment, markup
from regard._written import plain
from regard.audits.page import TEMPLATES as REPORT

TEMPLATES = Path(__file__).parent / "templates"

READING = {
    "simulation": (
        "Every dot is a token, read as a particle. Each moves towards an average of all, weighted by "
        "exp(β⟨x, y⟩), and stays on the sphere. Particles gather in clusters early; for large β the clusters "
        "then wait for a time of order exp(β) before they meet.",
        "Where particles are many a density is drawn: the mass of a cell over that of the same cell if "
        "particles were spread evenly, on a scale that is bent so that few and many are both seen. Between "
        "two frames the picture is interpolated; the numbers are those of the frames.",
    ),
    "layers": (
        "A trained layer is applied to its own output, again and again, starting from the tokens that enter "
        "it on this text. The model never does this: it shows where the layer alone would take the tokens. "
        "Pictures show the directions of tokens in the plane in which they vary most, for each layer its "
        "own.",
        "It is an observation about one model and one text, not a theorem: other texts may end in other "
        "numbers of clusters. Two tokens are of one cluster if a chain of tokens leads from one to the other "
        "whose neighbors have a cosine of at least 0.99.",
    ),
    "phase": (
        "Tokens with one common cosine keep one, so that n tokens are one number, whose equation is solved "
        "exactly. With β = γ log n a token's weight is spread over all others where γ < 1/(1 − ρ), and on "
        "itself where γ > 1/(1 − ρ): it then rests for a time that grows like a power of n.",
        "The transition is sharp only as n grows: its width, and how far it lies from the limit, fall like "
        "1/log n. That is why a million tokens still show it wide.",
    ),
}


@dataclass(frozen=True)
class Badge:
    """A fact in the head of a page."""

    value: str
    words: str


def save(report: dict[str, Any], directory: Path, command: str = "") -> list[Path]:
    """Write flow.html and flow.json, both or neither, and give their paths.

    Examples:
        >>> import pathlib, tempfile
        >>> from regard.flows import Recipe, Simulation, save
        >>> simulation = Simulation(Recipe(particles=9, until=0.5, frames=2))
        >>> simulation.run()
        >>> with tempfile.TemporaryDirectory() as place:
        ...     [path.name for path in save(simulation.report(), pathlib.Path(place))]
        ['flow.html', 'flow.json']
    """
    data = plain(report)
    written = json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False)
    texts = {"flow.html": html(data, command), "flow.json": written}
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        write_together({directory / name: text.encode() for name, text in texts.items()})
    return [directory / name for name in texts]


def html(data: dict[str, Any], command: str = "") -> str:
    """The whole page as text."""
    style = _asset(REPORT / "report.css") + _asset(TEMPLATES / "flow.css")
    script = _asset(TEMPLATES / "flow.js")
    return str(
        environment(TEMPLATES)
        .get_template("flow.html.j2")
        .render(
            kind=data["kind"],
            title=_title(data),
            heading=_heading(data),
            badges=_badges(data),
            words=data["words"][:1] if data["kind"] == "layers" else data["words"],
            reading=READING[data["kind"]],
            command=command,
            data=markup(embedded(data)),
            style=markup(style),
            style_hash=content_hash(style),
            script=markup(script),
            script_hash=content_hash(script),
        )
    )


def _title(data: dict[str, Any]) -> str:
    if data["kind"] == "layers":
        return str(data["model"])
    if data["kind"] == "phase":
        return "When do tokens meet?"
    recipe = data["recipe"]
    where = {2: "the circle", 3: "the sphere"}.get(recipe["dimension"], "a sphere")
    return f"{recipe['particles']:,} particles on {where}"


def _heading(data: dict[str, Any]) -> str:
    return {
        "layers": "Your layers as flows",
        "phase": "The phase diagram of long contexts",
        "simulation": "Particles that attend to each other",
    }[data["kind"]]


def _badges(data: dict[str, Any]) -> list[Badge]:
    if data["kind"] == "layers":
        count, tokens = len(data["panels"]), len(data["tokens"])
        return [
            Badge(str(count), "layer" if count == 1 else "layers"),
            Badge(str(tokens), "tokens of one text"),
            Badge(str(data["times"][-1]), "steps"),
        ]
    if data["kind"] == "phase":
        return [Badge(f"{data['particles']:,}", "tokens"), Badge(f"{data['until']:g}", "units of time")]
    recipe = data["recipe"]
    noise = [Badge(f"{recipe['noise']:g}", "noise")] if recipe["noise"] else []
    return [
        Badge(recipe["weights"], ""),
        Badge(f"β = {recipe['beta']:g}", ""),
        Badge(f"d = {recipe['dimension']}", ""),
        Badge(recipe["scheme"], f"step {recipe['step']:g}"),
        Badge(f"seed {recipe['seed']}", ""),
        *noise,
    ]


def _asset(path: Path) -> str:
    return path.read_text(encoding="utf-8")
