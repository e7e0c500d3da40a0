"""Pages of very different runs in a real browser: ladders, damaged and hostile runs, hundreds, really trained ones."""

import json
import subprocess
import sys

import pytest
import torch

from polarlm.attention import PolarAttention, RobustFilterAttention, StandardAttention
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from tests.report.browser import ARTIFACTS, CLIPPED, FIGURES, MARKS, WIDTHS, needs_chromium, traces
from tests.report.test_page import compare
from tests.synthetic_runs import write_run, write_sweep

pytestmark = needs_chromium


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


def test_small_pictures_of_the_page_and_of_one_figure_for_a_readme(tmp_path):
    from PIL import Image

    write_sweep(tmp_path / "runs", seeds=(1, 2), diagnostics=False, evaluations=True)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html", "--picture", tmp_path / "docs" / "report.png")
    image = Image.open(tmp_path / "docs" / "report.png")
    assert image.size == (1008, 1344)
    assert len(image.convert("RGB").getcolors(1 << 20)) > 30  # curves, not a blank page
    # Full colour: a palette of 128 colours had drawn two groups alike.
    assert (tmp_path / "docs" / "report.png").stat().st_size < 600_000
    one = tmp_path / "docs" / "one.png"
    compare(tmp_path / "runs", "--out", tmp_path / "report.html", "--picture", one, "--figure", "length")
    image = Image.open(one)
    assert image.size == (3 * 624, 3 * 384)  # 6.5 × 4 inches at 288 dots per inch
    assert len(image.convert("RGB").getcolors(1 << 20)) > 30
    with pytest.raises(UserError, match="does not exist on this page"):
        compare(tmp_path / "runs", "--out", tmp_path / "report.html", "--picture", one, "--figure", "lenght")
    with pytest.raises(UserError, match="--picture"):
        compare(tmp_path / "runs", "--figure", "forest")
    with pytest.raises(UserError, match=r"must end in \.png, \.svg, \.pdf"):
        compare(tmp_path / "runs", "--picture", tmp_path / "a.gif")
    with pytest.raises(UserError, match="a whole page has no SVG"):
        compare(tmp_path / "runs", "--picture", tmp_path / "a.svg")


@pytest.mark.parametrize("kind", ["svg", "pdf"])
def test_every_figure_for_a_paper_with_its_caption(tmp_path, kind):
    write_sweep(tmp_path / "runs", seeds=(1, 2), diagnostics=False, evaluations=True)
    page, figures = tmp_path / "report.html", tmp_path / "figures"
    compare(tmp_path / "runs", "--out", page, "--figure", "all", "--format", kind, "--picture", figures)
    names = {file.stem for file in figures.glob(f"*.{kind}")}
    assert {"forest", "bits", "length", "calibration"} <= names
    captions = (figures / "captions.txt").read_text()
    caption = dict(entry.split("\n", 1) for entry in captions.split("\n\n"))
    assert set(caption) == {f"{name}.{kind}" for name in names}
    assert "paired seeds with 95 % intervals" in caption[f"forest.{kind}"]  # how the verdict was reached
    assert "paired seeds" not in caption[f"bits.{kind}"] and "All runs:" in caption[f"bits.{kind}"]
    for file in figures.glob(f"*.{kind}"):
        assert file.read_bytes().startswith(b"%PDF" if kind == "pdf" else b"<svg")
    if kind == "svg":  # light colours and a legend, whatever the reader's theme
        bits = (figures / "bits.svg").read_text()
        assert 'class="legendtext"' in bits and ">polar<" in bits and "rgb(255, 255, 255)" in bits


def test_the_download_button_of_a_dark_page_gives_a_light_picture_with_a_legend(tmp_path, open_page):
    write_sweep(tmp_path / "runs", seeds=(1, 2), diagnostics=False)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = open_page(tmp_path / "report.html")
    page.evaluate("() => { state.theme = 'dark'; applyTheme(); redraw(); }")
    svg = page.evaluate("printFigure('bits', 'svg', true).then((made) => made.data)")
    assert (
        'class="legendtext"' in svg
        and "rgb(255, 255, 255)" in svg
        and "rgb(0, 0, 0); stroke-opacity: 1; stroke-width: 1" not in svg
    )
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"  # the page itself stays dark


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
            assert "reloads every 5 s" in page.locator("#live").inner_text()
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
def test_the_report_of_a_real_sweep_of_two_blocks(tmp_path, open_page):
    """Trained here, from text to page: nothing between the trainer's files and the report is made up."""
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(f"{n} times {n} is {n * n}, and {n} plus {n} is {n + n}." for n in range(3000)))
    command = [
        sys.executable,
        "train.py",
        "-m",
        "block=standard,polar",
        "seed=1,2",
        "data=text",
        f"data.path={text}",
    ]
    command += ["tokenizer=byte", "model.d_model=32", "model.n_layer=2", "model.n_head=2", "model.context=32"]
    command += ["trainer.max_steps=20", "trainer.batch_tokens=512", "trainer.val_every=5", "trainer.log_every=2"]
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
    assert page.evaluate("DATA.groups.map((g) => g.label)") == ["standard", "polar"]
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
    # What a redraw costs is the number of points: one thinned curve and the edges of its band per group.
    page.evaluate("render('bits'); render('training')")
    for figure in ("bits", "training"):
        points = page.evaluate(f"document.querySelector('#{figure} .plot').data.map((t) => t.x.length)")
        assert len(points) <= 2 * 40 and 0 < sum(points) <= 40 * 3 * 300, figure
