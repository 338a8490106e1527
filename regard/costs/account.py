"""Cost: what a forward pass and a step of training take, part by part, as a value; Ledger:
where the parts are booked.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from regard.costs.sizes import Sizes

EMBEDDING, PROJECTIONS, SCORES, MIXING, OUTPUT = "embedding", "projections", "scores", "mixing", "output"
FEED_FORWARD, NORMALIZATION, HEAD, OTHER = "feed-forward", "normalization", "head", "other"
ORDER = (EMBEDDING, PROJECTIONS, SCORES, MIXING, OUTPUT, FEED_FORWARD, NORMALIZATION, HEAD, OTHER)
"""The parts of a network, in the order of a table."""
PAIRS = (SCORES, MIXING)
"""Parts whose products run over pairs of tokens."""
LAYERS = (PROJECTIONS, OUTPUT, FEED_FORWARD)
"""Parts of a layer whose products run over tokens, each with a weight."""
SOFTMAX = 5
"""Operations of a softmax for each pair: largest, difference, exponential, sum, quotient."""


@dataclass(frozen=True)
class Part:
    """matmul: flops of matrix products, all pairs counted; visible: the same for the pairs that the support
    allows.

    softmax: flops of normalizing scores; weights: bytes of the parameters; moved: bytes that the products
    read and write, each once.

    Examples:
        >>> found = regard.cost(torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 128)
        >>> found.part("feed-forward").matmul == 2 * 2 * 128 * 64 * 256
        True
    """

    name: str
    matmul: int = 0
    visible: int = 0
    softmax: int = 0
    parameters: int = 0
    weights: int = 0
    moved: int = 0

    @property
    def training(self) -> int:
        """Flops of the products forward and backward: each product has two in its gradient."""
        return 3 * self.matmul


@dataclass(frozen=True, repr=False)
class Cost:
    """Flops, bytes and parameters by part. `activations`: bytes kept for the backward pass.

    square: whether attention pairs all tokens with all tokens, so that it grows with the square of the
    length.

    Examples:
        >>> found = regard.cost(torch.nn.TransformerEncoderLayer(64, 4, 256, batch_first=True), 128)
        >>> found.training == 3 * found.forward, found.parameters
        (True, 49984)
    """

    sizes: Sizes
    parts: tuple[Part, ...]
    activations: int
    square: bool = True

    def part(self, name: str) -> Part:
        """The part of that name, empty where there is none."""
        return next((part for part in self.parts if part.name == name), Part(name))

    @property
    def forward(self) -> int:
        """Flops of all matrix products, masked pairs included;
        columns of zeros that a kernel wants added to narrow heads are not.
        """
        return sum(part.matmul for part in self.parts)

    @property
    def visible(self) -> int:
        """Flops of all matrix products where kernels skip every masked pair."""
        return sum(part.visible for part in self.parts)

    @property
    def training(self) -> int:
        """Flops of all matrix products, forward and backward: three times forward."""
        return 3 * self.forward

    @property
    def recomputed(self) -> int:
        """What fused kernels add in the backward pass,
        where they compute the scores again instead of keeping them.
        """
        return self.part(SCORES).matmul

    @property
    def softmax(self) -> int:
        """Flops of normalizing scores, forward."""
        return sum(part.softmax for part in self.parts)

    @property
    def parameters(self) -> int:
        """How many there are; shared ones count once."""
        return sum(part.parameters for part in self.parts)

    @property
    def weights(self) -> int:
        """Bytes of the parameters."""
        return sum(part.weights for part in self.parts)

    @property
    def moved(self) -> int:
        """Bytes that the products of a forward pass read and write."""
        return sum(part.moved for part in self.parts)

    @property
    def attention(self) -> int:
        """Flops of the products over pairs: scores and mixing."""
        return sum(self.part(name).matmul for name in PAIRS)

    @property
    def linear(self) -> int:
        """Flops of the products of the layers with weights: projections, output, feed-forward."""
        return sum(self.part(name).matmul for name in LAYERS)

    @property
    def approximate_forward(self) -> int:
        """2 · parameters · tokens."""
        return 2 * self.parameters * self.sizes.total

    @property
    def approximate_training(self) -> int:
        """6 · parameters · tokens."""
        return 6 * self.parameters * self.sizes.total

    @property
    def crossover(self) -> float | None:
        """The length T* at which pairs cost as much as the weights of the layers; None where no attention
        grows with the square.

        Weights take β T flops and pairs α T², so T* = β/α. For h heads of widths c and e, g of them for keys,
        and m matrices of width F: T* = (D h c + D g (c + e) + h e D + m D F) / (h (c + e)), which is 2D +
        mF/2 where g = h and h c = h e = D.
        """
        if not self.square or not self.attention:
            return None
        return float(Fraction(self.sizes.tokens * self.linear, self.attention))

    @property
    def causal_crossover(self) -> float | None:
        """The same where kernels skip the masked half: T (T + 1)/2 pairs, so twice as long less one token."""
        return None if self.crossover is None else 2 * self.crossover - 1

    def table(self) -> str:
        """The parts as lines of text, with the approximation beside."""
        from regard.costs.wording import lines

        return "\n".join(lines(self))

    __repr__ = table

    def _repr_html_(self) -> str:
        """The same for notebooks."""
        from regard.costs.wording import markup

        return markup(self)

    def frame(self) -> Any:
        """The parts as a pandas DataFrame, with the numbers as they are."""
        from regard.costs.wording import frame

        return frame(self)


@dataclass
class Ledger:
    """Parts while they are being counted, for one sequence of a batch; activations are kept once each."""

    sizes: Sizes
    square: bool = True
    parts: dict[str, Part] = field(default_factory=dict)
    kept: dict[int, Tensor] = field(default_factory=dict)
    owned: dict[int, Tensor] = field(default_factory=dict)

    def book(self, entry: Part) -> None:
        """Add to the part of that name."""
        old = self.parts.get(entry.name, Part(entry.name))
        sums = {
            f.name: getattr(old, f.name) + getattr(entry, f.name) for f in fields(Part) if f.name != "name"
        }
        self.parts[entry.name] = replace(old, **sums)

    def product(self, name: str, x: Tensor, w: Tensor) -> Tensor:
        """Book the product x w of tokens with a weight, keep x for its gradient, own w; gives the value."""
        value = x @ w
        flops = 2 * value.numel() * x.shape[-1]
        self.keep(x)
        self.book(
            Part(
                name,
                flops * self.sizes.batch,
                flops * self.sizes.batch,
                moved=size(w) + self.sizes.batch * (size(x) + size(value)),
            )
        )
        self.own(name, w)
        return value

    def own(self, name: str, *parameters: Tensor | None) -> None:
        """Count parameters, each once."""
        for tensor in parameters:
            if tensor is not None and tensor.dtype.is_floating_point and id(tensor) not in self.owned:
                self.owned[id(tensor)] = tensor
                self.book(Part(name, parameters=tensor.numel(), weights=size(tensor)))

    def keep(self, *tensors: Tensor) -> None:
        """Remember what the backward pass needs, each tensor once."""
        self.kept.update((id(tensor), tensor) for tensor in tensors)

    def cost(self) -> Cost:
        """The value."""
        activations = self.sizes.batch * sum(size(tensor) for tensor in self.kept.values())
        return Cost(self.sizes, in_order(self.parts.values()), activations, self.square)


def in_order(parts: Iterable[Part]) -> tuple[Part, ...]:
    """Parts in the order of a table."""
    return tuple(sorted(parts, key=lambda part: ORDER.index(part.name)))


def size(tensor: Tensor) -> int:
    """Bytes of the entries."""
    return tensor.numel() * tensor.element_size()


def causal_pairs(queries: int, keys: int) -> int:
    """Pairs j ≤ i of queries and keys in one order."""
    whole = min(queries, keys)
    return whole * (whole + 1) // 2 + (queries - whole) * keys


def windowed_pairs(tokens: int, window: int) -> int:
    """Pairs 0 ≤ i - j < window of a sequence with itself."""
    return causal_pairs(tokens, min(tokens, window))


def element(dtype: torch.dtype) -> int:
    """Bytes of one number."""
    return torch.empty((), dtype=dtype, device="meta").element_size()
