"""Imports torch once per node and forks on request: workers, the node's member, the workers' store, programs to exec.

One process per node, a child of the agent, which sends requests over a socket. It forks twice: the process in between
exits, and the new process becomes a child of the agent, a subreaper. Must never use a GPU, run a parallel CPU operation
or start a thread; ``reason_not_to_fork`` checks that.
"""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import signal
import socket
import sys
import threading
import warnings
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal, NoReturn

from ddplaunch import features
from ddplaunch.protocol import fd_records, wire
from ddplaunch.protocol.agent_entry import use_own_search_path
from ddplaunch.protocol.specs import ForkserverReady, ForkserverSpec, ImportFailed, ProcessSpec, ProcessStarted
from ddplaunch.system import linux
from ddplaunch.system.signals import SENT_TO_RUNS
from ddplaunch.worker import bootstrap, exit, late_import, preload
from ddplaunch.worker.bootstrap import caught, finished, script

__all__ = ["caught", "finished", "main", "script"]
"""What the agent's start of this process imports."""

_MAX_FDS = 5
_HELPERS = ("store", "member")
_GPU_DEVICES = ("/dev/nvidia", "/dev/kfd", "/dev/dri/")

_INHERITED = dict(os.environ)
"""The environment before the imports."""

_MASK = signal.pthread_sigmask(signal.SIG_BLOCK, ())
"""The signals that are blocked outside of a fork."""

Continuation = Callable[[], None]


def main() -> Continuation:
    """Serve the agent. Returns what this process must run then.

    In the forkserver that is nothing: the agent has closed the socket. In each process that it has forked, it is the
    work of a helper, or what prepares a worker for its script. The caller is the interpreter's outermost frame: it runs
    what is returned, and then ``bootstrap.OUTERMOST``, which runs the script.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # A forked process must not end with a KeyboardInterrupt here.
    sock = socket.socket(fileno=int(sys.argv[1]))
    server = first_record(sock)
    if server is None:
        return lambda: None
    linux.die_with_parent(server.agent_pid)
    exit.register()
    return serve(sock, server)


def _outlast_signals() -> None:
    """Go on after a signal that a scheduler sends to every process of a run: the agent gets it, too, and decides.

    By a handler, not by ignoring them: each process that is forked here gives them their default effect again, and so
    does exec. Signals that were ignored before, as under nohup, stay so.
    """
    for signum in SENT_TO_RUNS:
        if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
            signal.signal(signum, _no_effect)


def _no_effect(_signum: int, _frame: object) -> None: ...


def _restore_signals() -> None:
    """In a new process; a signal that was sent to it since the fork, which has blocked them, takes effect now."""
    for signum in SENT_TO_RUNS:
        if signal.getsignal(signum) is _no_effect:
            signal.signal(signum, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)


def first_record(sock: socket.socket) -> ForkserverSpec | None:
    """Block for the agent's first record; None when the agent has closed the socket."""
    received = _receive(sock, (ForkserverSpec,))
    return received[0] if received else None


def serve(sock: socket.socket, server: ForkserverSpec) -> Continuation:
    """Import modules and serve; see ``main``."""
    _outlast_signals()
    linux.set_command_line(["ddplaunch", "forkserver", server.run_id])
    return _serve(sock, server) if _prepare(sock, server) else lambda: None


def _prepare(sock: socket.socket, server: ForkserverSpec) -> bool:
    """Import modules and report to the agent; False if a required import failed."""
    path = _file_to_run(server)
    if not server.imports or path is None:  # A module that does not exist: its workers say so at once.
        answer(sock, ForkserverReady(""))
        return True
    source = text_of(path)
    variable = preload.early_variable(source, os.environ)
    if variable:
        answer(sock, ForkserverReady(f"{path} sets {variable}, which torch reads when it is imported"))
        return True
    with preload.without_collection(), preload.first_in_path(server.script_dir):
        threads = threads_after_numpy()
        for module in (*preload.modules_for(source), *server.workers.preload):
            error = preload.try_import(module)
            # A module that the script seems to need may be missing: if the script imports it, the script fails.
            if error and module in (*preload.ALWAYS, *server.workers.preload):
                hidden_by = preload.hiding_file(error, server.script_dir) if module in preload.ALWAYS else ""
                answer(sock, ImportFailed(module, preload.describe(error), hidden_by))
                return False
        for name in ("worker", "binding"):
            deque(features.modules(name), maxlen=0)  # For all workers at once.
    late_import.choose_modules()
    answer(sock, ForkserverReady(reason_not_to_fork(threads)))
    return True


