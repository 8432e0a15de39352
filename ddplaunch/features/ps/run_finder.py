"""Finds and kills the processes of this user's runs on this machine, for ``--ps``, ``--kill`` and ``--stacks``.

Runs in an agent without workers. A process belongs to the run whose tag is in its environment, in the name of its
cgroup or, for a launcher, in the name of its memfd. Must not signal processes of other users or in other containers,
this process or its parents.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import time
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.features.free_gpus import register
from ddplaunch.features.ps.queries import (
    ENDING_EXTRA_S,
    PROCESS_KINDS,
    EndRun,
    ListRuns,
    ProcessKind,
    RunOnHost,
    RunsFound,
)
from ddplaunch.features.runs import run_folders, run_json
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol import environment
from ddplaunch.protocol.agent_entry import AGENT_MODULE, KEEPER_COMMAND, START_VARIABLE
from ddplaunch.system import cgroup, processes, procfs, run_tags
from ddplaunch.text import KEEPER_ID, grouped, quote

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox

_WAIT_S, _REPEAT_S = 0.2, 0.5

_MAX_SCRIPT = 200
"""Characters of a script's path."""

_HELPERS: tuple[ProcessKind, ...] = ("forkserver", "store", "member", "relay")

_PSS, _REAL_USER = re.compile(rb"^Pss:\s+(\d+)", re.MULTILINE), re.compile(rb"^Uid:\s+(\d+)", re.MULTILINE)

_KERNEL_THREAD = 0x00200000
"""PF_KTHREAD of the kernel's include/linux/sched.h, a flag in /proc/PID/stat."""


@dataclass(frozen=True)
class RunProcess:
    """One process of a run. A launcher of several runs has one RunProcess for each.

    Attributes:
        started: when it has been started, as the kernel says it: pids are reused.
        tag: the node tag; the run tag for a launcher.
        run_id: the run id; that of ``tag``, or another on which the nodes have agreed.
        launcher_alive: whether this process is an agent whose launcher is alive.
        script: what the workers run, as far as this process shows it; that may change, so it is not compared.
    """

    pid: int
    started: bytes
    tag: str
    run_id: str
    kind: ProcessKind
    launcher_alive: bool = False
    script: str = field(default="", compare=False)


def serve(query: ListRuns | EndRun, stream: BinaryIO, outbox: Outbox) -> tuple[int, ...] | None:
    """Send RunsFound; or end a run, and return the pids that SIGKILL has not ended."""
    if isinstance(query, EndRun):
        return _end_run(query, stream)
    outbox.send(find_runs())
    return None


# Finding runs.


def find_runs() -> RunsFound:
    """All runs with processes on this machine, without this process."""
    found, hidden_pids = find_processes()
    by_run = grouped((run_tags.run_tag_of(each.tag), each) for each in found if each.pid != os.getpid())
    waiting: set[int] = set()
    with contextlib.suppress(OSError):
        waiting = {user.pid for user in register.listed() if user.ticket} if by_run else waiting
    runs = tuple(_summary(tag, its, waiting) for tag, its in sorted(by_run.items()))
    return RunsFound(machine(), runs, hidden_pids)


def _summary(run_tag: str, found: list[RunProcess], waiting: Collection[int]) -> RunOnHost:
    """``waiting``: pids of agents that wait for GPUs."""
    counts = Counter(process.kind for process in found)
    by_kind = sorted(found, key=lambda process: PROCESS_KINDS.index(process.kind))  # The launcher knows best.
    return RunOnHost(
        run_tag=run_tag,
        run_id=found[0].run_id,
        counts=tuple((kind, counts[kind]) for kind in PROCESS_KINDS if counts[kind]),
        age_s=max(procfs.age_s(process.pid) for process in found),
        memory_bytes=sum(_memory_bytes(process.pid) for process in found),
        launcher_alive=any(process.kind in ("launcher", "keeper") or process.launcher_alive for process in found),
        script=quote(next((process.script for process in by_kind if process.script), ""), _MAX_SCRIPT),
        launchers=tuple(process.pid for process in found if process.kind == "launcher"),
        waits=any(process.pid in waiting for process in found),
    )


def _memory_bytes(pid: int) -> int:
    """Proportional set size; 0 if it cannot be read."""
    found = _PSS.search(procfs.read(f"/proc/{pid}/smaps_rollup"))
    return int(found[1]) * 1024 if found else 0


def machine() -> str:
    """As in RunsFound."""
    boot_id = os.fsdecode(procfs.read("/proc/sys/kernel/random/boot_id").strip())
    return f"{boot_id} {os.readlink('/proc/self/ns/pid')}"


