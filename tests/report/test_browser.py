"""The page in a real browser: it draws, stays offline, obeys its switches, and looks as kept in artifacts/."""

import math
import statistics

import pytest

from polarlm.evaluation.metrics import METRICS
from tests.report.browser import ARTIFACTS, CLIPPED, FIGURES, MARKS, WIDTHS, Opened, needs_chromium, traces
from tests.report.test_page import compare
from tests.synthetic_runs import write_sweep

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def page(browser, tmp_path_factory):
    """The report of a sweep, opened once; every test leaves it as it found it."""
    folder = tmp_path_factory.mktemp("sweep")
    write_sweep(folder / "runs", evaluations=True)
    compare(folder / "runs", "--out", folder / "report.html")
    opened = Opened(browser, folder / "report.html")
    opened.page.evaluate("drawAll()")
    yield opened.page
    opened.close()


def test_every_panel_has_marks_in_light_and_dark(page):
    ARTIFACTS.mkdir(exist_ok=True)
    for scheme in ("dark", "light"):
        page.emulate_media(color_scheme=scheme)
        page.wait_for_selector(f"html[data-theme={scheme}]")
        page.evaluate("drawAll()")
        for figure in FIGURES:
            assert page.locator(f"#{figure}").locator(MARKS).count() > 0, figure
            assert page.locator(f"#{figure} figcaption").inner_text().strip()
        page.screenshot(path=ARTIFACTS / f"report-{scheme}.png", full_page=True)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")  # nothing hangs over the side


@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_is_clipped_at_any_width(page, width):
    ARTIFACTS.mkdir(exist_ok=True)
    page.set_viewport_size({"width": width, "height": 900})
    page.evaluate("drawAll()")
    page.wait_for_timeout(300)
    for figure in FIGURES:
        assert page.locator(f"#{figure}").locator(MARKS).count() > 0, figure
    assert page.evaluate(CLIPPED) == []
    page.screenshot(path=ARTIFACTS / f"report-{width}.png", full_page=True)
    page.set_viewport_size({"width": 1440, "height": 900})
    page.evaluate("drawAll()")


def test_seeds_are_averaged_at_equal_time(page):
    """Seeds differ in speed: a mean of their times would hide it; at the slowest seed's times all are read off."""
    before = page.evaluate("JSON.stringify(state)")
    values = page.evaluate("""() => {
        state.axis = "seconds";
        const runs = shownRuns(0), curve = average(runs, "val", (run) => run.val.bits_per_byte);
        const last = Math.min(...runs.map((run) => run.val.seconds.at(-1))), t = curve.x[2];
        const by_hand = mean(runs.map((run) => {
            const i = run.val.seconds.findIndex((s) => s >= t), a = run.val.seconds, y = run.val.bits_per_byte;
            return a[i] === t ? y[i] : y[i - 1] + (y[i] - y[i - 1]) * (t - a[i - 1]) / (a[i] - a[i - 1]);
        }));
        return [curve.x.at(-1), last, curve.mean[2], by_hand];
    }""")
    assert values[0] == values[1]
    assert values[2] == pytest.approx(values[3])
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); drawAll(); }", before)


def test_a_run_that_has_just_begun_does_not_cut_the_mean_of_the_finished_ones_short(page):
    points, whole, seeds = page.evaluate("""() => {
        const runs = shownRuns(0), [first] = runs, read = (run) => run.val.loss;
        const late = { ...first, status: "running", val: { ...first.val, at: first.val.at.slice(0, 1) } };
        const curve = average([late, ...runs.slice(1)], "val", read);
        return [curve.x.length, first.val.at.length, curve.n];
    }""")
    assert points == whole > 1 and seeds == 2


def test_a_perplexity_is_the_exponential_of_the_mean_loss_also_in_its_band(page):
    values = page.evaluate("""() => {
        const loss = average(shownRuns(0), "val", (run) => run.val.loss);
        const perplexity = average(shownRuns(0), "val", (run) => run.val.loss, Math.exp);
        return [perplexity.mean.at(-1), Math.exp(loss.mean.at(-1)), perplexity.low.at(-1), Math.exp(loss.low.at(-1))];
    }""")
    assert values[0] == pytest.approx(values[1])
    assert values[2] == pytest.approx(values[3])


def test_every_metric_of_the_table_has_its_validation_curves(page):
    before = page.evaluate("JSON.stringify(state)")
    menu = page.locator("#bits select.quantity")
    assert menu.locator("option").all_inner_texts() == [metric.title for metric in METRICS]
    for metric in METRICS:
        menu.select_option(metric.name)
        assert f"Validation {metric.title} ends at" in page.locator("#bits figcaption").inner_text()
        assert metric.description in page.locator("#bits figcaption").inner_text()
        drawn = page.evaluate("document.querySelector('#bits .plot').data.at(-1).y.at(-1)")
        ends = page.evaluate(f"shownRuns(DATA.groups.length - 1).map((run) => run.val.{metric.name}.at(-1))")
        logs = math.exp(statistics.mean(map(math.log, ends)))
        assert drawn == pytest.approx(logs if metric.is_log else statistics.mean(ends), rel=1e-4)
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); drawAll(); }", before)


