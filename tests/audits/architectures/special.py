"""What is particular to a model type, as data: sizes that depend on others, and shapes of what it takes."""

from __future__ import annotations

from typing import Any

SIZES: dict[str, dict[str, Any]] = {
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 4},
    "whisper": {"max_source_positions": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    **{
        kind: {"layer_types": ["linear_attention", "full_attention"]}
        for kind in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen4_exp_text")
    },
    "recurrent_gemma": {"num_hidden_layers": 3},
    "swin": {"patch_size": 4, "window_size": 4},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    **{
        kind: {"prediction_length": 4, "context_length": 8, "lags_sequence": [1, 2], "num_time_features": 1}
        for kind in ("informer", "time_series_transformer")
    },
    **{
        kind: {"backbone_config": "resnet", "use_timm_backbone": False}
        for kind in ("detr", "conditional_detr", "dab-detr", "deformable_detr", "table-transformer")
    },
    "bamba": {"attn_layer_indices": [1], "mamba_n_heads": 4, "mamba_d_head": "auto"},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"], "mamba_n_heads": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"]},
    "zaya": {"num_experts_per_tok": 1},
    "chameleon": {"vocabulary_map": {"<image>": 63, "IMGIMGA": 5}},
    "emu3": {"vocabulary_map": {"<image>": 63, "<|extra_200|>": 62, "<|visual token 000000|>": 5}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse"]}},
    "ernie4_5_vl_moe_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
    },
    "cohere_compass_text": {
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
        }
    },
    "qwen2_5_vl": {"vision_config": {"window_size": 32}},
    "qwen2_5_vl_vision": {"window_size": 32},
    "exaone4_5_vision": {"window_size": 32},
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 8,
        "indexer_budget": 8,
        "indexer_compress_ratio": 2,
    },
    "dia": {"decoder_config": {"num_channels": 9}},
    "fun_asr_nano": {"adaptor_config": {"intermediate_size": 8}},
    "molmo2": {"adapter_config": {"vision_feature_layer": [1, 0]}},
    "hunyuan_vl_text": {
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 1, 1]}
    },
    "xmod": {"default_language": "en_XX"},
    "fun_asr_nano_encoder": {"num_timestamp_prediction_layers": 1},
    "autoformer": {
        "prediction_length": 4,
        "context_length": 8,
        "lags_sequence": [1, 2],
        "num_time_features": 1,
        "label_length": 4,
    },
    "cvt": {"depth": [1, 2, 3], "drop_path_rate": [0.0, 0.0, 0.1]},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "depth_pro": {
        "patch_size": 32,
        "scaled_images_ratios": (0.5, 1),
        "scaled_images_overlap_ratios": (0.0, 0.2),
        "scaled_images_feature_dims": (16, 16),
    },
    **{
        kind: {"backbone_config": True}
        for kind in (
            "rt_detr",
            "rt_detr_v2",
            "d_fine",
            "deimv2",
            "pp_doclayout_v3",
            "pp_doclayout_v4",
            "mask2former",
            "oneformer",
            "grounding-dino",
            "mm-grounding-dino",
        )
    },
    "blt": {"global_config": {"encoder_cross_output_size": 64}},
    "fastspeech2_conformer_with_hifigan": {"vocoder_config": {"model_in_dim": 16}},
    "funnel": {"architectures": ["FunnelModel"], "block_sizes": [2, 2]},
    "gemma3n_text": {
        "layer_types": ["sliding_attention", "full_attention"],
        "num_kv_shared_layers": 0,
        "activation_sparsity_pattern": [0.0, 0.0],
        "laurel_rank": 4,
    },
    "glm5_next_text": {"num_key_value_heads": 4, "qk_rope_head_dim": 0},
    "hiera": {"image_size": [64, 64], "depths": [1, 1, 1, 1], "embed_dim": 16, "num_heads": [1, 2, 4, 8]},
    "kosmos-2": {"latent_query_num": 4},
    "layoutlmv3": {"coordinate_size": 4, "shape_size": 8, "input_size": 32},
    "mamba2": {"num_heads": 8, "head_dim": 8, "n_groups": 1},
    "mistral4": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "llama_4_scaling_beta": 0.1,
        }
    },
    "muse_spark_audio": {"hidden_sizes": [16, 16, 32, 32], "depths": [1, 1, 1, 1], "num_hidden_layers": 4},
    "nemotron_h": {"n_groups": 1},
    "reformer": {
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [8, 24],
        "attn_layers": ["local", "lsh"],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
    },
    "sam_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "sam_hq_vision_model": {"output_channels": 32, "num_pos_feats": 16},
    "sam2_hiera_det_model": {
        "hidden_size": 16,
        "num_attention_heads": 1,
        "embed_dim_per_stage": [16, 32, 64, 128],
        "blocks_per_stage": [1, 1, 2, 1],
        "num_attention_heads_per_stage": [1, 2, 4, 4],
        "window_size_per_stage": [4, 2, 4, 2],
        "global_attention_blocks": [3],
        "image_size": [64, 64],
    },
    "sam2_vision_model": {
        "backbone_channel_list": [128, 64, 32, 16],
        "fpn_hidden_size": 32,
        "backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]],
    },
    "sam2": {"prompt_encoder_config": {"image_size": 64, "patch_size": 16}},
    "timesfm": {"horizon_length": 8},
    "xcodec": {"acoustic_model_config": True, "semantic_model_config": True},
    "granite4_vision": {
        "deepstack_layer_map": [[0, 0], [1, 1]],
        "downsample_rate": "1/2",
        "spatial_target_layers": [1],
        "vision_config": {"hidden_size": 64},
    },
    "lw_detr_vit": {"image_size": 64, "num_windows": 4, "num_hidden_layers": 10},
    "moonshine_streaming": {"num_key_value_heads": 4},
    "muse_spark": {"out_hidden_size": 128},
    "lw_detr": {"projector_scale_factors": [1.0]},
    "sam3_vision_model": {"backbone_feature_sizes": [[16, 16], [8, 8], [4, 4]]},
    "sam3_tracker": {"prompt_encoder_config": {"image_size": 32, "patch_size": 8}},
    "seggpt": {"image_size": [64, 32]},
    "swin2sr": {"patch_size": 1, "window_size": 4},
    "t5gemma2_encoder": {"text_config": {"dropout_rate": 0.0}},
    "vjepa2": {
        "crop_size": 32,
        "frames_per_clip": 4,
        "pred_hidden_size": 32,
        "pred_num_attention_heads": 4,
        "pred_num_hidden_layers": 2,
        "pred_num_mask_tokens": 2,
    },
    "tvp": {"max_img_size": 64},
    "vibevoice_asr": {"acoustic_tokenizer_chunk_size": 3200},
    "uvdoc": {"backbone_config": True},
    "clvp": {name: {"hidden_size": 128, "projection_dim": 128} for name in ("text_config", "speech_config")}
    | {"decoder_config": {"hidden_size": 128}},
    "diffusion_gemma_text": {"num_experts_per_tok": 2, "top_k_experts": 2},
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "kimi_k25": {"projection_hidden_size": 32},
    "llama4": {
        "vision_config": {
            "intermediate_size": 128,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
            "vision_output_dim": 64,
        }
    },
    "glmasr": {"audio_config": {"intermediate_size": 128}},
    "deepseek_vl_hybrid": {"high_res_vision_config": {"global_attn_indexes": [0]}},
    "mllama": {"vision_config": {"intermediate_layers_indices": [0], "vision_output_dim": 64}},
    "glm_image": {"vq_config": {"latent_channels": 32}},
    "paligemma": {"projection_dim": 32},
    "vipllava": {"vision_feature_layers": [1, 0]},
    "muse_glimmer": {"out_hidden_size": 128},
    **{
        kind: {"vision_config": {"insert_layer_id": 0}}
        for kind in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    **{
        kind: {"insert_layer_id": 0}
        for kind in ("minicpm_ocr_vision", "minicpmv4_6_vision", "minicpmv4_7_vision")
    },
}
"""Sizes that depend on others, and what every published model of a type has. Of an inner config: a dict of
sizes, the name of a type, or True, as it is published.
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
    "wav2vec2-bert": {"input_features": ("normal", 1, 20, "feature_projection_input_dim")},
    "depth_pro": {"pixel_values": ("normal", 1, 3, 64, 64)},
    "audio-spectrogram-transformer": {"input_values": ("normal", 1, "max_length", "num_mel_bins")},
    **{
        kind: {
            "past_values": ("normal", 1, 10),
            "past_time_features": ("normal", 1, 10, 1),
            "past_observed_mask": ("true", 1, 10),
            "future_values": ("normal", 1, 4),
            "future_time_features": ("normal", 1, 4, 1),
            "static_categorical_features": None,
        }
        for kind in ("autoformer", "informer", "time_series_transformer")
    },
    "patchtst": {"past_values": ("normal", 1, "context_length", "num_input_channels")},
    "patchtsmixer": {"past_values": ("normal", 1, "context_length", "num_input_channels")},
    "timesfm": {
        "past_values": ("normal", 1, 64),
        "past_values_padding": ("zeros", 1, 64),
        "freq": ("zeros", 1, 1),
    },
    "timesfm2_5": {"past_values": ("normal", 1, 64)},
    "blip_2_qformer": {"encoder_hidden_states": ("normal", 1, 5, "encoder_hidden_size")},
    "blt": {"use_cache": False},
    "clap": {"input_features": ("normal", 1, 1, "spec_size", "num_mel_bins"), "is_longer": ("false", 1, 1)},
    "decision_transformer": {
        "states": ("normal", 1, 4, "state_dim"),
        "actions": ("normal", 1, 4, "act_dim"),
        "rewards": ("normal", 1, 4, 1),
        "returns_to_go": ("normal", 1, 4, 1),
        "timesteps": [[0, 1, 2, 3]],
        "attention_mask": ("ones", 1, 4),
        "input_ids": None,
    },
    "lightglue": {"pixel_values": ("normal", 1, 2, 3, 64, 64)},
    "efficientloftr": {"pixel_values": ("normal", 1, 2, 3, 64, 64)},
    "perceiver": {"inputs": ("normal", 1, 7, "d_model"), "input_ids": None},
    "kyutai_speech_to_text": {"input_ids": ("tokens", 1, 9, 33)},
    "muse_glimmer_assistant": {
        "noise_embeds": ("normal", 1, 4, "hidden_size"),
        "context_hidden_states": ("normal", 1, 5, 160),
        "attention_mask": ("ones", 1, 9),
    },
    "nemotron3_5_transcribe_word_timestamp": {"inputs_embeds": ("normal", 1, 9, "hidden_size")},
    "idefics": {
        "pixel_values": ("normal", 1, 1, 3, "vision_config.image_size", "vision_config.image_size"),
        "image_attention_mask": ("ones", 1, 9, 1),
    },
    "mimi_decoder": {"latents": ("normal", 1, "hidden_size", 9)},
    "pocket_tts_audio_tokenizer_decoder": {"latents": ("normal", 1, "hidden_size", 9)},
    "speecht5": {
        "input_values": ("normal", 1, 9, "hidden_size"),
        "decoder_input_values": ("normal", 1, 5, "num_mel_bins"),
    },
    "xcodec2": {"input_values": ("normal", 1, 1, 6400), "input_features": ("normal", 1, 20, 160)},
    "vjepa2": {"pixel_values_videos": ("normal", 1, "frames_per_clip", 3, "crop_size", "crop_size")},
    "moonshine": {"input_values": ("normal", 1, 4000)},
    "moonshine_streaming": {"input_values": ("normal", 1, 4000)},
    "oneformer": {"task_inputs": ("tokens", 1, 77), "pixel_values": ("normal", 1, 3, 64, 64)},
    "seggpt": dict.fromkeys(
        ("pixel_values", "prompt_pixel_values", "prompt_masks"), ("normal", 1, 3, 32, 32)
    ),
    "qwen3_asr_encoder": {
        "input_features": ("normal", 1, "num_mel_bins", 100),
        "input_features_mask": ("ones", 1, 100),
    },
    "qwen3_asr": {
        "input_features": ("normal", 1, "num_mel_bins", 100),
        "input_features_mask": ("ones", 1, 100),
    },
    "gemma3n_audio": {"audio_mel": ("normal", 1, 32, "input_feat_size"), "audio_mel_mask": ("false", 1, 32)},
    "gemma4_audio": {"input_features": ("normal", 1, 32, "subsampling_conv_channels")},
    "kosmos-2": {"image_embeds_position_mask": [[False] + 4 * [True] + 4 * [False]]},
    **{
        kind: {"pixel_values": ("normal", 1, 3, 8, 128), "target_sizes": [[4, 4]]}
        for kind in (
            "minicpm_ocr",
            "minicpm_ocr_vision",
            "minicpmv4_6",
            "minicpmv4_6_vision",
            "minicpmv4_7",
            "minicpmv4_7_vision",
        )
    },
    "deepseek_vl_hybrid": {
        "high_res_pixel_values": (
            "normal",
            1,
            3,
            "high_res_vision_config.image_size",
            "high_res_vision_config.image_size",
        )
    },
    "mllama": {
        "pixel_values": ("normal", 1, 1, "max_num_tiles", 3, "image_size", "image_size"),
        "aspect_ratio_ids": [[1]],
        "aspect_ratio_mask": ("ones", 1, 1, "max_num_tiles"),
    },
    "qwen2_audio": {"attention_mask": ("ones", 1, 9)},
    "video_llama_3": {"image_merge_sizes": [2]},
    "glm_image": {"image_grid_thw": [[1, 4, 4], [1, 4, 4]], "pixel_values": ("normal", 16, 192)},
    "muse_spark_audio": {"input_values": ("normal", 1, 4 * 1920)},
    "pi0": {
        "action_embeds": ("normal", 1, 4, "dit_config.hidden_size"),
        "pixel_attention_mask": ("true", 1, 1),
        "pixel_values": ("normal", 1, 1, 3, 32, 32),
    },
    "fun_asr_nano": {
        "input_features": ("normal", 1, 20, "audio_config.input_size"),
        "input_features_mask": ("ones", 1, 20),
    },
    "fun_asr_nano_encoder": {
        "input_features": ("normal", 1, 20, "input_size"),
        "input_features_mask": ("ones", 1, 20),
    },
    "muse_spark": {"input_values": ("normal", 1, 4 * 1920)},
    **{
        kind: {"pixel_values": ("normal", 1, 3, 96, 320)}
        for kind in (
            "pp_ocrv5_mobile_rec",
            "pp_ocrv6_small_rec",
            "pp_ocrv6_tiny_rec",
            "pp_ocrv6_small_det",
            "pp_ocrv6_medium_det",
        )
    },
    "neucodec": {"input_values": ("normal", 1, 1, 6400), "input_features": ("normal", 1, 20, 160)},
    "video_llama_3_vision": {"merge_sizes": [2]},
    "xclip": {"pixel_values": ("normal", 1, "vision_config.num_frames", 3, 32, 32)},
    "tvp": {"pixel_values": ("normal", 1, 4, 3, 64, 64)},
    **{
        kind: {"input_values": ("normal", 1, 1, 9600)}
        for kind in (
            "vibevoice",
            "vibevoice_asr",
            "vibevoice_acoustic_tokenizer",
            "vibevoice_acoustic_tokenizer_encoder",
        )
    },
    "voxtral_realtime": {"input_features": ("normal", 1, "num_mel_bins", 72)},
}
"""Shapes of arguments of a type, where they are not those of others of their name."""
NOT_ONE: dict[str, str] = {
    "bark": "it has no forward: `generate` runs its models one after the other",
    "glm_image_vqmodel": "it has no forward: it encodes pictures for another model",
    **dict.fromkeys(
        ("edgetam_video", "sam2_video", "sam3_tracker_video", "sam3_video"),
        "its forward takes a session that a processor fills frame by frame, and no tensors",
    ),
    "voxtral_realtime_text": "transformers names a class for it that it does not have",
    "pp_ocrv6_medium_det": "its config leaves a block open without which it cannot be built",
}
"""Types that are not one module with a call of tensors, and why."""
