"""Inputs are of the kind that a tokenizer knows, and unknown tokens are counted."""

import json
import re

import pytest
import torch

import regard as r
from regard.audits import card, page
from regard.audits.changes import CHANGES, Reading, replacement
from regard.audits.checks import checks
from regard.audits.inputs import inputs_of, notes_on
from regard.audits.samples import DOMAINS, RANDOM, RandomTokens, known_samples, samples, unknown_share
from regard.audits.summary import summary
from regard.decisions import loaded_on, prove_moves, try_typos
from regard.decisions.page import html
from tests.audits.checkpoints import model_of
from tests.audits.checkpoints import tokenizer as words
from tests.audits.families import FAMILIES

pytest.importorskip("transformers")


def characters(alphabet):
    """A tokenizer that knows single characters."""
    import tokenizers
    import transformers

    known = {token: number for number, token in enumerate(["[PAD]", "[UNK]", *sorted(set(alphabet))])}
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel(known, unk_token="[UNK]"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(tokenizers.Regex("."), "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="[PAD]", unk_token="[UNK]")


@pytest.mark.parametrize("domain", DOMAINS[1:3])
def test_the_domain_is_what_the_tokenizer_knows(domain):
    own = characters("".join(samples(domain)))
    assert known_samples(own) == (domain, samples(domain))


def test_a_tokenizer_that_knows_words_reads_sentences():
    own = characters("".join(samples("sentences")))
    assert known_samples(own)[0] == "sentences"


def test_a_tokenizer_that_knows_nothing_reads_its_own_vocabulary():
    own = characters("♠♥♦♣0123456789")
    domain, drawn = known_samples(own)
    assert domain == RANDOM
    ids = torch.cat([call["input_ids"].flatten() for call in drawn])
    assert unknown_share(own, ids.tolist()) == 0.0
    assert len(ids.unique()) > 8


def test_unknown_tokens_are_counted_and_alarm():
    model, own = FAMILIES["bert"].make("sdpa"), words()
    (known, strange) = inputs_of(model, ["the cat sat on the mat", "MQIFVKTLTGK TITLEVEP the"], own)
    assert known.unknown == 0.0
    assert strange.unknown == pytest.approx(2 / 3)
    with pytest.warns(UserWarning, match="67 % of the tokens of text 1 are unknown to the tokenizer: give"):
        report = r.audit(model, ["MQIFVKTLTGK TITLEVEP the"], tokenizer=own, checks=["rows"])
    finding = report.findings()[0]
    assert finding.level == "alarming"
    assert "67 % of the tokens of 1 of 1 input" in finding.what


RESIDUES = "LAGVSERTIDPKQNFYMHWC"


def residues(directory, lower=False, more=()):
    """A tokenizer of single residues with spaces between them, as protein models have."""
    import transformers

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *RESIDUES, *more]
    (directory / "vocab.txt").write_text("\n".join(words))
    settings = {"tokenizer_class": "BertTokenizer", "do_lower_case": lower}
    (directory / "tokenizer_config.json").write_text(json.dumps(settings))
    (directory / "config.json").write_text(json.dumps({"model_type": "bert"}))
    return transformers.AutoTokenizer.from_pretrained(directory)


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("kind", list(CHANGES))
def test_a_change_is_made_of_what_the_text_is_made_of(domain, kind):
    texts = samples(domain)
    own = characters("".join(texts))
    changed = 0
    for text in texts:
        reading = Reading.of(text, own, None)
        assert reading.kind == ("word" if domain in ("sentences", "code") else "token")
        for unit in reading.units:
            other = CHANGES[kind](reading, unit)
            if other is None:
                continue
            changed += 1
            assert other != text
            assert set(other) <= set("".join(texts))
            assert own.unk_token_id not in own(other)["input_ids"]
    assert changed > len(texts)


def test_every_residue_is_replaced_by_a_residue(tmp_path):
    own = residues(tmp_path)
    text = " ".join("MQIFVKTLTGKTITLEVEPSDTIENVKAK")
    reading = Reading.of(text, own, None)
    assert reading.kind == "token"
    assert len(reading.units) == 29
    for unit in reading.units:
        other = replacement(reading, unit)
        (changed,) = [(a, b) for a, b in zip(text.split(), other.split(), strict=True) if a != b]
        assert changed[1] in RESIDUES


def test_the_only_word_of_a_text_is_replaced_from_the_vocabulary():
    own = words()
    reading = Reading.of("cat", own, None)
    (unit,) = reading.units
    other = replacement(reading, unit)
    assert other != "cat"
    assert own.unk_token_id not in own(other)["input_ids"]


def test_no_replacement_is_an_unknown_token():
    own = words()
    text = "the idea sat on the table"  # two words that the tokenizer does not know
    reading = Reading.of(text, own, None)
    before = own(text)["input_ids"].count(own.unk_token_id)
    others = [replacement(reading, unit) for unit in reading.units]
    assert before == 2
    assert all(own(other)["input_ids"].count(own.unk_token_id) <= before for other in others)


def test_a_text_without_spaces_is_changed_character_by_character():
    chinese = "我们都喜欢猫和狗在一起"
    reading = Reading.of(chinese, characters(chinese), None)
    assert [reading.letters(unit) for unit in reading.units] == list(chinese)


def test_proteins_are_tried_with_spaces_too(tmp_path):
    domain, texts = known_samples(residues(tmp_path))
    assert domain == "proteins"
    assert texts[0].startswith("M Q I F V K")


def test_a_repair_makes_the_tokenizer_know_the_text(tmp_path):
    model = model_of("bert", vocab_size=40)
    lower = residues(tmp_path, lower=True)
    (note,) = notes_on(inputs_of(model, ["M Q I F V"], lower), lower)
    assert note.startswith("100 % of the tokens of text 1 are unknown")
    assert '"do_lower_case": false in tokenizer_config.json' in note
    own = residues(tmp_path)
    assert notes_on(inputs_of(model, ["M Q I F V"], own), own) == []
    (note,) = notes_on(inputs_of(model, ["MQIFV"], own), own)
    assert "write spaces between its characters" in note
    (note,) = notes_on(inputs_of(model, ["m q i f v"], own), own)
    assert "write it in upper case" in note


def test_a_lower_casing_tokenizer_is_reported_for_random_tokens_too(tmp_path):
    lower = residues(tmp_path, lower=True)
    domain, drawn = known_samples(lower)
    assert domain == RANDOM
    (note,) = notes_on(inputs_of(model_of("bert", vocab_size=40), drawn, lower), lower)
    assert "lower-cases texts and its vocabulary is upper-case" in note


@pytest.mark.parametrize("known", [True, False])
def test_a_rare_token_that_became_unknown_ones_is_named(tmp_path, known):
    own = residues(tmp_path, more=["[HUMAN]"] if known else [])
    model, text = model_of("bert", vocab_size=40), " ".join("MQIFVKTLTGKTI") + " [HUMAN]"
    (item,) = inputs_of(model, [text], own)
    assert item.unknown == pytest.approx(3 / 16)
    (note,) = notes_on([item], own)
    assert "19 % of the tokens of text 1" in note
    assert "“[HUMAN]” became 3 unknown tokens" in note
    if not known:
        assert "is not in the vocabulary" in note
        return
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({**settings, "additional_special_tokens": ["[HUMAN]"]})
    )
    repaired = type(own).from_pretrained(tmp_path)
    assert notes_on(inputs_of(model, [text], repaired), repaired) == []


