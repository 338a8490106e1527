"""What `regard decide` asks and shows: could a typo change this answer?"""

from regard.decisions.answers import Answers, WordAnswer, answers
from regard.decisions.asked import Asked, loaded_on, shipped_on

__all__ = ["Answers", "Asked", "WordAnswer", "answers", "loaded_on", "shipped_on"]
