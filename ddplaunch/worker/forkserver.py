"""Imports torch once per node, stays single-threaded, and forks on request: workers, the store, or what is exec'd.

One process per node, child of the agent, which talks to it over a socket. Every process it starts becomes the
*agent's* child: the one in between exits, and the agent is a subreaper. It must never touch a GPU, run a parallel CPU
operation or start a thread; ``_refusal`` checks that and says so.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from ddplaunch import kernel, protocol
from ddplaunch.records import ForkserverReady, ForkserverSpec, ImportFailed, WorkerSpec, WorkerStarted
from ddplaunch.worker import bootstrap, ending, importing, preload, renewal

_HEADER_BYTES = 8
_MAX_FDS = 5
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")

_INHERITED = dict(os.environ)
"""The environment before the imports."""

Continuation = Callable[[], None]


def main() -> Continuation:
    """Serve until the agent closes the socket. Returns, in each forked process, what that process is to run.

    The caller runs it from the interpreter's outermost frame, when all frames of the forkserver are gone.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # What is forked from here shall not end by an exception of ours.
    sock = socket.socket(fileno=int(sys.argv[1]))
    received = _receive(sock, (ForkserverSpec,))
    if received is None:
        return lambda: None
    spec = received[0]
    kernel.die_with_parent(spec.agent_pid)
    kernel.set_command_line(["ddplaunch", "forkserver", spec.run_id])
    # What started us has put our package's folder first. With -P (Python 3.11) no folder of the script goes there.
    sys.path[:1] = [] if getattr(sys.flags, "safe_path", False) else [spec.script_dir]
    ending.register()
    if not _prepare(sock, spec):
        return lambda: None
    return _serve(sock, spec.agent_pid)


def _prepare(sock: socket.socket, spec: ForkserverSpec) -> bool:
    """Import and report."""
    source = _source(spec)
    early = preload.early_variable(source, os.environ) if spec.imports else ""
    if early or not spec.imports:
        refusal = f"{spec.script} sets {early}, which torch reads when it is imported" if early else ""
        _send(sock, ForkserverReady(refusal))
        return True
    with importing.frozen():
        threads = _threads_after_numpy()
        for module in (*preload.modules_for(source), *spec.preload):
            error = importing.error_of(module)
            # What the script seems to need may be missing: the script will tell, if it comes to that.
            if error and module in (*preload.ALWAYS, *spec.preload):
                _send(sock, ImportFailed(module, error))
                return False
    _send(sock, ForkserverReady(_refusal(threads)))
    return True


def _source(spec: ForkserverSpec) -> bytes:
    with contextlib.suppress(OSError):
        return Path(spec.script).read_bytes() if spec.script else b""
    return b""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def _threads_after_numpy() -> int:
    """OpenBLAS starts its pool when numpy loads, and has fork handlers; only threads beyond those are a danger."""
    importing.error_of("numpy")
    return _threads()


def _refusal(harmless_threads: int) -> str:
    """Why forking a worker from here could hang or break it; empty if nothing is known to."""
    if _threads() > harmless_threads:
        return f"the imports left {_threads() - harmless_threads} more threads running"
    opened = [link for link in map(_link, os.listdir("/proc/self/fd")) if link.startswith(_GPU_DEVICES)]
    return f"the imports opened {opened[0]}" if opened else ""


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _serve(sock: socket.socket, agent_pid: int) -> Continuation:
    while True:
        received = _receive(sock, (WorkerSpec,))
        if received is None:
            return lambda: None
        spec, fds = received
        answer = _fork(spec, fds, agent_pid)
        if not isinstance(answer, WorkerStarted):
            sock.detach()  # Its number, closed here, may soon be a file of the worker's.
            return answer
        for fd in fds:
            os.close(fd)
        _send(sock, answer)


