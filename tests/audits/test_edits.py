"""The check of edits: against layers that are run with a token less, with every word more, and with typos."""

import math

import pytest
import torch

import regard as r
from regard.audits.checks.edits import Embedding, Rewritten, deletions, insertions
from regard.audits.places import sites
from regard.audits.run import Audit
from tests.audits.checkpoints import WORDS, model_of, tokenizer

TEXT = "the cat sat on a red mat ."


@pytest.fixture(scope="module")
def run():
    return Audit(model_of("bert", 3.0), [TEXT], tokenizer=tokenizer(), checks=["edits"])


@pytest.fixture(scope="module")
def scene(run):
    return run._scene(run.inputs[0])


@pytest.fixture(scope="module")
def site(run):
    return sites(run.model, dict(run.inputs[0].options))[0]


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_a_token_less_by_running_each_row_without_it(kind):
    """In every layer, also where one token fills a row; in a decoder all others keep their positions, and the
    first token sees no other.
    """
    call = {"input_ids": torch.tensor([[5, 6, 8, 9, 4, 13, 10, 12]])}
    heaviest = 0.0
    for site in sites(model_of(kind, 3.0), call):
        values = site.attention.lookup.values(site.points, torch.arange(8))
        mixed = values.repeat_interleave(site.heads // len(values), 0) @ site.w_o
        scores = site.scores.masked_fill(~site.allowed, -torch.inf)
        whole = (scores.softmax(-1) @ mixed).sum(0)
        exact = torch.empty(8, 8, dtype=torch.float64)
        for gone in range(8):
            without = scores.clone()
            without[..., gone] = -torch.inf
            exact[:, gone] = ((without.softmax(-1) @ mixed).sum(0) - whole).norm(dim=-1)
        exact.fill_diagonal_(math.nan)
        torch.testing.assert_close(deletions(site), exact, rtol=1e-8, atol=1e-12, equal_nan=True)
        heaviest = max(heaviest, float(site.laws[..., 1:, :].max()))
    assert heaviest > 0.9


def test_a_token_less_is_the_layer_without_it(site):
    found, whole = deletions(site), site.joined(site.points)
    for gone in range(len(whole)):
        stays = [k for k in range(len(whole)) if k != gone]
        moved = (site.joined(site.points[stays]) - whole[stays]).norm(dim=-1)
        torch.testing.assert_close(found[stays, gone], moved, rtol=1e-8, atol=1e-10)
        assert math.isnan(float(found[gone, gone]))


def test_a_word_more_is_the_layer_with_it(run, scene, site):
    """For every entry of the embedding table, run."""
    embed = Embedding(scene, site)
    ids = embed.ids
    assert embed.vocabulary >= len(WORDS)
    before = site.joined(site.points)
    stays = [*range(len(ids) - 1), len(ids)]
    moves = []
    for word in range(embed.vocabulary):
        longer = torch.cat([ids[:-1], torch.tensor([word]), ids[-1:]])
        after = site.joined(embed(longer, torch.arange(len(longer))))[stays]
        moves.append((after - before).norm(dim=-1))
    exact, which = torch.stack(moves).max(0)
    found, words = insertions(embed, site)
    torch.testing.assert_close(found, exact, rtol=1e-8, atol=1e-10)
    assert words.tolist() == which.tolist()


def test_all_words_are_seen_whatever_the_blocks(monkeypatch, scene, site):
    embed = Embedding(scene, site)
    whole = insertions(embed, site)
    monkeypatch.setattr("regard.audits.checks.edits.ROOM", 1)
    parts = insertions(embed, site)
    torch.testing.assert_close(parts[0], whole[0])
    assert torch.equal(parts[1], whole[1])


def test_typos_are_below_what_is_proved_of_them(scene, site):
    """A word that splits, one that becomes another, one less; and an edit of nothing."""
    embed = Embedding(scene, site)
    ids = embed.ids.tolist()
    for other in ([*ids[:2], 13, 11, *ids[3:]], [*ids[:2], 7, *ids[3:]], [*ids[:2], *ids[3:]]):
        edit = Rewritten(embed, site, torch.tensor(other))
        theorem, certified = edit.proved()
        assert 0 < edit.moved() <= certified
        assert theorem.startswith("tokens that")
        assert certified < 20 * edit.moved()


def test_on_a_long_text_tokens_come_and_go(monkeypatch, scene, site):
    """The proof of tokens that move in their places would fill memory; the other one holds as well."""
    embed = Embedding(scene, site)
    ids = embed.ids.tolist()
    edit = Rewritten(embed, site, torch.tensor([*ids[:2], 7, *ids[3:]]))
    least = edit.proved()[1]
    monkeypatch.setattr("regard.audits.checks.edits.IN_PLACE", len(ids) - 1)
    theorem, certified = edit.proved()
    assert theorem == "tokens that come and go"
    assert edit.moved() <= least <= certified


def test_the_report_has_the_columns(run):
    run.measure()
    report = run.report()
    assert not report.skipped
    table = next(one for one in report.tables["edits"] if "typos" in one)
    assert all(one["moved"] <= one["certified"] for one in table["typos"])
    first, second = report.layers
    assert first.values["inserted"] > 0
    assert math.isclose(first.values["inserted"], max(table["inserted"]) / table["size"])
    assert first.values["typo_moved"] <= first.values["typo_certified"]
    assert first.values["deleted"] > 0
    assert second.values["deleted"] > 0
    assert second.values.get("inserted") is None


def test_decoders_are_told_why_no_word_is_inserted():
    run = Audit(model_of("gpt2"), [TEXT], tokenizer=tokenizer(), checks=["edits"])
    run.measure()
    report = run.report()
    assert report.tables["edits"]
    assert any("mask" in one.reason for one in report.skipped)


@pytest.mark.parametrize("room", [8, 9])
def test_a_text_that_fills_the_model_is_told_why_no_token_is_inserted(room):
    """Where no position is left for one token more the reason is that, and not an error of the model."""
    model = model_of("bert", max_position_embeddings=room)
    report = r.audit(model, [TEXT], tokenizer=tokenizer(), checks=["edits"])
    assert len(report.inputs[0].tokens) == 8
    reasons = [one.reason for one in report.skipped]
    if room == 9:
        assert reasons == []
        assert report.ranked("inserted")
    else:
        assert len(reasons) == 1
        assert "the text has as many tokens as the model takes" in reasons[0]
