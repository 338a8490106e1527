"""python -m benchmarks.everyday [--quick] [--only WORD]: what people feel, small calls, decoding, generation,
and supports that make the work smaller.

One thread, processor time, all contenders of a row in turn in one process; the number is that of the medians.
`before` is what was measured when small calls were first looked at.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.table import Table
from torch import Tensor

import regard
from benchmarks.plain_decoder import PlainDecoder
from regard import hf
from regard.nn import AlibiPositions, Design, LanguageModel, NoPositions, RotaryPositions
from regard.nn.cache import LayerCache
from regard.nn.next_token import Step

console = Console(width=120)
Run = Callable[[], object]
Pair = tuple[Run, Run]
"""Theirs and ours."""


class Goal(ABC):
    """What is promised of two times."""

    @abstractmethod
    def number(self, theirs: float, ours: float) -> float:
        """What is measured, from seconds."""

    @abstractmethod
    def holds(self, number: float) -> bool:
        """Whether the promise is kept."""

    @abstractmethod
    def words(self, number: float) -> str:
        """The number with its unit."""


@dataclass(frozen=True)
class AtMost(Goal):
    """Ours takes at most so many times theirs; None promises nothing."""

    times: float | None

    def number(self, theirs: float, ours: float) -> float:
        return ours / theirs

    def holds(self, number: float) -> bool:
        return self.times is None or number <= self.times

    def words(self, number: float) -> str:
        return f"{number:.2f} ×"

    def __str__(self) -> str:
        return "" if self.times is None else f"≤ {self.times:g} ×"


@dataclass(frozen=True)
class Beyond(Goal):
    """Ours takes at most so many microseconds more than theirs."""

    microseconds: float

    def number(self, theirs: float, ours: float) -> float:
        return 1e6 * (ours - theirs)

    def holds(self, number: float) -> bool:
        return number <= self.microseconds

    def words(self, number: float) -> str:
        return f"{number:+.0f} µs"

    def __str__(self) -> str:
        return f"≤ {self.microseconds:+g} µs"


@dataclass(frozen=True)
class Speed(Goal):
    """Ours makes at least so many times the tokens a second that theirs makes."""

    times: float

    def number(self, theirs: float, ours: float) -> float:
        return theirs / ours

    def holds(self, number: float) -> bool:
        return number >= self.times

    def words(self, number: float) -> str:
        return f"{number:.2f} × the tokens"

    def __str__(self) -> str:
        return f"≥ {self.times:g} ×"


@dataclass(frozen=True)
class Row:
    """A promise, and how its two contenders are made. before: what it once was."""

    what: str
    build: Callable[[], Pair]
    goal: Goal
    before: str = ""
    rounds: int = 400


def normal(*shape: int, seed: int = 0, grad: bool = False) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def against(
    queries: int, keys: int, batch: int = 1, causal: bool = False, own_key: bool = False, **options: object
) -> Pair:
    """SDPA and attend on eight heads of width 64, without autograd; own_key: SDPA has the causal flag."""
    q, k, v = (normal(batch, 8, n, 64, seed=s) for s, n in enumerate((queries, keys, keys)))
    del own_key
    return (
        lambda: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        lambda: regard.attend(q, k, v, **options),  # type: ignore[arg-type]
    )


def gradients() -> Pair:
    """A Gaussian layer forward and backward, against SDPA forward and backward."""
    q, k, v = (normal(1, 8, 2048, 64, seed=s, grad=True) for s in range(3))
    upstream = normal(1, 8, 2048, 64, seed=3)

    def both(call: Callable[[], Tensor]) -> object:
        with torch.enable_grad():
            return torch.autograd.grad(call(), (q, k, v), upstream)

    return (
        lambda: both(lambda: F.scaled_dot_product_attention(q, k, v)),
        lambda: both(lambda: regard.attend(q, k, v, potential=GAUSSIAN)),
    )


def forward_mode() -> Pair:
    """All three tangents at once, from scratch."""
    q, k, v, *tangents = (normal(1, 8, 2048, 64, seed=s) for s in range(6))
    return (
        lambda: F.scaled_dot_product_attention(q, k, v),
        lambda: torch.func.jvp(regard.attend, (q, k, v), tuple(tangents)),
    )


def linearized() -> Pair:
    """The derivative of self-attention at tokens that were linearized before."""
    q, change = normal(1, 8, 2048, 64), normal(1, 8, 2048, 64, seed=1)
    jacobian = regard.linearize(regard.Attention(regard.Dot()), q)
    return lambda: F.scaled_dot_product_attention(q, q, q), lambda: jacobian.mv(change)


def products_alone(count: int) -> Pair:
    """The matrix products of forward mode and nothing else, in its blocks: scores, their change (two as one),
    the change with values, weights with tangents of values, and (six) with values.
    """
    q, k, v = (normal(8, 2048, 64, seed=s) for s in range(3))
    wide_q, wide_k = torch.cat([q, k], -1), torch.cat([k, v], -1)
    scores, change, out = torch.empty(512, 2048), torch.empty(512, 2048), torch.empty(512, 64)

    def ours() -> None:
        for head in range(8):
            for low in range(0, 2048, 512):
                rows = slice(low, low + 512)
                torch.mm(q[head, rows], k[head].mT, out=scores)
                torch.mm(wide_q[head, rows], wide_k[head].mT, out=change)
                torch.mm(change, v[head], out=out)
                for _ in range(count - 4):
                    torch.mm(scores, v[head], out=out)

    four = (t.unsqueeze(0) for t in (q, k, v))
    return partial(F.scaled_dot_product_attention, *four), ours


def generation(positions: regard.nn.positions.Positions) -> Pair:
    """64 tokens after 64 others: the same weights in plain torch, and regard.nn with its cache."""
    torch.manual_seed(0)
    design = Design(width=256, heads=8, positions=positions)
    model = LanguageModel(design, vocabulary=1000, layers=4).eval()
    ids = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))
    theirs = PlainDecoder(model, 128)
    greedy = regard.nn.Sampling(temperature=0.0)
    if not torch.equal(theirs.generate(ids, 8), model.generate(ids, 8, sampling=greedy)):
        raise AssertionError("the plain model is another model")
    return lambda: theirs.generate(ids, 64), lambda: model.generate(ids, 64, sampling=greedy)


def kept(potential: regard.Potential) -> Pair:
    """One more token after 1,023 in a cache, from its projections to averages of values: plain torch with
    SDPA, and the attention of regard.nn, which keeps |k|² beside the keys.
    """
    mechanism = regard.Attention(potential, support=regard.Causal())
    layer, cache = regard.nn.MultiHeadAttention(512, 8, mechanism=mechanism).eval(), LayerCache()
    cache.extend(*(normal(1, 8, 1024, 64, seed=s) for s in (1, 2)))
    new, step = normal(1, 1, 3 * 512), Step(layer)
    keys, values = (normal(1, 8, 1024, 64, seed=s) for s in (1, 2))

    def theirs() -> Tensor:
        q, k, v = new.view(1, 3, 8, 1, 64).unbind(1)
        keys[:, :, 1023:], values[:, :, 1023:] = k, v
        return F.scaled_dot_product_attention(q, keys, values).reshape(1, 1, 512)

    def ours() -> Tensor:
        cache.length = cache._squared = 1023  # the token is new every time
        return step.mix(new, cache)

    return theirs, ours


def norms_and_kernel() -> Pair:
    """What no Gaussian step without a cache can do without: norms of the keys, and the kernel with a bias."""
    q, k, v = (normal(1, 8, n, 64, seed=s) for s, n in enumerate((1, 1024, 1024)))
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu

    def ours() -> Tensor:
        bias = torch.linalg.vector_norm(k, dim=-1).square_().mul_(-1 / 16).unsqueeze(-2)
        found: Tensor = kernel(q, k, v, 0.0, False, attn_mask=bias, scale=0.125)[0]
        return found

    return lambda: F.scaled_dot_product_attention(q, k, v), ours


def plugged() -> Pair:
    """The same small Llama of transformers with its own "sdpa" and with regard's attention: 32 tokens."""
    from benchmarks.plug import llama

    hf.register()
    ids = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0))

    def run(implementation: str) -> Run:
        from transformers import DynamicCache

        model = llama(implementation, 4)

        def generate() -> object:
            cache, new = DynamicCache(), ids
            for _ in range(32):
                model(input_ids=new, past_key_values=cache, use_cache=True)
                new = ids[:, :1]
            return cache

        return generate

    return run("sdpa"), run("regard")


