"""Small configs: what sizes are called, and a small number for each, in configs and in those inside them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from tests.audits.architectures.special import SIZES

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
    "sliding_window": 4, "depths": [2, 2], "num_mel_bins": 16,
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
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "upsample_groups": 32,
    "hidden_size_global": 32, "fpn_hidden_size": 32,
    "mm_tokens_per_image": 4, "image_grid_pinpoints": [[32, 32]],
}  # fmt: skip
"""What sizes are called, and a small number for each."""
ENDINGS: tuple[tuple[str, int], ...] = (
    (r"(vocab_size|vocab|codebook_size)$", 64),
    (r"(kv|key_value|kv_proj|key)_heads$", 2),
    (r"heads$", 4),
    (r"(head_dim|head_size|d_kv|kv_dim|head_width)$", 8),
    (r"(layers|blocks|depth|num_layer|repeats)$", 2),
    (r"(intermediate|ffn|mlp|inner|d_ff|feed_?forward|filter).*", 48),
    (r"(position|positions|position_embeddings|len|length|max_seq.*)$", 128),
    (r"experts$", 4),
    (
        r"(channels|hidden_size|hidden_dim|d_model|_dim|dim|_size|width|filters|features|bins|units|_rank)$",
        32,
    ),
)
"""How names of sizes end that are not in the table, and what a size is at most."""
LEAST = 33
"""Sizes that nothing is known about stay if they are below: kernels, strides, patches."""
SECTIONED = ("glm4v", "glm46v", "glm_image", "glm_ocr", "glmga", "paddleocr", "qwen2_vl", "qwen2_5")
"""Types whose rotary positions are in time, height and width."""


PLACED = ("image_token_id", "image_token_index", "video_token_id", "video_token_index", "audio_token_id")
"""Ids that models need where their configs leave them open."""


def tiny_config(kind: type, shrink: Callable[[Any], dict[str, Any]] | None = None) -> Any:
    """A config of this class made small, inner configs too."""
    return _shrunk(kind, kind(), shrink or by_name, SIZES.get(getattr(kind, "model_type", ""), {}))


def _shrunk(kind: type, default: Any, shrink: Any, own: Mapping[str, Any]) -> Any:
    inner = dict(_inner(kind, default, shrink, own))
    sizes = shrink(default)
    rotary = getattr(default, "rope_parameters", None)
    if isinstance(rotary, dict) and rotary.get("mrope_section") and "head_dim" in sizes:
        sizes["rope_parameters"] = {**rotary, "mrope_section": _sections(sizes["head_dim"] // 2)}
    sizes |= {name: value for name, value in own.items() if name not in inner}
    made = _made(kind, sizes, inner)
    return made if "rope_parameters" in own else _with_sections(made)


def by_name(default: Any) -> dict[str, Any]:
    """Every size that has a known name."""
    sizes = {name: small for name, small in SMALL.items() if _replaceable(default, name, small)}
    if isinstance(getattr(default, "num_heads", None), (list, tuple)):
        sizes["num_heads"] = [2, 4]
    if _has(default, "num_key_value_heads") and default.num_key_value_heads == getattr(
        default, "num_attention_heads", 0
    ):
        sizes["num_key_value_heads"] = sizes.get("num_attention_heads", 4)
    return sizes | _tokens(default)


def _tokens(default: Any) -> dict[str, int]:
    """Ids of tokens that are not in a small vocabulary: its last ones."""
    named = [
        name
        for name, value in vars(default).items()
        if (type(value) is int and value >= 64 and re.search(r"(_id|_index|_idx)$", name))
        or (value is None and name in PLACED)
    ]
    return {name: 63 - number for number, name in enumerate(named) if name not in SMALL}


def by_ending(default: Any) -> dict[str, Any]:
    """Also those whose names end like sizes, lists as long as they were, and a layer of each kind."""
    sizes = by_name(default)
    sizes |= dict(_endings(default, sizes))
    return sizes | _layers(default)


def by_depth(default: Any) -> dict[str, Any]:
    """All sizes as published, but fewer layers and words."""
    whole = {name: value for name, value in vars(default).items() if type(value) is int and value > 2}
    lists = {name: value for name, value in vars(default).items() if _whole(value)}
    sizes: dict[str, Any] = {
        name: 2 for name in whole if re.search(r"(layers|n_layer|num_blocks|depth)$", name)
    }
    sizes |= {name: [1] * len(value) for name, value in lists.items() if re.search("depths?$", name)}
    return sizes | _layers(default)


SHRINKING = (by_name, by_ending, by_depth)
"""Ways to make a config small, in the order in which they are tried."""


def _whole(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(type(x) is int for x in value)


def _layers(default: Any) -> dict[str, Any]:
    """A layer of each kind, where a config has a list with the kind of each."""
    try:
        count = default.num_hidden_layers
    except Exception:
        return {}
    lists = {
        name: value
        for name, value in vars(default).items()
        if isinstance(value, (list, tuple)) and len(value) == count and count > 2
    }
    kinds = list(zip(*(value for value in lists.values() if isinstance(value[0], str)), strict=True))
    if not kinds:
        return {}
    kept = sorted(kinds.index(kind) for kind in dict.fromkeys(kinds))
    kept = kept if len(kept) > 1 else [0, 1]
    return {name: [value[i] for i in kept] for name, value in lists.items()} | {
        "num_hidden_layers": len(kept)
    }


def _inner(kind: type, default: Any, shrink: Any, own: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The configs inside one. The table has a dict of sizes, the name of a type, or True: as it is."""
    for name in getattr(kind, "sub_configs", None) or {}:
        inside = getattr(default, name, None)
        particular = own.get(name)
        if particular is True:
            yield name, inside
        elif isinstance(particular, str):
            from transformers import CONFIG_MAPPING

            yield name, tiny_config(CONFIG_MAPPING[particular], shrink)
        elif inside is not None and hasattr(inside, "to_dict"):
            table = SIZES.get(getattr(type(inside), "model_type", ""), {})
            yield name, _shrunk(type(inside), inside, shrink, {**table, **(particular or {})})


