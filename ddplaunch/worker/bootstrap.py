"""Runs the user's script, module or function in a fresh ``__main__``, and records its uncaught exception.

A script or module runs as with ``python -u``.

Runs in the worker: a fork of the forkserver, or a new interpreter. Must not import torch: a script that does not use it
must not wait for its import.

A forked worker: ``forkserver.main`` returns the worker's preparation to the interpreter's outermost frame
(``forkserver._become``, ``bootstrap.prepare``), which then executes ``bootstrap.OUTERMOST``: ``bootstrap.script``
prepares ``__main__`` and returns the call that runs the script, ``caught`` keeps its exception and sets ``exit_code``,
``finished`` writes the error file and prints. The interpreter's last atexit function, ``exit._finish``, ends the
process with ``exit_code``. A worker that is executed begins in ``exec_worker.main``, and ends as the interpreter does.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial
from importlib.machinery import SourceFileLoader
from typing import TYPE_CHECKING, Literal, NoReturn

from ddplaunch.protocol.agent_entry import MAX_MESSAGE_CHARS, MAX_TRACEBACK_CHARS, TEXT_FD, is_own_module
from ddplaunch.system import linux
from ddplaunch.system.files import kept_files
from ddplaunch.worker import marked_output, parts

if TYPE_CHECKING:
    from types import TracebackType

OUTERMOST = """\
with finished, caught:
    script()()"""
"""What the interpreter's outermost frame must execute after ``prepare``: no other frame is below the script's.

