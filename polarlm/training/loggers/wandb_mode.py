"""Whether wandb can be online: decided in seconds, without a prompt, before wandb itself would wait for minutes."""

from __future__ import annotations

import configparser
import json
import netrc
import os
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from polarlm import network
from polarlm.errors import UserError

Mode = Literal["online", "offline", "disabled"]
MODES = ("auto", "online", "offline")
SERVER = "https://api.wandb.ai"


def choose_mode(wanted: str) -> tuple[Mode, str | None]:
    """(online | offline | disabled, a sentence when the user gets less than was asked for)."""
    if wanted not in MODES:
        raise UserError(f"logger.mode={wanted!r} is unknown; choose one of {', '.join(MODES)}")
    variable = os.environ.get("WANDB_MODE", "").lower()
    if variable in ("disabled", "offline", "dryrun"):
        return ("disabled" if variable == "disabled" else "offline"), None
    if wanted == "offline":
        return "offline", None
    if not logged_in():
        if wanted == "online" or variable == "online":
            raise UserError(
                "logger.mode=online needs a wandb login, and there is none; run `wandb login` or set WANDB_API_KEY, "
                "or choose logger.mode=offline"
            )
        return "offline", None
    if not answers(server()):
        return "offline", f"wandb: {server()} does not answer; this run is logged offline"
    return "online", None


def server() -> str:
    """The server wandb talks to: WANDB_BASE_URL, else what `wandb login --host` stored, else the public one."""
    if url := os.environ.get("WANDB_BASE_URL"):
        return url
    settings = configparser.ConfigParser()
    try:
        settings.read(Path(os.environ.get("WANDB_CONFIG_DIR", "~/.config/wandb")).expanduser() / "settings")
        return settings.get("default", "base_url", fallback=SERVER)
    except configparser.Error:
        return SERVER


def logged_in() -> bool:
    """Whether wandb would find credentials for its server without asking."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(server()).netloc
    for path in (os.environ.get("NETRC"), "~/.netrc", "~/_netrc"):
        try:
            if path and (login := netrc.netrc(Path(path).expanduser()).authenticators(host)):
                return bool(login[2])
        except (OSError, netrc.NetrcParseError):
            continue
    return False


def answers(url: str) -> bool:
    """Whether wandb's server at `url` answers."""
    question = json.dumps({"query": "query { serverInfo { cliVersionInfo } }"}).encode()
    return network.reachable(f"{url.rstrip('/')}/graphql", question)
