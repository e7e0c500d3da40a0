"""Every command that a page prints is one that the program understands: keys, choices and flags exist."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from polarlm import cli
from polarlm.launch.evaluate import as_lists
from polarlm.launch.overrides import config_loader, plan_jobs

ROOT = Path(__file__).resolve().parents[1]
PAGES = ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
START = re.compile(r"^(?:\$ )?(?:\S+/bin/)?(?:python (train|eval)\.py|(?:python -m )?polarlm)(?:\s+|$)(.*)$")
# Settings that exist only once a reader has made the file that the page speaks of.
MADE_BY_THE_READER = ("mine", "my_block", "my-", "<", "lion", "…")


def commands(page: str) -> Iterator[str]:
    """What stands alone on a line of an indented or fenced passage, or between backticks, continued lines joined."""
    text = (ROOT / page).read_text(encoding="utf-8").replace("\\\n", " ")
    fences = re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    fenced = [code for language, code in fences if language in ("", "bash", "sh")]
    for line in "\n".join(fenced).splitlines():
        yield re.split(r"\s{2,}(?![-\w./]*=)|\s#", line.strip() + "  ")[0].strip()
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    yield from (re.sub(r"\s+", " ", quoted).partition(" > ")[0] for quoted in re.findall(r"`([^`]+)`", prose))


def printed_commands() -> list[tuple[str, str]]:
    seen = dict.fromkeys((page, command) for page in PAGES for command in commands(page) if START.match(command))
    return [(page, c) for page, c in seen if not any(word in c for word in MADE_BY_THE_READER)]


COMMANDS = printed_commands()


def test_pages_print_commands():
    assert len(COMMANDS) > 50 and {page for page, _ in COMMANDS} >= {
        "README.md",
        "docs/sweeps.md",
        "docs/evaluation.md",
    }


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=[f"{page}: {command}" for page, command in COMMANDS])
def test_a_printed_command_is_understood(page, command):
    script, rest = START.match(command).groups()
    words = shlex.split(rest)
    if script is None and words[:1] in (["train"], ["eval"]):
        script = words.pop(0)
    if script is None:
        if len(words) > 1 or words[:1] == ["doctor"]:  # `polarlm sweep`, `polarlm tune`: a name, not a command
            cli.parser().parse_args(words)
        elif words:
            assert words[0] in cli.parser().format_help()
        return
    flags = [word for word in words if word.startswith("-")]
    settings = [word for word in words if "=" in word and not word.startswith("-")]
    if "-sc" in flags or not settings:
        return
    settings = as_lists(settings) if script == "eval" else settings
    plan_jobs(config_loader(), script, settings, multirun="-m" in flags)
