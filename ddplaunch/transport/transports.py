"""The transports: how the agents of a run are started and reached, by one table.

Runs in the launcher. A row names its code, which is imported when a run or a command needs it.
"""

from __future__ import annotations

from ddplaunch.errors import UsageError
from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class TransportRow:
    """One transport. A text ``module:name`` names a class or a function.

    Attributes:
        name: its word in ``LaunchConfig.transport``.
        transport: its subclass of ``Transport``.
        command: the function that returns the command which starts an agent on a host, for ``--plan``; empty for
            child processes.
        way: how the agents are started, as ``--plan`` says it.
        keeps_warm: its agents may leave a keeper for the next run.
    """

    name: str
    transport: str
    command: str
    way: str
    keeps_warm: bool


TABLE = [
    TransportRow(
        name="local",
        transport="ddplaunch.transport.local:LocalTransport",
        command="",
        way="here",
        keeps_warm=True,
    ),
    TransportRow(
        name="ssh",
        transport="ddplaunch.transport.ssh.handle:SshTransport",
        command="ddplaunch.transport.remote_start:command",
        way="over SSH",
        keeps_warm=True,
    ),
    TransportRow(
        name="srun",
        transport="ddplaunch.transport.srun:SrunTransport",
        command="ddplaunch.transport.srun:command",
        way="through srun",
        keeps_warm=False,  # The end of a job step ends all of its processes.
    ),
]


def row(name: str) -> TransportRow:
    """The row of the transport ``name``.

    Raises:
        UsageError: there is none.
    """
    for each in TABLE:
        if each.name == name:
            return each
    raise UsageError(f"there is no transport {name}", f"There are: {', '.join(each.name for each in TABLE)}.")
