"""Outlines of models, made without transformers: the modules, shapes and reports of transformers itself."""

import json

import pytest
import torch

from regard.audits import weights
from regard.audits.checkpoint import find
from regard.audits.outlines import Outline, outline_of, outlined
from regard.audits.weights import WeightAudit
from regard.errors import ArgumentError
from tests.audits.families import BERT, GPT2, LLAMA, enlivened

transformers = pytest.importorskip("transformers")

DISTILBERT = {
    "vocab_size": 40, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 24, "max_position_embeddings": 64
}  # fmt: skip
CASES = {
    "bert": BERT,
    "camembert": BERT,
    "distilbert": DISTILBERT,
    "electra": {**BERT, "embedding_size": 16},
    "gemma": {**LLAMA, "attention_bias": True},
    "gemma2": {**LLAMA, "query_pre_attn_scalar": 7, "attn_logit_softcapping": None},
    "gpt2": {**GPT2, "scale_attn_by_inverse_layer_idx": True, "n_inner": 20},
    "gpt_neox": {**BERT, "attention_bias": False},
    "llama": {**LLAMA, "attention_bias": True, "mlp_bias": True, "head_dim": 6},
    "mistral": LLAMA,
    "qwen2": {**LLAMA, "num_key_value_heads": 1},
    "roberta": {**BERT, "layer_norm_eps": 1e-5, "type_vocab_size": 1},
    "xlm-roberta": BERT,
}
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16, "rope_theta": 10000.0,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 10000.0}


def saved(directory, kind, **sizes):
    config = transformers.AutoConfig.for_model(kind, **sizes)
    maker = transformers.AutoModelForCausalLM
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING or kind in ("bert", "roberta", "electra"):
        maker = transformers.AutoModelForMaskedLM
    enlivened(maker.from_config(config)).save_pretrained(directory)
    return directory


def reported(directory):
    audit = WeightAudit(find(str(directory)))
    audit.measure()
    return audit.original, audit.report().to_dict()


def both_ways(directory, monkeypatch):
    found, report = reported(directory)
    monkeypatch.setattr(weights, "outline_of", lambda config: None)
    wanted, other = reported(directory)
    assert not isinstance(wanted, Outline)
    return found, report, wanted, other


def test_every_outline_has_a_case():
    assert set(outlined()) == set(CASES)


@pytest.mark.parametrize("kind", sorted(CASES))
def test_the_report_and_the_model_are_those_of_transformers(kind, tmp_path, monkeypatch):
    found, report, wanted, other = both_ways(saved(tmp_path, kind, **CASES[kind]), monkeypatch)
    assert isinstance(found, Outline)
    assert report == other
    assert all(entry["covered"] for entry in report["coverage"])
    assert len(report["rows"]) >= 8
    shapes = [{name: tensor.shape for name, tensor in m.named_parameters()} for m in (found, wanted)]
    assert shapes[0] == shapes[1]
    assert all(tensor.is_meta for tensor in found.parameters())


@pytest.mark.parametrize(
    ("change", "outlines"),
    [
        ({}, True),
        ({"rope_parameters": LLAMA3}, True),
        ({"rope_parameters": YARN}, False),  # it scales queries and keys by a factor of its own
        ({"rope_parameters": {"full_attention": LLAMA3}}, False),
        ({"num_key_value_heads": None, "head_dim": None}, True),
        ({"hidden_size": "wide"}, False),
        ({"rms_norm_eps": 0}, False),
        ({"attention_bias": "yes"}, False),
        ({"quantization_config": {"quant_method": "fp8"}}, False),
        ({"model_type": "llama4"}, False),
    ],
)
def test_what_a_config_has_to_say(change, outlines):
    config = {"model_type": "llama", "rms_norm_eps": 1e-6, **LLAMA, **change}
    assert (outline_of(config) is not None) == outlines


def test_missing_sizes_are_left_to_transformers():
    config = {"model_type": "mistral", "rms_norm_eps": 1e-6, **LLAMA}
    assert outline_of(config) is not None
    for name in ("num_key_value_heads", "hidden_size", "vocab_size", "intermediate_size"):
        assert outline_of({key: value for key, value in config.items() if key != name}) is None
    for name in ("is_decoder", "add_cross_attention", "pruned_heads"):
        assert outline_of({"model_type": "bert", **BERT, name: {"0": [1]}}) is None


@pytest.mark.parametrize("positions", [LLAMA3, YARN], ids=["llama3", "yarn"])
def test_rotary_positions_of_other_kinds(positions, tmp_path, monkeypatch):
    directory = saved(tmp_path, "llama", **LLAMA, rope_parameters=positions)
    found, report, _, other = both_ways(directory, monkeypatch)
    assert isinstance(found, Outline) == (positions is LLAMA3)
    assert report == other


def test_old_names_of_weights_are_left_to_transformers(tmp_path, monkeypatch):
    """LayerNorm.gamma is a name that transformers knows and an outline does not."""
    from safetensors.torch import load_file, save_file

    directory = saved(tmp_path, "bert", **BERT)
    tensors = load_file(directory / "model.safetensors")
    old = {key.replace("LayerNorm.weight", "LayerNorm.gamma"): value for key, value in tensors.items()}
    assert len(set(old) - set(tensors)) > 2
    save_file(old, directory / "model.safetensors", metadata={"format": "pt"})
    found, report, _, other = both_ways(directory, monkeypatch)
    assert not isinstance(found, Outline)
    assert report == other
    assert all(entry["covered"] for entry in report["coverage"])


def test_a_head_count_that_does_not_divide_the_width(tmp_path):
    directory = saved(tmp_path, "bert", **BERT)
    path = directory / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "num_attention_heads": 5}))
    with pytest.raises(ArgumentError, match="transformers cannot build a model from its config"):
        reported(directory)


def test_outlines_compute_nothing():
    with pytest.raises(NotImplementedError):
        outline_of({"model_type": "bert", **BERT})(torch.zeros(1, 2, dtype=torch.long))
