"""Makes a logged-in SSH connection from a byte stream to an sshd: handshake, check of the host key, login.

Runs in the launcher, in a thread of ``Connections``. Must not prompt the user; every wait has a deadline.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ddplaunch.features.ssh.config import ALGORITHMS_HINT, ConnectFailed, HostConfig, choose_algorithms
from ddplaunch.features.ssh.keys import KeyRing, log_in
from ddplaunch.features.ssh.known_hosts import KnownHosts, Result, host_names
from ddplaunch.features.ssh.sockets import close_stream
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import paramiko

    from ddplaunch.features.remote.io_thread import IoThread

_POLL_S = 30.0
"""Seconds after which paramiko's thread interrupts its reading; paramiko's default is 0.1."""

_NEVER_S = 86400.0
_DROPPED_TRIES = 12

_NO_SSHD = ("Indecipherable protocol version", "Invalid SSH banner")
"""Parts of paramiko's messages; it has no exception class for this error."""


def connect(
    io: IoThread,
    stream: socket.socket | paramiko.Channel,
    config: HostConfig,
    known: KnownHosts,
    ring: KeyRing,
    deadline: float,
) -> paramiko.Transport:
    """A logged-in connection over ``stream``; takes over ``stream``, and closes it on failure.

    Blocks until ``deadline`` (``time.monotonic()``).

    Raises:
        ConnectFailed: the server, the user's keys or the configuration prevent a connection.
    """
    import paramiko

    try:
        transport = paramiko.Transport(stream)
    except BaseException:
        close_stream(stream)
        raise
    _mute_log(transport)
    is_late = threading.Event()
    try:
        with transport_deadline(io, transport, lambda: deadline) as is_late:
            names = host_names(config.hostname, config.port, config.host_key_alias)
            choose_algorithms(transport, dict(config.algorithms), known.key_types(names))
            _handshake(transport, config)
            _check_key(transport, config, known, names)
            log_in(transport, config, ring)
        stream.settimeout(_POLL_S)
        return transport
    except BaseException as error:
        close_now(transport)
        if is_late.is_set():
            hint = "--connect-timeout gives it more time."
            raise ConnectFailed("timeout", f"port {config.port} answers, but its sshd does not", hint) from None
        raise _as_unreachable(error) from None


def _mute_log(transport: paramiko.Transport) -> None:
    """Suppress paramiko's tracebacks for this connection only; other code in this process may use its log."""
    logger = logging.getLogger("ddplaunch.paramiko")
    logger.setLevel(logging.CRITICAL + 1)
    transport.set_log_channel(logger.name)


@contextlib.contextmanager
def transport_deadline(
    io: IoThread, transport: paramiko.Transport, deadline: Callable[[], float]
) -> Iterator[threading.Event]:
    """Close the connection at ``deadline()`` unless the block has ended: many of paramiko's waits have no timeout.

    It is asked again when it has passed.

    Yields an event that is set when the deadline has passed.
    """
    has_passed = threading.Event()
    closing = [transport]

    def end() -> None:
        if closing and deadline() > time.monotonic():
            io.at(deadline(), end)
        elif closing:
            has_passed.set()
            in_thread("late login", functools.partial(close_now, closing.pop()))

    io.call(lambda: io.at(deadline(), end))
    try:
        yield has_passed
    finally:
        closing.clear()


def close_now(transport: paramiko.Transport) -> None:
    """Close a connection at once, also while its thread is blocked. Any thread.

    Its thread wakes up and closes the descriptor, a moment later. If another thread closed it, paramiko's could be just
    about to wait for that number, which may be another file's by then. A file that is waited for stays open: the end of
    a pipe would come ``_POLL_S`` late.
    """
    if isinstance(transport.sock, socket.socket) and transport.is_alive():
        transport.active = False  # type: ignore[attr-defined]
        with contextlib.suppress(OSError):
            transport.sock.shutdown(socket.SHUT_RDWR)
        return
    close_stream(transport.sock)
    with contextlib.suppress(OSError, EOFError):
        transport.close()


def _handshake(transport: paramiko.Transport, config: HostConfig) -> None:
    # ``transport_deadline`` ends these waits.
    transport.banner_timeout = transport.auth_timeout = _NEVER_S
    # paramiko would start a thread that delays the exit of this process.
    transport.packetizer.start_handshake = lambda timeout: None  # type: ignore[method-assign]
    done = threading.Event()
    transport.start_client(event=done)
    # A transport that is closed during the handshake does not set the event.
    while not done.wait(0.2) and transport.is_active():
        pass
    if not transport.is_active():
        raise transport.get_exception() or EOFError()


def _as_unreachable(error: BaseException) -> BaseException:
    import paramiko
    from paramiko.ssh_exception import IncompatiblePeer

    if isinstance(error, ConnectFailed) or not isinstance(error, Exception):
        return error
    if isinstance(error, IncompatiblePeer):
        return ConnectFailed(
            "protocol", f"no algorithm is known to both its sshd and paramiko: {error}", ALGORITHMS_HINT
        )
    if any(text in str(error) for text in _NO_SSHD):
        return ConnectFailed("protocol", "the server on this port is not sshd", "Is it the right port?")
    if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
        hint = "Its sshd may allow fewer logins at a time (MaxStartups) or have banned this machine."
        return ConnectFailed(
            "TCP",
            "the server closed the connection before the login",
            hint,
            max_attempts=_DROPPED_TRIES,
            is_overload=True,
        )
    return ConnectFailed(
        "protocol", f"paramiko failed: {type(error).__name__}: {error}", "`ssh -v HOST` may show more."
    )


def _check_key(transport: paramiko.Transport, config: HostConfig, known: KnownHosts, names: tuple[str, ...]) -> None:
    key = transport.get_remote_server_key()
    key_type, text = key.get_name(), key.get_base64()
    result, location = known.check(names, key_type, text)
    if result == "known":
        return
    if result == "unknown" and config.accept_new:
        try:
            known.add(names[0], key_type, text, hashed=config.hash_known_hosts)
        except OSError as error:
            raise ConnectFailed("host key", f"cannot be stored: {error.filename}: {error.strerror}") from None
        return
    digest = hashlib.sha256(key.asbytes()).digest()
    fingerprint = "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
    raise _untrusted_key(result, location, f"{key_type} {fingerprint}", names[0])


def _untrusted_key(result: Result, location: str, shown: str, name: str) -> ConnectFailed:
    collect = "Collect the keys with `ssh-keyscan HOST >> ~/.ssh/known_hosts` and compare them with the administrator's"
    if result == "unknown":
        return ConnectFailed("host key", "its host key is unknown", f"{collect}, or trust new hosts: --ssh-accept-new.")
    if result == "revoked":
        return ConnectFailed(
            "host key",
            f"ITS HOST KEY IS REVOKED ({shown}, by {location})",
            "Find out who revoked it before you connect.",
        )
    if result == "authority":
        message = f"its host key is unknown, only a certificate authority for it ({location})"
        return ConnectFailed("host key", message, f"Certificates of hosts cannot be checked here. {collect}.")
    if result == "other type":
        message = f"its host key is unknown: {shown}, but another type in {location}"
        return ConnectFailed("host key", message, f"{collect}.")
    message = f"ITS HOST KEY HAS CHANGED: it shows {shown}, which is not the one in {location}"
    hint = (
        f"The connection may be intercepted, or the host was reinstalled. If so: `ssh-keygen -R '{name}'`. {collect}."
    )
    return ConnectFailed("host key", message, hint)
