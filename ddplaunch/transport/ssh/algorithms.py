"""Which algorithms a connection may use: those of ssh's configuration that paramiko has.

Runs in the launcher, in the thread of the host's handle, before the handshake.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from ddplaunch.transport.failures import ConnectFailed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import paramiko

OPTIONS = {"Ciphers": "ciphers", "MACs": "digests", "KexAlgorithms": "kex", "HostKeyAlgorithms": "key_types"}
"""Options of ssh_config(5), and paramiko's names of what they choose."""

HINT = f"{', '.join(OPTIONS)} in ssh's configuration limit the choice; `ssh -G HOST` shows them."

_RSA_SIGNATURES = ("rsa-sha2-512", "rsa-sha2-256")


def choose(transport: paramiko.Transport, allowed: Mapping[str, str], known_types: Sequence[str]) -> None:
    """Allow what ``allowed`` has, by option; prefer the key types known for the host, and the fastest cipher.

    Raises:
        ConnectFailed: paramiko has none of the algorithms that an option allows.
    """
    options = transport.get_security_options()
    for option, name in OPTIONS.items():
        chosen = selected(allowed.get(option, ""), getattr(options, name))
        if not chosen:
            raise ConnectFailed("protocol", f"{option} in ssh's configuration: paramiko has none of these", HINT)
        setattr(options, name, chosen)
    supported = options.key_types
    wanted = [name for key_type in known_types for name in (_RSA_SIGNATURES if key_type == "ssh-rsa" else (key_type,))]
    options.key_types = tuple(dict.fromkeys([*(name for name in wanted if name in supported), *supported]))
    # Half the CPU time of CTR with a MAC, on both ends.
    options.ciphers = tuple(sorted(options.ciphers, key=lambda cipher: "gcm" not in cipher))


def selected(text: str, supported: Sequence[str]) -> tuple[str, ...]:
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
