"""The monitor: its numbers against the definitions, its rule on histories by hand,
and that it leaves a training as it was.
"""

import json
import math
import warnings
from dataclasses import replace

import pytest
import torch
from torch import nn

import regard as r
from regard.audits.adapters import Call, NotCovered, adapter_of
from regard.nn import AlibiPositions, Design, LanguageModel, RelativePositions, RotaryPositions, shaped
from regard.nn.monitoring.readings import of_call, padding
from regard.nn.monitoring.rule import Rule, suspect
from regard.nn.monitors import UNSEEN, Monitor, RegularityWarning, monitor

WIDTH, HEADS = 16, 2
CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)


def encoder(dropout=0.0, layers=2):
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 24, dropout=dropout, batch_first=True)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)


def language_model(**design):
    return LanguageModel(Design(WIDTH, HEADS, **design), 11, 2)


def hooks(model):
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def enlarge(module, factor, head=0):
    """Queries of one head, and with them its scores, `factor` times as large."""
    with torch.no_grad():
        rows = slice(head * WIDTH // HEADS, (head + 1) * WIDTH // HEADS)
        module.in_proj_weight[rows] *= factor
        module.in_proj_bias[rows] *= factor


# Numbers


def test_norms_are_those_of_the_products():
    module = nn.MultiheadAttention(WIDTH, HEADS)
    with monitor(module) as watch:
        found = watch.measure()["layers"][""]
    w_q, w_k, w_v = (part.double().mT for part in module.in_proj_weight.detach().chunk(3))
    w_o, width = module.out_proj.weight.detach().double().mT, WIDTH // HEADS
    for head in range(HEADS):
        own = slice(head * width, (head + 1) * width)
        qk, ov = w_q[:, own] @ w_k[:, own].mT / math.sqrt(width), w_v[:, own] @ w_o[own]
        assert found["qk_norm"][head] == pytest.approx(float(torch.linalg.matrix_norm(qk, 2)), rel=1e-12)
        assert found["ov_norm"][head] == pytest.approx(float(torch.linalg.matrix_norm(ov, 2)), rel=1e-12)


@pytest.mark.parametrize("masked", [False, True])
def test_entropy_and_logits_are_those_of_the_module(masked):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    enlarge(module, 4.0)
    x = torch.randn(3, 6, WIDTH)
    mask = CAUSAL if masked else None
    with monitor(module) as watch:
        weights = module(x, x, x, attn_mask=mask, average_attn_weights=False)[1].detach().double()
        watch.step()
    queries, keys = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in nn.functional.linear(
        x, module.in_proj_weight[: 2 * WIDTH], module.in_proj_bias[: 2 * WIDTH]).chunk(2, -1))  # fmt: skip
    scores = (queries @ keys.mT).detach() / math.sqrt(WIDTH // HEADS) + (0 if mask is None else mask)
    found = watch.history[-1]["layers"][""]
    assert found["entropy"] == pytest.approx(
        torch.special.entr(weights).sum(-1).mean((0, 2)).tolist(), rel=1e-5
    )
    assert found["max_logit"] == pytest.approx(scores.amax((0, 2, 3)).tolist(), rel=1e-5)


@pytest.mark.parametrize(
    "design",
    [
        {"positions": RotaryPositions()},
        {"positions": AlibiPositions(), "kv_heads": 1},
        {"positions": RelativePositions()},
        {"mechanism": r.Attention(r.Gaussian(bandwidth=2.0))},
        {"mechanism": r.Attention(r.SoftCap(r.Dot(scale=0.5), 3.0))},
    ],
    ids=["rotary", "alibi and groups", "relative", "gaussian", "softcap"],
)
def test_modules_of_regard_are_read_as_they_declare_themselves(design):
    model = language_model(**design)
    module, seen = model.decoder.layers[1].attention, []
    module.register_forward_hook(
        lambda module, arguments, output: seen.append(arguments[0].detach().double())
    )
    with monitor(model) as watch:
        model(torch.randint(11, (3, 6)))
        watch.step()
    laws = torch.stack([module.declare().attention.weights(x) for x in seen[0]])
    found = watch.history[-1]["layers"]["decoder.layers.1.attention"]
    assert not watch.not_covered
    assert found["entropy"] == pytest.approx(torch.special.entr(laws).sum(-1).mean((0, 2)).tolist(), rel=1e-4)
    assert len(found["qk_norm"]) == HEADS


def test_the_first_four_sequences_of_a_batch_are_read():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x, padding = (
        torch.randn(7, 6, WIDTH),
        torch.arange(6) >= torch.tensor([6, 3, 5, 2, 6, 1, 4]).unsqueeze(-1),
    )
    found = []
    for count in (7, 4):
        with monitor(module) as watch:
            module(x[:count], x[:count], x[:count], key_padding_mask=padding[:count], need_weights=False)
            watch.step()
            assert len(watch.jacobians()) == 1
        found.append(watch.history[-1]["layers"][""])
    assert found[0] == found[1]


def test_qk_norm_of_a_gaussian_is_of_its_product_part():
    """−|q − k|²/(2h²) has the part q·k/h²."""
    gaussian, dot = (
        language_model(mechanism=r.Attention(r.Gaussian(bandwidth=2.0))),
        language_model(mechanism=r.Attention(r.Dot(scale=0.25))),
    )
    dot.load_state_dict(gaussian.state_dict())
    with monitor(gaussian) as first, monitor(dot) as second:
        one, other = (
            watch.measure()["layers"]["decoder.layers.0.attention"]["qk_norm"] for watch in (first, second)
        )
    assert one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("kind", ["GPT2", "Llama"])
def test_models_of_transformers_are_read(kind):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 20,
        "hidden_size": WIDTH,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = getattr(transformers, f"{kind}Config")(
        **sizes, **({"intermediate_size": 24} if kind == "Llama" else {})
    )
    model = getattr(transformers, f"{kind}Model")(config).train()  # with dropout
    with monitor(model) as watch:
        model(
            input_ids=torch.randint(3, 20, (2, 5)), attention_mask=torch.tensor([[1] * 5, [1] * 3 + [0] * 2])
        )
        watch.step()
        assert len(watch.jacobians()) == 2
    assert not watch.not_covered
    assert all(
        0 < value <= math.log(5)
        for layer in watch.history[-1]["layers"].values()
        for value in layer["entropy"]
    )
    assert hooks(model) == 0


PADDED = {
    "none": torch.ones(3, 6, dtype=torch.bool),
    "left": torch.arange(6) >= torch.tensor([[2], [0], [4]]),
    "right": torch.arange(6) < torch.tensor([[4], [6], [2]]),
    "inside": torch.tensor([1, 1, 0, 0, 1, 1], dtype=torch.bool).expand(3, -1),
}


def test_a_model_that_runs_regards_attention_is_read_like_any_other():
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=1)
    model, ids = transformers.LlamaModel(config), torch.tensor([[1, 7, 9, 12, 30]])
    found = []
    for name in ("sdpa", r.hf.register("watched-plug")):
        model.set_attn_implementation(name)
        with monitor(model, every=1) as watch:
            model(input_ids=ids).last_hidden_state.sum().backward()
            watch.step()
        assert not watch.not_covered
        found.append(watch.history[0]["layers"]["layers.0.self_attn"])
    for name, numbers in found[0].items():
        assert found[1][name] == pytest.approx(numbers, rel=1e-6), name
    assert {"entropy", "max_logit", "qk_norm"} <= set(found[1])


