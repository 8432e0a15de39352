"""Logs in with the user's keys: those of the ssh-agent and of identity files, in OpenSSH's order. No passwords.

Runs in the launcher, in the thread of the host's handle. Must not prompt for a passphrase.
"""

from __future__ import annotations

import functools
import os
import socket
import threading
from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ddplaunch.features.ssh.config import ConnectFailed, HostConfig

if TYPE_CHECKING:
    from concurrent.futures import Future

    import paramiko


T = TypeVar("T")

_PUBLIC_TYPES = ("ssh-", "ecdsa-", "sk-", "webauthn-")
_SECURITY_KEYS = ("sk-", "webauthn-")

_AGENT_TIMEOUT_S = 10.0
"""A forwarded ssh-agent whose connection is cut does not answer."""

_TOO_MANY_KEYS_HINT = (
    "Name the right key with --ssh-identity or IdentityFile and set IdentitiesOnly: servers accept few attempts."
)
_NO_KEY_HINT = "Make a key with `ssh-keygen`, copy it with `ssh-copy-id HOST`, or start ssh-agent and `ssh-add`."
_CHECK_HINT = "`ssh HOST true` must work without a prompt; `ssh -v HOST` shows which key it uses."


class OncePerKey(Generic[T]):
    """One value per key: the first caller creates it, the others wait for the value or the exception.

    Example::

        transport = jumps.get("gpu1", lambda: connect("gpu1"))
    """

    def __init__(self, is_good: Callable[[T], bool] = lambda _: True) -> None:
        """A value for which ``is_good`` is false is replaced by the next caller; an exception is kept."""
        self._is_good = is_good
        self._lock = threading.Lock()
        self._futures: dict[Hashable, Future[T]] = {}

    def get(self, key: Hashable, create: Callable[[], T]) -> T:
        """The value for ``key``; ``create`` must not request the same key, which would deadlock."""
        from concurrent.futures import Future  # Loads logging.

        with self._lock:
            future = self._futures.get(key)
            is_creator = future is None or self._is_stale(future)
            if is_creator:
                future = self._futures[key] = Future()
        assert future is not None
        if is_creator:
            try:
                future.set_result(create())
            except BaseException as error:
                future.set_exception(error)
        return future.result()

    def _is_stale(self, future: Future[T]) -> bool:
        return future.done() and not future.exception() and not self._is_good(future.result())


class _KeyFile(NamedTuple):
    """A private key, or the problem with it.

    ``public`` is the public key in base64, without the certificate; empty if it is unknown.
    """

    path: str
    key: paramiko.PKey | None
    public: str
    problem: str = ""
    has_certificate: bool = False


KeyRing = OncePerKey[_KeyFile | None]
"""Key files by path and certificate, each read once for all hosts; None if there is no such file."""


def log_in(transport: paramiko.Transport, config: HostConfig, ring: KeyRing) -> None:
    """Authenticate ``transport``, whose host key was checked.

    Raises:
        ConnectFailed: the server accepts none of the keys; further attempts could get this machine banned.
        paramiko.SSHException: the connection failed.
    """
    import paramiko

    tried: list[str] = []
    connection, agent_keys = _ssh_agent_keys(config.ssh_agent_socket)
    try:
        for label, key in _candidates(config, ring, agent_keys, tried):
            tried.append(label)
            try:
                more = transport.auth_publickey(config.user, key)
            except paramiko.BadAuthenticationType as error:
                reason = f"the server accepts only {', '.join(error.allowed_types)}"
                raise _refused(config, tried, _CHECK_HINT, reason) from None
            except paramiko.AuthenticationException:
                if not transport.is_active():
                    after = f" after {len(tried)} keys" if len(tried) > 1 else ""
                    reason = f"the server closed the connection{after}"
                    raise _refused(config, tried, _TOO_MANY_KEYS_HINT, reason) from None
                continue
            except paramiko.SSHException:
                # The ssh-agent refused to sign, or paramiko cannot use this type of key.
                if not transport.is_active():
                    raise
                continue
            if not more:
                return
            raise _refused(config, tried, _CHECK_HINT, f"after the key the server requires {', '.join(more)}")
        raise _refused(config, tried, _CHECK_HINT if tried else _NO_KEY_HINT)
    finally:
        if connection:
            connection.close()


