"""The wheel and the source archive: what is in them, and that the wheel installs and runs."""

import os
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")
ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    directory = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "hatchling", "build", "-d", str(directory), "-t", "wheel", "-t", "sdist"]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    return directory


def test_the_wheel_installs_and_runs(built, tmp_path):
    (wheel,) = built.glob("*.whl")
    install = ["-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)]
    subprocess.run([sys.executable, *install], check=True, capture_output=True)
    clean = {**os.environ, "PYTHONPATH": str(tmp_path)}
    program = (
        "import regard, torch; x = torch.zeros(1, 1, 4, 16)\n"
        "print(regard.attend(x, x, x).shape, regard.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=clean, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert f"torch.Size([1, 1, 4, 16]) {tmp_path}" in done.stdout


def test_the_wheel_has_the_package_and_says_what_it_is(built):
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (metadata,) = [name for name in names if name.endswith("METADATA")]
        said = archive.read(metadata).decode()
    tracked = [
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / "regard").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    ]
    assert set(tracked) <= names
    assert not [name for name in names if name.startswith(("tests", "docs", "benchmarks"))]
    for line in (
        "Requires-Python: >=3.10",
        "Author: regard contributors",
        "License-Expression",
    ):
        assert line in said, line
    for version in ("3.10", "3.11", "3.12", "3.13"):
        assert f"Classifier: Programming Language :: Python :: {version}\n" in said


def test_both_commands_work_from_the_source_archive(built):
    (path,) = built.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    needed = {
        "Makefile",
        "constraints.txt",
        "pyproject.toml",
        "README.md",
        ".ci/run",
        "CITATION.cff",
        "SECURITY.md",
    }
    assert needed <= names
    assert {"tests/conftest.py", "tests/slow.txt", "docs/index.md", "benchmarks/measure.py"} <= names
    assert ".github/workflows/test.yml" in names