def by_rows(module, x, counted, mask):
    """Mean entropy and largest logit of each head over the rows that count, from the definition."""
    queries, keys = (
        part.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for part in nn.functional.linear(
            x, module.in_proj_weight[: 2 * WIDTH], module.in_proj_bias[: 2 * WIDTH]
        )
        .detach()
        .chunk(2, -1)
    )
    scores = (queries @ keys.mT / math.sqrt(WIDTH // HEADS) + mask).transpose(0, 1)[:, counted]
    return torch.special.entr(scores.softmax(-1)).sum(-1).mean(-1).tolist(), scores.amax((-2, -1)).tolist()


@pytest.mark.parametrize("past", [False, True])
@pytest.mark.parametrize("side", PADDED)
@pytest.mark.parametrize("count", [1, 3])
def test_padding_is_left_out(side, past, count):
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    real = PADDED[side][:count]
    x = torch.randn(count, 6, WIDTH, dtype=torch.float64)
    x[~real] *= 10.0  # what stands in padding must not show
    closed = torch.zeros(count, 6, dtype=torch.float64).masked_fill(~real, -math.inf)
    causal = CAUSAL.double() if past else torch.zeros(6, 6, dtype=torch.float64)
    with monitor(module) as watch:
        module(x, x, x, key_padding_mask=~real, attn_mask=causal < 0, need_weights=False)
        watch.step()
    if past and side == "left":
        assert "queries" in watch.not_covered[""]  # torch divides zero by zero there
        return
    entropy, logits = by_rows(module, x, real, closed[:, None, None] + causal)
    found = watch.history[-1]["layers"][""]
    assert not watch.not_covered
    assert found["entropy"] == pytest.approx(entropy, rel=1e-12)
    assert found["max_logit"] == pytest.approx(logits, rel=1e-12)


def test_a_token_that_only_later_ones_would_see_is_no_padding():
    """In a mask of the strict past and the first token nobody sees the last token,
    which is as real as the others.
    """
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x, allowed = torch.randn(2, 6, WIDTH, dtype=torch.float64), torch.ones(6, 6).tril(-1).bool()
    allowed[0, 1] = True
    mask = torch.zeros(6, 6, dtype=torch.float64).masked_fill(~allowed, -math.inf)
    with monitor(module) as watch:
        module(x, x, x, attn_mask=mask, need_weights=False)
        watch.step()
    assert not watch.not_covered
    assert watch.history[-1]["layers"][""]["entropy"] == pytest.approx(
        by_rows(module, x, torch.ones(2, 6).bool(), mask)[0], rel=1e-12
    )


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("kind", ["GPT2", "Llama", "Bert"])
def test_padding_of_transformers_is_left_out(kind, side):
    transformers = pytest.importorskip("transformers")
    sizes = {
        "vocab_size": 20,
        "hidden_size": WIDTH,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "intermediate_size": 24,
    }
    named = {**sizes, "bos_token_id": 1, "eos_token_id": 2}
    named = (
        named
        if kind != "GPT2"
        else {name: value for name, value in named.items() if name != "intermediate_size"}
    )
    made = [
        getattr(transformers, f"{kind}Config")(**named, attn_implementation=name)
        for name in ("sdpa", "eager")
    ]
    model, eager = (getattr(transformers, f"{kind}Model")(config).eval() for config in made)
    for weight in model.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    eager.load_state_dict(model.state_dict())
    ids, real = torch.randint(3, 20, (3, 6)), PADDED[side]
    with monitor(model) as watch:
        model(input_ids=ids, attention_mask=real.long())
        watch.step()
    (weights,) = eager(input_ids=ids, attention_mask=real.long(), output_attentions=True).attentions
    rows = torch.special.entr(weights.detach().double()).sum(-1).transpose(0, 1)[:, real]
    (found,) = watch.history[-1]["layers"].values()
    assert not watch.not_covered
    assert found["entropy"] == pytest.approx(rows.mean(-1).tolist(), rel=1e-5)


def test_padding_alone_has_no_numbers():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x = torch.randn(1, 6, WIDTH)
    call = Call((x, x, x), {"need_weights": False}, module(x, x, x, need_weights=False))
    declared = adapter_of(module).declare(module, "", module, call)
    assert of_call(declared)["entropy"]
    hidden = declared.attention.replace(support=r.Padding(torch.zeros(1, dtype=torch.int64)))
    with pytest.raises(NotCovered, match="all tokens of the first sequences are padding"):
        of_call(replace(declared, attention=hidden))


def test_a_reason_is_forgotten_when_a_pass_is_read():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(3, 6, WIDTH)
    with monitor(module, every=1) as watch:
        module(x, x, x, key_padding_mask=~PADDED["left"], attn_mask=CAUSAL < 0, need_weights=False)
        watch.step()
        assert "queries" in watch.not_covered[""]
        module(x, x, x, key_padding_mask=~PADDED["right"], attn_mask=CAUSAL < 0, need_weights=False)
        watch.step()
    assert not watch.not_covered
    assert ["entropy" in entry["layers"][""] for entry in watch.history] == [False, True]


def test_hidden_keys_are_found_a_few_rows_at_a_time(monkeypatch):
    """The same for one row at a time as for all."""
    allowed = torch.rand(2, 1, 9, 9) < 0.5
    allowed[..., 4] = False
    allowed[0, :, 2, :] = False
    found = []
    for rows in (1, 4, 256):
        monkeypatch.setattr("regard.nn.monitoring.readings.ROWS", rows)
        found.append(padding(r.Where(allowed), torch.zeros(2, 9, 3), None))
    assert torch.equal(found[0], ~allowed.any(-2))
    assert all(torch.equal(found[0], other) for other in found)


def test_jacobian_norm_is_that_of_the_module():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).double()
    x = torch.randn(3, 5, WIDTH, dtype=torch.float64)

    def layer(points):
        return module(points, points, points, attn_mask=CAUSAL[:5, :5].double(), need_weights=False)[0]

    with monitor(module) as watch:
        layer(x)
        watch.step()
        (found,) = watch.jacobians().values()
    matrix = torch.autograd.functional.jacobian(lambda points: layer(points.unsqueeze(0)), x[0]).reshape(
        5 * WIDTH, 5 * WIDTH
    )
    exact = float(torch.linalg.matrix_norm(matrix, 2))
    assert isinstance(found, r.derive.Estimate)
    assert exact * 0.99 <= float(found) <= exact * (1 + 1e-9)
    assert watch.history[-1]["layers"][""]["jacobian_norm"] == float(found)
    assert f"≥ {float(found):.3g}" in watch.table()


def test_mixed_precision_is_read():
    model = encoder()
    with monitor(model) as watch, torch.autocast("cpu", torch.bfloat16):
        model(torch.randn(2, 6, WIDTH))
        watch.step()
    assert not watch.not_covered
    assert all(layer["entropy"] is not None for layer in watch.history[-1]["layers"].values())


# A training stays as it was


def trained(watched, dropout=0.3):
    torch.manual_seed(0)
    model = encoder(dropout)
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)

    def step():
        loss = model(torch.randn(4, 6, WIDTH), mask=CAUSAL).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    if not watched:
        for _ in range(4):
            step()
        return model, torch.rand(())
    with monitor(model, every=1) as watch:
        for _ in range(4):
            watch.step(loss=step())
            watch.jacobians()
    return model, torch.rand(())


