"""Ten numbers of each family once more, by hooks and dense Jacobians of plain torch: nothing of the audit is
used for them.
"""

import math

import pytest
import torch

import regard as r
from tests.audits.architectures import inputs_for, tiny_model
from tests.audits.families import enlivened

pytest.importorskip("transformers")

LLAMA, BERT = "layers.{}", "encoder.layer.{}"
SELF = (LLAMA, ("self_attn",), "input_layernorm")
WITHOUT_BRANCH = (LLAMA, ("self_attn",), None)
BERTS = (BERT, ("attention.self", "attention.output.dense"), None)
FAMILIES = {
    "qwen3": SELF, "deepseek_v3": SELF, "phi3": SELF, "gemma3_text": WITHOUT_BRANCH,
    "olmo2": WITHOUT_BRANCH, "mistral": SELF, "cohere": SELF,
    "bert": BERTS, "roformer": BERTS, "vit": (LLAMA, ("attention",), "layernorm_before"),
    "gpt2": ("h.{}", ("attn",), "ln_1"), "gpt_neox": (LLAMA, ("attention",), "input_layernorm"),
    "bloom": ("h.{}", ("self_attention",), None),
}  # fmt: skip
"""Blocks, the modules of attention in them, one after the other, and the norm before these where nothing
else stands between it and the residual connection.
"""
CLOSE = 2e-3
"""Models run in float32, and exact constants have a residual of 5e-3 of their square at most."""


def norm_of(function, point):
    """The spectral norm of a dense Jacobian."""
    dense = torch.autograd.functional.jacobian(function, point)
    return float(torch.linalg.matrix_norm(dense.reshape(-1, point.numel()).double(), 2))


def calls_of(model, options):
    """What every module was called with, by plain hooks."""
    found, hooks = {}, []
    for name, module in model.named_modules():

        def keep(_, arguments, named, name=name):
            found[name] = (arguments, named)

        hooks.append(module.register_forward_pre_hook(keep, with_kwargs=True))
    with torch.no_grad():
        model(**options)
    for hook in hooks:
        hook.remove()
    return found


def again(module, call):
    """A module as a function of its tokens, everything else as in its call."""
    arguments, named = call
    named = {**named, "past_key_values": None} if "past_key_values" in named else named
    point = arguments[0] if arguments else named["hidden_states"]

    def run(x):
        made = module(x, *arguments[1:], **named) if arguments else module(**{**named, "hidden_states": x})
        return made[0] if isinstance(made, tuple) else made

    return run, point.detach()


def chained(model, paths, calls):
    """Modules one after the other, as a function of the tokens of the first."""
    runs = [again(model.get_submodule(path), calls[path]) for path in paths]

    def run(x):
        for step, _ in runs:
            x = step(x)
        return x

    return run, runs[0][1]


def expected(model, layer, structure, calls):
    """The constants of one layer, by dense Jacobians."""
    block, attention, norm = structure
    own = block.format(layer)
    run, point = chained(model, [own], calls)
    inner, tokens = chained(model, [f"{own}.{name}" for name in attention], calls)
    found = {"layer_constant": norm_of(inner, tokens), "block_constant": norm_of(run, point)}
    if norm is not None:
        before = model.get_submodule(f"{own}.{norm}")
        found["attention_branch_constant"] = norm_of(lambda x: inner(before(x)), point)
    if structure is BERTS:
        mlp, hidden = chained(model, [f"{own}.intermediate", f"{own}.output.dense"], calls)
        found["mlp_branch_constant"] = norm_of(mlp, hidden)
        found["attention_branch_constant"] = found["layer_constant"]
    return found


@pytest.mark.parametrize("kind", FAMILIES)
def test_ten_numbers(kind):
    model = enlivened(tiny_model(kind, "eager"), 1.0)
    options = inputs_for(model)[0]
    if hasattr(model.config, "use_cache"):
        options["use_cache"] = False
    report = r.audit(model, [options], checks=["rows", "constants"])
    assert len(report.layers) == 2
    calls, compared = calls_of(model, options), 0
    for layer, row in enumerate(report.layers):
        assert row.site == f"{FAMILIES[kind][0].format(layer)}.{FAMILIES[kind][1][0]}"
        for column, value in expected(model, layer, FAMILIES[kind], calls).items():
            assert math.isfinite(value)
            assert value > 0
            assert row.values[column] == pytest.approx(value, rel=CLOSE), (layer, column)
            compared += 1
    with torch.no_grad():
        laws = model(**options, output_attentions=True).attentions
    for row in report.heads:
        law = laws[row.layer][0, row.head].double()
        assert row.values["entropy"] == pytest.approx(float(torch.special.entr(law).sum(-1).mean()), abs=1e-4)
        compared += 1
    assert compared >= 10
