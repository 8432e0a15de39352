"""A transport in one class and one row: each node is a shell of this machine. Plans, runs and queries two of them.

``env`` is the command; a setting of the run becomes an argument, as one of the transport's own would.
"""

import sys

import ddplaunch
from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig, OutputConfig, RemoteConfig, WorkerConfig
from ddplaunch.features.plan.page import page
from ddplaunch.features.plan.plan import plan
from ddplaunch.features.ps.ps import agents, find_runs, raise_failures
from ddplaunch.features.remote.command_handle import CommandTransport
from ddplaunch.rows import TransportRow
from ddplaunch.transport import transports


class ShellTransport(CommandTransport):
    @staticmethod
    def carrier(config: LaunchConfig, host: Host) -> tuple[str, ...]:
        assert host in HOSTS
        return ("env", f"WAY={config.remote.transport}")


transports.TABLE = (
    *transports.TABLE,
    TransportRow(
        name="shell",
        class_path="__main__:ShellTransport",
        way="through a shell",
        keeps_warm=False,
    ),
)
HOSTS, REMOTE = (Host("one"), Host("two")), RemoteConfig(transport="shell")

if __name__ == "__main__":
    config = LaunchConfig(
        script=sys.argv[1],
        hosts=HOSTS,
        remote=REMOTE,
        min_nodes=2,
        max_nodes=2,
        workers=WorkerConfig(nproc_per_node=1),
        output=OutputConfig(log_dir=sys.argv[2]),
    )
    print(page(plan(config)))
    result = ddplaunch.launch(config)
    with agents(HOSTS, REMOTE) as queries:
        find_runs(queries)
        raise_failures(queries)
    sys.exit(result.exit_code)