def _candidates(
    config: HostConfig, ring: KeyRing, agent_keys: list[paramiko.AgentKey], tried: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys in ssh's order: those of the ssh-agent that are also identity files, its other keys, then the files."""
    files = list(_files(config, ring))
    named = {file.public for file in files}
    configured = [key for key in agent_keys if key.get_base64() in named]
    others = [] if config.identities_only else [key for key in agent_keys if key not in configured]
    for key in (*configured, *others):
        yield f"{key.comment or key.get_name()} (ssh-agent)", key
    already_tried = {key.get_base64() for key in configured}
    for file in files:
        if file.public in already_tried and not file.has_certificate:
            continue
        if file.key:
            yield file.path, file.key
        elif file.problem:
            tried.append(f"{file.path} ({file.problem})")


def _files(config: HostConfig, ring: KeyRing) -> Iterator[_KeyFile]:
    """The existing identity files, each with its certificates first and then without one."""
    for path in config.identity_files:
        for certificate in (*config.certificate_files, f"{path}-cert.pub", ""):
            file = ring.get((path, certificate), functools.partial(_read, path, certificate))
            if file:
                yield file


def _ssh_agent_keys(path: str) -> tuple[socket.socket | None, list[paramiko.AgentKey]]:
    """The keys of the ssh-agent at ``path``. One connection per login: paramiko's is not thread-safe."""
    from paramiko.agent import AgentSSH

    if not path:
        return None, []
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_AGENT_TIMEOUT_S)
    try:
        connection.connect(path)
        agent = AgentSSH()
        # paramiko's public Agent uses only SSH_AUTH_SOCK, never IdentityAgent.
        agent._connect(connection)  # type: ignore[attr-defined]
        return connection, list(agent.get_keys())
    except Exception:  # No ssh-agent, or paramiko cannot use it.
        connection.close()
        return None, []


def _read(path: str, certificate: str) -> _KeyFile | None:
    """The key in a file; None if there is no such file, as for the default names, or a certificate of another key."""
    import paramiko

    if not os.path.isfile(path) or (certificate and not os.path.isfile(certificate)):
        return None
    public = _public_words(path)
    if public:
        return _KeyFile(path, None, public[1], "a public key, and the ssh-agent does not hold it")
    public = _public_words(f"{path}.pub")
    if public and public[0].startswith(_SECURITY_KEYS):
        return _KeyFile(path, None, public[1], "a security key: add it to the ssh-agent")
    try:
        key = paramiko.PKey.from_path(path)
        text = key.get_base64()
        key.public_blob = None
        if certificate:
            key.load_certificate(certificate)
            return _KeyFile(certificate, key, text, has_certificate=True) if _is_for(key) else None
        return _KeyFile(path, key, text)
    except PermissionError:
        problem = "cannot be read"
    except (TypeError, paramiko.PasswordRequiredException):
        problem = "locked by a passphrase: ssh-add it"
    except Exception:  # paramiko and cryptography raise a dozen exception types.
        problem = "unknown key format"
    return None if certificate else _KeyFile(path, None, public[1] if public else "", problem)


def _is_for(key: paramiko.PKey) -> bool:
    """Whether the loaded certificate is for this key: a certificate contains the key without its type."""
    without_type = key.asbytes()[4 + len(key.get_name()) :]
    return key.public_blob is not None and without_type in key.public_blob.key_blob


def _public_words(path: str) -> list[str]:
    """Type, base64 text and comment of the public key in a file; empty if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            words = file.read(65536).split()
    except OSError:
        return []
    return words if len(words) >= 2 and words[0].startswith(_PUBLIC_TYPES) else []


def _refused(config: HostConfig, tried: list[str], hint: str, reason: str = "") -> ConnectFailed:
    keys = f"tried {', '.join(dict.fromkeys(tried))}" if tried else "no key was found"
    message = f"authentication as {config.user} failed; {keys}"
    return ConnectFailed("authentication", f"{message}; {reason}" if reason else message, hint)
