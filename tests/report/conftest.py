"""A browser for the tests that look at pages, started once."""

import pytest

from tests.report.browser import CHROMIUM, Opened


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    opened = []

    def open_(path):
        opened.append(Opened(browser, path))
        return opened[-1].page

    yield open_
    for one in opened:
        one.close()