def _made(kind: type, sizes: Mapping[str, Any], inner: Mapping[str, Any]) -> Any:
    """With what the config takes: other names, and what is computed, are left out where they must be."""
    aliases = set(getattr(kind, "attribute_map", None) or {})
    computed = {name for name in sizes if isinstance(getattr(kind, name, None), property)}
    fewer = {"head_dim", "num_key_value_heads", "max_position_embeddings"}
    last: Exception | None = None
    for less in (computed, aliases | computed, aliases | computed | fewer):
        attempt = {name: value for name, value in sizes.items() if name not in less}
        try:
            return kind(**attempt, **inner)
        except Exception as error:
            last = error
    assert last is not None
    raise last


def _endings(default: Any, known: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Sizes by how their names end, and lists as long as they were."""
    for name, value in vars(default).items():
        if _whole(value):
            yield name, type(value)(_list(name, value))
        elif type(value) is not int or name.startswith("_"):
            continue
        elif name not in known and value >= LEAST:
            found = next((small for end, small in ENDINGS if re.search(end, name)), None)
            if found is not None and found < value:
                yield name, found


def _list(name: str, values: Any) -> list[int]:
    """A list of sizes, as long as it was: depths one, heads powers of two, widths doubled where they grow."""
    if re.search("depth|blocks|repeats", name):
        return [min(value, 1) for value in values]
    if "layers" in name:
        return list(values)
    if "head" in name:
        return [min(4, 1 << (value.bit_length() - 1)) for value in values]
    if max(values) < LEAST:
        return list(values)
    if "image" in name:
        return [32] * len(values)
    order = sorted(set(values))
    return [16 << order.index(value) for value in values]


def _with_sections(config: Any) -> Any:
    """Rotary positions in time, height and width share the pairs of a head: as many as a small one has."""
    rotary = getattr(config, "rope_parameters", None)
    if not isinstance(rotary, dict):
        return config
    named = getattr(config, "model_type", "").startswith(SECTIONED)
    if named or rotary.get("mrope_section"):
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(width * rotary.get("partial_rotary_factor", 1.0)) // 2
        rotary["mrope_section"] = _sections(pairs)
    return config


def _sections(pairs: int) -> list[int]:
    return [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3]


def _has(config: Any, name: str) -> bool:
    """Whether a config has one value of that name: some have one for each layer, and refuse."""
    try:
        return hasattr(config, name)
    except Exception:
        return False


def _replaceable(config: Any, name: str, new: Any) -> bool:
    """Whether a value of the config may be replaced by a small one."""
    if not _has(config, name):
        return False
    old = getattr(config, name)
    if isinstance(old, bool) or (old is None and isinstance(new, list)):
        return False
    if isinstance(new, list):
        return isinstance(old, (list, tuple))
    return old is None or isinstance(old, (int, str))
