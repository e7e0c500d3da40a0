"""The page in a real browser: it draws, stays offline, obeys its switches, and looks as kept in artifacts/."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_page import compare

from polarlm.attention import PolarAttention, RobustFilterAttention, StandardAttention
from polarlm.diagnostics import run_probe
from polarlm.model import GPT, GPTConfig
from tests.synthetic_runs import write_run, write_sweep

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
ARTIFACTS = Path(__file__).resolve().parents[2] / "artifacts"
FIGURES = ("forest", "bits", "perplexity", "training", "gradient", "rate", "record-0", "record-1")
FIGURES += ("depth", "growth", "heat", "lag", "trajectory", "throughput", "value")
WIDTHS = (1400, 800, 390)  # a screen, half of one, a phone
# Drawn elements of a plot: lines, bars and points, heat-map images.
MARKS = ".scatterlayer path, .barlayer path, .heatmaplayer image, .heatmaplayer path"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api")
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


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


@pytest.fixture
def open_page(browser):
    opened = []

    def open_(path):
        opened.append(Opened(browser, path))
        return opened[-1].page

    yield open_
    for one in opened:
        one.close()


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


def traces(page, figure, condition="true"):
    return page.evaluate(f"document.querySelector('#{figure} .plot').data.filter((t) => {condition}).length")


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


# Words cut off at the edge of their plot, anything wider than the screen, and words broken in their middle.
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
    return problems;
}"""


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


def test_a_varied_number_has_a_response_curve_and_a_ladder_a_waterfall(tmp_path, open_page):
    for nu in (1.0, 4.0, 30.0, 1000.0):
        for seed in (1, 2):
            changes = {"block.nu_t": nu}
            write_run(tmp_path / "nu" / f"{nu}-{seed}", "polar", seed, diagnostics=False, changes=changes)
    rungs = {"polar_a": ("exponential", "none"), "polar_b": ("student", "none"), "polar": ("student", "evidence")}
    for block, (kernel, projection) in rungs.items():
        changes = {"block.kernel": kernel, "block.projection": projection, "block._target_": "p"}
        for seed in (1, 2, 3):
            write_run(tmp_path / "ladder" / f"{block}{seed}", block, seed, diagnostics=False, changes=changes)
    for name, figure, other in (("nu", "response", "waterfall"), ("ladder", "waterfall", "response")):
        compare(tmp_path / name, "--out", tmp_path / f"{name}.html")
        page = open_page(tmp_path / f"{name}.html")
        for width in WIDTHS:
            page.set_viewport_size({"width": width, "height": 900})
            page.evaluate("drawAll()")
            page.wait_for_timeout(200)
            assert page.locator(f"#{figure}").locator(MARKS).count() > 0
            assert page.locator(f"#{other}").is_hidden()
            assert page.evaluate(CLIPPED) == []
        page.screenshot(path=ARTIFACTS / f"report-{name}.png", full_page=True)
    layout = "document.querySelector('#response .plot').layout.xaxis"
    page = open_page(tmp_path / "nu.html")
    page.evaluate("drawAll()")
    assert page.evaluate(f"[{layout}.type, {layout}.ticktext.join()]") == ["log", "1,4,30,1000"]


def test_seeds_are_averaged_at_equal_time(page):
    """Seeds differ in speed: a mean of their times would hide it; at the slowest seed's times all are read off."""
    before = page.evaluate("JSON.stringify(state)")
    values = page.evaluate("""() => {
        state.axis = "seconds";
        const runs = shownRuns(0), curve = average(runs, "val", (run) => run.val.bpb);
        const last = Math.min(...runs.map((run) => run.val.seconds.at(-1))), t = curve.x[2];
        const by_hand = mean(runs.map((run) => {
            const i = run.val.seconds.findIndex((s) => s >= t), a = run.val.seconds, y = run.val.bpb;
            return a[i] === t ? y[i] : y[i - 1] + (y[i] - y[i - 1]) * (t - a[i - 1]) / (a[i] - a[i - 1]);
        }));
        return [curve.x.at(-1), last, curve.mean[2], by_hand];
    }""")
    assert values[0] == values[1]
    assert values[2] == pytest.approx(values[3])
    page.evaluate("(before) => { Object.assign(state, JSON.parse(before)); drawAll(); }", before)