GAUSSIAN = regard.Gaussian(bandwidth=64**0.25)
DOCUMENTS = regard.Document(torch.arange(2048) // 256) & regard.Causal()
SLOPES = regard.Dot() + regard.Alibi.heads(8)
small, one, long = partial(against, 16, 16), partial(against, 1, 1024), partial(against, 2048, 2048)

ROWS = (
    Row("a call on 16 tokens: Dot", small, Beyond(80), "+727 µs"),
    Row("  Dot, Causal", partial(small, causal=True, support=regard.Causal()), Beyond(80)),
    Row("  Gaussian", partial(small, potential=GAUSSIAN), Beyond(150)),
    Row("  Cosine", partial(small, potential=regard.Cosine(scale=8.0)), Beyond(150)),
    Row("  Rotary(Dot)", partial(small, potential=regard.Rotary(regard.Dot())), Beyond(150)),
    Row(
        "  Dot + Alibi, Causal",
        partial(small, causal=True, potential=SLOPES, support=regard.Causal()),
        Beyond(150),
    ),
    Row("  Dot with weights", partial(small, log_weights=normal(1, 8, 16, seed=9)), Beyond(150)),
    Row("one query on 1,024 keys: Dot", one, AtMost(1.3), "4.9 ×"),
    Row("  Dot, keys in a cache of regard.nn", partial(kept, regard.Dot()), AtMost(1.3)),
    Row("  Gaussian, keys in a cache of regard.nn", partial(kept, GAUSSIAN), AtMost(1.6), "14.1 ×"),
    Row("  Gaussian, no cache", partial(one, potential=GAUSSIAN), AtMost(None), "14.1 ×"),
    Row("  norms of keys and kernel: its floor", norms_and_kernel, AtMost(None)),
    Row("(8, 8, 128, 64): Dot", partial(against, 128, 128, 8), AtMost(1.1), "1.42 ×", 100),
    Row(
        "2,048 tokens: Dot + Alibi, Causal",
        partial(long, causal=True, potential=SLOPES, support=regard.Causal()),
        AtMost(1.15),
        "1.98 ×",
        10,
    ),
    Row(
        "  8 documents of 256, Causal",
        partial(long, causal=True, support=DOCUMENTS),
        AtMost(0.3),
        "1.33 ×",
        20,
    ),
    Row("  Window(256, 0)", partial(long, causal=True, support=regard.Window(256, 0)), AtMost(0.6), "", 20),
    Row("  Gaussian forward and backward", gradients, AtMost(1.15), "", 6),
    Row("  JVP from scratch", forward_mode, AtMost(3.6), "", 5),
    Row("    its six products alone", partial(products_alone, 6), AtMost(None), "", 5),
    Row("  linearize(...).mv", linearized, AtMost(3.0), "", 5),
    Row("    its five products alone", partial(products_alone, 5), AtMost(None), "", 5),
    Row(
        "regard.nn generates 64 tokens: no positions", partial(generation, NoPositions()), Speed(0.9), "", 12
    ),
    Row("  rotary positions", partial(generation, RotaryPositions()), Speed(0.9), "", 12),
    Row("  ALiBi", partial(generation, AlibiPositions()), Speed(0.9), "", 12),
    Row("32 steps of a Llama with the plug", plugged, Speed(0.9), "", 12),
)


def measure(pair: Pair, rounds: int) -> tuple[float, float]:
    """Medians of processor time, the two in turn and in either order."""
    times: tuple[list[float], list[float]] = ([], [])
    order = random.Random(0)
    for turn in range(rounds + max(1, rounds // 10)):
        for index in order.sample((0, 1), 2):
            start = time.process_time()
            pair[index]()
            spent = time.process_time() - start
            if turn >= max(1, rounds // 10):
                times[index].append(spent)
    return statistics.median(times[0]), statistics.median(times[1])


def main() -> int:
    """Measure and print; exit status 1 if a target is missed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.everyday", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a third of the repetitions")
    parser.add_argument("--only", help="rows whose name contains this", default="")
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = Table(title="what people feel: ours against theirs, one thread", title_justify="left")
    for column in ("what", "theirs (ms)", "ours (ms)", "now", "target", "before"):
        table.add_column(column, justify="left" if column == "what" else "right")
    missed = 0
    for row in (row for row in ROWS if options.only in row.what):
        with torch.no_grad():
            theirs, ours = measure(row.build(), max(3, row.rounds // (3 if options.quick else 1)))
        number = row.goal.number(theirs, ours)
        missed += not row.goal.holds(number)
        color = "green" if row.goal.holds(number) else "red"
        table.add_row(
            row.what,
            f"{1e3 * theirs:.3f}",
            f"{1e3 * ours:.3f}",
            f"[{color}]{row.goal.words(number)}[/]",
            str(row.goal),
            row.before,
        )
    console.print(table)
    console.print(f"{missed} of the targets missed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
