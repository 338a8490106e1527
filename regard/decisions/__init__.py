"""What `regard decide` asks and shows: could a typo change this answer?"""

from regard.decisions.asked import Asked, loaded_on, shipped_on
from regard.decisions.word_answers import Answers, WordAnswer, answers

__all__ = ["Answers", "Asked", "WordAnswer", "answers", "loaded_on", "shipped_on"]
