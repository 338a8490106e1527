"""The pages of docs/theorems, one for each theorem of `regard.theorems.THEOREMS`, from what the code says of
itself.

python docs/make_theorems.py              writes docs/theorems/<name>.md and docs/theorems/index.md
python docs/make_theorems.py --pictures   draws docs/theorems/pictures/<name>.svg too, which takes a minute
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import unicodedata
from collections.abc import Callable
from pathlib import Path

import torch

sys.path.insert(
    0, str(Path(__file__).resolve().parents[1])
)  # run as a script, the root of the repository is not on the path

import regard
from examples.plot import Line, chart
from regard.proofs.citation import bibliography
from regard.proofs.subject import Head, MultiHead

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "docs" / "theorems"
NOTICE = "<!-- written by docs/make_theorems.py: change the theorem's file and run it again -->"
COMMANDS = {
    "{": "lbrace",
    "}": "rbrace",
    ",": "thinspace",
    ";": "thickspace",
    "!": "negthinspace",
    "|": "Vert",
    "#": "sharp",
}
"""Commands of one sign and their names in letters: Markdown takes a backslash before a sign for its own."""


# Text


def prose(text: str) -> str:
    """TeX and words as Markdown: one line a paragraph, displayed formulas on lines of their own,
    names of theorems as links.
    """
    pieces = re.split(r"\$\$(.*?)\$\$", text.strip(), flags=re.DOTALL)
    blocks = [
        block
        for k, piece in enumerate(pieces)
        for block in ([_display(piece)] if k % 2 else map(_words, re.split(r"\n\s*\n", piece)))
    ]
    return "\n\n".join(block for block in blocks if block)


def tex(formula: str) -> str:
    """The same formula, safe in Markdown."""
    formula = re.sub(r"\\([{},;!|#])", lambda found: f"\\{COMMANDS[found[1]]} ", formula)
    return re.sub(r"\s+", " ", formula).replace("<", r"\lt ").replace("*", r"\ast ").strip()


def _display(formula: str) -> str:
    """A sign that closes the sentence stays inside."""
    return f"$$\n{tex(formula)}\n$$"


def _words(text: str) -> str:
    pieces = re.split(r"\$(.*?)\$", " ".join(text.split()))
    return (
        "".join(f"${tex(piece)}$" if k % 2 else _linked(piece) for k, piece in enumerate(pieces))
        .lstrip(".,; ")
        .strip()
    )


def _linked(text: str) -> str:
    return re.sub(
        r"`(\w+)`",
        lambda found: f"[`{found[1]}`]({found[1]}.md)" if found[1] in regard.theorems.THEOREMS else found[0],
        text,
    )


def title(theorem: regard.theorems.Theorem) -> str:
    """The title with a capital letter."""
    return theorem.title[0].upper() + theorem.title[1:]


# Sources


def field(entry: str, name: str) -> str:
    """A field of a BibTeX entry, accents as letters."""
    found = re.search(rf"\b{name} = \{{(.*)\}},?$", entry, flags=re.MULTILINE)
    return "" if found is None else plain(found[1])


def plain(text: str) -> str:
    """BibTeX without braces and commands."""
    marks = {"'": "\u0301", '"': "\u0308", "c": "\u0327", "u": "\u0306", "`": "\u0300"}
    text = re.sub(r"\{\\(['\"`cu])\{?(\w)\}?\}", lambda found: found[2] + marks[found[1]], text).replace(
        r"{\L}", "Ł"
    )
    return unicodedata.normalize(
        "NFC", re.sub(r"[{}]", "", text).replace(r"\ell", "ℓ").replace("$", "")
    ).replace("_p", "ₚ")


def reference(key: str) -> str:
    """Authors, title, place and year of a source."""
    entry = bibliography()[key]
    names = [" ".join(reversed(name.split(", "))) for name in field(entry, "author").split(" and ")]
    authors = " and ".join(part for part in (", ".join(names[:-1]), names[-1]) if part)
    place = field(entry, "journal") or field(entry, "booktitle") or field(entry, "publisher")
    note = field(entry, "note")
    return (
        f"{authors}, *{field(entry, 'title')}*, {place} "
        f"({field(entry, 'year')}){f', {note}' if note else ''}."
    )


def sources(theorem: regard.theorems.Theorem) -> str:
    """What the theorem cites, each on its line."""
    if not theorem.source:
        return "The proof above is all there is."
    keys = re.findall(r"\b[a-z]+\d{4}[a-z]*\b", theorem.source)
    return "\n".join(f"- `{key}`: {reference(key)}" for key in keys) + f"\n\nCited as {theorem.source}."


# Pages


def path_of(theorem: regard.theorems.Theorem) -> str:
    return f"regard/proofs/theorems/{theorem.name}.py"


def tests_of(theorem: regard.theorems.Theorem) -> str:
    return f"tests/theorems/test_{theorem.name}.py"


def verbs(theorem: regard.theorems.Theorem) -> list[str]:
    """The public functions that use a theorem by its name."""
    module = f"regard.proofs.theorems.{theorem.name}"
    rooms = (regard, regard.theorems, regard.proofs)
    found = {name: f"{room.__name__}.{name}" for room in reversed(rooms) for name in room.__all__}
    values = [
        (path, vars(sys.modules[path.rpartition(".")[0]])[name]) for name, path in sorted(found.items())
    ]
    functions = [(path, value) for path, value in values if inspect.isfunction(value)]
    return [
        path
        for path, value in functions
        if value.__module__ == module or f"{theorem.name}.THEOREM" in inspect.getsource(value)
    ]


def uses(theorem: regard.theorems.Theorem) -> str:
    """What asks for the theorem: a line for each of its rules, or the functions that use it."""
    rules = [
        f"- `{'certify' if quantity == 'constant' else 'deviation'}`: "
        f"{', '.join(f'`{kind.__name__}`' for kind in kinds)}"
        for quantity, kinds, _ in theorem.rules
    ]
    rules = list(dict.fromkeys(rules))
    return "\n".join(rules + [f"- `{name}`" for name in verbs(theorem)])


def picture(theorem: regard.theorems.Theorem) -> str:
    """The picture of a theorem that has one, with its caption."""
    if theorem.name not in PICTURES:
        return ""
    caption = " ".join((PICTURES[theorem.name].__doc__ or "").split())
    return (
        f"## How tight it is\n\n![the bound and what was seen](pictures/{theorem.name}.svg)\n\n{caption}\n\n"
    )


def page(theorem: regard.theorems.Theorem) -> str:
    """The page of one theorem."""
    needs = "\n".join(f"- {hypothesis}" for hypothesis in theorem.hypotheses) or "None."
    return (
        f"{NOTICE}\n\n# {title(theorem)}\n\n`{theorem.name}`, one of the [theorems](index.md)\n\n"
        f"## Statement\n\n{prose(theorem.statement)}\n\n## Hypotheses\n\n{needs}\n\n## Proof\n\n"
        f"{prose(theorem.proof)}\n\n"
        f"{picture(theorem)}## Source\n\n{sources(theorem)}\n\n"
        f"## In the code\n\nAsked by (what is bounded, on what domain, in what norm):\n\n{uses(theorem)}\n\n"
        f"File: [{path_of(theorem)}](../../{path_of(theorem)}). Tests: "
        f"[{tests_of(theorem)}](../../{tests_of(theorem)}).\n"
    )


def room(theorem: regard.theorems.Theorem) -> str:
    """What a theorem is about, for the index."""
    if not theorem.rules:
        return "Laws, kernels and approximations"
    first = theorem.rules[0][1][0]
    if first in (Head, MultiHead):
        near = all(issubclass(kinds[1], regard.domains.Near) for _, kinds, _ in theorem.rules)
        return "Attention near a given input" if near else "Attention on a set of tokens"
    return (
        "Maps around attention" if issubclass(first, regard.maps.Map) else "Laws, kernels and approximations"
    )


def row(theorem: regard.theorems.Theorem) -> str:
    """A line of the index."""
    what = sorted({quantity for quantity, _, _ in theorem.rules}) or ["other"]
    norms = list(dict.fromkeys(kinds[2].__name__ for _, kinds, _ in theorem.rules))
    named = ", ".join({"Norm": "any", "SequenceNorm": "any of sequences"}.get(name, name) for name in norms)
    source = theorem.source.replace("), (", "; ").strip("()")
    return (
        f"| [{theorem.name}]({theorem.name}.md) | {title(theorem)} | {', '.join(what)} | {named} | {source} |"
    )


def index() -> str:
    """All theorems, by what they are about."""
    text = (
        f"{NOTICE}\n\n# Theorems\n\nThe {len(regard.theorems.THEOREMS)} theorems that certificates rest "
        "on: statement, hypotheses, proof, source. "
    )
    text += "How they are used is on [How to read a certificate](../certificates.md).\n\n"
    text += (
        "On the pages, a `Head` is one head of an attention and a `MultiHead` all of them with what mixes "
        "them; `TokenSet` is `Whole`, "
    )
    text += "`Ball` or `Shell`, `Near` is `Neighborhood`, `Radii`, `Box` or `Hull`.\n"
    for name in ROOMS:
        rows = "\n".join(row(theorem) for theorem in ordered() if room(theorem) == name)
        text += (
            f"\n## {name}\n\n| name | title | bounds | norm | source |\n| --- | "
            f"--- | --- | --- | --- |\n{rows}\n"
        )
    return text


ROOMS = (
    "Attention on a set of tokens",
    "Attention near a given input",
    "Maps around attention",
    "Laws, kernels and approximations",
)


def ordered() -> list[regard.theorems.Theorem]:
    """Theorems by name, whatever the order in which they were loaded."""
    return [regard.theorems.THEOREMS[name] for name in sorted(regard.theorems.THEOREMS)]


def pages() -> dict[str, str]:
    """Every page by the name of its file."""
    return {"index.md": index()} | {f"{theorem.name}.md": page(theorem) for theorem in ordered()}


# Pictures

Draw = Callable[[], str]
PICTURES: dict[str, Draw] = {}
SEEN = "seen by a search"


def drawn(draw: Draw) -> Draw:
    """Register the picture of the theorem of this name."""
    PICTURES[draw.__name__] = draw
    return draw


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def head(width: int) -> regard.Attention:
    """A dot-product head with random projections."""
    w_q, w_k, w_v = normal(3, width, width) / width**0.5
    return regard.Attention(regard.Dot(w_q, w_k), regard.Linear(w_v))


def rung(certificate: regard.Certificate, name: str) -> float:
    """The bound of one theorem, from a ladder."""
    cited = regard.theorems.THEOREMS[name].cited
    return next(one.value for one in (certificate, *certificate.others) if one.theorem.split(":")[0] == cited)


def ladder(
    names: dict[str, str], ask: Callable[[float], regard.Certificate], values: list[float]
) -> list[Line]:
    """A line for each theorem, over the values that are asked for; names say whose it is."""
    found = [(value, ask(value)) for value in values]
    return [
        Line(name, [(value, rung(made, name)) for value, made in found], kind) for name, kind in names.items()
    ]


def rising(look: Callable[[float], float], values: list[float]) -> Line:
    """What a search finds; what is seen in a small set is in every larger one."""
    best, points = 0.0, []
    for value in values:
        best = max(best, look(value))
        points.append((value, best))
    return Line(SEEN, points, "seen")


def decades(low: int, high: int, each: int = 4) -> list[float]:
    return [10 ** (k / each) for k in range(low * each, high * each + 1)]


@drawn
def token_max() -> str:
    """Six tokens of width 3 in a ball about 0, random projections.

    The certificate does not know how many tokens there are.
    """
    attention, norm, radii = head(3), regard.TokenMax(), decades(-1, 1)
    proved = ladder(
        {"token_max": "ours"}, lambda radius: regard.certify(attention, regard.Ball(radius), norm), radii
    )
    seen = rising(
        lambda radius: regard.falsify(attention, regard.Ball(radius, tokens=6), norm, restarts=4).value, radii
    )
    return chart("TokenMax norm on a ball", "radius of the ball", [*proved, seen], above="constant")


@drawn
def frobenius() -> str:
    """Tokens of width 3 in the unit ball about 0, random projections.

    The published bound grows like √n; here √N stays below e^(osc/2).
    """
    attention, norm, counts = (
        head(3),
        regard.Frobenius(),
        [2.0, 4, 8, 16, 32, 64],
    )  # every token twice stretches as much
    names = {"frobenius": "ours", "castin_general": "published"}
    proved = ladder(names, lambda n: regard.certify(attention, regard.Ball(1.0, tokens=int(n)), norm), counts)
    seen = rising(
        lambda n: (
            regard.falsify(attention, regard.Ball(1.0, tokens=int(n)), norm, restarts=3, steps=20).value
        ),
        counts,
    )
    return chart("Frobenius norm on the unit ball", "number of tokens", [*proved, seen], above="constant")


@drawn
def wasserstein() -> str:
    """Laws on a ball about 0, width 3, random projections; seen with six tokens.

    The bound of W₁ is exponential, that of W∞ is not.
    """
    radii, first = decades(-1, 0, 6), regard.Wasserstein(1.0)
    published = ladder(
        {"castin_mean_field": "published"},
        lambda radius: regard.certify(head(3), regard.Ball(radius), first),
        radii,
    )
    lines = [*published, *of_order("W₁", 1.0, "ours", radii), *of_order("W∞", torch.inf, "other", radii)]
    return chart("Wasserstein distances on a ball", "radius of the ball", lines, above="constant")


def of_order(name: str, p: float, kind: str, radii: list[float]) -> list[Line]:
    """The bound in one distance, and what a search finds in the same."""
    attention, norm = head(3), regard.Wasserstein(p)
    (proved,) = ladder(
        {"wasserstein": kind}, lambda radius: regard.certify(attention, regard.Ball(radius), norm), radii
    )
    seen = rising(
        lambda radius: (
            regard.falsify(attention, regard.Ball(radius, tokens=6), norm, restarts=3, steps=20).value
        ),
        radii,
    )
    return [Line(f"{name}, wasserstein", proved.points, kind), Line(f"{name}, {SEEN}", seen.points, "seen")]


@drawn
def gaussian_whole() -> str:
    """Tokens anywhere on a line, no projections.

    Seen: the Jacobian at one token at 0 and the others at ±√(2(1 + ω)): log n is real.
    """
    attention, norm, counts = (
        regard.Attention(regard.Gaussian(bandwidth=1.0)),
        regard.TokenMax(),
        [3.0, 5, 9, 17, 33, 65, 129, 257],
    )
    proved = ladder(
        {"gaussian_whole": "ours"},
        lambda n: regard.certify(attention, regard.Whole(tokens=int(n)), norm),
        counts,
    )
    seen = Line("seen at that input", [(n, row_sum(attention, spread(int(n)))) for n in counts], "seen")
    lines = [*proved, seen]
    return chart(
        "Gaussian scores, tokens anywhere",
        "number of tokens",
        lines,
        above="constant in TokenMax norm",
        logarithmic=(True, False),
    )


def row_sum(attention: regard.Attention, x: torch.Tensor) -> float:
    """The TokenMax norm of the Jacobian at tokens on a line."""
    return float(torch.func.jacrev(attention)(x).reshape(len(x), len(x)).abs().sum(-1).max())


def spread(tokens: int) -> torch.Tensor:
    """A token at 0 and the others at ±√(2(1 + ω)), ω e^ω = (n - 1)/e."""
    omega = 1.0
    for _ in range(50):
        omega -= (omega - (tokens - 1) * torch.e ** (-omega - 1)) / (1 + omega)
    x = torch.full((tokens, 1), (2 * (1 + omega)) ** 0.5, dtype=torch.float64)
    x[::2] *= -1
    x[0] = 0
    return x


def jacobian_norm(attention: regard.Attention, x: torch.Tensor) -> float:
    return float(torch.linalg.matrix_norm(torch.func.jacrev(attention)(x).reshape(x.numel(), x.numel()), 2))


@drawn
def dot_whole() -> str:
    """Three tokens of width 3, random projections: the Jacobian at `growing_witness(attention, radius)`,
    and the bound on that ball.
    """
    attention, norm, radii = head(3), regard.Frobenius(), decades(0, 2)
    points = [
        (radius, jacobian_norm(attention, regard.theorems.growing_witness(attention, radius)))
        for radius in radii
    ]
    seen = Line("seen at growing_witness", points, "seen")
    proved = ladder(
        {"frobenius": "ours"},
        lambda radius: regard.certify(attention, regard.Ball(radius, tokens=3), norm),
        radii,
    )
    return chart(
        "No constant holds on the whole space",
        "how far out the tokens are",
        [*proved, seen],
        above="constant",
    )


@drawn
def ball_constant() -> str:
    """Eight normal tokens of width 4, random projections; every token may move by the radius.

    At 0 it is the norm of the Jacobian.
    """
    attention, x, norm, radii = head(4), normal(8, 4, seed=1), regard.TokenMax(), decades(-3, 1, 3)
    names = {"ball_constant": "ours", "token_max": "other"}
    proved = ladder(
        names, lambda radius: regard.certify(attention, regard.Neighborhood(x, radius, norm), norm), radii
    )
    seen = rising(
        lambda radius: (
            regard.falsify(attention, regard.Neighborhood(x, radius, norm), norm, restarts=3, steps=20).value
        ),
        radii,
    )
    return chart(
        "TokenMax norm near an input", "how far each token may move", [*proved, seen], above="constant"
    )


@drawn
def one_token() -> str:
    """Eight normal tokens of width 4, random projections; token 3 moves and the others stay.

    A constant times the radius is far above.
    """
    attention, x, norm, radii = head(4), normal(8, 4, seed=1), regard.Frobenius(), decades(-2, 1, 3)
    names = {"one_token": "ours", "remainder": "other"}
    proved = ladder(
        names, lambda radius: regard.deviation(attention, regard.one_token(x, 3, radius), norm), radii
    )
    times = [
        (radius, radius * regard.certify(attention, regard.one_token(x, 3, radius), norm).value)
        for radius in radii
    ]
    proved.append(Line("constant × radius", times, "other"))
    seen = rising(
        lambda radius: regard.falsify_deviation(attention, regard.one_token(x, 3, radius), norm).value, radii
    )
    return chart(
        "How far outputs move when one token does",
        "how far the token moves",
        [*proved, seen],
        above="deviation",
    )


@drawn
def approximation() -> str:
    """64 normal tokens of width 8, random projections; each row keeps its heaviest keys.

    Measured: the largest error of an output.
    """
    attention, x, counts = head(8), normal(64, 8, seed=1), [1, 2, 4, 8, 16, 32, 48, 60, 63]
    weights = attention.weights(x)
    proved, seen = [], []
    for count in counts:
        kept, chosen = weights.topk(count, -1)
        law = torch.zeros_like(weights).scatter(-1, chosen, kept / kept.sum(-1, keepdim=True))
        proved.append((float(count), regard.proofs.approximation_error(attention, law, x).value))
        seen.append((float(count), float((law @ x @ attention.lookup.w_v - attention(x)).norm(dim=-1).max())))
    lines = [Line("approximation", proved), Line("measured", seen, "seen")]
    return chart("Rows that keep their heaviest keys", "keys kept, of 64", lines, above="error of an output")


@drawn
def rank_collapse() -> str:
    """Eight tokens of width 4 in a ball of this radius, random projections.

    Measured: the distance of outputs from `consensus`.
    """
    attention, directions, radii = head(4), normal(8, 4, seed=1), decades(-2, 1, 3)
    directions = directions / directions.norm(dim=-1, keepdim=True)
    zero = torch.zeros(4, dtype=torch.float64)
    proved = [
        (radius, regard.theorems.rank_collapse(attention, radius * directions, zero).value)
        for radius in radii
    ]
    seen = [(radius, away(attention, radius * directions, zero)) for radius in radii]
    lines = [Line("rank_collapse", proved), Line("measured", seen, "seen")]
    return chart("Outputs meet at a cubic rate", "radius of the tokens", lines, above="radius of the outputs")


def away(attention: regard.Attention, x: torch.Tensor, center: torch.Tensor) -> float:
    return float((attention(x) - regard.theorems.consensus(attention, x, center)).norm(dim=-1).max())


def main() -> None:
    """Write the pages, and draw if asked to."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pictures", action="store_true", help="draw the pictures too")
    options = parser.parse_args()
    (PAGES / "pictures").mkdir(parents=True, exist_ok=True)
    for name, text in pages().items():
        (PAGES / name).write_text(text, encoding="utf-8")
    for name, draw in PICTURES.items() if options.pictures else ():
        (PAGES / "pictures" / f"{name}.svg").write_text(draw(), encoding="utf-8")
        print(f"drawn: {name}")
    print(f"{len(regard.theorems.THEOREMS)} theorems in {PAGES.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
