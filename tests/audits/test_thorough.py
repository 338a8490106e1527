"""Long inputs: what is left out as usual, what a thorough audit does about it, and what is said."""

import torch

import regard as r
from regard.audits.checks import depth, edits, influence, ladder, one_token
from regard.audits.checks.base import Cost, Limit, Scene, too_long


def _scene(thorough: bool, index: int = 0) -> Scene:
    return Scene(torch.nn.Identity(), {}, {}, [], [], index, thorough=thorough)


def test_what_is_said_of_a_long_input():
    limit = Limit(64, 512)
    assert (
        too_long(_scene(False), 64, limit, "nothing") == too_long(_scene(True), 512, limit, "nothing") == ""
    )
    said = too_long(_scene(False), 65, limit, "nothing is proved")
    assert said.startswith("nothing is proved for input 1, of 65 tokens; give a text of at most 64 tokens")
    assert "thorough" in said
    for thorough in (False, True):
        assert too_long(_scene(thorough), 513, limit, "nothing").endswith("at most 512 tokens")
    costly = Limit(64, 512, Cost("for a head", 512, 10.0, 0.1))
    assert too_long(_scene(False), 256, costly, "nothing").endswith(
        "64 tokens, or ask for a thorough audit, which takes about 2 seconds and 0.1 GB for a head, "
        "extrapolated from 512 tokens"
    )
    assert too_long(_scene(True), 8192, costly, "nothing").endswith(
        "of 8,192 tokens; give a text of at most 512 tokens: here it would take about 43 minutes and 25.6 GB "
        "for a head, extrapolated from 512 tokens"
    )
    assert limit.at_most(100) == Limit(64, 100)
    assert limit.at_most(10) == Limit(10, 10)
    assert str(limit) == "64 tokens (--thorough: 512)"


def test_a_thorough_audit_proves_on_long_inputs():
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval()
    x = torch.randn(1, ladder.LONGEST.usual + 6, 8)
    usual = r.audit(model, x, checks=["bounds"])
    whole = r.audit(model, x, checks=["bounds", "constants"], thorough=True)
    assert any("thorough" in skipped.reason for skipped in usual.skipped)
    assert not usual.ranked("point_bound")
    assert not whole.skipped
    rows = whole.ranked("point_bound")
    assert len(rows) == 2
    for row in rows:
        exact = row.values["head_constant"]
        assert exact <= row.values["point_bound"] <= 1.01 * exact < row.values["ball_bound"]


def test_every_input_has_its_influence():
    assert influence.influence(_scene(False, index=3)).numbers == {}
    assert influence.INPUTS.of(_scene(True)) > 1000
    assert edits.INPUTS.of(_scene(True)) == edits.MISSPELLED.of(_scene(True)) == influence.INPUTS.thorough


def test_every_proof_that_stops_says_what_it_would_cost():
    for check in (depth, one_token, edits, ladder):
        for thorough in (False, True):
            said = too_long(_scene(thorough), 1 + check.LONGEST.thorough, check.LONGEST, "nothing")
            assert f"at most {check.LONGEST.thorough:,} tokens: here it would take about" in said
            assert "extrapolated" in said
