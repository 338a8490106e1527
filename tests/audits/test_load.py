"""Loading: what is trusted, what is refused, and that each refusal is one sentence with a remedy."""

import json

import pytest
import torch

import regard as r
from regard.audits.checkpoint import find
from regard.audits.load import config_of, device_of, load, load_weights, tokenizer_of
from tests.audits.checkpoints import model_of, save, save_pickle

pytest.importorskip("transformers")


def edit(directory, **changes):
    """Change the config of a checkpoint."""
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return directory


def refused(directory, *words):
    """The sentence of the refusal, wherever on the way to a model it comes."""
    with pytest.raises(r.errors.ArgumentError) as caught:
        load_weights(find(str(directory)))
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    return message


class Code:
    """What a malicious pickle does."""

    def __reduce__(self):
        return print, ("this must never be printed",)


@pytest.mark.parametrize("make", [save, save_pickle])
def test_weights_are_those_of_the_checkpoint(make, tmp_path):
    directory = make(tmp_path / "model")
    model, tokenizer, name = load(str(directory))
    wanted = model_of("bert").bert.state_dict()
    found = {key: value for key, value in model.state_dict().items() if not key.startswith("pooler")}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    assert not model.training
    assert tokenizer("the cat")["input_ids"] == [5, 6]
    assert name == "model"


def test_the_numbers_stay_those_of_the_checkpoint(tmp_path):
    model_of("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    assert {parameter.dtype for parameter in load_weights(find(str(tmp_path))).parameters()} == {
        torch.bfloat16
    }


def test_paths(tmp_path):
    with pytest.raises(r.errors.ArgumentError, match="there is nothing at /no/such/path"):
        find("/no/such/path")
    with pytest.raises(r.errors.ArgumentError, match=r"not a directory with a config\.json"):
        find(str(tmp_path))
    (tmp_path / "file").write_text("")
    with pytest.raises(r.errors.ArgumentError, match="is a file"):
        find(str(tmp_path / "file"))
    (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, "has a config.json but no weights")


def test_the_hub_without_a_network(monkeypatch):
    import huggingface_hub

    def unreachable(*arguments, **options):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", unreachable)
    with pytest.raises(
        r.errors.ArgumentError, match=r"the hub could not be reached.*a local directory works"
    ):
        find("somebody/some-model")


def test_the_hub_gives_a_directory(monkeypatch, tmp_path):
    """The config is looked at before anything else is downloaded,
    and a pickle is asked for only where there is nothing safer.
    """
    import huggingface_hub

    asked = []
    save(tmp_path / "safe")
    save_pickle(tmp_path / "pickle")
    edit(save(tmp_path / "code"), auto_map={"AutoModel": "code.Model"})

    def download(name, allow_patterns, ignore_patterns):
        asked.append(allow_patterns)
        return str(tmp_path / name.partition("/")[2])

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert find("me/safe").name == "me/safe"
    assert [pattern for patterns in asked for pattern in patterns if "bin" in pattern] == []
    assert not find("me/pickle").safe
    asked.clear()
    with pytest.raises(r.errors.ArgumentError, match="code of its own"):
        find("me/code")
    assert asked == [["config.json"]]


def test_code_is_never_run(tmp_path, capsys):
    refused(edit(save(tmp_path / "map"), auto_map={"AutoModel": "code.Model"}), "auto_map", "never")
    refused(edit(save(tmp_path / "inner"), text_config={"auto_map": {"AutoModel": "code.Model"}}), "auto_map")
    refused(
        edit(save(tmp_path / "kernel"), _attn_implementation="somebody/kernel"),
        "_attn_implementation",
        "never",
    )
    assert find(str(edit(save(tmp_path / "none"), auto_map={}))).safe
    directory = save_pickle(tmp_path / "pickle")
    torch.save({"weight": Code()}, directory / "pytorch_model.bin")
    refused(directory, "pickle with code in it", "convert it to safetensors")
    assert "never be printed" not in capsys.readouterr().out


def test_damaged_files(tmp_path):
    path = save(tmp_path / "safe") / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path / "safe", "cut off or damaged")
    path = save_pickle(tmp_path / "pickle") / "pytorch_model.bin"
    path.write_bytes(path.read_bytes()[:-100])
    refused(tmp_path / "pickle", "pytorch_model.bin")
    path.write_bytes(b"not a pickle at all")
    refused(tmp_path / "pickle", "pytorch_model.bin")
    (save(tmp_path / "config") / "config.json").write_text("{")
    refused(tmp_path / "config", "cannot be read as JSON")


