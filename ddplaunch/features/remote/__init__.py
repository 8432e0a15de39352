"""Agents on other machines: what SSH, srun and other commands have in common. Used by transports, which are features.

``remote_start`` makes what starts an agent through any login shell, and checks what it says of its node. A node that
has not the launcher's ddplaunch gets it from ``package``, and keeps it by ``receiver``. ``command_handle`` starts an
agent by a command that carries stdin and stdout. Agents of many nodes connect to the launcher, where one thread serves
all of them (``call_back``, ``io_thread``): those that one command starts, as srun, by the text of ``caller``, and those
that were started over SSH by ``relay``, encrypted (``tls``). Runs in the launcher's process; ``relay``, what that uses,
and ``receiver`` on a node. Must not import torch.
"""

from __future__ import annotations


def rows() -> tuple[object, ...]:
    """``--remote-*`` and ``--start-timeout``."""
    from ddplaunch.rows import HOSTS, REAL_RUN, Option, parse_positive_seconds

    only = (REAL_RUN, HOSTS)
    return (
        Option(
            "--remote-python",
            "PATH",
            "Python interpreter on the hosts. Default: the path of this one.",
            sets="remote.python",
            only=only,
            completes="file",
            after="--interface",
        ),
        Option(
            "--remote-setup",
            "TEXT",
            "Shell text to run first on the hosts, like 'module load cuda'.",
            sets="remote.setup",
            only=only,
            after="--interface",
        ),
        Option(
            "--start-timeout",
            "TIME",
            "Time from the login on a host to its agent's first answer; --remote-setup counts. Default: 60 s.",
            sets="remote.start_timeout_s",
            parse=parse_positive_seconds,
            only=only,
            after="--transport",
        ),
    )
