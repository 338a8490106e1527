"""Tiny models of each family, with weights that make attention far from uniform,
and calls that reach every kind of mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from regard.audits.adapters import Call, adapter_of

WIDTH, VOCABULARY, WINDOW = 32, 40, 4
BOTH = ("sdpa", "eager")


@dataclass(frozen=True)
class Family:
    """make: a model for an implementation of attention; calls: keyword arguments of the model by name."""

    make: Callable[[str], nn.Module]
    calls: dict[str, dict[str, Any]]
    implementations: tuple[str, ...] = BOTH


def enlivened(model: nn.Module, gain: float = 1.5) -> nn.Module:
    """The model with random weights of unit gain and more, biases that are not zero,
    and norms that are not one; tables that are no weights, as of sines, are left.
    """
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad:
                continue
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.ndim >= 2:
                embedding = (
                    "embed" in name or "wte" in name or "wpe" in name or "relative_attention_bias" in name
                )
                transposed = ".c_" in name or ".q_attn" in name  # GPT-2 stores its matrices this way
                incoming = len(parameter) if transposed else parameter[0].numel()
                parameter.copy_(noise if embedding else gain * noise / math.sqrt(incoming))
            else:
                parameter.copy_(
                    0.3 * noise + (1.0 if "norm" in name.lower() and name.endswith("weight") else 0.0)
                )
    return model.eval()


def ids(batch: int, tokens: int) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def mask(*lengths: int, left: bool = False) -> torch.Tensor:
    size = max(lengths)
    rows = [[1] * n + [0] * (size - n) for n in lengths]
    return torch.tensor([row[::-1] for row in rows] if left else rows)


ENCODER_CALLS = {
    "one": {"input_ids": ids(1, 9)},
    "batch": {"input_ids": ids(2, 7)},
    "padded": {"input_ids": ids(2, 9), "attention_mask": mask(9, 6)},
}
DECODER_CALLS = {**ENCODER_CALLS, "uncached": {"input_ids": ids(1, 9), "use_cache": False}}
LEFT = {"input_ids": ids(2, 9), "attention_mask": mask(9, 6, left=True)}


def pretrained(kind: str, gain: float = 1.5, **options: Any) -> Callable[[str], nn.Module]:
    """A maker of models of a family of transformers."""

    def make(implementation: str) -> nn.Module:
        import transformers

        config = getattr(transformers, f"{kind}Config")(**options)
        model = getattr(transformers, "BertGenerationEncoder" if kind == "BertGeneration" else f"{kind}Model")
        config._attn_implementation = implementation
        return enlivened(model(config), gain)

    return make


BERT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
}
LLAMA = {
    **BERT,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_embd": WIDTH,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
T5 = {
    "vocab_size": VOCABULARY, "d_model": WIDTH, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4,
    "relative_attention_num_buckets": 8, "relative_attention_max_distance": 12, "decoder_start_token_id": 0,
}  # fmt: skip
OPT = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "ffn_dim": 24,
    "max_position_embeddings": 64,
    "word_embed_proj_dim": WIDTH,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SOUNDS = {
    "pronunciation_vocab_size": VOCABULARY,
    "shape_vocab_size": VOCABULARY,
    "pronunciation_embed_dim": 8,
    "shape_embed_dim": 8,
}
SOUNDED = {
    name: {**call, "input_shape_ids": call["input_ids"], "input_pronunciation_ids": call["input_ids"]}
    for name, call in ENCODER_CALLS.items()
}
VISION = {"hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 24}
IMAGE = {"image": {"pixel_values": torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))}}
FILM = {"film": {"pixel_values": torch.randn(2, 4, 3, 8, 8, generator=torch.Generator().manual_seed(0))}}
SOUND = {"sound": {"input_values": torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))}}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}
STATES = torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(5))
CROSS_CALLS = {
    "cross": {"input_ids": ids(2, 7), "encoder_hidden_states": STATES},
    "cross_padded": {
        "input_ids": ids(2, 7),
        "attention_mask": mask(7, 5),
        "encoder_hidden_states": STATES,
        "encoder_attention_mask": mask(5, 3),
    },
}
T5_CALLS = {
    "one": {"input_ids": ids(1, 21), "decoder_input_ids": ids(1, 17)},
    "padded": {
        "input_ids": ids(2, 9),
        "attention_mask": mask(9, 6),
        "decoder_input_ids": ids(2, 7),
        "decoder_attention_mask": mask(7, 5),
    },
}
SHIFTED = {
    "input_ids": ids(2, 9),
    "position_ids": torch.tensor([list(range(3, 12)), [0, 1, 2, 3, 7, 8, 9, 20, 21]]),
}
LONGER = {**DECODER_CALLS, "longer": {"input_ids": ids(2, 19), "attention_mask": mask(19, 12)}, "left": LEFT}


class Wrapped(nn.Module):
    """A module of torch under one name, called with keyword arguments."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, *arguments: Any, **options: Any) -> Any:
        return self.inner(*arguments, **options)


