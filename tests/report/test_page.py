"""The page holds everything it needs, escapes what it was given, and stays small."""

import argparse
import base64
import csv
import gzip
import io
import json
import math
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from polarlm.errors import UserError
from polarlm.report import commands, page
from polarlm.report.payload import rounded
from polarlm.runs.identity import identity_of, write_plan
from polarlm.runs.reading import read_run
from tests.synthetic_runs import write_run, write_sweep


def compare(*arguments):
    parser = argparse.ArgumentParser()
    commands.add_parser(parser.add_subparsers(required=True))
    options = parser.parse_args(["compare", *map(str, arguments)])
    return options.run(options)


def payload_of(page):
    text = re.search(r'id="payload">([^<]+)<', page).group(1)
    return json.loads(gzip.decompress(base64.b64decode(text)))


class Tags(HTMLParser):
    def __init__(self, page):
        super().__init__()
        self.tags = []
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))


def test_one_file_without_outside_references(tmp_path):
    write_sweep(tmp_path / "runs")
    assert compare(tmp_path / "runs" / "*", "--out", tmp_path / "report.html") == 0
    page = (tmp_path / "report.html").read_text()
    references = [a.get("src") or a.get("href") or "" for _, a in Tags(page).tags]
    assert not [r for r in references if r.startswith(("http:", "https:", "//"))]
    assert (tmp_path / "report.html").stat().st_size < 3e6
    assert 'href="runs/polar-seed1/"' in page
    assert "Simple baselines, validation bits per byte: unigram 3.12, bigram 2.37." in page
    data = payload_of(page)
    assert len(data["runs"]) == 9
    assert data["diagnostics"][0]["final"]["radial/residual_rms"]["mean"][0] == pytest.approx(0.6, rel=0.1)
    assert data["reload"] is None


def test_names_with_markup_stay_text(tmp_path):
    evil = '<img src=x onerror=alert(1)>"&'
    write_run(tmp_path / "runs" / "a", "standard", 1, name=evil)
    write_run(tmp_path / "runs" / "b", "<script>alert(2)</script>", 1, name="</script><script>alert(3)</script>")
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    tags = Tags(page).tags
    assert not [tag for tag, _ in tags if tag == "img"]
    assert len([tag for tag, _ in tags if tag == "script"]) == 3  # library, data, script: the page's own
    assert "alert(2)</script>" not in page
    assert evil in {run["name"] for run in payload_of(page)["runs"]}


def test_a_page_of_many_long_runs_stays_small(tmp_path):
    for seed in range(1, 16):
        for block in ("standard", "polar"):
            write_run(tmp_path / "runs" / f"{block}{seed}", block, seed, steps=3000, log_every=1, layers=8, heads=8)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    assert (tmp_path / "report.html").stat().st_size < 4e6


def test_runs_without_diagnostics_or_results_make_a_page(tmp_path):
    write_run(tmp_path / "runs" / "plain", diagnostics=False)
    (tmp_path / "runs" / "empty").mkdir()
    (tmp_path / "runs" / "empty" / "config.yaml").write_text("seed: 3\n")
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    data = payload_of((tmp_path / "report.html").read_text())
    assert data["diagnostics"] == [None, None]


def test_losses_that_are_no_numbers_become_gaps(tmp_path):
    write_run(tmp_path / "runs" / "a", diverged=True, diagnostics=False)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    run = payload_of((tmp_path / "report.html").read_text())["runs"][0]
    assert run["final"] is None
    assert rounded(float("nan")) is None


def test_what_all_runs_share_is_said_once_and_what_follows_from_the_block_too(tmp_path):
    for block, lr in (("standard", 1e-3), ("polar", 3e-3)):
        for seed in (1, 2):
            write_run(tmp_path / "runs" / f"{block}{seed}", block, seed, diagnostics=False, changes={"optim.lr": lr})
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert (
        "All runs: data pydocs · tokenizer bpe · model nano · d 128 · 4 layers · 4 heads · context 128 tokens" in page
    )
    assert "Each block has its own lr: standard 0.001, polar 0.003." in page
    assert [g["label"] for g in payload_of(page)["groups"]] == ["standard", "polar"]


