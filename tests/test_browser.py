"""The report of results/ in a real headless browser: every figure is drawn, and every cell is its row's.

`make test-browser` installs what drives the browser and fails without one; elsewhere these tests are then skipped.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.report_rig import RESULTS, cell_is_right

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
PAGE = RESULTS / "report.html"


def without(what: str, hint: str) -> NoReturn:
    text = f"{what}: {hint}"
    pytest.fail(text) if os.environ.get("BROWSER") == "1" else pytest.skip(text)


@pytest.fixture(scope="module")
def page() -> Iterator[Any]:
    """The page, opened without a network; what it asked for and what it complained of are in `asked` and `said`."""
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        without("playwright is not installed", "make test-browser")
    with sync_playwright() as driver:
        own = driver.chromium.executable_path  # what `playwright install` fetched
        found = [os.environ.get("CHROMIUM"), *map(shutil.which, NAMES), own if Path(own).exists() else None]
        path = next((path for path in found if path), None)
        if path is None:
            without("no Chromium", "apt-get install chromium-headless-shell, or CHROMIUM=<path of one>")
        browser = driver.chromium.launch(executable_path=path)
        opened = browser.new_context(viewport={"width": 1200, "height": 900}, offline=True).new_page()
        opened.asked, opened.said = [], []
        opened.on("request", lambda request: opened.asked.append(request.url))
        opened.on("console", lambda message: opened.said.append(message.text))
        opened.on("pageerror", lambda error: opened.said.append(str(error)))
        opened.goto(PAGE.as_uri())
        yield opened
        browser.close()


def test_it_asks_for_nothing_and_complains_of_nothing(page: Any) -> None:
    assert [url for url in page.asked if not url.startswith("data:")] == [PAGE.as_uri()]
    assert page.said == []


def test_every_figure_is_drawn(page: Any) -> None:
    figures = page.locator("figure").all()
    names = [figure.get_attribute("id") for figure in figures]
    assert sorted(names) == sorted(path.stem for path in (RESULTS / "figures").glob("*.svg")) and len(names) >= 8
    for name, figure in zip(names, figures, strict=True):
        box = figure.locator("svg").bounding_box()
        assert box["width"] > 300 and box["height"] > 80 and box["x"] + box["width"] <= 1200, (name, box)
        empty = figure.locator("svg").evaluate(
            """svg => {
                const frame = svg.getBoundingClientRect(), texts = [...svg.querySelectorAll("text")]
                const outside = texts.filter(text => {
                    const box = text.getBoundingClientRect()
                    return !box.width || box.left < frame.left - 1 || box.right > frame.right + 1
                        || box.top < frame.top - 1 || box.bottom > frame.bottom + 1
                }).map(text => text.textContent)
                return {outside, texts: texts.length, paths: svg.querySelectorAll("path").length}
            }"""
        )
        assert empty["outside"] == [] and empty["texts"] > 5 and empty["paths"] > 10, (name, empty)


def test_every_cell_is_its_rows(page: Any) -> None:
    cells = page.locator("table.rows").evaluate_all(
        """tables => tables.flatMap(table => [...table.querySelectorAll("td[data-field]")].map(cell => [
            cell.parentElement.dataset.row, cell.dataset.field, Number(cell.dataset.unit), cell.innerText]))"""
    )
    assert len(cells) > 1000
    assert [cell for cell in cells if not cell_is_right(*cell)] == []


def test_every_link_leads_somewhere(page: Any) -> None:
    targets = page.locator("a").evaluate_all("links => links.map(link => link.getAttribute('href'))")
    assert targets and all(page.locator(target).count() == 1 for target in targets)
