"""What tests of hostile input share: how a refusal reads, and a disk that fills up."""

import errno
import os
import stat
from collections.abc import Callable

import pytest

from polarlm.errors import UserError


def refused(call: Callable[[], object], *parts: str) -> str:
    """The sentence with which something is refused; it names what was asked for and is not a traceback."""
    with pytest.raises(UserError) as caught:
        call()
    message = str(caught.value)
    assert "\n" not in message and all(part in message for part in parts), message
    return message


class FullDisk:
    """os.fsync refuses from the n-th call on, as a full disk does for what was only buffered."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, after: int, code: int = errno.ENOSPC):
        self.left, self.code, self.refused = after, code, 0
        self._real = os.fsync
        monkeypatch.setattr(os, "fsync", self)

    def __call__(self, number: int) -> None:
        self.left -= 1
        if self.left < 0 and stat.S_ISREG(os.fstat(number).st_mode):
            self.refused += 1
            raise OSError(self.code, os.strerror(self.code))
        self._real(number)
