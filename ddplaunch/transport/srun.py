"""SrunTransport: starts agents on the nodes of a SLURM allocation; each srun is a child process of the launcher.

Runs in the launcher. The agent starts from a login shell and reports facts about its node, as over SSH. srun must not
receive SIGTERM except by ``kill``: it forwards SIGTERM as SIGKILL.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import threading
from collections import deque
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch.cluster.slurm import SRUN_DEFAULTS
from ddplaunch.errors import NODE_NOT_READY, LaunchError
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system.limits import NO_ROOM_HINT
from ddplaunch.transport import remote_start
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import AgentConnected, Transport
from ddplaunch.transport.popen_handle import PopenHandle

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.transport.handle import Post, WriteOutput

START_TIMEOUT_S = 60.0
_KEPT_LINES = 20
_KILLED_S = 3.0

_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--overlap", "--export=ALL", "--input=0", "--mpi=none", "--cpu-bind=none", "--mem=0"),
    *("--kill-on-bad-exit=0", "--job-name=ddplaunch"),
)

_JOB_OPTIONS = (
    *SRUN_DEFAULTS,
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
"""Variables that srun reads as options. Without them a step of one task gets all of the job's resources on its node."""


def command(host: str) -> tuple[str, ...]:
    """Arguments of an srun that starts an agent on ``host``; it reads ``remote_start.first_input`` from stdin."""
    return ("srun", f"--nodelist={host}", *_OPTIONS, "/bin/sh", "-c", remote_start.COMMAND)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """``inherited`` without the variables that would change the srun of ``command``."""
    return {name: value for name, value in inherited.items() if name not in _JOB_OPTIONS}


class SrunHandle(PopenHandle):
    """One agent on another node. Posts AgentConnected and the agent's records, or a HostFailure and no other event."""

    def __init__(
        self, host: str, start: remote_start.RemoteStart, env: Mapping[str, str], post: Post, output: WriteOutput
    ) -> None:
        """Start srun.

        Raises:
            OSError: there is no srun, or no room for a process.
            RuntimeError: no room for a thread.
        """
        self._srun = process = subprocess.Popen(
            command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(env),
            start_new_session=True,
        )
        super().__init__(process, f"on {host}", post, output)
        self.host = host
        self._start = start
        self._output_lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._is_connected = False
        self._stderr_reader = self._thread(self._read_stderr, "stderr of")
        self._start_threads(self._stderr_reader, self._writer)

    def wake(self) -> None:
        """Do nothing: srun does not forward SIGCONT."""

    def kill(self) -> None:
        """Make srun SIGKILL the agent; the kernel then kills its workers."""
        self._srun.terminate()

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait for its exit, with SIGKILL after ``timeout_s``; at once if not connected.

        Returns:
            The agent's returncode; None if srun was killed.
        """
        self.end_input()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s if self._is_connected else 0.0)
        self.kill()
        code = super().close(_KILLED_S)
        # srun reports an exit by signal n as 128 + n, as a shell does.
        return None if code is None or code < 0 else 128 - code if code > 128 else code

    # The writer's thread.

    def _send(self) -> None:
        failure = self._connect()
        if not failure:
            super()._send()
            return
        self.kill()
        with contextlib.suppress(OSError):
            self._stdin.close()
        self._post(failure)

    def _connect(self) -> HostFailure | None:
        timeout = threading.Timer(START_TIMEOUT_S, self.kill)
        timeout.daemon = True
        try:
            timeout.start()
            with contextlib.suppress(OSError):  # srun has exited already; the HostFailure contains its output.
                self._stdin.write(remote_start.first_input(self._start))
                self._stdin.flush()
            facts = remote_start.wait_for_facts(self._stdout, self._output_lines)
            if facts.failed:
                self._stderr_reader.join(_KILLED_S)  # It has the reason.
            failure = remote_start.check_facts(self.host, facts, self._start, tuple(self._output_lines))
            if failure is None:
                self._is_connected = True
                self._post(AgentConnected(facts))
                self._reader.start()
            return failure
        except (EOFError, OSError):
            self._stderr_reader.join(_KILLED_S)
            printed = "; ".join(line for line in self._output_lines if line)[-500:]
            return HostFailure(self.host, "start", f"srun did not start the agent: {printed or 'it printed nothing'}")
        except RuntimeError as error:
            message = f"the launcher's machine has no room for a thread: {error}"
            return HostFailure(self.host, "start", message, NO_ROOM_HINT)
        finally:
            timeout.cancel()

    # The thread that reads stderr.

    def _read_stderr(self) -> None:
        with cast("BinaryIO", self._srun.stderr) as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                if self._is_connected:
                    self._post(Notice(f"{self.host}: {line}"))
                else:
                    self._output_lines.append(line)


class SrunTransport(Transport):
    """Starts agents through srun. A node that cannot be used is reported by a HostFailure."""

    def _start_agent(self, index: int, post: Post, output: WriteOutput, *, for_sweep: bool) -> SrunHandle:
        start = remote_start.agent_start(self._config, self._node_tag(index), for_sweep=for_sweep)
        env = {**os.environ, **dict(self._config.remote.environ)}
        try:
            return SrunHandle(self.node_names[index], start, env, post, output)
        except OSError as error:
            raise LaunchError(
                f"srun cannot be run here: {error.strerror}",
                "It starts the agents on the nodes of SLURM's allocation. `--cluster none` runs on this machine only.",
                NODE_NOT_READY,
            ) from None
