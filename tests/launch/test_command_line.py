"""`polarlm <verb>`: wrong words are one sentence with the nearest right one, and nothing ends in a traceback."""

import os
import signal
import subprocess
import sys

import pytest

from polarlm import cli

# What is typed | words of the answer.
WRONG = """
comparee                      | verb 'comparee' | compare
docter                        | doctor
compare runs --basline x      | --basline | --baseline
--versionn                    | verb
generate                      | run
generate nothing-here         | nothing-here
data                          | action
data prepar                   | prepare
data sample --count x         | --count | 'x'
data sample --split valid     | val
data prepare data=nothing     | nothing | wikitext2
compare nowhere               | nowhere
compare nowhere --watch -3    | --watch
sweep                         | action
sweep stats x                 | status
sweep status                  | group
sweep status nothing          | nothing
doctor --oflline              | --offline
inspect nothing-here          | nothing-here
export nothing-here           | nothing-here
generate x --tokens x         | --tokens | 'x'
generate x --tokens -1        | --tokens
generate x --seed 9999999999999999999999 | seed
generate x --temperature nan  | temperature
generate x --top-k 0          | top_k
generate x --device toaster   | device | cpu
generate x --bogus            | --bogus
inspect                       | --plan
inspect --plan gpu=h100       | gpus
inspect --plan gpus=0 gpu=h100 | gpus=0
inspect --plan gpus=8 gpu=h1oo | h100
inspect --plan gpus=8 gpu=h100 mfu=2 | mfu=2
trial polar                   | --data
tune                          | --low
study nothing                 | nothing | claims
import nothing-here --out x   | nothing-here
harness nothing-here          | nothing-here
                              | verb
"""


@pytest.mark.parametrize("line", WRONG.strip("\n").splitlines())
def test_a_wrong_command_is_one_sentence(line, capsys, tmp_path, monkeypatch):
    typed, *words = (part.strip() for part in line.split("|"))
    monkeypatch.chdir(tmp_path)
    assert cli.main(typed.split()) == 2
    message = capsys.readouterr().err.strip()
    assert message.startswith("error: ") and "\n" not in message
    for word in words:
        assert word in message
    assert list(tmp_path.iterdir()) == []


def test_a_failure_of_ours_is_one_line_unless_debug_is_asked_for(capsys, monkeypatch):
    def broken(options):
        raise RuntimeError("out of luck")

    monkeypatch.setattr("polarlm.launch.doctor.doctor", broken)
    assert cli.main(["doctor"]) == 1
    assert "RuntimeError: out of luck" in capsys.readouterr().err
    with pytest.raises(RuntimeError):
        cli.main(["doctor", "--debug"])


@pytest.mark.skipif(sys.platform == "win32", reason="no SIGPIPE")
@pytest.mark.parametrize("typed", ["train --help", "train --cfg job", "compare --help"])
def test_a_reader_who_leaves_early_is_no_failure(typed):
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "polarlm", *typed.split()], stdout=writing, stderr=subprocess.PIPE, text=True
    )
    os.close(writing)
    assert done.stderr == "" and done.returncode in (0, -signal.SIGPIPE)


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as done:
        cli.main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out.startswith("polarlm ")


def test_settings_may_stand_before_and_after_flags():
    options = cli.parser().parse_args(
        ["tune", "block=polar", "--low", "1", "--high", "2", "seed=3", "--trials", "4", "optim.lr=1"]
    )
    assert options.settings == ["block=polar", "seed=3", "optim.lr=1"] and options.trials == 4
