"""PopenHandle: an agent whose stdin and stdout are pipes to a child process of the launcher.

Runs in the launcher; base class for local agents and for commands like srun. One thread writes the queued records,
another reads the agent's. The subclass starts the child.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch.protocol import wire
from ddplaunch.transport.handle import AgentHandle, ChannelClosed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from ddplaunch.transport.agent_process import Child
    from ddplaunch.transport.handle import Post, WriteOutput


class PopenHandle(AgentHandle):
    """One agent behind a child process.

    A subclass starts ``_writer``, which runs ``_send``, and ``_reader``, by ``_start_threads``.
    """

    def __init__(
        self,
        process: Child,
        name: str,
        post: Post,
        output: WriteOutput,
        inherited_fds: Mapping[str, int] | None = None,
    ) -> None:
        """Take over ``process``, whose stdin and stdout are pipes."""
        super().__init__(name, post, output, inherited_fds)
        self._process = process
        self._stdin = cast("BinaryIO", process.stdin)
        self._stdout = cast("BinaryIO", process.stdout)
        self._writer = self._thread(self._send, "to")
        self._reader = self._thread(self._receive, "from")

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()

    def close(self, timeout_s: float = 5.0) -> int | None:
        """Close the agent's stdin and wait for its exit, with SIGKILL after ``timeout_s``."""
        self.end_input()
        try:
            returncode = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            returncode = self._process.wait()
        self._writer.join(timeout_s)
        return returncode

    def _thread(self, run: Callable[[], None], direction: str) -> threading.Thread:
        return threading.Thread(target=run, name=f"{direction} agent {self._name}", daemon=True)

    def _start_threads(self, *threads: threading.Thread) -> None:
        """Start ``threads``.

        Raises:
            RuntimeError: no room for a thread; the process has been killed and reaped.
        """
        try:
            for thread in threads:
                thread.start()
        except RuntimeError:
            self._process.kill()
            self._process.wait()
            raise

    def _send(self) -> None:
        with contextlib.suppress(OSError), self._stdin:
            while (record := self._outgoing.get()) is not None:
                self._stdin.write(wire.encode(record))
                self._stdin.flush()

    def _receive(self) -> None:
        with self._stdout:
            if not self._deliver_records(self._stdout):
                self.kill()
        self._post(ChannelClosed())
