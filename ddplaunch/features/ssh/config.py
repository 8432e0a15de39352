"""The user's SSH configuration of a host: from ``ssh -G``, or from paramiko's parser where there is no ssh command.

``choose_algorithms`` applies what it says about algorithms to a connection.

Runs in the launcher, in the thread of the host's handle. Makes no connection.
"""

from __future__ import annotations

import getpass
import os
import re
import shutil
import socket
import subprocess
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import Host
from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped

if TYPE_CHECKING:
    import paramiko

    from ddplaunch.config import RemoteConfig
    from ddplaunch.transport.failures import Cause

_RESOLVE_TIMEOUT_S = 20.0
"""Seconds for ``ssh -G``, which runs the user's programs for ``Match exec``."""

_DEFAULT_KEYS = ("~/.ssh/id_ed25519", "~/.ssh/id_ecdsa", "~/.ssh/id_rsa")
_USER_HOSTS = "~/.ssh/known_hosts ~/.ssh/known_hosts2"
_GLOBAL_HOSTS = "/etc/ssh/ssh_known_hosts /etc/ssh/ssh_known_hosts2"

_NO_CHECK = ("no", "off", "false")

_ALGORITHM_OPTIONS = {"Ciphers": "ciphers", "MACs": "digests", "KexAlgorithms": "kex", "HostKeyAlgorithms": "key_types"}
"""Options of ssh_config(5), and paramiko's names of what they choose."""

ALGORITHMS_HINT = f"{', '.join(_ALGORITHM_OPTIONS)} in ssh's configuration limit the choice; `ssh -G HOST` shows them."

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


class ConfigError(Exception):
    """ssh's configuration cannot be read, or has an invalid value."""


class ConnectFailed(Exception):
    """A connection to a host failed; becomes a HostFailure.

    Attributes:
        max_attempts: number of attempts in all; 1: another attempt cannot succeed, or would get this machine banned.
        is_overload: the server closed the connection before the login, probably because of too many logins.
    """

    def __init__(
        self, cause: Cause, message: str, hint: str = "", *, max_attempts: int = 1, is_overload: bool = False
    ) -> None:
        super().__init__(message)
        self.cause = cause
        self.message = message
        self.hint = hint
        self.max_attempts = max_attempts
        self.is_overload = is_overload


@dataclass(frozen=True, kw_only=True)
class HostConfig:
    """The SSH configuration of one host.

    Attributes:
        name: as the user wrote it; ``hostname`` is the name or address to connect to.
        jumps: jump hosts, in the order of the connections.
        proxy_command: ProxyCommand as a text for the shell, with its tokens replaced; empty for none.
        ssh_agent_socket: path of the ssh-agent's socket; empty for none.
        identities_only: use only those keys of the ssh-agent that are in ``identity_files``.
        algorithms: the options that choose algorithms, and their values; an empty one is not set.
        accept_new: trust an unknown host, and store its key in the first of ``known_hosts``.
    """

    name: str
    hostname: str
    port: int
    user: str
    address_family: socket.AddressFamily
    bind_address: str
    jumps: tuple[Host, ...]
    proxy_command: str
    ssh_agent_socket: str
    identity_files: tuple[str, ...]
    certificate_files: tuple[str, ...]
    identities_only: bool
    host_key_alias: str
    known_hosts: tuple[Path, ...]
    revoked_host_keys: Path | None
    hash_known_hosts: bool
    algorithms: tuple[tuple[str, str], ...]
    accept_new: bool


def resolve(host: Host, settings: RemoteConfig) -> HostConfig:
    """The configuration of ``host``. Values of ``host`` take precedence over ``settings``, and those over the files.

    Raises:
        ConfigError: the configuration cannot be read, or has an invalid value.
    """
    if settings.identity and not os.path.isfile(settings.identity):
        raise ConfigError(f"--ssh-identity {settings.identity}: no such file")  # ssh would ignore it.
    user, port = host.user or settings.user, host.port or settings.port
    if shutil.which("ssh"):
        values = _run_ssh(host.name, user, port, settings)
    else:
        values = _read_files(host.name, user, port, settings)
    return _host_config(host.name, values, settings.accept_new)


