"""Tiny models of every architecture that the installed transformers builds offline, with an input for each:
sizes are found by their names in the config, inputs by the names of what a model takes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tests.audits.architectures.inputs import (
    PREFERRED,
    candidates,
    heeded,
    inputs_for,
    wanted_placeholders,
    with_placeholders,
)
from tests.audits.architectures.sizes import SHRINKING, by_depth, tiny_config
from tests.audits.architectures.special import NOT_ONE

__all__ = ["coverage_of", "inputs_for", "kinds", "runnable", "tiny_model"]

NOT_ALONE = [
    "encoder-decoder",
    "speech-encoder-decoder",
    "vision-encoder-decoder",
    "rag",
    "timm_backbone",
    "timm_wrapper",
    "EvollaModel",
    "vision-text-dual-encoder",
    "musicgen",
    "musicgen_melody",
]
"""Types that are made of other models, which somebody has to choose; that need a package; a second name."""
MOST = 300_000_000
"""Parameters of a model that is called tiny."""

ROUNDS = 6
"""How often a call is corrected by what a model says about it."""


def kinds() -> list[str]:
    """Every model type with a model."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    known = set(MODEL_MAPPING.keys())
    return sorted(kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind] in known and kind not in NOT_ALONE)


def tiny_model(kind: str, implementation: str = "sdpa") -> nn.Module:
    """A model of a type with random weights, in eval mode."""
    return next(_models(kind, implementation))


def _models(kind: str, implementation: str = "sdpa") -> Iterator[nn.Module]:
    """Tiny models of a type: the first that can be built, then others."""
    from transformers import CONFIG_MAPPING

    failures: list[Exception] = []
    for shrink in SHRINKING:
        try:
            config = tiny_config(CONFIG_MAPPING[kind], shrink)
            if shrink is by_depth:
                _small(config)
            model = _built(config, implementation)
        except ImportError as error:
            raise CannotRun([error]) from error
        except Exception as error:
            failures.append(error)
        else:
            yield model
    if len(failures) == len(SHRINKING):
        raise CannotRun(failures)


def _small(config: Any) -> None:
    """A model with sizes as published may be too large."""
    with torch.device("meta"):
        count = sum(weight.numel() for weight in _made(config, "eager").parameters())
    if count > MOST:
        raise MemoryError(f"it has {count:,} parameters with two layers")


def _built(config: Any, implementation: str) -> nn.Module:
    torch.manual_seed(0)
    try:
        model = _made(config, implementation)
    except (ValueError, ImportError, NotImplementedError, TypeError):
        model = _made(config, "eager")
    return model.eval()


def _made(config: Any, implementation: str) -> nn.Module:
    import transformers

    if type(config).__name__ == "EvollaConfig":  # AutoModel knows it by another name
        return transformers.EvollaModel(config)
    return transformers.AutoModel.from_config(config, attn_implementation=implementation)


def runnable(kind: str) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model of a type, and the fullest input that it runs on; sizes as published come last."""
    failures: list[Exception] = []
    models = _models(kind)
    for group in (itertools.islice(models, 2), models):
        lesser = []
        for model in group:
            offers = [(model, *offer) for offer in candidates(model)]
            fullest = [offer for offer in offers if offer[1] == offers[0][1]]
            lesser += offers[len(fullest) :]
            if (found := _first(fullest, failures)) is not None:
                return found
        if (
            found := _first(sorted(lesser, key=lambda offer: PREFERRED.index(offer[1])), failures)
        ) is not None:
            return found
    raise CannotRun(failures)


def _first(offers: list[Any], failures: list[Exception]) -> tuple[nn.Module, dict[str, Any]] | None:
    """The first model with an input that it runs on."""
    for model, wanted, call in offers:
        try:
            return model, _run(model, call, wanted)
        except Exception as error:
            failures.append(error)
    return None


class CannotRun(Exception):
    """What was said to each input."""

    def __init__(self, failures: list[Exception]) -> None:
        missing = [error for error in failures if isinstance(error, ImportError)]
        said = [f"{type(error).__name__}: {_first_line(error)}" for error in failures]
        super().__init__(
            _first_line(missing[0]).partition(". ")[0] if missing else "; ".join(dict.fromkeys(said))
        )
        self.failures = failures


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _width(model: nn.Module) -> int:
    """How many coordinates a token of the text has."""
    try:
        return int(model.get_input_embeddings().weight.shape[-1])
    except Exception:
        return 1


def _run(model: nn.Module, call: dict[str, Any], wanted: tuple[str, ...]) -> dict[str, Any]:
    """The call that runs: the given one, with as many placeholders as the model asks for."""
    counts: dict[str, int] | None = dict.fromkeys(wanted, 1)
    last: Exception | None = None
    rounds = 0
    while counts is not None:
        full = with_placeholders(model.config, call, counts)
        try:
            with torch.no_grad():
                model(**full)
            return full
        except Exception as error:
            last = error
            if (other := heeded(error, call)) is not None and rounds < ROUNDS:
                call, rounds = other, rounds + 1
            else:
                rounds += 1
                counts = wanted_placeholders(error, counts, _width(model)) if rounds < ROUNDS else None
    assert last is not None
    raise last


def coverage_of(kind: str) -> tuple[str, str]:
    """How the attention of a tiny model of a type is covered, the worst of its layers, and why no better:
    declared, observed, part (some of it is not covered), or none where there is none.
    """
    from regard.audits.checks import checks
    from regard.audits.run import Audit
    from tests.audits.families import enlivened

    if kind in NOT_ONE:
        return "not run", NOT_ONE[kind]
    model, call = runnable(kind)
    rows = [check for check in checks() if check.name == "rows"]
    run = Audit(enlivened(model, 1.0), [call], checks=rows)
    run.measure()
    coverage = run.report().coverage
    if not coverage:
        return "none", ""
    for level, entries in (
        ("part", [entry for entry in coverage if not entry.covered]),
        ("observed", [entry for entry in coverage if entry.level == "observed"]),
    ):
        if entries:
            return level, entries[0].reason
    return "declared", ""
