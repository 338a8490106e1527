"""regard checks: what an audit can ask."""

from __future__ import annotations


def checks() -> None:
    """What an audit can ask: the names for --checks, what each needs, and its question."""
    from regard.audits import terminal
    from regard.audits.checks import checks as known

    terminal.show_checks(known(), terminal.output())
