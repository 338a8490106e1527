"""Padding: a text has the same numbers alone and padded, in every column, and they are those of its tokens
in plain torch.
"""

import math

import pytest
import torch
from torch import nn

import regard as r
from tests.audits.families import FAMILIES, enlivened, ids, mask, tokens

pytest.importorskip("transformers")

SHORT, LONG = ids(1, 5), ids(1, 8)
CLOSED = ~torch.ones(8, 8, dtype=torch.bool).tril()
SOURCE = tokens(2, 8)
TARGET = tokens(2, 4)


def padded(left=False, **more):
    """Both texts as a tokenizer pads them."""
    zeros = torch.zeros(1, 3, dtype=torch.long)
    second = torch.cat([zeros, SHORT] if left else [SHORT, zeros], 1)
    return {"input_ids": torch.cat([LONG, second]), "attention_mask": mask(8, 5, left=left), **more}


PLACES = {"position_ids": torch.stack([torch.arange(8), torch.tensor([9, 9, 9, 0, 1, 2, 3, 4])])}
TEXTS = [{"input_ids": LONG}, {"input_ids": SHORT}]
CASES = {
    "bert": ("bert", padded(), TEXTS),
    "bert, eager": ("bert eager", padded(token_type_ids=torch.zeros(2, 8, dtype=torch.long)), TEXTS),
    "bert, left": ("bert", padded(True, **PLACES), TEXTS),
    "llama": ("llama", padded(), TEXTS),
    "llama, left": ("llama", padded(True), TEXTS),
    "gpt2, left": ("gpt2", padded(True, **PLACES), TEXTS),
    "t5": (
        "t5",
        padded(decoder_input_ids=ids(2, 6), decoder_attention_mask=mask(6, 4)),
        [
            {**TEXTS[0], "decoder_input_ids": ids(2, 6)[:1]},
            {**TEXTS[1], "decoder_input_ids": ids(2, 6)[1:, :4]},
        ],
    ),
    "torch": (
        "torch_encoder",
        {"src": SOURCE, "mask": CLOSED, "src_key_padding_mask": mask(8, 5) == 0},
        [{"src": SOURCE[:1], "mask": CLOSED}, {"src": SOURCE[1:, :5], "mask": CLOSED[:5, :5]}],
    ),
    "torch, its memory": (
        "torch_decoder",
        {"tgt": TARGET, "memory": SOURCE, "memory_key_padding_mask": mask(8, 5) == 0},
        [{"tgt": TARGET[:1], "memory": SOURCE[:1]}, {"tgt": TARGET[1:], "memory": SOURCE[1:, :5]}],
    ),
}


def numbers_of(report):
    """Every number of a report: of each row, column and input."""
    return {
        (row.scope, row.site, row.head, name, place): value
        for row in report.rows
        for name, values in row.inputs.items()
        for place, value in enumerate(values)
    }


@pytest.mark.parametrize("case", CASES)
def test_every_number_is_that_of_the_text_alone(case):
    kind, together, alone = CASES[case]
    name, _, implementation = kind.partition(" ")
    model = FAMILIES[name].make(implementation or "sdpa")
    found, wanted = (numbers_of(r.audit(model, inputs)) for inputs in (together, alone))
    assert found.keys() == wanted.keys()
    known = {name for name, value in wanted.items() if not math.isnan(value)}
    assert {name for name, value in found.items() if not math.isnan(value)} == known
    assert len({column for *_, column, place in known if place == 1}) > 20
    for number in known:
        assert found[number] == pytest.approx(wanted[number], rel=1e-4, abs=1e-7), number