def _fork(spec: WorkerSpec, fds: list[int], agent_pid: int) -> WorkerStarted | Continuation:
    """Start one process. In the forkserver: its pid, once it is the agent's child. In the process: its continuation."""
    gate, opener = os.pipe()
    reader, writer = os.pipe()
    try:
        middle = _quiet_fork()
    except OSError as error:
        for fd in (gate, opener, reader, writer):
            os.close(fd)
        return WorkerStarted(spec.tag, error=str(error))
    if middle == 0:
        return _fork_again(spec, fds, agent_pid, gate, opener, writer)
    os.close(gate)
    os.close(writer)
    answer = os.read(reader, 256).decode()
    os.close(reader)
    os.waitpid(middle, 0)
    os.close(opener)
    return WorkerStarted(spec.tag, pid=int(answer)) if answer.isdigit() else WorkerStarted(spec.tag, error=answer)


def _fork_again(spec: WorkerSpec, fds: list[int], agent_pid: int, gate: int, opener: int, writer: int) -> Continuation:
    try:
        pid = _quiet_fork()
    except OSError as error:
        os.write(writer, str(error).encode())
        os._exit(1)
    if pid:
        os.write(writer, str(pid).encode())
        os._exit(0)
    os.close(opener)
    os.read(gate, 1)  # End of file: the one in between has exited and the agent is the parent now.
    kernel.die_with_parent(agent_pid)
    return _become(spec, fds)


def _quiet_fork() -> int:
    # Python 3.12 warns of a fork with threads; OpenBLAS's own are the only ones here.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(spec: WorkerSpec, fds: list[int]) -> Continuation:
    """In the new process: its own session, descriptors, environment and CPUs, and nothing of the forkserver's."""
    if spec.cgroup:
        # First, so that nothing it starts is outside. Where the kernel refuses, the agent's sweep does without.
        with contextlib.suppress(OSError):
            Path(spec.cgroup, "cgroup.procs").write_text("0")
    os.setsid()
    for number, fd in enumerate([os.dup(fd) for fd in fds]):
        os.dup2(fd, number)
    os.closerange(len(fds), _open_files_limit())
    if spec.cpus:
        os.sched_setaffinity(0, spec.cpus)
    if spec.how == "exec":
        _exec(spec.argv, os.environ if spec.env is None else spec.env)
    if spec.env is not None:
        _set_environ(spec.env)
    if spec.how in ("store", "member"):
        kernel.set_command_line(["ddplaunch", spec.how, os.environ.get("DDPLAUNCH_RUN_ID", "")])
        return partial(importlib.import_module(f"ddplaunch.rendezvous.{spec.how}").serve, *range(3, len(fds)))
    renewal.renew()
    ending.take_over()
    return partial(bootstrap.run, "module" if spec.how == "module" else "script", spec.argv, spec.rehearsal)


def _open_files_limit() -> int:
    return min(os.sysconf("SC_OPEN_MAX"), 1 << 20)


def _set_environ(env: Mapping[str, str]) -> None:
    """``env`` in place of what was inherited; what the imports have changed stays, as if the script had imported."""
    for name in _INHERITED.keys() - env.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in env.items() if _INHERITED.get(name) != value})


def _exec(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    # Python ignores these two for itself; exec'd programs shall find them as the user's shell left them.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        os.write(2, f"ddplaunch: cannot run {argv[0]}: {error.strerror}\n".encode("utf-8", "backslashreplace"))
        os._exit(127 if isinstance(error, FileNotFoundError) else 126)


def _send(sock: socket.socket, record: object) -> None:
    with contextlib.suppress(ConnectionError):  # The kernel closes a killed agent's sockets before it kills us.
        sock.sendall(protocol.encode(record))


def _receive(sock: socket.socket, allowed: tuple[type, ...]) -> tuple[Any, list[int]] | None:
    """The next record and its descriptors; None when the agent is gone."""
    try:
        return _read(sock, allowed)
    except ConnectionError:
        return None


def _read(sock: socket.socket, allowed: tuple[type, ...]) -> tuple[Any, list[int]] | None:
    # Descriptors ride on the length's 8 bytes.
    header, fds, _flags, _address = socket.recv_fds(sock, _HEADER_BYTES, _MAX_FDS)
    if len(header) < _HEADER_BYTES:
        return None
    remaining = int.from_bytes(header, "big")
    chunks = []
    while remaining:
        chunk = sock.recv(min(remaining, 1 << 20))
        if not chunk:
            return None
        chunks.append(chunk)
        remaining -= len(chunk)
    return protocol.decode(b"".join(chunks), allowed), fds
