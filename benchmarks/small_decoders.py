"""Small language models of Llama's architecture, many at once: each tensor has a dimension for the models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WORDS, LENGTH, BATCH = 48, 32, 8
LAYERS, WIDTH, HIDDEN = 4, 64, 64
FIRST, SECOND, EPSILON = 0.9, 0.95, 1e-8
"""Of Adam."""
LEAST = 1e-45
"""Weights below this are zero in float32."""
CLOSED = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)


def texts(seeds: list[int], step: int) -> Tensor:
    """(models, texts, words): sentences of one Markov chain, said twice, so that the second half needs
    attention. They depend on the seed and the step alone.
    """
    drawn = torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(7))
    chain = torch.softmax(3 * drawn, -1).cumsum(-1)
    uniform = torch.cat(
        [
            torch.rand(
                BATCH, LENGTH // 2, generator=torch.Generator().manual_seed(1_000_003 * (seed + 1) + step)
            )
            for seed in seeds
        ]
    )
    found = [(uniform[:, 0] * WORDS).long()]
    for place in range(1, LENGTH // 2):
        after = torch.searchsorted(chain[found[-1]], uniform[:, place : place + 1].contiguous())
        found.append(after[:, 0].clamp(max=WORDS - 1))
    half = torch.stack(found, -1)
    return torch.cat([half, half], -1).unflatten(0, (len(seeds), BATCH))


@dataclass(frozen=True)
class Snapshot:
    """Everything that a training goes on from. heads: how many a layer has."""

    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]
    steps: int
    half: bool
    heads: int

    def one(self, place: int) -> Snapshot:
        """That of a single model."""
        parts = [
            {name: part[place : place + 1] for name, part in own.items()}
            for own in (self.weights, self.first, self.second)
        ]
        return Snapshot(parts[0], parts[1], parts[2], self.steps, self.half, self.heads)

    def copies(self, holds: list[list[int]]) -> Decoders:
        """The same model several times, each with the queries and keys of some heads held."""
        parts = [
            {name: part.repeat(len(holds), *[1] * (part.ndim - 1)) for name, part in own.items()}
            for own in (self.weights, self.first, self.second)
        ]
        free = {
            f"{layer}.{name}": torch.ones(len(holds), WIDTH, WIDTH)
            for layer in range(LAYERS)
            for name in "qk"
        }
        for place, heads in enumerate(holds):
            for head in heads:
                layer, own = divmod(head, self.heads)
                width = WIDTH // self.heads
                for name in "qk":
                    free[f"{layer}.{name}"][place, :, own * width : (own + 1) * width] = 0.0
        return Decoders(Snapshot(parts[0], parts[1], parts[2], self.steps, self.half, self.heads), free)

    def llama(self) -> nn.Module:
        """The model as transformers has it."""
        import transformers

        sizes: dict[str, Any] = {
            "hidden_size": WIDTH,
            "intermediate_size": HIDDEN,
            "num_hidden_layers": LAYERS,
        }
        config = transformers.LlamaConfig(
            vocab_size=WORDS,
            num_attention_heads=self.heads,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            **sizes,
        )
        model = transformers.LlamaForCausalLM(config).eval()
        own = {name: part[0] for name, part in self.weights.items()}
        names = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj"}
        names |= {
            "o": "self_attn.o_proj",
            "gate": "mlp.gate_proj",
            "up": "mlp.up_proj",
            "down": "mlp.down_proj",
        }
        names |= {"before": "input_layernorm", "between": "post_attention_layernorm"}
        with torch.no_grad():
            model.model.embed_tokens.weight.copy_(own["words"])
            model.model.norm.weight.copy_(own["final"])
            for layer in range(LAYERS):
                for short, long in names.items():
                    part = own[f"{layer}.{short}"]
                    model.model.layers[layer].get_submodule(long).weight.copy_(
                        part.T if part.ndim > 1 else part
                    )
        return model


class Decoders:
    """Models that train beside each other. half: whether queries and keys are multiplied in float16."""

    def __init__(self, start: Snapshot, free: dict[str, Tensor] | None = None) -> None:
        self.weights = {name: part.clone().requires_grad_() for name, part in start.weights.items()}
        self.first, self.second = (
            {name: part.clone() for name, part in own.items()} for own in (start.first, start.second)
        )
        self.steps, self.half, self.free = start.steps, start.half, free or {}
        self.heads, self.width = start.heads, WIDTH // start.heads
        rates = 1 / 10_000 ** (torch.arange(0, self.width, 2) / self.width)
        angles = torch.arange(LENGTH).unsqueeze(-1) * torch.cat([rates, rates])
        self.cos, self.sin = angles.cos(), angles.sin()

    @classmethod
    def new(cls, seeds: list[int], half: bool, heads: int = 1) -> Decoders:
        """Models as training begins."""
        shapes = {"words": (WORDS, WIDTH)}
        for layer in range(LAYERS):
            shapes |= {f"{layer}.{name}": (WIDTH, WIDTH) for name in "qkvo"}
            shapes |= {f"{layer}.{name}": (WIDTH, HIDDEN) for name in ("gate", "up")}
            shapes[f"{layer}.down"] = (HIDDEN, WIDTH)
        draws = [torch.Generator().manual_seed(seed) for seed in seeds]
        weights = {
            name: torch.stack([0.02 * torch.randn(*shape, generator=draw) for draw in draws])
            for name, shape in shapes.items()
        }
        gains = ["final", *(f"{layer}.{name}" for layer in range(LAYERS) for name in ("before", "between"))]
        weights |= {name: torch.ones(len(seeds), WIDTH) for name in gains}
        zeros = {name: torch.zeros_like(part) for name, part in weights.items()}
        return cls(Snapshot(weights, zeros, zeros, 0, half, heads))

    def snapshot(self) -> Snapshot:
        """What is now."""
        weights = {name: part.detach().clone() for name, part in self.weights.items()}
        first, second = (
            {name: part.clone() for name, part in own.items()} for own in (self.first, self.second)
        )
        return Snapshot(weights, first, second, self.steps, self.half, self.heads)

    def step(self, x: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        """One step of Adam; the losses before it, and for every head how far from zero the largest product of
        a row is at most: above 65,504 a row has an infinite weight, below -65,504 it has no weights at all.
        """
        products: list[Tensor] = []
        scores = self.run(x, products)[:, :, :-1]
        total = scores.logsumexp(-1)
        own = total - scores.gather(-1, x[:, :, 1:, None])[..., 0]
        losses = own.flatten(1).mean(1)
        (losses + 1e-4 * total.square().flatten(1).mean(1)).sum().backward()
        self.steps += 1
        with torch.no_grad():
            for name, part in self.weights.items():
                self._move(name, part, rate)
        return losses.detach(), torch.stack([one.amax(-1).abs().amax((1, 3)) for one in products], 1).flatten(
            1
        )

    def _move(self, name: str, part: Tensor, rate: float) -> None:
        slope = part.grad
        assert slope is not None
        self.first[name].lerp_(slope, 1 - FIRST)
        self.second[name].mul_(SECOND).addcmul_(slope, slope, value=1 - SECOND)
        size = (self.second[name] / (1 - SECOND**self.steps)).sqrt() + EPSILON
        move = self.first[name] / (1 - FIRST**self.steps) / size
        part.sub_(rate * move * self.free.get(name, 1.0))
        part.grad = None

    def run(self, x: Tensor, products: list[Tensor]) -> Tensor:
        """Scores of the next word, (models, texts, words, vocabulary); the products of visible queries and
        keys of each layer, (models, texts, heads, words, words), are added to a list.
        """
        own, (models, count, length) = self.weights, x.shape
        flat = x.reshape(models, -1, 1).expand(-1, -1, WIDTH)
        tokens = torch.gather(own["words"], 1, flat)
        for layer in range(LAYERS):
            normed = _norm(tokens, own[f"{layer}.before"])
            heads = self._attend(layer, normed, (models, count, length), products)
            tokens = tokens + heads @ own[f"{layer}.o"]
            normed = _norm(tokens, own[f"{layer}.between"])
            inner = F.silu(normed @ own[f"{layer}.gate"]) * (normed @ own[f"{layer}.up"])
            tokens = tokens + inner @ own[f"{layer}.down"]
        return (_norm(tokens, own["final"]) @ own["words"].mT).unflatten(1, (count, length))

    def _attend(self, layer: int, normed: Tensor, sizes: tuple[int, ...], products: list[Tensor]) -> Tensor:
        query, key, value = (
            (normed @ self.weights[f"{layer}.{name}"]).view(*sizes, self.heads, self.width).transpose(2, 3)
            for name in "qkv"
        )
        raw = self._turned(query) @ self._turned(key).mT
        products.append(raw.detach().masked_fill(CLOSED, -math.inf))
        if self.half:
            raw = raw + (raw.half().float() - raw).detach()
        weights = (raw / math.sqrt(self.width)).masked_fill(CLOSED, -math.inf).softmax(-1)
        return (weights @ value).transpose(2, 3).flatten(3).flatten(1, 2)

    def _turned(self, x: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        return x * self.cos + torch.cat([-other, one], -1) * self.sin

    @torch.no_grad()
    def largest_logits(self, x: Tensor) -> Tensor:
        """(models, heads): as the check `rows` has them, over visible pairs whose weight is not zero."""
        products: list[Tensor] = []
        self.run(x, products)
        logits = torch.stack(products, 2) / math.sqrt(self.width)
        seen = logits.softmax(-1) > LEAST
        return (
            logits.abs()
            .masked_fill(~seen, 0.0)
            .transpose(1, 3)
            .flatten(3)
            .amax(-1)
            .transpose(1, 2)
            .flatten(1)
        )

    @torch.no_grad()
    def qk_norms(self) -> Tensor:
        """(models, heads): as the check `weights` has them."""
        found = []
        for layer in range(LAYERS):
            gain = self.weights[f"{layer}.before"].unsqueeze(-1)
            query, key = (
                (gain * self.weights[f"{layer}.{name}"])
                .unflatten(-1, (self.heads, self.width))
                .transpose(1, 2)
                for name in "qk"
            )
            found.append(
                torch.linalg.matrix_norm(torch.nan_to_num(query @ key.mT), 2) / math.sqrt(self.width)
            )
        return torch.cat(found, -1)


def _norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * gain.unsqueeze(1)
