"""Training small language models on any text: what a step is, what a checkpoint holds,
and how regular every head stays.
"""

from regard.training.checkpoint import Checkpoint
from regard.training.loop import Diverged, Milestone, Stepped, Training, Warned
from regard.training.recipe import Recipe
from regard.training.text import Alphabet, Text

__all__ = [
    "Alphabet",
    "Checkpoint",
    "Diverged",
    "Milestone",
    "Recipe",
    "Stepped",
    "Text",
    "Training",
    "Warned",
]
