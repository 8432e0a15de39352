"""A c10d store in plain Python: the calls that ddplaunch makes, with torch's semantics, over a protocol of its own.

The calls that ddplaunch makes without torch (``PlainStore``) come in torch's protocol.
"""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any, NoReturn

_HELLO = b"stub store\n"
_LENGTH = struct.Struct("!I")
_TORCHS_HELLO = struct.pack("=BI", 0, 0x3C85F7CE)
_PAUSE_S = 0.05


class DistStoreError(RuntimeError):
    """As torch: a call took longer than the client's timeout, or its connection broke."""


class DistNetworkError(RuntimeError):
    """As torch: no store could be reached."""


class TCPStore:
    """Serves the store where ``is_master``, and is a client of it; calls of one client exclude each other."""

    def __init__(
        self,
        host_name: str,
        port: int,
        world_size: int | None = None,
        is_master: bool = False,
        timeout: timedelta = timedelta(seconds=300),
        wait_for_workers: bool = True,
        multi_tenant: bool = False,
        master_listen_fd: int | None = None,
        use_libuv: bool = True,
    ) -> None:
        self.host, self.port, self.timeout = host_name, port, timeout
        if is_master:
            assert master_listen_fd is not None, "ddplaunch always hands over a socket that listens"
            _Server(socket.socket(fileno=master_listen_fd))
        self._lock = threading.Lock()
        self._socket = _connect(host_name, port, time.monotonic() + timeout.total_seconds())
        weakref.finalize(self, self._socket.close)

    def clone(self) -> TCPStore:
        return TCPStore(self.host, self.port, timeout=self.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        self.timeout = timeout

    def set(self, key: str, value: str) -> None:
        self._call("multi_set", [key], [value])

    def multi_set(self, keys: Sequence[str], values: Sequence[str]) -> None:
        self._call("multi_set", list(keys), list(values))

    def get(self, key: str) -> bytes:
        return str(self._call("get", key, self.timeout.total_seconds())).encode()

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.get(key) for key in keys]

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        return str(self._call("compare_set", key, expected, desired)).encode()

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._call("check", list(keys)))

    def _call(self, name: str, *arguments: object) -> Any:
        with self._lock:
            try:
                _send(self._socket, [name, *arguments])
                error, value = _receive(self._socket)
            except OSError as failure:
                raise DistNetworkError(
                    f"failed to recv, got 0 bytes. Connection was likely closed: {failure}"
                ) from None
        if error:
            raise DistStoreError(error)
        return value


def _connect(host: str, port: int, deadline: float) -> socket.socket:
    """Until the deadline, as torch: a store that does not listen yet is waited for, and one that never greets too."""
    while True:
        try:
            connected = socket.create_connection((host, port), timeout=max(0.01, deadline - time.monotonic()))
            with contextlib.ExitStack() as stack:
                stack.enter_context(connected)
                connected.sendall(_HELLO)
                if _exactly(connected, len(_HELLO)) == _HELLO:
                    connected.settimeout(None)
                    stack.pop_all()
                    return connected
        except OSError as error:
            if time.monotonic() > deadline:
                raise DistNetworkError(f"The client socket has failed to connect to [{host}]:{port}: {error}") from None
        time.sleep(_PAUSE_S)


class _Server:
    """A thread for each client; values are texts."""

    def __init__(self, listener: socket.socket) -> None:
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> NoReturn:
        while True:
            client = listener.accept()[0]
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        with client, contextlib.suppress(OSError):
            if (hello := _exactly(client, len(_TORCHS_HELLO))) == _TORCHS_HELLO:
                self._serve_plain(client)
            if hello + _exactly(client, len(_HELLO) - len(hello)) == _HELLO:
                client.sendall(_HELLO)
            while True:
                name, *arguments = _receive(client)
                with self._changed:
                    answer = getattr(self, f"_{name}")(*arguments)
                    self._changed.notify_all()
                _send(client, answer)

    def _serve_plain(self, client: socket.socket) -> NoReturn:
        def number(kind: str) -> int:
            return int(struct.unpack(f"={kind}", _exactly(client, struct.calcsize(f"={kind}")))[0])

        def text() -> str:
            return _exactly(client, number("Q")).decode()

        while True:
            query = number("B")
            keys = [text().removeprefix("/") for _ in range(number("Q") if query == 5 else 1)]
            with self._changed:
                if query == 1:
                    self._values[keys[0]] = text()
                elif query == 3:
                    value = self._values[keys[0]].encode()
                    client.sendall(struct.pack("=Q", len(value)) + value)
                elif query == 4:
                    client.sendall(struct.pack("=q", self._add(keys[0], number("q"))[1]))
                else:
                    client.sendall(bytes([not self._check(keys)[1]]))
                self._changed.notify_all()

    def _multi_set(self, keys: list[str], values: list[str]) -> tuple[str, None]:
        self._values.update(zip(keys, values, strict=True))
        return "", None

    def _get(self, key: str, timeout_s: float) -> tuple[str, str | None]:
        if self._changed.wait_for(lambda: key in self._values, min(timeout_s, threading.TIMEOUT_MAX)):
            return "", self._values[key]
        return f"wait timeout after {timeout_s * 1000:g}ms, keys: /{key}", None

    def _add(self, key: str, amount: int) -> tuple[str, int]:
        number = int(self._values.get(key, "0")) + amount
        self._values[key] = str(number)
        return "", number

    def _compare_set(self, key: str, expected: str, desired: str) -> tuple[str, str]:
        if self._values.get(key, "") == expected:
            self._values[key] = desired
        return "", self._values.get(key, expected)

    def _check(self, keys: list[str]) -> tuple[str, bool]:
        return "", all(key in self._values for key in keys)


def _send(sock: socket.socket, message: object) -> None:
    data = json.dumps(message).encode()
    sock.sendall(_LENGTH.pack(len(data)) + data)


def _receive(sock: socket.socket) -> Any:
    return json.loads(_exactly(sock, _LENGTH.unpack(_exactly(sock, _LENGTH.size))[0]))


def _exactly(sock: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        chunk = sock.recv(count - len(data))
        if not chunk:
            raise ConnectionResetError("Connection reset by peer")
        data += chunk
    return data
