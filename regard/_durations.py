"""How durations are said."""

from __future__ import annotations

UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"), (1.0, "second"))


def spoken_time(seconds: float) -> str:
    """A duration as people say it."""
    for length, name in UNITS:
        if seconds >= 1.5 * length or (name == "second" and seconds >= 1):
            count = round(seconds / length)
            return f"about {count:,} {name}{'s' if count != 1 else ''}"
    return "less than a second"
