"""Models on disk: exactly what was saved comes back, or an error that says why not;
a failing write leaves what was there.
"""

import errno
import json
import os

import pytest
import torch
from torch import nn

import regard as r
from regard.nn import (
    AlibiPositions,
    Decoder,
    Design,
    Encoder,
    EncoderLayer,
    LanguageModel,
    LearnedPositions,
    RelativePositions,
    RotaryPositions,
    SequenceToSequence,
    Sinusoidal,
    Transformer,
    UnitVariance,
    Xavier,
    from_torch,
    load,
    monitor,
    save,
    shaped,
)
from regard.nn.mechanism import Mechanism
from regard.nn.saving import configuration

pytest.importorskip("safetensors")

PLAIN = Design(8, 2)
TABLE = r.RelativeBias(nn.Parameter(torch.randn(2, 7)), r.potentials.Clipped(3))
MODELS = {
    "language": lambda: LanguageModel(PLAIN, 11, 2),
    "untied": lambda: LanguageModel(PLAIN, 11, 1, tied=False),
    "translation": lambda: SequenceToSequence(PLAIN.replace(positions=Sinusoidal(50.0)), 7, 11, 1),
    "encoder": lambda: Encoder(PLAIN.replace(positions=RotaryPositions(100.0, True)), 2),
    "encoder without last norm": lambda: Encoder(PLAIN, 1, final_norm=False),
    "decoder": lambda: Decoder(PLAIN.replace(positions=AlibiPositions()), 1),
    "decoder alone": lambda: Decoder(PLAIN.replace(norm_first=False), 1, cross=False, final_norm=True),
    "transformer": lambda: Transformer(
        PLAIN.replace(activation=r.maps.Silu(1.702), gated=True, hidden=10), 1, 2
    ),
    "learned positions": lambda: LanguageModel(PLAIN.replace(positions=LearnedPositions(9)), 11, 1),
    "relative positions": lambda: LanguageModel(PLAIN.replace(positions=RelativePositions(8, 16)), 11, 1),
    "rms, no bias, groups": lambda: Encoder(
        PLAIN.replace(norm=r.maps.Normalize(1e-3, centered=False), bias=False, kv_heads=1), 1
    ),
    "gaussian": lambda: Encoder(
        PLAIN.replace(mechanism=r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor([1.0, 3.0]))))), 2
    ),
    "sum": lambda: Encoder(
        PLAIN.replace(mechanism=r.Attention(0.5 * r.Dot() + TABLE + r.Alibi(torch.tensor([0.1, 0.2])))), 2
    ),
    "supports": lambda: Encoder(
        PLAIN.replace(
            mechanism=r.Attention(
                r.Dot(), support=r.Causal() & r.Window(3, None) | r.Padding(torch.tensor(2))
            )
        ),
        1,
    ),
    "entmax": lambda: Encoder(
        PLAIN.replace(mechanism=r.Attention(r.Dot(), normalizer=r.Entmax(1.5)), initialization=Xavier()), 1
    ),
    "sink": lambda: Encoder(
        PLAIN.replace(
            mechanism=r.Attention(r.Dot(), normalizer=r.SinkSoftmax(nn.Parameter(torch.tensor(0.5))))
        ),
        1,
    ),
    "shaped": lambda: LanguageModel(shaped(PLAIN, 0.7, 0.4), 11, 1),
}


