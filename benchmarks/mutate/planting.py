"""Planting: every fault of a file, from its syntax tree, always in the same order.

The faults: a constant halved or doubled (below 1e-6 it is an allowance for rounding, and taken away), a term
of a sum or a factor of a product dropped, + for - and - for +, min for max and max for min, a comparison
negated, a margin removed (`outward(b)`, `up(b)` and `b * (1 + 1e-9)` become b), a square root dropped. What
is no arithmetic of a proof is left alone: annotations, texts, errors that are raised, places of axes, items
of shapes. Products of matrices keep their factors, for without one the shapes do not fit.

A count of roundings (the argument of `relative_error`, `rounding_error` or `gamma`, the second of `outward`,
`Upper`, `Lower`, `lengths` and `largest_roots`, the third of `Projection`, what stands before `* UNIT` or `*
EPS`, a number that multiplies a relative error as in `16 * unit * size`, a name that is passed as one, and a
constant of the file that is part of one) is removed as a whole, not taken apart. Twice a count moves a bound
by units in its last place, upward, and half of one is more than roundings that are not all in one direction
ever reach: neither makes a number that is wrong, and a test that sees it only repeats the count. A count that
is missing is a rounding that nobody looks after. What a count is multiplied with (sizes, norms, errors) is
planted like all else, and so is every counter of `_upper.py`, where roundings are accounted and tests know
each of them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from benchmarks.mutate.words import (
    ACCOUNTS,
    AXES,
    COUNTS,
    ERRORS,
    MARGINS,
    NEGATED,
    OPPOSITE,
    PLACED,
    TEXTS,
    TINY,
    UNITS,
)


@dataclass(frozen=True)
class Mutant:
    """A file with one fault. `before` and `after` are the lines of the fault, on one line each."""

    file: str
    function: str
    operator: str
    line: int
    before: str
    after: str
    start: int
    end: int
    text: str

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """What stays the same when lines move."""
        return self.file, self.function, self.operator, self.before, self.after

    def planted(self, source: bytes) -> bytes:
        """The source of the file with this fault."""
        return source[: self.start] + self.text.encode() + source[self.end :]

    def __str__(self) -> str:
        where = f"{self.file}:{self.line} ({self.operator}, in {self.function})"
        return f"{where}\n    - {self.before}\n    + {self.after}"


def mutants_of(root: Path, file: str, functions: frozenset[str] | None = None) -> list[Mutant]:
    """Every fault of a file; only those in functions (or assignments) of these names, if names are given."""
    source = (root / file).read_bytes()
    planter = _Planter(file, source)
    planter.visit(ast.parse(source))
    found: dict[tuple[int, int, str], Mutant] = {}
    for mutant in planter.found:
        if functions is None or mutant.function.split(".")[-1] in functions:
            found.setdefault((mutant.start, mutant.end, mutant.text), mutant)
    return sorted(found.values(), key=lambda mutant: (mutant.start, mutant.end, mutant.operator, mutant.text))


class _Planter(ast.NodeVisitor):
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source, self.found = file, source, list[Mutant]()
        self.names: list[str] = []
        self.counts: set[str] = set()
        self.fixed: set[str] = set()
        self.multiples: set[ast.expr] = set()
        lines = source.splitlines(keepends=True)
        self.starts = [0]
        for line in lines:
            self.starts.append(self.starts[-1] + len(line))

    def visit_Module(self, node: ast.Module) -> None:
        told = [self._counted(part) for part in ast.walk(node)]
        names = [part for count in told if count is not None for part in ast.walk(count)]
        self.fixed = {name.id for name in names if isinstance(name, ast.Name)}
        self.generic_visit(node)

    # What is not looked at

    def visit_Raise(self, node: ast.Raise) -> None:
        """Words."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Words."""

    def visit_Import(self, node: ast.Import) -> None:
        """Nothing to plant."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Nothing to plant."""

    def visit_Subscript(self, node: ast.Subscript) -> None:
        self.visit(node.value)

    def visit_arguments(self, node: ast.arguments) -> None:
        given = [*node.posonlyargs, *node.args]
        pairs = [*zip(given[len(given) - len(node.defaults) :], node.defaults, strict=True)]
        for argument, default in [*pairs, *zip(node.kwonlyargs, node.kw_defaults, strict=True)]:
            if default is not None and argument.arg not in AXES:
                self.visit(default)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self._within(ast.unparse(node.target), node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        target = node.targets[0]
        if not self.names and isinstance(target, ast.Name) and target.id in self.fixed:
            self.names.append(target.id)
            self._plant("count", node.value, "0")
            self.names.pop()
        elif not self.names:
            self._within(ast.unparse(target), node.value)
        elif not (isinstance(target, ast.Name) and target.id in self.counts):
            self.visit(node.value)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        told = [self._counted(part) for part in ast.walk(node)]
        outer, self.counts = self.counts, {count.id for count in told if isinstance(count, ast.Name)}
        self.names.append(node.name)
        self.visit(node.args)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()
        self.counts = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self.names.append(node.name)
        for statement in node.body:
            self.visit(statement)
        self.names.pop()

    def _within(self, name: str, node: ast.AST) -> None:
        named = not self.names
        if named:
            self.names.append(name)
        self.visit(node)
        if named:
            self.names.pop()

    # Counts of roundings

    def _counted(self, node: ast.AST) -> ast.expr | None:
        """The count of roundings that a call or a product is told; none where roundings are accounted."""
        return None if self.file in ACCOUNTS else _count_in(node)

    # Faults

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool) or not isinstance(value, int | float) or value == 0 or value != value:
            return
        if node in self.multiples:
            self._plant("count", node, "0")
            return
        if abs(value) < TINY:
            self._plant("allowance", node, "0.0")
            return
        half = value // 2 if isinstance(value, int) else value / 2  # whole numbers stay whole
        self._plant("constant", node, repr(half))
        self._plant("constant", node, repr(value * 2))

    def visit_BinOp(self, node: ast.BinOp) -> None:
        if self._counted(node) is not None:
            self._plant("count", node.left, "0")
            self._plant("factor", node, f"({ast.unparse(node.left)})")
            return
        factors = _factors(node)
        if self.file not in ACCOUNTS and any(_relative(factor) for factor in factors):
            self.multiples.update(factor for factor in factors if _number(factor))
        if not _wordy(node.left) and not _wordy(node.right):
            self._binary(node)
        self.generic_visit(node)

    def _binary(self, node: ast.BinOp) -> None:
        left, right = ast.unparse(node.left), ast.unparse(node.right)
        if isinstance(node.op, ast.Add):
            self._plant("term", node, f"({left})")
            self._plant("term", node, f"({right})")
            self._plant("sign", node, f"({left} - ({right}))")
        elif isinstance(node.op, ast.Sub):
            self._plant("term", node, f"({left})")
            self._plant("sign", node, f"({left} + {right})")
        elif isinstance(node.op, ast.Mult):
            if not _number(node.left):
                self._plant("factor", node, f"({right})")
            if not _number(node.right):
                self._plant("margin" if _safety(node.right) else "factor", node, f"({left})")
        elif isinstance(node.op, ast.Div) and not _number(node.right):
            self._plant("factor", node, f"({left})")

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div) and not _wordy(node.value):
            target, value = ast.unparse(node.target), ast.unparse(node.value)
            other = {ast.Add: "-=", ast.Sub: "+="}.get(type(node.op))
            if other:
                self._plant("sign", node, f"{target} {other} {value}")
            self._plant("term" if other else "factor", node, f"{target} = {target}")
        self.visit(node.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for place, op in enumerate(node.ops):
            if type(op) in NEGATED:
                ops = [*node.ops[:place], NEGATED[type(op)](), *node.ops[place + 1 :]]
                negated = ast.Compare(node.left, ops, node.comparators)
                self._plant("comparison", node, f"({ast.unparse(negated)})")
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        method = isinstance(node.func, ast.Attribute)
        name = getattr(node.func, "attr" if method else "id", "")
        if name in TEXTS:
            return
        if name in OPPOSITE and not (method and name in ("min", "max") and node.args):
            self._plant("min-max", node, ast.unparse(_renamed(node, OPPOSITE[name])))
        if name in MARGINS and not method and node.args:
            self._plant("margin", node, f"({ast.unparse(node.args[0])})")
        if name == "sqrt":
            inner = node.args[0] if node.args else getattr(node.func, "value", node)
            self._plant("root", node, f"({ast.unparse(inner)})")
        self.visit(node.func)
        count = self._counted(node)
        for argument in node.args:
            if argument is count:
                if name not in MARGINS:  # the whole margin is removed above
                    self._plant("count", argument, "0")
            elif not (name in PLACED and method and _places(argument)):
                self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in AXES:
                self.visit(keyword.value)

    def _plant(self, operator: str, node: ast.expr | ast.stmt, text: str) -> None:
        assert node.end_lineno is not None
        assert node.end_col_offset is not None
        start = self.starts[node.lineno - 1] + node.col_offset
        end = self.starts[node.end_lineno - 1] + node.end_col_offset
        first, last = self.starts[node.lineno - 1], self.starts[node.end_lineno]
        before = self.source[first:last].decode()
        after = (self.source[first:start] + text.encode() + self.source[end:last]).decode()
        one, other = (" ".join(lines.split()) for lines in (before, after))
        if one != other:
            name = ".".join(self.names) or "module"
            self.found.append(Mutant(self.file, name, operator, node.lineno, one, other, start, end, text))


def _renamed(node: ast.Call, name: str) -> ast.Call:
    func = ast.Attribute(node.func.value, name) if isinstance(node.func, ast.Attribute) else ast.Name(name)
    return ast.Call(func, node.args, node.keywords)


def _count_in(node: ast.AST) -> ast.expr | None:
    """What is a count of roundings in a call or a product, if there is one."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in COUNTS:
        place = COUNTS[node.func.id]
        return node.args[place] if len(node.args) > place else None
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and isinstance(node.right, ast.Name):
        return node.left if node.right.id in UNITS else None
    return None


def _factors(node: ast.expr) -> list[ast.expr]:
    """What a product is made of."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return [*_factors(node.left), *_factors(node.right)]
    return [node]


def _relative(node: ast.expr) -> bool:
    """Whether this is a relative error of roundings."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ERRORS
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name.endswith("unit")


def _number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, int | float)


def _safety(node: ast.expr) -> bool:
    """One plus an allowance."""
    if not (isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and ast.unparse(node.left) == "1"):
        return False
    added = node.right
    if isinstance(added, ast.Constant):
        return isinstance(added.value, float) and added.value < TINY
    return isinstance(added, ast.Call) and getattr(added.func, "id", "") == "gamma"


def _places(node: ast.expr) -> bool:
    """A whole number, or a tuple of them."""
    if isinstance(node, ast.UnaryOp):
        node = node.operand
    if isinstance(node, ast.Tuple):
        return all(_places(item) for item in node.elts)
    return isinstance(node, ast.Constant) and isinstance(node.value, int)


def _wordy(node: ast.expr) -> bool:
    """Texts, tuples and lists, which + joins."""
    if isinstance(node, ast.BinOp):
        return _wordy(node.left) or _wordy(node.right)
    if isinstance(node, ast.Constant):
        return isinstance(node.value, str | bytes)
    return isinstance(node, ast.JoinedStr | ast.Tuple | ast.List | ast.ListComp)


def walk(root: Path, files: dict[str, frozenset[str] | None]) -> Iterator[Mutant]:
    """The faults of all files."""
    for file, functions in files.items():
        yield from mutants_of(root, file, functions)
