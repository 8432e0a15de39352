"""Debuggers of the script use the user's terminal: pdb, ipdb and pudb, by ``breakpoint()`` or by their own functions.

Runs in the worker, and in processes that it forks or that its multiprocessing spawns. Nothing is loaded or changed
before the script imports a debugger; its classes are changed then. A debugger with streams of its own, like remote_pdb,
is left alone.
"""

from __future__ import annotations

import _thread
import os
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ddplaunch.features import worker_patches
from ddplaunch.protocol.agent_entry import LOAD_PACKAGE, PACKAGE_ROOT
from ddplaunch.worker.parts import WorkerPart

if TYPE_CHECKING:
    from types import FrameType, ModuleType

    from ddplaunch.features.debug.worker_session import Session

_socket_name, _worker = "", 0
_stops = True
_session: Session | None = None
_turns: dict[int, _thread.RLock] = {}
"""By pid, for after a fork nobody releases the parent's: threads of this process use the terminal in turn."""

_called_at: dict[int, str] = {}
"""Where a thread has called ``breakpoint()``, until its debugger stops, which is at the next line."""

_MAX_ERROR_CHARS = 200

_goes_on = False
"""The user has told the debugger to continue."""


_IN_CHILD = f"""\
try:
    import sys
    if "ddplaunch" not in sys.modules:
        root = {{!r}}
        {LOAD_PACKAGE}
    from ddplaunch.features.debug import worker
except (ImportError, OSError):
    pass
else:
    worker.prepare(*{{!r}})
"""
"""Another interpreter may be too old for ddplaunch; and one that is installed may be another version."""


class _Debugger(WorkerPart):
    def __init__(self, *, is_post_mortem: bool) -> None:
        self._is_post_mortem = is_post_mortem

    def on_script_ended(self) -> None:
        release()

    def on_error_shown(self, error: BaseException) -> None:
        if self._is_post_mortem:
            post_mortem(error)


def part(text: str) -> WorkerPart:
    """The part of this worker.

    ``text``: at what the worker stops in a debugger (``never``, at ``calls`` of one, or at ``errors`` as well), and the
    agent's socket.
    """
    how, _, socket_name = text.partition(" ")
    prepare(socket_name, os.getpid(), how != "never")
    return _Debugger(is_post_mortem=how == "errors")


def prepare(socket_name: str, worker: int, stops: bool) -> None:
    """In a worker, before the script, and in a process that it spawns.

    Args:
        socket_name: the agent's socket.
        worker: pid of the worker.
        stops: whether debuggers stop; otherwise the script goes on.
    """
    global _socket_name, _worker, _stops
    _socket_name, _worker, _stops = socket_name, worker, stops
    worker_patches.after_import("pdb", lambda pdb: _patch_debugger(pdb.Pdb))
    worker_patches.after_import("pudb.debugger", _patch_pudb)
    worker_patches.after_import("IPython.terminal.debugger", _patch_ipython)
    worker_patches.after_import("IPython.terminal.interactiveshell", _patch_ipython_shell)
    worker_patches.in_children("debug", lambda: (exec, (_in_child(), {})))


def _in_child() -> str:
    return _IN_CHILD.format(PACKAGE_ROOT, (_socket_name, _worker, _stops))


def _patch_debugger(debugger: Any) -> None:
    debugger.set_trace = _noting(debugger.set_trace)
    debugger.interaction = _on_terminal(debugger.interaction)
    debugger.set_continue = _continuing(debugger.set_continue)


def _patch_pudb(pudb: ModuleType) -> None:
    pudb.Debugger.__init__ = _made_on_terminal(pudb.Debugger.__init__)
    _patch_debugger(pudb.Debugger)


def _patch_ipython(ipython: ModuleType) -> None:
    ipython.TerminalPdb.__init__ = _made_on_terminal(ipython.TerminalPdb.__init__)


def _patch_ipython_shell(ipython: ModuleType) -> None:
    """IPython looks for a terminal when it is imported; this process has one as soon as its debugger stops."""
    shell = ipython.TerminalInteractiveShell
    original = shell.debugger_cls
    import importlib

    def debugger_cls(self: Any) -> Any:
        if "IPY_TEST_SIMPLE_PROMPT" in os.environ:
            return original.fget(self)
        return importlib.import_module("IPython.terminal.debugger").TerminalPdb

    shell.debugger_cls = property(debugger_cls)


