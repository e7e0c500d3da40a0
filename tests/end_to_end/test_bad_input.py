"""Wrong input: one clear message, an exit code, no traceback, nothing half-written."""

import shutil

import pytest

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def files(workshop):
    folder = workshop.folder
    (folder / "empty.txt").write_text("")
    (folder / "latin.txt").write_bytes("naïve café ".encode("latin-1") * 500)
    (folder / "short.txt").write_text("too short")
    return folder


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["block=plar"], ["block=plar", "polar"]),
        (["experiment=nonexistent"], ["experiment=nonexistent", "gpt2_124m"]),
        (["block=polar", "block.nuu=3"], ["block.nuu", "block.nu"]),
        (["trainer.max_step=3"], ["trainer.max_step", "trainer.max_steps"]),
        (["model.n_head=5"], ["n_head", "d_model"]),
        (["model.d_model=30", "model.n_head=2"], ["odd", "15"]),
        (["data.path=nowhere.txt"], ["nowhere.txt"]),
        (["data.path=empty.txt"], ["empty.txt"]),
        (["data.path=latin.txt"], ["latin.txt", "UTF-8"]),
        (["data.path=short.txt", "model.context=64"], ["context"]),
        (["trainer.batch_tokens=1000"], ["batch_tokens", "context"]),
        (["trainer.precision=fp7"], ["precision", "bf16-mixed"]),
        (["resume=maybe"], ["resume", "auto"]),
        (["name=a/b"], ["name"]),
        (["optim.lr=[1"], ["optim.lr"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else str(value),
)
def test_a_wrong_setting_gets_one_message_and_leaves_no_run(workshop, files, arguments, words):
    before = sorted(p.name for p in (workshop.folder / "runs").iterdir())
    done = workshop.train(*arguments)
    assert done.code not in (0, None)
    message = [line for line in done.out.splitlines() if line.startswith("error: ")]
    assert len(message) == 1, done.out
    for word in words:
        assert word in message[0], message[0]
    assert "Traceback" not in done.out
    assert sorted(p.name for p in (workshop.folder / "runs").iterdir()) == before


def test_debug_shows_the_traceback(workshop):
    done = workshop.train("model.n_head=5", "--debug")
    assert done.code != 0 and "Traceback" in done.out and "error: " in done.out


def test_a_tokenizer_that_does_not_match_the_checkpoint_is_refused(workshop):
    other = workshop.folder / "runs" / "mixed"
    shutil.copytree(workshop.folder / "runs" / "done", other)
    assert workshop.train("name=chars", "tokenizer=char", "trainer.max_steps=2").code == 0
    shutil.rmtree(other / "tokenizer")
    shutil.copytree(workshop.folder / "runs" / "chars" / "tokenizer", other / "tokenizer")
    done = workshop.run("eval.py", f"checkpoint={other}", f"cache_dir={workshop.folder}/cache")
    assert done.code == 2 and "vocabulary" in done.out and "Traceback" not in done.out
    shutil.rmtree(other)


@pytest.mark.parametrize("where", ["runs/none", "corpus.txt", "."])
def test_evaluating_something_that_is_no_run_says_so(workshop, where):
    done = workshop.run("eval.py", f"checkpoint={workshop.folder}/{where}")
    assert done.code == 2 and "error: " in done.out and "Traceback" not in done.out
