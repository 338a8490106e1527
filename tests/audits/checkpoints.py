"""Tiny checkpoints on disk, as users have them: a config, weights, and a tokenizer that is made offline."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.audits.families import BERT, GPT2, LLAMA, T5, VISION, enlivened

WORDS = (
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "a",
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "mat",
    "##s",
    ".",
    "red",
    "green",
    "house",
)
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bert": ("BertConfig", "BertForMaskedLM", BERT),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", GPT2),
    "llama": ("LlamaConfig", "LlamaForCausalLM", LLAMA),
    "t5": ("T5Config", "T5ForConditionalGeneration", T5),
    "vit": ("ViTConfig", "ViTForImageClassification", {**VISION, "image_size": 12, "patch_size": 4}),
}
"""A config, a model with a head on top, so that names have prefixes, and sizes."""


def model_of(kind: str, gain: float = 1.5, **options: Any) -> Any:
    import transformers

    config_name, model_name, sizes = KINDS[kind]
    return enlivened(
        getattr(transformers, model_name)(getattr(transformers, config_name)(**{**sizes, **options})), gain
    )


def tokenizer() -> Any:
    import tokenizers
    import transformers

    words = {word: number for number, word in enumerate(WORDS)}
    inner = tokenizers.Tokenizer(tokenizers.models.WordPiece(words, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def save(directory: Path, kind: str = "bert", gain: float = 1.5, **options: Any) -> Path:
    """A checkpoint with a tokenizer."""
    model_of(kind, gain, **options).save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    return directory


def save_pickle(directory: Path, kind: str = "bert") -> Path:
    """The same with the weights in a pickle of tensors."""
    model = model_of(kind)
    save(directory, kind)
    (directory / "model.safetensors").unlink()
    torch.save(model.state_dict(), directory / "pytorch_model.bin")
    return directory


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}


def regard(*arguments: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """The command line in a process of its own."""
    command = [sys.executable, "-m", "regard", *map(str, arguments)]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=170,
        env={**ENVIRONMENT, "COLUMNS": "120", **environment},
    )
