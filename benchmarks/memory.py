"""Peak memory as the length grows: linear for every engine but the reference, which holds all pairs."""

from __future__ import annotations

from collections.abc import Callable

import torch

import regard
from benchmarks.measure import Contender

DECLARATIONS: dict[str, Callable[[], dict[str, object]]] = {
    "sdpa: Dot": lambda: {"engine": regard.engines.Sdpa()},
    "sdpa: Gaussian": lambda: {"potential": regard.Gaussian(bandwidth=3.0), "engine": regard.engines.Sdpa()},
    "sdpa: Dot + Alibi, Window": lambda: {
        "potential": regard.Dot() + regard.Alibi(0.1),
        "support": regard.Window(512, 0),
        "engine": regard.engines.Sdpa(),
    },
    "tiled: Laplace": lambda: {"potential": regard.Laplace(bandwidth=3.0), "engine": regard.engines.Tiled()},
    "tiled: Additive": lambda: {
        "potential": regard.Additive(None, None, torch.ones(64)),
        "engine": regard.engines.Tiled(),
    },
    "tiled: Entmax(1.5)": lambda: {"normalizer": regard.Entmax(1.5), "engine": regard.engines.Tiled()},
    "tiled: Sinkhorn": lambda: {"normalizer": regard.Sinkhorn(0.0, 1), "engine": regard.engines.Tiled()},
    "linear: Elu, Causal": lambda: {
        "normalizer": regard.LinearKernel(regard.normalizers.Elu()),
        "support": regard.Causal(),
        "engine": regard.engines.LinearEngine(),
    },
}


def run_of(stage: str, name: str, length: int) -> Contender:
    """One forward pass over `length` keys; a few hundred queries stand for all, but for Sinkhorn,
    whose columns need them.
    """
    length = 256 if stage == "warm-up" else length
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 1, length, 64, generator=generator) for _ in range(3))
    options = DECLARATIONS[name]()

    def run() -> torch.Tensor:
        with torch.no_grad():
            return regard.attend(q, k, v, **options)  # type: ignore[arg-type]

    return run