def test_a_watched_training_is_the_same_bit_for_bit():
    (plain, number), (watched, other) = trained(False), trained(True)
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))
    assert number == other
    assert all(module.training for module in watched.modules())


def test_nothing_is_left_behind_also_after_an_error():
    model = encoder()

    def fail():
        with monitor(model):
            assert hooks(model) == 2
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert hooks(model) == 0


def test_a_strange_module_does_not_end_a_training(monkeypatch):
    def broken(*arguments):
        raise ZeroDivisionError("strange")

    model = encoder()
    monkeypatch.setitem(Monitor._look.__globals__, "of_call", broken)
    with monitor(model) as watch:
        model(torch.randn(2, 6, WIDTH))
        watch.step()
    assert set(watch.not_covered.values()) == {"ZeroDivisionError: strange"}
    assert "strange" in repr(watch)
    assert watch.history[-1]["layers"]["layers.0.self_attn"]["qk_norm"]


# What is measured when


def test_the_first_pass_with_gradients_of_a_due_step_is_read():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    near, far = torch.randn(1, 4, WIDTH), 10 * torch.randn(1, 4, WIDTH)
    with monitor(module, every=3) as watch:
        with torch.no_grad():
            module(far, far, far)
        for _ in range(6):
            module(near, near, near)
            module(far, far, far)
            watch.step(loss=1.5)
    assert [entry["step"] for entry in watch.history] == [1, 3, 6]
    logits = [entry["layers"][""]["max_logit"] for entry in watch.history]
    with monitor(module) as other:
        module(near, near, near)
        other.step()
    assert logits == [other.history[0]["layers"][""]["max_logit"]] * 3
    assert watch.history[-1]["loss"] == 1.5


