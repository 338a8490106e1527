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

FAMILIES = ("qwen3", "gemma3_text", "olmo2", "deepseek_v3", "phi3")
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


@pytest.mark.parametrize("kind", FAMILIES)
def test_ten_numbers(kind):
    model = enlivened(tiny_model(kind, "eager"), 1.0)
    options = {**inputs_for(model)[0], "use_cache": False}
    report = r.audit(model, [options], checks=["rows", "constants", "depth"])
    calls, wanted = calls_of(model, options), {}
    for layer, row in enumerate(report.layers):
        assert row.site == f"layers.{layer}.self_attn"
        block, point = again(model.layers[layer], calls[f"layers.{layer}"])
        attention, tokens = again(model.layers[layer].self_attn, calls[row.site])
        wanted[layer, "layer_constant"] = norm_of(attention, tokens)
        wanted[layer, "block_constant"] = norm_of(block, point)
        if kind in ("qwen3", "deepseek_v3", "phi3"):
            before = model.layers[layer].input_layernorm
            branch = lambda x, before=before, attention=attention: attention(before(x))  # noqa: E731
            wanted[layer, "attention_branch_constant"] = norm_of(branch, point)
    for (layer, column), value in wanted.items():
        assert report.layers[layer].values[column] == pytest.approx(value, rel=CLOSE), (layer, column)
    with torch.no_grad():
        laws = model(**options, output_attentions=True).attentions
    for row in report.heads:
        law = laws[row.layer][0, row.head].double()
        assert row.values["entropy"] == pytest.approx(float(torch.special.entr(law).sum(-1).mean()), abs=1e-4)
    assert len(wanted) + len(report.heads) >= 10
    assert all(math.isfinite(value) and value > 0 for value in wanted.values())
