"""Reads the error file a worker may have left. What others wrote is not trusted: size, kind and shape are checked."""

from __future__ import annotations

import json
import os
import stat
from typing import TYPE_CHECKING, Any

from ddplaunch.model import WorkerError

if TYPE_CHECKING:
    from pathlib import Path

MAX_BYTES = 4 << 20
_MAX_MESSAGE_CHARS = 20_000
_MAX_TRACEBACK_CHARS = 200_000


def read(path: Path) -> WorkerError | None:
    """The recorded exception in torch's schema; None where there is no such file.

    A file that is there but cannot be understood is an error of its own sort, told in ``message``: the worker did
    fail, and hiding that would be worse. Never blocks (a FIFO is not opened for reading) and never raises.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        return WorkerError(f"(its error file cannot be read: {error.strerror})", "", 0.0)
    try:
        return _read(fd)
    except OSError as error:
        return WorkerError(f"(its error file cannot be read: {error.strerror})", "", 0.0)
    finally:
        os.close(fd)


def _read(fd: int) -> WorkerError:
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return WorkerError("(its error file is not a regular file)", "", 0.0)
    if status.st_size > MAX_BYTES:
        return WorkerError(f"(its error file has {status.st_size} bytes, which is too many)", "", status.st_mtime)
    with os.fdopen(fd, "rb", closefd=False) as file:
        return _parse(file.read(MAX_BYTES), status.st_mtime)


def _parse(text: bytes, time_s: float) -> WorkerError:
    try:
        message = json.loads(text)["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return WorkerError("(its error file cannot be understood)", "", time_s)
    if isinstance(message, str):
        return WorkerError(message[:_MAX_MESSAGE_CHARS], "", time_s)
    if not isinstance(message, dict):
        return WorkerError("(its error file cannot be understood)", "", time_s)
    headline = str(message.get("message", ""))[:_MAX_MESSAGE_CHARS]
    return WorkerError(headline, _callstack(message.get("extraInfo")), time_s)


def _callstack(extra: Any) -> str:
    # Its end says what was raised.
    return str(extra.get("py_callstack", ""))[-_MAX_TRACEBACK_CHARS:] if isinstance(extra, dict) else ""
