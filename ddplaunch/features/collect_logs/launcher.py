"""``--collect-logs``: copies the log files of other machines to the run's folder once their workers have ended.

In a run of a function the same way brings what it has returned, with or without the logs.

Runs in the launcher, in the main thread; a thread of ``LogWriter`` writes the files. The names and the
amount of a node's data are checked, since the node is not trusted. Failures here do not change the run's outcome.
"""

from __future__ import annotations

import enum
import signal
import time
from collections.abc import Iterable
from dataclasses import field

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import Level
from ddplaunch.features.collect_logs.log_writer import LogWriter, Written
from ddplaunch.features.collect_logs.records import (
    MAX_FILES,
    WINDOW_BYTES,
    GrantLogBytes,
    LogChunk,
    LogsFound,
    LogsSent,
    cost,
    is_safe,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher.nodes import Node, NodeState
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.text import plural, quote, size
from ddplaunch.transport.handle import WithData

_MAX_NODE_BYTES = 16 << 30
"""Limit for one node: more data would fill most disks."""

_MAX_SENDERS = 16
"""Number of nodes that send at a time: this process holds up to one window per node in memory."""

_CHECK_S, _LEAST_CHECK_S = 1.0, 0.1
"""Seconds between two looks at all nodes that send, at most and at least: each event of a node may ask for one."""

_STALL_S = 60.0
_EXIT_S = 5.0
_WRITE_S = 5.0
_CONNECTION_CLOSED = "the connection was closed"


class _State(enum.Enum):
    WAITING = enum.auto()
    """Fewer than ``_MAX_SENDERS`` nodes must be sending before this one starts."""
    SENDING = enum.auto()
    DONE = enum.auto()
    """All files have arrived, or the rest is not requested; the agent exits next."""


@dataclass
class _Sender:
    """A node that has logs to send.

    Attributes:
        deadline: when the transfer fails if no data arrives, or the agent is killed if it does not exit.
        failure: why the logs are incomplete; None if they are complete or still arriving.
        received: sum of the ``cost`` of the data that has arrived.
    """

    node: Node
    found: LogsFound
    state: _State = _State.WAITING
    deadline: float = 0.0
    failure: str | None = None
    received: int = 0
    files: int = 0
    skipped_files: int = 0
    written: Written = field(default_factory=Written)

    def finish(self) -> None:
        """The transfer has ended; the agent exits next."""
        self.state, self.deadline = _State.DONE, time.monotonic() + _EXIT_S

    def give_up(self, failure: str) -> None:
        """End the transfer of this node's logs, which stay incomplete because of ``failure``."""
        self.finish()
        self.failure = failure
        self.node.handle.send(GrantLogBytes(0))


class LogCollector(Watch):
    """Collects the log files of all nodes.

    Attributes:
        missing: by host, why not all of its files were copied; complete when the loop has ended.
    """

    def __init__(self, run: RunServices, kind: str = "logs") -> None:
        """``kind``: "logs" or "return values"."""
        self._folder, self._kind = run.folder(), kind
        self._nodes, self._participants = run.nodes, run.participants
        self._progress, self._show = run.messages.progress, run.messages.show
        self._senders: dict[int, _Sender] = {}
        self._writer: LogWriter | None = None
        self.missing: dict[str, str] = {}
        self._signals = 0
        self._check_at = 0.0

    # During the transfer.

    def on_event(self, index: int, event: object) -> None:
        """A node has logs to send, or sends a piece of a file, or has sent all. Ignored unless it was requested."""
        node, sender = self._nodes.all[index], self._senders.get(index)
        is_sending = sender and sender.state is _State.SENDING and node.state is NodeState.HELD
        match event:
            case LogsFound() if node.state is NodeState.ENDING:
                self._on_found(node, event)
            case WithData(chunk=LogChunk() as chunk, data=data) if sender and is_sending:
                self._on_data(sender, chunk, data)
                self._request_more()
            case LogsSent(skipped_files=skipped_files) if sender and is_sending:
                sender.skipped_files = skipped_files
                sender.finish()
                self._request_more()

    def _on_found(self, node: Node, event: LogsFound) -> None:
        if self._folder is None:
            node.handle.send(GrantLogBytes(0))
            return
        self._nodes.hold(node)
        self._senders[node.index] = _Sender(node, event)
        self._request_more()

    def _on_data(self, sender: _Sender, chunk: LogChunk, data: bytes) -> None:
        sender.received += cost(chunk)
        sender.files += chunk.is_last
        sender.deadline = time.monotonic() + _STALL_S
        was_requested = sender.received <= WINDOW_BYTES + sender.written.cost and sender.files <= MAX_FILES
        if not was_requested or not is_safe(chunk.path):
            sender.give_up("the node sent data that was not requested")
        elif sender.received > _MAX_NODE_BYTES:
            sender.give_up(f"more than {size(_MAX_NODE_BYTES)} are not copied from one node")
        elif self._folder:
            self._writer = self._writer or LogWriter()
            self._writer.put(self._folder / sender.node.host, chunk, data, sender.written, sender.node.handle.send)

    def _request_more(self) -> None:
        sending = sum(sender.state is _State.SENDING for sender in self._senders.values())
        for sender in self._senders.values():
            if sender.state is _State.WAITING and sending < _MAX_SENDERS:
                sending += 1
                sender.state, sender.deadline = _State.SENDING, time.monotonic() + _STALL_S
                sender.node.handle.send(GrantLogBytes(WINDOW_BYTES))

    def run_due(self, now: float) -> float:
        """Show the progress, and end stalled transfers. Returns when to call again."""
        if not self._senders:
            return NEVER
        if now < self._check_at:
            return self._check_at
        self._check_at = now + _LEAST_CHECK_S
        self._check_all(now)
        self._request_more()
        if not any(sender.node.state.has_agent for sender in self._senders.values()):
            self._progress.end()
            return NEVER
        return min(now + _CHECK_S, self._progress.show(self._describe))

    def _check_all(self, now: float) -> None:
        for sender in self._senders.values():
            self._check(sender, now)

    def _check(self, sender: _Sender, now: float) -> None:
        failure = self._writer.failure if self._writer else None
        if sender.state is _State.DONE:
            if now >= sender.deadline and sender.node.state.has_agent:
                sender.deadline = NEVER
                sender.node.handle.kill()
        elif sender.written.is_shared:
            sender.finish()
        elif failure is not None:
            sender.give_up(f"{self._folder}: {failure}")
        elif not sender.node.state.has_agent:
            sender.give_up(_CONNECTION_CLOSED)
        elif sender.state is _State.SENDING and now >= sender.deadline:
            sender.give_up(f"nothing has arrived for {_STALL_S:g} s")

    def _describe(self) -> str:
        senders = self._senders.values()
        copied = sum(sender.written.nbytes for sender in senders)
        total = sum(sender.found.nbytes for sender in senders)
        missing = _hosts(sender.node for sender in senders if sender.node.state.has_agent)
        return f"copying {self._kind}: {size(copied)} of {size(total)}, waiting for {missing}"

    def on_stop(self, signum: int) -> bool:
        """If only log transfers are in progress, end them; the second signal kills the agents."""
        connected = list(self._nodes.connected)
        if not connected or not all(node.state is NodeState.HELD for node in connected):
            return False
        self._signals += 1
        if self._signals == 1:
            name = signal.Signals(signum).name
            self._show(f"{name}: {self._kind} that were not copied yet stay on their nodes", Level.NORMAL)
            for sender in self._senders.values():
                if sender.state is not _State.DONE:
                    sender.give_up(name)
        else:
            for node in connected:
                node.handle.kill()
        return True

    # The end.

    def on_loop_ended(self) -> None:
        """Show which logs were copied, and the nodes with incomplete logs; nothing after an unexpected error."""
        if self._folder is None or not self._nodes.all_finished:
            return
        self._check_all(time.monotonic())  # The last nodes may have left since the last look.
        if self._writer:
            self._writer.close(_WRITE_S)
        self._report_copied()
        for failure, nodes in self._incomplete().items():
            for node in nodes:
                self.missing[node.host] = failure
            self._show(
                f"{self._kind} of {_hosts(nodes)} are incomplete: {failure}; the complete files stay on the nodes",
                Level.ALWAYS,
            )
        if lost := self._nodes.lost:
            for node in lost:
                self.missing[node.host] = f"{node.host} was lost"
            self._show(f"{self._kind} of {_hosts(lost)} could not be copied: the nodes were lost", Level.ALWAYS)

    def _report_copied(self) -> None:
        if self._kind != "logs":
            return
        senders = self._senders.values()
        shared = [sender.node for sender in senders if sender.written.is_shared]
        if shared:
            self._show(
                f"logs of {_hosts(shared)} are in {self._folder}, on a file system that these nodes share", Level.NORMAL
            )
        copied = [sender.written for sender in senders if sender.written.files]
        if copied:
            ranks = plural(sum(len(written.local_ranks) for written in copied), "rank")
            nbytes = size(sum(written.nbytes for written in copied))
            self._show(
                f"logs of {ranks} ({nbytes}) from {plural(len(copied), 'node')} are in {self._folder}", Level.NORMAL
            )
        for sender in senders:
            if sender.skipped_files:
                files = f"{plural(sender.skipped_files, 'file')} of {sender.node.host}"
                self._show(f"{files} not copied: unreadable, too many, or not named like a log", Level.NORMAL)

    def _incomplete(self) -> dict[str, list[Node]]:
        """The nodes with incomplete logs, by reason; without lost nodes."""
        found: dict[str, list[Node]] = {}
        for node in self._nodes.all:
            failure = self._failure_of(node)
            if failure is not None and not node.state.is_lost:
                found.setdefault(failure, []).append(node)
        return found

    def _failure_of(self, node: Node) -> str | None:
        sender = self._senders.get(node.index)
        if sender and sender.failure is None and sender.skipped_files and self._kind == "return values":
            return f"{plural(sender.skipped_files, 'file')} could not be read"
        if sender:
            return sender.failure
        return _CONNECTION_CLOSED if node.facts and node.index in self._participants.indices else None


def _hosts(nodes: Iterable[Node]) -> str:
    return quote(fold(node.host for node in nodes), 200)


def watches(run: RunServices) -> tuple[Watch, ...]:
    """The part of a run in the launcher; in a run of a function it is ``features.functions`` that has a collector."""
    is_wanted = run.config.entry != "function" and not run.config.is_local
    return (LogCollector(run),) if is_wanted else ()
