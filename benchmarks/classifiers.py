"""Small classifiers of sentences, LayerNorm last with ε = 1e-12, trained where their weights are not kept.

`TARGETED`: as the targets of `benchmarks.decisions` were set on: one vector a word, width 64, four heads, 128
neurons, GELU, three passes over 6,920 sentences. `PUBLISHED`: as `benchmarks.published` compares: width 128,
128 neurons, ReLU, all weights drawn from N(0, 0.02²), five passes, and a layer with tanh before the logits.

Sentences are those of SST-2, by the path of a folder that holds sst_train.json and sst_dev.json, lists of
{"sentence": …, "label": 0 or 1} (custom_data/sst of github.com/eth-sri/DeepT). SST-2 does not come with this
project.
"""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from regard._files import write_whole

LONGEST, BATCH, WARM = 28, 32, 100
NONE, START, UNKNOWN = 0, 1, 2

Sentence = tuple[list[str], int]


@dataclass(frozen=True)
class Recipe:
    """Sizes of a classifier and how it is trained; deviation: of the weights at the beginning, None as torch
    draws them; hidden: how many words of a sentence are made unknown.
    """

    name: str
    width: int
    neurons: int
    activation: str
    passes: int
    rate: float
    hidden: float
    deviation: float | None = None
    heads: int = 4


TARGETED = Recipe("words", 64, 128, "gelu", 3, 5e-4, 0.15)
PUBLISHED = Recipe("published", 128, 128, "relu", 5, 1e-4, 0.0, 0.02)


@dataclass(frozen=True)
class Corpus:
    """Sentences as words with their labels."""

    name: str
    training: list[Sentence]
    test: list[Sentence]

    @property
    def vocabulary(self) -> list[str]:
        """Words that are there twice or more."""
        counts = Counter(word for words, _ in self.training for word in words)
        return sorted(word for word, count in counts.items() if count > 1)

    def short(self, count: int, most: int = 10) -> list[list[str]]:
        """The first short test sentences."""
        return [words for words, _ in self.test if 4 < len(words) <= most][:count]


def read_corpus(folder: Path) -> Corpus:
    """SST-2 by its path."""
    parts = []
    for name in ("train", "dev"):
        rows = json.loads((folder / f"sst_{name}.json").read_text())
        parts.append([(row["sentence"].lower().split(), int(row["label"])) for row in rows])
    return Corpus("sst", *parts)


