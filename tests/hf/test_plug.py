"""The plug by itself: names, arguments, masks, declared potentials and normalizers, the recorder."""

from __future__ import annotations

import math
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard as r
from regard import hf
from regard.hf.arguments import HARMLESS
from regard.hf.plain import by_keys
from regard.hf.plug import Plug
from tests.audits.families import FAMILIES, ids

LOWEST = torch.finfo(torch.float64).min


class Module(nn.Module):
    """What the plug reads of a module."""

    def __init__(self, is_causal: bool = False) -> None:
        super().__init__()
        self.is_causal = is_causal


def tensors(
    batch: int = 2, heads: int = 4, groups: int = 2, m: int = 6, n: int = 6
) -> tuple[Tensor, Tensor, Tensor]:
    shapes = ((heads, m), (groups, n), (groups, n))
    return tuple(
        torch.randn(batch, tokens, h, 8, dtype=torch.float64).transpose(1, 2) for h, tokens in shapes
    )


def by_definition(
    q: Tensor, k: Tensor, v: Tensor, allowed: Tensor | None = None, bias: Tensor | float = 0.0, **nouns: Any
) -> Tensor:
    """The definition with repeated keys and the whole matrix, (batch, m, heads, e)."""
    k, v = (t.repeat_interleave(q.shape[1] // t.shape[1], 1) for t in (k, v))
    scores = nouns.get("potential", r.Dot()).scores(q, k) + bias
    weights = nouns.get("normalizer", r.Softmax()).weights(scores, r.normalizers.Reference(None, allowed))
    return (weights @ v).transpose(1, 2)


def plug(potential: r.Potential | None = None, normalizer: r.normalizers.Normalizer = r.Softmax()) -> Plug:
    return Plug(potential, normalizer, None)


LOWER = torch.ones(6, 6, dtype=torch.bool).tril()
PADDED = torch.tensor([[True] * 6, [False] * 2 + [True] * 4]).view(2, 1, 1, 6)
MASKS = {
    "causal": LOWER.expand(2, 1, 6, 6),
    "left": PADDED & LOWER,
    "keys": PADDED.expand(2, 1, 6, 6),
    "one_row": PADDED,
    "band": (LOWER & ~LOWER.tril(-3)).expand(2, 1, 6, 6),
    "heads": torch.rand(2, 4, 6, 6, generator=torch.Generator().manual_seed(0)) > 0.4,
    "nothing": torch.zeros(2, 1, 6, 6, dtype=torch.bool),
}


@pytest.mark.parametrize("moving", [False, True])
@pytest.mark.parametrize("form", ["boolean", "lowest", "infinite"])
@pytest.mark.parametrize("name", MASKS)
def test_masks(name: str, form: str, moving: bool) -> None:
    q, k, v = (t.requires_grad_(moving) for t in tensors())
    allowed = MASKS[name]
    given = (
        allowed
        if form == "boolean"
        else torch.zeros(allowed.shape)
        .double()
        .masked_fill(~allowed, LOWEST if form == "lowest" else -math.inf)
    )
    found, weights = plug()(Module(True), q, k, v, given)
    assert weights is None
    expected = by_definition(q, k, v, allowed)
    torch.testing.assert_close(found, expected)
    empty = ~allowed.any(-1).expand(2, 4, 6).transpose(1, 2)
    assert (found[empty] == 0).all()
    if moving:
        toward = torch.randn_like(found)
        for a, b in zip(
            *(torch.autograd.grad((out * toward).sum(), (q, k, v)) for out in (found, expected)), strict=True
        ):
            torch.testing.assert_close(a, b)


def test_masks_that_are_orders_are_known_as_such() -> None:
    assert by_keys(MASKS["band"]) is None
    assert by_keys(MASKS["heads"]) is None
    for name, causal in (("causal", True), ("left", True), ("keys", False), ("one_row", False)):
        found = by_keys(MASKS[name])
        assert found is not None
        assert found[0] is causal


def test_additive_masks_keep_their_biases() -> None:
    q, k, v = tensors()
    bias = torch.randn(1, 4, 6, 6).double()
    found, _ = plug()(Module(), q, k, v, bias.masked_fill(~LOWER, LOWEST))
    torch.testing.assert_close(found, by_definition(q, k, v, LOWER, bias))


@pytest.mark.parametrize("causal", [False, True])
def test_no_mask_means_order(causal: bool) -> None:
    q, k, v = tensors()
    found, _ = plug()(Module(causal), q, k, v, None)
    torch.testing.assert_close(found, by_definition(q, k, v, LOWER if causal else None))
    flipped, _ = plug()(Module(causal), q, k, v, None, is_causal=not causal)
    torch.testing.assert_close(flipped, by_definition(q, k, v, None if causal else LOWER))
    newest, _ = plug()(Module(causal), q[:, :, :1], k, v, None)
    torch.testing.assert_close(newest, by_definition(q[:, :, :1], k, v))


def test_room_in_a_cache_is_not_read() -> None:
    q, k, v = tensors(m=4)
    k[:, :, 4:], v[:, :, 4:] = math.nan, math.nan
    bias = torch.randn(1, 4, 4, 6).double()
    found, _ = plug()(Module(True), q, k, v, None, position_bias=bias)
    torch.testing.assert_close(
        found, by_definition(q, k[:, :, :4], v[:, :, :4], LOWER[:4, :4], bias[..., :4])
    )


@pytest.mark.parametrize("causal", [False, True])
def test_windows_without_a_mask(causal: bool) -> None:
    q, k, v = tensors()
    found, _ = plug()(Module(causal), q, k, v, None, sliding_window=3)
    band = LOWER & ~LOWER.tril(-3)
    torch.testing.assert_close(found, by_definition(q, k, v, band if causal else band | band.mT))
    wide, _ = plug()(Module(causal), q, k, v, None, sliding_window=6)
    torch.testing.assert_close(wide, by_definition(q, k, v, LOWER if causal else None))
    with pytest.raises(
        r.errors.ArgumentError, match="attention_mask: is None for 1 queries, 6 keys and a window of 3"
    ):
        plug()(Module(causal), q[:, :, :1], k, v, None, sliding_window=3)


def test_scaling_softcap_bias_and_sinks() -> None:
    q, k, v = tensors()
    bias, sinks = torch.randn(1, 4, 6, 6).double(), torch.randn(4).double()
    found, _ = plug()(Module(), q, k, v, None, scaling=0.7, softcap=1.5, position_bias=bias, s_aux=sinks)
    potential = r.SoftCap(r.Dot(scale=0.7), 1.5)
    torch.testing.assert_close(
        found, by_definition(q, k, v, None, bias, potential=potential, normalizer=r.SinkSoftmax(sinks))
    )


@pytest.mark.parametrize("mask", [None, "left", "heads"])
@pytest.mark.parametrize(
    "nouns",
    [
        {"potential": r.Gaussian(bandwidth=2.0)},
        {"potential": r.Cosine(scale=3.0), "normalizer": r.Softmax(0.5)},
        {"potential": r.Dot(scale=torch.tensor([0.1, 0.4, 0.7, 1.0]).double())},
        {"potential": r.Dot() + r.Alibi.heads(4)},
        {"normalizer": r.Softmax(torch.tensor([0.5, 1.0, 2.0, 4.0]).double())},
        {"potential": r.Dot(), "normalizer": r.Entmax(1.5)},
        {"normalizer": r.Sigmoid(-1.0)},
    ],
    ids=["gaussian", "cosine", "scales", "alibi", "temperatures", "entmax", "sigmoid"],
)
def test_declared_nouns(nouns: dict[str, Any], mask: str | None) -> None:
    q, k, v = tensors()
    found, _ = plug(**nouns)(Module(), q, k, v, None if mask is None else MASKS[mask], scaling=8**-0.5)
    torch.testing.assert_close(found, by_definition(q, k, v, None if mask is None else MASKS[mask], **nouns))


def test_dropout_has_the_right_mean_and_keeps_some() -> None:
    q, k, v = tensors()
    one, _ = plug()(Module(), q, k, v, None, dropout=0.5)
    mean = torch.stack([plug()(Module(), q, k, v, None, dropout=0.5)[0] for _ in range(800)]).mean(0)
    expected = by_definition(q, k, v)
    assert (one - expected).abs().max() > 0.1
    assert (mean - expected).abs().max() < 0.25


def test_unknown_arguments_are_refused_by_name() -> None:
    q, k, v = tensors()
    for name in ("cu_seq_lens_q", "indices", "head_mask", "cache", "something_new"):
        with pytest.raises(r.errors.ArgumentError, match=f"^{name}: .* does not know"):
            plug()(Module(), q, k, v, None, **{name: torch.ones(1)})
    found, _ = plug()(Module(), q, k, v, None, something_new=None, **dict.fromkeys(HARMLESS, 1))
    torch.testing.assert_close(found, by_definition(q, k, v))


def test_refusals() -> None:
    q, k, v = tensors()
    with pytest.raises(r.errors.ArgumentError, match="attention_mask: has shape"):
        plug()(Module(), q, k, v, torch.ones(2, 6, dtype=torch.bool))
    with pytest.raises(r.errors.ArgumentError, match="attention_mask: is int64"):
        plug()(Module(), q, k, v, torch.ones(2, 1, 6, 6, dtype=torch.long))
    with pytest.raises(r.errors.ArgumentError, match="s_aux: are sinks, and the normalizer is Sigmoid"):
        plug(normalizer=r.Sigmoid(0.0))(Module(), q, k, v, None, s_aux=torch.zeros(4).double())
    with pytest.raises(r.errors.ArgumentError, match="s_aux: has shape"):
        plug()(Module(), q, k, v, None, s_aux=torch.zeros(3).double())
    with pytest.raises(r.errors.ArgumentError, match="later queries change earlier rows"):
        plug(normalizer=r.Sinkhorn())(Module(True), q, k, v, MASKS["causal"])
    with pytest.raises(
        r.errors.ArgumentError,
        match="potential: depends on positions, and it is unknown where queries stand: 1 for 6 keys",
    ):
        plug(r.Dot() + r.Alibi(0.5))(Module(), q[:, :, :1], k, v, None)
    plug(r.Gaussian(bandwidth=1.0))(Module(), q[:, :, :1], k, v, None)


def test_keys_are_not_repeated() -> None:
    """One query of many heads over long keys: nothing nearly as large as the repeated keys is made,
    with gradients or without.
    """
    q, k, v = torch.randn(2, 32, 1, 64), torch.randn(2, 2, 2048, 64), torch.randn(2, 2, 2048, 64)
    repeated = k.nbytes * 16
    for moving in (False, True):
        made: list[int] = []

        class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None, made: list[int] = made
            ) -> Any:
                out = func(*args, **(kwargs or {}))
                made += [
                    t.untyped_storage().nbytes()
                    for t in (out if isinstance(out, tuple) else (out,))
                    if isinstance(t, Tensor)
                ]
                return out

        with Sizes():
            plug()(Module(), q.requires_grad_(moving), k, v, None)
        assert made
        assert max(made) < repeated / 8


def test_derivatives_of_second_order() -> None:
    """Which transformers' own fused attention does not have."""
    q, k, v = tensors(batch=1, m=3, n=3)
    assert torch.autograd.gradgradcheck(
        lambda x: plug()(Module(True), x, k, v, None)[0], (q.requires_grad_(),)
    )


@pytest.mark.parametrize("name", ["", "sdpa", "my_flash", "a/b", "eager", 3, "paged|x", "flex_attention"])
def test_names_that_mean_something_else(name: Any) -> None:
    with pytest.raises(r.errors.ArgumentError, match=r"^name: "):
        hf.register(name)


def test_names_of_others_are_left_alone() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register("theirs", lambda *_: None)
    with pytest.raises(r.errors.ArgumentError, match="registered by another package"):
        hf.register("theirs")


@pytest.mark.parametrize("arguments", [{"potential": "dot"}, {"normalizer": None}, {"record": True}])
def test_arguments_of_register(arguments: dict[str, Any]) -> None:
    with pytest.raises(r.errors.ArgumentError, match=f"^{next(iter(arguments))}: "):
        hf.register(**arguments)


def test_coupled_rows_are_not_recorded() -> None:
    with pytest.raises(r.errors.ArgumentError, match=r"^record: cannot read Sinkhorn"):
        hf.register(normalizer=r.Sinkhorn(), record=hf.Recorder())


def test_registrations_coexist_and_replace() -> None:
    model, call = FAMILIES["llama"].make("eager"), {"input_ids": ids(1, 9)}
    hf.register("soft")
    hf.register("soft")
    hf.register("sharp", normalizer=r.Softmax(0.25))
    found = {}
    with torch.no_grad():
        for name in ("eager", "soft", "sharp"):
            model.set_attn_implementation(name)
            found[name] = model(**call).last_hidden_state
        hf.register("sharp", normalizer=r.Softmax())
        replaced = model(**call).last_hidden_state
    torch.testing.assert_close(found["soft"], found["eager"], atol=1e-5, rtol=1e-5)
    assert (found["sharp"] - found["eager"]).abs().max() > 0.1
    assert torch.equal(replaced, found["soft"])


def test_without_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(r.errors.MissingExtraError, match=r"regard\[hf\]"):
        hf.register()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_recorder_says_what_eager_weights_say(family: str) -> None:
    recorder, call = hf.Recorder(), FAMILIES[family].calls["left"]
    assert "nothing recorded" in repr(recorder)
    model = FAMILIES[family].make(hf.register(record=recorder))
    with torch.no_grad():
        model(**call)
        assert not recorder.layers
        with recorder.name(model):
            model(**call)
        model(**call)
        laws = FAMILIES[family].make("eager")(**call, output_attentions=True).attentions
    assert len(recorder.layers) == len(laws)
    real = call["attention_mask"].bool()
    for (name, found), law in zip(recorder.layers.items(), laws, strict=True):
        rows = law.movedim(1, 0)[:, real]
        assert model.get_submodule(name)
        assert found.entropy.shape == rows.shape[:2]
        torch.testing.assert_close(found.entropy, -torch.xlogy(rows, rows).sum(-1), atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found.effective_support, 1 / rows.square().sum(-1), atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(found.sink_mass, rows[..., 0], atol=1e-4, rtol=1e-4)
    lines = repr(recorder).splitlines()
    assert len(lines) == len(laws) + 2
    assert lines[1].split()[1:3] == ["4", "15"]


def test_recorder_sees_the_largest_logit_of_generation() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.audits.families import LLAMA

    recorder = hf.Recorder()
    model = LlamaForCausalLM(LlamaConfig(**LLAMA)).eval()
    model.set_attn_implementation(hf.register(record=recorder))
    with recorder:
        model.generate(ids(1, 5), max_new_tokens=4, min_new_tokens=4, do_sample=False)
    assert list(recorder.layers) == ["0 LlamaAttention", "1 LlamaAttention"]
    assert all(layer.max_logit.shape == (4, 5 + 3) for layer in recorder.layers.values())
    with recorder:
        pass
    assert not recorder.layers