def test_residues_are_called_words_on_no_screen(tmp_path):
    """Columns of the report, the card and the sentences call what was changed by its name."""
    model, own = model_of("bert", vocab_size=40), residues(tmp_path)
    names = ["one-token", "words"]
    report = r.audit(model, ["M Q I F V K T L", "T I T L E V E P"], tokenizer=own, checks=names)
    assert report.unit == "token"
    assert "Most amplified token change" in card.markdown(report)
    whole = re.sub(r"\bwords\)", "", " ".join([card.markdown(report), *summary(report)]))
    assert not re.search(r"\bwords?\b", whole)
    words_of = r.audit(FAMILIES["bert"].make("sdpa"), ["the cat sat"], tokenizer=words(), checks=names)
    assert words_of.unit == "word"
    assert "Most amplified word change" in card.markdown(words_of)


def test_a_typo_of_residues_is_made_of_residues(tmp_path):
    import transformers

    own = residues(tmp_path)
    transformers.BertModel(model_of("bert", vocab_size=len(own)).config).save_pretrained(tmp_path)
    own.save_pretrained(tmp_path)
    text = "M Q I F V"
    asked = loaded_on(str(tmp_path), text)
    found = try_typos(asked)
    assert found.unit == "token"
    assert [one.count for one in found.typos] == [len(RESIDUES) - 1] * 5
    for one in found.typos:
        for typo, _ in one.examples:
            assert typo in RESIDUES
    assert "nearest other token" in html(prove_moves(asked, found))
    assert asked.notes == ()
    (note,) = loaded_on(str(tmp_path), "M q i f v").notes
    assert note.startswith("80 % of the tokens")
    assert "write it in upper case" in note
    with pytest.raises(
        r.errors.ArgumentError, match=r"no word that the tokenizer knows.*write it in upper case"
    ):
        loaded_on(str(tmp_path), "m q i f v")


