"""A handle on an agent on another node of SLURM's allocation: a step of its own, whose srun is a child of the launcher.

The agent is started and spoken to as over SSH. What it must not get is a signal by way of srun: srun makes SIGKILL of
SIGTERM, which here is just what ``kill`` is for.
"""

from __future__ import annotations

import contextlib
import queue
import subprocess
import threading
from collections import deque
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch import protocol
from ddplaunch.launcher import remote
from ddplaunch.launcher.failures import HostFailure
from ddplaunch.launcher.handles import AgentConnected, AgentLost, complain, deliver
from ddplaunch.launcher.ssh_stream import wait_for_facts
from ddplaunch.records import FROM_AGENT, Notice
from ddplaunch.slurm import SRUN_DEFAULTS

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddplaunch.records import Output

START_TIMEOUT_S = 60.0
_KEPT_LINES = 20
_KILLED_S = 3.0

_OPTIONS = (
    *("--nodes=1", "--ntasks=1", "--overlap", "--export=ALL", "--input=0", "--mpi=none", "--cpu-bind=none", "--mem=0"),
    *("--kill-on-bad-exit=0", "--job-name=ddplaunch"),
)

_OF_THE_JOB = (
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
"""What srun would read as options: a step of one task on one node is to have all that the job has there."""


def command(host: str) -> tuple[str, ...]:
    """Starts an agent on ``host``, as ``remote.first_input`` tells it."""
    return ("srun", f"--nodelist={host}", *_OPTIONS, "/bin/sh", "-c", remote.COMMAND)


def environment(inherited: Mapping[str, str]) -> dict[str, str]:
    """For such an srun."""
    return {name: value for name, value in inherited.items() if name not in _OF_THE_JOB}


class SrunHandle:
    """One agent on another node; posts AgentConnected, or a HostFailure and nothing more; then as any handle."""

    def __init__(
        self,
        host: str,
        start: remote.RemoteStart,
        env: Mapping[str, str],
        post: Callable[[object], None],
        output: Callable[[Output, bytes], None],
    ) -> None:
        """Start srun.

        Raises:
            OSError: there is none, or no room for it.
        """
        self.host = host
        self._start = start
        self._post = post
        self._output = output
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._is_connected = False
        self._process = subprocess.Popen(
            command(host),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=environment(env),
            start_new_session=True,
        )
        self._complaints = threading.Thread(target=self._complain, name=f"srun {host}", daemon=True)
        self._complaints.start()
        threading.Thread(target=self._run, name=f"to {host}", daemon=True).start()

    def send(self, record: object) -> None:
        """Queue a record, which never blocks; a channel that is gone is told of by AgentLost."""
        self._outgoing.put(record)

    def wake(self) -> None:
        """Nothing: srun does not pass on SIGCONT."""

    def kill(self) -> None:
        """Have srun SIGKILL the agent; the kernel then kills its workers."""
        self._process.terminate()

    def end_input(self) -> None:
        """Close the agent's stdin after what is queued: it stops its workers and ends. For many before ``close``."""
        self._outgoing.put(None)

    def close(self, timeout_s: float = 5.0) -> int | None:
        """End the agent's stdin and wait for its end, by SIGKILL after ``timeout_s``, or at once before it has started.

        Returns:
            The agent's returncode; None if srun was killed, and nobody knows it.
        """
        self.end_input()
        limit_s = timeout_s if self._is_connected else 0.0
        for end, wait_s in ((self._process.terminate, limit_s), (self._process.kill, _KILLED_S)):
            try:
                self._process.wait(wait_s)
            except subprocess.TimeoutExpired:
                end()
        code = self._process.wait()
        # srun tells the end by signal n as a shell does.
        return None if code < 0 else 128 - code if code > 128 else code

    # The thread that starts and sends.

    def _run(self) -> None:
        stdin = cast("BinaryIO", self._process.stdin)
        with contextlib.suppress(OSError), stdin:
            failure = self._connect(stdin)
            if failure:
                self._process.terminate()
                self._post(failure)
                return
            threading.Thread(target=self._listen, name=f"from {self.host}", daemon=True).start()
            while (record := self._outgoing.get()) is not None:
                stdin.write(protocol.encode(record))
                stdin.flush()

    def _connect(self, stdin: BinaryIO) -> HostFailure | None:
        limit = threading.Timer(START_TIMEOUT_S, self._process.terminate)
        limit.daemon = True
        limit.start()
        try:
            with contextlib.suppress(OSError):  # It has ended already: what it said is to be read.
                stdin.write(remote.first_input(self._start))
                stdin.flush()
            facts = wait_for_facts(self._process.stdout, self._lines)  # type: ignore[arg-type]
        except (EOFError, OSError):
            self._complaints.join(_KILLED_S)
            said = "; ".join(line for line in self._lines if line)[-500:]
            return HostFailure(self.host, "start", f"srun did not start the agent: {said or 'without a word'}")
        finally:
            limit.cancel()
        failure = remote.judge(self.host, facts, self._start)
        if failure is None:
            self._is_connected = True
            self._post(AgentConnected(facts))
        return failure

    # The threads that read.

    def _listen(self) -> None:
        stream = cast("BinaryIO", self._process.stdout)
        try:
            while (received := protocol.read_record(stream, FROM_AGENT)) is not None:
                deliver(*received, self._post, self._output)
        except (OSError, protocol.ProtocolError) as error:
            complain(error, f"on {self.host}", self._post)
            self._process.terminate()
        self._post(AgentLost())

    def _complain(self) -> None:
        with cast("BinaryIO", self._process.stderr) as stream:
            for raw in stream:
                line = raw.decode("utf-8", "replace").rstrip()
                if self._is_connected:
                    self._post(Notice(f"{self.host}: {line}"))
                else:
                    self._lines.append(line)
