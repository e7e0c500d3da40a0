"""What the tests with a real browser share: the browser, an opened page, what counts as drawn and as cut off."""

import shutil
from pathlib import Path

import pytest

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
FIGURES = ("forest", "bits", "perplexity", "training", "gradient", "rate", "record-0", "record-1", "record-2")
FIGURES += ("depth", "growth", "heat", "lag", "trajectory", "throughput", "value")
WIDTHS = (1400, 800, 390)  # a screen, half of one, a phone
# Drawn elements of a plot: lines, bars and points, heat-map images.
MARKS = ".scatterlayer path, .barlayer path, .heatmaplayer image, .heatmaplayer path"

# Words cut off at the edge of their plot, captions on plots, anything wider than the screen, words broken inside.
CLIPPED = """() => {
    const problems = [];
    if (document.documentElement.scrollWidth > innerWidth) problems.push("the page is wider than the screen");
    for (const text of document.querySelectorAll(".plot text")) {
        const box = text.closest("svg").getBoundingClientRect(), at = text.getBoundingClientRect();
        if (text.closest(".hoverlayer") || at.width === 0) continue;
        if (at.left < box.left - 1 || at.right > box.right + 1 || at.top < box.top - 1 || at.bottom > box.bottom + 1)
            problems.push(text.closest("figure").id + ": " + text.textContent);
    }
    const scrolls = (e) => e && (/auto|scroll/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
    for (const e of document.querySelectorAll("main :is(h1, p, figcaption, td, th, li, select)")) {
        const at = e.getBoundingClientRect(), outside = at.right > innerWidth + 1 || at.left < -1;
        if (at.width && outside && !scrolls(e)) problems.push(e.tagName + ": " + e.textContent.slice(0, 60));
    }
    for (const caption of document.querySelectorAll("figure:not([hidden]) figcaption")) {
        const figure = caption.parentElement, words = document.createRange();
        words.selectNodeContents(caption);
        const end = words.getBoundingClientRect().bottom;
        if (end > figure.querySelector(".plot").getBoundingClientRect().top + 1)
            problems.push(figure.id + ": the caption lies on the plot");
    }
    for (const table of document.querySelectorAll("#verdict .scroll")) {
        if (table.scrollWidth > table.clientWidth + 1) problems.push("the final table has to be scrolled");
    }
    return problems;
}"""

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


class Opened:
    """A report in a browser; `close` checks that the console was silent and nothing but the file was asked for."""

    def __init__(self, browser, path):
        self.path, self.heard, self.asked = path, [], []
        self.context = browser.new_context(viewport={"width": 1440, "height": 900}, color_scheme="light")
        self.context.set_default_timeout(120_000)  # the machine may be busy with other tests
        self.page = page = self.context.new_page()
        page.on("console", lambda message: self.heard.append(message.text))
        page.on("pageerror", lambda error: self.heard.append(str(error)))
        page.on("dialog", lambda dialog: (self.heard.append(dialog.message), dialog.dismiss()))
        page.on("request", lambda request: self.asked.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")

    def close(self):
        self.context.close()
        assert self.heard == []
        assert set(self.asked) == {self.path.as_uri()}


def traces(page, figure, condition="true"):
    return page.evaluate(f"document.querySelector('#{figure} .plot').data.filter((t) => {condition}).length")