def moved(model):
    """Numbers that no constructor draws."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    return model


def output(model):
    torch.manual_seed(1)
    ids, x = torch.randint(7, (2, 5)), torch.randn(2, 5, 8, dtype=next(model.parameters()).dtype)
    arguments = {LanguageModel: (ids,), SequenceToSequence: (ids, ids), Encoder: (x,), Transformer: (x, x)}
    given = arguments.get(type(model)) or ((x, x) if model.cross else (x,))
    with torch.no_grad():
        return model.eval()(*given)


def assert_equal(found, wanted):
    state, other = found.state_dict(), wanted.state_dict()
    assert state.keys() == other.keys()
    for name, tensor in other.items():
        assert state[name].dtype is tensor.dtype, name
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_comes_back(name, tmp_path):
    model = moved(MODELS[name]())
    state = torch.get_rng_state()
    assert save(model, tmp_path / "deep" / "here") == tmp_path / "deep" / "here"
    found = load(str(tmp_path / "deep" / "here"))
    assert torch.equal(state, torch.get_rng_state())  # nothing is drawn to be thrown away
    assert type(found) is type(model)
    assert not found.training
    assert_equal(found, model)
    assert all(tensor.device.type == "cpu" for tensor in (*found.parameters(), *found.buffers()))
    learned = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name, parameter in found.named_parameters() if parameter.requires_grad} == learned
    assert torch.equal(output(found), output(model))
    assert sorted(os.listdir(tmp_path / "deep" / "here")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_numbers_keep_their_kind(dtype, tmp_path):
    model = moved(MODELS["sum"]().to(dtype))
    save(model, tmp_path)
    assert_equal(load(tmp_path), model)


def test_kinds_may_be_mixed(tmp_path):
    model = MODELS["language"]()
    model.decoder.norm.double()
    save(model, tmp_path)
    assert load(tmp_path).decoder.norm.weight.dtype is torch.float64


def test_what_is_loaded_trains_and_is_saved_again(tmp_path):
    save(moved(MODELS["gaussian"]()), tmp_path / "first")
    model = load(tmp_path / "first").train()
    model(torch.randn(1, 4, 8)).square().sum().backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    save(model, tmp_path / "second")
    assert_equal(load(tmp_path / "second"), model)


def test_a_configuration_is_readable():
    written = configuration(MODELS["language"]())
    assert written["model"] == "LanguageModel"
    assert written["arguments"]["vocabulary"] == 11
    assert written["arguments"]["design"]["width"] == 8
    json.dumps(written, allow_nan=False)


# What is damaged


@pytest.fixture
def saved(tmp_path):
    return save(moved(MODELS["language"]()), tmp_path / "model")


def cut(path, size):
    path.write_bytes(path.read_bytes()[:size])


def changed(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


def rewritten(path, change):
    """Tensors changed, with the notes they were saved with."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    with safe_open(str(path), framework="pt") as file:
        tensors, notes = {name: file.get_tensor(name) for name in file.keys()}, file.metadata()  # noqa: SIM118 (not a dict)
    change(tensors)
    save_file(tensors, str(path), notes)


def noted(path, text):
    """Other notes for the same tensors."""
    from safetensors.torch import load_file, save_file

    save_file(load_file(str(path)), str(path), {"regard": text})


def described(directory, change):
    """Configuration changed in both files, as one who edits them by hand would."""
    from safetensors.torch import load_file, save_file

    found = json.loads((directory / "config.json").read_text())
    change(found)
    (directory / "config.json").write_text(json.dumps(found))
    path = str(directory / "model.safetensors")
    state = load_file(path)
    save_file(state, path, {"regard": json.dumps(found)})


