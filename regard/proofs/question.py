"""One question of a user: theorems ask the same of its parts again and again, and are answered once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Answer = TypeVar("Answer")

_ANSWERS: ContextVar[dict[Any, tuple[Any, Any]] | None] = ContextVar("answers", default=None)

_ABOUT: ContextVar[tuple[Any, ...]] = ContextVar("about", default=())


@contextmanager
def answering(map: Any) -> Iterator[None]:
    """While it is open, what is asked is asked for the sake of this map."""
    token = _ABOUT.set((*_ABOUT.get(), map))
    try:
        yield
    finally:
        _ABOUT.reset(token)


def asked_for() -> tuple[Any, ...]:
    """The maps for whose sake this is asked, the whole first, the one that is asked about last."""
    return _ABOUT.get()


_PART: ContextVar[bool] = ContextVar("part", default=False)


@contextmanager
def parts() -> Iterator[None]:
    """While it is open, what is asked is asked by a theorem, which needs the smallest bound and no other."""
    token = _PART.set(True)
    try:
        yield
    finally:
        _PART.reset(token)


def asked_by_theorem() -> bool:
    """Whether a theorem asks, and not a user, who sees the whole ladder."""
    return _PART.get()


@contextmanager
def question() -> Iterator[None]:
    """While it is open, answers are kept; one inside another is part of it."""
    if _ANSWERS.get() is not None:
        yield
        return
    token = _ANSWERS.set({})
    try:
        yield
    finally:
        _ANSWERS.reset(token)


def once(key: tuple[Any, ...], about: Any, answer: Callable[[], Answer]) -> Answer:
    """An answer, from before where the same question has one; outside of any question it is made anew.

    about: what the key names by its id, so that it stays alive.
    """
    known = _ANSWERS.get()
    if known is None:
        return answer()
    found = known.get(key)
    if found is None:
        found = known[key] = about, answer()
    made: Answer = found[1]
    return made
