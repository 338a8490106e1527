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
    """The root of everything regard raises on purpose."""


class ArgumentError(RegardError, ValueError):
    """An argument is not what it should be: names it, what was found, and the remedy."""

    def __init__(self, argument: str, found: str, remedy: str) -> None:
        self.argument, self.found, self.remedy = argument, found, remedy
        super().__init__(f"{argument}: {found}; {remedy}")


class RefusalError(RegardError):
    """Something that was asked for by name cannot do this: one sentence for each reason."""

    def __init__(self, what: str, reasons: list[str]) -> None:
        self.what, self.reasons = what, reasons
        super().__init__(f"{what} refuses: " + " ".join(reasons))


class RankLostError(RegardError, RuntimeError):
    """Other processes are gone or do not answer: names their ranks, and says what was seen of them."""

    def __init__(self, ranks: tuple[int, ...], why: str) -> None:
        self.ranks, self.why = ranks, why
        named = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        super().__init__(f"{named} of the ring: {why}")


class NoRuleError(RegardError, TypeError):
    """A verb has no rule for these types: names the registration that would add one."""


class AmbiguousRuleError(RegardError, TypeError):
    """Two rules match equally well: names the registration that would settle it."""


class MissingExtraError(RegardError, ImportError):
    """An optional dependency is not installed: names the extra to install."""

    def __init__(self, package: str, extra: str) -> None:
        self.package, self.extra = package, extra
        super().__init__(f"{package} is not installed; it comes with: pip install 'regard[{extra}]'")


class PerformanceWarning(UserWarning):
    """The answer is right, but a slow or memory-hungry way was taken."""


class ConvergenceWarning(UserWarning):
    """An iteration stopped before it reached its tolerance."""