It needs the three names, which are gone when the script runs. The context managers are on the frame's stack, so that
nothing that the script changes is in their way.
"""

exit_code: int | None = None
"""Exit code of this process, in the form of ``subprocess``: negative for a signal; None while the script runs."""

after_script: Callable[[], None] | None = None
"""Called when the script has ended, if ``worker.exit`` has set it."""

_prepared: Callable[[], Callable[[], object]] | None = None
_error_file, _pid = "", 0
_parts: tuple[parts.WorkerPart, ...] = ()


def prepare(
    how: Literal["script", "module", "function"],
    argv: tuple[str, ...],
    before: Callable[[], None] | None = None,
) -> None:
    """Prepare this process for the script, module or function, which ``OUTERMOST`` then runs.

    ``sys.path`` must not begin with a folder that Python put there for another file: the script's is inserted.

    Args:
        how: kind of the first element of ``argv``.
        argv: path of the script or name of the module, then its arguments; the file that defines the function.
        before: called last before the script.
    """
    global _prepared, _error_file, _pid, _parts
    _error_file, _pid = os.environ.get("TORCHELASTIC_ERROR_FILE", ""), os.getpid()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # No code could handle a KeyboardInterrupt yet.
    with contextlib.suppress(OSError, ValueError, AttributeError, RuntimeError):
        faulthandler.enable()
    marked_output.mark_streams()
    _parts = parts.load(os.environ)
    try:
        _prepared = _PREPARE[how](argv)
    except FileNotFoundError:  # By ``os.getcwd``.
        _prepared = partial(sys.exit, f"the working directory was deleted, and {argv[0]} with it")
    linux.set_command_line(sys.orig_argv, os.environ)
    for part in _parts:
        part.before_script()
    if before:
        before()


def script() -> Callable[[], object]:
    """Make ``__main__`` that of the script, and return the call that runs it; it adds no frame.

    Nothing happens in a process without a script, such as the forkserver.
    """
    if _prepared is None:
        return lambda: None
    call = _prepared()
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return call


class _Caught:
    """Keeps the exception that the script has not caught, and lets a SystemExit pass."""

    def __init__(self) -> None:
        self.error: BaseException | None = None

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> bool:
        global exit_code
        if _prepared is None:
            return False
        for part in _parts:
            part.on_script_ended()
        if after_script:
            after_script()
        if error is None or isinstance(error, SystemExit):
            exit_code = _code_of(error) if error else 0
            if error and _has_text(error) and _pid == os.getpid():
                _write_exit_text(error)
            return False
        self.error = error
        return True


class _Finished:
    """Ends the process with the exception that was kept.

    Outside of its handler, so that the user's excepthook does not see an exception being handled.
    """

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        error, caught.error = caught.error, None
        if error is not None:
            _exit_with(error)


caught, finished = _Caught(), _Finished()


def _exit_with(error: BaseException) -> NoReturn:
    """Exit as the interpreter does after an uncaught exception, without frames of this module in the traceback."""
    global exit_code
    error.__traceback__ = _script_traceback(error)
    is_failure = not isinstance(error, KeyboardInterrupt) and _pid == os.getpid()  # Not of a child of the script.
    if is_failure:
        write_error_file(error, _error_file)
        for part in _parts:
            part.on_error(error, os.path.dirname(_error_file))
    try:
        _show(error)
    except SystemExit as end:
        exit_code = _code_of(end)
        raise
    if is_failure:
        for part in _parts:
            part.on_error_shown(error)
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


def _has_text(end: SystemExit) -> bool:
    """Whether it is ``sys.exit("why")``, for which the interpreter prints the text and exits with 1."""
    return end.code is not None and not isinstance(end.code, int)


def _write_exit_text(end: SystemExit) -> None:
    innermost = end.__traceback__ = _script_traceback(end)
    while innermost and innermost.tb_next:
        innermost = innermost.tb_next
    # With ``-m`` and a module that does not exist, runpy has called sys.exit.
    by_script = innermost is not None and innermost.tb_frame.f_globals is not vars(runpy)
    write_error_file(end if by_script else SystemExit(end.code), _error_file)


_Prepared = Callable[[], Callable[[], object]]
"""Makes ``__main__`` that of the script, and returns the call that runs it."""


def _prepare_script(argv: tuple[str, ...]) -> _Prepared:
    sys.argv = list(argv)
    sys.orig_argv = [sys.executable, "-u", *argv]
    if argv[0] == "-":
        return _prepare_stdin()
    path = _absolute(argv[0])
    _insert_first_path(os.path.dirname(os.path.realpath(path)))

    def call() -> Callable[[], object]:
        _reset_main(__file__=path, __cached__=None, __loader__=SourceFileLoader("__main__", path))
        with open(path, "rb") as file:
            return _execution(file.read(), path)

    return call


def _prepare_stdin() -> _Prepared:
    """The text that the launcher has read from its stdin, as if this process had read it from its own."""
    with open(TEXT_FD, "rb") as file:
        text = file.read()
    _insert_first_path("")

    def call() -> Callable[[], object]:
        _reset_main(__file__="<stdin>", __cached__=None)
        return _execution(text, "<stdin>")

    return call


def _execution(text: bytes, path: str) -> Callable[[], object]:
    code = compile(text, path, "exec", dont_inherit=True)
    return partial(exec, code, sys.modules["__main__"].__dict__)


def _prepare_module(argv: tuple[str, ...]) -> _Prepared:
    sys.argv = ["-m", *argv[1:]]
    sys.orig_argv = [sys.executable, "-u", "-m", *argv]
    if not is_own_module(argv[0]):
        _insert_first_path(os.getcwd())

    def call() -> Callable[[], object]:
        _reset_main()
        return partial(runpy._run_module_as_main, argv[0])  # type: ignore[attr-defined]

    return call


def _prepare_function(argv: tuple[str, ...]) -> _Prepared:
    sys.orig_argv = [sys.executable, "-u", *argv]
    function = next(part.function for part in _parts if part.function)

    def call() -> Callable[[], object]:
        _reset_main()
        return function

    return call


_PREPARE: dict[str, Callable[[tuple[str, ...]], _Prepared]] = {
    "script": _prepare_script,
    "module": _prepare_module,
    "function": _prepare_function,
}


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
    """The traceback without the outermost frame and those of this package, which come first."""
    frames = error.__traceback__
    while frames and (frames.tb_frame.f_back is None or _is_ours(frames.tb_frame.f_code.co_filename)):
        frames = frames.tb_next
    return frames


def _is_ours(path: str) -> bool:
    """Whether the file is in this package, or has a part of this worker."""
    of_parts = (sys.modules[type(part).__module__].__file__ for part in _parts)
    return os.path.dirname(path) == os.path.dirname(_show.__code__.co_filename) or path in of_parts


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
        # Whole or not at all: a SIGTERM can arrive at any moment, because a peer has failed.
        kept_files.write_whole(path, json.dumps({"message": message}))


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its message could not be formatted)"
