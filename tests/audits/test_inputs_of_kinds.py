"""Inputs of several kinds: what reaches which module, packed pictures, and what fails to be declared."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard as r
from regard.audits.adapters.base import NotCovered
from regard.audits.checks import checks
from regard.audits.places import Place
from regard.audits.site import _shared
from regard.errors import ArgumentError


def rows():
    return [check for check in checks() if check.name == "rows"]


class SelfAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        q, k, v = (layer(x).unflatten(-1, (2, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


class Both(nn.Module):
    """Text, and pictures where there are any."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words, self.pictures = SelfAttention(), SelfAttention()

    def forward(self, x, patches=None):
        out = self.words(x)
        return out if patches is None else out.sum(1) + self.pictures(patches).sum(1)


def one(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def test_modules_that_were_not_called_are_said_to_be_so():
    report = r.audit(Both(), [{"x": one(1, 5, 8)}], checks=rows())
    assert [entry.site for entry in report.covered] == ["words"]
    assert [(entry.site, entry.reason) for entry in report.missing] == [
        ("pictures", "it was not called on these inputs: give one that reaches it")
    ]


@pytest.mark.parametrize("order", [1, -1])
def test_every_kind_of_input_is_looked_at(order):
    """What only the longer input reaches is found too."""
    calls = [{"x": one(1, 5, 8)}, {"x": one(1, 6, 8), "patches": one(1, 4, 8)}][::order]
    report = r.audit(Both(), calls, checks=rows())
    assert {entry.site for entry in report.covered} == {"words", "pictures"}
    assert not report.missing
    short = next(number for number, call in enumerate(calls) if "patches" not in call)
    said = [(entry.site, entry.input) for entry in report.skipped]
    assert said == [("pictures", short)]
    row = next(row for row in report.heads if row.site == "pictures")
    alone = r.audit(Both(), [calls[1 - short]], checks=rows())
    assert row.values["entropy"] == pytest.approx(
        next(own for own in alone.heads if own.site == "pictures").values["entropy"]
    )


class Packed(nn.Module):
    """Patches of all pictures, one after the other, and the grid of each."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention = SelfAttention()

    def forward(self, pixel_values, grid_thw, input_ids=None):
        assert len(pixel_values) == int(grid_thw.prod(-1).sum())
        return self.attention(pixel_values[None])


def test_patches_that_are_packed_are_no_batch():
    report = r.audit(
        Packed(), [{"pixel_values": one(6, 8), "grid_thw": torch.tensor([[1, 2, 3]])}], checks=rows()
    )
    assert len(report.inputs) == 1
    assert [entry.site for entry in report.covered] == ["attention"]


def test_packed_pictures_of_several_texts_are_refused():
    ids = torch.zeros(2, 4, dtype=torch.long)
    call = {"pixel_values": one(6, 8), "grid_thw": torch.tensor([[1, 1, 3], [1, 1, 3]]), "input_ids": ids}
    with pytest.raises(ArgumentError, match="one sequence at a time"):
        r.audit(Packed(), [call], checks=rows())


def test_a_mask_for_each_head_is_no_mask_of_all():
    same = torch.ones(1, 2, 3, 3).tril().bool()
    assert torch.equal(_shared(same), same[0, 0])
    other = same.clone()
    other[0, 1, 2, 0] = False
    with pytest.raises(NotCovered, match="masks of their own"):
        _shared(other)


def test_what_fails_while_it_is_declared_is_observed(monkeypatch):
    """A fault of an adapter does not take the audit with it, and is on the page."""

    def fail(self, model, call):
        raise ZeroDivisionError("by nothing")

    monkeypatch.setattr(Place, "agreeing_site", fail)
    report = r.audit(Both(), [{"x": one(1, 5, 8)}], checks=rows())
    assert [entry.level for entry in report.covered] == ["observed"]
    assert report.covered[0].reason.startswith("it was not declared: ")
    assert "(ZeroDivisionError: by nothing; test_inputs_of_kinds.py, line " in report.covered[0].reason


def test_numbers_that_are_none_are_said_to_be_so():
    """A layer whose output has NaN is not covered, with that as its reason."""
    model = Both()
    report = r.audit(model, [{"x": one(1, 5, 8) * float("inf")}], checks=rows())
    assert [entry.reason for entry in report.coverage if entry.site == "words"] == [
        "scaled_dot_product_attention was called in a way that is not known here "
        "(what it returned has NaN or infinity in it), on input 1"
    ]


class SelfAttentionOutput(nn.Linear):
    """What stands behind the heads in LXMERT: no attention, whatever it is called."""


class Behind(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attention, self.output = SelfAttention(), SelfAttentionOutput(8, 8)

    def forward(self, x):
        return self.output(self.attention(x)).tanh()


def test_what_stands_beside_attention_is_not_missed():
    report = r.audit(Behind(), [{"x": one(1, 5, 8)}], checks=rows())
    assert [entry.site for entry in report.coverage] == ["attention"]
