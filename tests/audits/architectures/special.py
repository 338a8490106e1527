"""What is particular to a model type, as data: sizes that depend on others, and shapes of what it takes."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "whisper": {"max_source_positions": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{kind: {"layer_types": ["linear_attention", "full_attention"]}
       for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"patch_size": 4, "window_size": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    **{kind: {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
       for kind in ("informer", "time_series_transformer")},
    **{kind: {"backbone_config": "resnet", "use_timm_backbone": False}
       for kind in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer")},
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": "auto"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "chameleon": {"vocabulary_map": {"<image>": 63, "IMGIMGA": 5}},
    "emu3": {"vocabulary_map": {"<image>": 63, "<|extra_200|>": 62, "<|visual token 000000|>": 5}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "ernie4_5_vl_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}},
    "qwen2_5_vl": {"vision_config": {"window_size": 32}},
    "qwen2_5_vl_vision": {"window_size": 32},
    "exaone4_5_vision": {"window_size": 32},
    "qwen4_exp_text": {"layer_types": ["linear_attention", "full_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 8, "indexer_budget": 8, "indexer_compress_ratio": 2},
    "lw_detr_vit": {"image_size": 64, "num_windows": 4},
    "dia": {"decoder_config": {"num_channels": 9}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "hunyuan_vl_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}},
    "granite4_vision": {"deepstack_layer_map": [[0, 0], [1, 1]], "downsample_rate": "1/2", "spatial_target_layers": [1]},
    "xmod": {"default_language": "en_XX"},
    "mistral4": {"head_dim": 8, "qk_rope_head_dim": 8},
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 1},
    "glm5_next_text": {"num_key_value_heads": 4},
    "autoformer": {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1,
                   "label_length": 4},
    "clvp": {"text_config": {"projection_dim": 32}, "speech_config": {"projection_dim": 32}},
    "cvt": {"depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4}},
    "depth_pro": {"patch_size": 32},
    "blt": {"global_config": {"encoder_cross_output_size": 64}},
    "diffusion_gemma_text": {"num_experts_per_tok": 2, "top_k_experts": 2},
}  # fmt: skip
"""Sizes that depend on others, and what every published model of a type has. A dict is of an inner config, a name
is the type of one.
"""
ARGUMENTS: dict[str, Any] = {
    "qformer_input_ids": ("tokens", 1, 5),
    "mm_token_type_ids": ("zeros", 1, 9),
    "query_embeds": ("normal", 1, 4, "hidden_size"),
    "visual_feats": ("normal", 1, 5, "visual_feat_dim"),
    "visual_pos": ("normal", 1, 5, "visual_pos_dim"),
    "protein_input_ids": ("tokens", 1, 7),
    "protein_attention_mask": ("ones", 1, 7),
    "pixel_mask": None,
}
"""Shapes of arguments by their names: a filling and sizes, numbers or names of sizes of the config."""
SHAPES: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"input_values": ("normal", 1, "max_length", "num_mel_bins")},
    **{kind: {"past_values": ("normal", 1, 10), "past_time_features": ("normal", 1, 10, 1),
              "past_observed_mask": ("true", 1, 10), "future_values": ("normal", 1, 4),
              "future_time_features": ("normal", 1, 4, 1), "static_categorical_features": None}
       for kind in ("autoformer", "informer", "time_series_transformer")},
    "patchtst": {"past_values": ("normal", 1, "context_length", "num_input_channels")},
    "patchtsmixer": {"past_values": ("normal", 1, "context_length", "num_input_channels")},
    "timesfm": {"past_values": ("normal", 1, 64), "past_values_padding": ("zeros", 1, 64), "freq": ("zeros", 1, 1)},
    "timesfm2_5": {"past_values": ("normal", 1, 64)},
    "blip_2_qformer": {"encoder_hidden_states": ("normal", 1, 5, "encoder_hidden_size")},
    "blt": {"use_cache": False},
    "clap": {"input_features": ("normal", 1, 1, "spec_size", "num_mel_bins"), "is_longer": ("false", 1, 1)},
    "decision_transformer": {"states": ("normal", 1, 4, "state_dim"), "actions": ("normal", 1, 4, "act_dim"),
                             "rewards": ("normal", 1, 4, 1), "returns_to_go": ("normal", 1, 4, 1),
                             "timesteps": [[0, 1, 2, 3]], "attention_mask": ("ones", 1, 4), "input_ids": None},
    "lightglue": {"pixel_values": ("normal", 1, 2, 3, 64, 64)},
    "efficientloftr": {"pixel_values": ("normal", 1, 2, 3, 64, 64)},
    "perceiver": {"inputs": ("normal", 1, 7, "d_model"), "input_ids": None},
    "kyutai_speech_to_text": {"input_ids": ("tokens", 1, 9, 33)},
    "muse_glimmer_assistant": {"noise_embeds": ("normal", 1, 4, "hidden_size"),
                               "context_hidden_states": ("normal", 1, 5, "hidden_size")},
    "nemotron3_5_transcribe_word_timestamp": {"inputs_embeds": ("normal", 1, 9, "hidden_size")},
    "idefics": {"pixel_values": ("normal", 1, 1, 3, "vision_config.image_size", "vision_config.image_size"),
                "image_attention_mask": ("ones", 1, 9, 1)},
    "mimi_decoder": {"latents": ("normal", 1, "hidden_size", 9)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": ("normal", 1, "hidden_size", 9)},
    "speecht5": {"input_values": ("normal", 1, 9, "hidden_size"), "decoder_input_values": ("normal", 1, 5, "num_mel_bins")},
    "xcodec2": {"input_features": ("normal", 1, 16, 160)},
    "vjepa2": {"pixel_values_videos": ("normal", 1, "frames_per_clip", 3, "crop_size", "crop_size")},
    "moonshine": {"input_values": ("normal", 1, 4000)},
    "moonshine_streaming": {"input_values": ("normal", 1, 4000)},
    "oneformer": {"task_inputs": ("tokens", 1, 77), "pixel_values": ("normal", 1, 3, 64, 64)},
    "seggpt": {"prompt_pixel_values": ("normal", 1, 3, "image_size", "image_size"),
               "prompt_masks": ("normal", 1, 3, "image_size", "image_size")},
    "xlstm": {},
}  # fmt: skip
"""Shapes of arguments of a type, where they are not those of others of their name."""
