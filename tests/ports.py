"""A port for processes that find each other by its number."""

import contextlib
import random
import socket
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def held_port() -> Iterator[int]:
    """A port that nobody else is given while it is held, but that a server which reuses addresses can listen on.

    It lies below those that Linux gives to outgoing connections. Torch's and most other servers reuse addresses, as
    this socket, which is bound and never listens; whoever looks for a free port does not, and is refused.
    """
    with contextlib.ExitStack() as stack:
        for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
            held = socket.socket()
            try:
                held.bind(("127.0.0.1", port))  # without reuse: taken ports are refused, also those held like this one
            except OSError:
                held.close()
                continue
            held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if sys.platform == "linux":
                stack.enter_context(held)
            else:  # elsewhere such a socket would swallow the connections
                held.close()
            yield port
            return
    raise RuntimeError("no free port")
