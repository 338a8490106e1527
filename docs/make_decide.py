"""The tables of docs/decisions.md: what `regard decide` prints about the shipped classifier, word by word.

python docs/make_decide.py     a minute or two of one thread
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))  # run as a script, the root of the repository is not on the path

from regard.cli.decide import TEXT  # noqa: E402
from regard.decisions import Answers, answers, shipped_on  # noqa: E402
from regard.decisions.word_answers import shown_attack, shown_nearest, shown_proved  # noqa: E402

PAGE = ROOT / "docs" / "decisions.md"
BEGIN, END = "<!-- written by docs/make_decide.py -->", "<!-- until here -->"


def table(found: Answers) -> str:
    """As the terminal shows it: the typos, then the proofs."""
    ran, proved = found.sentences()
    head = ["| word | typos that change it |", "|---|---|"]
    rows = [f"| {one.word} | {one.changed} of {one.count} |" for one in found.typos or ()]
    more = ["| token | proved | attack | nearest other word |", "|---|---|---|---|"]
    cells = [
        (one.word, shown_proved(found, one), shown_attack(found, one), shown_nearest(one))
        for one in found.words
    ]
    more += [f"| {' | '.join(row)} |" for row in cells]
    return "\n".join([BEGIN, f"> {found.text}", "", ran, "", *head, *rows, "", proved, "", *more, END])


def written(page: str, new: str) -> str:
    """The page with another table."""
    before, rest = page.split(BEGIN)
    return before + new + rest.split(END)[1]


if __name__ == "__main__":
    made = table(answers(shipped_on(TEXT)))
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), made), encoding="utf-8")
    print(made)
