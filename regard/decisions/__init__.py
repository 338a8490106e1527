"""What `regard decide` computes and shows: could a typo change this answer?"""

from regard.decisions.asked import Asked, loaded_on, shipped_on
from regard.decisions.typo_runs import Typos
from regard.decisions.word_answers import Answers, WordAnswer, answers, prove_moves, try_typos

__all__ = [
    "Answers",
    "Asked",
    "Typos",
    "WordAnswer",
    "answers",
    "loaded_on",
    "prove_moves",
    "shipped_on",
    "try_typos",
]