def parse_jumps(text: str) -> tuple[Host, ...]:
    """The hosts of a ProxyJump: ``[user@]host[:port]`` or ``ssh://[user@]host[:port]``, separated by commas.

    Raises:
        ConfigError: invalid syntax.
    """
    jumps = []
    for part in text.split(","):
        address = part.strip().removeprefix("ssh://").rstrip("/")
        match = re.fullmatch(r"(?:(.+)@)?(?:\[([^\]]+)\]|([^:]+))(?::(\d+))?", address)
        if not match:
            raise ConfigError(f"ProxyJump {text}: not a host")
        user, bracketed, name, port = match.groups()
        try:
            jumps.append(Host(bracketed or name, user, int(port) if port else None))
        except UsageError as error:
            raise ConfigError(f"ProxyJump {text}: {error.message}") from None
    return tuple(jumps)


def _run_ssh(name: str, user: str | None, port: int | None, settings: RemoteConfig) -> dict[str, list[str]]:
    options = {"-F": settings.config, "-l": user, "-p": port, "-i": settings.identity}
    given = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
    try:
        done = subprocess.run(
            ["ssh", "-G", *given, "--", name],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="surrogateescape",
            timeout=_RESOLVE_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise ConfigError(f"`ssh -G {name}` did not end within {_RESOLVE_TIMEOUT_S:.0f} s") from None
    except OSError as error:
        raise ConfigError(f"ssh cannot be started: {error.strerror}") from None
    if done.returncode:
        raise ConfigError("; ".join(done.stderr.strip().splitlines()[-2:]) or f"`ssh -G {name}` failed")
    values = (line.partition(" ") for line in done.stdout.splitlines())
    return grouped((key.lower(), value) for key, _, value in values)


def _read_files(name: str, user: str | None, port: int | None, settings: RemoteConfig) -> dict[str, list[str]]:
    """The options of the files, as far as paramiko supports them: without Include."""
    import paramiko

    config = paramiko.SSHConfig()
    paths = [settings.config] if settings.config else ["~/.ssh/config", "/etc/ssh/ssh_config"]
    try:
        for path in map(os.path.expanduser, paths):
            if settings.config or os.path.exists(path):
                with open(path, encoding="utf-8") as file:
                    config.parse(file)
        found = config.lookup(name)
    except (OSError, UnicodeDecodeError, paramiko.SSHException, ImportError) as error:
        raise ConfigError(f"ssh's configuration cannot be read: {error}") from None
    values = {key: value if isinstance(value, list) else [value] for key, value in found.items()}
    given = {"user": user, "port": port}
    values.update({key: [str(value)] for key, value in given.items() if value is not None})
    if settings.identity:
        values["identityfile"] = [settings.identity, *values.get("identityfile", ())]
    return grouped((key.lower(), value) for key, of_key in values.items() for value in of_key)


def _host_config(name: str, values: dict[str, list[str]], accept_new: bool) -> HostConfig:
    def all_of(key: str, *defaults: str) -> list[str]:
        return [value for value in values.get(key, defaults) if value.lower() != "none"]

    def first(key: str, default: str = "") -> str:
        return (all_of(key, default) or [""])[0]

    user = first("user") or _own_name()
    if not user:
        raise ConfigError(f"the user id {os.getuid()} has no login name here: give --ssh-user")
    port = _port(first("port", "22"))
    hostname = first("hostname", name)
    alias = first("hostkeyalias")
    tokens = _tokens(name, hostname, user, port, alias)
    checking = first("stricthostkeychecking", "ask").lower()
    known = first("userknownhostsfile", _USER_HOSTS) + " " + first("globalknownhostsfile", _GLOBAL_HOSTS)
    families = {"inet": socket.AF_INET, "inet6": socket.AF_INET6}
    jumps = first("proxyjump")
    revoked = first("revokedhostkeys")
    return HostConfig(
        name=name,
        hostname=hostname,
        port=port,
        user=user,
        address_family=families.get(first("addressfamily"), socket.AF_UNSPEC),
        bind_address=first("bindaddress"),
        jumps=parse_jumps(jumps) if jumps else (),
        proxy_command=_replace(first("proxycommand"), tokens),
        ssh_agent_socket=_ssh_agent_socket(first("identityagent", "SSH_AUTH_SOCK"), tokens),
        identity_files=tuple(_path(file, tokens) for file in all_of("identityfile", *_DEFAULT_KEYS)),
        certificate_files=tuple(_path(file, tokens) for file in all_of("certificatefile")),
        identities_only=first("identitiesonly", "no").lower() in ("yes", "true"),
        host_key_alias=alias,
        known_hosts=tuple(Path(_path(file, tokens)) for file in known.split()),
        revoked_host_keys=Path(_path(revoked, tokens)) if revoked else None,
        hash_known_hosts=first("hashknownhosts", "no").lower() in ("yes", "true"),
        algorithms=tuple((option, first(option.lower())) for option in _ALGORITHM_OPTIONS),
        accept_new=accept_new or checking == "accept-new" or checking in _NO_CHECK,
    )


def _own_name() -> str:
    """The user's login name; empty for a user id without a name, as in a container."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # OSError from Python 3.13 on.
        return ""


def _port(text: str) -> int:
    if not re.fullmatch("[0-9]{1,5}", text) or not 0 < int(text) < 1 << 16:
        raise ConfigError(f"Port {text}: not a port")
    return int(text)


def _tokens(name: str, hostname: str, user: str, port: int, alias: str) -> dict[str, str]:
    own = socket.gethostname()
    return {
        "%": "%",
        "d": os.path.expanduser("~"),
        "h": hostname,
        "i": str(os.getuid()),
        "k": alias or name,
        "L": own.partition(".")[0],
        "l": own,
        "n": name,
        "p": str(port),
        "r": user,
        "u": _own_name(),
    }


def _replace(text: str, tokens: dict[str, str]) -> str:
    """Replace tokens such as ``%h`` (ssh_config(5), TOKENS); unknown ones stay."""
    return re.sub("%(.)", lambda match: tokens.get(match[1], match[0]), text)


def _path(text: str, tokens: dict[str, str]) -> str:
    replaced = _replace(text.strip('"'), tokens)
    known = re.sub(r"\$\{(\w+)\}", lambda match: os.environ.get(match[1], match[0]), replaced)
    return os.path.expanduser(known)


def _ssh_agent_socket(text: str, tokens: dict[str, str]) -> str:
    variable = "SSH_AUTH_SOCK" if text == "SSH_AUTH_SOCK" else text[1:] if re.fullmatch(r"\$\w+", text) else ""
    return os.environ.get(variable, "") if variable else _path(text, tokens)


def choose_algorithms(transport: paramiko.Transport, allowed: Mapping[str, str], known_types: Sequence[str]) -> None:
    """Allow what ``allowed`` has, by option; prefer the key types known for the host, and the fastest cipher.

    Raises:
        ConnectFailed: paramiko has none of the algorithms that an option allows.
    """
    options = transport.get_security_options()
    for option, name in _ALGORITHM_OPTIONS.items():
        chosen = selected_algorithms(allowed.get(option, ""), getattr(options, name))
        if not chosen:
            raise ConnectFailed(
                "protocol", f"{option} in ssh's configuration: paramiko has none of these", ALGORITHMS_HINT
            )
        setattr(options, name, chosen)
    supported = options.key_types
    wanted = [name for key_type in known_types for name in (_RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,))]
    options.key_types = tuple(dict.fromkeys([*(name for name in wanted if name in supported), *supported]))
    # Half the CPU time of CTR with a MAC, on both ends.
    options.ciphers = tuple(sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher))


def selected_algorithms(text: str, supported: Sequence[str]) -> tuple[str, ...]:
    """Those of ``supported`` that an option's value allows, in its order; all for an empty value.

    ``ssh -G`` prints a list of names. In the files it may begin with ``+``, ``-`` or ``^``: add, remove, prefer.
    """
    prefix = text[:1] if text[:1] in ("+", "-", "^") else ""
    patterns = text[len(prefix) :].split(",")
    named = dict.fromkeys(name for pattern in patterns for name in supported if fnmatchcase(name, pattern))
    if prefix == "-":
        return tuple(name for name in supported if name not in named)
    return (
        tuple(named) if text and not prefix else tuple(dict.fromkeys([*(named if prefix == "^" else ()), *supported]))
    )
