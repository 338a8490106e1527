"""What is observed: attention in modules that nobody declared, measured as it happens, and never wrong."""

import math
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as r
from regard.audits.capture import quiet
from regard.audits.checks import checks
from regard.audits.watching import spots, watching
from tests.audits.families import FAMILIES, enlivened

MEASURED = {"entropy", "effective_support", "largest_logit", "sink_mass", "row_stiffness", "head_constant"}


def named(*names):
    return [check for check in checks() if check.name in names]


def look(model, call):
    """What a watch notices while a model runs, and the declarations it makes of it."""
    with quiet(model), torch.no_grad(), watching(dict(model.named_modules())) as watch:
        model(**call)
    return {spot.name: sight.resolve()[0] for spot, sight in spots(watch.noticed).items()}


class Product(nn.Module):
    """A product that is a module, as SqueezeBERT has it."""

    def forward(self, left, right):
        return torch.matmul(left, right)


class ByHand(nn.Module):
    """Attention in three lines, in one of the ways people write it."""

    def __init__(self, way, width=12, heads=3):
        super().__init__()
        self.way, self.heads = way, heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.softmax, self.product = nn.Softmax(-1), Product()

    def forward(self, x, mask=None):
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = self.way(self, q, k, v, mask)
        return self.out(mixed.transpose(1, 2).flatten(2))


def scores(q, k, mask):
    found = q @ k.mT / math.sqrt(q.shape[-1])
    return found if mask is None else found.masked_fill(~mask, torch.finfo(q.dtype).min)


