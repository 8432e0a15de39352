"""Start the real ``ddplaunch`` command and look at what it does."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from tests.support.processes import children, command_line, wait_until

ROOT = Path(__file__).parent.parent.parent
PROGRAMS = Path(__file__).parent / "programs"

TIMEOUT_S = 60.0

MOMENT_S = 0.5

SLOW_IMPORT = {"TORCH_STUB_IMPORT_S": "1.5"}
"""For the environment of a job in which something happens while torch is imported: the stub then takes so long."""


@dataclass
class Finished:
    """A run that has ended. ``out`` and ``err`` are what its stdout and stderr showed."""

    returncode: int
    out: str
    err: str

    @cached_property
    def run_dir(self) -> Path:
        """The run's folder, as the launcher said it."""
        match = re.search(r"(?:logs|the report) in (\S+)", self.err)
        assert match, f"no log folder in:\n{self.err}"
        return Path(match[1])

    @cached_property
    def report(self) -> dict[str, Any]:
        return json.loads((self.run_dir / "report.json").read_text())


_processes: list[subprocess.Popen[bytes]] = []


def kill_unfinished() -> None:
    """Kill the runs of a test that has failed before it waited for them; called after each test."""
    for process in _processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    _processes.clear()


@dataclass
class Running:
    """A run that goes on. Its output is read by two threads, so that it never blocks on us."""

    process: subprocess.Popen[bytes]
    lines: list[str] = field(default_factory=list)
    error_lines: list[str] = field(default_factory=list)
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        _processes.append(self.process)
        for stream, lines in ((self.process.stdout, self.lines), (self.process.stderr, self.error_lines)):
            if stream is not None:
                self.read_by(threading.Thread(target=self._read, args=(stream, lines), daemon=True))

    def read_by(self, thread: threading.Thread) -> None:
        """Start ``thread``, which fills the lines and ends with the run's output."""
        thread.start()
        self._threads.append(thread)

    @staticmethod
    def _read(stream: Any, lines: list[str]) -> None:
        with stream:
            for line in stream:
                lines.append(line.decode("utf-8", "replace").rstrip("\n"))

    @property
    def pid(self) -> int:
        return self.process.pid

    def wait_for(self, pattern: str, count: int = 1, timeout_s: float = TIMEOUT_S) -> list[re.Match[str]]:
        """Wait until ``count`` lines of stdout or stderr match ``pattern``."""

        def matches() -> list[re.Match[str]]:
            return [m for line in [*self.lines, *self.error_lines] if (m := re.search(pattern, line))]

        def is_over() -> bool:
            return not any(thread.is_alive() for thread in self._threads)

        def is_settled() -> bool:
            return is_over() or len(matches()) >= count

        with contextlib.suppress(TimeoutError):
            wait_until(is_settled, timeout_s)
        found = matches()
        if len(found) < count:
            text = "\n".join([*self.lines, *self.error_lines])
            raise TimeoutError(f"{pattern!r} x {count} not seen {'until the end' if is_over() else ''} in:\n{text}")
        return found

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def signal_again(self, signum: int) -> None:
        """As a user who has seen what the last signal did: signals of one moment are one."""
        moment_ends_at = time.monotonic() + MOMENT_S
        wait_until(lambda: time.monotonic() > moment_ends_at)
        self.signal(signum)

    def agent_pid(self) -> int:
        """The launcher's only child."""
        return wait_until(lambda: children(self.pid), TIMEOUT_S)[0]

    def forkserver_pid(self) -> int:
        return self._child_of_agent("forkserver")

    def store_pid(self) -> int:
        return self._child_of_agent("store")

    def _child_of_agent(self, name: str) -> int:
        agent = self.agent_pid()
        is_meant = lambda pid: command_line(pid).startswith(f"ddplaunch {name}")  # noqa: E731
        return wait_until(lambda: [*filter(is_meant, children(agent))], TIMEOUT_S)[0]

    def finish(self, timeout_s: float = TIMEOUT_S) -> Finished:
        """Wait for the end."""
        try:
            returncode = self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait()
            raise TimeoutError("still running:\n" + "\n".join([*self.lines, *self.error_lines])) from None
        for thread in self._threads:
            thread.join(5)
        return Finished(returncode, _text(self.lines), _text(self.error_lines))


def _text(lines: list[str]) -> str:
    return "".join(line + "\n" for line in lines)


def command(*arguments: str | Path) -> list[str]:
    """The command line that runs ddplaunch from this checkout."""
    return [sys.executable, "-m", "ddplaunch", *map(str, arguments)]


def environment(extra: dict[str, str] | None = None) -> dict[str, str]:
    """The test's environment, from which this checkout's package is found in any working directory."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH", ""))))
    return {**os.environ, "PYTHONPATH": path, **(extra or {})}


def start(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    under: Sequence[str] = (),
    **popen: Any,
) -> Running:
    """Start ddplaunch in the background, by the command ``under`` if there is one (``setpriv ...``).

    Its stdin is empty unless ``stdin`` is given.
    """
    options: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **popen,
    }
    return Running(subprocess.Popen([*under, *command(*arguments)], env=environment(env), cwd=cwd, **options))


def run(
    *arguments: str | Path,
    env: dict[str, str] | None = None,
    cwd: Path | None = None,
    timeout_s: float = TIMEOUT_S,
    **popen: Any,
) -> Finished:
    """Run ddplaunch to its end."""
    return start(*arguments, env=env, cwd=cwd, **popen).finish(timeout_s)


def unused_port() -> int:
    """A port of this machine at which nobody listened just now."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def meeting(port: int | None = None) -> tuple[str, ...]:
    """Options of launchers that are started one per node, and meet on this machine."""
    return ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port or unused_port()}")


def python(
    *arguments: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None, under: Sequence[str] = ()
) -> Finished:
    """Run Python, from which this checkout's package can be imported, to its end."""
    done = subprocess.run(
        [*under, sys.executable, *map(str, arguments)],
        env=environment(env),
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )
    return Finished(done.returncode, done.stdout, done.stderr)
