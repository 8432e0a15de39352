"""Runs the user's script or module in a fresh ``__main__``, as ``python -u`` would, and records its uncaught exception.

Runs in the worker: a fork of the forkserver, or a new interpreter. Must not import torch: a script that does not use it
must not wait for its import.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import json
import os
import resource
import runpy
import signal
import sys
import time
import traceback
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Literal, NoReturn

from ddplaunch.protocol import examination, stack_dump
from ddplaunch.protocol.agent_entry import is_own_module
from ddplaunch.system import linux

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import CodeType, TracebackType

    from ddplaunch.config import FakeGpuConfig

MAX_MESSAGE_CHARS = 20_000
MAX_TRACEBACK_CHARS = 200_000

_STACKS_FD_LIMIT = 1024
"""``select`` accepts no descriptor from this number on; a script that closes all up to it loses its stacks only."""

exit_code: int | None = None
"""Exit code of this process, in the form of ``subprocess``: negative for a signal; None while the script runs."""


def run(
    how: Literal["script", "module"],
    argv: tuple[str, ...],
    fake_gpus: FakeGpuConfig | None = None,
    before: Callable[[], None] | None = None,
) -> None:
    """Run the script or module, then return, or raise the exception that ends the process.

    ``sys.path`` must not begin with a folder that Python put there for another file: the script's is inserted.

    Call it from the interpreter's outermost frame: the interpreter's normal shutdown must follow (threads, atexit, exit
    code).

    Args:
        how: kind of the first element of ``argv``.
        argv: path of the script or name of the module, then its arguments.
        fake_gpus: GPUs of a dry run; None in a real one.
        before: called last before the script.
    """
    error_file, pid = os.environ.get("TORCHELASTIC_ERROR_FILE", ""), os.getpid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # No code could handle a KeyboardInterrupt yet.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        faulthandler.enable()
    _prepare_examination(os.environ.pop(stack_dump.VARIABLE, ""), os.environ.pop(examination.SOCKET_VARIABLE, ""))
    target = _prepare_script(argv) if how == "script" else _prepare_module(argv)
    linux.set_command_line(sys.orig_argv, os.environ)
    if fake_gpus:
        _install(fake_gpus)
    if before:
        before()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    del argv, how, fake_gpus, before
    global exit_code
    try:
        if isinstance(target, str):
            runpy._run_module_as_main(target)  # type: ignore[attr-defined]
        else:
            target()
        exit_code = 0
        return
    except SystemExit as end:
        exit_code = _code_of(end)
        raise
    except BaseException as error:
        uncaught = error
    # Outside of the handler, so that the user's excepthook does not see an exception being handled.
    _exit_with(uncaught, error_file if pid == os.getpid() else "")


def _install(fake_gpus: FakeGpuConfig) -> None:
    from ddplaunch.worker.fake_cuda import install

    install(fake_gpus.gpus, compile_on_cpu=fake_gpus.compile_on_cpu)


def _prepare_examination(stacks_file: str, socket_name: str) -> None:
    """Prepare the answers to the agent's questions, in case that the job stands still; either may be empty."""
    if stacks_file:
        _register_stack_dump(stacks_file)
    if socket_name:
        from ddplaunch.worker import responder

        responder.prepare(socket_name)


def _register_stack_dump(stacks_file: str) -> None:
    """Write the stacks of all threads to a file of the agent when the agent sends the signal."""
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        fd = os.open(stacks_file, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
        # A high number: the first file of the script gets the number that it has without ddplaunch.
        highest = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _STACKS_FD_LIMIT)
        faulthandler.register(stack_dump.SIGNUM, fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, highest - 24), all_threads=True)
        os.close(fd)