DAMAGES = {
    "no weights": (lambda d: (d / "model.safetensors").unlink(), "model.safetensors: does not exist"),
    "no configuration": (lambda d: (d / "config.json").unlink(), "config.json: does not exist"),
    "truncated weights": (
        lambda d: cut(d / "model.safetensors", 3000),
        "is damaged or not a safetensors file",
    ),
    "empty weights": (lambda d: cut(d / "model.safetensors", 0), "is damaged or not a safetensors file"),
    "one byte short": (lambda d: cut(d / "model.safetensors", -1), "is damaged or not a safetensors file"),
    "noise": (
        lambda d: (d / "model.safetensors").write_bytes(os.urandom(5000)),
        "is damaged or not a safetensors file",
    ),
    "truncated configuration": (lambda d: cut(d / "config.json", 40), "config.json: cannot be read"),
    "no text": (lambda d: (d / "config.json").write_bytes(b"\xff\xfe\x00"), "config.json: cannot be read"),
    "another width": (
        lambda d: changed(d / "config.json", '"width": 8', '"width": 16'),
        "describes a different model than the weights",
    ),
    "not a table": (
        lambda d: (d / "config.json").write_text("3"),
        "describes a different model than the weights",
    ),
    "missing tensor": (
        lambda d: rewritten(d / "model.safetensors", lambda t: t.pop("decoder.norm.bias")),
        "model.safetensors: lacks decoder.norm.bias",
    ),
    "surplus tensor": (
        lambda d: rewritten(d / "model.safetensors", lambda t: t.update(extra=torch.ones(2))),
        "model.safetensors: holds extra, which the model does not have",
    ),
    "other shape": (
        lambda d: rewritten(
            d / "model.safetensors", lambda t: t.update({"decoder.norm.bias": torch.ones(3)})
        ),
        r"holds decoder.norm.bias as \[3\], not \[8\]",
    ),
    "whole numbers": (
        lambda d: rewritten(
            d / "model.safetensors",
            lambda t: t.update({"decoder.norm.bias": torch.ones(8, dtype=torch.int64)}),
        ),
        "holds decoder.norm.bias in torch.int64",
    ),
    "another format": (
        lambda d: described(d, lambda c: c.update(format=99)),
        "has format 99; this version of regard reads format 2",
    ),
    "another kind": (
        lambda d: described(d, lambda c: c.update(model="os.system")),
        "names the model 'os.system'",
    ),
    "no arguments": (
        lambda d: described(d, lambda c: c.pop("arguments")),
        "does not describe a LanguageModel",
    ),
    "unknown argument": (
        lambda d: described(d, lambda c: c["arguments"].update(color=1)),
        "does not describe a LanguageModel",
    ),
    "unknown type": (
        lambda d: described(d, lambda c: c["arguments"]["design"].update(type="Popen")),
        "has type 'Popen'",
    ),
    "bad value": (
        lambda d: described(d, lambda c: c["arguments"]["design"].update(heads=3)),
        "heads: is 3, which does not divide",
    ),
    "text for a number": (
        lambda d: described(d, lambda c: c["arguments"]["design"].update(dropout="much")),
        "dropout: is 'much'",
    ),
    "other numbers": (
        lambda d: rewritten(d / "model.safetensors", lambda t: t["decoder.norm.bias"].add_(1e-6)),
        "model.safetensors: is damaged: its tensors are not those that were saved",
    ),
    "another precision": (
        lambda d: rewritten(
            d / "model.safetensors",
            lambda t: t.update({"decoder.norm.bias": t["decoder.norm.bias"].double()}),
        ),
        "model.safetensors: is damaged",
    ),
    "no checksum": (lambda d: described(d, lambda c: c.pop("sha256")), "model.safetensors: is damaged"),
    "damaged notes": (
        lambda d: noted(d / "model.safetensors", "{"),
        "model.safetensors: has a damaged header",
    ),
    "frozen tensors that are none": (
        lambda d: described(d, lambda c: c.update(frozen=["x"])),
        r"frozen parameters \['x'\]",
    ),
    "more layers": (
        lambda d: described(d, lambda c: c["arguments"].update(layers=3)),
        "lacks decoder.layers.2",
    ),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damage_is_named(name, saved):
    damage, message = DAMAGES[name]
    damage(saved)
    with pytest.raises(r.errors.ArgumentError, match=message):
        load(saved)


def test_files_of_two_models_are_not_mixed(saved, tmp_path):
    other = save(MODELS["untied"](), tmp_path / "other")
    (saved / "config.json").write_bytes((other / "config.json").read_bytes())
    with pytest.raises(r.errors.ArgumentError, match="keep files together that were saved together"):
        load(saved)


def test_weights_of_someone_else_are_refused(saved):
    from safetensors.torch import save_file

    save_file({"a": torch.ones(1)}, str(saved / "model.safetensors"))
    with pytest.raises(r.errors.ArgumentError, match=r"was not written by regard\.nn\.save"):
        load(saved)


def test_a_directory_that_is_none():
    with pytest.raises(r.errors.ArgumentError, match="does not exist"):
        load("/nowhere/at/all")


# What cannot be saved


def other_norm():
    encoder = nn.TransformerEncoder(
        nn.TransformerEncoderLayer(8, 2, 12), 1, nn.LayerNorm(8, bias=False), False
    )
    return from_torch(encoder)


def other_eps():
    return from_torch(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 12), 1, nn.LayerNorm(8, eps=0.1), False)
    )


