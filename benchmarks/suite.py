"""What is measured: each case builds its contenders; the first is the yardstick."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import regard
from benchmarks.derivatives import double_backward, forward_mode, head_norm, layer_influence
from benchmarks.layers import layer, training
from benchmarks.measure import Contender

SHAPES = {
    "1x8x2048x64": (1, 8, 2048, 64),
    "1x1x8192x64": (1, 1, 8192, 64),
    "1x1x128x64": (1, 1, 128, 64),
    "1x1x128x384": (1, 1, 128, 384),
    "1x1x20x384": (1, 1, 20, 384),
    "8x8x256x64": (8, 8, 256, 64),
}
LARGE = ("1x8x2048x64", "1x1x8192x64")


@dataclass(frozen=True)
class Target:
    """contender / versus must be at most `limit` (or at least, for a speed-up over a peer)."""

    contender: str
    versus: str
    limit: float
    at_most: bool = True
    shape: str | None = None  # where it was promised; everywhere, if not said

    @property
    def ours(self) -> str:
        """The contender that is regard's."""
        return self.contender if self.at_most else self.versus

    def holds(self, ratio: float) -> bool:
        """Whether the promise is kept."""
        return ratio <= self.limit if self.at_most else ratio >= self.limit

    def words(self, ratio: float) -> str:
        """The promise and what was measured."""
        if self.at_most:
            return f"≤ {self.limit:g} × {self.versus}: {ratio:.2f}"
        return f"≥ {self.limit:g} × faster than {self.contender}: {ratio:.2f}"


@dataclass(frozen=True)
class Limit:
    """A contender at a shape must take at most so many seconds, or so much memory beyond its inputs."""

    contender: str
    shape: str
    seconds: float = float("inf")
    mib: float = float("inf")

    def holds(self, seconds: float, mib: float | None) -> bool:
        """Whether the promise is kept."""
        return seconds <= self.seconds and (mib is None or mib <= self.mib)

    def words(self) -> str:
        """The promise."""
        return f"≤ {self.seconds:g} s" if self.mib == float("inf") else f"≤ {self.mib:g} MiB"


@dataclass(frozen=True)
class Case:
    """A name, contenders for a shape, and what we promise."""

    name: str
    build: Callable[[tuple[int, int, int, int]], dict[str, Contender]]
    targets: tuple[Target, ...] = ()
    shapes: tuple[str, ...] = LARGE
    seconds: float = 6.0
    limits: tuple[Limit, ...] = ()


