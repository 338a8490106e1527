"""The audit reads promises, proves them again and attacks them."""

import pytest
import torch

import regard as r
from regard.audits.checks.base import STACK, checks
from regard.audits.findings import ALARMING, findings
from regard.audits.report import Row
from regard.nn import Design, Guaranteed, LanguageModel, Orthogonal, Promise, RelativePositions
from regard.norms import Frobenius, TokenMax

PROMISES = [check for check in checks() if check.name == "promises"]


@pytest.fixture(scope="module")
def report():
    torch.manual_seed(0)
    design = Design(8, 1, positions=RelativePositions(), promise=Promise(TokenMax(), 3.0))
    model = LanguageModel(design, 11, 2, tied=False).eval()
    return r.audit(model, [{"ids": torch.randint(11, (1, 6))}] * 2, checks=PROMISES)


def test_a_model_with_a_promise(report):
    (row,) = report.ranked("promised")
    values = row.values
    assert values["promised"] == 3.0
    assert 2.99 <= values["promise_proved"] <= 3 * (1 + 1e-6)
    assert 0.3 <= values["promise_attacked"] <= values["promise_proved"]
    assert any("Promised for the model: 3; its weights prove" in sentence for sentence in report.summary())
    assert not findings(report)


def test_a_promise_that_is_broken_is_alarming(report):
    broken = {"promised": 3.0, "promise_proved": 3.1, "promise_attacked": 1.0}
    (row,) = report.ranked("promised")
    inputs = {name: [value] for name, value in broken.items()}
    rows = [Row(STACK, row.site, row.layer, row.head, broken, inputs)]
    found = findings(report.__class__(**{**vars(report), "rows": rows}))
    assert [finding.level for finding in found] == [ALARMING]
    assert "3 was promised, and the weights prove 3.1" in found[0].what


def test_parts_with_a_promise_inside_another_model():
    """Only the outermost: what is inside keeps its part of the promise."""
    from regard.audits.checks.promises import promised

    torch.manual_seed(0)
    inner = Guaranteed([Orthogonal(4, 4), Orthogonal(4, 6)], Promise(Frobenius(), 1.0))
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), inner)
    assert [path for path, _ in promised(model)] == ["1"]
    assert [*promised(torch.nn.Linear(2, 2))] == []
