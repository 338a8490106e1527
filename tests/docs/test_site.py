"""The site that `make docs` built, in a browser and from disk: console, formulas, search, dark, phone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.audits.browser import Browser, Page, browser, executable
from tests.docs.test_snippets import ROOT

SITE = ROOT / "site"
PAGES = sorted(page.stem for page in (ROOT / "docs").glob("*.md"))
NARROW = [
    "index",
    "certificates",
    "recipes",
    "transformer",
    "gallery",
    "theorems/energy",
    "reference/potentials",
]
WIDTH = 390
"""Of a phone."""


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """A browser, where there is one and a site that is not older than its pages."""
    path = executable()
    if path is None:
        pytest.skip("no Chromium is installed; set CHROMIUM to its path")
    built = SITE / "sitemap.xml"
    if not built.exists():
        pytest.skip("no site was built: run make docs")
    newest = max(
        page.stat().st_mtime for page in (*(ROOT / "docs").rglob("*.md"), *(ROOT / "website").glob("*/*"))
    )
    if built.stat().st_mtime < newest:
        pytest.skip("the site is older than its pages: run make docs")
    with browser(path) as running:
        yield running


@pytest.fixture
def opened(chromium: Browser) -> Iterator[Callable[..., Page]]:
    """Opens a page of the site; afterwards nothing may have complained or come from elsewhere."""
    pages: list[Page] = []

    def open_page(name: str, **options: object) -> Page:
        pages.append(chromium.open(SITE / f"{name}.html", **options))  # type: ignore[arg-type]
        return pages[-1]

    yield open_page
    for one in pages:
        assert one.problems == []
        assert not [url for url in one.requests if not url.startswith(("file:", "data:", "blob:", "about:"))]
        one.close()


@pytest.mark.parametrize("name", [*PAGES, "theorems/castin_general", "reference/proofs", "design"])
def test_a_page_opens_without_a_complaint(name: str, opened: Callable[..., Page]) -> None:
    page = opened(name)
    assert page.texts("h1")
    assert page.evaluate("document.fonts.check('16px Inter')")


@pytest.mark.parametrize("name", sorted(page.stem for page in (ROOT / "docs" / "theorems").glob("*.md"))[::6])
def test_every_formula_is_rendered(name: str, opened: Callable[..., Page]) -> None:
    page = opened(f"theorems/{name}")
    formulas = page.evaluate("document.querySelectorAll('.arithmatex').length")
    assert formulas > 0 or name == "index"
    assert page.evaluate("document.querySelectorAll('.arithmatex .katex').length") >= formulas
    assert page.texts(".katex-error") == []
    assert "$" not in page.evaluate("document.querySelector('article').innerText")


def test_search_works_from_disk(opened: Callable[..., Page]) -> None:
    page = opened("index")
    page.evaluate("document.querySelector('[data-md-toggle=search]').click()")
    page.evaluate(
        "(box => {box.focus(); box.value = 'entmax'; box.dispatchEvent(new Event('keyup'));"
        " box.dispatchEvent(new Event('input'))})(document.querySelector('[data-md-component=search-query]'))"
    )
    page.until("document.querySelectorAll('.md-search-result__item').length > 3")
    found = page.evaluate("[...document.querySelectorAll('.md-search-result__link')].map((one) => one.href)")
    assert any("normalizers.html" in link for link in found)
    assert all(link.startswith("file:") for link in found)


def test_light_and_dark(opened: Callable[..., Page]) -> None:
    page = opened("certificates")
    background = "getComputedStyle(document.body).backgroundColor"
    page.evaluate("document.querySelector('#__palette_0').click()")
    page.settle()
    light = page.evaluate(background)
    page.evaluate("document.querySelector('#__palette_1').click()")
    page.until("document.body.dataset.mdColorScheme === 'slate'")
    assert brightness(page.evaluate(background)) < 60 < 200 < brightness(light)
    assert brightness(page.evaluate("getComputedStyle(document.querySelector('article')).color")) > 150
    page.evaluate("document.querySelector('#__palette_0').click()")


def brightness(color: str) -> float:
    """The mean of red, green and blue, as the browser writes them."""
    return sum(float(part) for part in color.partition("(")[2].rstrip(")").split(",")[:3]) / 3


@pytest.mark.parametrize("name", NARROW)
def test_a_phone_needs_no_sideways_scrolling(name: str, opened: Callable[..., Page]) -> None:
    page = opened(name, width=WIDTH)
    page.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= WIDTH


def test_words_explain_themselves(opened: Callable[..., Page]) -> None:
    page = opened("transformer")
    marked = page.texts("article abbr")
    assert marked
    assert len(marked) == len({word.lower() for word in marked})  # once a page


def test_the_report_is_alive(opened: Callable[..., Page]) -> None:
    page = opened("live/audit/report")
    assert page.evaluate("document.body.innerText.includes('all-MiniLM-L6-v2')")
    assert (SITE / "live" / "flow" / "flow.html").is_file()
    assert Path(SITE / "index.html").read_text(encoding="utf-8").count("live/audit/report.html") == 2