def test_look_reads_a_pass_that_is_not_due():
    module = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
    x = torch.randn(1, 4, WIDTH)
    with monitor(module, every=100) as watch:
        watch.measure()
        assert watch.not_covered == {"": UNSEEN}
        watch.look()
        module(x, x, x)
        assert watch.measure()["layers"][""]["entropy"]
    assert not watch.not_covered


def test_what_is_not_covered_is_said():
    model = nn.ModuleList(
        [nn.MultiheadAttention(WIDTH, HEADS, kdim=8, vdim=8), nn.MultiheadAttention(WIDTH, HEADS)]
    )
    with monitor(model) as watch:
        watch.step()
    assert "kdim" in watch.not_covered["0"]
    assert watch.not_covered["1"] == UNSEEN
    assert "not measured: 0: " in watch.table()
    model = language_model(mechanism=r.Attention(r.Dot()))
    deep = LanguageModel(shaped(Design(WIDTH, HEADS)), 11, 1)
    for own, reason in ((model, None), (deep, "shaped")):
        with monitor(own) as watch:
            own(torch.randint(11, (2, 5)))
            watch.step()
        assert [reason in text for text in watch.not_covered.values()] == ([] if reason is None else [True])


@pytest.mark.parametrize(
    ("options", "argument"),
    [
        ({"window": 0}, "window"),
        ({"every": 0}, "every"),
        ({"growth": 1.0}, "growth"),
        ({"growth": math.nan}, "growth"),
        ({"level": -1.0}, "level"),
        ({"growth": "2"}, "growth"),
        ({"level": "high"}, "level"),
        ({"every": True}, "every"),
        ({"history": [{}]}, "history"),
        ({"history": "[]"}, "history"),
        ({"history": 3}, "history"),
        ({"history": [{"step": 1, "layers": {"a": 3}, "warnings": []}]}, "history"),
        ({"history": [{"step": 1, "layers": {"a": {"qk_norm": 3.0}}, "warnings": []}]}, "history"),
        ({"history": [{"step": 1, "layers": {}, "warnings": [{}]}]}, "history"),
    ],
)
def test_bad_arguments_are_named(options, argument):
    with pytest.raises(r.errors.ArgumentError, match=f"^{argument}: "):
        monitor(encoder(), **options)