class Words(nn.Module):
    """From words to two logits."""

    def __init__(self, vocabulary: list[str], layers: int, recipe: Recipe = TARGETED) -> None:
        super().__init__()
        self.recipe, width = recipe, recipe.width
        self.numbers = {word: k + 3 for k, word in enumerate(vocabulary)}
        self.words = nn.Embedding(len(vocabulary) + 3, width, padding_idx=NONE)
        self.positions = nn.Embedding(64, width)
        nn.init.normal_(self.words.weight, std=recipe.deviation or 3 / math.sqrt(width))
        nn.init.normal_(self.positions.weight, std=recipe.deviation or 0.06)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            width,
            recipe.heads,
            recipe.neurons,
            0.0,
            activation=recipe.activation,
            layer_norm_eps=1e-12,
            batch_first=True,
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.pooler = nn.Identity() if recipe.deviation is None else nn.Linear(width, width)
        self.readout = nn.Linear(width, 2)
        self._start_apart()

    def _start_apart(self) -> None:
        """Every layer with numbers of its own, as nn.Linear draws them (the encoder copies its first)."""
        width, deviation = self.recipe.width, self.recipe.deviation
        for layer in self.encoder.layers:
            attention = layer.self_attn
            for tensor in (attention.in_proj_weight, attention.in_proj_bias):
                nn.init.uniform_(tensor, -1 / math.sqrt(width), 1 / math.sqrt(width))
            for linear in (attention.out_proj, layer.linear1, layer.linear2):
                linear.reset_parameters()
        if deviation is not None:
            for name, tensor in (*self.encoder.named_parameters(), *self.pooler.named_parameters()):
                if "norm" not in name:
                    nn.init.normal_(tensor, std=deviation if tensor.ndim == 2 else 0.0)

    def number(self, words: list[str]) -> list[int]:
        return [START, *(self.numbers.get(word, UNKNOWN) for word in words[: LONGEST - 1])]

    def embed(self, sentences: list[list[str]]) -> Tensor:
        """Sentences of equally many words as tokens, as they enter the first layer."""
        return self.enter(torch.tensor([self.number(words) for words in sentences]))

    def enter(self, numbers: Tensor) -> Tensor:
        entered: Tensor = self.norm(self.before(numbers))
        return entered

    def before(self, numbers: Tensor) -> Tensor:
        """Words and positions, before their norm layer."""
        found: Tensor = self.words(numbers) + self.positions.weight[: numbers.shape[-1]]
        return found

    def forward(self, numbers: Tensor) -> Tensor:
        """Logits (batch, 2) of numbered words, 0 after the last."""
        after = self.encoder(self.enter(numbers), src_key_padding_mask=numbers == NONE)
        first = after[:, 0]
        if self.recipe.deviation is not None:
            first = self.pooler(first).tanh()
        logits: Tensor = self.readout(first)
        return logits

    def batch(self, items: list[Sentence]) -> tuple[Tensor, Tensor]:
        rows = [self.number(words) for words, _ in items]
        longest = max(map(len, rows))
        numbers = torch.tensor([row + [NONE] * (longest - len(row)) for row in rows])
        return numbers, torch.tensor([label for _, label in items])


def trained(corpus: Corpus, layers: int, folder: Path, recipe: Recipe = TARGETED) -> Words:
    """The classifier, trained where no weights are kept (half a minute of one thread, or some minutes)."""
    from safetensors.torch import load_file

    path = folder / f"{recipe.name}-{corpus.name}-{layers}.safetensors"
    torch.manual_seed(0)
    model = Words(corpus.vocabulary, layers, recipe)
    if not path.is_file():
        train(model, corpus)
        _keep(model, path)
    model.load_state_dict(load_file(path))
    return model.eval().double()


def _keep(model: Words, path: Path) -> None:
    """The weights in a file, whole or not at all."""
    from safetensors.torch import save

    path.parent.mkdir(exist_ok=True)
    write_whole(path, save({name: part.contiguous() for name, part in model.state_dict().items()}))


def train(model: Words, corpus: Corpus) -> None:
    """AdamW with a warm start and a linear end, with some words unknown."""
    recipe = model.recipe
    optimizer = torch.optim.AdamW(model.parameters(), recipe.rate, weight_decay=0.01)
    whole = recipe.passes * (len(corpus.training) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM) * (1 - step / (whole + 1))
    )
    for numbers, labels in _steps(model, corpus):
        hidden = (torch.rand(numbers.shape) < recipe.hidden) & (numbers > UNKNOWN)
        loss = nn.functional.cross_entropy(model.train()(numbers.where(~hidden, UNKNOWN)), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    found = f"{recipe.name}, {len(model.encoder.layers)} layers: accuracy {accuracy(model, corpus):.3f}"
    print(f"{found} on test sentences of {corpus.name}", file=sys.stderr)


def _steps(model: Words, corpus: Corpus) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(model.recipe.passes):
        order = torch.randperm(len(corpus.training)).tolist()
        for k in range(0, len(order) - BATCH + 1, BATCH):
            yield model.batch([corpus.training[j] for j in order[k : k + BATCH]])


def accuracy(model: Words, corpus: Corpus) -> float:
    right = 0
    with torch.no_grad():
        for k in range(0, len(corpus.test), BATCH):
            numbers, labels = model.eval().batch(corpus.test[k : k + BATCH])
            right += int((model(numbers).argmax(-1) == labels).sum())
    return right / len(corpus.test)
