"""A measurement of the monitor as numbers with names, which is what loggers take."""

from __future__ import annotations

import math

from regard._written import number
from regard.nn.monitoring.rule import Entry
from regard.nn.monitoring.table import COLUMNS

PREFIX = "attention"


def scalars(entry: Entry, *, heads: bool = False) -> dict[str, float]:
    """{"attention/layers.0.self_attn/max_logit": 3.2, ...}: for each layer the head that is largest, or of
    least entropy; heads=True has every head too, and `attention/warnings` counts the heads that were named.

    For wandb.log, SummaryWriter.add_scalar, Trainer.log, Logger.log_metrics.

    Examples:
        >>> entry = {"layers": {"layer": {"max_logit": [1.0, 3.0], "entropy": [0.5, 0.2]}}, "warnings": []}
        >>> regard.callbacks.scalars(entry)
        {'attention/layer/entropy': 0.2, 'attention/layer/max_logit': 3.0, 'attention/warnings': 0.0}
    """
    found: dict[str, float] = {}
    for layer, numbers in entry["layers"].items():
        for name, _, choose in COLUMNS:
            values = [number(value) for value in numbers.get(name, [])]
            place = f"{PREFIX}/{layer}/{name}" if layer else f"{PREFIX}/{name}"
            known = [value for value in values if not math.isnan(value)]
            if known:
                found[place] = choose(known)
            if heads:
                found |= {f"{place}/head {index}": value for index, value in enumerate(values)}
    return {**found, f"{PREFIX}/warnings": float(len(entry["warnings"]))}
