"""A release, step by step; it stops at the first step that fails, and publishes nothing.

python -m website.release [--commands all|short]

With --commands also `make audit` and `make test` from the source archive, in an environment that they set up
there; short takes `make test-fast` for the second.

What is left to a person afterwards: set the date in CHANGELOG.md and CITATION.cff, tag, upload dist/.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from collections.abc import Callable
from functools import partial
from pathlib import Path

from website import versions
from website.repository import ROOT

DIST = ROOT / "dist"
TESTS = {"all": "test", "short": "test-fast"}
"""What --commands takes, and the target of the Makefile that it runs."""
SMOKE = (
    "import torch, regard\n"
    "x = torch.randn(1, 2, 8, 4)\n"
    "theirs = torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
    "assert torch.allclose(regard.attend(x, x, x), theirs, atol=1e-5)\n"
    "layer = regard.Attention(regard.Dot())\n"
    "bound = regard.certify(layer, regard.Ball(1.0, tokens=4, width=2), regard.TokenMax())\n"
    "assert 0 < bound.value < 10\n"
    "print(regard.__version__, regard.__file__)\n"
)


def version() -> str:
    """The one place: `__version__` of the package."""
    text = (ROOT / "regard" / "__init__.py").read_text(encoding="utf-8")
    (found,) = re.findall(r'^__version__ = "([^"]+)"$', text, flags=re.MULTILINE)
    return str(found)


def disagreements() -> list[str]:
    """Files that say another version, or nothing of this one."""
    said = {
        "CITATION.cff": rf"^version: {re.escape(version())}$",
        "CHANGELOG.md": rf"^## \[{re.escape(version())}\] - (unreleased|\d{{4}}-\d\d-\d\d)$",
    }
    return [
        f"{name} does not say {version()}"
        for name, pattern in said.items()
        if not re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
    ]


def run(*command: str | Path, cwd: Path = ROOT) -> str:
    """A command; its last words are the error where it fails."""
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True)
    if done.returncode:
        words = (done.stdout + done.stderr)[-3000:]
        sys.exit(f"{' '.join(map(str, command))} ended with {done.returncode}:\n{words}")
    return done.stdout


def agreed() -> str:
    """One version everywhere, and nothing that is not committed."""
    wrong = disagreements() + [
        f"not committed: {line}" for line in run("git", "status", "--short").splitlines()
    ]
    if wrong:
        sys.exit("\n".join(wrong))
    return version()


def built() -> str:
    """The wheel and the source archive, as twine wants them."""
    shutil.rmtree(DIST, ignore_errors=True)
    run(sys.executable, "-m", "hatchling", "build", "-d", DIST, "-t", "wheel", "-t", "sdist")
    run(sys.executable, "-m", "twine", "check", "--strict", *sorted(DIST.iterdir()))
    return ", ".join(path.name for path in sorted(DIST.iterdir()))


def installed() -> str:
    """The wheel in an environment of its own, with what the registry has for it."""
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory() as scratch:
        venv.create(scratch, with_pip=True)
        python = Path(scratch) / "bin" / "python"
        run(python, "-m", "pip", "install", "--quiet", "-c", ROOT / "constraints.txt", f"{wheel}[cli]")
        said = run(python, "-W", "error::UserWarning:regard", "-c", SMOKE, cwd=Path(scratch))
        run(Path(scratch) / "bin" / "regard", "--version", cwd=Path(scratch))
    return said.strip()


def commands(tests: str) -> str:
    """The two commands, from the source archive as somebody would unpack it."""
    (archive,) = DIST.glob("*.tar.gz")
    with tempfile.TemporaryDirectory() as scratch:
        with tarfile.open(archive) as packed:
            packed.extractall(scratch, filter="data")
        (folder,) = Path(scratch).iterdir()
        run("make", "--no-print-directory", "audit", cwd=folder)
        said = run("make", "--no-print-directory", tests, cwd=folder)
        if not (folder / "audit-all-MiniLM-L6-v2" / "report.html").is_file():
            sys.exit("make audit ended well and wrote no audit-all-MiniLM-L6-v2/report.html")
    return f"make audit wrote its report; make {tests}: {said.splitlines()[-1].strip(' =')}"


def documented() -> str:
    """The site, kept under its version."""
    run("make", "docs")
    return str(versions.keep(ROOT / "site", version()).relative_to(ROOT))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m website.release", description=__doc__)
    parser.add_argument("--commands", choices=TESTS, help="both commands from the source archive, too")
    asked = parser.parse_args()
    steps: list[Callable[[], str]] = [
        agreed,
        built,
        installed,
        *([partial(commands, TESTS[asked.commands])] if asked.commands else []),
        documented,
    ]
    for step in steps:
        name = step.func.__name__ if isinstance(step, partial) else step.__name__
        print(f"{name}: {step()}", flush=True)
    print("ready: date CHANGELOG.md and CITATION.cff, tag, upload dist/")


if __name__ == "__main__":
    main()