def _noting(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_trace(self: Any, frame: FrameType | None = None, *args: Any, **kwargs: Any) -> Any:
        frame = frame or sys._getframe(1)
        _called_at[_thread.get_ident()] = f"at breakpoint() ({_where(_script_frame(frame))})"
        return original(self, frame, *args, **kwargs)

    return set_trace


def _continuing(original: Callable[..., Any]) -> Callable[..., Any]:
    def set_continue(self: Any) -> Any:
        global _goes_on
        _goes_on = True
        return original(self)

    return set_continue


def _made_on_terminal(original: Callable[..., Any]) -> Callable[..., Any]:
    """A debugger that looks at the terminal when it is made."""

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _turn():
            if _stops:
                _take(_called_at.get(_thread.get_ident()) or _in_debugger(None))
        original(self, *args, **kwargs)

    return init


def _on_terminal(original: Callable[..., Any]) -> Callable[..., Any]:
    def interaction(self: Any, frame: FrameType | None, *args: Any, **kwargs: Any) -> Any:
        if not getattr(self, "use_rawinput", True) or hasattr(self, "_sockfile"):  # Another stream; pdb -p PID.
            return original(self, frame, *args, **kwargs)
        if not _stops:
            return self.set_continue()
        with _turn():
            session, has_quit = _begin(frame), False
            self.nosigint = True  # ``continue`` would set a handler that opens the debugger when the job is stopped.
            try:
                with session.standard_streams():
                    return original(self, frame, *args, **kwargs)
            except SystemExit:  # ``quit`` from Python 3.14 on.
                has_quit = True
                raise
            finally:
                has_quit = has_quit or bool(getattr(self, "quitting", False))
                _end(session, has_quit=has_quit, is_post_mortem=frame is None)

    return interaction


def _turn() -> _thread.RLock:
    return _turns.setdefault(os.getpid(), _thread.RLock())


def _begin(frame: FrameType | None) -> Session:
    global _goes_on
    _goes_on = False
    place = _called_at.pop(_thread.get_ident(), "") or _in_debugger(frame)
    try:
        return _take(place)
    except KeyboardInterrupt as error:  # While it waited for the terminal.
        raise error.with_traceback(None) from None


def _end(session: Session, *, has_quit: bool, is_post_mortem: bool) -> None:
    if has_quit and not is_post_mortem:
        session.quit()
    elif _goes_on or is_post_mortem:
        release()
    else:
        session.runs()


def _take(place: str, *, is_post_mortem: bool = False) -> Session:
    """Wait for the terminal, unless this process has it."""
    global _session
    from ddplaunch.features.debug import worker_session as debug_session

    if _session is None or _session.owner != os.getpid():
        child = "" if os.getpid() == _worker else f", in its child process {os.getpid()}"
        _session = debug_session.Session(_socket_name, _worker, f"{place}{child}", is_post_mortem=is_post_mortem)
    else:
        _session.stops()
    return _session


def release() -> None:
    """Give the terminal back, if this process has it."""
    global _session
    if _session and _session.owner == os.getpid():
        session, _session = _session, None
        session.release()


def _in_debugger(frame: FrameType | None) -> str:
    return f"in a debugger ({_where(_script_frame(frame or sys._getframe(1)))})"


def post_mortem(error: BaseException) -> None:
    """Debug the script's uncaught exception until the user leaves; without effect if there is no terminal."""
    import contextlib
    import importlib
    import traceback

    from ddplaunch.features.debug.worker_session import NoTerminal

    what = traceback.format_exception_only(type(error), error)[-1].strip()[:_MAX_ERROR_CHARS]
    frames = [frame for frame, _line in traceback.walk_tb(error.__traceback__)]
    if not frames:  # The script could not be parsed.
        return
    place = f" ({_where(_script_frame(frames[-1]))})"
    name = os.environ.get("PYTHONBREAKPOINT", "").split(".")[0]
    with contextlib.suppress(NoTerminal, KeyboardInterrupt):
        _take(f"with {what}{place}", is_post_mortem=True)
        debugger = importlib.import_module(name if name in ("ipdb", "pudb") else "pdb")
        debugger.post_mortem(error.__traceback__, *((type(error), error) if name == "pudb" else ()))
        release()


def _script_frame(frame: FrameType) -> FrameType:
    """The first frame, from ``frame`` outwards, that is not of a debugger or of ``torch.distributed.breakpoint``."""
    while frame.f_back and _is_debuggers(frame):
        frame = frame.f_back
    return frame


def _is_debuggers(frame: FrameType) -> bool:
    name = str(frame.f_globals.get("__name__", ""))
    return name.split(".")[0] in ("ddplaunch", "IPython", "ipdb", "pudb", "pdb", "bdb", "torch")


def _where(frame: FrameType) -> str:
    code = frame.f_code
    function = "" if code.co_name == "<module>" else f" in {code.co_name}"
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno}{function}"