def enlarged():
    model = Encoder(PLAIN, 1)
    model.layers[0].feed_forward = Design(8, 2, hidden=7).feed_forward()
    return model


def headed():
    model = Encoder(PLAIN, 1)
    model.head = nn.Linear(8, 2)
    return model


def shared():
    model = Encoder(PLAIN, 2)
    model.layers[1] = model.layers[0]
    return model


def altered(change):
    model = LanguageModel(PLAIN, 11, 1)
    change(model, model.decoder.layers[0])
    return model


class Louder(LanguageModel):
    """A model that computes something else under the name of another."""

    def forward(self, *given, **named):
        return 2 * super().forward(*given, **named)


Louder.__name__ = "LanguageModel"


class Silent(nn.Linear):
    """A layer of the right shape that computes something else."""

    def forward(self, x):
        return 0 * super().forward(x)


CAUSAL = r.Attention(r.Dot(scale=3.0), support=r.Causal())
ALTERED = {
    "activation": (
        lambda m, b: setattr(b.feed_forward, "activation", r.maps.Relu()),
        r"has activation=Relu\(\) in decoder.layers.0.feed_forward",
    ),
    "norm first": (
        lambda m, b: setattr(b.attention_branch, "norm_first", False),
        "has norm_first=False in decoder.layers.0.attention_branch",
    ),
    "heads": (
        lambda m, b: vars(b.attention).update(heads=4, kv_heads=4, head_width=2),
        "has heads=4 in decoder.layers.0.attention, not 2",
    ),
    "scale": (lambda m, b: setattr(b.attention, "mechanism", Mechanism(CAUSAL)), "has mechanism=.*scale=3"),
    "hook": (
        lambda m, b: b.feed_forward.register_forward_hook(lambda *call: 2 * call[-1]),
        "has hooks in decoder.layers.0.feed_forward",
    ),
    "early hook": (
        lambda m, b: b.register_forward_pre_hook(lambda *call: None),
        "has hooks in decoder.layers.0",
    ),
    "dropout": (
        lambda m, b: setattr(b.hidden_branch.dropout, "p", 0.5),
        "has p=0.5 in decoder.layers.0.hidden_branch.dropout, not 0.0",
    ),
    "class": (
        lambda m, b: setattr(b.feed_forward, "outer", Silent(32, 8)),
        "has a tests.nn.test_saving.Silent in decoder",
    ),
    "method": (
        lambda m, b: setattr(b.attention_branch, "after", lambda x, y: x),
        "has another after in decoder.layers.0.attention_branch",
    ),
    "forward": (lambda m, b: setattr(m, "forward", lambda ids: ids), "has another forward of its own"),
    "parametrization": (
        lambda m, b: nn.utils.parametrizations.weight_norm(b.feed_forward.outer),
        "lacks decoder.*outer.weight",
    ),
}


@pytest.mark.parametrize("name", ALTERED)
def test_what_was_changed_after_it_was_built_is_not_saved(name, tmp_path):
    change, message = ALTERED[name]
    with pytest.raises(r.errors.ArgumentError, match=message):
        save(altered(change), tmp_path)


def test_a_model_under_the_name_of_another_is_not_saved(tmp_path):
    with pytest.raises(
        r.errors.ArgumentError, match=r"is a LanguageModel of tests.nn.test_saving, not regard's"
    ):
        save(Louder(PLAIN, 11, 1), tmp_path)


def test_a_model_that_is_watched_is_saved(tmp_path):
    model = moved(LanguageModel(PLAIN, 11, 1))
    with monitor(model):
        save(model, tmp_path)
    assert torch.equal(output(load(tmp_path)), output(model))


