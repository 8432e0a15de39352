"""The transports: how the agents of a run are started and reached, by one table.

Runs in the launcher. A row names its code, which is imported when a run or a command needs it.
"""

from __future__ import annotations

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class TransportRow:
    """One transport.

    Attributes:
        name: its word for ``--transport``, and in ``LaunchConfig.transport``.
        code: its subclass of ``Transport``, ``module:name``.
        way: how the agents are started, as ``--plan`` says it.
        keeps_warm: its agents may leave a keeper for the next run.
        login: what opens a shell on a host, for hints; empty: they name nothing.
    """

    name: str
    code: str
    way: str
    keeps_warm: bool
    login: str = ""


TABLE = (
    TransportRow(
        name="local",
        code="ddplaunch.transport.local:LocalTransport",
        way="here",
        keeps_warm=True,
    ),
    TransportRow(
        name="ssh",
        code="ddplaunch.transport.ssh.handle:SshTransport",
        way="over SSH",
        keeps_warm=True,
        login="ssh HOST",
    ),
    TransportRow(
        name="srun",
        code="ddplaunch.transport.srun:SrunTransport",
        way="through srun",
        keeps_warm=False,  # The end of a job step ends all of its processes.
        login="srun --overlap --nodelist=HOST --pty bash",
    ),
)


def of_hosts() -> tuple[str, ...]:
    """The names of those that reach other machines."""
    return tuple(each.name for each in TABLE if each.name != "local")


def row(name: str) -> TransportRow:
    """The row of the transport ``name``.

    Raises:
        UsageError: there is none.
    """
    for each in TABLE:
        if each.name == name:
            return each
    raise UsageError(f"there is no transport {name}", f"There are: {', '.join(each.name for each in TABLE)}.")
