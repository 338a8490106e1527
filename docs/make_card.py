"""The card that a shared link shows: docs/pictures/card.png, drawn by headless Chromium.

python docs/make_card.py
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from make_screenshots import PICTURES, browser

PAGE = """<!doctype html><meta charset="utf-8"><style>
body { margin: 0; width: 1200px; height: 630px; background: #fffdfa; color: #2a211b; position: relative;
  font-family: Inter, sans-serif; }
h1 { position: absolute; left: 70px; top: 120px; width: 640px; margin: 0;
  font-size: 66px; line-height: 1.1; letter-spacing: -2px; }
p { position: absolute; left: 72px; top: 455px; width: 600px; margin: 0;
  font-size: 28px; line-height: 1.4; color: #6b5d52; }
b { color: #c2500f; } svg { position: absolute; right: 50px; top: 95px; width: 440px; height: 440px; }
</style><h1>How stable is your transformer, and can you prove it?</h1>
<p><b>regard</b>: the mathematics of attention as working software, in PyTorch</p>"""
SECONDS = 4000
"""Of the animation, in thousandths: where clusters can be seen to form."""


def main() -> None:
    picture = (PICTURES / "flow-circle.svg").read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as scratch:
        page = Path(scratch) / "card.html"
        page.write_text(PAGE + picture, encoding="utf-8")
        options = ["--headless=new", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,630"]
        shot = [f"--virtual-time-budget={SECONDS}", f"--screenshot={PICTURES / 'card.png'}"]
        subprocess.run([browser(), *options, *shot, page.as_uri()], check=True, capture_output=True)
    print(PICTURES / "card.png")


if __name__ == "__main__":
    main()
