"""The tables of docs/decisions.md: every proof that they print holds, and every count comes out again."""

import importlib.util
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("safetensors")

import regard as r
from regard.cli.decide import TEXT
from regard.decisions import shipped_on, try_typos
from regard.decisions.word_answers import _label, percent
from regard.proofs.classifier import classifier
from regard.proofs.decision import beyond_rounding, margin_certificate
from regard.proofs.decision_attack import ShortestChange

ROOT = Path(__file__).resolve().parents[2]


def script():
    spec = importlib.util.spec_from_file_location("make_decide", ROOT / "docs" / "make_decide.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def part():
    made = script()
    found = made.PAGE.read_text(encoding="utf-8").split(made.BEGIN)[1].split(made.END)[0]
    assert TEXT in found
    return found


def rows():
    return re.findall(r"^\| (\w+) \| ([\d.e-]+) % \| ([\d.e-]+ %) \| (.*) \|$", part(), flags=re.M)


def test_every_word_is_there_and_its_proof_holds():
    asked, found = shipped_on(TEXT), rows()
    label = _label(asked)[0]
    model = classifier(asked.model, asked.x, asked.readout)
    rounding = float(model.rounding(asked.x))
    assert [row[0] for row in found] == [asked.words[place] for place in asked.moving]
    for place, (_, proved, _, _) in zip(asked.moving, found, strict=True):
        radius = float(proved) / 100 * float(asked.x[place].norm())
        certificate, *_ = margin_certificate(model, r.one_token(asked.x, place, radius), (label,), rounding)
        assert beyond_rounding(certificate, rounding)
    weakest = min(zip(asked.moving, found, strict=True), key=lambda pair: float(pair[1][1]))
    far = 1.2 * float(weakest[1][1]) / 100 * float(asked.x[weakest[0]].norm())
    open_, *_ = margin_certificate(model, r.one_token(asked.x, weakest[0], far), (label,), rounding)
    assert not beyond_rounding(open_, rounding), "more can be proved now: run python docs/make_decide.py"


def test_attacks_and_distances_come_out_as_it_says():
    asked = shipped_on(TEXT)
    label = _label(asked)[0]
    whole = classifier(asked.model, asked.x, asked.readout).exact
    for place, (_, _, attack, nearest) in zip(asked.moving, rows(), strict=True):
        found, _ = ShortestChange(whole, torch.tensor(label), r.Frobenius(), place).find(asked.x, 30)
        assert percent(float(found) / float(asked.x[place].norm()), up=True) == attack
        word, distance = asked.nearest(place)
        assert nearest == f"{word}, {percent(distance)} away"


def test_typos_come_out_as_it_says():
    found = try_typos(shipped_on(TEXT))
    assert found.sentences()[0] in part()
    counted = re.findall(r"^\| (\w+) \| (\d+) of (\d+) \|$", part(), flags=re.M)
    assert counted == [(one.word, str(one.changed), str(one.count)) for one in found.typos]