def test_shards(tmp_path):
    model_of("bert").save_pretrained(tmp_path, max_shard_size="20KB")
    whole = find(str(tmp_path))
    assert len(whole.weights) > 2
    found, wanted = (
        load_weights(whole).embeddings.word_embeddings.weight,
        model_of("bert").bert.embeddings.word_embeddings.weight,
    )
    assert torch.equal(found, wanted)
    whole.weights[1].unlink()
    refused(tmp_path, whole.weights[1].name, "is not beside it")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    (tmp_path.parent / "outside.safetensors").write_bytes(b"")
    refused(tmp_path, "../outside.safetensors", "is not beside it")


def test_unknown_architectures(tmp_path):
    refused(edit(save(tmp_path), model_type="no_such_model"), "no_such_model", "transformers cannot use")


def test_random_weights_are_not_audited(tmp_path):
    """transformers fills in what a checkpoint lacks; here that is an error,
    except for a pooler that nobody asks about.
    """
    assert load_weights(find(str(save(tmp_path / "whole")))).pooler is not None
    refused(edit(save(tmp_path / "deep"), num_hidden_layers=3), "lacks", "encoder.layer.2.")
    refused(edit(save(tmp_path / "wide"), hidden_size=64), "config and weights belong together")


def test_a_model_without_a_tokenizer(tmp_path):
    model_of("bert").save_pretrained(tmp_path)
    checkpoint = find(str(tmp_path))
    assert load_weights(checkpoint) is not None
    with pytest.raises(r.errors.ArgumentError, match=r"has no tokenizer; texts need one: call regard\.audit"):
        tokenizer_of(checkpoint)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(r.errors.ArgumentError, match="a tokenizer that cannot be loaded"):
        tokenizer_of(checkpoint)


def test_devices():
    assert device_of("cpu") == "cpu"
    for name in ("nonsense", "meta"):
        with pytest.raises(r.errors.ArgumentError, match=f"--device: {name} cannot be used"):
            device_of(name)


def test_identity_follows_the_weights(tmp_path):
    checkpoint = find(str(save(tmp_path)))
    before = checkpoint.identity()
    assert checkpoint.identity() == before
    model_of("bert", gain=2.0).save_pretrained(tmp_path)  # the same sizes and the same header, other numbers
    assert checkpoint.identity() != before
    assert config_of(checkpoint).model_type == "bert"


def test_a_pointer_of_git_lfs_is_called_that(tmp_path):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 90868376\n"
    for name in ("model.safetensors", "pytorch_model.bin"):
        where = tmp_path / name.split(".")[0]
        where.mkdir()
        (where / "config.json").write_text('{"model_type": "bert"}')
        (where / name).write_text(pointer)
        with pytest.raises(r.errors.ArgumentError, match=r"pointer of Git LFS.*git lfs pull"):
            find(str(where))


def test_a_config_without_a_type_is_guessed_and_that_is_said(tmp_path):
    directory = save(tmp_path / "model", "bert")
    path = directory / "config.json"
    config = json.loads(path.read_text())
    del config["model_type"]
    path.write_text(json.dumps(config))
    with pytest.warns(UserWarning, match="assumed to be bert, from its architectures"):
        assert type(load_weights(find(str(directory)))).__name__ == "BertModel"
    path.write_text(json.dumps({**config, "architectures": None}))
    with pytest.raises(r.errors.ArgumentError, match="model_type"):
        load_weights(find(str(directory)))


def test_the_missing_piece_of_a_tokenizer_is_named(tmp_path):
    directory = save(tmp_path / "model", "bert")
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}')
    (directory / "vocab.json").write_text("{}")
    (directory / "tokenizer.json").unlink()
    with pytest.raises(r.errors.ArgumentError, match=r"merges\.txt"):
        tokenizer_of(find(str(directory)))


def test_a_misspelled_type_is_answered_with_the_nearest_ones(tmp_path):
    directory = save(tmp_path / "tiny")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "model_type": "bret"}))
    with pytest.raises(r.errors.ArgumentError, match=r"model_type 'bret'.*nearest names are bert, "):
        config_of(find(str(directory)))