ALL = torch.ones(1, 1, dtype=torch.bool)
WAYS = {
    "matmul": lambda self, q, k, v, mask: scores(q, k, mask).softmax(-1) @ v,
    "softmax module, dropout": lambda self, q, k, v, mask: torch.matmul(
        F.dropout(self.softmax(scores(q, k, mask)), 0.1, self.training), v
    ),
    "product module, zeros again": lambda self, q, k, v, mask: self.product(
        torch.masked_fill(self.softmax(scores(q, k, mask)), ~(ALL if mask is None else mask), 0.0), v
    ),
    "einsum": lambda self, q, k, v, mask: torch.einsum(
        "bhij,bjhd->bhid", F.softmax(scores(q, k, mask), dim=-1), v.transpose(1, 2)
    ),
    "bmm": lambda self, q, k, v, mask: torch.bmm(
        torch.softmax(scores(q, k, mask), 3).flatten(0, 1), v.flatten(0, 1)
    ).unflatten(0, q.shape[:2]),
    "fused": lambda self, q, k, v, mask: F.scaled_dot_product_attention(q, k, v, mask),
    "fused, additive": lambda self, q, k, v, mask: F.scaled_dot_product_attention(
        q, k, v, None if mask is None else mask.double().log(), scale=0.2
    ),
}  # fmt: skip
CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=["all", "causal"])
@pytest.mark.parametrize("way", WAYS)
def test_every_way_of_writing_attention_is_measured(way, mask):
    """Rows by their definition, constants by the dense Jacobian."""
    model = enlivened(ByHand(WAYS[way])).double()
    x = torch.randn(1, 7, 12, dtype=torch.float64)
    call = {"x": x} if mask is None else {"x": x, "mask": mask}
    report = r.audit(model, [call], checks=named("rows", "constants", "weights"))
    level = "observed" if way == "einsum" else "declared"  # where queries and keys are to be seen
    assert [(entry.level, entry.heads) for entry in report.coverage] == [(level, 3)]
    assert set(report.heads[0].values) >= MEASURED
    q, k, _ = (part.unflatten(-1, (3, -1)).transpose(1, 2) for part in model.qkv(x).chunk(3, -1))
    scale = 0.2 if way == "fused, additive" else 0.5
    wanted = (
        (scale * q @ k.mT)
        .detach()
        .masked_fill(~(torch.ones(7, 7, dtype=torch.bool) if mask is None else mask), -math.inf)
    )
    laws = wanted.softmax(-1)[0]
    for head, row in enumerate(report.heads):
        entropy = float(torch.special.entr(laws[head]).sum(-1).mean())
        assert row.values["entropy"] == pytest.approx(entropy, rel=1e-9)

        def one(points, head=head):
            parts = model.qkv(points).chunk(3, -1)
            own = [part[0].unflatten(-1, (3, -1)).transpose(0, 1)[head] for part in parts]
            rows = (scale * own[0] @ own[1].mT).masked_fill(wanted[0, head] == -math.inf, -math.inf)
            return rows.softmax(-1) @ own[2]

        dense = torch.autograd.functional.jacobian(one, x).reshape(7 * 4, 7 * 12)
        assert row.values["head_constant"] == pytest.approx(
            float(torch.linalg.matrix_norm(dense, 2)), rel=1e-4
        )
    dense = torch.autograd.functional.jacobian(lambda points: model(**{**call, "x": points}), x)
    norm = float(torch.linalg.matrix_norm(dense.reshape(84, 84), 2))
    assert report.layers[0].values["layer_constant"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize(
    "name", ["bert", "llama", "gemma2", "t5", "gpt2_cross", "torch_decoder", "modernbert"]
)
def test_what_is_observed_is_what_is_declared(name):
    """The rows of the call and the rows of the declaration are found in two ways, and are the same."""
    family = FAMILIES[name]
    for implementation in family.implementations:
        model = family.make(implementation).double()
        for call in family.calls.values():
            first = {
                key: value[:1].double() if value.dtype.is_floating_point and value.ndim > 1 else value[:1]
                for key, value in call.items()
                if isinstance(value, torch.Tensor) and "mask" not in key
            }
            if "position_ids" in call or len(first) != sum(
                isinstance(v, torch.Tensor) for v in call.values()
            ):
                continue
            seen = look(model, first)
            for site in r.audits.sites(model, first):
                assert torch.allclose(seen[site.path].laws, site.laws, atol=1e-5)
                assert torch.allclose(
                    seen[site.path].scores.masked_fill(~seen[site.path].allowed, 0),
                    site.scores.masked_fill(~site.allowed, 0),
                    atol=1e-4,
                )
            break


class Impostor(nn.Module):
    """A module named attention that is none: a gate with a softmax."""

    def __init__(self):
        super().__init__()
        self.attention = GateAttention()

    def forward(self, x):
        return self.attention(x)


class GateAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(6, 6)

    def forward(self, x):
        return x * self.gate(x).softmax(-1)


def test_a_module_named_attention_that_is_none():
    report = r.audit(Impostor(), [{"x": torch.randn(1, 5, 6)}], checks=named("rows"))
    assert not report.covered
    assert not report.rows
    assert "was not seen to compute any" in report.missing[0].reason


def changed_after(self, q, k, v, mask):
    weights = scores(q, k, mask).softmax(-1)
    return (weights * torch.linspace(0, 1, weights.shape[-1], dtype=weights.dtype)) @ v


def test_weights_that_are_changed_after_the_softmax_are_refused():
    report = r.audit(ByHand(changed_after), [{"x": torch.randn(1, 7, 12)}], checks=named("rows"))
    assert not report.covered
    assert "changed after the softmax" in report.missing[0].reason


@pytest.fixture
def strange_interface():
    """An implementation of the interface that does something else with an argument nobody knows."""
    transformers = pytest.importorskip("transformers")

    def attention(module, query, key, value, attention_mask, scaling=None, sharpness=2.0, **options):
        rows = (query @ key.mT * (scaling or query.shape[-1] ** -0.5) * sharpness).softmax(-1)
        return (rows @ value).transpose(1, 2).contiguous(), rows

    transformers.AttentionInterface.register("strange", attention)
    transformers.AttentionMaskInterface.register("strange", lambda *arguments, **options: None)
    yield "strange"
    transformers.AttentionInterface._global_mapping.pop("strange")
    transformers.AttentionMaskInterface._global_mapping.pop("strange")


def test_an_interface_that_does_something_else_is_seen_inside(strange_interface):
    """Its arguments say one thing and it computes another: the rows are those that it computed."""
    model = FAMILIES["bert"].make("sdpa")
    model.set_attn_implementation(strange_interface)
    seen = look(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])})
    model.set_attn_implementation("sdpa")
    plain = look(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])})
    first = "encoder.layer.0.attention.self"
    assert torch.allclose(seen[first].scores, 2 * plain[first].scores, atol=1e-5)


def opaque(module, query, key, value, attention_mask, **options):
    """No softmax to be seen, and not attention either."""
    return value.cumsum(2).transpose(1, 2).contiguous(), None


