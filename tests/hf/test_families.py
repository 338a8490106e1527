"""Models of every family say with regard's attention what they say with their own: outputs, gradients,
generated tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from regard import hf
from regard.errors import ArgumentError
from tests.audits.families import BERT, FAMILIES, LLAMA, OPT, T5, WINDOW, Family, ids, mask, pretrained

SINKS = Family(
    pretrained(
        "GptOss",
        **{**LLAMA, "num_hidden_layers": 2},
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
    ),
    FAMILIES["mistral"].calls,
)
ASKING = {
    **{name: family for name, family in FAMILIES.items() if not name.startswith(("torch", "multihead"))},
    "gpt_oss": SINKS,
}
CASES = [(name, call) for name, family in ASKING.items() for call in family.calls]


def seen(call: dict[str, Any], output: torch.Tensor) -> torch.Tensor:
    """The outputs of real tokens."""
    real = call.get("decoder_attention_mask" if "decoder_input_ids" in call else "attention_mask")
    return output if real is None else output[real.bool()]


def run(model: nn.Module, call: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(0)  # ViT-MAE masks at random
    return seen(call, model(**call).last_hidden_state)


@pytest.mark.parametrize(("name", "call"), CASES, ids=[f"{name}-{call}" for name, call in CASES])
def test_outputs_are_those_of_eager(name: str, call: str) -> None:
    family, implementation = ASKING[name], hf.register()
    model = family.make(implementation)
    hf.verify(model)
    with torch.no_grad():
        found, expected = run(model, family.calls[call]), run(family.make("eager"), family.calls[call])
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def gradients(model: nn.Module, call: dict[str, Any]) -> dict[str, torch.Tensor]:
    torch.manual_seed(3)  # the same dropout
    output = seen(call, model(**call).last_hidden_state)
    (output * torch.linspace(-1, 1, output.shape[-1], dtype=output.dtype)).sum().backward()
    return {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.parametrize("training", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("llama", "one"),
        ("llama", "left"),
        ("llama", "padded"),
        ("mistral", "longer"),
        ("bert", "padded"),
        ("gemma2", "longer"),
        ("t5", "padded"),
        ("gpt2", "batch"),
        ("gpt_oss", "padded"),
    ],
)
def test_gradients_are_those_of_eager(name: str, call: str, training: bool) -> None:
    """In training mode with the dropout of the family: the same generator drops the same weights.

    Eager attention rounds to float32.
    """
    family, found = ASKING[name], {}
    for implementation in (hf.register(), "eager"):
        model = family.make(implementation).train(training)
        found[implementation] = gradients(model, family.calls[call])
    assert found["regard"].keys() == found["eager"].keys()
    for parameter, expected in found["eager"].items():
        assert (found["regard"][parameter] - expected).abs().max() <= 3e-5 * max(1.0, expected.abs().max()), (
            parameter
        )


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_gradient_checkpointing_changes_nothing(name: str, reentrant: bool) -> None:
    found = []
    for checkpointing in (False, True):
        model = ASKING[name].make(hf.register()).double().train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        found.append(gradients(model, {"input_ids": ids(2, 7), "use_cache": False}))
    assert found[0].keys() == found[1].keys()
    for parameter, expected in found[0].items():
        torch.testing.assert_close(found[1][parameter], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("name", "call"),
    [("llama", "left"), ("mistral", "longer"), ("gemma2", "padded"), ("t5", "padded"), ("bert", "padded")],
)
def test_half_precision_is_as_close_as_eager(name: str, call: str, dtype: torch.dtype) -> None:
    family = ASKING[name]
    with torch.no_grad():
        exact = run(family.make("eager"), family.calls[call])
        errors = [
            (run(family.make(i).to(dtype), family.calls[call]).float() - exact).abs().mean()
            for i in (hf.register(), "eager")
        ]
    assert errors[0] <= 1.5 * errors[1]
    assert errors[0] <= 0.3 * exact.abs().mean()


@pytest.mark.parametrize("grad", [False, True])
def test_autocast(grad: bool) -> None:
    call, found = FAMILIES["llama"].calls["left"], {}
    for implementation in (hf.register(), "eager"):
        model = FAMILIES["llama"].make(implementation)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=torch.bfloat16):
            found[implementation] = run(model, call).float()
    assert (found["regard"] - found["eager"]).abs().mean() < 0.05 * found["eager"].abs().mean()


GENERATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", LLAMA),
    "Mistral": ("MistralForCausalLM", {**LLAMA, "sliding_window": WINDOW}),
    "Gemma2": (
        "Gemma2ForCausalLM",
        {**LLAMA, "sliding_window": WINDOW, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 3.0},
    ),
    "OPT": ("OPTForCausalLM", OPT),
    "T5": ("T5ForConditionalGeneration", {**T5, "pad_token_id": 0, "eos_token_id": 1}),
}


@pytest.mark.parametrize(
    "options",
    [{}, {"use_cache": False}, {"cache_implementation": "static", "disable_compile": True}],
    ids=["cache", "none", "static"],
)
@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("kind", GENERATORS)
def test_generated_tokens_are_those_of_eager(kind: str, padded: bool, options: dict[str, Any]) -> None:
    import transformers

    from tests.audits.families import enlivened

    name, configuration = GENERATORS[kind]
    call = {"input_ids": ids(2, 9), "attention_mask": mask(9, 6, left=kind != "T5") if padded else mask(9, 9)}
    found = {}
    for implementation in (hf.register(), "eager"):
        model = enlivened(
            getattr(transformers, name)(getattr(transformers, f"{kind}Config")(**configuration))
        )
        model.set_attn_implementation(implementation)
        found[implementation] = model.generate(
            **call, **options, max_new_tokens=8, min_new_tokens=8, do_sample=False
        )
    assert found["regard"].shape[1] >= 8
    assert torch.equal(found["regard"], found["eager"])


def test_doors_of_transformers(tmp_path: Any) -> None:
    """from_pretrained, from_config and set_attn_implementation lead to the same attention."""
    from transformers import AutoModel, LlamaConfig

    implementation = hf.register("mine")
    FAMILIES["llama"].make("eager").save_pretrained(tmp_path)
    loaded = AutoModel.from_pretrained(tmp_path, attn_implementation=implementation)
    made = AutoModel.from_config(LlamaConfig(**LLAMA), attn_implementation=implementation)
    eager = AutoModel.from_pretrained(tmp_path, attn_implementation="eager")
    assert made.config._attn_implementation == loaded.config._attn_implementation == "mine"
    call = {"input_ids": ids(1, 9)}
    with torch.no_grad():
        expected = eager(**call).last_hidden_state
        torch.testing.assert_close(loaded(**call).last_hidden_state, expected, atol=1e-5, rtol=1e-5)
        eager.set_attn_implementation(implementation)
        assert torch.equal(eager(**call).last_hidden_state, loaded(**call).last_hidden_state)


@pytest.mark.parametrize("kind", ["llama", "bert"])
def test_weights_are_those_of_eager(kind: str) -> None:
    call = FAMILIES[kind].calls["one"]
    with torch.no_grad():
        found, expected = (
            FAMILIES[kind].make(i)(**call, output_attentions=True).attentions
            for i in (hf.register(), "eager")
        )
    assert len(found) == 2
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


DEAF = {
    "GPTJ": {
        "vocab_size": 60,
        "n_embd": 32,
        "n_layer": 1,
        "n_head": 4,
        "rotary_dim": 4,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "Falcon": {"vocab_size": 60, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4},
    "MegatronBert": BERT,
    "Bloom": {"vocab_size": 60, "hidden_size": 32, "n_layer": 1, "n_head": 4},
    "DebertaV2": BERT,
}


@pytest.mark.parametrize("kind", DEAF)
def test_models_that_do_not_ask(kind: str) -> None:
    """They keep their own attention when it is set; made with ours,
    transformers or the mask function stops them, or verify does.
    """
    import transformers

    implementation = hf.register()
    config = getattr(transformers, f"{kind}Config")
    model = transformers.AutoModel.from_config(config(**DEAF[kind]))
    model.set_attn_implementation(implementation)
    assert model.config._attn_implementation != implementation
    if kind in ("GPTJ", "Falcon"):
        with pytest.raises(KeyError, match="regard"):
            transformers.AutoModel.from_config(config(**DEAF[kind]), attn_implementation=implementation)
        return
    model = transformers.AutoModel.from_config(config(**DEAF[kind]), attn_implementation=implementation)
    with pytest.raises(ArgumentError, match=rf"{kind}Model does not ask the attention interface"):
        hf.verify(model)
    if kind != "DebertaV2":  # it makes masks of its own
        with pytest.raises(ArgumentError, match=rf"{kind}Model does not ask the attention interface"):
            model(input_ids=ids(1, 5))