def torch_encoder(norm_first: bool, batch_first: bool, activation: Any) -> Callable[[str], nn.Module]:
    def make(implementation: str) -> nn.Module:
        layer = nn.TransformerEncoderLayer(
            WIDTH, 4, 24, 0.1, activation, batch_first=batch_first, norm_first=norm_first
        )
        norm = nn.LayerNorm(WIDTH) if norm_first else None
        return enlivened(Wrapped(nn.TransformerEncoder(layer, 2, norm=norm, enable_nested_tensor=False)))

    return make


def decoder_layer() -> nn.TransformerDecoderLayer:
    return nn.TransformerDecoderLayer(WIDTH, 4, 24, 0.1, nn.GELU(), batch_first=True, norm_first=True)


def torch_decoder(implementation: str) -> nn.Module:
    return enlivened(Wrapped(nn.TransformerDecoder(decoder_layer(), 2, norm=nn.LayerNorm(WIDTH))))


def multihead(batch_first: bool, bias: bool = True) -> Callable[[str], nn.Module]:
    return lambda implementation: enlivened(
        Wrapped(nn.MultiheadAttention(WIDTH, 4, 0.1, bias, batch_first=batch_first))
    )


def tokens(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape)))


CLOSED = ~torch.ones(7, 7, dtype=torch.bool).tril()
SLOPES = torch.tensor([0.1, 0.2, 0.4, 0.8]).repeat(2).view(8, 1, 1)  # one for each input and head
ALIBI = -SLOPES * (torch.arange(7) - torch.arange(7).unsqueeze(-1)).abs()
ENCODER = {
    "plain": {"src": tokens(2, 7)},
    "padded": {"src": tokens(2, 7), "src_key_padding_mask": mask(7, 4) == 0},
    "causal": {"src": tokens(2, 7), "mask": CLOSED, "is_causal": True},
    "causal_padded": {"src": tokens(2, 7), "mask": CLOSED, "src_key_padding_mask": mask(7, 4) == 0},
}
DECODER = {
    "plain": {
        "tgt": tokens(2, 7),
        "memory": tokens(2, 5),
        "tgt_mask": CLOSED,
        "memory_key_padding_mask": mask(5, 3) == 0,
    }
}


def attending(x: torch.Tensor, y: torch.Tensor | None = None, **options: Any) -> dict[str, Any]:
    y = x if y is None else y
    return {"query": x, "key": y, "value": y, **options}


MULTIHEAD = {
    "plain": attending(tokens(2, 7)),
    "unbatched": attending(tokens(7)),
    "padded": attending(tokens(2, 7), key_padding_mask=mask(7, 4) == 0),
    "causal": attending(tokens(2, 7), attn_mask=CLOSED, is_causal=True, need_weights=False),
    "additive": attending(tokens(2, 7), attn_mask=torch.zeros(7, 7).masked_fill(CLOSED, -torch.inf)),
    "alibi": attending(tokens(2, 7), attn_mask=ALIBI),
    "alibi_causal": attending(
        tokens(2, 7), attn_mask=ALIBI.masked_fill(CLOSED, -torch.inf), need_weights=False
    ),
    "cross": attending(tokens(2, 7), tokens(2, 5), key_padding_mask=mask(5, 3) == 0),
}


