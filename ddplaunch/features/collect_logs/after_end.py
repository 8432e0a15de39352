"""Sends a node's log files to the launcher after the last attempt, as fast as the launcher grants bytes.

Runs in the agent: a thread reads the files and waits for grants, while the main thread answers pings. Must not send a
file whose name is not ``records.is_safe``, or follow a symbolic link.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent.launcher_channel import LauncherLost, Outbox
from ddplaunch.features.collect_logs.records import (
    CHUNK_BYTES,
    MAX_FILES,
    WINDOW_BYTES,
    GrantLogBytes,
    LogChunk,
    LogsFound,
    LogsSent,
    cost,
    is_safe,
)
from ddplaunch.protocol.launcher_agent import Ping, Pong
from ddplaunch.system.files import kept_files
from ddplaunch.system.signals import SignalReceived
from ddplaunch.threads import post_from_thread

if TYPE_CHECKING:
    import threading

    from ddplaunch.mailbox import Mailbox
    from ddplaunch.protocol.specs import AgentSpec


def act(spec: AgentSpec, text: str, outbox: Outbox, mailbox: Mailbox[object], launcher_lost: threading.Event) -> None:
    """Send the files of this node, if it has a folder and a launcher. ``text``: as ``for_agent`` of the package."""
    if spec.node_dir and not launcher_lost.is_set():
        LogSender(outbox, mailbox).send(Path(spec.node_dir), text)


class LogSender:
    """Sends the log files. Main thread only."""

    def __init__(self, outbox: Outbox, mailbox: Mailbox[object]) -> None:
        self._outbox = outbox
        self._mailbox = mailbox
        self._grants: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._granted = 0
        """Bytes that the thread may send, of the grants that it has taken."""

    def send(self, folder: Path, only: str = "") -> None:
        """Send all files of ``folder``, or those with the name ``only``.

        Returns once the launcher has received them, grants no more bytes, or is lost.
        """
        nothing_more: LogsSent | GrantLogBytes = GrantLogBytes(0)
        post_from_thread("logs", lambda: self._send_all(folder, only), self._mailbox.post, nothing_more)
        while True:
            match self._mailbox.get():
                case Ping():
                    self._outbox.send(Pong())
                case GrantLogBytes(nbytes=nbytes) if nbytes > 0:
                    self._grants.put(nbytes)
                case SignalReceived(signum=signal.SIGUSR1 | signal.SIGUSR2):
                    pass  # For the workers, which have ended.
                case LogsSent() as sent:
                    self._outbox.send(sent)
                    return
                case GrantLogBytes() | LauncherLost() | SignalReceived():
                    return

    # The thread that reads files.

    def _send_all(self, folder: Path, only: str) -> LogsSent | GrantLogBytes:
        files, skipped_files = find_logs(folder, only)
        self._outbox.send(LogsFound(sum(files.values())))
        for path in files:
            skipped_files += not self._send_file(folder, path)
        self._await_grant(WINDOW_BYTES)  # The whole window is granted: nothing is in transit.
        return LogsSent(skipped_files)

    def _send_file(self, folder: Path, path: str) -> bool:
        """Send one file; False if it cannot be read: the launcher then discards the part that has arrived."""
        try:
            with kept_files.open_regular(folder / path, os.O_NOFOLLOW) as file:
                for chunk, data in _chunks(file.fileno(), path):
                    self._await_grant(cost(chunk))
                    self._outbox.send_file(chunk, data)
        except OSError:
            return False
        return True

    def _await_grant(self, nbytes: int) -> None:
        while self._granted < nbytes:
            self._granted += self._grants.get()
        self._granted -= nbytes


def find_logs(folder: Path, only: str = "") -> tuple[dict[str, int], int]:
    """Size of each log file of a node, by path below ``folder``; and the number of skipped files.

    ``only`` is the name of the files to find; empty: all.
    """
    found: dict[str, int] = {}
    skipped_files = 0
    for parent, folders, names in os.walk(folder):
        folders.sort()
        for name in sorted(names if not only else {only} & {*names}):
            path = os.path.relpath(os.path.join(parent, name), folder)
            with contextlib.suppress(OSError):
                status = os.lstat(os.path.join(parent, name))
                if len(found) < MAX_FILES and stat.S_ISREG(status.st_mode) and is_safe(path):
                    found[path] = status.st_size
                else:
                    skipped_files += 1
    return found, skipped_files


def _chunks(fd: int, path: str) -> Iterator[tuple[LogChunk, bytes]]:
    """What a file holds now; it may still grow."""
    remaining = os.fstat(fd).st_size
    while True:
        data = os.read(fd, min(remaining, CHUNK_BYTES))
        remaining -= len(data)
        is_last = remaining <= 0 or not data
        yield LogChunk(path, len(data), is_last), data
        if is_last:
            return
