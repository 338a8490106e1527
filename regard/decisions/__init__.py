"""What `regard decide` computes and shows: could a typo change this answer?"""

from regard.decisions.asked import Asked, loaded_on, shipped_on
from regard.decisions.pairs import PairAnswer, run_pairs
from regard.decisions.typo_runs import Typos
from regard.decisions.word_answers import Answers, WordAnswer, answers, prove_moves, try_typos

__all__ = [
    "Answers",
    "Asked",
    "PairAnswer",
    "Typos",
    "WordAnswer",
    "answers",
    "loaded_on",
    "prove_moves",
    "run_pairs",
    "shipped_on",
    "try_typos",
]