def test_a_perplexity_is_the_exponential_of_the_mean_loss_also_in_its_band(page):
    values = page.evaluate("""() => {
        const loss = average(shownRuns(0), "val", (run) => run.val.loss);
        const perplexity = average(shownRuns(0), "val", (run) => run.val.loss, Math.exp);
        return [perplexity.mean.at(-1), Math.exp(loss.mean.at(-1)), perplexity.low.at(-1), Math.exp(loss.low.at(-1))];
    }""")
    assert values[0] == pytest.approx(values[1])
    assert values[2] == pytest.approx(values[3])


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


def test_a_small_picture_for_a_readme(tmp_path):
    from PIL import Image

    write_sweep(tmp_path / "runs", seeds=(1, 2))
    compare(tmp_path / "runs", "--out", tmp_path / "report.html", "--picture", tmp_path / "docs" / "report.png")
    image = Image.open(tmp_path / "docs" / "report.png")
    assert image.size == (1008, 1344)
    assert len(image.convert("RGB").getcolors(1 << 20)) > 30  # curves, not a blank page
    assert (tmp_path / "docs" / "report.png").stat().st_size < 400_000


def test_every_quantity_that_can_be_chosen_is_drawn_with_labels_that_fit(tmp_path, open_page):
    blocks = {"standard": StandardAttention, "rfa": RobustFilterAttention, "polar": PolarAttention}
    for block, mixer in blocks.items():
        write_run(tmp_path / "runs" / block, block, 1)
        model = GPT(GPTConfig(vocab_size=9, context=16, d_model=16, n_layer=3, n_head=2), mixer)
        rows = [run_probe(model, torch.arange(32).reshape(2, 16) % 9).row(step, step * 64) for step in (0, 10)]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "runs" / block / "diagnostics" / "probe.jsonl").write_text(text)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.evaluate("drawAll()")
    problems = page.evaluate("""() => {
        const problems = [];
        for (const select of document.querySelectorAll("select.quantity")) {
            for (const { value } of [...select.options]) {
                select.value = value;
                select.onchange();
                const figure = select.closest("figure"), plot = figure.querySelector(".plot");
                const box = plot.getBoundingClientRect();
                if (!plot.data.length) problems.push([value, "empty"]);
                if (/NaN|undefined|n\\/a|not known/.test(figure.innerText)) problems.push([value, figure.innerText]);
                for (const title of figure.querySelectorAll(".xtitle, .ytitle, .annotation-text")) {
                    const at = title.getBoundingClientRect();
                    const inside = at.top >= box.top - 1 && at.bottom <= box.bottom + 1 && at.left >= box.left - 1;
                    if (!inside) problems.push([value, "cut off: " + title.textContent]);
                }
            }
        }
        return problems;
    }""")
    assert problems == []


def test_names_with_markup_are_shown_as_text(tmp_path, open_page):
    evil = "<img src=x onerror=alert(1)><b>bold</b>"
    write_run(tmp_path / "runs" / "a", "standard", 1, name=evil)
    write_run(tmp_path / "runs" / "b", "<i onclick=alert(2)>", 1, name="</script><script>alert(3)</script>")
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.evaluate("drawAll()")
    assert page.locator("img").count() == 0
    assert evil in page.locator("#groups").text_content()


def test_a_single_unprobed_run_and_a_damaged_one_open_without_errors(tmp_path, open_page):
    write_run(tmp_path / "runs" / "a", diagnostics=False, diverged=True)
    write_run(tmp_path / "runs" / "b", "polar", diagnostics=False, status=None, tokenizer="byte", steps=30)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.evaluate("drawAll()")
    assert page.locator("#unprobed").is_visible()
    assert page.locator(".probed").count() == 0
    assert "not comparable" in page.locator("#perplexity figcaption").inner_text()


