"""wandb: what was logged can be read back, a killed run is one curve, nothing prompts, nothing waits."""

import json
import os
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from polarlm import network
from polarlm.attention import PolarAttention
from polarlm.cli import main
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.printing import say_once
from polarlm.runs.checkpoints import step_file
from polarlm.runs.files import json_lines
from polarlm.runs.identity import command_overrides, sweep_group
from polarlm.training.loggers import build_loggers, finish_loggers, rank_zero_only
from polarlm.training.loggers import wandb as wandb_module
from polarlm.training.loggers.wandb import PER_LAYER, condensed
from polarlm.training.loop import train_run
from tests.conftest import ROOT
from tests.synthetic_runs import write_sweep
from tests.training.loggers.offline_wandb import read_offline_run
from tests.training.tiny_jobs import composed


def config_of(**changes):
    options = OmegaConf.to_container(OmegaConf.load(ROOT / "configs" / "logger" / "wandb.yaml"))
    base = {"logger": options, "group": "first-look", "choices": {"block": "polar", "model": "tiny"}, "seed": 3}
    return {**base, "model": {"d_model": 16}, "block": {"nu_t": 4.0}, **changes}


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "runs" / "polar-tiny"
    path.mkdir(parents=True)
    environment = {"git_commit": "abc123", "git_dirty": False, "versions": {"polarlm": "0.1.0"}}
    (path / "environment.json").write_text(json.dumps(environment))
    return path


