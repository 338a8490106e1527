"""docs/transformer.md keeps what it promises: every section asserts something,
and its links and its picture are there.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as xml

from tests.docs.test_snippets import ROOT, blocks

PAGE = ROOT / "docs" / "transformer.md"
TEXT = PAGE.read_text(encoding="utf-8")


def sections() -> dict[str, str]:
    """The text of each section by its heading."""
    _, *parts = re.split(r"^## ", TEXT, flags=re.MULTILINE)
    return dict(part.split("\n", 1) for part in parts)  # type: ignore[misc]


def anchor(heading: str) -> str:
    """The name that a heading has in links."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_sections_are_numbered() -> None:
    numbers = [int(heading.split(".")[0]) for heading in sections()]
    assert numbers == list(range(1, len(numbers) + 1))


def test_every_section_asserts_something() -> None:
    silent = [
        heading
        for heading, text in sections().items()
        if not re.search(r"^\s*(assert|close\()", code(text), flags=re.MULTILINE)
    ]
    assert not silent


def code(text: str) -> str:
    return "\n".join(source for _, source in blocks(text))


def test_links_lead_somewhere() -> None:
    anchors = {anchor(heading) for heading in sections()}
    for target in re.findall(
        r"\]\(([^)\s]+)\)", re.sub(r"^```.*?^```", "", TEXT, flags=re.DOTALL | re.MULTILINE)
    ):
        path, _, name = target.partition("#")
        assert (PAGE.parent / path).exists(), target
        assert path or name in anchors, target


def test_the_picture_has_three_maps_of_laws() -> None:
    """Reverse, sort and dates; the weights of each row add up to one, up to how they are rounded."""
    svg = "{http://www.w3.org/2000/svg}"
    root = xml.parse(PAGE.parent / "pictures" / "cross_attention.svg").getroot()
    titles = [text.text or "" for text in root.findall(f".//{svg}text[@class='title']")]
    assert [title.split(",")[0] for title in titles] == ["reverse", "sort", "dates"]
    rows: dict[tuple[int, str], float] = {}
    starts = [float(frame.attrib["x"]) for frame in root.findall(f".//{svg}rect[@class='frame']")]
    for cell in root.findall(f".//{svg}rect[@class='cell']"):
        place = sum(start <= float(cell.attrib["x"]) for start in starts), cell.attrib["y"]
        rows[place] = rows.get(place, 0.0) + float(cell.attrib["fill-opacity"])
    assert len(rows) == 3 * 11
    assert all(abs(total - 1) < 0.012 for total in rows.values())
