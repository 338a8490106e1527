"""Tiny models of every architecture that the installed transformers builds offline, with an input for each:
sizes are found by their names in the config.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

SMALL: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embed_dim": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "encoder_layers": 2,
    "decoder_layers": 2, "num_decoder_layers": 2, "num_encoder_layers": 2, "num_attention_heads": 4,
    "n_head": 4, "n_heads": 4,
    "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "multi_query_group_num": 2, "head_dim": 8, "d_kv": 8, "intermediate_size": 48, "ffn_dim": 48, "d_ff": 48,
    "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "hidden_dim": 48, "n_inner": 48, "ffn_hidden_size": 48,
    "max_position_embeddings": 128, "n_positions": 128, "n_ctx": 128, "max_seq_len": 128, "seq_length": 128,
    "image_size": 32, "patch_size": 8, "rotary_dim": 4, "num_experts": 4, "num_local_experts": 4,
    "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2, "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "n_shared_experts": 1, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "embedding_size": 32,
    "true_hidden_size": 32, "intra_bottleneck_size": 32, "word_embed_proj_dim": 32, "attention_window": 8,
    "sliding_window": 4, "depths": [2, 2], "layer_types": None, "num_mel_bins": 16,
    "max_source_positions": 64, "max_target_positions": 128, "conv_dim": [16, 16],
    "conv_stride": [5, 2], "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "sep_token_id": 2,
    "cls_token_id": 1, "mask_token_id": 3, "unk_token_id": 4, "block_size": 4, "num_random_blocks": 1,
    "mamba_d_state": 8, "mamba_d_conv": 4, "mamba_expand": 2, "state_size": 8, "num_channels": 3,
    "type_vocab_size": 2, "attn_implementation": "sdpa", "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 64, "query_pre_attn_scalar": 8, "num_global_layers": 1, "emb_dim": 32,
    "projection_dim": 16, "hidden_sizes": [16, 32], "d_inner": 48, "max_2d_position_embeddings": 128,
    "sampling_rate": 16000, "num_frames": 4, "text_embed_dim": 32, "max_text_len": 16, "d_head": 8,
    "layers": 2, "width": 32, "heads": 4,
    "window_size": 4, "num_kv_heads": 2, "n_kv_heads": 2, "num_group_query_heads": 2, "hidden_channels": 32,
    "out_hidden_size": 32, "depth": 2, "mlp_ratio": 2, "qformer_hidden_size": 32, "num_query_tokens": 4,
    "max_length": 32, "bottleneck_dim": 16, "num_queries": 4, "latent_dim": 16, "index_n_heads": 2,
    "index_head_dim": 8, "index_topk": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
"""What sizes are called, and a small number for each; None is left to the config."""
SPECIAL: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "whisper": {"max_source_positions": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{kind: {"layer_types": ["linear_attention", "full_attention"]}
       for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"patch_size": 4, "window_size": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}  # fmt: skip
"""Sizes that depend on others, and what every published model of a type has."""
SECTIONED = ("glm4v", "glm46v", "glm_image", "glm_ocr", "glmga", "paddleocr", "qwen2_vl", "qwen2_5")
"""Types whose rotary positions are in time, height and width."""
TOKENS = 9
NOT_ALONE = ("encoder-decoder", "speech-encoder-decoder", "vision-encoder-decoder", "rag", "timm_backbone",
             "timm_wrapper", "vision-text-dual-encoder", "musicgen", "musicgen_melody")  # fmt: skip
"""Types that are made of other models, which somebody has to choose, or that need another package."""


def kinds() -> list[str]:
    """Every model type with a model."""
    from transformers import CONFIG_MAPPING, MODEL_MAPPING

    known = set(MODEL_MAPPING.keys())
    return sorted(kind for kind in CONFIG_MAPPING if CONFIG_MAPPING[kind] in known and kind not in NOT_ALONE)


def tiny_config(kind: type, depth: int = 0) -> Any:
    """A config of this class with every size that has a known name made small, inner configs too."""
    default = kind()
    inner = {
        name: tiny_config(type(own), depth + 1)
        for name in (getattr(kind, "sub_configs", None) or {})
        if (own := getattr(default, name, None)) is not None and hasattr(own, "to_dict")
    }
    sizes = {
        name: value
        for name, value in SMALL.items()
        if value is not None and _has(default, name) and _alike(getattr(default, name), value)
    }
    if isinstance(getattr(default, "num_heads", None), (list, tuple)):
        sizes["num_heads"] = [2, 4]
    if getattr(default, "num_key_value_heads", None) == getattr(default, "num_attention_heads", 0):
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
    sizes |= SPECIAL.get(getattr(kind, "model_type", ""), {})
    aliases = set(getattr(kind, "attribute_map", None) or {})
    fewer = {"head_dim", "num_key_value_heads", "max_position_embeddings"}
    for less in ((), aliases, aliases | fewer):
        attempt = {name: value for name, value in sizes.items() if name not in less}
        try:
            return _with_sections(kind(**attempt, **inner))
        except Exception as error:
            last = error
    raise last


def _with_sections(config: Any) -> Any:
    """Rotary positions in time, height and width share the pairs of a head: as many as a small one has."""
    rotary = getattr(config, "rope_parameters", None)
    if isinstance(rotary, dict) and getattr(config, "model_type", "").startswith(SECTIONED):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(width * rotary.get("partial_rotary_factor", 1.0)) // 2
        rotary["mrope_section"] = [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]
    return config


def _has(config: Any, name: str) -> bool:
    """Whether a config has one value of that name: some have one for each layer, and refuse."""
    try:
        return hasattr(config, name)
    except Exception:
        return False


def _alike(old: Any, new: Any) -> bool:
    """Whether a value of the config may be replaced by a small one."""
    if isinstance(old, bool) or (old is None and isinstance(new, list)):
        return False
    if isinstance(new, list):
        return isinstance(old, (list, tuple))
    return old is None or isinstance(old, (int, str))


def tiny_model(kind: str, implementation: str = "sdpa") -> nn.Module:
    """A model of a type with random weights, in eval mode."""
    from transformers import CONFIG_MAPPING, AutoModel

    torch.manual_seed(0)
    config = tiny_config(CONFIG_MAPPING[kind])
    try:
        model = AutoModel.from_config(config, attn_implementation=implementation)
    except (ValueError, ImportError, NotImplementedError, TypeError):
        model = AutoModel.from_config(config, attn_implementation="eager")
    return model.eval()


def inputs_for(model: nn.Module) -> list[dict[str, Any]]:
    """Keyword arguments by the names of what the model takes; all of them, the main one, or a text."""
    names = inspect.signature(model.forward).parameters
    config = getattr(model, "config", None)
    g = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 60, (1, TOKENS), generator=g)
    main = getattr(model, "main_input_name", "input_ids")
    image, channels = _size(config, "image_size", 32), _size(config, "num_channels", 3)
    known = {
        "input_ids": ids,
        "decoder_input_ids": ids[:, :5],
        "pixel_values": torch.randn(1, channels, image, image, generator=g),
        "input_values": torch.randn(1, 800, generator=g),
        "input_features": torch.randn(1, _size(config, "num_mel_bins", 16), 64, generator=g),
        "bbox": torch.zeros(1, TOKENS, 4, dtype=torch.long),
    }
    named = {name: value for name, value in known.items() if name in names or name == main}
    return [named, *({main: known[main]} for _ in range(main in known)), {"input_ids": ids}]


def coverage_of(kind: str) -> tuple[str, str]:
    """How the attention of a tiny model of a type is covered, the worst of its layers, and why no better:
    declared, observed, part (some of it is not covered), or none where there is none.
    """
    from regard.audits.checks import checks
    from regard.audits.run import Audit
    from regard.errors import ArgumentError
    from tests.audits.families import enlivened

    model = enlivened(tiny_model(kind), 1.0)
    rows = [check for check in checks() if check.name == "rows"]
    for last, call in enumerate(inputs_for(model), 1 - len(inputs_for(model))):
        try:
            run = Audit(model, [call], checks=rows)
            assert run.places is not None
            break
        except ArgumentError:
            if last == 0:
                raise
    run.measure()
    coverage = run.report().coverage
    if not coverage:
        return "none", ""
    for level, entries in (
        ("part", [entry for entry in coverage if not entry.covered]),
        ("observed", [entry for entry in coverage if entry.level == "observed"]),
    ):
        if entries:
            return level, entries[0].reason
    return "declared", ""


def _size(config: Any, name: str, default: int) -> int:
    """A size of the config or of one inside it."""
    for own in (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None)):
        found = getattr(own, name, None)
        if isinstance(found, (list, tuple)) and found:
            found = found[0]
        if isinstance(found, int):
            return found
    return default