@pytest.fixture(autouse=True)
def _no_account(monkeypatch, tmp_path):
    """No login of whoever runs the tests is seen, and hints are given anew."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    say_once.cache_clear()
    network.reachable.cache_clear()


def run_of(folder):
    (path,) = (folder / "wandb").glob("offline-run-*")
    return read_offline_run(path)


@pytest.fixture(scope="module")
def probe():
    model = GPT(GPTConfig(vocab_size=20, context=12, d_model=16, n_layer=2, n_head=2), PolarAttention)
    return run_probe(model, torch.randint(0, 20, (2, 12)))


def test_an_offline_run_holds_what_was_logged(folder, probe, capfd):
    (logger,) = build_loggers(config_of(), folder)
    logger.log_metrics({"step": 1, "tokens": 64, "train/loss": 3.5, "train/grad_norm": None, **probe.scalars()}, step=1)
    logger.log_metrics({"step": 2, "tokens": 128, "train/loss": 3.25, "val/loss": 3.0, "val/perplexity": 20.1}, step=2)
    logger.log_metrics({"step": 3, "tokens": 192, "train/loss": 3.4, "val/loss": 3.1, "val/perplexity": 22.2}, step=3)
    logger.log_probe(probe.row(3, 192))
    finish_loggers([logger], folder, "finished")

    run = run_of(folder)
    assert (run.run.run_group, run.run.job_type, run.run.display_name) == ("first-look", "polar", "polar-tiny")
    assert run.config["model"] == {"d_model": 16} and run.config["seed"] == 3
    assert run.config["code"] == {"commit": "abc123", "dirty": False, "version": "0.1.0"}
    assert [row["_step"] for row in run.rows] == [1, 2, 3]
    assert [row["tokens"] for row in run.rows] == [64, 128, 192]
    assert run.rows[0]["train/loss"] == 3.5 and "train/grad_norm" not in run.rows[0]
    evidence = [v for name, v in probe.scalars().items() if name.startswith("precision/log_evidence/")]
    assert len(evidence) == 4
    assert run.rows[0]["precision/log_evidence"] == pytest.approx(sum(evidence) / 4)
    assert run.rows[0]["precision/log_evidence/layer_01"] == pytest.approx(sum(evidence[2:]) / 2)
    assert run.metrics["*"].step_metric == "tokens"
    assert run.metrics["val/loss"].summary.min and run.metrics["val/perplexity"].summary.min
    assert run.summary["status"] == "finished" and run.exit_code == 0
    seen = capfd.readouterr()
    assert "polarlm wandb sync" in seen.err and not seen.out


def test_what_a_callback_logs_with_self_log_is_in_the_row_of_its_step(folder):
    (logger,) = build_loggers(config_of(), folder)
    for step in (1, 2):
        logger.log_metrics({"step": step, "tokens": 64 * step, "train/loss": 3.5}, step=step)
        logger.log_metrics({"mine": float(step), "epoch": 0}, step=step - 1)  # as Lightning counts, after our row
    finish_loggers([logger], folder, "finished")
    assert [(row["_step"], row["mine"]) for row in run_of(folder).rows] == [(1, 1.0), (2, 2.0)]


def test_nothing_is_said_about_an_address_that_an_offline_run_does_not_have(folder, capfd):
    (logger,) = build_loggers(config_of(), folder)
    assert logger.url is None
    finish_loggers([logger], folder, "finished")
    assert "URL" not in capfd.readouterr().err


def test_probe_charts_are_native_files_and_histograms(folder, probe):
    (logger,) = build_loggers(config_of(), folder)
    logger.log_probe(probe.row(7, 448))
    finish_loggers([logger], folder, "finished")
    (path,) = (folder / "wandb").glob("offline-run-*")
    row = run_of(folder).rows[0]

    def figure(name):
        assert row[f"{name}/_type"] == "plotly-file"
        return json.loads((path / "files" / row[f"{name}/path"]).read_text())

    for layer, wanted in enumerate(probe.histograms["radial/magnitude"]):
        name = f"radial/magnitude/histogram/layer_{layer:02d}"
        assert row[f"{name}/_type"] == "histogram"
        assert row[f"{name}/values"] == wanted.counts and row[f"{name}/bins"] == pytest.approx(wanted.edges)
    table = json.loads((path / "files" / row["diagnostics/layers_and_heads/path"]).read_text())
    assert table["columns"] == ["quantity", "layer", "head", "value"]
    known = {tuple(entry[:3]): entry[3] for entry in table["data"]}
    assert known["precision/log_evidence", 1, 1] == probe.values["precision/log_evidence"][1][1]
    assert len(known) == len(probe.scalars())
    heat = figure("precision/log_evidence/heat_map")["data"][0]
    assert heat["type"] == "heatmap" and heat["z"] == probe.values["precision/log_evidence"]
    kappa = figure("precision/log_kappa/by_lag")["data"]
    assert [trace["name"] for trace in kappa] == ["layer 0", "layer 1"]
    wanted = probe.profiles["precision/log_kappa"]
    assert kappa[1]["y"] == [*wanted["y"][1][0], None, *wanted["y"][1][1]]
    assert kappa[1]["x"] == [*wanted["x"], None, *wanted["x"]]


def test_only_a_few_quantities_have_a_line_per_layer_and_none_per_head():
    def names(layers, heads):
        row = {"step": 1, "train/loss": 3.0}
        row |= {f"radial/growth/layer_{n:02d}": 1.0 * n for n in range(layers)}
        row |= {f"attention/entropy/layer_{n:02d}/head_{h}": 1.0 for n in range(layers) for h in range(heads)}
        row |= {f"{PER_LAYER[0]}/layer_{n:02d}": 1.0 for n in range(layers)}
        return condensed(row)

    assert names(4, 4)["radial/growth"] == 1.5
    assert len(names(48, 25)) - len(names(4, 4)) == 44


def killed_and_resumed(place, *options):
    """A run whose later checkpoints, and nothing else, were lost; then resumed: (its folder, its rows)."""
    job = ("trainer.checkpoint_every=2", "trainer.max_steps=7", "name=again", "logger=wandb", "callbacks=samples",
           "callbacks.samples.every=3", "callbacks.samples.tokens=4", "diagnostics=default", "diagnostics.every=3",
           "diagnostics.tokens=32", *options)  # fmt: skip
    train_run(composed(place, *job))
    folder = place / "runs" / "again"
    first = run_of(folder).run.run_id
    for path in set((folder / "checkpoints").iterdir()) - {step_file(folder / "checkpoints", 4)}:
        path.unlink()
    summary = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps({**summary, "status": "interrupted"}))
    train_run(composed(place, *job))
    return folder, first


def test_a_killed_and_resumed_run_is_one_curve_without_gaps_or_repeats(tmp_path):
    folder, first = killed_and_resumed(tmp_path, "logger.wandb.artifacts=weights")
    (path,) = (folder / "wandb").glob("offline-run-*")
    run = run_of(folder)
    rows = json_lines(folder / "metrics.jsonl")
    assert run.run.run_id == first
    assert [row["_step"] for row in run.rows] == [0, *(row["step"] for row in rows)] == list(range(8))
    assert [row["train/loss"] for row in run.rows[1:]] == [row["train/loss"] for row in rows]
    probed = [row["_step"] for row in run.rows if "diagnostics/layers_and_heads/path" in row]
    assert probed == [row["step"] for row in json_lines(folder / "diagnostics" / "probe.jsonl")] == [0, 3, 6, 7]
    sampled = [row for row in run.rows if "samples/path" in row]
    samples = json_lines(folder / "diagnostics" / "samples.jsonl")
    assert [row["_step"] for row in sampled] == [row["step"] for row in samples] == [3, 6, 7]
    table = json.loads((path / "files" / sampled[-1]["samples/path"]).read_text())
    assert table["data"] == [[row["step"], row["tokens"], row["prompt"], row["text"]] for row in samples]
    assert [name for name, files in run.artifacts if files == ["model.safetensors"]] == ["again"]
    assert "step 7/7" in (path / "files" / "output.log").read_text()


def test_sync_writes_the_same_run_from_the_folder_alone(tmp_path, capsys):
    folder, first = killed_and_resumed(tmp_path)
    live = run_of(folder)
    assert main(["wandb", "sync", str(folder), "--offline", "--project", "elsewhere"]) == 0
    again = run_of(folder)
    assert again.run.run_id == first and again.run.project == "elsewhere"

    def numbers(run):
        return [{k: v for k, v in row.items() if isinstance(v, (int, float)) and not k.startswith(("_t", "_r"))}
                for row in run.rows]  # fmt: skip

    assert numbers(again) == numbers(live)
    assert again.summary["final/val/loss"] == live.summary["final/val/loss"]
    assert "offline-run-" in capsys.readouterr().out


def test_steps_that_the_server_has_are_not_logged_again(folder, monkeypatch):
    (folder / "metrics.jsonl").write_text("".join(f'{{"step": {n}, "tokens": {n}}}\n' for n in range(1, 6)))
    (logger,) = build_loggers(config_of(), folder)
    logger.experiment.log({"tokens": 3}, step=3)  # as after a resume online, whose run has steps up to 3
    logger.experiment.log({}, step=4)
    logger.replay()
    finish_loggers([logger], folder, "finished")
    assert [row["tokens"] for row in run_of(folder).rows if "tokens" in row] == [3, 4, 5]


def test_a_run_that_went_back_is_written_anew(folder):
    (logger,) = build_loggers(config_of(), folder)
    for step in (1, 2, 3):
        logger.log_metrics({"step": step, "tokens": step, "train/loss": 9.0}, step=step)
    (folder / "metrics.jsonl").write_text('{"step": 1, "tokens": 1, "train/loss": 1.0}\n')
    time.sleep(1.1)  # offline folders are named by the second
    logger.replay()
    logger.log_metrics({"step": 2, "tokens": 2, "train/loss": 2.0}, step=2)
    finish_loggers([logger], folder, "finished")
    assert [row["train/loss"] for row in run_of(folder).rows] == [1.0, 2.0]


def test_two_jobs_of_one_process_are_two_runs(folder):
    other = folder.with_name("standard-tiny")
    other.mkdir()
    (first,) = build_loggers(config_of(), folder)
    first.log_metrics({"step": 1, "tokens": 1}, step=1)
    finish_loggers([first], folder, "failed")
    (second,) = build_loggers(config_of(choices={"block": "standard"}), other)
    second.log_metrics({"step": 1, "tokens": 2}, step=1)
    finish_loggers([second], other, "finished")
    a, b = run_of(folder), run_of(other)
    assert a.run.run_id != b.run.run_id
    assert ([row["tokens"] for row in a.rows], [row["tokens"] for row in b.rows]) == ([1], [2])
    assert (a.run.job_type, b.run.job_type) == ("polar", "standard") and a.run.run_group == b.run.run_group
    assert (a.exit_code, b.exit_code) == (1, 0)


def test_other_ranks_and_none_log_nothing(folder, monkeypatch):
    assert build_loggers(config_of(logger={}), folder) == []
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    assert build_loggers(config_of(), folder) == []


def test_disabled_by_wandbs_own_variable(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert build_loggers(config_of(), folder) == []


def test_the_address_is_printed_at_the_start_and_kept_in_the_summary(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(wandb_module.WandbLogger, "url", "https://wandb.example.org/me/p/runs/1")
    train_run(composed(tmp_path, "logger=wandb", "name=seen"))
    summary = json.loads((tmp_path / "runs" / "seen" / "summary.json").read_text())
    assert summary["wandb"] == "https://wandb.example.org/me/p/runs/1"
    printed = capfd.readouterr().err
    assert printed.index("https://wandb.example.org/me/p/runs/1") < printed.index("step ")


def test_a_run_that_began_offline_is_uploaded_at_the_end_when_the_server_is_there(folder, monkeypatch):
    (logger,) = build_loggers(config_of(), folder)
    logger.log_metrics({"step": 1, "tokens": 1}, step=1)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setattr(wandb_module, "logged_in", lambda: True)
    monkeypatch.setattr(wandb_module, "answers", lambda url: True)
    synced = []
    monkeypatch.setattr(wandb_module, "sync", lambda *arguments: synced.append(arguments[::2]) or "url")
    finish_loggers([logger], folder, "finished")
    assert synced == [(folder, "online")]


def test_compare_pushes_verdict_table_and_forest_plot(tmp_path, capsys):
    write_sweep(tmp_path / "runs")
    assert main(["compare", str(tmp_path / "runs"), "--wandb", "blocks", "--text"]) == 0
    printed = capsys.readouterr().out
    place = tmp_path / "runs" / ".comparisons"
    (path,) = (place / "wandb").glob("offline-run-*")
    run = run_of(place)
    assert (run.run.project, run.run.job_type) == ("blocks", "comparison")
    (row,) = run.rows
    table = json.loads((path / "files" / row["results/path"]).read_text())
    assert table["columns"][:2] == ["group", "seeds"] and {"verdict", "Δ to baseline"} <= set(table["columns"])
    assert {entry[0] for entry in table["data"]} >= {"standard", "polar"}
    verdict = (path / "files" / row["verdict/path"]).read_text()
    assert run.summary["verdict"] in verdict and " ".join(printed.split())[:60] in " ".join(verdict.split())
    (forest,) = json.loads((path / "files" / row["forest/path"]).read_text())["data"]
    assert "polar" in forest["y"] and len(forest["x"]) == len(forest["error_x"]["array"]) >= 1
    assert all(width > 0 for width in forest["error_x"]["array"])


class TestMode:
    """online, offline, and the seconds it takes to decide."""

    @pytest.fixture(autouse=True)
    def _unset(self, monkeypatch):
        monkeypatch.delenv("WANDB_MODE")

    def test_an_unknown_mode_is_refused(self):
        with pytest.raises(UserError, match=r"logger\.wandb\.mode='onlin'.*auto, online, offline"):
            wandb_module.choose_mode("onlin")

    def test_offline_without_login(self):
        assert wandb_module.choose_mode("auto") == ("offline", None)

    def test_a_user_without_a_home_has_no_login(self, monkeypatch):
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # Python's answer without HOME and passwd entry
        assert wandb_module.choose_mode("auto") == ("offline", None)

    def test_online_without_login_is_an_error_that_says_what_to_do_before_a_folder_is_made(self, tmp_path):
        with pytest.raises(UserError, match="wandb login"):
            train_run(composed(tmp_path, "logger=wandb", "logger.wandb.mode=online"))
        assert not (tmp_path / "runs").exists()

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("mode", ["auto", "online"])
    def test_a_dead_network_is_noticed(self, monkeypatch, mode):
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        with socket.socket() as ours:  # nobody listens on it, and nobody else can
            ours.bind(("127.0.0.1", 0))
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{ours.getsockname()[1]}")
            chosen, note = wandb_module.choose_mode(mode)
        assert chosen == "offline" and "does not answer" in note and "\n" not in note

    @pytest.mark.timeout(60)
    def test_a_server_that_accepts_but_never_answers_is_given_up(self, monkeypatch):
        monkeypatch.setattr(network, "PATIENCE", 0.3)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
            assert wandb_module.choose_mode("auto")[0] == "offline"

    @pytest.mark.parametrize(("code", "mode"), [(200, "online"), (400, "online"), (503, "offline")])
    def test_an_answer_counts_unless_the_server_is_broken(self, monkeypatch, code, mode):
        class Answer(BaseHTTPRequestHandler):
            def do_POST(self):
                self.send_response(code)
                self.end_headers()

            def log_message(self, *arguments):
                pass

        with ThreadingHTTPServer(("127.0.0.1", 0), Answer) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.server_port}")
            assert wandb_module.choose_mode("auto")[0] == mode
            server.shutdown()

    def test_login_is_found_in_netrc_for_the_configured_server(self, monkeypatch, tmp_path):
        (tmp_path / "netrc").write_text("machine wandb.example.org login user password " + "y" * 40 + "\n")
        assert not wandb_module.logged_in()
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
        assert wandb_module.logged_in()
        monkeypatch.setattr(wandb_module, "answers", lambda url: url == "https://wandb.example.org")
        assert wandb_module.choose_mode("auto") == ("online", None)

    def test_online_that_fails_at_the_start_goes_on_offline(self, monkeypatch, folder, capsys):
        import wandb

        started = []
        real = wandb.init

        def init(mode, **arguments):
            started.append((mode, arguments["id"]))
            if mode == "online":
                raise wandb.errors.CommError("the server\nis away")
            return real(mode=mode, **arguments)

        monkeypatch.setattr(wandb, "init", init)
        monkeypatch.setattr(wandb_module, "choose_mode", lambda wanted: ("online", None))
        (logger,) = build_loggers(config_of(), folder)
        finish_loggers([logger], folder, "finished")
        (first, first_id), (second, second_id) = started
        assert (first, second) == ("online", "offline") and logger.mode == "offline"
        assert first_id != second_id  # wandb says "run ID is in use" for the one that did not start
        assert "the server is away; this run is logged offline" in capsys.readouterr().err


class TestOverrides:
    """Tags and groups come from what a sweep varies."""

    @pytest.fixture(autouse=True)
    def _clear(self):
        yield
        HydraConfig.instance().cfg = None

    def job(self, monkeypatch, typed, overrides, mode):
        monkeypatch.setattr(sys, "argv", ["train.py", *typed])
        with initialize_config_dir(str(ROOT / "configs"), version_base="1.3"):
            cfg = compose("train", overrides=[*overrides, f"hydra.mode={mode}"], return_hydra_config=True)
        HydraConfig.instance().set_config(cfg)

    def test_tags_are_what_the_sweep_varies(self, monkeypatch, folder):
        typed = ["-m", "seed=1,2", "optim.lr=1e-3", "trainer.max_steps=5"]
        self.job(monkeypatch, typed, ["seed=2", "optim.lr=1e-3", "trainer.max_steps=5"], "MULTIRUN")
        assert command_overrides()[1] == {"seed"}
        group = sweep_group(config_of(), *command_overrides())
        (logger,) = build_loggers(config_of(group=group), folder)
        finish_loggers([logger], folder, "finished")
        run = run_of(folder)
        assert list(run.run.tags) == ["seed=2"]
        assert run.run.run_group.startswith("sweep-seed-")

    def test_jobs_of_one_sweep_share_a_group_and_other_sweeps_do_not(self, monkeypatch):
        groups = []
        for seed, lr in ((1, "1e-3"), (2, "1e-3"), (1, "1e-2")):
            self.job(monkeypatch, ["-m", "seed=1,2", f"optim.lr={lr}"], [f"seed={seed}", f"optim.lr={lr}"], "MULTIRUN")
            groups.append(sweep_group(config_of(), *command_overrides()))
        assert groups[0] == groups[1] != groups[2]

    def test_a_single_run_is_tagged_with_what_was_typed_except_places(self, monkeypatch, folder):
        typed = ["optim.lr=1e-3", "name=mine", "runs_dir=elsewhere"]
        self.job(monkeypatch, typed, typed, "RUN")
        (logger,) = build_loggers(config_of(group=None), folder)
        finish_loggers([logger], folder, "finished")
        run = run_of(folder)
        assert list(run.run.tags) == ["optim.lr=1e-3"] and not run.run.run_group