@pytest.mark.parametrize("loss", [torch.ones(3), "large", [1.0]])
def test_a_loss_that_is_not_one_number_is_named_and_counts_nothing(loss):
    with monitor(encoder(), every=5) as watch:
        for act in (watch.step, watch.measure):
            with pytest.raises(r.errors.ArgumentError, match=r"^loss: .* give one number"):
                act(loss=loss)
        assert (watch.count, watch.history) == (0, [])
        watch.step(loss=torch.ones(1))
    assert watch.history[-1]["loss"] == 1.0


def test_a_monitor_is_entered_once_at_a_time():
    model = encoder()
    watch = monitor(model, every=1)
    with watch:
        with pytest.raises(r.errors.ArgumentError, match="is entered already"), watch:
            pass
        assert hooks(model) == 2
    assert hooks(model) == 0
    with watch:
        assert hooks(model) == 2


def test_a_history_of_fewer_heads_is_no_obstacle():
    before = {"step": 1, "loss": None, "warnings": [], "layers": {"": {"max_logit": [1.0], "qk_norm": [1.0]}}}
    with monitor(nn.MultiheadAttention(WIDTH, HEADS), history=[before]) as watch:
        assert len(watch.measure()["layers"][""]["qk_norm"]) == HEADS


def test_a_model_without_attention_is_refused():
    with pytest.raises(r.errors.ArgumentError, match="has no attention that regard knows"):
        monitor(nn.Linear(3, 3))


# The rule


