"""The pictures of docs/gallery.md: runs the commands of that page and photographs their pages in headless
Chromium; the first of them also becomes the animation of docs/particles.md.

python docs/make_gallery.py [NAME ...]   only these
"""

from __future__ import annotations

import base64
import json
import shlex
import subprocess
import sys
import tempfile
from array import array
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
from make_screenshots import PICTURES, ROOT, browser

COMMANDS = {
    "circle": ("regard simulate --beta 4 --particles 300", 19),
    "sphere": ("regard simulate --beta 9 --dimension 3 --particles 400", 22),
    "metastable": ("regard simulate --beta 6 --particles 32 --until 300 --step 0.25 --frames 100", 30),
    "million": ("regard simulate --beta 4 --dimension 2 --particles 1000000 --step 0.4 --frames 50", 29),
    "layers": ('regard flow --text "$(head -c 700 examples/data/paradise_lost.txt)"', 16),
    "phase": ("regard simulate --phase gamma", 0),
}
"""What is typed, and the frame that is photographed."""
SIZES = {"phase": (1280, 1150), "layers": (1280, 1250)}
SECONDS = 12
"""How long the animation takes."""
DOTS = 120
"""Particles that it shows."""


def main() -> None:
    wanted = sys.argv[1:] or list(COMMANDS)
    with tempfile.TemporaryDirectory() as scratch:
        for name in wanted:
            directory = Path(scratch) / name
            command, frame = COMMANDS[name]
            print(f"$ {command}", flush=True)
            run(command, directory)
            photograph(
                directory / "flow.html", frame, PICTURES / f"flow-{name}.png", SIZES.get(name, (1280, 1120))
            )
            if name == "circle":
                report = json.loads((directory / "flow.json").read_text(encoding="utf-8"))
                (PICTURES / "flow-circle.svg").write_text(animated(report), encoding="utf-8")


def run(command: str, directory: Path) -> None:
    """A command as the page has it, with this regard, into a directory."""
    here = f"{shlex.quote(sys.executable)} -m {command} --out {shlex.quote(str(directory))}"
    subprocess.run(here, shell=True, check=True, cwd=ROOT)


def photograph(page: Path, frame: int, picture: Path, size: tuple[int, int]) -> None:
    """One frame of a page, at rest."""
    options = [
        "--headless=new",
        "--no-sandbox",
        "--hide-scrollbars",
        "--virtual-time-budget=3000",
        f"--window-size={size[0]},{size[1]}",
        f"--screenshot={picture}",
    ]
    fragment = f"#at-{frame}" if frame else ""
    subprocess.run([browser(), *options, page.resolve().as_uri() + fragment], check=True, capture_output=True)
    print(picture)


def animated(report: dict[str, Any]) -> str:
    """Particles on the circle as a picture that moves by itself and runs no script."""
    frames = [_points(report["panels"][0], frame) for frame in report["panels"][0]["frames"]]
    count = len(frames[0])
    dots = [
        "<circle r='3'>"
        + "".join(
            f"<animate attributeName='{name}' dur='{SECONDS}s' repeatCount='indefinite' values='"
            + ";".join(f"{frame[i][axis]:.1f}" for frame in frames)
            + "'/>"
            for axis, name in enumerate(("cx", "cy"))
        )
        + "</circle>"
        for i in range(0, count, -(-count // DOTS))
    ]
    ring = "<circle r='80' fill='none' stroke='#999' stroke-width='.75'/>"
    title = f"<title>{count} particles on the circle under self-attention</title>"
    inside = "".join(dots)
    return (
        "<svg xmlns='http://www.w3.org/2000/svg' viewBox='-100 -100 200 200' width='360' height='360' "
        "role='img'>"
        f"{title}{ring}<g fill='#c2500f' fill-opacity='.65'>{inside}</g></svg>\n"
    )


def _points(panel: dict[str, Any], frame: str) -> list[tuple[float, float]]:
    numbers = array("h", base64.b64decode(frame))
    wide = panel["width"]
    return [(80 * numbers[i] / 32767, -80 * numbers[i + 1] / 32767) for i in range(0, len(numbers), wide)]


if __name__ == "__main__":
    main()
