"""The transport over SSH: configuration, keys, known hosts, connections, jump hosts, and the agent's channel.

Runs in the launcher's process. A pool of threads logs in to the hosts. With many hosts, the agents then connect to the
launcher (``listener``), and the logins end; otherwise each takes three threads. The only package that imports paramiko,
when it connects to the first host.
"""

from __future__ import annotations

from typing import Any


def rows() -> tuple[object, ...]:
    """``--ssh-*`` and ``--connect-timeout``."""
    from ddplaunch.rows import SSH, Option, flag, parse_positive_seconds, parse_whole

    place: dict[str, Any] = {"only": (SSH,), "after": "--transport"}
    return (
        Option("--ssh-user", "NAME", "Login name, like ssh -l.", sets="remote.user", **place),
        Option(
            "--ssh-port",
            "PORT",
            "Port of the SSH server, like ssh -p.",
            sets="remote.port",
            parse=parse_whole,
            **place,
        ),
        Option(
            "--ssh-identity",
            "FILE",
            "File of the private key, like ssh -i.",
            sets="remote.identity",
            completes="file",
            **place,
        ),
        Option(
            "--ssh-config",
            "FILE",
            "SSH configuration file, like ssh -F.",
            sets="remote.config",
            completes="file",
            **place,
        ),
        flag("--ssh-accept-new", "Accept and store the keys of unknown hosts.", sets="remote.accept_new", **place),
        Option(
            "--connect-timeout",
            "TIME",
            "Time for one attempt to connect. Default: 15 s.",
            sets="remote.connect_timeout_s",
            parse=parse_positive_seconds,
            **place,
        ),
    )
