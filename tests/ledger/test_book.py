"""The ledger itself: it names what is there, keeps what it is told, and sees what certificates hide."""

import re
from pathlib import Path

import pytest
import torch

import regard as r
from regard._upper import Upper, root
from regard.norms import Frobenius
from regard.proofs import certify
from regard.proofs.theorems import castin_general
from tests.ledger import book
from tests.ledger.recording import PROOFS, ROOT, Recorder, size


def test_every_entry_names_a_test_and_functions_that_are_there():
    """Else nothing is compared, and nobody is told."""
    known = {}
    for test, entry in book.ENTRIES.items():
        file, _, name = test.partition("::")
        known.setdefault(file, Path(ROOT, file).read_text())
        assert f"def {name.split('[')[0].split('::')[-1]}(" in known[file], test
        for function in entry:
            source, _, named = function.rpartition(":")
            assert source in PROOFS, function
            known.setdefault(source, Path(ROOT, source).read_text())
            assert re.search(rf"def {re.escape(named)}\b", known[source]), f"{test}: {function}"


def test_most_functions_of_proofs_are_in_the_ledger():
    found = {name for entry in book.ENTRIES.values() for name in entry}
    files = {name.rpartition(":")[0] for name in found}
    bare = sorted(file for file in PROOFS - files if "def " in Path(ROOT, file).read_text())
    assert len(bare) <= 8, bare
    assert len(found) > 1200


def test_what_is_written_is_read_again(tmp_path):
    entries = {"tests/a.py::test[1-b]": {"regard/x.py:f": [1.25, 3e9], "regard/y.py:g": [0.1 + 0.2, 0.0]}}
    book.write(entries, tmp_path / "ledger.json")
    again = book.read(tmp_path / "ledger.json")
    assert book.differences(entries["tests/a.py::test[1-b]"], again["tests/a.py::test[1-b]"]) == []
    again["tests/a.py::test[1-b]"]["regard/x.py:f"] = [1.25, 3e9 + 1e4]
    (line,) = book.differences(entries["tests/a.py::test[1-b]"], again["tests/a.py::test[1-b]"])
    assert "regard/x.py:f: 1.25 / 3e+09 in the ledger, 1.25 / 3.00001e+09 now" in line
    assert book.differences({"regard/x.py:gone": [1.0, 1.0]}, {}) != []


def test_sizes_feel_numbers_counters_and_infinities():
    tensor = torch.tensor([0.5, -2.0], dtype=torch.float64)
    assert size(tensor) == size([0.5, 2.0])
    assert size(Upper(tensor, 3)) != size(Upper(tensor, 4))
    assert size((tensor, float("inf"))) > size((tensor, 1e300))
    assert size(torch.tensor([True, False])) == size(1)
    assert size({"words": "are no numbers"}) == size(None) == 1.0


def test_a_fault_that_the_certificate_hides_is_seen(monkeypatch):
    """A function on the way returns half; another theorem is smaller all the same."""
    attention = r.Attention(r.Dot(torch.eye(2, dtype=torch.float64), torch.eye(2, dtype=torch.float64)))
    domain = r.Ball(0.5, tokens=3, width=2)

    def recorded():
        with Recorder() as recorder:
            value = certify(attention, domain, Frobenius()).value
        return value, recorder.sums

    value, before = recorded()
    assert recorded() == (value, before), "a recording is not what it was"
    monkeypatch.setattr(castin_general, "root", lambda number: root(number).halved())
    again, after = recorded()
    assert again == value
    assert after["regard/proofs/theorems/castin_general.py:castin_general"] != pytest.approx(
        before["regard/proofs/theorems/castin_general.py:castin_general"], rel=1e-6
    )
