"""The transports: how the agents of a run are started and reached, by one table.

Runs in the launcher. A row names its code, which is imported when a run or a command needs it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.errors import OptionError, UsageError
from ddplaunch.rows import TransportRow

if TYPE_CHECKING:
    from ddplaunch.cluster.hosts import Host

TABLE: tuple[TransportRow, ...] = (
    TransportRow(
        name="local",
        class_path="ddplaunch.transport.local:LocalTransport",
        way="here",
        keeps_warm=True,
    ),
    *features.items("TRANSPORTS", "tables"),
)


def of_hosts() -> tuple[str, ...]:
    """The names of those that reach other machines."""
    return tuple(each.name for each in TABLE if each.name != "local")


def choice() -> str:
    """Those that reach other machines, as the help of ``--transport`` says it: ``ssh, or srun in a SLURM job``."""
    ways = [f"{each.name} {each.where}".rstrip() for each in TABLE if each.name != "local"]
    *others, last = ways or ["none"]
    return f"{', '.join(others)}, or {last}" if others else last


def row(name: str) -> TransportRow:
    """The row of the transport ``name``.

    Raises:
        UsageError: there is none.
    """
    for each in TABLE:
        if each.name == name:
            return each
    raise UsageError(f"there is no transport {name}", f"There are: {', '.join(each.name for each in TABLE)}.")


def parse(name: str, option: str) -> str:
    """``name``, of a transport that reaches other machines.

    Raises:
        OptionError: there is no such transport, or it reaches only this machine.
    """
    if name not in (known := of_hosts()):
        raise OptionError(option, name, f"must be {' or '.join(known)}")
    return name


def check(name: str, hosts: Iterable[Host]) -> None:
    """Raise UsageError if the transport ``name`` cannot be used for ``hosts`` as they are named."""
    way = row(parse(name, "--transport"))
    for host in hosts:
        if (host.user or host.port) and not way.takes_logins:
            message = f"{host}: a user and a port have no effect with --transport {name}"
            raise UsageError(message, f"Write {host.name}, or use --transport ssh.")