def _file_to_run(server: ForkserverSpec) -> str | None:
    """The file that workers run; empty if there is none, None if they run a module that does not exist."""
    if not server.module:
        return server.script
    with preload.first_in_path(server.script_dir):
        return preload.module_file(server.module)


def text_of(script: str) -> bytes:
    """The text of the script; empty if it is none, or cannot be read."""
    with contextlib.suppress(OSError):
        return Path(script).read_bytes() if script else b""
    return b""


def _threads() -> int:
    return len(os.listdir("/proc/self/task"))


def threads_after_numpy() -> int:
    """Number of threads after the import of numpy: OpenBLAS's pool has fork handlers, any other thread is a danger."""
    preload.try_import("numpy")
    return _threads()


def reason_not_to_fork(harmless_threads: int) -> str:
    """Why a worker forked from this process could hang or fail; empty without a known reason."""
    if _threads() > harmless_threads:
        return f"the imports raised the number of threads by {_threads() - harmless_threads}"
    opened = [link for link in map(_link, os.listdir("/proc/self/fd")) if link.startswith(_GPU_DEVICES)]
    return f"the imports opened {opened[0]}" if opened else ""


def _link(fd: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except OSError:
        return ""


def _serve(sock: socket.socket, server: ForkserverSpec) -> Continuation:
    while True:
        received = _receive(sock, (ProcessSpec,))
        if received is None:
            return lambda: None
        spec, fds = received
        started = _fork(spec, fds, server)
        if not isinstance(started, ProcessStarted):
            sock.detach()  # The socket is not closed: its number may soon be a file of the worker.
            return started
        for fd in fds:
            os.close(fd)
        answer(sock, started)


def _fork(spec: ProcessSpec, fds: list[int], server: ForkserverSpec) -> ProcessStarted | Continuation:
    """Start one process.

    Returns:
        In the forkserver: the new pid, once the process is the agent's child. In the new process: its continuation.
    """
    wait_fd, release_fd = os.pipe()
    told_fd, tell_fd = os.pipe()
    # The agent may stop a worker at once. Before the worker has its own handlers, the signal would have no effect.
    signal.pthread_sigmask(signal.SIG_BLOCK, SENT_TO_RUNS)
    try:
        intermediate = quiet_fork()
    except OSError as error:
        signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)
        for fd in (wait_fd, release_fd, told_fd, tell_fd):
            os.close(fd)
        return ProcessStarted(spec.tag, error=str(error))
    if intermediate == 0:
        return _fork_again(spec, fds, server, wait_fd, release_fd, tell_fd)
    signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)
    os.close(wait_fd)
    os.close(tell_fd)
    told = os.read(told_fd, 256).decode()
    os.close(told_fd)
    os.waitpid(intermediate, 0)
    os.close(release_fd)
    return ProcessStarted(spec.tag, pid=int(told)) if told.isdigit() else ProcessStarted(spec.tag, error=told)


def _fork_again(
    spec: ProcessSpec, fds: list[int], server: ForkserverSpec, wait_fd: int, release_fd: int, tell_fd: int
) -> Continuation:
    try:
        pid = quiet_fork()
    except OSError as error:
        os.write(tell_fd, str(error).encode())
        os._exit(1)
    if pid:
        os.write(tell_fd, str(pid).encode())
        os._exit(0)
    os.close(release_fd)
    os.read(wait_fd, 1)  # End of file: the intermediate process has exited, and the agent is the parent.
    linux.die_with_parent(server.agent_pid)
    try:
        return _become(spec, fds, server)
    except (OSError, ValueError) as error:
        _refuse(f"cannot set up this process: {error}", 126)