def test_an_interface_that_is_not_attention_is_refused():
    transformers = pytest.importorskip("transformers")
    transformers.AttentionInterface.register("opaque", opaque)
    transformers.AttentionMaskInterface.register("opaque", lambda *arguments, **options: None)
    try:
        model = FAMILIES["bert"].make("sdpa")
        model.set_attn_implementation("opaque")
        report = r.audit(model, [{"input_ids": torch.tensor([[5, 6, 7, 8]])}], checks=named("rows"))
        assert not report.covered
        assert "not known here" in report.missing[0].reason
    finally:
        transformers.AttentionInterface._global_mapping.pop("opaque")
        transformers.AttentionMaskInterface._global_mapping.pop("opaque")


@pytest.mark.parametrize("name", ["llama", "t5", "bert"])
def test_the_plug_is_declared(name):
    """A model that runs regard's own attention is covered, with the same rows and the same declaration."""
    r.hf.register("observed-plug")
    family = FAMILIES[name]
    call = next(iter(family.calls.values()))
    one = {key: value[:1] for key, value in call.items()}
    model = family.make("sdpa")
    wanted = {path: seen.laws for path, seen in look(model, one).items()}
    model.set_attn_implementation("observed-plug")
    report = r.audit(model, [one], checks=named("rows"))
    assert not report.missing
    assert {entry.level for entry in report.coverage} == {"declared"}
    for path, seen in look(model, one).items():
        assert torch.allclose(seen.laws, wanted[path], atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "bert"])
@pytest.mark.parametrize(
    "nouns",
    [
        {"potential": r.Laplace(bandwidth=3.0)},
        {"potential": r.Dot(scale=0.1), "normalizer": r.normalizers.Entmax(1.5)},
        {"normalizer": r.Softmax(temperature=2.0)},
    ],
    ids=["kernel", "scale", "law"],
)
def test_what_is_registered_is_declared(name, nouns):
    """With the projections of the module, and its rows are those that the model was seen to compute."""
    r.hf.register("observed-other", **nouns)
    model = FAMILIES[name].make("sdpa")
    model.set_attn_implementation("observed-other")
    options = {"input_ids": torch.tensor([[5, 6, 7, 8]])}
    report = r.audit(model, [options], checks=named("rows", "heads"))
    assert {entry.level for entry in report.coverage} == {"declared"}
    assert max(entry.disagreement for entry in report.coverage) < 1e-5
    laws = look(model.double(), options)[report.coverage[0].site].laws.flatten(0, -3)
    wanted = torch.special.entr(laws).sum(-1).mean(-1)
    found = [row.values["entropy"] for row in report.heads if row.layer == 0]
    assert torch.allclose(torch.tensor(found, dtype=wanted.dtype), wanted, atol=1e-6)


def test_what_is_registered_and_is_not_of_projected_points_is_observed():
    r.hf.register("observed-bilinear", potential=r.potentials.Bilinear(torch.eye(8)))
    model = FAMILIES["bert"].make("sdpa")
    model.set_attn_implementation("observed-bilinear")
    report = r.audit(model, [{"input_ids": torch.tensor([[5, 6, 7, 8]])}], checks=named("rows"))
    assert {entry.level for entry in report.coverage} == {"observed"}
    assert "is not one of projected points" in report.coverage[0].reason


def test_the_plug_with_another_kernel_is_seen_as_that():
    r.hf.register("observed-laplace", potential=r.Laplace(), normalizer=r.normalizers.Entmax(1.5))
    model = FAMILIES["bert"].make("sdpa")
    model.set_attn_implementation("observed-laplace")
    seen = look(model, {"input_ids": torch.tensor([[5, 6, 7, 8]])})["encoder.layer.0.attention.self"]
    assert isinstance(seen.normalizer, r.normalizers.Entmax)
    assert isinstance(seen.potential, r.Laplace)


def hooks_of(model):
    """How many hooks each module has."""
    return [
        (len(module._forward_hooks), len(module._forward_pre_hooks), len(module._backward_hooks))
        for module in model.modules()
    ]


class Failing(ByHand):
    def forward(self, x, mask=None):
        found = super().forward(x, mask)
        if x.shape[1] > 5:
            raise RuntimeError("too long for me")
        return found


