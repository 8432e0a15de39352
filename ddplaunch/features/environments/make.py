"""Makes a Python environment on this machine, for ``--env``, unless it is there.

Runs in an agent without a run, which answers queries, or in the process of the command; in the main thread. uv writes
into the environment's folder itself, under a lock, since an environment has absolute paths; a marker is written last.
A folder without it is no environment: what an interruption has left is deleted, and made anew.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import selectors
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, BinaryIO

from ddplaunch.errors import LaunchError
from ddplaunch.features.environments import places, uv
from ddplaunch.features.environments.queries import (
    MARKER,
    EnvironmentAnswer,
    EnvironmentProgress,
    MakeEnvironment,
    OfferedFile,
    PutFilePart,
)
from ddplaunch.system.files import kept_files
from ddplaunch.text import quote

_UV_PLACES = ("~/.local/bin/uv", "~/.cargo/bin/uv")
"""Where the installers of uv put it; a shell that is no login shell may not have them in its PATH."""

_NO_UV_HINT = "Install uv, there or on the launcher's machine, which then sends it: `pip install uv`."
_TELL_S = 2.0

Tell = Callable[[str], None]
"""Gets what happens, at least every second; raises to end it."""

_base: list[str] = []
"""The folder of the last MakeEnvironment: that of the parts that follow."""


class LauncherGone(Exception):
    """The command does not wait any more."""


class Missing(Exception):
    """A file must be sent first."""

    def __init__(self, answer: EnvironmentAnswer) -> None:
        self.answer = answer


def serve(query: MakeEnvironment | PutFilePart, stream: BinaryIO, outbox: Any) -> tuple[int, ...] | None:
    """Answer MakeEnvironment, or keep what PutFilePart brings. Other queries may follow."""
    told_at = 0.0

    def tell(text: str) -> None:
        nonlocal told_at
        if _is_closed(stream):
            raise LauncherGone
        if time.monotonic() - told_at >= _TELL_S:
            told_at = time.monotonic()
            outbox.send(EnvironmentProgress(quote(text, 200)))

    try:
        if isinstance(query, PutFilePart):
            places.keep(_base[0], query)
        else:
            outbox.send(make(query, {}, tell))
    except LauncherGone:
        return ()
    except (OSError, ValueError, IndexError) as error:  # Of a part that cannot be kept.
        outbox.send(EnvironmentAnswer(problem=_words(error)))
    return None


def _is_closed(stream: BinaryIO) -> bool:
    """Whether the command has ended: it sends nothing while it waits for an answer."""
    with selectors.DefaultSelector() as selector, contextlib.suppress(OSError, ValueError):
        selector.register(stream.fileno(), selectors.EVENT_READ)
        return bool(selector.select(0))
    return False


def _words(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def make(order: MakeEnvironment, own: Mapping[str, str], tell: Tell) -> EnvironmentAnswer:
    """The environment that ``order`` describes; it is made if it is not there.

    ``own``: by hash, the paths of offered files on this machine.

    Raises:
        Exception: what ``tell`` raises.
    """
    try:
        base = places.base_folder(order.folder)
        _base[:] = [base]
        python = _interpreter(order.python)
        folder = places.environment_folder(base, order, python)
        return _ready(folder) or _make(order, base, folder, python, own, tell)
    except Missing as missing:
        return missing.answer
    except LaunchError as error:
        return EnvironmentAnswer(problem=error.message, hint=quote(error.hint, 1000))
    except (OSError, ValueError) as error:
        return EnvironmentAnswer(problem=_words(error))


def _interpreter(request: str) -> str:
    """The interpreter of this process, if it is what was requested; else the request, for which uv looks."""
    own = platform.python_version_tuple()
    if platform.python_implementation() == "CPython" and request.split(".") == [*own][: request.count(".") + 1]:
        return str(getattr(sys, "_base_executable", "") or sys.executable)
    return request


def _ready(folder: str) -> EnvironmentAnswer | None:
    """The environment, if it is complete, and the Python with which it was made has not been removed."""
    python, marker = os.path.join(folder, "bin", "python"), os.path.join(folder, MARKER)
    with contextlib.suppress(OSError, ValueError, TypeError), kept_files.open_regular(marker) as file:
        packages = json.loads(file.read())["packages"]
        if os.path.exists(python):
            os.utime(marker)
            return EnvironmentAnswer(python=python, packages=tuple(packages))
    return None


def _make(
    order: MakeEnvironment, base: str, folder: str, python: str, own: Mapping[str, str], tell: Tell
) -> EnvironmentAnswer:
    program = _uv(order, base, own)
    wheels = {name: _path_of(file, base, own) for name, file in order.wheels.items()}
    os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
    with places.locked(f"{folder}.lock", tell) as lock:
        assert lock is not None
        if found := _ready(folder):  # Another command has made it.
            return found
        started, source = time.monotonic(), f"{folder}.source"
        places.remove(folder)
        shutil.rmtree(source, ignore_errors=True)
        try:
            answer = uv.install(program, order, folder, python, uv.prepare(source, order, wheels, base), lock, tell)
            marker = json.dumps({"main": order.main, "packages": answer.packages})
            kept_files.write_whole(os.path.join(folder, MARKER), marker)
        except BaseException:
            places.remove(folder)
            raise
        finally:
            shutil.rmtree(source, ignore_errors=True)
        places.delete_old(base, folder)
        return replace(answer, made_s=time.monotonic() - started)


def _path_of(file: OfferedFile, base: str, own: Mapping[str, str]) -> str:
    """Where the file is on this machine. Raises Missing."""
    if path := own.get(file.hash):
        return path
    if missing := places.wanted(base, file):
        raise Missing(EnvironmentAnswer(wanted=(missing,)))
    return places.file_path(base, file)


def _uv(order: MakeEnvironment, base: str, own: Mapping[str, str]) -> str:
    """The uv of this machine, or that of the launcher's.

    Raises:
        LaunchError: there is none. Missing: it must be sent.
    """
    for name in ("uv", *map(os.path.expanduser, _UV_PLACES)):
        if path := shutil.which(name):
            return path
    if order.uv is None:
        raise LaunchError("uv is missing, which makes environments", _NO_UV_HINT)
    machine = os.uname().machine
    if order.machine != machine:
        message = f"uv is missing, and that of the launcher's machine is for {order.machine}, not for {machine}"
        raise LaunchError(message, "Install uv there.")
    path = _path_of(order.uv, base, own)
    try:
        subprocess.run([path, "--version"], stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except (OSError, subprocess.SubprocessError) as error:  # It is for another libc, or damaged: it is sent again.
        if path not in own.values():
            os.unlink(path)
        raise LaunchError(f"the launcher's uv does not run here: {_words(error)}", "Install uv there.") from None
    return path
