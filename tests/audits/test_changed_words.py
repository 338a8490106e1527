"""The check `words`: each number is computed again with transformers and torch alone."""

import math

import pytest
import torch

import regard as r
from regard.audits.changes import CHANGES
from regard.audits.screen import screen
from tests.decisions.test_decide import SIZES, SMALL, tiny

pytest.importorskip("transformers")

LETTERS = "the cat sat on a mat and saw the dog run by"


def audited(directory, text=LETTERS, **options):
    return r.audit(directory, [text], checks=["words"], **options)


def plain_model(directory, door):
    import transformers

    model = getattr(transformers, door).from_pretrained(directory).eval()
    return model, transformers.AutoTokenizer.from_pretrained(directory)


def outputs(directory, door, texts):
    """Logits, or the mean output token, of each text alone."""
    model, tokenizer = plain_model(directory, door)
    found = []
    for text in texts:
        with torch.no_grad():
            out = model(input_ids=torch.tensor([tokenizer(text)["input_ids"]]))
        if not hasattr(out, "logits"):
            found.append(out[0].mean(1)[0])
        else:
            found.append(out.logits[0] if out.logits.ndim == 2 else out.logits[0, -1])
    return torch.stack(found).double()


def entries(report):
    (table,) = report.tables["words"]
    return table["changes"], [LETTERS, *(entry["text"] for entry in table["changes"])]


def numbers(report):
    return {name: value for row in report.stacks for name, value in row.values.items()}


def test_embeddings_by_their_cosine(tmp_path):
    directory = tiny(tmp_path, "BertModel", letters=True, **SIZES)
    report = audited(directory)
    changes, texts = entries(report)
    assert {entry["kind"] for entry in changes} == set(CHANGES)
    own, *others = outputs(directory, "AutoModel", texts)
    exact = [float(torch.cosine_similarity(own, other, dim=0)) for other in others]
    assert [entry["cosine"] for entry in changes] == pytest.approx(exact, abs=1e-6)
    found = numbers(report)
    assert found["worst_cosine"] == pytest.approx(min(exact), abs=1e-6)
    assert found["median_cosine"] == pytest.approx(float(torch.tensor(exact).quantile(0.5)), abs=1e-6)
    assert "changed_labels" not in found
    assert "worst_kl" not in found


def test_classifiers_by_their_labels(tmp_path):
    names = {0: "calm", 1: "loud", 2: "odd"}
    options = {**SIZES, "id2label": names, "initializer_range": 1.0}
    directory = tiny(tmp_path, "BertForSequenceClassification", letters=True, **options)
    report = audited(directory)
    changes, texts = entries(report)
    own, *others = outputs(directory, "AutoModelForSequenceClassification", texts).argmax(-1).tolist()
    assert report.tables["words"][0]["answer"] == names[own]
    assert [entry["answer"] for entry in changes] == [names[other] for other in others]
    flipped = [other != own for other in others]
    assert [entry["changed"] for entry in changes] == flipped
    assert any(flipped)
    assert numbers(report)["changed_labels"] == sum(flipped) / len(flipped)


def test_decoders_by_the_next_token(tmp_path):
    options = {**SMALL, "n_positions": 64, "initializer_range": 1.0}
    directory = tiny(tmp_path, "GPT2LMHeadModel", letters=True, **options)
    report = audited(directory)
    changes, texts = entries(report)
    own, *others = outputs(directory, "AutoModelForCausalLM", texts).log_softmax(-1)
    exact = [float((own.exp() * (own - other)).sum()) for other in others]
    assert [entry["divergence"] for entry in changes] == pytest.approx(exact, rel=1e-4, abs=1e-6)
    tops = [int(other.argmax()) != int(own.argmax()) for other in others]
    assert [entry["changed"] for entry in changes] == tops
    assert numbers(report)["worst_kl"] == pytest.approx(max(exact), rel=1e-4)
    assert numbers(report)["changed_top1"] == sum(tops) / len(tops)
    assert report.model["kind"] == "GPT2Model"  # attention is audited below the head


def test_a_long_text_is_sampled_and_every_word_can_be_asked_for(tmp_path):
    directory = tiny(tmp_path, "BertModel", letters=True, **SIZES)
    text = " ".join([LETTERS] * 6)
    (sample,) = audited(directory, text).tables["words"]
    assert (sample["words"], sample["possible"]) == (33, 72)
    assert len({entry["word"] for entry in sample["changes"]}) > 5
    (whole,) = audited(directory, text, every_word=True).tables["words"]
    assert (whole["words"], whole["possible"]) == (72, 72)
    (again,) = audited(directory, text).tables["words"]
    assert again["changes"] == sample["changes"]  # the same words each time


def test_the_nearest_other_token(tmp_path):
    directory = tiny(tmp_path, "BertModel", letters=True, **SIZES)
    low, high = audited(directory).tables["words"][0]["nearest"]
    model, tokenizer = plain_model(directory, "AutoModel")
    table = model.get_input_embeddings().weight.detach()
    first = {tokenizer(word)["input_ids"][0] for word in LETTERS.split()}
    exact = []
    for token in first:
        others = torch.cat([table[:token], table[token + 1 :]])
        exact.append(float((others - table[token]).norm(dim=-1).min() / table[token].norm()))
    assert (low, high) == (pytest.approx(min(exact), rel=1e-5), pytest.approx(max(exact), rel=1e-5))


def test_a_checkpoint_without_the_head_that_its_config_names(tmp_path):
    """The body alone was saved: it is audited as an encoder."""
    import json

    directory = tiny(tmp_path, "BertModel", letters=True, **SIZES)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "architectures": ["BertForSequenceClassification"]}))
    assert not math.isnan(numbers(audited(directory))["worst_cosine"])


def test_pairs_of_the_user(tmp_path):
    """The pairs are run as they are, also where the texts that are audited are others."""
    directory = tiny(tmp_path, "BertModel", letters=True, **SIZES)
    pairs = [("the cat", "the cta"), ("a dog ran", "a dog sat on the mat"), ("the cat", "the cat")]
    report = audited(directory, pairs=pairs)
    (table,) = report.tables["pairs"]
    every = outputs(directory, "AutoModel", [text for pair in pairs for text in pair])
    exact = torch.cosine_similarity(every[::2], every[1::2], dim=-1).tolist()
    assert [entry["cosine"] for entry in table["changes"]] == pytest.approx(exact, abs=1e-6)
    assert [(entry["original"], entry["text"]) for entry in table["changes"]] == pairs
    block = screen(report).blocks[0]
    (line,) = [line for line in block.lines if line.label == "your pairs"]
    assert line.cells == ("3", f"{sorted(exact)[1]:.2f}", f"{min(exact):.2f}")
