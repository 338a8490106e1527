"""GGUF files: a tiny model is written as llama.cpp writes it, and audited; what is missing is said."""

import numpy as np
import pytest
import torch

import regard as r
from regard.audits.checkpoint import find
from regard.audits.load import config_of, load, load_weights, tokenizer_of
from regard.audits.quantized import check_quantized
from regard.audits.weights import WeightAudit
from regard.errors import ArgumentError, MissingExtraError
from tests.audits.checkpoints import model_of

WORDS = ["<s>", "</s>", "<unk>", *"abcdefghijklm", "Ġ", "ab", "cd"]


def written(path, model):
    """The model with its tokenizer in one file; llama.cpp keeps pairs of rotary positions side by side."""
    gguf = pytest.importorskip("gguf")
    config, tensors = (
        model.config,
        {name: value.float().numpy() for name, value in model.state_dict().items()},
    )
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    words = WORDS + [f"<{number}>" for number in range(config.vocab_size - len(WORDS))]
    writer.add_token_list(words)
    writer.add_token_types([3, 3, 2] + [1] * (len(words) - 3))
    writer.add_token_merges(["a b", "c d"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(2)
    for name, value in tensors.items():
        writer.add_tensor(_name(name), _sided(name, value, config))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _name(name):
    for old, new in (
        ("model.embed_tokens", "token_embd"), ("model.norm", "output_norm"), ("lm_head", "output"),
        ("model.layers.", "blk."), ("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"),
        ("self_attn.v_proj", "attn_v"), ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"),
        ("mlp.up_proj", "ffn_up"), ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    ):  # fmt: skip
        name = name.replace(old, new)
    return name


def _sided(name, value, config):
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = next((heads[key] for key in heads if f"{key}.weight" in name), None)
    if count is None:
        return value
    halves = value.reshape(count, 2, -1, value.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(value.shape))


@pytest.fixture(scope="module")
def model():
    return model_of("llama", attention_bias=False)


@pytest.fixture(scope="module")
def file(model, tmp_path_factory):
    pytest.importorskip("accelerate")
    return written(tmp_path_factory.mktemp("quantized") / "tiny.gguf", model)


def test_the_weights_are_those_that_were_written(model, file):
    checkpoint = find(str(file))
    found = load_weights(checkpoint).state_dict()
    for name, value in model.model.state_dict().items():
        assert torch.equal(found[name], value), name
    assert config_of(checkpoint).model_type == "llama"
    assert checkpoint.identity()[1][0][0] == "tiny.gguf"


def test_a_file_and_its_directory_are_audited(model, file):
    """Texts by the tokenizer of the file; the constants are those of the model itself."""
    for name in (file, file.parent):
        found, tokenizer, called = load(str(name))
        assert called == "tiny"
    report = r.audit(found, ["ab cd"], tokenizer=tokenizer, checks=["constants"])
    ids = tokenizer("ab cd", return_tensors="pt")["input_ids"]
    wanted = r.audit(model.model, [{"input_ids": ids}], checks=["constants"])
    assert {entry.level for entry in report.coverage} == {"declared"}
    for one, other in zip(report.heads, wanted.heads, strict=True):
        assert one.values["head_constant"] == pytest.approx(other.values["head_constant"], rel=1e-5)


def test_several_files_are_named(file, tmp_path):
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(file.read_bytes())
    with pytest.raises(ArgumentError, match=r"several models \(a.gguf, b.gguf\)"):
        find(str(tmp_path))


def test_what_is_no_such_file_is_said(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"nothing")
    with pytest.raises(ArgumentError, match="is not a GGUF file"):
        find(str(path))
    path.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
    with pytest.raises(ArgumentError, match="pointer of Git LFS"):
        find(str(path))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_extra_it_is_named(tmp_path, monkeypatch, package):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    monkeypatch.setattr(
        "regard.audits.quantized.importlib.util.find_spec", lambda name: None if name == package else object()
    )
    with pytest.raises(MissingExtraError, match=rf"{package}.*regard\[gguf\]"):
        check_quantized(path)


def test_it_is_only_read_whole(file):
    with pytest.raises(ArgumentError, match="only read whole"):
        WeightAudit(find(str(file)))


def test_a_tokenizer_that_is_not_in_it_is_missed(file):
    assert tokenizer_of(find(str(file))).decode([3, 4]) == "ab"