def quiet_fork() -> int:
    """``os.fork`` without a warning."""
    # Python 3.12 warns about a fork with threads; here they are all OpenBLAS's.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(spec: ProcessSpec, fds: list[int], server: ForkserverSpec) -> Continuation:
    """Set up the new process: signals, cgroup, session, descriptors, environment, CPUs; close other descriptors.

    ``spec`` is what the agent has ordered for this process: a helper (``_HELPERS``), or a worker, to which also the
    settings of all workers apply, ``server.workers``.

    Raises:
        OSError, ValueError: the process cannot be set up; the caller writes why, and ends the process.
    """
    if spec.how in _HELPERS:
        signal.pthread_sigmask(signal.SIG_SETMASK, _MASK)  # They ignore what the agent decides about.
    else:
        _restore_signals()
    if spec.cgroup:
        # The cgroup comes first, so that all children of the process are inside. A failure is harmless: the sweep finds
        # the processes without a cgroup, too.
        with contextlib.suppress(OSError):
            Path(spec.cgroup, "cgroup.procs").write_text("0")
    os.setsid()
    for number, fd in enumerate([os.dup(fd) for fd in fds]):
        os.dup2(fd, number)
    os.closerange(len(fds), _open_files_limit())
    for module in features.modules("binding") if spec.binding else ():
        module.bind(spec.binding)
    if spec.how == "exec":
        _exec(spec.argv, os.environ if spec.env is None else spec.env)
    if spec.env is not None:
        _set_environ(spec.env)
    if spec.how in _HELPERS:
        linux.set_command_line(["ddplaunch", spec.how, os.environ.get("DDPLAUNCH_RUN_ID", "")])
        use_own_search_path(drop_first=False)
        return partial(importlib.import_module(f"ddplaunch.rendezvous.{spec.how}").serve, *range(3, len(fds)))
    reinitialize()
    exit.reset_finalizers()
    how: Literal["module", "function", "script"] = spec.how if spec.how in ("module", "function") else "script"
    # A preloaded package may use torch without an import of its own.
    before = None if server.workers.preload else late_import.hide_torch
    return partial(bootstrap.prepare, how, spec.argv, before)


def _refuse(message: str, code: int) -> NoReturn:
    """End a new process, which has run nothing of the user yet, with ``message`` as its only output."""
    os.write(2, f"ddplaunch: {message}\n".encode("utf-8", "backslashreplace"))
    os._exit(code)


def _open_files_limit() -> int:
    return min(os.sysconf("SC_OPEN_MAX"), 1 << 20)


def adopt_environ(env: Mapping[str, str]) -> None:
    """Make ``env`` the environment of this process, as if it had been started with it; keep changes by the imports."""
    global _INHERITED
    _set_environ(env)
    _INHERITED = dict(env)


def _set_environ(env: Mapping[str, str]) -> None:
    """Replace the inherited environment by ``env``; keep changes by the imports, as if the script had imported."""
    for name in _INHERITED.keys() - env.keys():
        os.environ.pop(name, None)
    os.environ.update({name: value for name, value in env.items() if _INHERITED.get(name) != value})


def _exec(argv: tuple[str, ...], env: Mapping[str, str]) -> None:
    # Python ignores these two signals; a program must get them as the user's shell set them.
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        code = 127 if isinstance(error, FileNotFoundError) else 126
        _refuse(f"cannot run {argv[0]}: {error.strerror}", code)


def answer(sock: socket.socket, record: object) -> None:
    """Send a record to the agent."""
    with contextlib.suppress(
        ConnectionError
    ):  # The kernel closes a killed agent's sockets before it kills this process.
        sock.sendall(wire.encode(record))


def _receive(sock: socket.socket, allowed: tuple[type, ...]) -> tuple[Any, list[int]] | None:
    """The next record and its descriptors; None when the agent has closed the socket."""
    try:
        return fd_records.receive(sock, allowed, _MAX_FDS)
    except ConnectionError:
        return None


# State of a process that a fork must not share with the others.


def reinitialize() -> None:
    """Set random seeds, standard streams and the main thread's id as a new interpreter does."""
    _reseed()
    for fd, name in enumerate(("stdin", "stdout", "stderr")):
        stream = _reopened(fd, getattr(sys, name))
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    # After a fork CPython updates the main thread's ident but not its native id.
    threading.main_thread()._native_id = threading.get_native_id()  # type: ignore[attr-defined]


def _reopened(fd: int, old: io.TextIOWrapper) -> io.TextIOWrapper:
    """The stream as ``python -u`` opens it. A stream caches whether its file is seekable, and ``fd`` is a new file."""
    raw = io.FileIO(fd, "wb" if fd else "rb", closefd=False)
    raw.name = old.name
    binary = raw if fd else io.BufferedReader(raw)
    stream = io.TextIOWrapper(binary, old.encoding, old.errors, "\n", write_through=True)
    stream.mode = old.mode  # type: ignore[misc]
    return stream


def _reseed() -> None:
    """Reseed generators that were seeded at import: forks would draw equal numbers, new processes do not.

    ``random`` reseeds itself after a fork. Torch's CUDA generators do not exist yet.
    """
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.default_generator.seed()
    random = sys.modules.get("numpy.random")
    if random is not None:
        random.seed()
