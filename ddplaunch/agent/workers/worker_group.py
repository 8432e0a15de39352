"""The workers of one attempt on this node: pipes, log files, signals and exits.

Runs in the agent, main thread only; a pump has a thread per worker. Must not start a process (see
``forkserver_client``) or decide when the attempt ends (see ``agent``).
"""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.exit_details import error_in, last_lines, lost_peer_in, main_log, read_error_file
from ddplaunch.agent.workers.output import LogFile, Stream
from ddplaunch.agent.workers.pump import Pump
from ddplaunch.agent.workers.worker import Worker
from ddplaunch.protocol import script_request
from ddplaunch.protocol.launcher_agent import AttemptStarted, Notice, Output
from ddplaunch.protocol.results import Certainty, Round, StreamName, WorkerError, WorkerExit
from ddplaunch.protocol.script_request import Request
from ddplaunch.system import processes, procfs
from ddplaunch.system.linux import output_pipe
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.protocol.specs import AgentSpec

_STREAMS: tuple[StreamName, StreamName] = ("stdout", "stderr")


class WorkerGroup:
    """All workers of one attempt. ``finish`` is the last call.

    Attributes:
        spec: what the launcher wants of this node, with what the nodes have agreed on.
        debugged: number of debug sessions that are open.
        debugged_at: when one was opened or closed last.
    """

    def __init__(self, spec: AgentSpec, round_: Round, outbox: Outbox) -> None:
        """Create the workers' folders below ``attempt_dir``, unless no logs are kept; no worker runs yet."""
        self.spec = spec
        self._round = round_
        self._outbox = outbox
        self._stopped_at: float | None = None
        self._stopped_time_s = 0.0
        self._copies: dict[StreamName, LogFile] = {}
        self._warned = threading.Lock()
        self.debugged, self.debugged_at = 0, 0.0
        self.attempt_dir = Path(spec.node_dir) / f"attempt_{round_.attempt}" if spec.node_dir else None
        self.workers = [self._worker(local_rank) for local_rank in range(round_.local_world_size)]

    def _worker(self, local_rank: int) -> Worker:
        worker_dir = self.attempt_dir / str(local_rank) if self.attempt_dir else None
        if worker_dir:
            try:
                for folder in (worker_dir.parent.parent, worker_dir.parent, worker_dir):
                    folder.mkdir(exist_ok=True, mode=0o700)
            except OSError as error:
                self._warn_once(f"{worker_dir}: {error.strerror}")
                worker_dir = None
        return Worker(self._round.first_rank + local_rank, local_rank, worker_dir)

    def _warn_once(self, text: str) -> None:
        """Warn once for the whole group: a full disk affects every file."""
        if self._warned.acquire(blocking=False):  # Never released; the pumps' threads call this too.
            self._outbox.send(Notice(f"{text}; the job goes on, but its logs on {self.spec.host} are incomplete", -1))

    @property
    def _has_lost_files(self) -> bool:
        """Whether the workers' files are incomplete, or not kept: an error file may be missing, too."""
        return self._warned.locked() or not self.attempt_dir

    # Starting.

    def open_streams(self, worker: Worker) -> list[int]:
        """Descriptors for stdin, stdout, stderr, and the text of the program; the caller must close them."""
        is_only = self._round.world_size == 1
        terminal = {"stdout": self.spec.stdout_fd, "stderr": self.spec.stderr_fd} if is_only else {}
        fds = [_duplicate(self.spec.stdin_fd)]
        pipes: dict[int, Stream] = {}
        for name in _STREAMS:
            terminal_fd = terminal.get(name)
            if terminal_fd is not None and not worker.worker_dir:
                fds.append(os.dup(terminal_fd))
                continue
            reader, writer = output_pipe() if terminal_fd is None else self._pseudo_terminal()
            fds.append(writer)
            pipes[reader] = self._stream(worker, name, terminal_fd)
        if pipes:
            worker.streams = tuple(pipes.values())
            worker.pump = Pump(pipes, f"output[{worker.local_rank}]")
        if self.spec.program.text:
            fds.append(_memory_file(self.spec.program.text.encode("utf-8", "surrogateescape")))
        return fds

    def _pseudo_terminal(self) -> tuple[int, int]:
        """Without one: a pipe, so that the lines are shown and logged, but the worker sees no terminal."""
        from ddplaunch.agent.workers import worker_terminal

        try:
            return worker_terminal.open_pair()
        except OSError as error:
            self._outbox.send(Notice(f"{self.spec.host}: no pseudo-terminal for the worker: {error.strerror}", 0))
        reader, writer = output_pipe()
        os.set_blocking(reader, False)
        return reader, writer

    def _stream(self, worker: Worker, name: StreamName, terminal_fd: int | None) -> Stream:
        output = self.spec.output
        filters = output.duplicate_stdout_filters if name == "stdout" else output.duplicate_stderr_filters
        header = Output(self.spec.host, worker.rank, worker.local_rank, name, 0, attempt=self._round.attempt)
        kind: Callable[..., Stream] = Stream
        if terminal_fd is not None:
            from ddplaunch.agent.workers.worker_terminal import TerminalStream

            header, kind = replace(header, on_terminal=True), partial(TerminalStream, terminal_fd=terminal_fd)
        return kind(
            header=header,
            send=self._outbox.send_output if self._is_shown(worker, name) else None,
            log=LogFile(worker.worker_dir / f"{name}.log", self._warn_once) if worker.worker_dir else None,
            filters=tuple(os.fsencode(text) for text in filters),
            copy=self._copy(name) if filters else None,
            copy_prefix=f"[{self.spec.workers.role}{worker.local_rank}]:".encode(),
        )

    def _is_shown(self, worker: Worker, name: StreamName) -> bool:
        output, local_rank = self.spec.output, worker.local_rank
        return (
            (output.tee.covers(local_rank, name) or not output.redirects.covers(local_rank, name))
            and (output.show_ranks is None or worker.rank in output.show_ranks)
            and (output.show_local_ranks is None or local_rank in output.show_local_ranks)
        )

    def _copy(self, name: StreamName) -> LogFile | None:
        if name not in self._copies and self.attempt_dir:
            self._copies[name] = LogFile(self.attempt_dir / f"filtered_{name}.log", self._warn_once)
        return self._copies.get(name)

    def on_started(self, local_rank: int, pid: int, exited: Callable[[], None]) -> None:
        """The worker runs as ``pid``, a child of this process. A daemon thread calls ``exited`` when it has ended."""
        worker = self.workers[local_rank]
        worker.pid, worker.started_at = pid, time.monotonic()
        processes.watch_exit(pid, str(worker.rank), exited)

    def report_started(self, import_s: float) -> None:
        """Report to the launcher that all workers run. ``import_s``: how long the forkserver's imports took."""
        round_, pids = self._round, tuple(worker.pid for worker in self.workers)
        started = AttemptStarted(
            attempt=round_.attempt,
            world_size=round_.world_size,
            pids=pids,
            node_rank=round_.node_rank,
            nnodes=round_.nnodes,
            first_rank=round_.first_rank,
            import_s=import_s,
        )
        self._outbox.send(started)

    @property
    def attempt(self) -> int:
        """Number of the attempt."""
        return self._round.attempt

    @property
    def streams(self) -> tuple[Stream, ...]:
        """The output streams of all workers."""
        return tuple(stream for worker in self.workers for stream in worker.streams)

    # Signals.

    def pids_by_local_rank(self) -> dict[int, int]:
        """Pids of the workers that run, by local rank; after ``kill`` and a wait, those that SIGKILL has not ended."""
        return {worker.local_rank: worker.pid for worker in self.workers if worker.is_running}

    @property
    def host(self) -> str:
        """Display name of the node."""
        return self.spec.host

    def signal(self, signum: int) -> None:
        """Send ``signum`` to every running worker, not to its children, which may have no handler for SIGUSR1."""
        for worker in self.workers:
            if worker.is_running:
                processes.signal_process(worker.pid, signum)

    # Stopping and exits.

    def on_stop_ordered(self) -> None:
        """The run is stopped; a worker whose exception the user debugs would not have ended yet."""
        for worker in self.workers:
            worker.stopped_in_post_mortem |= worker.in_post_mortem

    def on_exited(self, local_rank: int) -> None:
        """Kill the rest of the worker's process group, then reap the worker: until then its pid cannot be reused."""
        worker = self.workers[local_rank]
        worker.ended_at, worker.ended_time_s = time.monotonic(), time.time()
        processes.signal_group(worker.pid, signal.SIGKILL)
        worker.returncode = worker.reap(worker.pid)

    def stop(self, signum: int) -> None:
        """Send ``signum`` to every running worker's process group; a stopped group is continued so that it reacts.

        A worker that ignores ``signum`` also gets SIGTERM: it would otherwise run until the grace period has ended.
        A worker gets each signal once, however often this is called: a second SIGINT would interrupt its clean-up.
        SIGUSR1 and SIGUSR2 go to the worker alone: they would kill its children before it has written a checkpoint.
        """
        is_user_signal = signum in (signal.SIGUSR1, signal.SIGUSR2)
        send = processes.signal_process if is_user_signal else processes.signal_group
        self._record_stop_time()
        for worker in self.workers:
            if not worker.is_running:
                continue
            if not worker.stop_signals:
                worker.was_ending = procfs.is_ending(worker.pid)
            signals = {signum}
            if not is_user_signal and processes.ignores(worker.pid, signum):
                signals.add(signal.SIGTERM)
            for number in signals - worker.stop_signals:
                worker.stop_signals.add(number)
                send(worker.pid, number)
                processes.signal_group(worker.pid, signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL every running worker's process group."""
        self._record_stop_time()
        for worker in self.workers:
            if worker.is_running:
                worker.stop_signals.add(signal.SIGKILL)
                processes.signal_group(worker.pid, signal.SIGKILL)

    def _record_stop_time(self) -> None:
        if self._stopped_at is None:
            self._stopped_at, self._stopped_time_s = time.monotonic(), time.time()

    @property
    def all_ended(self) -> bool:
        return not any(worker.is_running for worker in self.workers)

    @property
    def any_failed(self) -> bool:
        return any(worker.returncode for worker in self.workers)

    def finish(self, deadline: float, out_of_memory: Certainty, stop_requested: bool) -> tuple[WorkerExit, ...]:
        """Drain the pumps, close the files, and return how the workers ended, by local rank.

        Args:
            deadline: ``time.monotonic()`` from which further output is ignored.
            out_of_memory: whether the kernel killed processes for memory during the attempt.
            stop_requested: the launcher, a signal or the loss of the launcher stopped the run.
        """
        for worker in self.workers:
            for stream in worker.streams:
                stream.is_over = True
            if worker.pump:
                worker.pump.join(deadline, worker.ended_at)
        for copy in self._copies.values():
            copy.close()
        return tuple(self._exit(worker, out_of_memory, stop_requested) for worker in self.workers if worker.pid)

    def _exit(self, worker: Worker, out_of_memory: Certainty, stop_requested: bool) -> WorkerExit:
        error = None
        with self._reading():
            error = read_error_file(worker.error_file) if worker.error_file else None
        returncode = worker.returncode if worker.returncode is not None else -signal.SIGKILL
        ended_time_s = worker.ended_time_s or time.time()
        request = self._request(worker, returncode)
        stopped = self._was_stopped(
            worker, error, stop_requested, has_asked=bool(request.give_up or request.avoid_node)
        )
        killed_by_stop = -returncode in worker.stop_signals
        killed_by_others = returncode == -signal.SIGKILL and not killed_by_stop
        tails = {stream.header.stream: stream.tail for stream in worker.streams}
        tail = last_lines(tails, is_needed=bool(returncode) and not stopped)
        if error is None and returncode == 1 and self._has_lost_files:
            error = error_in(tail)
        if error is None and returncode == -signal.SIGABRT and not stopped:
            error = lost_peer_in(tails)
        return WorkerExit(
            rank=worker.rank,
            local_rank=self.spec.task.local_rank if self.spec.task else worker.local_rank,
            host=self.spec.host,
            pid=worker.pid,
            returncode=returncode,
            stopped=stopped,
            time_s=error.time_s if error and error.time_s else ended_time_s,
            duration_s=(worker.ended_at or time.monotonic()) - worker.started_at,
            error=error,
            out_of_memory=out_of_memory if killed_by_others else "no",
            ended_by_stop=killed_by_stop and error is not None and not stopped,
            tail=tail,
            log_file=main_log(worker.worker_dir, tails),
            node_rank=self._node_rank,
            give_up=request.give_up,
            avoid_node=request.avoid_node,
        )

    @property
    def _node_rank(self) -> int:
        task = self.spec.task
        return self._round.node_rank if task is None or task.node_rank is None else task.node_rank

    def _request(self, worker: Worker, returncode: int) -> Request:
        """What the script has asked for; nothing if the worker has succeeded."""
        text = ""
        with self._reading():
            text = worker.take_request()
        request = script_request.read(text, returncode) if returncode else Request()
        if request.unknown:
            said = f"rank {worker.rank} on {self.spec.host} wrote {quote(request.unknown)} to its request file"
            self._outbox.send(Notice(f"{said}; give_up: REASON or avoid_this_node: REASON is expected", -1))
        return request

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        """A file of a worker that cannot be read is as one that it has not written: its exit code counts."""
        try:
            yield
        except OSError as error:
            self._warn_once(f"{error.filename or self.attempt_dir}: {error.strerror}")

    def _was_stopped(self, worker: Worker, error: WorkerError | None, stop_requested: bool, *, has_asked: bool) -> bool:
        """Whether the worker ran until it was stopped, had recorded no exception by then, and has asked for nothing.

        An exception that was debugged then does not count: it would end the worker only when the user leaves it.
        """
        if has_asked and not stop_requested:
            return False
        if worker.stopped_in_post_mortem:
            return True
        if self._stopped_at is None or (worker.ended_at or self._stopped_at) < self._stopped_at:
            return False
        # The kernel closes a dying process's sockets before its end is visible, so a peer's failure can come first.
        signum = -(worker.returncode or 0)
        if not stop_requested and (worker.was_ending or (signum > 0 and signum not in worker.stop_signals)):
            return False
        return error is None or not 0 < error.time_s < self._stopped_time_s


def _memory_file(data: bytes) -> int:
    fd = os.memfd_create("program")
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def _duplicate(fd: int | None) -> int:
    if fd is not None:
        with contextlib.suppress(OSError):  # The user closed it: `<&-`.
            return os.dup(fd)
    return os.open(os.devnull, os.O_RDWR)
