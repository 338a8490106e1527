"""cost: the most specific rule for what is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from regard._kinds import names_wrong_kinds
from regard._verb import Verb
from regard.costs.account import Cost
from regard.costs.sizes import Sizes
from regard.errors import ArgumentError

assess = Verb("assess")
"""assess.one(subject, sizes, inputs) -> Cost: how the cost of a kind of thing is found.

Examples:
    >>> layer, sizes = regard.Attention(regard.Dot(torch.eye(8), torch.eye(8))), regard.costs.Sizes(16)
    >>> regard.costs.assess(layer, sizes, None).forward == regard.cost(layer, sizes).forward
    True
"""

charge = Verb("charge")
"""charge.one(map, x, ledger) -> value: book what a map takes on a sequence x without memory;
one rule for each map.

Examples:
    >>> class Doubled(regard.maps.Map):
    ...     def __call__(self, x):
    ...         return 2 * x
    >>> @regard.costs.charge.rule(Doubled)
    ... def _doubled(map, x, ledger):
    ...     return x  # no product of matrices
    >>> regard.cost(Doubled(), regard.costs.Sizes(3, width=4)).forward
    0
"""

Inputs = Sequence[Any] | Mapping[str, Any]


@names_wrong_kinds
def cost(subject: Any, sizes: Sizes | int, *, inputs: Inputs | None = None) -> Cost:
    """Flops, bytes and parameters of a forward pass and of training, part by part. Nothing is computed:
    shapes are enough.

    subject: an Attention, a map of `regard.maps`, a module of torch, an Architecture, or the config of a
    model of transformers: itself, as a dict, or the path of its config.json.
    sizes: how long the sequences are; a number means that many tokens of one sequence. inputs: what the
    module is called on, where that is not a sequence of tokens (batch, tokens) or (batch, tokens, width);
    only shapes are read.

    Examples:
        >>> regard.cost(regard.Attention(regard.Dot(torch.zeros(8, 8), torch.zeros(8, 8))), 16).forward > 0
        True
    """
    sizes = Sizes(sizes) if isinstance(sizes, int) else sizes
    if not isinstance(sizes, Sizes):
        raise ArgumentError(
            "sizes", f"is a {type(sizes).__name__}", "give Sizes(tokens, batch=...) or the number of tokens"
        )
    found = assess.one(subject, sizes, inputs)
    assert isinstance(found, Cost)
    return found