def history(*logits, norms=None):
    """Measurements of one head, at steps 10, 20, ..."""
    norms = [1.0] * len(logits) if norms is None else norms
    return [
        {
            "step": 10 * (k + 1),
            "loss": None,
            "warnings": [],
            "layers": {"a": {"max_logit": [logit], "qk_norm": [norm]}},
        }
        for k, (logit, norm) in enumerate(zip(logits, norms, strict=True))
    ]


def said(rule, entries):
    """The steps at which the rule says something, told as the monitor tells them."""
    from regard.nn.monitoring.rule import as_entry

    for k in range(len(entries)):
        entries[k]["warnings"] = [as_entry(growth) for growth in rule.found(entries[: k + 1])]
    return [(entry["step"], warning["quantity"]) for entry in entries for warning in entry["warnings"]]


RULE = Rule(window=3, growth=2.0, level=50.0)


def test_logits_count_where_they_doubled_above_the_level():
    assert said(RULE, history(10.0, 20.0, 49.9)) == []
    assert said(RULE, history(30.0, 40.0, 59.9)) == []
    assert said(RULE, history(30.0, 40.0, 60.0)) == [(30, "max_logit")]
    assert said(RULE, history(-5.0, 55.0)) == [(20, "max_logit")]
    assert said(RULE, history(100.0)) == []


def test_growth_of_a_logit_is_counted_from_one():
    """From a half to sixty is sixty times, not a hundred and twenty; and from two to a hundred is fifty."""
    rule = Rule(window=3, growth=100.0, level=50.0)
    assert said(rule, history(0.5, 99.9)) == said(rule, history(1e-9, 99.9)) == []
    assert said(rule, history(0.5, 100.0)) == said(rule, history(1.0, 100.0)) == [(20, "max_logit")]
    assert said(rule, history(2.0, 199.9)) == []
    assert said(rule, history(2.0, 200.0)) == [(20, "max_logit")]
    (growth,) = rule.found(history(0.5, 150.0))
    assert growth.factor == 150.0


def test_growth_of_a_norm_is_counted_from_zero():
    assert said(RULE, history(25.0, 25.0, norms=[1e-3, 2e-3])) == [(20, "qk_norm")]
    assert said(RULE, history(25.0, 25.0, norms=[0.0, 1e-3])) == [(20, "qk_norm")]


def test_the_words_of_a_growth():
    (growth,) = RULE.found(history(30.0, 60.0))
    assert str(growth) == "a, head 0: the largest logit went from 30 at step 10 to 60 at step 20 (2 times)"
    (lost,) = RULE.found(history(30.0, "inf"))
    assert str(lost) == "a, head 0: the largest logit is not finite at step 20 (it was 30 at step 10)"
    (grown,) = RULE.found(history(-1.0, 60.0))
    assert str(grown) == "a, head 0: the largest logit went from -1 at step 10 to 60 at step 20"


def test_the_window_forgets():
    assert said(RULE, history(30.0, 40.0, 45.0, 60.0)) == [(40, "max_logit")]
    assert said(RULE, history(30.0, 40.0, 45.0, 50.0, 60.0)) == []


def test_a_named_head_is_compared_with_what_came_after():
    assert said(RULE, history(30.0, 60.0, 61.0, 119.0, 120.0)) == [(20, "max_logit"), (50, "max_logit")]


def test_qk_norms_count_one_growth_before_the_level():
    norms = [1.0, 1.5, 2.0]
    assert said(RULE, history(25.0, 25.0, 24.9, norms=norms)) == []
    assert said(RULE, history(25.0, 25.0, 25.0, norms=norms)) == [(30, "qk_norm")]
    assert said(RULE, history(25.0, 25.0, 25.0, norms=[1.0, 1.5, 1.9])) == []
    assert (
        said(RULE, history(None, None, None, norms=norms)) == []
    )  # no pass was seen: growth alone is how training begins


def test_what_is_not_finite_is_said_once():
    assert said(RULE, history(1.0, "inf", "inf")) == [(20, "max_logit")]
    assert said(RULE, history(1.0, None, None, None, None)) == [(20, "max_logit")]


