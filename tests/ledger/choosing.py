"""Choosing which tests are in the ledger: few, quick, and enough for every line of a proof."""

from __future__ import annotations

import heapq
from collections import Counter
from typing import Any

from tests.ledger.book import Entry, close

FUNCTION, LINE = 5, 3
"""How many tests are to reach each function, and each line."""
STABLE = 1e-9
"""What another processor and another order of tests may change in a number that is kept."""
ELSEWHERE = ("tests/engines/",)
"""Tests whose numbers depend on what is installed: transforms are finufft's, or our own."""
UNFIT = frozenset({"regard/proofs/theorem.py:__call__"})
"""Counts the theorems that were registered, by tests as well."""
START = 20.0
"""What a test costs beside the calls of proofs in it, in such calls."""


def choose(recorded: dict[str, Any], again: dict[str, Any]) -> dict[str, Entry]:
    """Tests whose numbers are the same in both recordings, the cheapest for what they reach first."""
    stable = stable_parts(recorded, again)
    reached = {test: _reached(recorded[test], entry) for test, entry in stable.items()}
    counts = Counter(part for parts in reached.values() for part in parts)
    wanted = {part: min(n, FUNCTION if isinstance(part, str) else LINE) for part, n in counts.items()}
    cost = {test: START + recorded[test]["calls"] for test in reached}
    heap = [(-len(parts) / cost[test], test) for test, parts in reached.items() if parts]
    heapq.heapify(heap)
    chosen: dict[str, Entry] = {}
    while heap:
        promised, test = heapq.heappop(heap)
        new = {part for part in reached[test] if wanted[part] > 0}
        if new and -len(new) / cost[test] > promised:
            heapq.heappush(heap, (-len(new) / cost[test], test))
        elif new:
            names = {part if isinstance(part, str) else part[0] for part in new}
            chosen[test] = {name: stable[test][name] for name in names}
            for part in new:
                wanted[part] -= 1
    return chosen


def add(entries: dict[str, Entry], stable: dict[str, Entry]) -> dict[str, Entry]:
    """The ledger with more tests, each with the functions that too few tests know."""
    known = Counter(name for entry in entries.values() for name in entry)
    new = dict(entries)
    for test in sorted(stable.keys() - entries.keys()):
        wanted = {name: numbers for name, numbers in stable[test].items() if known[name] < 2 * FUNCTION}
        known.update(wanted.keys())
        if wanted:
            new[test] = wanted
    return new


def stable_parts(recorded: dict[str, Any], again: dict[str, Any]) -> dict[str, Entry]:
    """Of each test, the numbers that both recordings have."""
    found: dict[str, Entry] = {}
    for test in recorded.keys() & again.keys():
        if test.startswith(ELSEWHERE):
            continue
        first, second = recorded[test]["found"], again[test]["found"]
        both = (first.keys() & second.keys()) - UNFIT
        found[test] = {name: first[name] for name in both if close(first[name], second[name], STABLE)}
    return found


def _reached(one: dict[str, Any], entry: Entry) -> set[Any]:
    """Functions, and lines of functions, whose numbers are stable."""
    return set(entry) | {(name, line) for name, line in one["lines"] if name in entry}