def time_first(calls: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The same calls with tokens (n, batch, d); tensors that were one stay one."""
    turned: dict[int, torch.Tensor] = {}

    def turn(value: Any) -> Any:
        if not (isinstance(value, torch.Tensor) and value.ndim == 3 and value.shape[-1] == WIDTH):
            return value
        return turned.setdefault(id(value), value.transpose(0, 1))

    return {name: {key: turn(value) for key, value in call.items()} for name, call in calls.items()}


FAMILIES = {
    "bert": Family(pretrained("Bert", **BERT), ENCODER_CALLS),
    "bert_decoder": Family(
        pretrained("Bert", **BERT, is_decoder=True, add_cross_attention=True),
        {**DECODER_CALLS, **CROSS_CALLS},
    ),
    "roberta": Family(pretrained("Roberta", **BERT, pad_token_id=0), ENCODER_CALLS),
    "camembert": Family(pretrained("Camembert", **BERT, pad_token_id=0), ENCODER_CALLS),
    "xlm_roberta": Family(pretrained("XLMRoberta", **BERT, pad_token_id=0), ENCODER_CALLS),
    "electra": Family(pretrained("Electra", **BERT, embedding_size=16), ENCODER_CALLS),
    "ernie": Family(pretrained("Ernie", **BERT), ENCODER_CALLS),
    "data2vec_text": Family(pretrained("Data2VecText", **BERT, pad_token_id=0), ENCODER_CALLS),
    "bert_generation": Family(pretrained("BertGeneration", **BERT), ENCODER_CALLS),
    "roc_bert": Family(pretrained("RoCBert", **BERT, **SOUNDS), SOUNDED),
    "esm_rotary": Family(
        pretrained(
            "Esm",
            **BERT,
            position_embedding_type="rotary",
            pad_token_id=0,
            mask_token_id=1,
            emb_layer_norm_before=True,
        ),
        ENCODER_CALLS,
    ),
    "esm_absolute": Family(
        pretrained(
            "Esm",
            **BERT,
            position_embedding_type="absolute",
            pad_token_id=0,
            mask_token_id=1,
            emb_layer_norm_before=True,
        ),
        ENCODER_CALLS,
    ),
    "distilbert": Family(
        pretrained(
            "DistilBert",
            vocab_size=VOCABULARY,
            dim=WIDTH,
            n_layers=2,
            n_heads=4,
            hidden_dim=24,
            max_position_embeddings=64,
        ),
        ENCODER_CALLS,
    ),
    "modernbert": Family(
        pretrained(
            "ModernBert",
            **{**BERT, "num_hidden_layers": 3},
            local_attention=2 * WINDOW,
            global_attn_every_n_layers=3,
            attention_bias=True,
            norm_bias=True,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        {**ENCODER_CALLS, "longer": {"input_ids": ids(2, 19), "attention_mask": mask(19, 14)}},
    ),
    "gpt2": Family(pretrained("GPT2", **GPT2), {**DECODER_CALLS, "left": LEFT}),
    "gpt2_by_layer": Family(pretrained("GPT2", **GPT2, scale_attn_by_inverse_layer_idx=True), DECODER_CALLS),
    "gpt2_unscaled": Family(pretrained("GPT2", 0.8, **GPT2, scale_attn_weights=False), DECODER_CALLS),
    "gpt2_cross": Family(pretrained("GPT2", **GPT2, add_cross_attention=True), CROSS_CALLS),
    "gpt_neox": Family(
        pretrained(
            "GPTNeoX",
            **BERT,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
        ),
        {**DECODER_CALLS, "left": LEFT, "shifted": SHIFTED},
    ),
    "gpt_neox_sequential": Family(pretrained("GPTNeoX", **BERT, use_parallel_residual=False), DECODER_CALLS),
    "opt": Family(pretrained("OPT", **OPT), {**DECODER_CALLS, "left": LEFT}),
    "opt_post": Family(pretrained("OPT", **OPT, do_layer_norm_before=False), DECODER_CALLS),
    "llama": Family(
        pretrained("Llama", **LLAMA, attention_bias=True), {**DECODER_CALLS, "left": LEFT, "shifted": SHIFTED}
    ),
    "llama_yarn": Family(pretrained("Llama", **LLAMA, rope_parameters=YARN), DECODER_CALLS),
    "mistral": Family(pretrained("Mistral", **LLAMA, sliding_window=WINDOW), LONGER),
    "qwen2": Family(
        pretrained(
            "Qwen2",
            **{**LLAMA, "num_hidden_layers": 3},
            use_sliding_window=True,
            sliding_window=WINDOW,
            max_window_layers=1,
        ),
        LONGER,
    ),
    "arcee": Family(pretrained("Arcee", **LLAMA), DECODER_CALLS),
    "ministral": Family(pretrained("Ministral", **LLAMA, sliding_window=WINDOW), LONGER),
    "gemma": Family(pretrained("Gemma", **LLAMA), DECODER_CALLS),
    "gemma2": Family(
        pretrained(
            "Gemma2", **LLAMA, query_pre_attn_scalar=5, attn_logit_softcapping=3.0, sliding_window=WINDOW
        ),
        LONGER,
        ("eager",),
    ),
    "gemma2_uncapped": Family(
        pretrained(
            "Gemma2", **LLAMA, query_pre_attn_scalar=20, attn_logit_softcapping=None, sliding_window=WINDOW
        ),
        LONGER,
        ("eager",),
    ),
    **{
        kind.lower(): Family(pretrained(kind, **VISION, image_size=12, patch_size=4), IMAGE)
        for kind in ("ViT", "DeiT", "ViTMAE", "ViTMSN", "IJepa")
    },
    "ast": Family(
        pretrained(
            "AST", **VISION, patch_size=4, max_length=12, num_mel_bins=8, frequency_stride=4, time_stride=4
        ),
        SOUND,
    ),
    "vivit": Family(pretrained("Vivit", **VISION, image_size=8, num_frames=4, tubelet_size=[2, 4, 4]), FILM),
    "t5": Family(pretrained("T5", 1.0, **T5), T5_CALLS),
    "mt5": Family(pretrained("MT5", 1.0, **T5), T5_CALLS),
    "torch_encoder": Family(torch_encoder(False, True, nn.GELU()), ENCODER, ("sdpa",)),
    "torch_encoder_pre": Family(torch_encoder(True, True, "relu"), ENCODER, ("sdpa",)),
    "torch_encoder_time_first": Family(torch_encoder(True, False, nn.ReLU()), time_first(ENCODER), ("sdpa",)),
    "torch_decoder": Family(torch_decoder, DECODER, ("sdpa",)),
    "torch_decoder_layer": Family(
        lambda implementation: enlivened(Wrapped(decoder_layer())), DECODER, ("sdpa",)
    ),
    "multihead": Family(multihead(True), MULTIHEAD, ("sdpa",)),
    "multihead_unbiased": Family(multihead(True, bias=False), MULTIHEAD, ("sdpa",)),
    "multihead_time_first": Family(multihead(False), time_first(MULTIHEAD), ("sdpa",)),
}
"""Every family an adapter speaks of, by name."""


def capture(model: nn.Module, call: dict[str, Any], paths: list[str] | None = None) -> dict[str, Call]:
    """What modules were called with and returned while the model ran: those at the paths,
    or all that an adapter knows.
    """
    calls: dict[str, Call] = {}

    def recorder(path: str) -> Callable[..., None]:
        def record(module: nn.Module, arguments: Any, options: Any, output: Any) -> None:
            calls[path] = Call(arguments, options, output)

        return record

    wanted = known(model) if paths is None else paths
    handles = [
        model.get_submodule(path).register_forward_hook(recorder(path), with_kwargs=True) for path in wanted
    ]
    try:
        with torch.no_grad():
            model(**call)
    finally:
        for handle in handles:
            handle.remove()
    return calls


def known(model: nn.Module) -> list[str]:
    """The paths of the modules that an adapter knows."""
    return [path for path, module in model.named_modules() if adapter_of(module) is not None]
