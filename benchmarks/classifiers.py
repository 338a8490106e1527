"""Small classifiers of sentences, as the targets of `benchmarks.decisions` were set on: one vector a word,
width 64, four heads, 128 neurons, GELU, LayerNorm last with ε = 1e-12, three passes over 6,920 sentences.

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

WIDTH, HEADS, NEURONS, LONGEST = 64, 4, 128, 28
BATCH, PASSES, RATE, WARM, DROPPED = 32, 3, 5e-4, 100, 0.15
NONE, START, UNKNOWN = 0, 1, 2

Sentence = tuple[list[str], int]


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

    def __init__(self, vocabulary: list[str], layers: int) -> None:
        super().__init__()
        self.numbers = {word: k + 3 for k, word in enumerate(vocabulary)}
        self.words = nn.Embedding(len(vocabulary) + 3, WIDTH, padding_idx=NONE)
        self.positions = nn.Embedding(64, WIDTH)
        nn.init.normal_(self.words.weight, std=3 / math.sqrt(WIDTH))
        nn.init.normal_(self.positions.weight, std=0.06)
        self.norm = nn.LayerNorm(WIDTH, eps=1e-12)
        layer = nn.TransformerEncoderLayer(
            WIDTH, HEADS, NEURONS, 0.0, activation="gelu", layer_norm_eps=1e-12, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.readout = nn.Linear(WIDTH, 2)
        self._start_apart()

    def _start_apart(self) -> None:
        """Every layer with numbers of its own, as nn.Linear draws them (the encoder copies its first)."""
        for layer in self.encoder.layers:
            attention = layer.self_attn
            for tensor in (attention.in_proj_weight, attention.in_proj_bias):
                nn.init.uniform_(tensor, -1 / math.sqrt(WIDTH), 1 / math.sqrt(WIDTH))
            for linear in (attention.out_proj, layer.linear1, layer.linear2):
                linear.reset_parameters()

    def number(self, words: list[str]) -> list[int]:
        return [START, *(self.numbers.get(word, UNKNOWN) for word in words[: LONGEST - 1])]

    def embed(self, sentences: list[list[str]]) -> Tensor:
        """Sentences of equally many words as tokens, as they enter the first layer."""
        return self.enter(torch.tensor([self.number(words) for words in sentences]))

    def enter(self, numbers: Tensor) -> Tensor:
        entered: Tensor = self.norm(self.words(numbers) + self.positions.weight[: numbers.shape[-1]])
        return entered

    def forward(self, numbers: Tensor) -> Tensor:
        """Logits (batch, 2) of numbered words, 0 after the last."""
        after = self.encoder(self.enter(numbers), src_key_padding_mask=numbers == NONE)
        logits: Tensor = self.readout(after[:, 0])
        return logits

    def batch(self, items: list[Sentence]) -> tuple[Tensor, Tensor]:
        rows = [self.number(words) for words, _ in items]
        longest = max(map(len, rows))
        numbers = torch.tensor([row + [NONE] * (longest - len(row)) for row in rows])
        return numbers, torch.tensor([label for _, label in items])


def trained(corpus: Corpus, layers: int, folder: Path) -> Words:
    """The classifier, trained where no weights are kept (half a minute of one thread)."""
    from safetensors.torch import load_file, save_file

    path = folder / f"words-{corpus.name}-{layers}.safetensors"
    torch.manual_seed(0)
    model = Words(corpus.vocabulary, layers)
    if not path.is_file():
        train(model, corpus)
        folder.mkdir(exist_ok=True)
        save_file({name: part.contiguous() for name, part in model.state_dict().items()}, path)
    model.load_state_dict(load_file(path))
    return model.eval().double()


def train(model: Words, corpus: Corpus) -> None:
    """AdamW with a warm start and a linear end; one word of seven is unknown."""
    optimizer = torch.optim.AdamW(model.parameters(), RATE, weight_decay=0.01)
    whole = PASSES * (len(corpus.training) // BATCH)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1.0, (step + 1) / WARM) * (1 - step / (whole + 1))
    )
    for numbers, labels in _steps(model, corpus):
        hidden = (torch.rand(numbers.shape) < DROPPED) & (numbers > UNKNOWN)
        loss = nn.functional.cross_entropy(model.train()(numbers.where(~hidden, UNKNOWN)), labels)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    print(f"{corpus.name}: accuracy {accuracy(model, corpus):.3f} on test sentences", file=sys.stderr)


def _steps(model: Words, corpus: Corpus) -> Iterator[tuple[Tensor, Tensor]]:
    for _ in range(PASSES):
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