@dataclass(frozen=True)
class _Inspected:
    """A process of this user. Both ``tag`` and ``launcher_tags`` are empty if it belongs to no run.

    Attributes:
        run_id: what a worker, and a process that it started, has in TORCHELASTIC_RUN_ID.
        launcher_tags: run tags of the runs that this process leads, each with its run id.
    """

    pid: int
    started: bytes
    parent: int
    session: int
    tag: str
    run_id: str
    launcher_tags: Mapping[str, str]
    command: tuple[str, ...]
    has_our_state_folder: bool = False

    @property
    def is_keeper(self) -> bool:
        """Whether it waits for runs with the state folder of this process."""
        return self.command[:2] == KEEPER_COMMAND and not self.tag and self.has_our_state_folder

    @property
    def is_agent(self) -> bool:
        code = self.command[2] if self.command[1:2] == ("-c",) and len(self.command) > 2 else ""
        return AGENT_MODULE in code or START_VARIABLE in code


def find_processes() -> tuple[tuple[RunProcess, ...], tuple[int, ...]]:
    """All processes of runs, and the pids of this user's processes that cannot be inspected."""
    cgroup_tags = {pid: tag for folder, tag in cgroup.of_runs() for pid in cgroup.members(folder)}
    inspected: dict[int, _Inspected] = {}
    hidden_pids = []
    for pid in procfs.pids():
        try:
            inspected[pid] = _inspect(pid, cgroup_tags.get(pid, ""))
        except (FileNotFoundError, ProcessLookupError):
            continue
        except PermissionError:
            hidden_pids.append(pid)
    launchers = {pid for pid, candidate in inspected.items() if candidate.launcher_tags}
    agents = {pid for pid, candidate in inspected.items() if candidate.tag and candidate.is_agent}
    return tuple(_run_processes(inspected.values(), launchers, agents)), tuple(hidden_pids)


def _run_ids(inspected: Iterable[_Inspected], agents: set[int]) -> dict[str, str]:
    """Run ids by run tag, where they are not those of the tags: of launchers, or where none is alive, of workers."""
    found: dict[str, str] = {}
    for candidate in inspected:
        run_tag = run_tags.run_tag_of(candidate.tag)
        # An agent may have inherited the variable from a worker that started its launcher.
        if run_tags.is_made_id(run_tag) and run_tags.is_made_id(candidate.run_id) and not _is_helper(candidate, agents):
            found.setdefault(run_tag, candidate.run_id)
    for candidate in inspected:
        found.update(candidate.launcher_tags)
    return found


