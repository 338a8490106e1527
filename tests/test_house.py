"""The house stays in order: floors, no optional imports, every noun in the test lists,
every citation in the bibliography.
"""

import ast
import inspect
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

import regard as r
from benchmarks.mutate.__main__ import _drawn
from benchmarks.mutate.declared import named, read, room_of
from benchmarks.mutate.planting import Mutant, mutants_of, walk
from tests import nouns

PACKAGE = Path(r.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
VERBS = ("compute", "derive", "proofs", "costs", "dynamics", "compression")
TOP = (
    "audits",
    "choices",
    "decisions",
    "flows",
    "nn",
    "training",
    "cli",
    "testing",
    "plot",
    "callbacks",
    "__main__",
    "__init__",
    "hf",
    "engines",
    "theorems",
)
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
            names = (
                [f"{node.module}.{alias.name}" for alias in node.names]
                if node.module == "regard"
                else [node.module]
            )
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
    optional = [
        "transformers",
        "typer",
        "rich",
        "jinja2",
        "plotly",
        "ot",
        "pykeops",
        "entmax",
        "scipy",
        "safetensors",
        "torch._dynamo",
    ]
    code = (
        f"import torch, sys; known = set(sys.modules); import regard; print(sorted(set({optional!r}) & "
        "(set(sys.modules) - known)))"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )


@pytest.mark.parametrize(
    ("base", "listed"),
    [
        (r.Potential, nouns.POTENTIALS),
        (r.normalizers.Normalizer, nouns.NORMALIZERS),
        (r.supports.Support, nouns.SUPPORTS),
        (r.lookups.Lookup, nouns.LOOKUPS),
        (r.moments.Moment, nouns.MOMENTS),
    ],
    ids=["potentials", "normalizers", "supports", "lookups", "moments"],
)
def test_every_noun_is_tested(base, listed):
    homes = (r, r.potentials, r.normalizers, r.supports, r.lookups, r.moments)
    values = {value for home in homes for value in vars(home).values() if isinstance(value, type)}
    nouns_of_family = {value for value in values if issubclass(value, base) and not value.__subclasses__()}
    inner = {
        r.potentials.Scaled,
        r.normalizers.FeatureKernel,
    }  # made by 2 * potential and by LinearKernel, never by hand
    public = {value for value in nouns_of_family - inner if not inspect.isabstract(value)}
    assert public <= {type(value) for value in listed.values()}


def test_every_citation_is_in_the_bibliography():
    keys = set(re.findall(r"@\w+\{(\w+),", (PACKAGE / "references.bib").read_text()))
    cited = {
        key for path in FILES for key in re.findall(r"\(([a-z]+\d{4}[a-z]*)(?:,[^)]*)?\)", path.read_text())
    }
    assert cited
    assert cited <= keys, f"cited and not in references.bib: {sorted(cited - keys)}"
    assert keys <= cited, f"in references.bib and never cited: {sorted(keys - cited)}"


def test_every_proof_names_the_tests_that_are_about_it():
    """A file without tests of its own would pass `make mutate` in silence."""
    root = PACKAGE.parent
    declared = read(root)
    assert len(declared.proofs) > 60
    every = {str(path.relative_to(root)) for path in FILES if path.name != "__init__.py"}
    assert every == set(declared.files)
    without = [file for file in declared.files if not declared.tests[file]]
    assert not without, "say in benchmarks/mutate/tests.toml which tests are about these files"
    assert not [
        test
        for tests in declared.tests.values()
        for test in tests
        if not (root / test.split("::")[0]).exists()
    ]
    assert declared.proofs <= every


def test_faults_are_drawn_from_every_room():
    """As many faults as there are rooms are one of each."""
    faults = [Mutant(file, "f", "sign", 1, "+", "-", 0, 1, "-") for file in read(PACKAGE.parent).files]
    rooms = {room_of(fault.file) for fault in faults}
    drawn = _drawn(faults, Namespace(all=False, seed=3, count=len(rooms)))
    assert {room_of(mutant.file) for mutant in drawn} == rooms
    assert len(drawn) == len(rooms) >= 18


def test_every_explained_survivor_is_a_fault_that_can_be_planted():
    """An entry of a line that has changed explains nothing."""
    root = PACKAGE.parent
    declared = read(root)
    named = {key[0] for key in declared.explained}
    keys = {mutant.key for mutant in walk(root, {file: declared.files[file] for file in named})}
    assert not [key for key in declared.explained if key not in keys]
    assert all(why.strip() for why in declared.explained.values())


def test_faults_that_once_passed_can_be_planted():
    """A line of `named.toml` that has changed is planted nowhere."""
    root = PACKAGE.parent
    found = named(root)
    assert len(found) >= 11
    assert {fault.file for fault in found} <= set(read(root).tests)
    for fault in found:
        assert fault.after in fault.planted((root / fault.file).read_bytes()).decode()


def test_faults_are_planted_where_proofs_are(tmp_path):
    """Each kind of fault, and nothing in words, annotations or places of axes."""
    (tmp_path / "proof.py").write_text(
        'LARGE = 4\n\ndef bound(a: Literal[3], b):\n    """Twice 2 + 2."""\n    if a > 1e-9:\n        '
        'raise Refusal(f"{a + 1}")\n'
        "    return outward(max(a, b.sum(-1)) * b[1] - math.sqrt(b))\n"
    )
    found = {(mutant.function, mutant.operator, mutant.text) for mutant in mutants_of(tmp_path, "proof.py")}
    assert found == {
        ("LARGE", "constant", "2"),
        ("LARGE", "constant", "8"),
        ("bound", "comparison", "(a <= 1e-09)"),
        ("bound", "allowance", "0.0"),
        ("bound", "margin", "(max(a, b.sum(-1)) * b[1] - math.sqrt(b))"),
        ("bound", "term", "(max(a, b.sum(-1)) * b[1])"),
        ("bound", "sign", "(max(a, b.sum(-1)) * b[1] + math.sqrt(b))"),
        ("bound", "factor", "(b[1])"),
        ("bound", "factor", "(max(a, b.sum(-1)))"),
        ("bound", "min-max", "min(a, b.sum(-1))"),
        ("bound", "root", "(b)"),
    }


def test_counts_of_roundings_are_removed_as_a_whole(tmp_path):
    """No count is doubled or taken apart; what it is multiplied with is, and so is all of `_upper.py`."""
    written = (
        "def error(n, size):\n    terms = 2 * n + 4\n    kept = 2 * n\n"
        "    return relative_error(terms) * size + gamma(n + 1) * kept + Upper(3, 8 * n) + outward(n, 4)\n"
        "def units(n, size):\n    return (16 * n + 2) * UNIT * size\n"
    )
    (tmp_path / "proof.py").write_text(written)
    found = {
        (mutant.operator, mutant.after.removeprefix("return "))
        for mutant in mutants_of(tmp_path, "proof.py")
        if mutant.operator in ("count", "constant") or mutant.function == "units"
    }
    whole = "relative_error(terms) * size + gamma(n + 1) * kept + Upper(3, 8 * n) + outward(n, 4)"
    assert found == {
        ("constant", "kept = 1 * n"),
        ("constant", "kept = 4 * n"),
        ("constant", whole.replace("(3", "(1")),
        ("constant", whole.replace("(3", "(6")),
        ("count", whole.replace("terms", "0")),
        ("count", whole.replace("n + 1", "0")),
        ("count", whole.replace("8 * n", "0")),
        ("count", "(0) * UNIT * size"),
        ("factor", "(16 * n + 2) * size"),
        ("factor", "((16 * n + 2) * UNIT)"),
        ("factor", "(size)"),
    }
    (tmp_path / "proof.py").write_text(
        "FIXED = 8\nOTHER = 4\ndef error(n):\n    return relative_error(n + FIXED) * OTHER\n"
    )
    found = {mutant.after for mutant in mutants_of(tmp_path, "proof.py") if mutant.function != "error"}
    assert found == {"FIXED = 0", "OTHER = 2", "OTHER = 8"}
    (tmp_path / "regard").mkdir()
    (tmp_path / "regard" / "_upper.py").write_text(written)
    accounted = {(mutant.operator, mutant.after) for mutant in mutants_of(tmp_path, "regard/_upper.py")}
    assert ("constant", "terms = 4 * n + 4") in accounted
    assert ("term", "return " + whole.replace("n + 1", "(n)")) in accounted
    assert not [operator for operator, _ in accounted if operator == "count"]


def test_no_room_without_a_purpose():
    assert not [p for p in FILES if p.stem in ("utils", "helpers", "common", "misc")]
    undocumented = [p for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not undocumented


def test_public_names_are_documented():
    missing = [
        name
        for home in (
            r,
            r.maps,
            r.domains,
            r.norms,
            r.engines,
            r.theorems,
            r.potentials,
            r.normalizers,
            r.supports,
        )
        for name, value in vars(home).items()
        if isinstance(value, type)
        and value.__module__.startswith("regard.")
        and not name.startswith("_")
        and not (value.__doc__ or "").strip()
    ]
    assert not missing


def test_verbs_guard_their_doors():
    from regard._verb import Verb

    verb = Verb("example")

    @verb.rule(int)
    def _integer(value):
        return "int"

    with pytest.raises(r.errors.AmbiguousRuleError, match="already has a rule"):
        verb.rule(int)
    with pytest.raises(TypeError, match="takes one or more types"):
        verb.rule(3)
    with pytest.raises(
        r.errors.NoRuleError, match=r"example has no rule for str; add one with @example.rule\(str\)"
    ):
        verb.one("text")
    assert verb.one(True) == "int"  # a subclass

    class A: ...

    class B: ...

    class Both(A, B): ...

    verb.rule(A)(lambda value: "a")
    verb.rule(B)(lambda value: "b")
    with pytest.raises(r.errors.AmbiguousRuleError, match=r"settle it with @example.rule\(Both\)"):
        verb.one(Both())
    assert len(verb.all(Both)) == 2

    verb.rule(Both)(lambda value: "both")
    verb.another(Both)(
        lambda value: "both again"
    )  # several rules for the same types, for verbs of which all are true
    assert [rule(Both()) for rule in verb.all(Both)] == ["a", "b", "both", "both again"]
    with pytest.raises(r.errors.AmbiguousRuleError, match=r"has several rules for Both"):
        verb.one(Both())
    assert [kinds for kinds, _ in verb.rules] == [(int,), (A,), (B,), (Both,), (Both,)]
