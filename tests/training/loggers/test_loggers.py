"""The sinks beside metrics.jsonl: what was logged can be read back, nothing prompts, nothing waits."""

import json
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig

from polarlm import network
from polarlm.attention import PolarAttention
from polarlm.diagnostics import run_probe
from polarlm.errors import UserError
from polarlm.model import GPT, GPTConfig
from polarlm.runs.sweeps import command_overrides, sweep_group
from polarlm.training.loggers import sinks as loggers_module
from polarlm.training.loggers import wandb_mode
from polarlm.training.loggers.sinks import build_loggers, finish_loggers
from polarlm.visible import say_once
from tests.conftest import ROOT
from tests.training.loggers.offline_wandb import read_offline_run


def config_of(**changes):
    options = {"kind": "wandb", "project": "polarlm-tests", "entity": None, "mode": "auto"}
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
    """No login of whoever runs the tests is found, and hints are told anew."""
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_MODE", "offline")
    say_once.cache_clear()
    network.reachable.cache_clear()


def runs_of(folder):
    return [read_offline_run(path) for path in sorted((folder / "wandb").glob("offline-run-*"))]


@pytest.fixture(scope="module")
def probe():
    model = GPT(GPTConfig(vocab_size=20, context=12, d_model=16, n_layer=2, n_head=2), PolarAttention)
    return run_probe(model, torch.randint(0, 20, (2, 12)))


def test_an_offline_run_holds_what_was_logged(folder, probe, capfd):
    (sink,) = build_loggers(config_of(), folder)
    sink.log_metrics({"step": 1, "tokens": 64, "train/loss": 3.5, "train/grad_norm": None, **probe.scalars()}, step=1)
    sink.log_metrics({"step": 2, "tokens": 128, "train/loss": 3.25, "val/loss": 3.0, "val/perplexity": 20.1}, step=2)
    sink.log_metrics({"step": 3, "tokens": 192, "train/loss": 3.4, "val/loss": 3.1, "val/perplexity": 22.2}, step=3)
    sink.log_probe(probe, step=3, tokens=192)
    finish_loggers([sink], "finished")

    (run,) = runs_of(folder)
    assert (run.run.run_group, run.run.job_type, run.run.display_name) == ("first-look", "polar", "polar-tiny")
    assert run.config["model"] == {"d_model": 16} and run.config["seed"] == 3
    assert run.config["code"] == {"commit": "abc123", "dirty": False, "version": "0.1.0"}
    assert [row["tokens"] for row in run.rows] == [64, 128, 192, 192]
    assert run.rows[0]["train/loss"] == 3.5 and "train/grad_norm" not in run.rows[0]
    evidence = [v for name, v in probe.scalars().items() if name.startswith("precision/log_evidence/")]
    assert len(evidence) == 4
    assert run.rows[0]["precision/log_evidence"] == pytest.approx(sum(evidence) / 4)
    assert run.metrics["*"].step_metric == "tokens"
    assert run.metrics["val/loss"].summary.min and run.metrics["val/perplexity"].summary.min
    assert run.summary["status"] == "finished" and run.exit_code == 0
    seen = capfd.readouterr()
    assert "wandb sync" in seen.err and not seen.out


def test_probe_charts_are_native_files(folder, probe):
    (sink,) = build_loggers(config_of(), folder)
    sink.log_probe(probe, step=7, tokens=448)
    finish_loggers([sink], "finished")
    (path,) = (folder / "wandb").glob("offline-run-*")
    (run,) = runs_of(folder)
    row = run.rows[0]

    def figure(name):
        assert row[f"{name}/_type"] == "plotly-file"
        return json.loads((path / "files" / row[f"{name}/path"]).read_text())

    shares = figure("radial/magnitude/histogram")["data"]
    assert [trace["name"] for trace in shares] == ["layer 0", "layer 1"]
    assert sum(shares[1]["y"]) == pytest.approx(1.0)
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


def test_the_number_of_names_does_not_grow_with_layers_and_heads():
    from polarlm.training.loggers.wandb_sink import means_over_layers

    def names(layers, heads):
        row = {"step": 1, "tokens": 2, "train/loss": 3.0}
        row |= {f"radial/growth/layer_{n:02d}": 1.0 * n for n in range(layers)}
        row |= {f"attention/entropy/layer_{n:02d}/head_{h}": 1.0 for n in range(layers) for h in range(heads)}
        return means_over_layers(row)

    assert (
        set(names(4, 4)) == set(names(48, 25)) == {"step", "tokens", "train/loss", "radial/growth", "attention/entropy"}
    )
    assert names(4, 4)["radial/growth"] == 1.5


def test_runs_of_a_sweep_are_grouped_by_what_varies_and_not_by_seed():
    from polarlm.training.loggers.sinks import what_varies

    overrides = ["block=polar", "optim.lr=0.003", "seed=2", "runs_dir=x"]
    assert what_varies("polar", overrides, {"block", "optim.lr", "seed"}) == "polar, optim.lr=0.003"
    assert what_varies("polar", overrides, {"optim.lr", "seed"}) == "optim.lr=0.003"
    assert what_varies("polar", overrides, {"seed"}) == what_varies("polar", overrides, set()) == "polar"


def test_a_continued_run_keeps_its_id(folder):
    for tokens in (64, 128):
        (sink,) = build_loggers(config_of(), folder)
        sink.log_metrics({"step": 1, "tokens": tokens})
        finish_loggers([sink], "failed" if tokens == 64 else "finished")
        time.sleep(1.1)  # offline folders are named by the second
    first, second = runs_of(folder)
    assert first.run.run_id == second.run.run_id
    assert (first.exit_code, second.exit_code) == (1, 0)


