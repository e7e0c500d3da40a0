"""A port for processes that find each other by its number."""

import random
import socket


def free_port() -> int:
    """A free port below those that Linux gives to outgoing connections: nobody takes it before it is used."""
    for port in random.SystemRandom().sample(range(20_000, 32_000), 100):
        with socket.socket() as tried:
            try:
                tried.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
    raise RuntimeError("no free port")
