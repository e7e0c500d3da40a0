import argparse
from pathlib import Path

import pytest

from polarlm import cli
from polarlm.data import corpus
from polarlm.errors import UserError
from polarlm.launch import corpora
from tests.data.conftest import made_up_documents


def run(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    corpora.add_parser(parser.add_subparsers())
    options = parser.parse_args(["data", *arguments])
    return options.run(options)


@pytest.fixture
def choices(tmp_path: Path) -> list[str]:
    path = tmp_path / "book.txt"
    path.write_text("\n\n".join(made_up_documents(60)))
    return ["data=text", f"data.path={path}", "tokenizer=byte", f"cache_dir={tmp_path / 'cache'}"]


def test_prepare_info_and_sample_show_what_is_there(choices: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("prepare", *choices) == 0
    assert "bytes/token" in capsys.readouterr().out
    assert run("info", *choices) == 0
    assert "tokens per document, train" in capsys.readouterr().out
    assert run("sample", *choices, "--split", "train", "--count", "1", "--tokens", "11") == 0
    assert "Document 0." in capsys.readouterr().out


def test_documents_of_a_stranger_do_not_reach_the_terminal_as_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "book.txt").write_text("clear\x1b[2J the screen \u202e " * 100)
    choices = ["data=text", f"data.path={tmp_path / 'book.txt'}", "tokenizer=char", f"cache_dir={tmp_path / 'cache'}"]
    assert cli.main(["data", "sample", *choices]) == 0
    shown = capsys.readouterr().out
    assert "\x1b" not in shown and "\u202e" not in shown and "clear\\x1b[2J" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["info", "data=wikitex2"], r"data=wikitex2 does not exist. Did you mean wikitext2"),
        (["info", "tokenizer=bytes"], r"tokenizer=bytes does not exist. Did you mean byte\?.*Choices: bpe, byte"),
        (
            ["info", "data=text", "data.pth=x"],
            r"no setting 'data.pth' with.*Did you mean data.path.*--cfg job",
        ),
        (["info", "book.txt"], r"book.txt.*key=value"),
        (["sample", "--count", "0"], r"--count 0 must be at least 1"),
        (["sample", "--tokens", "-3"], r"--tokens -3 must be at least 1"),
        (["prepare", "data=text", "data.path=/nowhere.txt"], r"data.path=/nowhere.txt does not exist"),
        (["prepare", "data=text", "data.eval_tokens=-1"], r"data.eval_tokens=-1 must be a whole number"),
    ],
)
def test_what_was_mistyped_is_named(arguments: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message) as refused:
        run(*arguments)
    assert "\n" not in str(refused.value)


def test_verify_finds_damage_and_repairs_it(choices: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", *choices) == 1 and "not prepared yet" in capsys.readouterr().out
    run("prepare", *choices)
    assert run("verify", *choices) == 0 and "all intact" in capsys.readouterr().out
    prepared = corpus.prepared_corpus(*corpora.data_settings(choices))
    assert prepared is not None
    shard = prepared.folder / "train-00000.bin"
    intact = shard.read_bytes()
    shard.write_bytes(intact[:-1] + b"?")
    assert run("verify", *choices) == 1 and "does not match its checksum" in capsys.readouterr().out
    assert run("verify", *choices, "--repair") == 0 and "repaired" in capsys.readouterr().out
    assert shard.read_bytes() == intact