def _inspect(pid: int, cgroup_tag: str) -> _Inspected:
    """Read the data that determine a process's run and kind. ``cgroup_tag`` is the node tag in the name of its cgroup.

    Raises:
        FileNotFoundError, ProcessLookupError: the process has ended, or it is a zombie, a kernel thread, or a process
            of another user or container.
        PermissionError: a process of this user that cannot be inspected.
    """
    fields = procfs.stat(pid)
    if not _is_live_and_ours(pid, fields) or os.readlink(f"/proc/{pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
        raise ProcessLookupError
    with open(f"/proc/{pid}/environ", "rb", buffering=0) as file:
        environ = file.read()
    return _Inspected(
        pid=pid,
        started=fields[procfs.STARTED],
        parent=int(fields[procfs.PARENT]),
        session=os.getsid(pid),
        tag=next(filter(run_tags.is_tag, procfs.values(environ, environment.RUN_ID)), cgroup_tag),
        run_id=next(procfs.values(environ, environment.TORCHELASTIC_RUN_ID), ""),
        launcher_tags=run_tags.launcher_memfds(pid),
        command=tuple(os.fsdecode(procfs.read(f"/proc/{pid}/cmdline")).removesuffix("\0").split("\0")),
        has_our_state_folder=run_folders.has_our_state_folder(environ),
    )


def _is_live_and_ours(pid: int, fields: Sequence[bytes]) -> bool:
    """Whether the process is alive and this user's by its real user id, which a setuid program keeps."""
    if not fields or fields[procfs.STATE] in (b"Z", b"X") or int(fields[procfs.FLAGS]) & _KERNEL_THREAD:
        return False
    found = _REAL_USER.search(procfs.read(f"/proc/{pid}/status"))
    return bool(found and int(found[1]) == os.getuid())


def _run_processes(inspected: Collection[_Inspected], launchers: set[int], agents: set[int]) -> Iterator[RunProcess]:
    run_ids = _run_ids(inspected, agents)
    for candidate in inspected:
        if candidate.is_keeper:
            state = " ".join(candidate.command[2:])
            yield RunProcess(candidate.pid, candidate.started, KEEPER_ID, KEEPER_ID, "keeper", script=state)
        scripts = _scripts_of_launcher(candidate.pid) if candidate.launcher_tags else {}
        for tag, run_id in candidate.launcher_tags.items():
            yield RunProcess(candidate.pid, candidate.started, tag, run_id, "launcher", script=scripts.get(tag, ""))
        if candidate.tag:
            kind = _kind(candidate, agents)
            launcher_alive = kind == "agent" and _has_launcher(candidate, launchers)
            run_id = run_ids.get(run_tags.run_tag_of(candidate.tag)) or run_tags.run_id_of(candidate.tag)
            script = _script_of_worker(candidate.command) if kind == "worker" else ""
            yield RunProcess(candidate.pid, candidate.started, candidate.tag, run_id, kind, launcher_alive, script)


def _is_helper(candidate: _Inspected, agents: set[int]) -> bool:
    return _kind(candidate, agents) not in ("worker", "other")


def _scripts_of_launcher(pid: int) -> dict[str, str]:
    """By run tag, from the run folders of the launcher."""
    return {started.run_tag: started.script for _, started in run_json.of_launcher(pid)}


def _script_of_worker(command: tuple[str, ...]) -> str:
    """The script or module in ``python -u train.py`` or ``python -u -m pkg.train``, or the program."""
    if command[1:2] != ("-u",) or "python" not in os.path.basename(command[0]):
        return command[0] if command else ""
    words = command[3:] if command[2:3] == ("-m",) else command[2:]
    return words[0] if words else ""


def _kind(candidate: _Inspected, agents: set[int]) -> ProcessKind:
    if candidate.pid in agents:
        return "agent"
    for kind in _HELPERS:
        if candidate.command[:2] == ("ddplaunch", kind):
            return kind
    # Orphans of a worker also become children of the agent, but seldom lead a session.
    is_leader = candidate.session == candidate.pid
    return "worker" if candidate.parent in agents and is_leader else "other"


def _has_launcher(agent: _Inspected, launchers: set[int]) -> bool:
    """Over SSH an agent's parent is sshd's process for the connection, which ends with the launcher."""
    return agent.parent in launchers or (agent.parent != 1 and any(START_VARIABLE in word for word in agent.command))


# Killing a run.


def _end_run(order: EndRun, stream: BinaryIO) -> tuple[int, ...]:
    """Stop a run's launcher first, which stops the run as after a signal; then its agents; then all other processes.

    Returns the pids that remain: all of the run if ``stream`` ends, because then no launcher waits for the answer.
    """
    excluded = _own_pids()
    grace_end = time.monotonic() + order.grace_s
    signalled: dict[RunProcess, float] = {}
    while found := _processes_of(order.run_id, excluded):
        now = time.monotonic()
        first = _first_to_stop(found)
        if now >= grace_end + (ENDING_EXTRA_S if first[0].kind in ("launcher", "agent") else 0):
            return _kill_processes(order.run_id, excluded)
        for process in first:
            # At a second SIGTERM a launcher shortens its grace period, at a third it kills at once.
            if process not in signalled or now >= max(grace_end, signalled[process] + _REPEAT_S):
                signalled[process] = now
                _signal(process, signal.SIGTERM)
                _signal(process, signal.SIGCONT)
        if _wait(found[0], (stream,)):
            return _pids(found)
    return ()


def _processes_of(run_id: str, excluded: frozenset[int]) -> tuple[RunProcess, ...]:
    found, _ = find_processes()
    return tuple(
        process
        for process in found
        if process.pid not in excluded and run_id in (process.run_id, *run_tags.ids_of(process.tag))
    )


def _first_to_stop(found: tuple[RunProcess, ...]) -> tuple[RunProcess, ...]:
    """The processes to stop first: the launchers, else the agents, else all."""
    for kind in ("launcher", "agent"):
        top = tuple(process for process in found if process.kind == kind)
        if top:
            return top
    return found


def _kill_processes(run_id: str, excluded: frozenset[int]) -> tuple[int, ...]:
    deadline = time.monotonic() + processes.UNKILLABLE_AFTER_S
    while found := _processes_of(run_id, excluded):
        for tag in {process.tag for process in found}:
            # A cgroup that contains an excluded process stays; its other processes are killed one by one below.
            cgroup.kill_tagged(tag, time.monotonic() + _WAIT_S, excluded=excluded)
        for process in found:
            _signal(process, signal.SIGKILL)
        if time.monotonic() > deadline:
            break
        _wait(found[0], ())
    return _pids(found)


def _signal(process: RunProcess, signum: int) -> None:
    """Signal through a pidfd, opened before the check that the pid still belongs to this process."""
    with procfs.pidfd(process.pid) as fd, contextlib.suppress(ProcessLookupError, PermissionError):
        if procfs.stat(process.pid)[procfs.STARTED :][:1] == [process.started]:
            procfs.send_signal(process.pid, fd, signum)


def _wait(process: RunProcess, streams: tuple[BinaryIO, ...]) -> bool:
    """Wait until the process has ended, at most ``_WAIT_S``. Returns whether one of ``streams`` has ended."""
    with procfs.pidfd(process.pid) as fd:
        stream_fds = [stream.fileno() for stream in streams]
        ready, _, _ = select.select([*stream_fds, *([] if fd is None else [fd])], [], [], _WAIT_S)
    return any(fd in ready for fd in stream_fds)


def _pids(found: Iterable[RunProcess]) -> tuple[int, ...]:
    return tuple(sorted({process.pid for process in found}))


def _own_pids() -> frozenset[int]:
    """This process and all its parents."""
    found, pid = set[int](), os.getpid()
    while fields := procfs.stat(pid):
        found.add(pid)
        pid = int(fields[procfs.PARENT])
    return frozenset(found)
