"""The workers of one attempt on this node: their pipes, files, pids and ends. Owned by the agent's main thread."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent import error_file, inflicted, processes
from ddplaunch.agent.exits import cut, last_lines, log_to_read
from ddplaunch.agent.output import LogFile, Pump, Stream, output_pipe
from ddplaunch.agent.silence import Silence
from ddplaunch.agent.worker import Worker
from ddplaunch.harm import Inflict, Inflicted
from ddplaunch.model import AgentSpec, Certainty, Round, StreamName, WorkerError, WorkerExit
from ddplaunch.records import AttemptStarted, Notice, Output

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.agent.outbox import Outbox

_STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")


class WorkerGroup:
    """All workers of one attempt. Main thread only; ends when ``finish`` has been called."""

    def __init__(self, spec: AgentSpec, round_: Round, outbox: Outbox, post: Callable[[object], None]) -> None:
        self._spec = spec
        self._round = round_
        self._outbox = outbox
        self._stop_s: float | None = None
        self._stop_time_s = 0.0
        self._copies: dict[StreamName, LogFile] = {}
        self._may_complain = threading.Lock()
        self._attempt_dir = Path(spec.log_dir) / f"attempt_{round_.attempt}" if spec.log_dir else None
        self.workers = [self._worker(local_rank) for local_rank in range(round_.local_world_size)]
        self.silence = Silence(spec.hang_timeout_s, self, outbox.send, post)

    def _worker(self, local_rank: int) -> Worker:
        log_dir = self._attempt_dir / str(local_rank) if self._attempt_dir else None
        if log_dir:
            try:
                for folder in (log_dir.parent.parent, log_dir.parent, log_dir):
                    folder.mkdir(exist_ok=True, mode=0o700)
            except OSError as error:
                self._complain(f"{log_dir}: {error.strerror}")
                log_dir = None
        return Worker(self._round.first_rank + local_rank, local_rank, log_dir)

    def _complain(self, text: str) -> None:
        """One warning for the whole group: a full disk hits every file."""
        if self._may_complain.acquire(blocking=False):  # Never given back; the pumps' threads come here too.
            self._outbox.send(Notice(f"{text}; the job goes on, but its logs on {self._spec.host} are incomplete", -1))

    # Starting.

    def open_streams(self, worker: Worker) -> list[int]:
        """Three descriptors for the worker's stdin, stdout and stderr; the caller closes those it passes on."""
        alone = self._round.world_size == 1
        terminal = {"stdout": self._spec.stdout_fd, "stderr": self._spec.stderr_fd} if alone else {}
        fds = [_duplicate(self._spec.stdin_fd)]
        for name in _STREAMS:
            terminal_fd = terminal.get(name)
            fds.append(os.dup(terminal_fd) if terminal_fd is not None else self._pump(worker, name))
        return fds

    def _pump(self, worker: Worker, name: StreamName) -> int:
        reader, writer = output_pipe()
        needles = self._spec.duplicate_stdout_filters if name == "stdout" else self._spec.duplicate_stderr_filters
        stream = Stream(
            header=Output(self._spec.host, worker.rank, worker.local_rank, name, 0, attempt=self._round.attempt),
            send=self._outbox.send_output if self._is_shown(worker, name) else None,
            log=LogFile(worker.log_dir / f"{name}.log", self._complain) if worker.log_dir else None,
            needles=tuple(os.fsencode(needle) for needle in needles),
            copy=self._copy(name) if needles else None,
            copy_prefix=f"[{self._spec.role}{worker.local_rank}]:".encode(),
        )
        worker.pumps.append(Pump(reader, stream, f"{name}[{worker.local_rank}]"))
        return writer

    def _is_shown(self, worker: Worker, name: StreamName) -> bool:
        spec = self._spec
        return (
            (spec.tee.covers(worker.local_rank, name) or not spec.redirects.covers(worker.local_rank, name))
            and (spec.show_ranks is None or worker.rank in spec.show_ranks)
            and (spec.show_local_ranks is None or worker.local_rank in spec.show_local_ranks)
        )

    def _copy(self, name: StreamName) -> LogFile | None:
        if name not in self._copies and self._attempt_dir:
            self._copies[name] = LogFile(self._attempt_dir / f"filtered_{name}.log", self._complain)
        return self._copies.get(name)

    def started(self, local_rank: int, pid: int, exited: Callable[[], None]) -> None:
        """The worker runs as ``pid``, a child of this process; ``exited`` will be called from a thread at its end."""
        worker = self.workers[local_rank]
        worker.pid, worker.started_s = pid, time.monotonic()
        processes.watch_exit(pid, str(worker.rank), exited)

    def tell_started(self) -> None:
        """Say that all workers run."""
        round_, pids = self._round, tuple(worker.pid for worker in self.workers)
        where = (round_.master_addr, round_.master_port, pids, round_.node_rank, round_.first_rank)
        self._outbox.send(AttemptStarted(round_.attempt, round_.world_size, *where))

    @property
    def attempt(self) -> int:
        """Whose workers these are."""
        return self._round.attempt

    @property
    def streams(self) -> tuple[Stream, ...]:
        """All that is read of the workers."""
        return tuple(pump.stream for worker in self.workers for pump in worker.pumps)

    def write_stacks(self) -> None:
        """Have every worker that can write where it is."""
        for worker in self.workers:
            worker.write_stacks()

    # Ending.

    def exited(self, local_rank: int) -> None:
        """Kill what is left of the worker's process group, while its zombie still holds the id, then reap it."""
        worker = self.workers[local_rank]
        worker.ended_s, worker.ended_time_s = time.monotonic(), time.time()
        inflicted.end_drag(worker)
        processes.signal_group(worker.pid, signal.SIGKILL)
        worker.returncode = inflicted.as_feigned(worker, processes.reap(worker.pid))

    def signal(self, signum: int) -> None:
        """Send to every worker that runs, not to its children: they may not expect SIGUSR1."""
        for worker in self.workers:
            if worker.runs:
                processes.signal_process(worker.pid, signum)

    def inflict(self, order: Inflict) -> None:
        """Harm one worker, and tell whether that came in time."""
        is_now = order.attempt == self._round.attempt
        self._outbox.send(Inflicted(order.number, is_now and inflicted.inflict(order, self.workers[order.local_rank])))

    def stop(self, signum: int) -> None:
        """Tell every worker's process group to end; a stopped one is continued so that it can hear it.

        A worker gets the same signal once, however often this is called: a second SIGINT would break off its tidying.
        Of SIGUSR1 and SIGUSR2 its children hear nothing: they would die of them before it has written what it must.
        """
        tell = processes.signal_process if signum in (signal.SIGUSR1, signal.SIGUSR2) else processes.signal_group
        self._stops()
        for worker in self.workers:
            if worker.runs and signum not in worker.told:
                worker.told.add(signum)
                tell(worker.pid, signum)
                processes.signal_group(worker.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL every worker's process group."""
        self._stops()
        for worker in self.workers:
            if worker.runs:
                worker.told.add(signal.SIGKILL)
                processes.signal_group(worker.pid, signal.SIGKILL)

    def _stops(self) -> None:
        if self._stop_s is None:
            self._stop_s, self._stop_time_s = time.monotonic(), time.time()

    @property
    def all_ended(self) -> bool:
        return not any(worker.runs for worker in self.workers)

    @property
    def any_failed(self) -> bool:
        return any(worker.returncode for worker in self.workers)

    def unkillable(self) -> tuple[int, ...]:
        """Pids that SIGKILL has not ended."""
        return tuple(worker.pid for worker in self.workers if worker.runs)

    def finish(self, deadline: float, out_of_memory: Certainty, asked: bool) -> tuple[WorkerExit, ...]:
        """Drain the pumps until ``deadline``, close the files, and tell how each worker ended, by local rank.

        ``out_of_memory``: SIGKILL was the kernel's, for memory; ``asked``: somebody wanted the job to stop.
        """
        for pump in (pump for worker in self.workers for pump in worker.pumps):
            pump.join(deadline)
        for copy in self._copies.values():
            copy.close()
        return cut([self._exit(worker, out_of_memory, asked) for worker in self.workers if worker.pid])

    def _exit(self, worker: Worker, out_of_memory: Certainty, asked: bool) -> WorkerExit:
        error = error_file.read(worker.error_file) if worker.error_file else None
        returncode = worker.returncode if worker.returncode is not None else -signal.SIGKILL
        ended_time_s = worker.ended_time_s or time.time()
        stopped = self._was_stopped(worker, error, asked)
        is_from_outside = returncode == -signal.SIGKILL and signal.SIGKILL not in worker.told
        tails = {pump.stream.header.stream: pump.stream.tail for pump in worker.pumps}
        return WorkerExit(
            rank=worker.rank,
            local_rank=self._spec.task.local_rank if self._spec.task else worker.local_rank,
            host=self._spec.host,
            pid=worker.pid,
            returncode=returncode,
            stopped=stopped,
            time_s=error.time_s if error and error.time_s else ended_time_s,
            duration_s=(worker.ended_s or time.monotonic()) - worker.started_s,
            error=error,
            out_of_memory=out_of_memory if is_from_outside else "no",
            tail=last_lines(tails, is_needed=bool(returncode) and not stopped),
            log_file=log_to_read(worker.log_dir, tails),
            whereabouts=worker.whereabouts(),
        )

    def _was_stopped(self, worker: Worker, error: WorkerError | None, asked: bool) -> bool:
        """It ran when it was told to stop, and had not raised anything by then (it may still be on its way out)."""
        if self._stop_s is None or (worker.ended_s or self._stop_s) < self._stop_s:
            return False
        # A dying process closes its sockets before its end can be seen; a peer may have failed of that first.
        died_of_another = (worker.returncode or 0) < 0 and -(worker.returncode or 0) not in worker.told
        if died_of_another and not asked:
            return False
        return error is None or not 0 < error.time_s < self._stop_time_s


def _duplicate(fd: int | None) -> int:
    if fd is not None:
        with contextlib.suppress(OSError):  # The user closed it: `<&-`.
            return os.dup(fd)
    return os.open(os.devnull, os.O_RDWR)
