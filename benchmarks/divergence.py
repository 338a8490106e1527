"""python -m benchmarks.divergence [--quick]: does the head that runs ahead tell that a training will diverge?

Small language models learn for a while and then train with a rate that is too large, or go on as they were.
An alarm is a head whose QK norm grew `factor` times as much as that of the median head since the checkpoint
before; the factor is tuned on some seeds and tested on others. Whether a head did it is asked by putting its
queries and keys back to what they were a tenth of the run before: how much of the rise of the loss is undone.
"""

from __future__ import annotations

import argparse
import copy
import math
import statistics
import sys
from dataclasses import dataclass

import torch
from rich.console import Console
from torch import Tensor

from regard.audits.checks.base import Weights
from regard.audits.checks.spectra import comparing_norms
from regard.audits.places import places

WORDS, LENGTH, BATCH = 48, 32, 16
STEPS, EVERY, CALM = 220, 10, 120
"""Steps of a run, steps between checkpoints, and steps before the rate changes."""
HEALTHY, TOO_LARGE = 5e-3, 0.15
RISE = 0.7
"""By how many nats above its best the loss of five steps counts as an explosion."""
AHEAD = STEPS // 10
FACTORS = (1.5, 2.0, 3.0, 4.0, 6.0)
console = Console(width=120)


@dataclass(frozen=True)
class Run:
    """What a training did: when it exploded, the QK norms of all heads at its checkpoints, and how much of
    the rise each head's past undoes.
    """

    exploded: int | None
    norms: list[list[float]]
    undone: list[float]

    def alarm(self, factor: float) -> tuple[int, int] | None:
        """The first step at which a head ran ahead, and which one."""
        for place in range(2, len(self.norms)):
            steps = [b / a for a, b in zip(self.norms[place - 1], self.norms[place], strict=True)]
            first = max(range(len(steps)), key=steps.__getitem__)
            if steps[first] >= factor * statistics.median(steps):
                return place * EVERY, first
        return None

    def named(self, factor: float) -> bool:
        """Whether an alarm came at least a tenth of the run before the explosion."""
        found = self.alarm(factor)
        return self.exploded is not None and found is not None and found[0] <= self.exploded - AHEAD

    def right(self, factor: float) -> bool:
        """Whether the head of that alarm undoes at least half of the rise, as it must to have done it."""
        found = self.alarm(factor)
        return self.named(factor) and found is not None and self.undone[found[1]] >= 0.5


def texts(generator: torch.Generator, chain: Tensor) -> Tensor:
    """Sentences of a Markov chain, said twice: the second half needs attention."""
    half = torch.empty(BATCH, LENGTH // 2, dtype=torch.long)
    half[:, 0] = torch.randint(0, WORDS, (BATCH,), generator=generator)
    for place in range(1, LENGTH // 2):
        half[:, place] = torch.multinomial(chain[half[:, place - 1]], 1, generator=generator)[:, 0]
    return torch.cat([half, half], -1)


def small_model(seed: int) -> torch.nn.Module:
    """Two layers of four heads."""
    import transformers

    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=WORDS, max_position_embeddings=LENGTH, **sizes)
    return transformers.LlamaForCausalLM(config)


def norms_of(model: torch.nn.Module) -> list[float]:
    """The QK norm of every head, as the audit has it."""
    found = []
    for place in places(model):
        own = Weights.of(place.adapter, model, place.path, place.layer)
        found += comparing_norms(own.matrices, own.entering).tolist()
    return found


def undone(model: torch.nn.Module, past: torch.nn.Module, best: float, x: Tensor) -> list[float]:
    """The share of the rise of the loss that goes away when one head has the queries and keys of the past."""
    with torch.no_grad():
        now = float(model(x, labels=x).loss)
        shares = []
        for layer in range(len(model.model.layers)):
            for head in range(4):
                other = copy.deepcopy(model)
                for name in ("q_proj", "k_proj"):
                    own = getattr(other.model.layers[layer].self_attn, name).weight
                    own[8 * head : 8 * head + 8] = getattr(past.model.layers[layer].self_attn, name).weight[
                        8 * head : 8 * head + 8
                    ]
                shares.append((now - float(other(x, labels=x).loss)) / max(now - best, 1e-9))
    return shares


def trained(seed: int, rate: float) -> Run:
    """One run."""
    model = small_model(seed)
    draw = torch.Generator().manual_seed(1000 + seed)
    chain = torch.softmax(3 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7)), -1)
    fixed = texts(torch.Generator().manual_seed(5), chain)
    optimizer = torch.optim.AdamW(model.parameters(), lr=HEALTHY, betas=(0.9, 0.95), weight_decay=0.0)
    losses: list[float] = []
    norms: list[list[float]] = []
    kept: list[torch.nn.Module] = []
    best = math.inf
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"] = HEALTHY if step < CALM else rate
        x = texts(draw, chain)
        loss = model(x, labels=x).loss
        losses.append(float(loss.detach()))
        if step % EVERY == 0:
            norms.append(norms_of(model))
            kept.append(copy.deepcopy(model))
        mean = statistics.fmean(losses[-5:])
        best = min(best, mean)
        if step > 30 and not mean <= best + RISE:
            past = kept[max(0, (step - AHEAD) // EVERY)]
            return Run(step, norms, undone(model, past, best, fixed))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return Run(None, norms, [])


def main() -> int:
    """Tune on some seeds, test on others, print both rates."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.divergence", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two seeds to tune on and two to test")
    tuned, tested = (2, 2) if parser.parse_args().quick else (4, 10)
    torch.set_num_threads(1)
    wild, calm = ([trained(seed, rate) for seed in range(tuned + tested)] for rate in (TOO_LARGE, HEALTHY))

    def score(factor: float) -> float:
        alarms = sum(run.alarm(factor) is not None for run in calm[:tuned])
        return sum(run.named(factor) for run in wild[:tuned]) - alarms

    factor = max(FACTORS, key=score)
    wild, calm = wild[tuned:], calm[tuned:]
    exploded = [run for run in wild if run.exploded is not None]
    most = [max(run.undone) for run in exploded]
    console.print(
        f"{len(exploded)} of {tested} runs with a rate of {TOO_LARGE} exploded; factor {factor}, tuned"
    )
    console.print(f"alarm a tenth of the run ahead: {sum(run.named(factor) for run in exploded)}")
    console.print(f"and the head named undoes half of the rise: {sum(run.right(factor) for run in exploded)}")
    console.print(
        f"false alarms in healthy runs: {sum(r.alarm(factor) is not None for r in calm)} of {tested}"
    )
    if most:
        console.print(
            f"what the best single head undoes: {statistics.median(most):.1%} of the rise in the median run, "
            f"{max(most):.1%} at most"
        )
    return 0 if sum(run.right(factor) for run in exploded) >= 8 else 1


if __name__ == "__main__":
    sys.exit(main())
