"""One question is answered once: inside of it, not after it, and not where there was no answer."""

import gc
import weakref

import pytest
import torch

import regard as r
from regard.proofs.question import once, question
from regard.proofs.subject import subject_of


def counted():
    """A function that gives 1, 2, 3, …"""
    given = []

    def answer():
        given.append(None)
        return len(given)

    return answer


def test_the_same_is_asked_once():
    answer = counted()
    assert [once(("a",), None, answer) for _ in range(2)] == [1, 2]  # nobody asks
    with question():
        assert [once(("a",), None, answer) for _ in range(3)] == [3, 3, 3]
        with question():
            assert once(("a",), None, answer) == 3
        assert once(("a",), None, answer) == 3
        assert once(("b",), None, answer) == 4
    assert once(("a",), None, answer) == 5


def test_an_answer_of_nothing_is_an_answer():
    calls = []
    with question():
        for _ in range(2):
            assert once(("nothing",), None, lambda: calls.append(1)) is None
    assert len(calls) == 1


def test_an_error_is_no_answer_and_ends_the_question():
    def refuse():
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"), question():
        once(("a",), None, refuse)
    answer = counted()
    with question():
        assert once(("a",), None, answer) == 1
    assert once(("a",), None, answer) == 2


def test_what_is_named_by_its_id_stays_alive():
    """Another object must not get the id of one that is gone, and with it its answer."""
    with question():
        head = r.Attention(r.Dot())
        gone = weakref.ref(head)
        first = subject_of(head)
        assert subject_of(head) is first
        assert subject_of(head, residual=True) is not first
        del head, first
        gc.collect()
        assert gone() is not None
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("ask", [r.certify, r.deviation])
def test_questions_do_not_hear_of_each_other(ask):
    """Weights that are written to between two questions give another answer."""
    w = torch.eye(2, dtype=torch.float64)
    map = r.maps.Compose((r.maps.Affine(w), r.maps.Residual(r.maps.Affine(w))))
    near = r.Neighborhood(torch.zeros(2, 2, dtype=torch.float64), 1.0)
    before = ask(map, near, r.Frobenius()).value
    w.mul_(3.0)
    assert ask(map, near, r.Frobenius()).value == pytest.approx(6 * before, rel=1e-6, abs=0)
