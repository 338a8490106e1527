"""What the tokens of a batch may see, and which normalizers keep to it."""

from __future__ import annotations

from torch import Tensor

from regard._object import Object
from regard.errors import ArgumentError
from regard.normalizers import Exponential, Normalizer, Sigmoid
from regard.parameters import leads
from regard.supports import Document, Padding, Support, Where


def check_order(normalizer: Normalizer, support: Support) -> None:
    """Where queries see no later keys, a row of weights may depend neither on later queries nor on how
    many keys follow.
    """
    if support.span(0, 0)[1] > 0:
        return
    _check_rows(normalizer, "tokens see their past alone")
    if isinstance(normalizer, (Sigmoid, Exponential)) and normalizer.bias is None:
        name = type(normalizer).__name__
        found = (
            f"has the normalizer {name}(), whose bias depends on the number of keys, "
            "and tokens see their past alone"
        )
        raise ArgumentError(
            "mechanism", found, f"give {name}(bias=...), e.g. minus the log of a typical length"
        )


def check_pieces(normalizer: Normalizer) -> None:
    """With a cache, queries come in pieces: a row of weights may not depend on the others."""
    _check_rows(normalizer, "a cache gives tokens piece by piece")


def _check_rows(normalizer: Normalizer, where: str) -> None:
    if not normalizer.rowwise:
        found = f"has the normalizer {type(normalizer).__name__}, which couples all queries, and {where}"
        raise ArgumentError(
            "mechanism", found, "use a normalizer of rows, e.g. Softmax(), or Full() support without a cache"
        )


def check_batch(support: Support, x: Tensor) -> None:
    """A support with one entry for each sequence says so in a dimension of its own,
    or it would be read as one for each head.
    """
    if not isinstance(support, Support):
        raise ArgumentError(
            "support",
            f"is a {type(support).__name__}",
            "give a Support, e.g. Causal(), Padding(...) or Where(mask)",
        )
    batch = x.shape[:-2]
    if batch.numel() <= 1:
        return
    for part, _, lead in leads(support):
        if lead and lead[-1] > 1 and len(lead) <= len(batch):
            found = f"is {part!r} for x {list(x.shape)}: one entry for each head, or for each sequence?"
            raise ArgumentError("support", found, f"say which: {_remedy(part)}")


def _remedy(support: Object) -> str:
    if isinstance(support, Padding):
        return "Padding(lengths.unsqueeze(-1)) for sequences, Padding(lengths.unsqueeze(0)) for heads"
    if isinstance(support, Document):
        return "Document(ids.unsqueeze(-2)) for sequences, Document(ids.unsqueeze(0)) for heads"
    if isinstance(support, Where):
        return "Where(mask.unsqueeze(-3)) for sequences, Where(mask.unsqueeze(0)) for heads"
    return (
        "give its tensors a dimension of size one: after the batch for sequences, before the heads for heads"
    )