def test_what_is_frozen_stays_frozen(tmp_path):
    learned = r.Attention(r.Gaussian(bandwidth=nn.Parameter(torch.tensor(2.0), requires_grad=False)))
    model = Encoder(PLAIN.replace(mechanism=learned), 1)
    model.norm.requires_grad_(False)
    model.layers[0].attention.mechanism.requires_grad_(True)  # frozen in the design, and not any more
    save(model, tmp_path)
    found = {name for name, parameter in load(tmp_path).named_parameters() if not parameter.requires_grad}
    assert found == {"norm.weight", "norm.bias"}


def test_equal_models_are_equal_files(tmp_path):
    model = MODELS["language"]()
    first = save(model, tmp_path / "first")
    for number in range(5):
        again = save(model, tmp_path / str(number))
        for name in ("model.safetensors", "config.json"):
            assert (again / name).read_bytes() == (first / name).read_bytes()


def test_no_byte_of_the_weights_may_change(saved):
    """A changed byte is refused, or it was a space."""
    path = saved / "model.safetensors"
    whole, wanted = path.read_bytes(), load(saved).state_dict()
    for place in range(0, len(whole), 97):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        try:
            found = load(saved).state_dict()
        except r.errors.ArgumentError:
            continue
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


UNFIT = {
    "another last norm": (other_norm, "model: lacks norm.bias.*changed after it was built"),
    "another eps": (other_eps, "has eps=0.1 in norm, not 1e-05"),
    "another width": (enlarged, r"holds layers.0.feed_forward.inner.bias as \[7\], not \[32\]"),
    "a head": (headed, "holds head.bias, which the model does not have"),
    "shared layers": (shared, "uses one tensor under two names"),
    "a layer": (lambda: EncoderLayer(PLAIN), "is a EncoderLayer; save one of LanguageModel"),
    "a module": (lambda: nn.Linear(2, 2), "is a Linear"),
    "a function": (
        lambda: Encoder(
            PLAIN.replace(mechanism=r.Attention(r.Potential.of(lambda x, y: (x * y).sum(-1)))), 1
        ),
        "has a design that cannot be written",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_what_would_not_come_back_is_not_saved(name, tmp_path):
    make, message = UNFIT[name]
    with pytest.raises(r.errors.ArgumentError, match=message):
        save(make(), tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_what_comes_from_torch_is_saved(tmp_path):
    theirs = nn.Transformer(8, 2, 1, 1, 12, layer_norm_eps=1e-4, batch_first=True)
    ours = from_torch(theirs, support=r.Causal())
    save(ours, tmp_path)
    assert torch.equal(output(load(tmp_path)), output(ours))


# Disks that are full


def failing(times):
    """A function that fails as a full disk does, from a call on."""
    calls = []

    def fail(real):
        def run(*arguments):
            calls.append(arguments)
            if len(calls) > times:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return run

    return fail


@pytest.mark.parametrize("function", ["replace", "fsync"])
@pytest.mark.parametrize("times", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_a_failing_write_leaves_what_was_there(function, times, before, tmp_path, monkeypatch):
    if before:
        save(moved(LanguageModel(PLAIN, 11, 1)), tmp_path)
    old = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with monkeypatch.context() as patch:
        patch.setattr(os, function, failing(times)(getattr(os, function)))
        with pytest.raises(OSError, match="No space left"):
            save(moved(LanguageModel(Design(16, 2), 11, 1)), tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == old
    if before:
        load(tmp_path)


def test_saving_again_replaces(tmp_path):
    save(moved(LanguageModel(PLAIN, 11, 1)), tmp_path)
    model = moved(LanguageModel(Design(16, 2, initialization=UnitVariance()), 5, 2))
    save(model, tmp_path)
    assert_equal(load(tmp_path), model)
    assert sorted(os.listdir(tmp_path)) == ["config.json", "model.safetensors"]


def test_files_are_as_other_files_are(tmp_path):
    (tmp_path / "other").write_text("")
    save(LanguageModel(PLAIN, 11, 1), tmp_path)
    assert {path.stat().st_mode for path in tmp_path.iterdir()} == {(tmp_path / "other").stat().st_mode}
