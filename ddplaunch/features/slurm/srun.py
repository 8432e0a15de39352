"""SrunTransport: starts the agents of all nodes of a SLURM allocation by one srun; they connect to the launcher.

Runs in the launcher. ``steps`` runs srun.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.features.remote import caller, remote_start
from ddplaunch.features.remote.call_back import CallBackHandle, CallBackServer, chosen_address
from ddplaunch.features.remote.io_thread import IoThread
from ddplaunch.features.slurm import scontrol
from ddplaunch.features.slurm.steps import Steps, Waiting
from ddplaunch.system import limits, network
from ddplaunch.text import plural
from ddplaunch.transport.handle import Post, Purpose, Transport, WriteOutput

if TYPE_CHECKING:
    import socket

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.remote.remote_start import RemoteStart

_OPTIONS = (
    *("--ntasks-per-node=1", "--overlap", "--export=ALL", "--mpi=none", "--cpu-bind=none", "--mem=0"),
    # The loss of a node, or the end of an agent, must not end the others.
    *("--no-kill", "--kill-on-bad-exit=0", "--wait=0"),
    # srun closes its connection to a node when nothing can come over it any more. While it has one, it ends the whole
    # step if that breaks, for example when the node has crashed and is up again at once. Agents close their stdout;
    # stderr SLURM's own process on the node keeps open, so it is that of the first task only: in a batch job, of the
    # node of the launcher.
    *("--label", "--error=0", "--job-name=ddplaunch"),
)

_READ_BY_SRUN = (
    *("SLURM_CPU_BIND", "SLURM_CPU_BIND_LIST", "SLURM_CPU_BIND_TYPE", "SLURM_CPU_BIND_VERBOSE"),
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_NTASKS_PER_GPU", "SLURM_TASKS_PER_NODE"),
    *("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_TRES_BIND", "SLURM_CPUS_PER_GPU"),
    *("SLURM_GPUS", "SLURM_GPUS_PER_NODE", "SLURM_GPUS_PER_SOCKET", "SLURM_GPUS_PER_TASK", "SLURM_GPU_BIND"),
    *(
        "SLURM_MEM_PER_CPU",
        "SLURM_MEM_PER_GPU",
        "SLURM_MEM_PER_NODE",
        "SLURM_DISTRIBUTION",
        "SLURM_EXACT",
        "SLURM_EXCLUSIVE",
    ),
    *("SLURM_NNODES", "SLURM_JOB_NUM_NODES", "SLURM_LABELIO", "SLURM_UNBUFFEREDIO"),
    *("SLURM_STDINMODE", "SLURM_STDOUTMODE", "SLURM_STDERRMODE", "SLURM_HINT"),
)
"""Variables that srun reads as options. Without them a step of one task per node gets all of the job's resources.

slurmstepd sets those of the binding, to describe that of a task."""

_MISSING_HINT = "It starts the agents on the nodes of SLURM's allocation. `--cluster none` runs on this machine only."
_OTHER_FILES = 512
"""Open files besides two connections per node: those of strangers, and of the launcher."""

_CONFIG_S = 2.0


def environ_of_srun(inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without the variables that would change such an srun."""
    return {name: value for name, value in inherited.items() if name not in _READ_BY_SRUN}


def step(names: Sequence[str]) -> tuple[str, ...]:
    """The command that starts an agent on each of these nodes, beside the other steps of the job."""
    count = len(names)
    nodes = (f"--nodelist={fold(names)}", f"--nodes={count}", f"--ntasks={count}")
    return ("srun", *nodes, *_OPTIONS, *_gpus(os.environ), "/bin/sh", "-c", remote_start.COMMAND)


