"""Sizes: how long the sequences are whose cost is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from regard.errors import ArgumentError


@dataclass(frozen=True)
class Sizes:
    """`tokens` of each of `batch` sequences; `context` is how many tokens attention to another sequence sees,
    as many where it is None.

    causal: whether a query sees its past only; None takes what the map, the module or the config says.
    width: of the tokens, where a map of any width is given.

    Examples:
        >>> sizes = regard.costs.Sizes(tokens=128, batch=4)
        >>> sizes.total
        512
    """

    tokens: int
    batch: int = 1
    context: int | None = None
    causal: bool | None = None
    width: int | None = None

    def __post_init__(self) -> None:
        for name in ("tokens", "batch", "context", "width"):
            value = getattr(self, name)
            if value is None and name in ("context", "width"):
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ArgumentError(name, f"is {value!r}", "give a whole number, one or more")
        if self.causal is not None and not isinstance(self.causal, bool):
            raise ArgumentError(
                "causal", f"is {self.causal!r}", "give True, False, or None for what is declared"
            )

    @property
    def total(self) -> int:
        """Tokens of all sequences."""
        return self.tokens * self.batch
