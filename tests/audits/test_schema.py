"""report.json has a schema with a number: every report is valid, and a field of another name is not."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.audits.checkpoint import find
from regard.audits.checks import answer_radius, checks
from regard.audits.page import save as written
from regard.audits.report import SCHEMA
from regard.audits.run import Audit
from regard.audits.weights import WeightAudit
from tests.audits.checkpoints import save
from tests.decisions.test_decide import SIZES, tiny

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("transformers")
pytest.importorskip("jinja2")

WHOLE = json.loads((Path(regard.audits.__file__).parent / "report.schema.json").read_text(encoding="utf-8"))
TEXTS = ["the cat sat ."]
IDS = {"input_ids": torch.tensor([[4, 5, 6]])}
INPUTS: dict[str, Any] = {
    "bert": TEXTS,
    "gpt2": IDS,
    "t5": {**IDS, "decoder_input_ids": torch.tensor([[4, 5]])},
    "vit": {"pixel_values": torch.zeros(1, 3, 12, 12)},
}


def large() -> Any:
    """A model whose MLPs amplify, on an input without texts."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    for block in model.layers:
        for part in (block.linear1, block.linear2):
            part.weight.data *= 20
    return regard.audit(model, torch.randn(1, 5, 8))


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """Reports as the files that are written of them."""
    place, found = tmp_path_factory.mktemp("models"), {}
    usual = [check.name for check in checks() if not check.named]
    for kind, inputs in INPUTS.items():
        save(place / kind, kind)
        asked = usual if kind == "bert" else None
        more = {"twin": True, "pairs": [("the cat", "the dog")]} if kind == "bert" else {}
        found[kind] = regard.audit(place / kind, inputs, checks=asked, **more)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(answer_radius, "RESOLUTION", 8.0)
        directory = tiny(place / "answers", "BertForSequenceClassification", **SIZES)
        found["answers"] = regard.audit(directory, "warm film", checks=["radius"])
    weights = WeightAudit(find(str(place / "gpt2")))
    weights.measure()
    found["weights"], found["large"] = weights.report(), large()
    quick = [check for check in map(type(checks()[0]).quickly, checks()) if check is not None]
    found["quick"] = regard.audit(place / "bert", "the cat sat", checks=quick)
    found["partial"] = Audit(torch.nn.Linear(2, 2), [torch.ones(1, 2)], checks=["rows"]).report("stopped")
    source = {**found["bert"].model, "source": "0" * 16}
    found["command"] = dataclasses.replace(found["bert"], model=source)
    paths = {name: written(report, place / f"report-{name}")[0] for name, report in found.items()}
    return {name: json.loads(path.read_text(encoding="utf-8")) for name, path in paths.items()}


def node(found: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema, where it stands."""
    return WHOLE["$defs"][found["$ref"].rpartition("/")[2]] if "$ref" in found else found


def objects(part: dict[str, Any], data: Any) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """The objects in a report that have named fields, each with its part of the schema."""
    part = node(part)
    if isinstance(data, list):
        for one in data:
            yield from objects(part.get("items", {}), one)
    if not isinstance(data, dict):
        return
    if "required" in part and "properties" in part:
        yield part, data
    others = part.get("additionalProperties") or {}
    for name, value in data.items():
        yield from objects(part.get("properties", {}).get(name, others), value)


def named(part: Any) -> Iterator[dict[str, Any]]:
    """Every part of the schema that has named fields."""
    if isinstance(part, dict):
        if "required" in part and "properties" in part:
            yield part
        for value in part.values():
            yield from named(value)


def test_the_schema_has_the_number_of_the_reports() -> None:
    jsonschema.Draft202012Validator.check_schema(WHOLE)
    assert WHOLE["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    assert WHOLE["$id"].endswith(f":{SCHEMA}")
    assert WHOLE["properties"]["schema"] == {"const": SCHEMA}


def test_every_report_is_valid(reports: dict[str, dict[str, Any]]) -> None:
    validator = jsonschema.Draft202012Validator(WHOLE)
    wrong = {
        name: [f"{error.json_path}: {error.message}" for error in validator.iter_errors(data)]
        for name, data in reports.items()
    }
    assert not {name: errors for name, errors in wrong.items() if errors}
    assert {check.name for check in checks()} >= {*reports["bert"]["tables"], "radius"} - {"pairs"}
    assert reports["t5"]["skipped"]
    assert reports["partial"]["partial"]
    assert reports["quick"]["settings"]["quick"]


def test_a_field_of_another_name_is_not_valid(reports: dict[str, dict[str, Any]]) -> None:
    """Every field of every object that the schema names, and each of these is in a real report."""
    met = {id(part): (part, one) for data in reports.values() for part, one in objects(WHOLE, data)}
    unmet = [part["properties"].keys() for part in named(WHOLE) if id(part) not in met]
    assert not unmet
    for part, one in met.values():
        validator = jsonschema.Draft202012Validator({"$defs": WHOLE["$defs"], **part})
        assert validator.is_valid(one)
        assert not validator.is_valid({**one, "a_field_that_is_new": 0})
        for name in part["required"]:
            renamed = copy.copy(one)
            renamed[f"{name}_"] = renamed.pop(name)
            assert not validator.is_valid(renamed), name
