"""Tells the agent what the worker does, also while the script hangs.

Writes Python stacks at a signal, and answers questions about process groups and torch's flight record.

Runs in the worker, in one thread that starts when the script creates its first process group, and waits in a system
call ever after: it costs nothing until the agent asks. Only ``FailureRecord`` acts in the main thread. A thread is
needed because a main thread that waits in a collective runs neither Python code nor Python's signal handlers. Must not
load a module in that thread, since the main thread may hold the import lock, nor before the script, whose folder may
have a module of that name: the imports within functions find what torch has loaded.
"""

from __future__ import annotations

import _thread
import contextlib
import faulthandler
import os
import sys
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

from ddplaunch.features import worker_patches
from ddplaunch.features.hangs import worker_records
from ddplaunch.worker.parts import WorkerPart, connect

if TYPE_CHECKING:
    from types import FrameType, ModuleType

_C10D = "torch.distributed.distributed_c10d"

_STACKS_FDS = (1000, 500, 250, 120)
"""Descriptors for the file of the stacks: the first that is free and allowed. One that the script closes is lost."""

_socket_name = ""
_pid = _main_thread = 0
"""The process that may start the thread: a child that the script forks is not a worker."""


class FailureRecord(WorkerPart):
    """Leaves the record of a worker that fails."""

    def on_error(self, error: BaseException, folder: str) -> None:
        """If ``error`` says that a peer is gone or has not come, write what the agent would ask to ``RECORD_FILE``.

        At the end of the script: the agent cannot ask a worker that has ended. Takes up to 0.2 s where the flight
        record is full. Never raises.
        """
        c10d = sys.modules.get(_C10D)
        if not folder or c10d is None or os.getpid() != _pid:
            return
        with contextlib.suppress(Exception):
            from ddplaunch.protocol import first_failure
            from ddplaunch.system.files import kept_files

            if not first_failure.is_peer_loss(f"{type(error).__name__}: {error}"):
                return
            import json

            groups, pending = _groups(c10d), _pending(c10d, _frames_of_error(error))
            record = _flight_record(is_whole=True) or b"null"
            facts = json.dumps({worker_records.GROUPS: groups, worker_records.PENDING: pending}).encode()
            data = facts[:-1] + f', "{worker_records.FLIGHT_RECORD}": '.encode() + record + b"}\n"
            kept_files.write_whole(os.path.join(folder, worker_records.RECORD_FILE), data)


def part(text: str) -> WorkerPart:
    """The part of this worker: starts the thread once the script creates a process group.

    ``text``: the agent's file for the stacks and its socket; an empty name for what it does not have.
    """
    stacks_file, _, socket_name = text.partition(" ")
    _register_stack_dump(stacks_file)
    prepare(socket_name)
    return FailureRecord()


def _register_stack_dump(stacks_file: str) -> None:
    """Write the stacks of all threads to a file of the agent when the agent sends the signal."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        fd = os.open(stacks_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        faulthandler.register(worker_records.STACKS_SIGNAL, _with_high_number(fd), all_threads=True)


def _with_high_number(fd: int) -> int:
    """Move ``fd``, so that the first file of the script gets the number that it has without ddplaunch."""
    for number in _STACKS_FDS:
        if not os.path.exists(f"/proc/self/fd/{number}"):
            with contextlib.suppress(OSError):  # Above the limit of open files.
                moved = os.dup2(fd, number, inheritable=False)
                os.close(fd)
                return moved
    return fd


def prepare(socket_name: str) -> None:
    """Before the script, also where the forkserver has imported torch."""
    global _socket_name, _pid, _main_thread
    _socket_name, _pid, _main_thread = socket_name, os.getpid(), _thread.get_ident()
    if _C10D in sys.modules:
        watch(sys.modules[_C10D])
    elif "torch" not in sys.modules:
        worker_patches.after_import(_C10D, watch)


def watch(c10d: ModuleType | None) -> None:
    """Notice new process groups of torch's module; without effect if it is None or another torch keeps none there."""
    groups = getattr(c10d, "_pg_map", None)
    if c10d is not None and type(groups) is dict:
        c10d._pg_map = _Groups(groups)  # type: ignore[attr-defined]


class _Groups(dict[Any, Any]):
    """torch's dictionary of process groups."""

    def __setitem__(self, group: Any, value: Any) -> None:
        super().__setitem__(group, value)
        _start()


def _start() -> None:
    global _socket_name
    if _socket_name and os.getpid() == _pid:
        name, _socket_name = _socket_name, ""
        import json  # noqa: F401
        import signal  # noqa: F401
        import socket  # noqa: F401
        import time  # noqa: F401

        # Not threading.Thread: the script would see it in threading.enumerate(), and its end would be awaited.
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(_serve, (name, _main_thread))


def _serve(name: str, main_thread: int) -> None:
    import signal

    with contextlib.suppress(Exception):
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        with contextlib.suppress(OSError), open(f"/proc/self/task/{_thread.get_native_id()}/comm", "wb", 0) as comm:
            comm.write(worker_records.THREAD_NAME)
        with connect(name, "hangs") as agent:
            while request := agent.recv(1):
                agent.sendall(_answer(request, main_thread))


def _answer(request: bytes, main_thread: int) -> bytes:
    import json
    import time

    is_whole = request == worker_records.RECORD
    facts: dict[str, Any] = {}
    record = _flight_record(is_whole)
    facts[worker_records.NBYTES] = len(record)
    if is_whole:
        c10d = sys.modules[_C10D]
        with contextlib.suppress(Exception):
            facts[worker_records.GROUPS] = _groups(c10d)
        with contextlib.suppress(Exception):
            facts[worker_records.PENDING] = _pending(c10d, _frames_of_thread(main_thread))
    facts[worker_records.CPU_S] = time.thread_time()
    return json.dumps(facts).encode() + b"\n" + record


def _flight_record(is_whole: bool) -> bytes:
    """Torch's flight record as JSON; empty where this torch has none."""
    torch_c = sys.modules.get("torch._C._distributed_c10d")
    for name in ("_dump_fr_trace_json", "_dump_nccl_trace_json"):
        with contextlib.suppress(Exception):
            record = getattr(torch_c, name)(is_whole, False)
            return record if isinstance(record, bytes) else str(record).encode()
    return b""


def _groups(c10d: Any) -> dict[str, tuple[str, list[int]]]:
    names = dict(c10d._world.pg_names)
    return {
        names[group]: (str(getattr(group, "group_desc", "")), sorted(ranks, key=ranks.__getitem__))
        for group, ranks in dict(c10d._world.pg_group_ranks).items()
        if group in names
    }


def _frames_of_thread(thread: int) -> Iterator[FrameType]:
    """Innermost first."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _pending(c10d: Any, frames: Iterable[FrameType]) -> dict[str, Any] | None:
    """The outermost function of torch's module in ``frames``, as a ``PendingCall``."""
    found: FrameType | None = None
    for frame in frames:
        if frame.f_globals is c10d.__dict__ and not frame.f_code.co_name.startswith("_"):
            found = frame
    if found is None:
        return None
    arguments = dict(found.f_locals)
    group = c10d._world.pg_names.get(arguments.get("group"), "")
    peer = next((arguments[name] for name in ("dst", "src") if isinstance(arguments.get(name), int)), None)
    return {"function": found.f_code.co_name, "peer": peer, "group": group}


def _frames_of_error(error: BaseException) -> list[FrameType]:
    """Innermost first."""
    found, step = [], error.__traceback__
    while step is not None:
        found.append(step.tb_frame)
        step = step.tb_next
    return found[::-1]
