"""The user's terminal while a debugger has it: every key goes to the debugger; the settings are restored afterwards.

Runs in the launcher; loaded when a rank stops in a debugger. A thread reads the keys. A child process restores the
settings if the launcher is killed.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import signal
import subprocess
import sys
import termios
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    import threading

_READ_BYTES = 1024

_GUARD = """
import ast, os, signal, sys, termios
os.setpgid(0, 0)
for name in ("SIGTTOU", "SIGTTIN", "SIGTSTP", "SIGINT", "SIGQUIT", "SIGHUP", "SIGTERM"):
    signal.signal(getattr(signal, name), signal.SIG_IGN)
if sys.stdin.buffer.read()[-1:] == b"r":
    termios.tcsetattr(int(sys.argv[1]), termios.TCSANOW, ast.literal_eval(sys.argv[2]))
"""
"""Waits for the launcher's end. The last byte that it has sent says whether the terminal is raw."""


_PRIVATE_MODES = re.compile(rb"\x1b\[\?([0-9;]{1,40})([hl])")
_UNFINISHED = re.compile(rb"\x1b(?:\[(?:\?[0-9;]{0,40})?)?$")
_SET_AT_START = (b"7", b"25")  # Lines wrap, and the cursor is visible.
_MAX_MODES = 64


class ScreenModes:
    """What a debugger has changed of the terminal by control sequences, such as the second screen on which pudb draws.

    The modes are those of DECSET and DECRST in xterm's list of control sequences.
    """

    def __init__(self) -> None:
        self._changed: dict[bytes, bytes] = {}
        self._unfinished = b""

    def follow(self, data: bytes) -> None:
        """The debugger has written ``data``, the next piece of its output."""
        data = self._unfinished + data
        for numbers, final in _PRIVATE_MODES.findall(data):
            for number in numbers.split(b";"):
                at_start = b"h" if number in _SET_AT_START else b"l"
                self._changed.pop(number, None)
                if final != at_start and len(self._changed) < _MAX_MODES:
                    self._changed[number] = at_start
        unfinished = _UNFINISHED.search(data)
        self._unfinished = unfinished[0] if unfinished else b""

    def reset(self) -> bytes:
        """The bytes that undo what is changed, the last first; nothing counts as changed any more."""
        sequences = [b"\x1b[?%s%s" % change for change in reversed(self._changed.items())]
        self._changed.clear()
        self._unfinished = b""
        return b"".join(sequences)


def is_in_foreground(fd: int) -> bool:
    """Whether this process may read the keys: no shell runs it in the background."""
    try:
        return os.tcgetpgrp(fd) == os.getpgrp()
    except OSError:  # It is not the controlling terminal, so nobody restricts its use.
        return True


class Terminal:
    """The terminal of stdin and stdout. The main thread calls the methods.

    Attributes:
        is_raw: keys go to the debugger.
        modes: what the debugger has changed.
    """

    def __init__(
        self, stdin_fd: int, stdout_fd: int, on_keys: Callable[[bytes], None], on_resized: Callable[[], None]
    ) -> None:
        """``on_keys`` is called in a thread with what the user has typed, ``on_resized`` in a signal handler."""
        self._fd, self._size_fd = stdin_fd, stdout_fd
        self._on_keys, self._on_resized = on_keys, on_resized
        self.is_raw, self.modes = False, ScreenModes()
        self._saved: list[Any] = []
        self._guard: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._end = -1
        self._resize_handler: Any = None

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns."""
        try:
            size = os.get_terminal_size(self._size_fd)
        except OSError:
            return 24, 80
        return size.lines or 24, size.columns or 80

    def take(self, *, drops_typed: bool) -> None:
        """Send the keys to the debugger from now on. Only Ctrl-Z and Ctrl-backslash still signal the launcher.

        ``drops_typed``: drop what was typed before: it was not for this debugger, which may be on another machine.
        """
        if self.is_raw:
            return
        try:
            self._saved = termios.tcgetattr(self._fd)
        except termios.error:  # The terminal has gone; SIGHUP follows.
            return
        self._tell_guard(b"r")
        self._set(_raw(self._saved), termios.TCSAFLUSH if drops_typed else termios.TCSANOW)
        self.is_raw = True
        woken, self._end = os.pipe()
        self._reader = in_thread("keys", lambda: self._read(woken))
        with contextlib.suppress(ValueError):  # Not the main thread: the debugger keeps its first size.
            self._resize_handler = signal.signal(signal.SIGWINCH, lambda *_: self._on_resized())

    def restore(self) -> None:
        """Restore the settings; keys go to nobody."""
        if not self.is_raw:
            return
        os.close(self._end)
        cast("threading.Thread", self._reader).join()
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGWINCH, self._resize_handler or signal.SIG_DFL)
        self._set(self._saved)
        self.is_raw = False
        self._tell_guard(b"c")

    def close(self) -> None:
        """Restore the settings and end the guard."""
        self.restore()
        if self._guard:
            with self._guard:
                cast("BinaryIO", self._guard.stdin).close()
            self._guard = None

    def _set(self, attributes: list[Any], when: int = termios.TCSANOW) -> None:
        """Also from the background, where the kernel would otherwise stop this process."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTTOU})
        try:
            with contextlib.suppress(termios.error):  # The terminal has gone.
                termios.tcsetattr(self._fd, when, attributes)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _tell_guard(self, word: bytes) -> None:
        with contextlib.suppress(OSError):
            self._guard = self._guard or self._start_guard()
            cast("BinaryIO", self._guard.stdin).write(word)

    def _start_guard(self) -> subprocess.Popen[bytes]:
        fd, null = os.dup(self._fd), subprocess.DEVNULL
        try:
            return subprocess.Popen(
                (sys.executable, "-I", "-S", "-c", _GUARD, str(fd), repr(self._saved)),
                stdin=subprocess.PIPE,
                stdout=null,
                stderr=null,
                pass_fds=(fd,),
                bufsize=0,
            )
        finally:
            os.close(fd)

    def _read(self, woken: int) -> None:
        try:
            # Not select(), which takes no descriptor above 1023: a launcher of many nodes has more.
            poll = select.poll()
            for fd in (self._fd, woken):
                poll.register(fd, select.POLLIN)
            while woken not in dict(poll.poll()):
                data = os.read(self._fd, _READ_BYTES)
                if not data:
                    break
                self._on_keys(data)
        except OSError:  # The terminal has gone; SIGHUP follows.
            pass
        finally:
            os.close(woken)


def _raw(attributes: list[Any]) -> list[Any]:
    """Every key is a byte, but Ctrl-Z and Ctrl-backslash; output is shown as it is."""
    iflag, oflag, cflag, lflag, ispeed, ospeed, keys = attributes
    iflag &= ~(termios.BRKINT | termios.ICRNL | termios.INLCR | termios.IGNCR | termios.ISTRIP | termios.IXON)
    lflag &= ~(termios.ECHO | termios.ECHONL | termios.ICANON | termios.IEXTEN)
    keys = list(keys)
    keys[termios.VINTR], keys[termios.VMIN], keys[termios.VTIME] = b"\x00", 1, 0
    return [iflag, oflag & ~termios.OPOST, cflag, lflag, ispeed, ospeed, keys]
