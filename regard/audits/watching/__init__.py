"""Watching: attention as it happens, whatever module it happens in; one file for each way of computing it."""

from __future__ import annotations

from regard.audits.watching.observed import ObservedSite
from regard.audits.watching.places import Spot, spots
from regard.audits.watching.seen import Seen, Sight
from regard.audits.watching.watch import Watch, watching

__all__ = ["ObservedSite", "Seen", "Sight", "Spot", "Watch", "spots", "watching"]
