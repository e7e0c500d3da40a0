"""A run's wandb record, read back from disk: it ends with the numbers of summary.json, however the run ended."""

from tests.training.loggers.offline_wandb import read_offline_run


def recorded(shell, name):
    (path,) = (shell.folder / "runs" / name / "wandb").glob("offline-run-*")
    return read_offline_run(path)


def test_the_record_of_a_finished_run_holds_the_final_table(shell):
    done = shell.train("name=kept", "logger=wandb", WANDB_MODE="offline")
    assert done.code == 0, done.out
    run, summary = recorded(shell, "kept"), shell.summary("kept")
    assert (run.exit_code, run.summary["status"]) == (0, "finished")
    for name in ("loss", "perplexity", "bits_per_byte"):
        assert run.summary[f"final/val/{name}"] == summary[f"val/{name}"]
        assert run.summary[f"baselines/bigram/{name}"] == summary["baselines"]["bigram"][name]
    for name in ("tokens", "seconds", "tokens_per_second", "parameters", "flops_per_token", "seed", "sample"):
        assert run.summary[name] == summary[name], name
    assert run.summary["step_seconds/forward"] == summary["step_seconds"]["forward"]
    validated = [row["val/loss"] for row in run.rows if "val/loss" in row]
    assert validated == [row["val/loss"] for row in shell.rows("kept") if "val/loss" in row]
    assert run.summary["val/loss"] == {"min": min(validated)}


def test_a_run_that_fails_is_closed_as_failed_and_says_why(shell):
    callbacks = shell.folder / "configs" / "callbacks"
    callbacks.mkdir(parents=True)
    target = "tests.end_to_end.poison.PoisonWeights"
    (callbacks / "poison.yaml").write_text(f"poison:\n  _target_: {target}\n  after_step: 13\n")
    done = shell.train("name=lost", "logger=wandb", "callbacks=poison", WANDB_MODE="offline")
    assert done.code != 0
    run, summary = recorded(shell, "lost"), shell.summary("lost")
    assert (run.exit_code, run.summary["status"], summary["status"]) == (1, "failed", "failed")
    assert run.summary["error"] == summary["error"]
    assert "gradients of step 14 are not finite" in summary["error"]
    validated = [row["val/loss"] for row in run.rows if "val/loss" in row]
    assert validated == [row["val/loss"] for row in shell.rows("lost") if "val/loss" in row] != []
    assert not [name for name in run.summary if name.startswith("final/")]
