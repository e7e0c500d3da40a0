"""Whether a server answers: found out in seconds, where the libraries that talk to it would wait for minutes."""

from __future__ import annotations

import threading
import urllib.error
import urllib.request
from functools import lru_cache

PATIENCE = 4.0  # seconds


@lru_cache(maxsize=8)
def reachable(url: str, question: bytes | None = None) -> bool:
    """Whether `url` answers (a JSON `question`, or its mere address); asked once per process, proxies respected."""
    headers = {} if question is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(url, question, headers, method="HEAD" if question is None else "POST")
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

    # Looking up a name knows no time limit, so the question is asked in a thread that may be left behind.
    thread = threading.Thread(target=ask, name="polarlm-reachable", daemon=True)
    thread.start()
    thread.join(PATIENCE + 1)
    return answered.is_set()
