"""Answers of checks as plain values, and what they are called in the store."""

from __future__ import annotations

from typing import Any

from regard.audits.adapters.base import NotCovered
from regard.audits.checks.base import Result
from regard.audits.failure import failure
from regard.audits.inputs import Input
from regard.audits.places import Place
from regard.errors import ArgumentError, MissingExtraError


def weights_key(place: Place) -> str:
    """The name of a result in the store."""
    return f"weights-{place.layer}"


def site_key(item: Input, place: Place) -> str:
    """The name of a result in the store."""
    return f"input-{item.index}-site-{place.layer}"


def input_key(item: Input) -> str:
    """The name of a result in the store."""
    return f"input-{item.index}-whole"


def answer(measure: Any, *arguments: Any) -> dict[str, Any]:
    """A result for the store, and the reason where there is none or something of it is missing."""
    try:
        result: Result = measure(*arguments)
    except (NotCovered, ArgumentError, MissingExtraError) as reason:
        return {"reason": str(reason)}
    except (
        Exception
    ) as error:  # a strange module must not take the other checks with it: what went wrong is in the report
        return {"reason": failure(error)}
    found = {"numbers": result.numbers, "table": result.table}
    return {**found, "reason": result.reason} if result.reason else found
