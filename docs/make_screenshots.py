"""The pictures of docs/audit.md: audits the demonstration model and photographs the report in headless
Chromium.

python docs/make_screenshots.py [REPORT_DIRECTORY]   uses that report in place of a new audit
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PICTURES = ROOT / "docs" / "pictures"
SHOTS = {"report.png": ("", 1280, 1000), "report-head.png": ("#head-4-2", 1280, 1000)}


def browser() -> str:
    """Where Chromium is."""
    found = next(
        (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))),
        None,
    )
    if found is None:
        sys.exit("no Chromium found: install chromium to make the pictures")
    return found


def main() -> None:
    with tempfile.TemporaryDirectory() as scratch:
        directory = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(scratch)
        if len(sys.argv) == 1:
            subprocess.run(
                [sys.executable, "-m", "regard", "audit", "--out", str(directory)], check=True, cwd=ROOT
            )
        for name, (fragment, wide, high) in SHOTS.items():
            page = (directory / "report.html").resolve().as_uri() + fragment
            options = [
                "--headless=new",
                "--no-sandbox",
                "--hide-scrollbars",
                "--virtual-time-budget=3000",
                f"--window-size={wide},{high}",
            ]
            subprocess.run(
                [browser(), *options, f"--screenshot={PICTURES / name}", page],
                check=True,
                capture_output=True,
            )
            print(PICTURES / name)


if __name__ == "__main__":
    main()