def _exit_with(error: BaseException, error_file: str) -> NoReturn:
    """Exit as the interpreter does after an uncaught exception, without frames of this module in the traceback."""
    global exit_code
    error.__traceback__ = _script_traceback(error)
    if not isinstance(error, KeyboardInterrupt):
        write_error_file(error, error_file)
    try:
        _show(error)
    except SystemExit as end:
        exit_code = _code_of(end)
        raise
    if type(error) is KeyboardInterrupt:
        exit_code = -signal.SIGINT
        # Raised again, unprinted, so that the interpreter dies by SIGINT as usual (bpo-1054041).
        sys.excepthook = lambda *_: None
        raise error
    exit_code = 1
    raise SystemExit(1)


def _code_of(end: SystemExit) -> int:
    """As in the interpreter: None is 0, a number the low byte of a C long, any other object is printed and 1."""
    if end.code is None:
        return 0
    if not isinstance(end.code, int):
        return 1
    return end.code & 0xFF if -(1 << 63) <= end.code < 1 << 63 else 0xFF


class _Script:
    """The script; a class so that the frame below ``run`` is the script's module frame."""

    def __init__(self, path: str) -> None:
        self._path = path

    def __call__(self) -> None:
        exec(self._code(), sys.modules["__main__"].__dict__)

    def _code(self) -> CodeType:
        with open(self._path, "rb") as file:
            return compile(file.read(), self._path, "exec", dont_inherit=True)


def _prepare_script(argv: tuple[str, ...]) -> _Script:
    path = _absolute(argv[0])
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, "-u", *argv]
    _insert_first_path(os.path.dirname(os.path.realpath(path)))
    _reset_main(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
    return _Script(path)


def _prepare_module(argv: tuple[str, ...]) -> str:
    sys.argv = ["-m", *argv[1:]]
    sys.orig_argv = [sys.executable, "-u", "-m", *argv]
    if not is_own_module(argv[0]):
        _insert_first_path(os.getcwd())
    _reset_main()
    return argv[0]


def _absolute(path: str) -> str:
    # Joined but not normalised, like CPython's _Py_abspath.
    return path if os.path.isabs(path) else f"{os.getcwd()}/{path}"


def _insert_first_path(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False):  # -P, new in Python 3.11
        sys.path.insert(0, folder)


def _reset_main(**attributes: object) -> None:
    names = sys.modules["__main__"].__dict__
    for name in [name for name in names if not (name.startswith("__") and name.endswith("__"))]:
        del names[name]
    names.update(attributes)


def _script_traceback(error: BaseException) -> TracebackType | None:
    """The traceback without the frames of this module, which come first."""
    frames = error.__traceback__
    while frames and frames.tb_frame.f_code.co_filename == run.__code__.co_filename:
        frames = frames.tb_next
    return frames


def _show(error: BaseException) -> None:
    """Like CPython's PyErr_PrintEx: set ``sys.last_*``, call the hook; if it fails, print both exceptions."""
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        # The default hook prints the exception's traceback and ignores the third argument (PyErr_Display).
        sys.excepthook(type(error), error, error.__traceback__)
        return
    except SystemExit:
        raise
    except BaseException as failure:
        hook_error = failure
    hook_error.__traceback__ = _script_traceback(hook_error)
    for title, shown in (("Error in sys.excepthook", hook_error), ("\nOriginal exception was", error)):
        print(f"{title}:", file=sys.stderr)
        sys.__excepthook__(type(shown), shown, shown.__traceback__)


def write_error_file(error: BaseException, path: str) -> None:
    """Write ``error`` to the worker's error file in torch's schema, unless the file exists: ``@record`` has written it.

    Never raises: a full disk must not replace the user's exception.
    """
    if not path or os.path.exists(path):
        return
    with contextlib.suppress(Exception):
        stack = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        message = {
            "message": f"{type(error).__name__}: {_text(error)}"[:MAX_MESSAGE_CHARS],
            "extraInfo": {"py_callstack": stack[-MAX_TRACEBACK_CHARS:], "timestamp": str(int(time.time()))},
        }
        # Renamed when complete: a SIGTERM can arrive at any moment, because a peer has failed.
        with open(f"{path}.draft", "w", encoding="utf-8", errors="backslashreplace") as file:
            json.dump({"message": message}, file)
        os.replace(f"{path}.draft", path)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message could not be formatted)"
