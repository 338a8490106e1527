"""cite: the sources a certificate rests on, as BibTeX."""

from __future__ import annotations

import re
from importlib import resources

from regard._kinds import names_wrong_kinds
from regard.certificate import Certificate
from regard.errors import ArgumentError


@names_wrong_kinds
def cite(certificate: Certificate) -> str:
    """The BibTeX entries of every source in the tree of a certificate, in the order of the bibliography.

    Empty where all proofs are this package's own. Bounds on the ladder that were not used are not cited.

    Examples:
        >>> layer = regard.Attention(regard.Dot(torch.eye(2), torch.eye(2)))
        >>> bound = regard.certify(layer, regard.Whole(tokens=3), regard.Frobenius())
        >>> print(regard.cite(bound).splitlines()[0])
        @inproceedings{kim2021,
    """
    if not isinstance(certificate, Certificate):
        raise ArgumentError(
            "certificate", f"is a {type(certificate).__name__}", "give what certify or deviation returned"
        )
    wanted = _keys(certificate)
    return "\n\n".join(entry for key, entry in bibliography().items() if key in wanted)


def bibliography() -> dict[str, str]:
    """Every entry of the package's references by its key."""
    text = resources.files("regard").joinpath("references.bib").read_text(encoding="utf-8")
    entries = re.split(r"\n(?=@)", text)
    return {found[1]: entry.strip() for entry in entries if (found := re.match(r"\s*@\w+\{(\w+),", entry))}


def _keys(certificate: Certificate) -> set[str]:
    """The keys in (key, place) or (key; other) of a theorem, and of all theorems below it."""
    written = " ".join(re.findall(r"\(([^()]*)\)", certificate.theorem))
    return set(re.findall(r"\b[a-z]+\d{4}[a-z]*\b", written)).union(
        *(_keys(part) for part in certificate.parts)
    )
