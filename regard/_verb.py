"""Verb: an open table of typed rules. The nouns do not know the verbs; anyone may add a rule.

`one` takes the most specific rule (one truth), `all` gives every matching rule (for bounds, of which the
minimum is a bound). `rule` registers the one rule for its types, `another` one of several.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from regard.errors import AmbiguousRuleError, NoRuleError

Rule = TypeVar("Rule", bound=Callable[..., Any])


class Verb:
    """A function that dispatches on the types of its first arguments."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._rules: list[tuple[tuple[type, ...], Callable[..., Any]]] = []
        self._chosen: dict[tuple[type, ...], Callable[..., Any]] = {}
        self._matching: dict[tuple[type, ...], list[Callable[..., Any]]] = {}

    def rule(self, *types: type) -> Callable[[Rule], Rule]:
        """Register a rule for these argument types; a second rule for the same types is an error."""
        if any(types == known for known, _ in self._rules):
            raise AmbiguousRuleError(
                f"{self.name} already has a rule for {_names(types)}; register a more specific type instead"
            )
        return self.another(*types)

    def another(self, *types: type) -> Callable[[Rule], Rule]:
        """Register one of several rules for these argument types: all of them are true,
        and `all` gives each.
        """
        if not types or not all(isinstance(kind, type) for kind in types):
            raise TypeError(f"{self.name}.rule(...) takes one or more types, found {types!r}")

        def register(function: Rule) -> Rule:
            self._rules.append((types, function))
            self._chosen.clear()
            self._matching.clear()
            return function

        return register

    @property
    def rules(self) -> tuple[tuple[tuple[type, ...], Callable[..., Any]], ...]:
        """The table, in the order in which rules were registered."""
        return tuple(self._rules)

    def one(self, *arguments: Any) -> Any:
        """Run the most specific rule."""
        return self.choose(*(type(argument) for argument in arguments))(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        """The same: declare(module)."""
        return self.one(*arguments)

    def all(self, *types: type) -> list[Callable[..., Any]]:
        """Every rule that matches these types, in the order in which they were registered."""
        if types not in self._matching:
            self._matching[types] = [rule for signature, rule in self._rules if _matches(types, signature)]
        return list(self._matching[types])

    def choose(self, *types: type) -> Callable[..., Any]:
        """The most specific rule for these types; rules may look at fewer arguments than there are."""
        if torch.compiler.is_compiling():  # a table that grows would have every program compiled again
            return self._resolve(types)
        if types not in self._chosen:
            self._chosen[types] = self._resolve(types)
        return self._chosen[types]

    def _resolve(self, types: tuple[type, ...]) -> Callable[..., Any]:
        matching = [signature for signature, _ in self._rules if _matches(types, signature)]
        if not matching:
            raise NoRuleError(
                f"{self.name} has no rule for {_names(types)}; add one with "
                f"@{self.name}.rule({_names(types)})"
            )
        best = list({s for s in matching if all(_matches(s, other) for other in matching)})
        if len(best) != 1:
            options = " and ".join(f"({_names(s)})" for s in matching)
            raise AmbiguousRuleError(
                f"{self.name} has the rules {options}, none of which is the most specific; settle it with "
                f"@{self.name}.rule({_names(types)})"
            )
        functions = [function for signature, function in self._rules if signature == best[0]]
        if len(functions) > 1:
            raise AmbiguousRuleError(
                f"{self.name} has several rules for {_names(best[0])}; ask for all of them"
            )
        return functions[0]


def _matches(types: tuple[type, ...], signature: tuple[type, ...]) -> bool:
    return len(types) >= len(signature) and all(
        issubclass(kind, wanted) for kind, wanted in zip(types, signature, strict=False)
    )


def _names(types: tuple[type, ...]) -> str:
    return ", ".join(kind.__name__ for kind in types)
