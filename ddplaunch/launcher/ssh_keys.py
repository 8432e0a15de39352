"""The user's keys, and logging in by them: what the agent and the files hold, in OpenSSH's order. No passwords."""

from __future__ import annotations

import functools
import os
import socket
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch.launcher.shared import Shared

if TYPE_CHECKING:
    from collections.abc import Iterator

    import paramiko

    from ddplaunch.launcher.ssh_config import HostConfig

_PUBLIC_TYPES = ("ssh-", "ecdsa-", "sk-", "webauthn-")
_SECURITY_KEYS = ("sk-", "webauthn-")


_AGENT_S = 10.0
"""A forwarded agent whose other end is gone never answers."""


class LoginRefused(Exception):
    """Nothing we have is accepted; trying again would only make the server refuse us for longer."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


class _KeyFile(NamedTuple):
    """A private key, or why it cannot be used. ``public`` is its public half in base64, if that can be had."""

    path: str
    key: paramiko.PKey | None
    public: str
    problem: str = ""


class KeyRing:
    """Key files, each read once for all hosts. Any thread."""

    def __init__(self) -> None:
        self._files: Shared[_KeyFile | None] = Shared()

    def files(self, config: HostConfig) -> Iterator[_KeyFile]:
        """The identity files that are there, each with its certificates first and then without one."""
        for path in config.identity_files:
            for certificate in (*config.certificate_files, f"{path}-cert.pub", ""):
                file = self._files.get((path, certificate), functools.partial(_read, path, certificate))
                if file:
                    yield file


def log_in(transport: paramiko.Transport, config: HostConfig, ring: KeyRing) -> None:
    """Authenticate ``transport``, whose host key was checked.

    Raises:
        LoginRefused: by the server.
        paramiko.SSHException: the connection broke.
    """
    import paramiko

    tried: list[str] = []
    agent, agent_keys = _agent_keys(config.agent)
    try:
        for label, key in _candidates(config, ring, agent_keys, tried):
            tried.append(label)
            try:
                more = transport.auth_publickey(config.user, key)
            except paramiko.BadAuthenticationType as error:
                raise _refused(config, tried, f"the server takes only {', '.join(error.allowed_types)}") from None
            except paramiko.AuthenticationException:
                if not transport.is_active():
                    reason = f"the server hung up after {len(tried)} keys" if len(tried) > 1 else "the server hung up"
                    raise _refused(config, tried, reason) from None
                continue
            except paramiko.SSHException:
                # The agent would not sign, or paramiko cannot use this kind of key.
                if not transport.is_active():
                    raise
                continue
            if not more:
                return
            raise _refused(config, tried, f"after the key the server wants {', '.join(more)}")
        raise _refused(config, tried, "")
    finally:
        if agent:
            agent.close()


def _candidates(
    config: HostConfig, ring: KeyRing, agent_keys: list[paramiko.AgentKey], tried: list[str]
) -> Iterator[tuple[str, paramiko.PKey]]:
    """Keys in the order ssh tries them: the agent's that are also named as files, its others, then the files."""
    files = list(ring.files(config))
    named = {file.public for file in files}
    ours = [key for key in agent_keys if key.get_base64() in named]
    others = [] if config.identities_only else [key for key in agent_keys if key not in ours]
    for key in (*ours, *others):
        yield f"{key.comment or key.get_name()} (agent)", key
    held = {key.get_base64() for key in ours}
    for file in files:
        if file.public in held:
            continue
        if file.key:
            yield file.path, file.key
        elif file.problem:
            tried.append(f"{file.path} ({file.problem})")


def _agent_keys(path: str) -> tuple[socket.socket | None, list[paramiko.AgentKey]]:
    """What the ssh-agent at ``path`` holds. One connection per login: paramiko's is not safe in two threads."""
    from paramiko.agent import AgentSSH

    if not path:
        return None, []
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(_AGENT_S)
    try:
        connection.connect(path)
        agent = AgentSSH()
        # paramiko's public Agent asks only SSH_AUTH_SOCK, never IdentityAgent.
        agent._connect(connection)  # type: ignore[attr-defined]
        return connection, list(agent.get_keys())
    except Exception:  # No agent there, or one that says what paramiko does not understand: as good as none.
        connection.close()
        return None, []


def _read(path: str, certificate: str) -> _KeyFile | None:
    """The key in a file; None if there is no such file, as for the default names, or the certificate is another's."""
    import paramiko

    if not os.path.isfile(path) or (certificate and not os.path.isfile(certificate)):
        return None
    public = _public_words(path)
    if public:
        return _KeyFile(path, None, public[1], "a public key, and the agent does not have it")
    public = _public_words(f"{path}.pub")
    if public and public[0].startswith(_SECURITY_KEYS):
        return _KeyFile(path, None, public[1], "a security key: add it to the agent")
    try:
        key = paramiko.PKey.from_path(path)
        text = key.get_base64()
        key.public_blob = None
        if certificate:
            key.load_certificate(certificate)
            return _KeyFile(f"{certificate}", key, text) if _is_for(key) else None
        return _KeyFile(path, key, text)
    except PermissionError:
        problem = "cannot be read"
    except (TypeError, paramiko.PasswordRequiredException):
        problem = "locked by a passphrase: ssh-add it"
    except Exception:  # paramiko and cryptography raise a dozen kinds.
        problem = "not a key we can read"
    return None if certificate else _KeyFile(path, None, public[1] if public else "", problem)


def _is_for(key: paramiko.PKey) -> bool:
    """Whether the certificate that was loaded certifies this key: it repeats all of it but the type."""
    without_type = key.asbytes()[4 + len(key.get_name()) :]
    return key.public_blob is not None and without_type in key.public_blob.key_blob


def _public_words(path: str) -> list[str]:
    """Type, text and comment of a public key in a file; empty if there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            words = file.read(65536).split()
    except OSError:
        return []
    return words if len(words) >= 2 and words[0].startswith(_PUBLIC_TYPES) else []


def _refused(config: HostConfig, tried: list[str], reason: str) -> LoginRefused:
    keys = ", ".join(dict.fromkeys(tried)) or "no key was found"
    message = f"authentication as {config.user} failed; " + (f"tried {keys}" if tried else keys)
    if "hung up" in reason:
        hint = "Name the right key with --ssh-identity or IdentityFile and set IdentitiesOnly: servers take few tries."
    elif not tried:
        hint = "Make a key with `ssh-keygen`, copy it with `ssh-copy-id HOST`, or start an agent and `ssh-add`."
    else:
        hint = "`ssh HOST true` must work without a question; `ssh -v HOST` shows which key it takes."
    return LoginRefused(f"{message}; {reason}" if reason else message, hint)