def _gpus(environ: Mapping[str, str]) -> tuple[str, ...]:
    """The GPUs of each node in a job with ``--gpus``, of which SLURM gives a step with ``--overlap`` only some."""
    total = re.fullmatch(r"(?:[^\s,]+:)?(\d+)", environ.get("SLURM_GPUS", ""))
    nodes = environ.get("SLURM_JOB_NUM_NODES", "")
    if not total or not nodes.isdecimal() or not int(nodes) or int(total[1]) % int(nodes):
        return ()
    return (f"--gpus-per-node={int(total[1]) // int(nodes)}",)


class SrunTransport(Transport):
    """Starts agents through srun: those of ``start`` by one step, at ``start_together``."""

    def __init__(self, config: LaunchConfig, *others: Any) -> None:
        """Listen for the agents.

        Raises:
            LaunchError: there is no srun, or this machine allows too few open files, or ``--local-addr`` is wrong.
        """
        if not shutil.which(command := "srun"):
            why = "it is not in PATH"
            raise LaunchError(f"{command} cannot be run here: {why}", _MISSING_HINT, NODE_NOT_READY)
        super().__init__(config, *others)
        hosts = len(config.hosts)
        limits.raise_open_files(2 * hosts + _OTHER_FILES, plural(hosts, "host"))
        self._address = chosen_address(config)
        listener = _listen(self._address)
        try:
            self._io = IoThread("connections of agents")
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the launcher cannot start: {error}", limits.NO_ROOM_HINT) from None
        self._server = CallBackServer(self._io, listener)
        env = environ_of_srun({**os.environ, **dict(config.remote.environ)})
        self._steps = Steps(self._io, step, self._input, env)
        self._waiting: list[Waiting] = []

    @classmethod
    def command(cls, config: LaunchConfig, index: int) -> tuple[str, ...]:
        """The step of all nodes; of a spare its own."""
        first = config.hosts[: config.max_nodes] if index < config.max_nodes else config.hosts[index : index + 1]
        return step([host.name for host in first])

    def _start_agent(self, index: int, post: Post, output: WriteOutput, purpose: Purpose) -> CallBackHandle:
        name = self._config.hosts[index].name
        start = remote_start.agent_start(self._config, index, self._node_tag(index), purpose)
        handle = CallBackHandle(self._io, self.node_names[index], start, post, output)
        self._io.call(lambda: self._server.expect(name, handle))
        self._waiting.append((name, handle, purpose))
        return handle

    def _input(self, starts: Sequence[RemoteStart]) -> bytes:
        """Stdin of a step. Without an address of the user's, that of srun, to which SLURM connects from the nodes."""
        of_srun = ("SLURM_LAUNCH_NODE_IPADDR", "SLURM_SRUN_COMM_HOST")
        text = caller.first_input(starts, "SLURMD_NODENAME", "SLURM_PROCID", of_srun)
        return text + caller.credentials(self._server.secret, self._server.port, self._address)

    def start_together(self) -> None:
        waiting, self._waiting = self._waiting, []
        self._steps.start(waiting)

    def close(self) -> None:
        """End the steps; they have ended when this returns, but for what SLURM cannot reach."""
        self._steps.close()
        self._io.close()
        self._server.close()


def _listen(address: str) -> socket.socket:
    """Listen at the address, or without one at all, on a port that the nodes can probably reach.

    Raises:
        LaunchError: no port is free.
    """
    address = network.bindable(address) if address else network.any_address()
    for port in _ports():
        with contextlib.suppress(LaunchError):
            return network.listen("the launcher", address, port)
    return network.listen("the launcher", address, 0)


def _ports() -> Sequence[int]:
    """The ports of a login node to which SLURM's processes on the nodes connect: firewalls let these through."""
    if "SLURMD_NODENAME" in os.environ:  # This is a node of the job: between these, programs connect to any port.
        return ()
    code, told = scontrol.run(_CONFIG_S, "show", "config")
    found = None if code else re.search(r"^SrunPortRange\s*=\s*(\d+)-(\d+)\s*$", told, re.MULTILINE)
    return range(int(found[1]), int(found[2]) + 1) if found and found[1] != "0" else ()
