"""The answer of a model to a text, in the model's own measure: a class, the next token, or an embedding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError

EMBEDDING, CLASSES, NEXT = "embedding", "classes", "next token"
AT_ONCE = 4_096
"""How many tokens a model runs together."""


def kind_of(model: nn.Module) -> str:
    """Return the kind of answer that a model gives to a text: EMBEDDING, CLASSES or NEXT."""
    name = type(model).__name__
    if name.endswith(("ForCausalLM", "LMHeadModel")) or _is_own(model):
        return NEXT
    return CLASSES if name.endswith("ForSequenceClassification") else EMBEDDING


def _is_own(model: nn.Module) -> bool:
    """Whether a model is a language model of regard.nn, which returns logits as a tensor."""
    from regard.nn import LanguageModel

    return isinstance(model, LanguageModel)


def names_of(model: nn.Module, tokenizer: Any) -> Callable[[int], str]:
    """Return a function from the number of a class, or of a token, to its name."""
    if kind_of(model) == NEXT:
        return lambda k: tokenizer.decode([k]).strip() or repr(tokenizer.decode([k]))
    labels = getattr(getattr(model, "config", None), "id2label", None) or {}
    return lambda k: str(labels.get(k, k))


def answer_of(found: Any) -> Tensor:
    """Return the logits of the classes or of the next token, or the mean output token, (batch, 1, width)."""
    if isinstance(found, Tensor):
        return found[:, -1:]
    logits: Tensor | None = getattr(found, "logits", None)
    if logits is None:
        mean: Tensor = found[0].mean(1, keepdim=True)
        return mean
    return logits.unsqueeze(1) if logits.ndim == 2 else logits[:, -1:]


def answers(model: nn.Module, calls: Sequence[dict[str, Any]], argument: str = "MODEL") -> Tensor:
    """Return the answers to several calls with one sequence each, in float64, (calls, width).

    Calls of the same lengths run together, `AT_ONCE` tokens at a time, so that no call is padded. An answer
    with NaN is an error that names the argument.
    """
    pad = getattr(getattr(model, "config", None), "pad_token_id", None)
    at_once = AT_ONCE if kind_of(model) != CLASSES or pad is not None else 1
    groups: dict[Any, list[int]] = {}
    for k, call in enumerate(calls):
        groups.setdefault(tuple((name, one.shape[-1]) for name, one in call.items()), []).append(k)
    found: list[Any] = [None] * len(calls)
    for shapes, alike in groups.items():
        length = max(size for _, size in shapes)
        for group in torch.tensor(alike).split(max(1, at_once // length)):
            together = {name: torch.cat([calls[k][name] for k in group.tolist()]) for name, _ in shapes}
            with torch.no_grad():
                values = answer_of(model(**together))[:, 0].double().cpu()
            for k, value in zip(group.tolist(), values, strict=True):
                found[k] = value
    whole = torch.stack(found)
    if bool(whole.isnan().any()):
        raise ArgumentError(
            argument, "computes NaN for this text", "repair or retrain it: no change can be judged"
        )
    return whole


def cosines(original: Tensor, others: Tensor) -> Tensor:
    """Return the cosine of each embedding to the original."""
    return torch.cosine_similarity(others, original.unsqueeze(0), dim=-1)


def divergences(original: Tensor, others: Tensor) -> Tensor:
    """Return the Kullback–Leibler divergence, in nats, from each distribution of the next token to the one of
    the original: Σ p log(p / q), where p is the original.
    """
    p, q = original.log_softmax(-1), others.log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1).clamp_min(0.0)