@pytest.mark.parametrize("left", [False, True])
def test_a_head_is_that_of_its_tokens(left):
    """In plain torch, on the padded input: the rows and the dense Jacobian at the tokens."""
    model = FAMILIES["llama"].make("eager")  # in float64 the mask of transformers overflows
    report = r.audit(model, padded(left), checks=["rows", "constants", "geometry"])
    call = {name: value[1:] for name, value in padded(left).items()}
    kept = call["attention_mask"][0].bool()
    entering, ran = {}, {}
    for path, layer in enumerate(model.layers):
        layer.self_attn.register_forward_pre_hook(
            lambda _, a, b, path=path: entering.update({path: (a, b)}), with_kwargs=True
        )
        layer.register_forward_pre_hook(lambda _, a, path=path: ran.update({path: a[0]}))
    with torch.no_grad():
        weights = model(**call, output_attentions=True, use_cache=False).attentions
    for path, own in enumerate(weights):
        laws = own[0][:, kept][:, :, kept]
        heads = [row for row in report.heads if row.layer == path]
        for law, row in zip(laws, heads, strict=True):
            entropy = float(torch.special.entr(law).sum(-1).mean())
            assert row.inputs["entropy"][1] == pytest.approx(entropy, rel=1e-4)
            assert row.inputs["sink_mass"][1] == pytest.approx(float(law.mean(0).max()), rel=1e-4)
        _, named = entering[path]
        module, x = model.layers[path].self_attn, named["hidden_states"]
        named["attention_mask"] = named["attention_mask"].clamp_min(-1e9)  # whose derivatives are finite

        def run(part, module=module, named=named, x=x):
            whole = x.clone()
            whole[:, kept] = part
            return module(**{**named, "hidden_states": whole})[0][:, kept]

        dense = torch.autograd.functional.jacobian(run, x[:, kept])
        (layer,) = [row for row in report.layers if row.layer == path]
        exact = float(torch.linalg.matrix_norm(dense.reshape(5 * 32, 5 * 32).double(), 2))
        assert layer.inputs["layer_constant"][1] == pytest.approx(exact, rel=1e-4)
        stream = ran[path][0, kept]
        spread = float((stream - stream.mean(0)).norm(dim=-1).max())
        assert layer.inputs["radius"][1] == pytest.approx(spread, rel=1e-4)


def test_the_report_names_the_tokens_alone():
    report = r.audit(FAMILIES["bert"].make("sdpa"), padded(), checks=["rows"])
    assert [len(entry.tokens) for entry in report.inputs] == [8, 5]
    assert not report.skipped


class Mean(nn.Module):
    """A model that takes the mean over padding too."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 24, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)

    def forward(self, src, src_key_padding_mask=None):
        return self.encoder(src, src_key_padding_mask=src_key_padding_mask).mean(1)


@pytest.mark.parametrize(
    ("make", "call"),
    [
        (lambda: enlivened(Mean()), {"src": SOURCE, "src_key_padding_mask": mask(8, 5) == 0}),
        (lambda: FAMILIES["gpt2"].make("sdpa"), padded(True)),
    ],
    ids=["reads padding", "counts positions from padding"],
)
def test_a_model_that_padding_changes_is_measured_on_the_tokens_alone_and_says_so(make, call):
    report = r.audit(make(), call, checks=["rows"])
    (entry,) = report.skipped
    assert (entry.check, entry.input) == ("padding", 1)
    assert "gives these tokens another output" in entry.reason
    assert "of the tokens alone" in entry.reason
    assert r.audits.Report.from_dict(report.to_dict()).skipped == [entry]


class Written(nn.Module):
    """A model written by hand that hides zeros, or what its mask has as zero."""

    def __init__(self):
        super().__init__()
        self.embed, self.qkv, self.out = nn.Embedding(40, 32), nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, tokens, mask=None):
        x, keep = self.embed(tokens), (tokens != 0) if mask is None else mask.bool()
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = (q @ k.mT).masked_fill(~keep[:, None, None], -math.inf)
        return x + self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("left", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_a_model_that_finds_its_padding_itself(named, left):
    model, texts = enlivened(Written()), padded(left)
    call = {"tokens": texts["input_ids"], **({"mask": texts["attention_mask"]} if named else {})}
    alone = [{"tokens": LONG}, {"tokens": SHORT}]
    reports = [r.audit(model, inputs, checks=["rows", "constants", "geometry"]) for inputs in (call, alone)]
    found, wanted = map(numbers_of, reports)
    assert found.keys() == wanted.keys()
    assert len(found) > 30
    assert found == pytest.approx(wanted, rel=1e-4, nan_ok=True)
    assert [len(entry.tokens) for entry in reports[0].inputs] == [
        len(entry.tokens) for entry in reports[1].inputs
    ]


def test_tokens_that_are_zero_and_seen_are_tokens():
    model, call = FAMILIES["bert"].make("sdpa"), {"input_ids": torch.tensor([[5, 6, 7, 0, 0]])}
    report = r.audit(model, call, checks=["rows"])
    assert [len(entry.tokens) for entry in report.inputs] == [5]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        rows = model(**call, output_attentions=True)
    for row in report.heads:
        law = rows.attentions[row.layer][0, row.head]
        entropy = float(torch.special.entr(law).sum(-1).mean())
        assert row.values["entropy"] == pytest.approx(entropy, rel=1e-4)


def test_an_input_of_padding_alone_is_refused():
    call = {"input_ids": SHORT, "attention_mask": torch.zeros(1, 5, dtype=torch.long)}
    with pytest.raises(r.errors.ArgumentError, match="1 has nothing but padding by its attention_mask"):
        r.audit(FAMILIES["bert"].make("sdpa"), call)


def test_a_mask_that_hides_nothing_changes_nothing():
    whole = {"input_ids": SHORT, "attention_mask": torch.ones(1, 5, dtype=torch.long)}
    model = FAMILIES["bert"].make("sdpa")
    found, wanted = (r.audit(model, call, checks=["rows", "constants"]) for call in (whole, TEXTS[1]))
    assert numbers_of(found) == numbers_of(wanted)


# Padding that no argument names


class Mixing(nn.Module):
    """Attention written by hand among tokens, or to others, some of which are hidden."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x, allowed, y=None):
        (q, *_), (_, *kv) = self.qkv(x).chunk(3, -1), self.qkv(x if y is None else y).chunk(3, -1)
        q, k, v = (part.unflatten(-1, (4, 8)).transpose(1, 2) for part in (q, *kv))
        scores = (q @ k.mT / 3).masked_fill(~allowed, -math.inf)
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


