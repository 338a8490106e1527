"""Six exceptions and two warnings; each says what was wrong, what was found and what to do about it."""

from __future__ import annotations

__all__ = [
    "AmbiguousRuleError",
    "ArgumentError",
    "ConvergenceWarning",
    "MissingExtraError",
    "NoRuleError",
    "PerformanceWarning",
    "RankLostError",
    "RefusalError",
    "RegardError",
]


class RegardError(Exception):
    """The root of everything regard raises on purpose.

    Examples:
        >>> try:
        ...     regard.Gaussian(bandwidth=-1.0)
        ... except regard.errors.RegardError as error:
        ...     print(error)
        bandwidth: is -1.0; give a positive finite number
    """


class ArgumentError(RegardError, ValueError):
    """An argument is not what it should be: names it, what was found, and the remedy.

    Examples:
        >>> try:
        ...     regard.Gaussian(bandwidth=-1.0)
        ... except regard.errors.ArgumentError as error:
        ...     print(error.argument)
        bandwidth
    """

    def __init__(self, argument: str, found: str, remedy: str) -> None:
        self.argument, self.found, self.remedy = argument, found, remedy
        super().__init__(f"{argument}: {found}; {remedy}")


class RefusalError(RegardError):
    """Something that was asked for by name cannot do this: one sentence for each reason.

    Examples:
        >>> try:
        ...     regard.apply(regard.Attention(regard.Laplace()), torch.eye(2), engine=regard.engines.Sdpa())
        ... except regard.errors.RefusalError as error:
        ...     print(error)
        engine sdpa refuses: Laplace scores are not a dot product plus a key bias.
    """

    def __init__(self, what: str, reasons: list[str]) -> None:
        self.what, self.reasons = what, reasons
        super().__init__(f"{what} refuses: " + " ".join(reasons))


class RankLostError(RegardError, RuntimeError):
    """Other processes are gone or do not answer: names their ranks, and says what was seen of them.

    Examples:
        >>> print(regard.errors.RankLostError((1, 3), "their connections broke"))
        ranks 1, 3 of the ring: their connections broke
    """

    def __init__(self, ranks: tuple[int, ...], why: str) -> None:
        self.ranks, self.why = ranks, why
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(f"{named} of the ring: {why}")


class NoRuleError(RegardError, TypeError):
    """A verb has no rule for these types: names the registration that would add one.

    Examples:
        >>> try:
        ...     regard.costs.charge("no map", torch.zeros(2, 2), None)
        ... except regard.errors.NoRuleError as error:
        ...     print(str(error)[:60])
        charge has no rule for str, Tensor, NoneType; add one with @
    """


class AmbiguousRuleError(RegardError, TypeError):
    """Two rules match equally well: names the registration that would settle it.

    Examples:
        >>> try:
        ...     regard.declare.rule(torch.nn.Linear)(lambda module: None)
        ... except regard.errors.AmbiguousRuleError as error:
        ...     print(error)
        declare already has a rule for Linear; register a more specific type instead
    """


class MissingExtraError(RegardError, ImportError):
    """An optional dependency is not installed: names the extra to install.

    Examples:
        >>> print(regard.errors.MissingExtraError("matplotlib", "plot"))
        matplotlib is not installed; it comes with: pip install 'regard[plot]'
    """

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; it comes with: pip install 'regard[{extra}]'")


class PerformanceWarning(UserWarning):
    """The answer is right, but a slow or memory-hungry way was taken.

    Examples:
        >>> issubclass(regard.errors.PerformanceWarning, UserWarning)  # right, but slow
        True
    """


class ConvergenceWarning(UserWarning):
    """An iteration stopped before it reached its tolerance.

    Examples:
        >>> import warnings
        >>> short = regard.Attention(regard.Dot(scale=9.0), normalizer=regard.Sinkhorn(1e-12, 1))
        >>> with warnings.catch_warnings(record=True) as heard:
        ...     warnings.simplefilter("always")
        ...     _ = short(torch.randn(4, 2))
        >>> heard[0].category is regard.errors.ConvergenceWarning
        True
    """
