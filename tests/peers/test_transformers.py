"""What transformers asks of an implementation of attention: that models say with it what they say with SDPA,
padded on the left or on the right, with a mask or without, family by family.

transformers tests its own implementations so (`test_eager_matches_sdpa_inference`); models here are built
from the installed package's own classes with tiny configurations.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

from regard import hf  # noqa: E402 (needs transformers)
from tests.audits.families import enlivened, ids, mask  # noqa: E402

TEXT = {
    "vocab_size": 40,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
GROUPED = {**TEXT, "num_key_value_heads": 2, "head_dim": 8}
IMAGES = {**TEXT, "image_size": 16, "patch_size": 4, "num_channels": 3}
SEQUENCES = {
    "vocab_size": 40,
    "d_model": 32,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
READERS = ("bert", "roberta", "xlm-roberta", "electra", "camembert", "esm", "ernie", "modernbert")
WRITERS = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "phi", "phi3", "stablelm", "starcoder2"),
    *("cohere", "olmo", "olmo2", "granite", "gpt_neox", "glm", "nemotron", "helium", "smollm3"),
)
SEERS = ("vit", "deit", "dinov2", "clip_vision_model", "siglip_vision_model")
TRANSLATORS = ("bart", "mbart")
FAMILIES: dict[str, dict[str, Any]] = {
    **dict.fromkeys(READERS, TEXT),
    **dict.fromkeys(WRITERS, GROUPED),
    **dict.fromkeys(SEERS, IMAGES),
    **dict.fromkeys(TRANSLATORS, SEQUENCES),
}


def build(name: str, implementation: str) -> nn.Module:
    configuration = transformers.AutoConfig.for_model(name, **FAMILIES[name])
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(configuration, attn_implementation=implementation)
    return enlivened(model)


def calls(name: str) -> dict[str, dict[str, Any]]:
    """Inputs as transformers' own test has them."""
    if name in SEERS:
        pixels = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
        return {"pixels": {"pixel_values": pixels}}
    sides = {
        side: {"input_ids": ids(2, 9), "attention_mask": mask(9, 6, left=side == "left")}
        for side in ("left", "right")
    }
    return {**sides, "whole": {"input_ids": ids(2, 9)}}


def test_there_are_25_families() -> None:
    assert len(FAMILIES) >= 25


@pytest.mark.parametrize("name", FAMILIES)
def test_models_say_what_they_say_with_sdpa(name: str) -> None:
    implementation = hf.register()
    mine, theirs = build(name, implementation), build(name, "sdpa")
    hf.verify(mine)
    for case, call in calls(name).items():
        with torch.no_grad():
            found, expected = (model(**call).last_hidden_state for model in (mine, theirs))
        real = call.get("attention_mask", torch.ones(found.shape[:2])).bool()
        real = real if real.shape == found.shape[:2] else torch.ones(found.shape[:2], dtype=torch.bool)
        torch.testing.assert_close(found[real], expected[real], atol=2e-5, rtol=2e-5, msg=f"{name}, {case}")