def test_the_suspect_is_the_head_that_grew_most():
    entries = history(10.0, 11.0)
    entries[0]["layers"]["b"] = {"max_logit": [4.0, 4.0], "qk_norm": [1.0, 1.0]}
    entries[1]["layers"]["b"] = {"max_logit": [4.5, 9.0], "qk_norm": [9.0, 1.0]}
    found = suspect(RULE, entries)
    assert (found.layer, found.head, found.quantity, found.before, found.now) == (
        "b",
        1,
        "max_logit",
        4.0,
        9.0,
    )
    assert suspect(RULE, []) is None
    assert suspect(RULE, history(3.0)) is None


def grown(watch, model, factors):
    for factor in factors:
        enlarge(model.layers[1].self_attn, factor, head=1)
        model(10 * torch.randn(2, 6, WIDTH, generator=torch.Generator().manual_seed(0)))
        watch.step(loss=0.0)


def test_a_head_that_grows_is_named():
    model = encoder()
    with monitor(model, every=1, window=4, level=20.0) as watch, pytest.warns(RegularityWarning) as caught:
        grown(watch, model, [1.0, 1.6, 1.6, 1.6, 1.6, 1.6])
    assert {(w.message.growth.layer, w.message.growth.head) for w in caught} == {("layers.1.self_attn", 1)}
    assert [str(w.message) for w in caught] == [str(w) for w in watch.warnings]
    assert "layers.1.self_attn, head 1: the" in str(watch.warnings[0])
    assert caught[0].filename == __file__
    assert json.loads(json.dumps(watch.history, allow_nan=False)) == watch.history


def test_a_warning_as_error_leaves_the_measurement():
    model = encoder()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with monitor(model, every=1, level=0.0) as watch, pytest.raises(RegularityWarning):
            grown(watch, model, [1.0, 3.0])
    assert len(watch.history) == 2
    assert watch.warnings
    assert watch.history[-1]["warnings"]
    assert hooks(model) == 0


def test_a_history_goes_on_where_it_stopped():
    factors = [1.0, 1.6, 1.6, 1.6, 1.6, 1.6, 1.6]
    model = encoder()
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with monitor(model, every=1, level=20.0) as whole, pytest.warns(RegularityWarning):
        grown(whole, model, factors)
    model.load_state_dict(state)
    with monitor(model, every=1, level=20.0) as first, warnings.catch_warnings():
        warnings.simplefilter("ignore", RegularityWarning)
        grown(first, model, factors[:4])
    kept = json.loads(json.dumps(first.history))
    with monitor(model, every=1, level=20.0, history=kept) as second, pytest.warns(RegularityWarning):
        grown(second, model, factors[4:])
    assert second.history == whole.history


def test_weights_that_are_not_finite_are_said():
    model = encoder()
    with monitor(model, every=1) as watch:
        model(torch.randn(2, 6, WIDTH))
        watch.step()
        enlarge(model.layers[0].self_attn, math.nan, head=1)
        model(torch.randn(2, 6, WIDTH))
        with pytest.warns(RegularityWarning, match=r"layers\.0\.self_attn, head 1: .* not finite at step 2"):
            watch.step(loss=math.nan)
    assert watch.history[-1]["loss"] is None
    assert "nan (head 1)" in watch.table()


@pytest.mark.parametrize("count", [5, 300])
def test_which_tokens_are_hidden_from_every_query_of_every_head(count):
    """Each sequence of a batch by itself, over all heads and all rows, also where rows are read in blocks."""
    allowed = torch.rand(3, 5, count, count) < 0.1 / count
    allowed[:, 3, 1, 1] = True
    allowed[2, :, range(count), range(count)] = False  # here no token sees itself, so that none is hidden
    seen = allowed.flatten(1, 2).any(1)
    itself = allowed.diagonal(dim1=-2, dim2=-1).flatten(1).any(1)
    expected = ~seen & itself[:, None]
    assert expected[:2].any()
    assert not expected[2].any()
    found = padding(r.Where(allowed), torch.zeros(3, count, WIDTH), None)
    assert torch.equal(found, expected.unsqueeze(-2))
