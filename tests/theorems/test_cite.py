"""cite: BibTeX of what a certificate rests on, all through its tree and nothing else."""

import re

import pytest
import torch

import regard as r
from regard.certificate import Certificate
from regard.domains import Ball
from regard.proofs.citation import bibliography, cite


def keys(text):
    return re.findall(r"@\w+\{(\w+),", text)


def made(theorem, *parts, others=()):
    return Certificate(1.0, Ball(1.0), r.Frobenius(), theorem, parts=parts, others=others)


def test_the_whole_tree():
    certificate = made(
        "composition",
        made("a bound (kim2021, Theorem 3.2)"),
        made("both", made("another (rump2006; golub1965)")),
    )
    assert keys(cite(certificate)) == ["kim2021", "golub1965", "rump2006"]  # in the order of the bibliography


def test_entries_are_whole():
    entry = cite(made("a bound (kim2021, Theorem 3.2)"))
    assert entry.startswith("@inproceedings{kim2021,")
    assert entry.endswith("}")
    assert "The Lipschitz Constant of Self-Attention" in entry
    assert entry.count("{") == entry.count("}")


def test_each_source_once_and_only_what_was_used():
    certificate = made("(kim2021)", made("(kim2021, 3)"), others=(made("(rump2006)"),))
    assert keys(cite(certificate)) == ["kim2021"]


def test_our_own_proofs_cite_nothing():
    assert cite(made("softmax attention in TokenMax norm")) == ""
    assert cite(made("a key that is not in the bibliography (nobody1900)")) == ""


def test_the_bibliography_is_read_whole():
    text = (__import__("pathlib").Path(r.__file__).parent / "references.bib").read_text(encoding="utf-8")
    assert list(bibliography()) == keys(text)


def test_a_real_certificate():
    from regard.proofs import certify
    from regard.tilt import Tilt

    one = torch.ones(1, dtype=torch.float64)
    assert keys(cite(certify(Tilt(r.Dot(), one), Ball(1.0, one), r.Wasserstein(1.0)))) == ["vuckovic2020"]


def test_bad_input():
    with pytest.raises(r.errors.ArgumentError, match="certificate: is a str"):
        cite("x")
