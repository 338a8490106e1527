"""python -m benchmarks.mutate [--count 10] [--seed 0] [--all] [--file regard/_round.py]: do tests see faults?

Plants faults in the package, one at a time, runs the tests that are about the file, and prints the faults
that no test sees. Rooms are drawn in turn, so that a small sample has faults of proofs, layers, audits and
commands. `tests.toml` says which tests are about a file; `survivors.toml` lists faults that change nothing a
test could see, each with a sentence why. The exit status is 1 where more than one in twenty
survives unexplained. `--named` plants the faults of `named.toml`, which passed every test once.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from queue import SimpleQueue

from benchmarks.mutate.declared import Declared, named, read, room_of
from benchmarks.mutate.planting import Mutant, walk
from benchmarks.mutate.running import Outcome, Workshop, warm_up

ROOT = Path(__file__).resolve().parents[2]
ALLOWED = 0.05
"""The share of faults that may survive unexplained."""


def main() -> int:
    """Plant, run, print."""
    options = _options()
    declared = read(ROOT, options.survivors)
    wanted = options.file or list(declared.files)
    chosen = {file: functions for file, functions in declared.files.items() if _named(file, wanted)}
    mutants = [fault for fault in walk(ROOT, chosen) if options.match in f"{fault.function} {fault.before}"]
    sampled = named(ROOT) if options.named else _drawn(mutants, options)
    if options.list:
        _say("".join(f"{mutant}\n" for mutant in sampled) + f"{len(sampled)} of {len(mutants)} faults")
        return 0
    whole = "named faults" if options.named else f"of {len(mutants)} faults in {len(chosen)} files"
    _say(f"{len(sampled)} {whole}" + ("" if options.named else f", seed {options.seed}"))
    warm_up()
    run = _Run(declared, options.jobs, options.trust, allowed=0.0 if options.named else ALLOWED)
    try:
        return run.report(sampled, per_file=options.all or bool(options.file))
    finally:
        run.close()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.mutate", description=__doc__)
    parser.add_argument("--count", type=int, default=10, help="how many faults, drawn from all")
    parser.add_argument("--seed", type=int, default=0, help="which ones are drawn")
    parser.add_argument("--all", action="store_true", help="every fault")
    parser.add_argument("--named", action="store_true", help="the faults of named.toml, which must all die")
    parser.add_argument("--file", action="append", default=[], help="in these files (or rooms) alone")
    parser.add_argument("--match", default="", help="those whose function or line has these words")
    known = Path(__file__).with_name("survivors.toml")
    parser.add_argument("--survivors", type=Path, default=known, help="faults that are explained")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="how many processes")
    parser.add_argument(
        "--trust", action="store_true", help="do not run the tests that failed without a fault"
    )
    parser.add_argument("--list", action="store_true", help="print the faults and run nothing")
    return parser.parse_args()


def _drawn(mutants: list[Mutant], options: argparse.Namespace) -> list[Mutant]:
    """All faults, or a sample by the seed, one of each room in turn."""
    if options.all:
        return mutants
    draw, rooms = random.Random(options.seed), defaultdict[str, list[Mutant]](list)
    for mutant in draw.sample(mutants, len(mutants)):
        rooms[room_of(mutant.file)].append(mutant)
    turns = zip_longest(*draw.sample(list(rooms.values()), len(rooms)))
    return [mutant for turn in turns for mutant in turn if mutant is not None][: options.count]


def _named(file: str, names: list[str]) -> bool:
    return any(file == name or file.startswith(name.rstrip("/") + "/") for name in names)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class _Run:
    """Workshops, one for each job, and what they found."""

    def __init__(self, declared: Declared, jobs: int, trusting: bool, allowed: float) -> None:
        self.declared, self.trusting, self.allowed = declared, trusting, allowed
        self.workshops = [Workshop(ROOT) for _ in range(max(1, jobs))]
        self._free: SimpleQueue[Workshop] = SimpleQueue()
        for workshop in self.workshops:
            self._free.put(workshop)

    def close(self) -> None:
        for workshop in self.workshops:
            workshop.close()

    def report(self, sampled: list[Mutant], per_file: bool) -> int:
        explained = [mutant for mutant in sampled if mutant.key in self.declared.explained]
        asked = [mutant for mutant in sampled if mutant.key not in self.declared.explained]
        with ThreadPoolExecutor(len(self.workshops)) as pool:
            survivors, killers, unnamed = list[Mutant](), set[str](), set[tuple[str, ...]]()
            outcomes = pool.map(self._planted, asked)
            for place, (mutant, outcome) in enumerate(zip(asked, outcomes, strict=True), 1):
                if outcome.broken:
                    _say(f"the tests of {mutant.file} could not be run: {outcome.by}")
                    return 2
                word = f"killed by {outcome.by}" if outcome.killed else f"SURVIVED ({mutant.after})"
                _say(f"[{place}/{len(asked)}] {mutant.file}:{mutant.line} {word} ({outcome.seconds:.0f} s)")
                if not outcome.killed:
                    survivors.append(mutant)
                elif "::" in outcome.by:
                    killers.add(outcome.by)
                else:  # the end of its time, or a collection: all tests of the file are asked
                    unnamed.add(self.declared.tests_of(mutant))
        groups = [group for group in (tuple(sorted(killers)), *sorted(unnamed)) if group]
        if not self.trusting and not self._sound(groups):
            return 2
        return self._summary(sampled, survivors, explained, per_file)

    def _sound(self, groups: list[tuple[str, ...]]) -> bool:
        """Whether the tests that failed pass without a fault; one that does not has proved nothing."""
        for tests in groups:
            outcome = self._run(tests, None, b"")
            if outcome.killed or outcome.broken:
                _say(f"without any fault {outcome.by} fails; repair it first")
                return False
        _say("without a fault all tests that failed pass")
        return True

    def _planted(self, mutant: Mutant) -> Outcome:
        source = mutant.planted((ROOT / mutant.file).read_bytes())
        return self._run(self.declared.tests_of(mutant), mutant.file, source)

    def _run(self, tests: tuple[str, ...], file: str | None, source: bytes) -> Outcome:
        workshop = self._free.get()
        try:
            return workshop.run(tests, file, source)
        finally:
            self._free.put(workshop)

    def _summary(
        self, sampled: list[Mutant], survivors: list[Mutant], explained: list[Mutant], per_file: bool
    ) -> int:  # fmt: skip
        if survivors:
            _say("\nNo test sees these faults:\n" + "\n".join(str(mutant) for mutant in survivors))
        if per_file:
            parts = (sampled, survivors, explained)
            counts, left, known = (Counter(mutant.file for mutant in part) for part in parts)
            _say("\nsurvived  explained  planted  file")
            for file, count in sorted(counts.items()):
                _say(f"{left[file]:8d}  {known[file]:9d}  {count:7d}  {file}")
        rate = len(survivors) / max(1, len(sampled))
        count = f"{len(survivors)} of {len(sampled)} faults survive ({rate:.1%})"
        _say(f"\n{count}; {len(explained)} more are explained")
        return 1 if rate > self.allowed else 0


if __name__ == "__main__":
    sys.exit(main())
