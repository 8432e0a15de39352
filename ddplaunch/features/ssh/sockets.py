"""Opens the byte stream to a host's sshd: over TCP, through a jump host, or through the user's ProxyCommand.

Runs in the launcher, in the thread of the host's handle. Deadlines are times of ``time.monotonic()``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import time
from typing import TYPE_CHECKING

from ddplaunch.features.ssh.config import ConnectFailed, HostConfig
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import paramiko


_MAX_ATTEMPTS = 3
"""Attempts after failures that may be temporary: an sshd that restarts, a busy name server."""

_CHANNEL_PROHIBITED = 1
_CHANNEL_CONNECT_FAILED = 2


def open_tcp(config: HostConfig, deadline: float) -> socket.socket:
    """A connection to the first of the host's addresses that accepts one.

    Raises:
        ConnectFailed: the name does not resolve, or no address has accepted a connection by ``deadline``.
    """
    addresses = _look_up(config, deadline)
    error: OSError = TimeoutError()
    for remaining, (family, address) in zip(range(len(addresses), 0, -1), addresses, strict=True):
        connection = socket.socket(family, socket.SOCK_STREAM)
        try:
            # One address without an answer must not use up the time for the others.
            connection.settimeout(max(0.01, (deadline - time.monotonic()) / remaining))
            if config.bind_address:
                connection.bind((config.bind_address, 0))
            connection.connect(address)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            return connection
        except OSError as caught:
            connection.close()
            error = caught
    raise _refused(error, config.port)


def _refused(error: OSError, port: int) -> ConnectFailed:
    if isinstance(error, TimeoutError):
        hint = "Is it up, and does a firewall let ssh through? --connect-timeout gives it more time."
        return ConnectFailed("timeout", f"no answer on port {port}", hint)
    if isinstance(error, ConnectionRefusedError):
        hint = "Does sshd run there, and on that port? Name another one as HOST:PORT."
        return ConnectFailed("TCP", f"connection refused on port {port}", hint, max_attempts=_MAX_ATTEMPTS)
    return ConnectFailed("TCP", (error.strerror or str(error)).lower(), max_attempts=_MAX_ATTEMPTS)


def _look_up(config: HostConfig, deadline: float) -> list[tuple[int, tuple[object, ...]]]:
    """The addresses of the host. Looked up in a thread, since the C library's look-up has no timeout."""
    found: list[tuple[int, tuple[object, ...]]] = []
    failed: list[OSError | UnicodeError] = []

    def look_up() -> None:
        try:
            answers = socket.getaddrinfo(config.hostname, config.port, config.address_family, socket.SOCK_STREAM)
            found.extend((family, address) for family, _, _, _, address in answers)
        except (OSError, UnicodeError) as error:
            failed.append(error)

    in_thread("look up", look_up).join(max(0.0, deadline - time.monotonic()))
    if found:
        return list(dict.fromkeys(found))
    hint = "Check the spelling; ~/.ssh/config can give it an address (HostName)."
    if not failed:
        raise ConnectFailed("name", "the name server does not answer", hint)
    is_temporary = isinstance(failed[0], socket.gaierror) and failed[0].errno == socket.EAI_AGAIN
    raise ConnectFailed("name", "the name does not resolve", hint, max_attempts=_MAX_ATTEMPTS if is_temporary else 1)


def open_through(jump: paramiko.Transport, name: str, config: HostConfig, deadline: float) -> paramiko.Channel:
    """A channel to the host through the connection to the jump host ``name``.

    Raises:
        ConnectFailed: the jump host cannot connect to it.
    """
    import paramiko

    origin = f"from jump host {name}"
    try:
        timeout_s = max(0.01, deadline - time.monotonic())
        target = (config.hostname, config.port)
        return _closed_quietly(jump.open_channel("direct-tcpip", target, ("127.0.0.1", 0), timeout=timeout_s))
    except paramiko.ChannelException as error:
        if error.code == _CHANNEL_PROHIBITED:
            hint = "Its sshd_config must have AllowTcpForwarding, and PermitOpen for this host."
            raise ConnectFailed("jump", f"jump host {name} does not forward connections", hint) from None
        if error.code == _CHANNEL_CONNECT_FAILED:
            hint = f"`ssh {name}` and try from there: the name may not resolve, or no sshd listens."
            raise ConnectFailed(
                "TCP", f"no connection {origin} to port {config.port}", hint, max_attempts=_MAX_ATTEMPTS
            ) from None
        raise ConnectFailed("jump", f"no connection {origin}: {error.text}", max_attempts=_MAX_ATTEMPTS) from None
    except (paramiko.SSHException, EOFError, OSError):
        if jump.is_active():
            raise ConnectFailed("timeout", f"no answer {origin} on port {config.port}") from None
        raise ConnectFailed("jump", f"jump host {name} closed the connection", max_attempts=_MAX_ATTEMPTS) from None


def _closed_quietly(channel: paramiko.Channel) -> paramiko.Channel:
    """``channel``, whose ``close`` raises no error where the jump host's connection has just been closed.

    At the end of a connection paramiko's thread closes the stream under it, and prints a traceback if that fails.
    """
    close = channel.close

    def close_quietly() -> None:
        with contextlib.suppress(OSError, EOFError):
            close()

    channel.close = close_quietly  # type: ignore[method-assign]
    return channel


def open_proxy(config: HostConfig) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Run the ProxyCommand as ssh does. Returns a socket to its stdin and stdout, and its process.

    Raises:
        ConnectFailed: it cannot be started.
    """
    ours, theirs = socket.socketpair()
    shell = os.environ.get("SHELL") or "/bin/sh"
    try:
        process = subprocess.Popen(
            [shell, "-c", f"exec {config.proxy_command}"],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            start_new_session=True,
        )
        return ours, process
    except OSError as error:
        ours.close()
        raise ConnectFailed("configuration", f"ProxyCommand: {shell}: {error.strerror}") from None
    finally:
        theirs.close()


def close_stream(connection: socket.socket | paramiko.Channel) -> None:
    """Close ``connection``; a thread that is blocked in a read or write of it returns at once."""
    with contextlib.suppress(OSError, EOFError):
        connection.shutdown(2)
    with contextlib.suppress(OSError, EOFError):
        connection.close()
