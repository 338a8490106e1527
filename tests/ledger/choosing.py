"""Choosing which tests are in the ledger: few, quick, and enough for every line of a proof."""

from __future__ import annotations

import heapq
from collections import defaultdict
from typing import Any

from tests.ledger.book import Entry, close

FUNCTION, LINE = 5, 3
"""How many tests are to reach each function, and each line."""
STABLE = 1e-9
"""What another processor and another order of tests may change in a number that is kept."""


def choose(recorded: dict[str, Any], again: dict[str, Any]) -> dict[str, Entry]:
    """Tests whose numbers are the same in both recordings, the cheapest for what they reach first."""
    stable = {test: _stable(one["found"], again[test]["found"]) for test, one in recorded.items() if test in again}
    reached = {test: _reached(recorded[test], entry) for test, entry in stable.items()}
    wanted: dict[Any, int] = defaultdict(int)
    for parts in reached.values():
        for part in parts:
            wanted[part] += 1
    wanted = {part: min(count, FUNCTION if isinstance(part, str) else LINE) for part, count in wanted.items()}
    cost = {test: 20.0 + recorded[test]["calls"] for test in reached}
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


def _stable(first: Entry, second: Entry) -> Entry:
    return {name: pair for name, pair in first.items() if name in second and close(pair, second[name], STABLE)}


def _reached(one: dict[str, Any], entry: Entry) -> set[Any]:
    """Functions, and lines of functions, whose numbers are stable."""
    return set(entry) | {(name, line) for name, line in one["lines"] if name in entry}