def test_a_watched_page_loads_itself_again_as_the_reader_left_it(tmp_path, open_page, monkeypatch):
    from polarlm.report import commands

    write_sweep(tmp_path / "runs", blocks=("standard",), seeds=(1, 2), diagnostics=False)
    out = tmp_path / "report.html"

    def use_the_page(seconds):
        if use_the_page.page is None:
            use_the_page.page = page = open_page(out)
            assert "loads itself again every 5 s" in page.locator("#live").inner_text()
            page.evaluate("state.axis = 'seconds'; toggle([DATA.runs[0]], false)")
            write_run(tmp_path / "runs" / "new", "polar", diagnostics=False)
            return
        page = use_the_page.page
        page.wait_for_function("typeof DATA !== 'undefined' && DATA && DATA.runs.length === 3")
        page.wait_for_selector("html[data-ready=yes]")
        assert page.evaluate("[state.axis, isShown(DATA.runs[0]), isShown(DATA.runs[1])]") == ["seconds", False, True]
        raise KeyboardInterrupt

    use_the_page.page = None
    monkeypatch.setattr(commands.time, "sleep", use_the_page)
    compare(tmp_path / "runs", "--watch", 5, "--out", out)


@pytest.mark.slow
def test_the_report_of_a_real_sweep_of_three_blocks(tmp_path, open_page):
    """Trained here, from text to page: nothing between the trainer's files and the report is made up."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {n + n}." for n in range(3000)))
    command = [
        sys.executable,
        "train.py",
        "-m",
        "block=standard,xsa,polar",
        "seed=1,2",
        "data=text",
        f"data.path={text}",
    ]
    command += ["tokenizer=byte", "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.context=32"]
    command += ["trainer.max_steps=40", "trainer.batch_tokens=512", "trainer.val_every=10", "trainer.log_every=2"]
    command += [
        "diagnostics.every=10",
        "logger=none",
        f"runs_dir={tmp_path / 'runs'}",
        f"cache_dir={tmp_path / 'cache'}",
    ]
    done = subprocess.run(command, cwd=ARTIFACTS.parent, capture_output=True, text=True, timeout=550)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.evaluate("drawAll()")
    assert page.evaluate("DATA.groups.map((g) => g.label)") == ["standard", "xsa", "polar"]
    assert set(page.evaluate("DATA.runs.map((r) => r.status)")) == {"finished"}
    for figure in (name for name in FIGURES if not name.startswith("record-")):
        assert page.locator(f"#{figure}").locator(MARKS).count() > 0, figure
    run = page.evaluate("DATA.runs[0].href")
    page.evaluate("toggle([DATA.runs[0]], false); drawAll()")
    assert traces(page, "bits", f"t.meta.run === '{run}'") == 0
    page.evaluate("toggle([DATA.runs[0]], true); drawAll()")
    ARTIFACTS.mkdir(exist_ok=True)
    page.screenshot(path=ARTIFACTS / "report-real-sweep.png", full_page=True)


@pytest.mark.slow
def test_two_hundred_runs_stay_usable(tmp_path, open_page):
    for index in range(200):
        block, seed = ("standard", "rfa", "xsa", "polar")[index % 4], 1 + index // 40
        changes = {"optim.lr": 1e-3 * (1 + index % 40 // 4)}
        write_run(tmp_path / "runs" / f"r{index}", block, seed, 2000, log_every=5, probe_every=1000, changes=changes)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 8e6
    page = open_page(tmp_path / "report.html")
    assert page.locator("#groups details").count() == 40
    # One redraw of the figures in view after a switch; generous, since this machine is shared.
    took = page.evaluate(
        "(() => { const t = performance.now(); render('bits'); render('training'); return performance.now() - t; })()"
    )
    assert took < 5000