class Lengths(nn.Module):
    """How many tokens each sequence has is a number."""

    def __init__(self):
        super().__init__()
        self.embed, self.layers = nn.Embedding(40, 32), nn.ModuleList([Mixing(), Mixing()])

    def forward(self, tokens, lengths):
        x = tokens if tokens.dtype.is_floating_point else self.embed(tokens)
        allowed = torch.arange(x.shape[1]) < lengths[:, None, None, None]
        for layer in self.layers:
            x = x + layer(x, allowed)
        return x


class Alone(Lengths):
    """Padding sees itself, and nothing else does."""

    def forward(self, tokens):
        x, keep = self.embed(tokens), tokens != 0
        pairs = keep[:, :, None] & keep[:, None] | torch.eye(tokens.shape[1], dtype=torch.bool)
        for layer in self.layers:
            x = x + layer(x, pairs[:, None])
        return x


class Sides(Lengths):
    """An encoder that finds its padding, and a decoder of as many tokens that has none."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = Mixing(), Mixing()

    def forward(self, source, target):
        y, keep = self.embed(source), (source != 0)[:, None, None]
        for layer in self.layers:
            y = y + layer(y, keep)
        x = self.embed(target)
        x = x + self.own(x, torch.ones(1, dtype=torch.bool))
        return x + self.cross(x, keep, y)


TEXT, TARGETS = padded()["input_ids"], ids(2, 8)
WIDE = tokens(2, 8)
UNNAMED = {
    "lengths": (
        Lengths,
        {"tokens": TEXT, "lengths": torch.tensor([8, 5])},
        [{"tokens": LONG, "lengths": torch.tensor([8])}, {"tokens": SHORT, "lengths": torch.tensor([5])}],
    ),
    "lengths of numbers": (
        Lengths,
        {"tokens": WIDE, "lengths": torch.tensor([8, 5])},
        [
            {"tokens": WIDE[:1], "lengths": torch.tensor([8])},
            {"tokens": WIDE[1:, :5], "lengths": torch.tensor([5])},
        ],
    ),
    "alone": (Alone, {"tokens": TEXT}, [{"tokens": LONG}, {"tokens": SHORT}]),
    "of one side": (
        Sides,
        {"source": TEXT, "target": TARGETS},
        [{"source": LONG, "target": TARGETS[:1]}, {"source": SHORT, "target": TARGETS[1:]}],
    ),
}


@pytest.mark.parametrize("case", UNNAMED)
def test_padding_that_no_argument_names(case):
    kind, together, alone = UNNAMED[case]
    model, asked = enlivened(kind()), ["rows", "constants", "geometry", "depth"]
    reports = [r.audit(model, inputs, checks=asked) for inputs in (together, alone)]
    found, wanted = map(numbers_of, reports)
    assert found.keys() == wanted.keys()
    assert len({number for number, value in wanted.items() if not math.isnan(value)}) > 80
    for number, value in wanted.items():
        if "residual" not in number:  # of two runs that begin with other rounding
            assert found[number] == pytest.approx(value, rel=1e-3, abs=1e-6, nan_ok=True), number
    assert not [entry for entry in reports[0].skipped if entry.check == "padding"]


def test_numbers_that_may_be_of_sequences_or_of_tokens_are_refused():
    call = {"tokens": ids(5, 5), "lengths": torch.tensor([5, 4, 3, 2, 1])}
    with pytest.raises(r.errors.ArgumentError, match="5 numbers in lengths, which are of 5 sequences or of"):
        r.audit(enlivened(Lengths()), call)