def test_two_jobs_of_one_process_are_two_runs(folder):
    other = folder.with_name("standard-tiny")
    other.mkdir()
    (first,) = build_loggers(config_of(), folder)
    first.log_metrics({"step": 1, "tokens": 1})
    finish_loggers([first], "failed")
    (second,) = build_loggers(config_of(choices={"block": "standard"}), other)
    second.log_metrics({"step": 1, "tokens": 2})
    finish_loggers([second], "finished")
    (a,), (b,) = runs_of(folder), runs_of(other)
    assert a.run.run_id != b.run.run_id
    assert ([row["tokens"] for row in a.rows], [row["tokens"] for row in b.rows]) == ([1], [2])
    assert (a.run.job_type, b.run.job_type) == ("polar", "standard") and a.run.run_group == b.run.run_group


def test_a_sink_that_fails_to_close_does_not_hide_the_runs_own_error(capsys):
    def finish(status, summary):
        raise ConnectionError("gone")

    finish_loggers([SimpleNamespace(finish=finish, save_dir="x")], "failed")
    assert "could not be closed (gone)" in capsys.readouterr().err


def test_other_ranks_and_none_log_nothing(folder, monkeypatch):
    assert build_loggers(config_of(logger={"kind": "none"}), folder) == []
    monkeypatch.setattr(loggers_module.rank_zero_only, "rank", 1)
    assert build_loggers(config_of(), folder) == []


def test_disabled_by_wandbs_own_variable(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert build_loggers(config_of(), folder) == []


def test_unknown_kind_and_mode_are_refused(folder, monkeypatch):
    with pytest.raises(UserError, match=r"logger\.kind='tensorboard'.*wandb, trackio, none"):
        build_loggers(config_of(logger={"kind": "tensorboard"}), folder)
    with pytest.raises(UserError, match=r"logger\.mode='onlin'.*auto, online, offline"):
        wandb_mode.choose_mode("onlin")


def test_trackio_without_its_package_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "trackio", None)
    with pytest.raises(UserError, match=r"pip install 'polarlm\[trackio\]'"):
        build_loggers(config_of(logger={"kind": "trackio", "project": "p"}), folder)


def test_trackio_run_can_be_read_back(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    storage = pytest.importorskip("trackio.sqlite_storage").SQLiteStorage
    (sink,) = build_loggers(config_of(logger={"kind": "trackio", "project": "p"}), folder)
    sink.log_metrics({"step": 5, "tokens": 320, "train/loss": 2.5, "train/grad_norm": None}, step=5)
    finish_loggers([sink], "finished")
    first = storage.get_logs("p", "polar-tiny")[0]
    assert (first["step"], first["tokens"], first["train/loss"]) == (5, 320, 2.5) and "train/grad_norm" not in first


class TestMode:
    """online, offline, and the seconds it takes to decide."""

    @pytest.fixture(autouse=True)
    def _unset(self, monkeypatch):
        monkeypatch.delenv("WANDB_MODE")

    def test_offline_without_login(self):
        assert wandb_mode.choose_mode("auto") == ("offline", None)

    def test_online_without_login_is_an_error_that_says_what_to_do(self):
        with pytest.raises(UserError, match="wandb login"):
            wandb_mode.choose_mode("online")

    @pytest.mark.timeout(60)
    @pytest.mark.parametrize("mode", ["auto", "online"])
    def test_a_dead_network_is_noticed(self, monkeypatch, mode):
        monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
        with socket.socket() as ours:  # nobody listens on it, and nobody else can
            ours.bind(("127.0.0.1", 0))
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{ours.getsockname()[1]}")
            chosen, note = wandb_mode.choose_mode(mode)
        assert chosen == "offline" and "does not answer" in note and "\n" not in note

    @pytest.mark.timeout(60)
    def test_a_server_that_accepts_but_never_answers_is_given_up(self, monkeypatch):
        monkeypatch.setattr(network, "PATIENCE", 0.3)
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            server.listen()
            monkeypatch.setenv("WANDB_API_KEY", "x" * 40)
            monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
            assert wandb_mode.choose_mode("auto")[0] == "offline"

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
            assert wandb_mode.choose_mode("auto")[0] == mode
            server.shutdown()

    def test_login_is_found_in_netrc_for_the_configured_server(self, monkeypatch, tmp_path):
        (tmp_path / "netrc").write_text("machine wandb.example.org login user password " + "y" * 40 + "\n")
        assert not wandb_mode.logged_in()
        monkeypatch.setenv("WANDB_BASE_URL", "https://wandb.example.org")
        assert wandb_mode.logged_in()
        monkeypatch.setattr(wandb_mode, "answers", lambda url: url == "https://wandb.example.org")
        assert wandb_mode.choose_mode("auto") == ("online", None)

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
        monkeypatch.setattr("polarlm.training.loggers.wandb_sink.choose_mode", lambda wanted: ("online", None))
        (sink,) = build_loggers(config_of(), folder)
        finish_loggers([sink], "finished")
        (first, first_id), (second, second_id) = started
        assert (first, second) == ("online", "offline") and sink.offline
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
        (sink,) = build_loggers(config_of(group=group), folder)
        finish_loggers([sink], "finished")
        (run,) = runs_of(folder)
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
        (sink,) = build_loggers(config_of(group=None), folder)
        finish_loggers([sink], "finished")
        (run,) = runs_of(folder)
        assert list(run.run.tags) == ["optim.lr=1e-3"] and not run.run.run_group
