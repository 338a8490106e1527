"""Inputs are of the kind that a tokenizer knows, and unknown tokens are counted."""

import pytest
import torch

import regard as r
from regard.audits.checks import checks
from regard.audits.inputs import inputs_of
from regard.audits.samples import DOMAINS, known_samples, samples, unknown_share
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
    assert domain == "vocabulary"
    ids = torch.cat([call["input_ids"].flatten() for call in drawn])
    assert unknown_share(own, ids.tolist()) == 0.0
    assert len(ids.unique()) > 8


def test_unknown_tokens_are_counted_and_alarm():
    model, own = FAMILIES["bert"].make("sdpa"), words()
    (known, strange) = inputs_of(model, ["the cat sat on the mat", "MQIFVKTLTGK TITLEVEP the"], own)
    assert known.unknown == 0.0
    assert strange.unknown == pytest.approx(2 / 3)
    rows = [check for check in checks() if check.name == "rows"]
    report = r.audit(model, ["MQIFVKTLTGK TITLEVEP the"], tokenizer=own, checks=rows)
    finding = report.findings()[0]
    assert finding.level == "alarming"
    assert "67 % of the tokens of 1 of 1 input" in finding.what


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
