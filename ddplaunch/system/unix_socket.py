"""One request to a server at a unix socket, and its answer, each one line.

Used by commands and by agents. Does not know what the lines mean.
"""

from __future__ import annotations

import socket
import time

from ddplaunch.system import linux


def ask(path: str, pid: int, line: bytes, deadline: float, max_bytes: int) -> bytes:
    """The answer of process ``pid``, which serves ``path``; ``deadline`` is by ``time.monotonic()``.

    Raises:
        OSError: there is none; another process serves it.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(max(0.001, deadline - time.monotonic()))
        connection.connect(path)
        if linux.peer_credentials(connection)[0] != pid:
            raise ConnectionError("another process serves it")
        connection.sendall(line)
        with connection.makefile("rb") as stream:
            answer = stream.readline(max_bytes)
    if not answer.endswith(b"\n"):
        raise ConnectionError("the launcher has closed the connection")
    return answer