@pytest.mark.parametrize("tokens", [4, 9], ids=["well", "with an error"])
def test_no_hook_and_no_patch_remains(tokens):
    transformers = pytest.importorskip("transformers")
    functions = (F.scaled_dot_product_attention, F.softmax, torch.bmm)
    asks = transformers.AttentionInterface.get_interface
    model = nn.Sequential(Failing(WAYS["matmul"])).train()
    model[0].register_forward_hook(lambda *call: None)
    before = hooks_of(model)
    call = {"input": torch.randn(1, tokens, 12)}
    with nullcontext() if tokens <= 5 else pytest.raises(r.errors.ArgumentError, match="too long for me"):
        r.audit(model, [call], checks=named("rows", "constants"))
    assert hooks_of(model) == before
    assert functions == (F.scaled_dot_product_attention, F.softmax, torch.bmm)
    assert transformers.AttentionInterface.get_interface is asks
    assert model.training
    assert model[0].training
    assert not torch.overrides._get_current_function_mode_stack()


class Shared(nn.Module):
    """One layer three times, as ALBERT has it."""

    def __init__(self):
        super().__init__()
        self.layer = ByHand(WAYS["fused"])

    def forward(self, x):
        for _ in range(3):
            x = x + self.layer(x)
        return x


def test_a_module_that_is_called_several_times_is_measured_call_by_call():
    model, x = enlivened(Shared()).double(), torch.randn(1, 5, 12, dtype=torch.float64)
    report = r.audit(model, [{"x": x}], checks=named("rows", "constants"))
    assert [entry.site for entry in report.covered] == ["layer", "layer (call 2)", "layer (call 3)"]
    second = x + model.layer(x)
    alone = r.audit(model.layer, [{"x": second}], checks=named("rows", "constants"))
    for head in range(3):
        for column in ("entropy", "head_constant"):
            mine = report.heads[3 + head].values[column]
            assert mine == pytest.approx(alone.heads[head].values[column], rel=1e-6)


class Forgetful(ByHand):
    """A module that does not do the same again."""

    def __init__(self):
        super().__init__(WAYS["fused"])
        self.calls = 0

    def forward(self, x, mask=None):
        self.calls += 1
        return super().forward(self.calls * x, mask)


def test_a_module_that_is_not_a_function_has_no_constants():
    report = r.audit(Forgetful(), [{"x": torch.randn(1, 5, 12)}], checks=named("rows", "constants"))
    assert "a different output when it is called again" in " ".join(entry.reason for entry in report.skipped)
    assert all("head_constant" not in row.values for row in report.heads)
    assert all("entropy" in row.values for row in report.heads)


def test_a_cache_brings_keys_and_is_left_alone():
    transformers = pytest.importorskip("transformers")
    model = FAMILIES["llama"].make("sdpa")
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    cache = transformers.DynamicCache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache, use_cache=True)
    call = {"input_ids": ids[:, 4:], "past_key_values": cache, "use_cache": True}
    report = r.audit(model, [call], checks=named("rows", "constants"))
    assert cache.get_seq_length() == 4
    assert {entry.level for entry in report.coverage} == {"observed"}
    whole = look(model, {"input_ids": ids})
    for row in report.heads:
        last = whole[row.site].laws[row.head, -1]
        assert row.values["entropy"] == pytest.approx(float(torch.special.entr(last).sum()), abs=1e-4)
        assert row.values["head_constant"] >= 0


class Wide(nn.Module):
    """Queries, keys and values of different widths, batch first and not."""

    def __init__(self, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=10, batch_first=batch_first)

    def forward(self, x, y, z):
        return self.attention(x, y, z)[0]


@pytest.mark.parametrize("batch_first", [True, False])
def test_queries_keys_and_values_of_different_widths(batch_first):
    model = Wide(batch_first)
    tokens = [torch.randn(1, n, d) for n, d in ((4, 8), (5, 6), (5, 10))]
    if not batch_first:
        tokens = [part.transpose(0, 1) for part in tokens]
    report = r.audit(model, [dict(zip("xyz", tokens, strict=True))], checks=named("rows", "constants"))
    assert [(entry.level, entry.heads) for entry in report.coverage] == [("observed", 2)]
    assert "different points" in report.observed[0].reason
    assert set(report.heads[0].values) >= MEASURED


def test_windows_do_not_see_each_other():
    """Swin cuts an image into windows: rows stay inside of theirs."""
    transformers = pytest.importorskip("transformers")
    sizes = {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]}
    model = enlivened(transformers.SwinModel(transformers.SwinConfig(**sizes, window_size=4)))
    call = {"pixel_values": torch.randn(1, 3, 32, 32)}
    report = r.audit(model, [call], checks=named("rows", "constants"))
    assert report.covered
    assert not report.missing
    assert all(0 <= row.values["entropy"] <= math.log(16) + 1e-6 for row in report.heads)
    assert all(row.values["head_constant"] > 0 for row in report.heads)
