"""What pages need at view time, from the npm registry, by checksum: formulas, fonts, search without a server.

Archives are kept in .venv/vendored, so that a second build asks nobody.
"""

from __future__ import annotations

import base64
import hashlib
import io
import tarfile
import urllib.request
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path, PurePosixPath

KEPT = Path(__file__).resolve().parents[1] / ".venv" / "vendored"
REGISTRY = "https://registry.npmjs.org"
PATIENCE = 60


@dataclass(frozen=True)
class Archive:
    """A package of the registry, the sum that npm publishes for it, and where its files go in the site."""

    name: str
    version: str
    sha512: str
    files: dict[str, str]

    @property
    def url(self) -> str:
        short = self.name.rpartition("/")[2]
        return f"{REGISTRY}/{self.name}/-/{short}-{self.version}.tgz"

    def read(self) -> bytes:
        """The archive, from where it was kept or from the registry; a wrong sum is an error."""
        kept = KEPT / f"{self.name.replace('/', '+')}-{self.version}.tgz"
        data = kept.read_bytes() if kept.exists() else self._asked()
        found = base64.b64encode(hashlib.sha512(data).digest()).decode()
        if found != self.sha512:
            raise ValueError(
                f"{self.url}: its sha512 is {found}, not {self.sha512}; delete {kept} if it is there"
            )
        if not kept.exists():
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_bytes(data)
        return data

    def _asked(self) -> bytes:
        with urllib.request.urlopen(self.url, timeout=PATIENCE) as answer:
            data: bytes = answer.read()
        return data

    def contents(self) -> dict[str, bytes]:
        """Files of the site by their path."""
        found = {}
        with tarfile.open(fileobj=io.BytesIO(self.read())) as archive:
            for member in archive:
                path = member.name.removeprefix("package/")
                goal = next((goal for pattern, goal in self.files.items() if fnmatch(path, pattern)), None)
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
    """All of them."""
    return {path: data for archive in ARCHIVES for path, data in archive.contents().items()}
