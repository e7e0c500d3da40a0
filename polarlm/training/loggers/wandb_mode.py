"""Whether wandb can be online: decided in seconds, without a prompt, before wandb itself would wait for minutes."""

from __future__ import annotations

import configparser
import json
import netrc
import os
import threading
import urllib.error
import urllib.request
from functools import lru_cache
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit

from polarlm.errors import UserError

Mode = Literal["online", "offline", "disabled"]
MODES = ("auto", "online", "offline")
SERVER = "https://api.wandb.ai"
PATIENCE = 4.0  # seconds to find out whether the server answers


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
    if not reachable(server()):
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
            if path and (found := netrc.netrc(Path(path).expanduser()).authenticators(host)):
                return bool(found[2])
        except (OSError, netrc.NetrcParseError):
            continue
    return False


@lru_cache(maxsize=4)
def reachable(url: str) -> bool:
    """Whether the server answers a question within a few seconds; asked once per process, proxies respected."""
    question = json.dumps({"query": "query { serverInfo { cliVersionInfo } }"}).encode()
    request = urllib.request.Request(f"{url.rstrip('/')}/graphql", question, {"Content-Type": "application/json"})
    answered = threading.Event()

    def ask() -> None:
        try:
            urllib.request.urlopen(request, timeout=PATIENCE).close()
            answered.set()
        except urllib.error.HTTPError as error:
            if error.code < 500:  # it refuses the question, so it is there
                answered.set()
        except (OSError, ValueError):
            pass

    # Name resolution knows no timeout, so the question is asked in a thread that may be left behind.
    thread = threading.Thread(target=ask, name="wandb-reachable", daemon=True)
    thread.start()
    thread.join(PATIENCE + 1)
    return answered.is_set()