def qkv(shape: tuple[int, int, int, int], grad: bool = False) -> list[Tensor]:
    """Standard normal queries, keys and values."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).requires_grad_(grad) for _ in range(3)]


def quiet(function: Callable[[], Tensor]) -> Contender:
    """Without autograd."""

    def run() -> Tensor:
        with torch.no_grad():
            return function()

    return run


def gaussian(shape: tuple[int, int, int, int]) -> regard.Gaussian:
    """The bandwidth d^(1/4), at which Gaussian scores have the scale of scaled dot products."""
    return regard.Gaussian(bandwidth=shape[-1] ** 0.25)


def fused(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    q, k, v = qkv(shape)
    weights = torch.randn(shape[:-1], generator=torch.Generator().manual_seed(1))
    g = gaussian(shape)
    bandwidth = shape[-1] ** 0.25
    from torch.nn.attention.flex_attention import flex_attention

    def cdist() -> Tensor:
        return (-0.5 * (torch.cdist(q, k) / bandwidth).square()).softmax(-1) @ v

    norms = -0.5 * k.square().sum(-1) / bandwidth**2
    flex = torch.compile(flex_attention)

    def score(s: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return s + norms[b, h, j]

    return {
        "sdpa": quiet(lambda: F.scaled_dot_product_attention(q, k, v)),
        "attend(Dot)": quiet(lambda: regard.attend(q, k, v)),
        "attend(Gaussian)": quiet(lambda: regard.attend(q, k, v, potential=g)),
        "attend(weights)": quiet(lambda: regard.attend(q, k, v, log_weights=weights)),
        "attend(Gaussian, weights)": quiet(lambda: regard.attend(q, k, v, potential=g, log_weights=weights)),
        "cdist Gaussian": quiet(cdist),
        "FlexAttention Gaussian": quiet(lambda: flex(q, k, v, score_mod=score, scale=1 / bandwidth**2)),
    }


def keops_gaussian(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    lazy = keops_lazy()
    q, k, v = (t[0, 0] for t in qkv(shape))
    g = gaussian(shape)
    bandwidth = shape[-1] ** 0.25

    def keops() -> Tensor:
        squared = ((lazy(q[:, None]) - lazy(k[None])) ** 2).sum(-1)
        return (-squared / (2 * bandwidth**2)).sumsoftmaxweight(lazy(v[None]), dim=1)

    return {
        "attend(Gaussian)": quiet(lambda: regard.attend(q, k, v, potential=g)),
        "KeOps Gaussian": quiet(keops),
    }


def additive(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    lazy = keops_lazy()
    q, k, v = (t[0, 0] for t in qkv(shape))
    w = torch.randn(shape[-1], generator=torch.Generator().manual_seed(1))
    declared = regard.Additive(None, None, w)

    def keops() -> Tensor:
        tanh = 1 - 2 / (1 + (2 * (lazy(q[:, None]) + lazy(k[None]))).exp())
        return (tanh * lazy(w[None, None])).sum(-1).sumsoftmaxweight(lazy(v[None]), dim=1)

    return {
        "sdpa": quiet(lambda: F.scaled_dot_product_attention(q[None, None], k[None, None], v[None, None])),
        "attend(Additive)": quiet(lambda: regard.attend(q, k, v, potential=declared)),
        "KeOps Additive": quiet(keops),
    }


def sparse(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    from entmax import entmax15

    q, k, v = qkv(shape)
    scale = shape[-1] ** -0.5
    return {
        "sdpa": quiet(lambda: F.scaled_dot_product_attention(q, k, v)),
        "attend(Entmax(1.5))": quiet(lambda: regard.attend(q, k, v, normalizer=regard.Entmax(1.5))),
        "attend(Sparsemax)": quiet(lambda: regard.attend(q, k, v, normalizer=regard.Sparsemax())),
        "entmax package": quiet(lambda: entmax15(scale * q @ k.mT, dim=-1) @ v),
    }


def others(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    q, k, v = qkv(shape)
    heads = regard.Alibi.heads(shape[1])
    calls = {
        "attend(Sinkhorn, 5 iterations)": {"normalizer": regard.Sinkhorn(tolerance=0, max_iterations=5)},
        "attend(Sigmoid)": {"normalizer": regard.Sigmoid()},
        "attend(Laplace)": {"potential": regard.Laplace(bandwidth=3.0)},
        "attend(SoftCap(Dot))": {"potential": regard.SoftCap(regard.Dot(), 5.0)},
        "attend(Dot + Alibi, Causal)": {"potential": regard.Dot() + heads, "support": regard.Causal()},
        "attend(Window(256, 0))": {"support": regard.Window(256, 0)},
        "attend(LinearKernel(Elu))": {"normalizer": regard.LinearKernel(regard.normalizers.Elu())},
    }
    contenders = {"sdpa": quiet(lambda: F.scaled_dot_product_attention(q, k, v))}
    for name, options in calls.items():
        contenders[name] = quiet(lambda options=options: regard.attend(q, k, v, **options))
    return contenders


def backward(shape: tuple[int, int, int, int]) -> dict[str, Contender]:
    q, k, v = qkv(shape, grad=True)
    g = gaussian(shape)
    upstream = torch.randn(shape, generator=torch.Generator().manual_seed(2))
    calls: dict[str, Callable[[], Tensor]] = {
        "sdpa forward + backward": lambda: F.scaled_dot_product_attention(q, k, v),
        "attend(Dot) forward + backward": lambda: regard.attend(q, k, v),
        "attend(Gaussian) forward + backward": lambda: regard.attend(q, k, v, potential=g),
    }
    return {
        name: (lambda call=call: torch.autograd.grad(call(), (q, k, v), upstream))
        for name, call in calls.items()
    }


def keops_lazy():  # type: ignore[no-untyped-def]
    # A cache of its own, so that nobody else's runs and ours can disturb each other.
    os.environ.setdefault("KEOPS_CACHE_FOLDER", str(Path(__file__).parent / "results" / "keops"))
    import pykeops

    pykeops.set_verbose(False)
    from pykeops.torch import LazyTensor

    return LazyTensor


CASES = (
    Case(
        "fused kernel",
        fused,
        (
            Target("attend(Dot)", "sdpa", 1.05),
            Target("attend(Gaussian)", "sdpa", 1.15),
            Target("attend(weights)", "sdpa", 1.15),
            Target("attend(Gaussian, weights)", "sdpa", 1.15),
        ),
        seconds=27,
    ),
    Case(
        "Gaussian against KeOps",
        keops_gaussian,
        (Target("KeOps Gaussian", "attend(Gaussian)", 10.0, at_most=False),),
        ("1x8x2048x64",),
    ),
    Case(
        "additive scores",
        additive,
        (Target("KeOps Additive", "attend(Additive)", 10.0, at_most=False),),
        ("1x8x2048x64",),
        10,
    ),
    Case(
        "sparse laws",
        sparse,
        (
            Target("attend(Entmax(1.5))", "sdpa", 5.0),
            Target("entmax package", "attend(Entmax(1.5))", 5.0, at_most=False),
        ),
        seconds=14,
    ),
    Case("other declarations", others, (Target("attend(Sinkhorn, 5 iterations)", "sdpa", 13.0),), seconds=8),
    Case(
        "gradients",
        backward,
        (Target("attend(Gaussian) forward + backward", "sdpa forward + backward", 1.2),),
        seconds=8,
    ),
    Case(
        "forward mode",
        forward_mode,
        (
            Target("linearize(Dot).mv", "sdpa", 3.2, shape="1x8x2048x64"),
            Target("jvp(attend)", "sdpa", 4.0, shape="1x8x2048x64"),
            Target("jvp(naive)", "jvp(attend)", 3.5, at_most=False),
        ),
        seconds=14,
        limits=(
            Limit("jvp(attend)", "1x1x8192x64", mib=64),
            Limit("linearize(Dot).mv", "1x1x8192x64", mib=64),
        ),
    ),
    Case(
        "double backward",
        double_backward,
        (Target("attend double backward", "sdpa forward + backward", 8.0),),
        ("1x8x2048x64",),
        10,
    ),
    Case(
        "norm of a Jacobian",
        head_norm,
        (Target("linearize().norm() to 1e-3", "sdpa", 60.0, shape="1x1x128x64"),),
        ("1x1x128x64", "1x1x8192x64"),
        limits=(Limit("linearize().norm() to 1e-3", "1x1x8192x64", mib=64),),
    ),
    Case(
        "twelve heads",
        layer_influence,
        shapes=("1x1x128x384", "1x1x20x384"),
        limits=(
            Limit("linearize().influence()", "1x1x128x384", seconds=2.0),
            Limit("linearize().norm() of each head", "1x1x20x384", seconds=0.1),
        ),
    ),
    Case("layer of a Transformer", layer, (Target("regard layer", "torch layer", 1.0),), ("8x8x256x64",), 10),
    Case(
        "training a Transformer",
        training,
        (Target("regard training step", "torch training step", 1.0),),
        ("8x8x256x64",),
        20,
    ),
)


def contender_of(stage: str, case: str, shape: str, name: str) -> Contender:
    """One contender of one case, on a short input for the warm-up;
    for measuring memory in a process of its own.
    """
    size = SHAPES[shape]
    build = next(c.build for c in CASES if c.name == case)
    return build((size[0], size[1], 64, size[3]) if stage == "warm-up" else size)[name]
