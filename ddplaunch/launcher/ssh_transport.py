"""A byte stream to an sshd becomes a connection that is logged in, after the host's key was checked."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import threading
import time
from typing import TYPE_CHECKING

from ddplaunch.launcher.failures import Unreachable
from ddplaunch.launcher.known_hosts import KnownHosts, host_names
from ddplaunch.launcher.ssh_keys import KeyRing, LoginRefused, log_in
from ddplaunch.launcher.ssh_sockets import hang_up

if TYPE_CHECKING:
    import socket
    from types import TracebackType

    import paramiko

    from ddplaunch.launcher.known_hosts import KeyCheck
    from ddplaunch.launcher.ssh_config import HostConfig

_POLL_S = 30.0
"""How often paramiko's thread looks up from reading; it would do so ten times a second."""

_NEVER_S = 86400.0
_DROPPED_TRIES = 12
_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


def connect(
    stream: socket.socket | paramiko.Channel, config: HostConfig, known: KnownHosts, ring: KeyRing, deadline: float
) -> paramiko.Transport:
    """A logged-in connection over ``stream``, which belongs to it from now on, also when this fails.

    Raises:
        Unreachable: with the cause; not the server's fault alone.
    """
    import paramiko

    try:
        transport = paramiko.Transport(stream)
    except BaseException:
        hang_up(stream)
        raise
    _silence(transport)
    limit = Limit(transport, deadline)
    try:
        with limit:
            names = host_names(config.hostname, config.port, config.host_key_alias)
            _prefer(transport, known.key_types(names))
            _shake_hands(transport, config)
            _check_key(transport, config, known, names)
            log_in(transport, config, ring)
        stream.settimeout(_POLL_S)
        return transport
    except BaseException as error:
        drop(transport)
        if limit.is_over:
            hint = "--connect-timeout gives it more time."
            raise Unreachable("timeout", f"port {config.port} answers, but its sshd does not", hint) from None
        raise _explained(error) from None


def _silence(transport: paramiko.Transport) -> None:
    """What went wrong we tell ourselves; paramiko adds tracebacks. Its other users in this process keep their log."""
    logger = logging.getLogger("ddplaunch.paramiko")
    logger.setLevel(logging.CRITICAL + 1)
    transport.set_log_channel(logger.name)


class Limit:
    """Drops a connection at ``deadline`` unless the block has ended: many of paramiko's waits have no limit."""

    def __init__(self, transport: paramiko.Transport, deadline: float) -> None:
        self.is_over = False
        self._transport = transport
        self._timer = threading.Timer(max(0.0, deadline - time.monotonic()), self._end)
        self._timer.daemon = True

    def __enter__(self) -> Limit:
        self._timer.start()
        return self

    def __exit__(
        self, _type: type[BaseException] | None, _error: BaseException | None, _tb: TracebackType | None
    ) -> None:
        self._timer.cancel()

    def _end(self) -> None:
        self.is_over = True
        drop(self._transport)


def drop(transport: paramiko.Transport) -> None:
    """End a connection at once, whatever it is doing. Any thread."""
    hang_up(transport.sock)
    with contextlib.suppress(OSError, EOFError):
        transport.close()


def _prefer(transport: paramiko.Transport, known_types: tuple[str, ...]) -> None:
    """Ask for a key of a type we know the host by, since it may have others, and for the cheapest cipher."""
    options = transport.get_security_options()
    supported = tuple(options.key_types)
    wanted = [name for key_type in known_types for name in (_RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,))]
    options.key_types = tuple(dict.fromkeys([*(name for name in wanted if name in supported), *supported]))
    # Half the work of CTR with a MAC, for us and for sshd.
    options.ciphers = tuple(sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher))


def _shake_hands(transport: paramiko.Transport, config: HostConfig) -> None:
    # Our own limit ends these waits.
    transport.banner_timeout = transport.auth_timeout = _NEVER_S
    # It would start a thread that holds up the end of this process.
    transport.packetizer.start_handshake = lambda timeout: None  # type: ignore[method-assign]
    done = threading.Event()
    transport.start_client(event=done)
    # A transport that is closed meanwhile does not set the event.
    while not done.wait(0.2) and transport.is_active():
        pass
    if not transport.is_active():
        raise transport.get_exception() or EOFError()


def _explained(error: BaseException) -> BaseException:
    import paramiko
    from paramiko.ssh_exception import IncompatiblePeer

    if isinstance(error, LoginRefused):
        return Unreachable("authentication", str(error), error.hint)
    if isinstance(error, IncompatiblePeer):
        return Unreachable("protocol", f"its sshd is too old or too new for paramiko: {error}")
    text = str(error)
    if "Indecipherable" in text or "Invalid SSH banner" in text:
        return Unreachable("protocol", "what answers there is not sshd", "Is it the right port?")
    if isinstance(error, (paramiko.SSHException, EOFError, OSError)):
        hint = "Its sshd may allow fewer logins at a time (MaxStartups) or have banned this machine."
        return Unreachable("TCP", "hung up before the login", hint, tries=_DROPPED_TRIES, is_dropped=True)
    if isinstance(error, Unreachable) or not isinstance(error, Exception):
        return error
    return Unreachable("protocol", f"paramiko failed: {type(error).__name__}: {error}", "`ssh -v HOST` may tell more.")


def _check_key(transport: paramiko.Transport, config: HostConfig, known: KnownHosts, names: tuple[str, ...]) -> None:
    key = transport.get_remote_server_key()
    key_type, text = key.get_name(), key.get_base64()
    check = known.check(names, key_type, text)
    if check.result == "known":
        return
    if check.result == "unknown" and config.accept_new:
        try:
            known.add(names[0], key_type, text, hashed=config.hash_known_hosts)
        except OSError as error:
            raise Unreachable("host key", f"cannot be remembered: {error.filename}: {error.strerror}") from None
        return
    digest = hashlib.sha256(key.asbytes()).digest()
    fingerprint = "SHA256:" + base64.b64encode(digest).decode().rstrip("=")
    raise _key_refused(check, f"{key_type} {fingerprint}", names[0])


def _key_refused(check: KeyCheck, shown: str, name: str) -> Unreachable:
    collect = "Collect the keys with `ssh-keyscan HOST >> ~/.ssh/known_hosts` and compare them with what you were told"
    if check.result == "unknown":
        return Unreachable("host key", "its host key is not known", f"{collect}, or trust new hosts: --ssh-accept-new.")
    if check.result == "revoked":
        return Unreachable("host key", f"ITS HOST KEY IS REVOKED ({shown}, by {check.place})", "Ask who revoked it.")
    if check.result == "authority":
        message = f"its host key is not known, only a certificate authority for it ({check.place})"
        return Unreachable("host key", message, f"Certificates of hosts cannot be checked here. {collect}.")
    if check.result == "other type":
        message = f"its host key is not known: {shown}, but another type in {check.place}"
        return Unreachable("host key", message, f"{collect}.")
    message = f"ITS HOST KEY HAS CHANGED: it shows {shown}, which is not the one in {check.place}"
    hint = (
        f"Somebody may listen in, or the host was installed anew. If you know why: `ssh-keygen -R '{name}'`. {collect}."
    )
    return Unreachable("host key", message, hint)
