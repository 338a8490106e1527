"""Building the model of a recipe, once it is known that this machine can hold it."""

from __future__ import annotations

from regard._allocation import memory
from regard.errors import ArgumentError
from regard.nn import Design, LanguageModel, RelativePositions, RotaryPositions
from regard.nn.promises import Promise
from regard.norms import TokenMax
from regard.training.recipe import Recipe

NUMBER = 4
"""Bytes of a number in single precision."""
COPIES = 4
"""Of each weight while it trains: itself, its gradient, and two moments."""

BUCKETS = 32
"""Of distances that have a bias of their own, under a promise."""


def build(recipe: Recipe, symbols: int) -> LanguageModel:
    """The model of a recipe over so many different tokens;
    one that is too large is refused before it takes memory.
    """
    there = memory()
    of_weights, of_windows = COPIES * NUMBER * weight_count(recipe, symbols), window_bytes(recipe, symbols)
    if of_weights > there:
        raise _too_large("--width", recipe.width, of_weights, "a smaller one, or fewer --layers")
    if of_weights + of_windows > there:
        raise _too_large(
            "--batch", recipe.batch, of_weights + of_windows, "a smaller one, or a smaller --context"
        )
    try:
        return _model(recipe, symbols)
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, RuntimeError) and "alloc" not in str(error):
            raise
        raise _too_large("--width", recipe.width, of_weights, "a smaller one, or fewer --layers") from error


def weight_count(recipe: Recipe, symbols: int) -> int:
    """2 s w of tokens in and out, 12 w² + 13 w of each layer (four maps of width w, two to and from 4 w,
    norms, biases), a last norm.
    """
    width = recipe.width
    return 2 * symbols * width + recipe.layers * (12 * width**2 + 13 * width) + 2 * width


def window_bytes(recipe: Recipe, symbols: int) -> int:
    """What an update keeps of its windows at the least: scores of tokens and their gradient, and what the
    derivative of a layer reads: queries, keys, values, four times the width inside, what enters its norms.
    """
    return NUMBER * recipe.batch * recipe.context * (2 * symbols + 12 * recipe.layers * recipe.width)


def _model(recipe: Recipe, symbols: int) -> LanguageModel:
    return LanguageModel(design_of(recipe), symbols, recipe.layers, tied=False)


def design_of(recipe: Recipe) -> Design:
    """The design of a recipe: rotary positions, or, under a promise, biases by distance."""
    if recipe.promise is None:
        return Design(recipe.width, recipe.heads, positions=RotaryPositions())
    positions = RelativePositions(farthest=max(recipe.context, 2 * BUCKETS), buckets=BUCKETS)
    promise = Promise(TokenMax(), recipe.promise)
    return Design(recipe.width, recipe.heads, positions=positions, promise=promise)


def _too_large(argument: str, value: int, needed: float, remedy: str) -> ArgumentError:
    found = (
        f"is {value}, and training takes at least {needed / 2**30:,.1f} GiB; this machine has "
        f"{memory() / 2**30:,.1f}"
    )
    return ArgumentError(argument, found, f"give {remedy}")
