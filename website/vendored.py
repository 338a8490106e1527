"""What pages need at view time: formulas, fonts, search without a server. It is kept in website/from_npm.

python -m website.vendored   fetches all of it again with npm, by checksum, after a version was changed
"""

from __future__ import annotations

import base64
import hashlib
import io
import shutil
import subprocess
import sys
import tarfile
import tempfile
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

KEPT = Path(__file__).resolve().parent / "from_npm"
SUMS = KEPT / "sums.txt"
PATIENCE = 240
"""Seconds that npm has for one package; it tries again by itself."""


@dataclass(frozen=True)
class Archive:
    """A package of npm, the sum that npm publishes for it, and where its files go in the site."""

    name: str
    version: str
    sha512: str
    files: dict[str, str]

    @property
    def release(self) -> str:
        """The package and its version, as npm names them."""
        return f"{self.name}@{self.version}"

    def read(self) -> bytes:
        """Return the archive; a wrong sum is an error."""
        data = self._fetch()
        found = base64.b64encode(hashlib.sha512(data).digest()).decode()
        if found != self.sha512:
            raise ValueError(f"{self.release}: its sha512 is {found}, not {self.sha512}")
        return data

    def _fetch(self) -> bytes:
        """Download the archive with npm, which knows its registry."""
        with tempfile.TemporaryDirectory() as folder:
            command = ["npm", "pack", self.release, "--silent", "--pack-destination", folder]
            try:
                subprocess.run(command, check=True, capture_output=True, timeout=PATIENCE)
                (archive,) = Path(folder).glob("*.tgz")
            except (OSError, subprocess.SubprocessError, ValueError) as error:
                raise OSError(
                    f"{self.release} could not be fetched ({error}); nothing was changed"
                ) from error
            return archive.read_bytes()

    def contents(self) -> dict[str, bytes]:
        """Files of the site by their path, with the license."""
        found = {}
        wanted = {**self.files, "LICENSE": f"assets/licenses/{self.name.rpartition('/')[2]}.txt"}
        with tarfile.open(fileobj=io.BytesIO(self.read())) as archive:
            for member in archive:
                path = member.name.removeprefix("package/")
                goal = next((goal for pattern, goal in wanted.items() if fnmatch(path, pattern)), None)
                stream = archive.extractfile(member) if goal else None
                if goal and stream:
                    name = PurePosixPath(path).name if goal.endswith("/") else ""
                    found[goal + name] = stream.read()
        return found


ARCHIVES = (
    Archive(
        "katex",
        "0.19.1",
        "jG8uKntjSEcm2EpQOh0XturpPuuC9r3Sq5HLHdsFdWZT27E672SF19QEi+of0/YeOy15lDgRhKvr5614uRrEfA==",
        {
            "dist/katex.min.js": "assets/katex/",
            "dist/katex.min.css": "assets/katex/",
            "dist/fonts/*.woff2": "assets/katex/fonts/",
        },
    ),
    Archive(
        "iframe-worker",
        "1.0.4",
        "roeaaI+Lg1LJNfgpCjoRe/+WzEjy9+Z08LoEvu85MCPbBjwm+qXz8Ag5U05lHa6V1CysZyGzE0SOkAtSUA5q7Q==",
        {"shim/index.js": "assets/iframe-worker.js"},
    ),
    Archive(
        "@fontsource-variable/inter",
        "5.3.0",
        "OupL48va4JNofb97w6NYeF9S7W/kHNKM0Er8Dem5nqi4jeOLrVJDoE8tZEpnMJmtkvNbB1EIPPwHcdkF6b1oUA==",
        {f"files/inter-{letters}-wght-*.woff2": "assets/fonts/" for letters in ("latin", "greek")},
    ),
    Archive(
        "@fontsource-variable/jetbrains-mono",
        "5.3.0",
        "F32xpS2NsGYoQi2ADSkKTgpJj7ozajsGgDJ8woTnqjmIB+dxDIqImjl4pXZVEExu8UFZ2ndhmX18EBS/hdz3Lw==",
        {
            f"files/jetbrains-mono-{letters}-wght-normal.woff2": "assets/fonts/"
            for letters in ("latin", "greek")
        },
    ),
)


def files() -> dict[str, bytes]:
    """All of them, by their path in the site; one that was changed by hand is an error."""
    sums = dict(line.split("  ")[::-1] for line in SUMS.read_text(encoding="utf-8").splitlines())
    found = {name: (KEPT / name).read_bytes() for name in sums}
    wrong = [name for name, data in found.items() if hashlib.sha256(data).hexdigest() != sums[name]]
    if wrong:
        raise ValueError(f"{KEPT.name}: changed by hand: {', '.join(wrong)}; python -m website.vendored")
    return found


def main() -> None:
    """Fetch all of them again, or nothing."""
    try:
        asked = [archive.contents() for archive in ARCHIVES]
    except (OSError, ValueError) as error:
        sys.exit(str(error))
    shutil.rmtree(KEPT, ignore_errors=True)
    found = {name: data for one in asked for name, data in sorted(one.items())}
    for name, data in found.items():
        (KEPT / name).parent.mkdir(parents=True, exist_ok=True)
        (KEPT / name).write_bytes(data)
    lines = [f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in found.items()]
    SUMS.write_text("".join(lines), encoding="utf-8")
    print(f"{len(found)} files, {sum(map(len, found.values())):,} bytes in {KEPT}")


if __name__ == "__main__":
    main()