def test_the_forest_has_both_intervals_the_detectable_effect_and_greys_unequal_budgets(tmp_path):
    write_sweep(tmp_path / "runs", diagnostics=False)
    for folder in (tmp_path / "runs").glob("rfa*"):
        summary = json.loads((folder / "summary.json").read_text())
        (folder / "summary.json").write_text(json.dumps(summary | {"parameters": 2 * summary["parameters"]}))
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    data = payload_of(page)
    forest = {data["groups"][row["group"]]["label"]: row for row in data["verdict"]["forest"]}
    assert forest["rfa"]["grey"] and forest["rfa"]["all"] is None
    polar = forest["polar"]
    assert polar["outcome"] == "better"
    assert polar["all"] == pytest.approx([polar["low"], polar["high"]])  # the only judged comparison
    assert polar["detectable"] > 0
    assert [g["unequal"] for g in data["groups"]] == [False, True, False]
    assert page.count('<tr class="unequal">') == 1
    assert data["verdict"]["margin"] == 0.005


def test_the_bars_of_the_forest_are_finite_and_those_of_the_table(tmp_path):
    """Also the surest winner's, beside a comparison that shows nothing."""
    write_sweep(tmp_path / "runs", blocks=("standard", "polar"), seeds=(1, 2, 3), diagnostics=False)
    for seed in (1, 2, 3):
        write_run(
            tmp_path / "runs" / f"twin-{seed}", "standard", seed, 590, diagnostics=False, changes={"model.rope": 500}
        )
    compare(
        tmp_path / "runs",
        "--out",
        tmp_path / "report.html",
        "--json",
        tmp_path / "r.json",
        "--latex",
        tmp_path / "t.tex",
    )
    report = json.loads((tmp_path / "r.json").read_text())
    table = {row["group"]: row for row in report["judged"]}
    latex = (tmp_path / "t.tex").read_text()
    for row in report["verdict"]["forest"]:
        difference = table[report["groups"][row["group"]]["label"]]["difference"]
        if row["low"] is None:
            continue
        assert (row["low"], row["mean"], row["high"]) == tuple(difference[k] for k in ("low", "mean", "high"))
        assert math.isfinite(row["all"][0]) and row["all"][0] <= row["low"] and row["high"] <= row["all"][1]
        assert f"{row['low']:+.4f}"[:5] in latex and "\\toprule" in latex
    assert any(row["outcome"] == "better" for row in report["verdict"]["forest"])


def test_searches_are_left_out_and_groups_and_sweeps_are_chosen_by_name(tmp_path, capsys):
    runs = tmp_path / "runs"
    write_sweep(runs, blocks=("standard", "polar"), seeds=(1, 2), diagnostics=False)
    write_run(runs / "tuned", "polar", 1000, diagnostics=False)  # the seed of searches
    for name in ("rfa-1", "rfa-2"):
        folder = write_run(runs / name, "rfa", int(name[-1]), diagnostics=False)
        config = (folder / "config.yaml").read_text()
        assert "group: first-look" in config
        (folder / "config.yaml").write_text(config.replace("group: first-look", "group: tune-lr-rfa"))

    def compared(*options):
        compare(runs, "--csv", "-", *options)
        out, err = capsys.readouterr()
        return sorted(row.split(",")[0] for row in out.splitlines()[1:]), err

    final = ["polar-seed1", "polar-seed2", "standard-seed1", "standard-seed2"]
    kept, said = compared()
    assert kept == final and "Left out 3 runs of hyperparameter searches" in said
    assert compared("--searches")[0] == sorted([*final, "rfa-1", "rfa-2", "tuned"])
    assert compared("--group", "tune-*")[0] == ["rfa-1", "rfa-2"]  # nothing but a search: it is what was asked for
    with pytest.raises(UserError, match="Did you mean first-look"):
        compared("--group", "first-lok")
    jobs = [{"overrides": [], "identity": identity_of(read_run(runs / name).config)} for name in final[:2]]
    write_plan(runs, "two", [], jobs)
    assert compared("--sweep", "two")[0] == final[:2]
    with pytest.raises(UserError, match=r"No sweep 'tow' here\. Did you mean two"):
        compared("--sweep", "tow")


