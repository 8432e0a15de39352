"""A handle on an agent that is a child of the launcher: start it, send it records, deliver its."""

from __future__ import annotations

import contextlib
import queue
import signal
import subprocess
import threading
from typing import TYPE_CHECKING, BinaryIO, cast

from ddplaunch import pipes, protocol
from ddplaunch.launcher.handles import AgentLost, complain, deliver
from ddplaunch.records import FROM_AGENT

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.launcher.agent_process import AgentProcess
    from ddplaunch.records import Output


class LocalHandle:
    """One agent process on this machine."""

    def __init__(
        self,
        agent: AgentProcess,
        post: Callable[[object], None],
        output: Callable[[Output, bytes], None],
    ) -> None:
        """Listen to ``agent``, which is killed where there is no room for that.

        Raises:
            RuntimeError: no room for a thread.
        """
        self._process = agent.process
        # Not so a pipe at the end of a slow link, where all that is in it delays an answer.
        pipes.widen(cast("BinaryIO", self._process.stdout).fileno())
        self.pid = self._process.pid
        self._outgoing: queue.SimpleQueue[object] = queue.SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="to agent", daemon=True)
        reader = threading.Thread(target=self._listen, args=(post, output), name="from agent", daemon=True)
        try:
            self._writer.start()
            reader.start()
        except RuntimeError:
            self.kill()
            self._process.wait()
            raise

    def send(self, record: object) -> None:
        """Queue a record, which never blocks; a channel that is gone is told of by AgentLost."""
        self._outgoing.put(record)

    def wake(self) -> None:
        """Continue an agent that somebody has stopped: SIGCONT is all it can hear."""
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """SIGKILL the agent; the kernel then kills its workers."""
        self._process.kill()

    def end_input(self) -> None:
        """Close the agent's stdin after what is queued: it stops its workers and ends. For many before ``close``."""
        self._outgoing.put(None)

    def close(self, timeout_s: float = 5.0) -> int:
        """End the agent's stdin and wait for its end, by SIGKILL after ``timeout_s``. Returns its returncode."""
        self.end_input()
        try:
            returncode = self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            returncode = self._process.wait()
        self._writer.join(timeout_s)
        return returncode

    def _write(self) -> None:
        stdin = cast("BinaryIO", self._process.stdin)
        with contextlib.suppress(OSError), stdin:
            while (record := self._outgoing.get()) is not None:
                stdin.write(protocol.encode(record))
                stdin.flush()

    def _listen(self, post: Callable[[object], None], output: Callable[[Output, bytes], None]) -> None:
        stream = cast("BinaryIO", self._process.stdout)
        try:
            while (received := protocol.read_record(stream, FROM_AGENT)) is not None:
                deliver(*received, post, output)
        except (OSError, protocol.ProtocolError) as error:
            complain(error, f"with pid {self.pid}", post)
            self._process.kill()
        stream.close()
        post(AgentLost())
