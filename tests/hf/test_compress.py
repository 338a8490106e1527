"""hf.compress: everything kept is the model, biases reach the kernel, positions are true, queries turn."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache

from benchmarks.cache import evict
from regard import Sparsemax, hf
from regard.compression.batched import HeadAtoms, merge_heads
from regard.errors import ArgumentError
from regard.hf.arguments import Arguments
from regard.hf.atoms import atom_cache, attend_all, attend_atoms, laid_out
from regard.hf.hearing import turned

COUNT, NEXT = 60, 7
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "vocab_size": 40, "max_position_embeddings": 200, "pad_token_id": None}


def _model(kind="llama", **options):
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**SIZES, **options})
    model = transformers.AutoModelForCausalLM.from_config(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    model.set_attn_implementation(hf.register())
    return model


@pytest.fixture(scope="module")
def model():
    return _model()


def _ids(count=COUNT + NEXT):
    return torch.randint(40, (1, count), generator=torch.Generator().manual_seed(1))


def _filled(model):
    cache = DynamicCache(config=model.config)
    with torch.no_grad(), hf.listening(model) as heard:
        model(_ids()[:, :COUNT], past_key_values=cache)
    return cache, heard


@torch.no_grad()
def _goes_on(model, cache, at_once):
    """Logits of the next tokens, all at once or one by one."""
    new = _ids()[:, COUNT:]
    if at_once:
        return model(new, past_key_values=cache).logits
    return torch.cat([model(one, past_key_values=cache).logits for one in new.split(1, -1)], 1)


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox"])
def test_everything_kept_is_the_model(kind, at_once):
    """As many atoms as tokens: the next tokens are as if nothing had happened, at their positions."""
    model = _model(kind)
    cache, heard = _filled(model)
    found = hf.compress(model, cache, COUNT, heard)
    with torch.no_grad():
        exact = model(_ids()).logits[:, COUNT:]
    torch.testing.assert_close(_goes_on(model, found.cache, at_once), exact, rtol=1e-9, atol=1e-9)
    assert found.cache.get_seq_length() == COUNT + NEXT
    assert all(layer.measured < 1e-5 for layer in found.layers)


@pytest.mark.parametrize("at_once", [True, False])
def test_copies_are_one_atom_with_their_number(model, at_once):
    """A key twice is the key with a bias of log 2; one left out is a bias of minus infinity."""
    cache, _ = _filled(model)
    keys = [(layer.keys[0], layer.values[0]) for layer in cache.layers]
    twice = DynamicCache(config=model.config)
    for number, (k, v) in enumerate(keys):
        twice.update(torch.cat([k, k[:, 5:6]], 1)[None], torch.cat([v, v[:, 5:6]], 1)[None], number)
    bias = torch.zeros(2, COUNT, dtype=torch.float64)
    bias[:, 5] = math.log(2)
    atoms = atom_cache([HeadAtoms(k, v, bias) for k, v in keys], COUNT, torch.float64, 4)
    new, places = _ids()[:, COUNT:], torch.arange(COUNT, COUNT + NEXT)[None]
    with torch.no_grad():
        mask = torch.ones(1, 1, NEXT, COUNT + 1 + NEXT, dtype=torch.bool).tril(COUNT + 1)
        exact = model(new, past_key_values=twice, position_ids=places, attention_mask=mask).logits
    torch.testing.assert_close(_goes_on(model, atoms, at_once), exact, rtol=1e-9, atol=1e-9)


def test_a_cache_goes_on_twice_and_is_cut(model):
    """Tokens that arrive in one copy, or after a cut, change nothing that was handed out before."""
    cache, heard = _filled(model)
    found = hf.compress(model, cache, 20, heard).cache
    other = copy.copy(found)
    other.layers = [copy.copy(layer) for layer in found.layers]
    first = _goes_on(model, found, False)
    held = [layer.keys for layer in found.layers]
    numbers = [keys.clone() for keys in held]
    torch.testing.assert_close(_goes_on(model, other, True), first, rtol=1e-9, atol=1e-9)
    found.crop(-NEXT)
    assert found.get_seq_length() == COUNT
    torch.testing.assert_close(_goes_on(model, found, False), first, rtol=1e-9, atol=1e-9)
    assert all(torch.equal(keys, same) for keys, same in zip(held, numbers, strict=True))
    for batched in (found, other):
        batched.crop(-NEXT)
        batched.batch_repeat_interleave(2)
    with torch.no_grad():
        twice = model(_ids()[:, COUNT:].repeat(2, 1), past_key_values=found).logits
    torch.testing.assert_close(twice, first.repeat(2, 1, 1), rtol=1e-9, atol=1e-9)


def test_there_is_always_room_for_more_tokens(monkeypatch):
    """Keys, values and biases of a layer that grows beyond its room, and with gradients."""
    monkeypatch.setattr("regard.hf.atoms.MORE", 2)
    keys, values, bias = (torch.randn(2, 3, *wide, dtype=torch.float64) for wide in ((4,), (5,), ()))
    layer = atom_cache([HeadAtoms(keys, values, bias)], 10, torch.float64, 4).layers[0]
    new = torch.randn(1, 2, 9, 4, dtype=torch.float64), torch.randn(1, 2, 9, 5, dtype=torch.float64)
    for place in range(9):
        new[0].requires_grad_(place == 4)
        found = layer.update(new[0][:, :, place : place + 1], new[1][:, :, place : place + 1])
    wide = torch.cat([torch.cat([keys, bias.unsqueeze(-1)], -1)[None], F.pad(new[0].detach(), (0, 1))], -2)
    torch.testing.assert_close(found[0], wide, rtol=0, atol=0)
    torch.testing.assert_close(found[1], torch.cat([values[None], new[1]], -2), rtol=0, atol=0)
    torch.testing.assert_close(found[0].ready.keys, wide[..., :-1], rtol=0, atol=0)
    torch.testing.assert_close(found[0].ready.bias, laid_out(wide, 4), rtol=0, atol=0)


def test_what_atoms_cannot_do_is_refused():
    q, k, v = (torch.randn(1, 2, n, 5 + (n == 9), dtype=torch.float64) for n in (1, 9, 9))
    for name, said in {"dropout": 0.1, "output_attentions": True, "softcap": 3.0}.items():
        with pytest.raises(ArgumentError, match=name):
            attend_atoms(q, k, v, None, Arguments(**{name: said}))


def test_another_attention_fails_loudly(model):
    cache, heard = _filled(model)
    found = hf.compress(model, cache, 20, heard)
    model.set_attn_implementation("eager")
    try:
        with pytest.raises(RuntimeError, match="size"):
            _goes_on(model, found.cache, True)
        with pytest.raises(ArgumentError, match="runs the attention 'eager'"):
            hf.compress(model, cache, 20, heard)
    finally:
        model.set_attn_implementation(hf.register())
    model.set_attn_implementation(hf.register("regard-sparse", normalizer=Sparsemax()))
    try:
        with pytest.raises(ArgumentError, match="compressed cache"):
            _goes_on(model, found.cache, True)
    finally:
        model.set_attn_implementation("regard")


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("llama", {}),
        ("cohere", {}),
        ("phi", {"partial_rotary_factor": 0.5}),
        ("gpt_neox", {}),
        ("llama", {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}}),
    ],
)
def test_queries_turn_as_the_model_turns_them(kind, options):
    """First-layer queries at positions 0, 1, … turned by 37, and the same tokens run there."""
    model = _model(kind, **options)
    with torch.no_grad():
        with hf.listening(model) as now:
            model(_ids(), use_cache=False)
        with hf.listening(model) as then:
            model(_ids(), use_cache=False, position_ids=torch.arange(67)[None] + 37)
    turning = next(m for name, m in model.named_modules() if name.endswith("rotary_emb"))
    places = torch.arange(67)
    found = turned(now.queries[0], now.modules[0], turning, places, places + 37)
    assert float((found - now.queries[0]).norm()) > 1e-2
    torch.testing.assert_close(found, then.queries[0], rtol=1e-5, atol=1e-5)


def test_the_plain_kernel_with_a_bias():
    """Against the definition, with grouped heads and a mask."""
    q, k, v = (torch.randn(1, h, n, 5, dtype=torch.float64) for h, n in ((6, 4), (2, 9), (2, 9)))
    bias = torch.randn(1, 2, 9, dtype=torch.float64)
    mask = torch.ones(1, 1, 4, 9, dtype=torch.bool).tril(5)
    scores = 0.3 * q @ k.repeat_interleave(3, 1).mT + bias.repeat_interleave(3, 1).unsqueeze(-2)
    exact = scores.masked_fill(~mask, -math.inf).softmax(-1) @ v.repeat_interleave(3, 1)
    keys = torch.cat([k, bias.unsqueeze(-1)], -1)
    torch.testing.assert_close(attend_all(q, keys, v, 0.3), (scores.softmax(-1) @ v.repeat_interleave(3, 1)))
    for given in (mask, None, torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)):
        found = attend_atoms(q, keys, v, given, Arguments(scaling=0.3))
        torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)


def _heads(h=3, n=200, m=300, c=6):
    gen = torch.Generator().manual_seed(2)
    return [torch.randn(h, k, c, generator=gen, dtype=torch.float64) for k in (n, n, m)]


def test_merging_beats_eviction_on_fresh_queries():
    keys, values, queries = _heads()
    fit, fresh = queries[:, :150], queries[:, 150:]
    exact = (fresh @ keys.mT).softmax(-1) @ values
    merged = merge_heads(keys, values, fit, 50)
    kept = evict(keys, values, (fit @ keys.mT).softmax(-1).mean(-2), 50)
    errors = [float((atoms.outputs(fresh) - exact).norm()) for atoms in (merged, kept)]
    assert errors[0] < 0.5 * errors[1]
    assert merged.keys.shape == (3, 50, 6)
    assert torch.equal(merged.keys[:, :4], keys[:, :4])  # sinks stand for themselves


def test_copies_merge_without_error():
    """Forty keys, five times each: forty groups are enough, wherever copies are."""
    keys, values, queries = _heads(n=40)
    many = [tensor.repeat(1, 5, 1) for tensor in (keys, values)]
    atoms = merge_heads(*many, queries, 100)
    exact = (queries @ keys.mT).softmax(-1) @ values
    torch.testing.assert_close(atoms.outputs(queries), exact, rtol=1e-6, atol=1e-6)


def test_what_is_said_is_measured_on_queries_that_were_not_fitted(model):
    cache, heard = _filled(model)
    found = hf.compress(model, cache, 24, heard)
    again = hf.compress(model, cache, 24, _ids()[:, :COUNT])
    assert [layer.measured for layer in found.layers] == pytest.approx(
        [layer.measured for layer in again.layers], rel=1e-4
    )
    assert "calibrated, not proved" in repr(found)
    assert "certif" not in repr(found)
    for layer in found.layers:
        assert 0 < layer.measured <= layer.calibrated
    rougher = hf.compress(model, cache, 16, heard)
    assert rougher.layers[0].measured > found.layers[0].measured


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"size": 0}, "size"),
        ({"size": True}, "size"),
        ({"size": COUNT + 1}, "size"),
        ({"cache": None}, "cache"),
        ({"cache": DynamicCache()}, "cache"),
        ({"reference": torch.zeros(5)}, "reference"),
        ({"reference": _ids(8)}, "reference"),
        ({"reference": hf.Heard()}, "reference"),
    ],
)
def test_bad_arguments_are_named(model, arguments, named):
    cache, heard = _filled(model)
    given = {"model": model, "cache": cache, "size": 20, "reference": heard} | arguments
    with pytest.raises(ArgumentError) as error:
        hf.compress(**given)
    assert str(error.value).startswith(named)
