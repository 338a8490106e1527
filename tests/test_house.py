"""The house stays in order: floors, no optional imports, every noun in the test lists, every citation in the bibliography."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard as r
from tests import nouns

PACKAGE = Path(r.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
VERBS = ("compute", "derive", "certify", "cost", "dynamics")
TOP = ("audit", "nn", "training", "cli", "testing", "__main__", "__init__", "hf")
BOTTOM = ("errors",)


def floor(module: str) -> int:
    """0: underscore files and errors; 1: nouns; 2: verbs; 3: what stands on verbs."""
    room = module.split(".")[0]
    if room in TOP:
        return 3
    if room in VERBS:
        return 2
    return 0 if room.startswith("_") or room in BOTTOM else 1


def imports(path: Path) -> set[str]:
    """The regard modules a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names] if node.module == "regard" else [node.module]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.removeprefix("regard.") for name in names if name.startswith("regard.")}
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_only_go_down(path):
    mine = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for other in imports(path):
        assert floor(other) <= floor(mine), f"{mine} imports {other}, which is on a higher floor"


def test_import_is_light():
    """`import regard` brings torch and nothing optional."""
    optional = ["transformers", "typer", "rich", "jinja2", "plotly", "ot", "pykeops", "entmax", "scipy", "safetensors", "torch._dynamo"]
    code = f"import torch, sys; known = set(sys.modules); import regard; print(sorted(set({optional!r}) & (set(sys.modules) - known)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("base", "listed"),
    [
        (r.Potential, nouns.POTENTIALS),
        (r.Normalizer, nouns.NORMALIZERS),
        (r.Support, nouns.SUPPORTS),
        (r.Lookup, nouns.LOOKUPS),
        (r.Moment, nouns.MOMENTS),
    ],
    ids=["potentials", "normalizers", "supports", "lookups", "moments"],
)
def test_every_noun_is_tested(base, listed):
    public = {value for value in vars(r).values() if isinstance(value, type) and issubclass(value, base) and value is not base}
    assert public <= {type(value) for value in listed.values()}


def test_every_citation_is_in_the_bibliography():
    keys = set(re.findall(r"@\w+\{(\w+),", (PACKAGE / "references.bib").read_text()))
    cited = {key for path in FILES for key in re.findall(r"\(([a-z]+\d{4}[a-z]*)(?:,[^)]*)?\)", path.read_text())}
    assert cited
    assert cited <= keys, f"cited and not in references.bib: {sorted(cited - keys)}"
    assert keys <= cited, f"in references.bib and never cited: {sorted(keys - cited)}"


def test_no_room_without_a_purpose():
    assert not [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")]
    undocumented = [p for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not undocumented


def test_public_names_are_documented():
    missing = [
        name
        for name, value in vars(r).items()
        if isinstance(value, type) and not name.startswith("_") and not (value.__doc__ or "").strip()
    ]
    assert not missing


def test_verbs_guard_their_doors():
    from regard._verb import Verb

    verb = Verb("example")

    @verb.rule(int)
    def _integer(value):
        return "int"

    with pytest.raises(r.AmbiguousRuleError, match="already has a rule"):
        verb.rule(int)
    with pytest.raises(TypeError, match="takes one or more types"):
        verb.rule(3)
    with pytest.raises(r.NoRuleError, match=r"example has no rule for str; add one with @example.rule\(str\)"):
        verb.one("text")
    assert verb.one(True) == "int"  # a subclass

    class A: ...

    class B: ...

    class Both(A, B): ...

    verb.rule(A)(lambda value: "a")
    verb.rule(B)(lambda value: "b")
    with pytest.raises(r.AmbiguousRuleError, match=r"settle it with @example.rule\(Both\)"):
        verb.one(Both())
    assert len(verb.all(Both)) == 2

    verb.rule(Both)(lambda value: "both")
    verb.another(Both)(lambda value: "both again")  # several rules for the same types, for verbs of which all are true
    assert [rule(Both()) for rule in verb.all(Both)] == ["a", "b", "both", "both again"]
    with pytest.raises(r.AmbiguousRuleError, match=r"has several rules for Both"):
        verb.one(Both())
    assert [kinds for kinds, _ in verb.rules] == [(int,), (A,), (B,), (Both,), (Both,)]