def test_the_text_fits_80_columns_with_long_labels(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")  # a wide terminal does not widen it
    for block in ("standard", "polar_with_a_very_long_name_of_its_own_and_more"):
        for seed in (1, 2):
            write_run(tmp_path / "runs" / f"{block}{seed}", block, seed, diagnostics=False)
    compare(tmp_path / "runs", "--text")
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    assert "seconds" in text and "tokens/s" in text  # stacked below, not cut off


def test_bands_and_table_use_the_same_interval(tmp_path):
    from scipy import stats

    write_sweep(tmp_path / "runs", blocks=("standard",), seeds=range(1, 25), diagnostics=False)
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    t = payload_of((tmp_path / "report.html").read_text())["verdict"]["t"]
    assert t[1:] == pytest.approx([stats.t.ppf(0.975, df) for df in range(1, 25)])


def test_records_of_evaluations_become_panels_averaged_over_seeds(tmp_path):
    write_sweep(tmp_path / "runs", seeds=(1, 2), evaluations=True, diagnostics=False)
    (tmp_path / "runs" / "polar-seed1" / "evaluations" / "torn.json").write_text("{")
    for number, points in enumerate((0, ["x"], [10**400], None)):  # damaged: neither drawn nor in the way
        reliability = {"probability": [0.1], "frequency": points}
        record = {"protocol": {"name": "calibration", "data": str(number)}, "calibration": {"reliability": reliability}}
        (tmp_path / "runs" / "polar-seed1" / "evaluations" / f"{number}.json").write_text(json.dumps(record))
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    panels = {panel["name"]: panel for panel in payload_of(page)["records"]}
    assert list(panels) == ["length", "length, by position", "calibration"]
    far = panels["length, by position"]
    assert far["title"] == "Loss by position, 8 × the trained context" and "trained: 128" in far["x"]
    assert far["lines"][0]["at"] == [8, 64, 1024] and far["lines"][0]["mean"] == pytest.approx([4.5, 4.2, 4.9])
    length = panels["length"]
    assert (length["x"], length["y"], length["log"]) == ("context (tokens)", "bits per byte", True)
    assert length["protocol"] == "data pydocs, split test, tokens 4096"
    files = [tmp_path / "runs" / f"polar-seed{seed}" / "evaluations" for seed in (1, 2)]
    records = [json.loads((f / "length-pydocs-test-00000000.json").read_text())["by_length"]["metrics"] for f in files]
    mean = [sum(r[i]["bits_per_byte"] for r in records) / 2 for i in range(4)]
    assert length["lines"][2]["mean"] == pytest.approx(mean, rel=1e-4)
    assert "sliding: data pydocs, split test, tokens 4096" in page  # its numbers stand in a table
    # And what is no metric of the text: downstream accuracy, confidence (a mean over the layers that have one).
    files = [json.loads((f / "blimp-pydocs-test-00000000.json").read_text())["blimp"]["accuracy"] for f in files]
    shown = re.search(r'BLiMP accuracy</td>.{0,200}data-label="polar">([\d.]+)', page)
    assert float(shown.group(1)) == pytest.approx(sum(files) / 2, abs=0.01)
    assert "log m with loss: Spearman&#x27;s correlation, mean over layers" in page and ">−0.3000<" in page


def test_the_geometry_of_finished_seeds_is_shown_and_not_that_of_one_that_has_just_begun(tmp_path):
    write_run(tmp_path / "runs" / "done", "polar", 1, steps=200)
    write_run(tmp_path / "runs" / "begun", "polar", 2, 100, status="running", changes={"trainer.max_steps": 200})
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    (geometry,) = payload_of((tmp_path / "report.html").read_text())["diagnostics"]
    assert geometry["tokens"] == [0, 100 * 4096, 200 * 4096]


def test_samples_stand_side_by_side_and_unfinished_runs_have_a_bar(tmp_path):
    write_sweep(tmp_path / "runs", seeds=(1, 2), diagnostics=False)
    write_run(
        tmp_path / "runs" / "late",
        "polar",
        3,
        steps=300,
        status=None,
        diagnostics=False,
        changes={"trainer.max_steps": 600},
    )
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert page.count('<div class="sample">') == 3
    assert "the polar block wrote a line" in page
    assert "6 of 7 runs finished." in page
    assert 'value="0.500"' in page


def test_text_csv_and_json_exports(tmp_path, capsys):
    write_sweep(tmp_path / "runs", diagnostics=False)
    compare(tmp_path / "runs", "--text", "--csv", tmp_path / "runs.csv", "--json", tmp_path / "runs.json")
    assert "polar: better than standard" in " ".join(capsys.readouterr().out.split())
    rows = list(csv.DictReader(io.StringIO((tmp_path / "runs.csv").read_text())))
    assert len(rows) == 9
    assert {"run", "block", "seed", "status", "val/bits_per_byte"} <= set(rows[0])
    exported = json.loads((tmp_path / "runs.json").read_text())
    assert exported["judged"][0]["outcome"] == "baseline"
    assert len(exported["runs"]) == 9
    assert not (tmp_path / "report.html").exists()


def test_watching_rewrites_the_page_and_the_last_one_rests(tmp_path, monkeypatch):
    write_run(tmp_path / "runs" / "a", diagnostics=False)
    seen = []

    def nap(seconds):
        seen.append(payload_of((tmp_path / "report.html").read_text()))
        if len(seen) == 2:
            raise KeyboardInterrupt
        write_run(tmp_path / "runs" / "b", seed=2, diagnostics=False)

    monkeypatch.setattr(commands.time, "sleep", nap)
    assert compare(tmp_path / "runs", "--watch", 3, "--out", tmp_path / "report.html") == 0
    assert [len(data["runs"]) for data in seen] == [1, 2]
    assert [data["reload"] for data in seen] == [3, 3]
    assert payload_of((tmp_path / "report.html").read_text())["reload"] is None


def test_nothing_found_is_a_sentence(tmp_path):
    with pytest.raises(UserError, match="No run folder found"):
        compare(tmp_path / "runs")
    with pytest.raises(UserError, match="positive number of seconds"):
        compare(tmp_path, "--watch", -1)


def test_every_asset_is_under_version_control_and_so_in_the_wheel():
    """The wheel leaves out what git ignores; a page without its template would only fail on other machines."""
    root = Path(page.__file__).resolve().parents[2]
    if not (root / ".git").exists() or shutil.which("git") is None:
        pytest.skip("not a git checkout")
    assets = sorted((root / "polarlm" / "report" / "assets").iterdir())
    ignored = subprocess.run(["git", "check-ignore", *map(str, assets)], cwd=root, capture_output=True, text=True)
    assert {"page.html", "page.css", *page.SCRIPTS} == {path.name for path in assets}
    assert ignored.stdout == ""


def test_every_quantity_of_the_probe_is_called_by_words():
    from polarlm.attention import PolarAttention, RobustFilterAttention
    from polarlm.diagnostics import run_probe
    from polarlm.model import GPT, GPTConfig
    from polarlm.report.quantities import QUANTITIES

    for mixer in (PolarAttention, RobustFilterAttention):
        model = GPT(GPTConfig(vocab_size=9, context=8, d_model=8, n_layer=1, n_head=2), mixer)
        probe = run_probe(model, torch.arange(8).reshape(1, 8))
        names = {name.rpartition("/")[2] for name in [*probe.values, *probe.profiles]}
        assert names - QUANTITIES.keys() == set()


def test_settings_that_only_one_block_has_are_folded_away(tmp_path):
    own = {f"block.{name}": 1.0 for name in ("alpha", "beta", "nu_t", "mu", "tau")} | {"block.forgetting": "none"}
    write_run(tmp_path / "runs" / "a", "standard", 1, changes={"block.qk_norm": False, "optim.lr": 1e-3})
    write_run(tmp_path / "runs" / "b", "polar", 1, changes={"block.qk_norm": True, "optim.lr": 2e-3, **own})
    compare(tmp_path / "runs", "--out", tmp_path / "report.html")
    section = (tmp_path / "report.html").read_text().partition('id="configuration"')[2].partition("</section>")[0]
    open_part, _, folded = section.partition("<details>")
    assert "optim.lr" in open_part and "block.qk_norm" in open_part and "block.alpha" not in open_part
    assert "33 settings that only some of the blocks have" in folded and "block.alpha" in folded
