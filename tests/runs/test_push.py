"""An exported run goes to the hub in one commit, comes back as the same model, and every refusal is a sentence."""

import pytest

from polarlm.cli import main
from polarlm.errors import UserError
from polarlm.launch.commands import verdict_on
from polarlm.runs.export.folder import push_folder
from tests.runs.made_up_run import made_up_run
from tests.runs.upload_hub import TOKEN, upload_hub
from tests.synthetic_runs import write_sweep


@pytest.fixture
def hub(monkeypatch):
    with upload_hub() as hub:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", hub.url)  # read from HF_ENDPOINT at import
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # 127.0.0.1 is no network
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield hub


def test_a_pushed_run_is_one_commit_and_comes_back_as_the_same_files(hub, tmp_path, capsys):
    run = made_up_run(tmp_path / "run", "polar")
    assert main(["export", str(run.folder), "--push", "owner/small-polar"]) in (0, None)
    assert [commit["repo"] for commit in hub.commits] == ["owner/small-polar"]
    stored = hub.files["owner/small-polar"]
    assert {"config.json", "model.safetensors", "README.md", "modeling_polarlm.py"} <= set(stored)
    assert "cannot show that one block is better" in stored["README.md"].decode()
    assert f"{hub.url}/owner/small-polar/commit/" in capsys.readouterr().out
    written = run.folder / "export-hf"
    files = {str(path.relative_to(written)): path.read_bytes() for path in written.rglob("*") if path.is_file()}
    assert stored == files


def test_files_that_export_did_not_write_are_not_published(hub, tmp_path):
    (tmp_path / "README.md").write_text("a model")
    (tmp_path / ".env").write_text("SECRET=1")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git" / "config").write_text("url = https://user:token@host")
    push_folder(tmp_path, "owner/name")
    assert set(hub.files["owner/name"]) == {"README.md"}


def test_pushing_again_updates_the_repository(hub, tmp_path):
    (tmp_path / "a").mkdir()
    for text in ("one", "two"):
        (tmp_path / "a" / "README.md").write_text(text)
        push_folder(tmp_path / "a", "owner/name")
    assert len(hub.commits) == 2 and hub.files["owner/name"]["README.md"] == b"two"


@pytest.mark.parametrize(
    ("name", "token", "said"),
    [
        ("nobody", TOKEN, "give the repository as owner/name"),
        ("owner/name", None, "not logged in"),
        ("owner/name", "hf_wrong", "the token is not valid"),
    ],
)
def test_a_push_that_cannot_work_is_a_sentence(hub, tmp_path, monkeypatch, name, token, said):
    monkeypatch.setattr("huggingface_hub.get_token", lambda: token)
    monkeypatch.setattr("huggingface_hub.utils._headers.get_token", lambda: token, raising=False)
    if token:
        monkeypatch.setenv("HF_TOKEN", token)
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(UserError, match=said):
        push_folder(tmp_path, name)
    assert not hub.commits


def test_a_hub_that_does_not_answer_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    (tmp_path / "README.md").write_text("x")
    with pytest.raises(UserError, match=r"can't be reached .*; the folder is complete in"):
        push_folder(tmp_path, "owner/name")


def test_the_card_of_a_run_of_a_sweep_has_the_verdict_on_its_block(tmp_path):
    folders = write_sweep(tmp_path, blocks=("standard", "polar"), diagnostics=False)
    assert verdict_on(folders[-1]).startswith("polar: better than standard, lower by ")
    assert verdict_on(write_sweep(tmp_path / "one", blocks=("polar",), seeds=(1,), diagnostics=False)[0]) is None