@pytest.mark.parametrize(("figure", "name"), [("training", "training loss"), ("gradient", "gradient norm")])
def test_a_title_says_that_the_number_it_names_is_smoothed(page, figure, name):
    before = page.evaluate("JSON.stringify(state)")
    caption = page.locator(f"#{figure} figcaption")
    for smoothing, words in ((0.6, f"Smoothed {name} ends at"), (0, f"{name.capitalize()} ends at")):
        page.evaluate("(smoothing) => { state.smoothing = smoothing; drawAll(); }", smoothing)
        assert caption.inner_text().startswith(words)
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); drawAll(); }", before)


def test_a_long_menu_can_be_searched(page):
    before = page.evaluate("JSON.stringify(state)")
    find = page.locator("#trajectory input.find")
    find.fill("resultant")
    shown = page.evaluate("[...$('#trajectory select.quantity').options].filter((o) => !o.hidden).map((o) => o.value)")
    assert shown == ["radial/resultant_length"]
    assert "Mean resultant length" in page.locator("#trajectory figcaption").inner_text()
    find.fill("nothing of this name")
    assert "none" in find.get_attribute("class")
    find.fill("")
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); drawAll(); }", before)


def test_maps_that_are_compared_within_a_block_have_a_scale_each(page):
    scales = page.evaluate("document.querySelector('#heat .plot').data.map((t) => [t.zmin, t.zmax, t.coloraxis])")
    assert len({tuple(scale[:2]) for scale in scales}) == len(scales)
    assert all(scale[2] is None for scale in scales)


def test_simple_predictors_are_drawn_or_named(page):
    assert "bigram 2.37" in page.locator("#bits .plot").text_content()


def test_toggling_a_run_hides_its_curves_and_a_group_its_panels(page):
    run = page.evaluate("DATA.runs.find((r) => r.name === 'polar-seed1').href")
    for figure in ("bits", "perplexity", "training"):
        assert traces(page, figure, f"t.meta.run === '{run}'") == 1
    page.locator("#groups details", has_text="polar").locator("summary .label").click()
    page.locator(f'#groups input[data-run="{run}"]').uncheck()
    page.evaluate("drawAll()")
    for figure in ("bits", "perplexity", "training"):
        assert traces(page, figure, f"t.meta.run === '{run}'") == 0
        assert traces(page, figure, "t.meta.group === 2 && t.meta.run") == 2
    page.locator('#groups input[data-group="2"]').click()  # partly shown: a click hides the rest
    page.evaluate("drawAll()")
    for figure in FIGURES:
        assert traces(page, figure, "t.meta.group === 2") == 0, figure
    page.locator("#show-none").click()
    page.evaluate("drawAll()")
    assert "Nothing to show" in page.locator("#bits figcaption").inner_text()
    page.locator("#show-all").click()
    page.evaluate("drawAll()")
    assert traces(page, "bits", f"t.meta.run === '{run}'") == 1


def test_axes_bands_smoothing_and_quantities_change_what_is_drawn(page):
    before = page.evaluate("JSON.stringify(state)")
    plot = "document.querySelector('#training .plot')"
    first = page.evaluate(f"{plot}.data.at(-1).y")
    page.locator("#axis button", has_text="FLOPs").click()
    page.locator("#log-x").check()
    page.locator("#log-y").check()
    page.locator("#band").select_option("none")
    page.locator("#each").uncheck()
    page.evaluate("(value) => { const s = $('#smoothing'); s.value = value; s.oninput(); }", 0)
    page.evaluate("drawAll()")
    layout = page.evaluate(f"({{x: {plot}.layout.xaxis, y: {plot}.layout.yaxis}})")
    assert (layout["x"]["type"], layout["y"]["type"]) == ("log", "log")
    assert layout["x"]["title"]["text"] == "training FLOPs"
    assert traces(page, "training") == 3
    assert page.evaluate(f"{plot}.data.at(-1).y") != first
    page.locator("#heat select").select_option("attention/entropy")
    assert "Attention entropy" in page.locator("#heat figcaption").inner_text()
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); syncToolbar(); drawAll(); }", before)


def test_hover_names_what_is_under_the_mouse(page):
    page.evaluate("render('throughput')")
    page.locator("#throughput .plot").scroll_into_view_if_needed()
    box = page.locator("#throughput .plot .barlayer path").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 3, box["y"] + box["height"] / 2)
    page.wait_for_selector("#throughput .hoverlayer text")
    assert "tokens/s" in page.locator("#throughput .hoverlayer").text_content()


def test_printing_is_light_and_fits_the_paper(page):
    page.emulate_media(color_scheme="dark")
    page.wait_for_selector("html[data-theme=dark]")
    page.evaluate("dispatchEvent(new Event('beforeprint'))")
    assert page.locator("html").get_attribute("data-theme") == "light"
    edges = page.evaluate(
        "[...document.querySelectorAll('.plot .main-svg')].map((s) => s.getBoundingClientRect().right)"
    )
    assert max(edges) <= 690  # A4 without margins at 96 dpi
    page.evaluate("dispatchEvent(new Event('afterprint'))")
    assert page.locator("html").get_attribute("data-theme") == "dark"
    assert page.pdf()[:4] == b"%PDF"
    page.emulate_media(color_scheme="light")
    page.wait_for_selector("html[data-theme=light]")