def test_a_swap_that_the_tokenizer_does_not_know_is_no_typo_of_atoms():
    own = characters("CNO")
    own.add_tokens(["Cl"])
    reading = Reading.of("OClN", own, None)
    chlorine = reading.units[1]
    assert reading.letters(chlorine) == "Cl"
    assert CHANGES["typo"](reading, chlorine) is None


def test_a_report_of_random_tokens_holds_the_repair(tmp_path):
    lower = residues(tmp_path, lower=True)
    _, drawn = known_samples(lower)
    with pytest.warns(UserWarning, match="do_lower_case"):
        report = r.audit(model_of("bert", vocab_size=40), drawn[:1], tokenizer=lower, checks=["rows"])
    assert report.inputs[0].unknown == 0.0
    for text in (" ".join(summary(report)), page.html(report)):
        assert "do_lower_case" in text


def test_random_tokens_raise_no_alarm_and_every_screen_says_so(tmp_path):
    model = FAMILIES["bert"].make("sdpa")
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.attention.self.query.weight.mul_(3000)
    ids = torch.arange(3, 11).unsqueeze(0)
    given = r.audit(model, [{"input_ids": ids}], checks=["rows"])
    drawn = r.audit(model, [RandomTokens(input_ids=ids)], checks=["rows"])
    assert given.findings()[0].level == "alarming"
    assert len(drawn.findings()) == len(given.findings())
    assert {finding.level for finding in drawn.findings()} == {"note"}
    assert not given.random_tokens
    assert r.audits.Report.from_dict(drawn.to_dict()).random_tokens
    screens = (
        repr(drawn),
        drawn._repr_html_(),
        " ".join(summary(drawn)),
        card.markdown(drawn),
        page.html(drawn),
    )
    for text in screens:
        assert "random tokens of its vocabulary" in text


class Nested(torch.nn.Module):
    """Takes a tuple of a dictionary and a tensor."""

    def __init__(self):
        super().__init__()
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, pair, scale=1.0):
        x = pair[0]["tokens"] + pair[1]
        return self.attention(x, x, x)[0] * scale


def test_inputs_may_be_nested_positional_or_a_tensor():
    x = torch.randn(2, 5, 8)
    rows = [check for check in checks() if check.name == "rows"]
    nested = r.audit(Nested(), [{"pair": ({"tokens": x}, x)}], checks=rows)
    assert len(nested.inputs) == 2
    assert not nested.missing
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True).eval()
    by_name = r.audit(layer, [{"src": x}], checks=rows)
    for item in (x, (x,)):
        again = r.audit(layer, [item], checks=rows)
        assert [row.values for row in again.rows] == [row.values for row in by_name.rows]


def test_a_name_that_forward_does_not_know_is_refused_with_those_it_does():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    with pytest.raises(r.errors.ArgumentError, match=r"names source; its forward takes src, src_mask"):
        r.audit(layer, [{"source": torch.randn(1, 5, 8)}])
