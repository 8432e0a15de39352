"""``--collect-logs``: the log files of other machines are brought to the run's folder once their agents are done.

Main thread only. What comes over the wire is not trusted, neither a file's name nor how much there is of it. Whatever
happens here, the run's verdict is what it was.
"""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from ddplaunch.host_ranges import fold
from ddplaunch.launcher.handles import LogData, Node
from ddplaunch.launcher.log_writer import LogWriter, Written
from ddplaunch.logs import MAX_FILES, WINDOW_BYTES, LogsFound, LogsSent, LogsWanted, cost, is_safe
from ddplaunch.printable import shown, size

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.launcher.nodes import Nodes
    from ddplaunch.launcher.telling import Telling

_MAX_NODE_BYTES = 16 << 30
"""More of one node would fill most disks."""

_MAX_SENDERS = 16
"""How many nodes send at a time: this process holds up to a window of each."""

_LOOK_S = 1.0
_STALL_S = 60.0
_LEAVE_S = 5.0
_WRITE_S = 5.0
_CUT_OFF = "its connection has ended"


@dataclass
class _Sender:
    """A node that has logs to send.

    Attributes:
        due: when it is given up if it sends nothing, or killed if it is done and does not leave.
        why: what cut it off; empty where nothing did.
    """

    node: Node
    found: LogsFound
    state: Literal["waits", "sends", "done"] = "waits"
    due: float = 0.0
    why: str = ""
    came: int = 0
    files: int = 0
    left_out: int = 0
    written: Written = field(default_factory=Written)


class Collected:
    """The logs of other machines, as far as they have come."""

    def __init__(self, folder: Path | None, nodes: Nodes, telling: Telling) -> None:
        """``folder`` is the run's; None where no logs are to be brought."""
        self._folder = folder
        self._nodes = nodes
        self._progress, self._say = telling.progress, telling.say
        self._senders: dict[int, _Sender] = {}
        self._writer: LogWriter | None = None
        self._signals = 0

    # While they come.

    def hear(self, node: Node, event: LogsFound | LogData | LogsSent) -> None:
        """What an agent says of its logs, or a piece of them. What was not asked for is passed over."""
        sender = self._senders.get(node.index)
        match event:
            case LogsFound() if sender is None and self._folder and node.left is not None:
                node.sends_logs = True
                self._senders[node.index] = _Sender(node, event)
            case LogData() if sender and sender.state == "sends":
                self._take(sender, event)
            case LogsSent(left_out=left_out) if sender and sender.state == "sends":
                sender.left_out = left_out
                self._done(sender)
        self._ask_next()

    def _take(self, sender: _Sender, event: LogData) -> None:
        sender.came += cost(event.chunk)
        sender.files += event.chunk.is_last
        sender.due = time.monotonic() + _STALL_S
        is_asked_for = sender.came <= WINDOW_BYTES + sender.written.cost and sender.files <= MAX_FILES
        if not is_asked_for or not is_safe(event.chunk.path):
            self._end(sender, "what it sent was not asked for")
        elif sender.came > _MAX_NODE_BYTES:
            self._end(sender, f"no more than {size(_MAX_NODE_BYTES)} of a node are brought")
        elif self._folder:
            self._writer = self._writer or LogWriter()
            self._writer.put(self._folder / sender.node.host, event, sender.written, sender.node.handle.send)

    def _ask_next(self) -> None:
        sending = sum(sender.state == "sends" for sender in self._senders.values())
        for sender in self._senders.values():
            if sender.state == "waits" and sending < _MAX_SENDERS:
                sending += 1
                sender.state, sender.due = "sends", time.monotonic() + _STALL_S
                sender.node.handle.send(LogsWanted(WINDOW_BYTES))

    def _done(self, sender: _Sender) -> None:
        sender.state, sender.due = "done", time.monotonic() + _LEAVE_S

    def _end(self, sender: _Sender, why: str) -> None:
        """No more of this one."""
        self._done(sender)
        sender.why = why
        sender.node.handle.send(LogsWanted(0))

    def act(self) -> float:
        """Tell how far it has come, and give up what rests for too long. Returns when to call again."""
        if not self._senders:
            return float("inf")
        for sender in self._senders.values():
            self._look_after(sender, time.monotonic())
        self._ask_next()
        if not any(sender.node.state == "running" for sender in self._senders.values()):
            self._progress.end()
            return float("inf")
        return min(time.monotonic() + _LOOK_S, self._progress.show(self._account))

    def _look_after(self, sender: _Sender, now: float) -> None:
        failure = self._writer.failure if self._writer else ""
        if sender.state == "done":
            if now >= sender.due and sender.node.state == "running":
                sender.due = float("inf")
                sender.node.handle.kill()
        elif sender.written.is_there:
            self._done(sender)
        elif failure:
            self._end(sender, f"{self._folder}: {failure}")
        elif sender.node.state != "running":
            self._end(sender, _CUT_OFF)
        elif sender.state == "sends" and now >= sender.due:
            self._end(sender, f"nothing has come for {_STALL_S:g} s")

    def _account(self) -> str:
        senders = self._senders.values()
        came, found = sum(sender.written.nbytes for sender in senders), sum(sender.found.nbytes for sender in senders)
        missing = fold(sender.node.host for sender in senders if sender.node.state == "running")
        return f"bringing logs: {size(came)} of {size(found)}, waiting for {shown(missing, 200)}"

    def interrupted(self, signum: int) -> bool:
        """A signal came; where nothing but logs is waited for, it is for them, and the second one ends it at once."""
        running = list(self._nodes.running)
        if not running or not all(node.sends_logs for node in running):
            return False
        self._signals += 1
        if self._signals == 1:
            name = signal.Signals(signum).name
            self._say(f"{name}: the logs that are not here yet stay where they are", 0)
            for sender in self._senders.values():
                if sender.state != "done":
                    self._end(sender, name)
        else:
            for node in running:
                node.handle.kill()
        return True

    # The end.

    def close(self) -> None:
        """Say what is here, and of which nodes not all is."""
        if self._folder is None:
            return
        if self._writer:
            self._writer.close(_WRITE_S)
        if self._senders:
            self._tell_what_is_here()
        for why, hosts in self._cut_off().items():
            self._say(f"logs of {shown(fold(hosts), 200)} are not all here: {why}; the rest is still there", -1)
        lost = shown(fold(node.host for node in self._nodes.all if node.state == "lost"), 200)
        if lost:
            self._say(f"logs of {lost} could not be brought: lost", -1)

    def _tell_what_is_here(self) -> None:
        there = [sender for sender in self._senders.values() if sender.written.is_there]
        if there:
            hosts = shown(fold(sender.node.host for sender in there), 200)
            self._say(f"logs of {hosts} are in {self._folder}, which is on a file system of theirs", 0)
        came = [sender.written for sender in self._senders.values() if sender.written.files]
        if came:
            ranks = sum(len(written.local_ranks) for written in came)
            nbytes = size(sum(written.nbytes for written in came))
            whose = f"{_count(ranks, 'rank')} ({nbytes}) from {_count(len(came), 'node')}"
            self._say(f"logs of {whose} are in {self._folder}", 0)
        for sender in self._senders.values():
            if sender.left_out:
                left = f"{_count(sender.left_out, 'file')} of {sender.node.host}"
                self._say(f"{left} stayed there: not readable, too many, or not named as logs are", 0)

    def _cut_off(self) -> dict[str, list[str]]:
        """Hosts, by the reason why not all of their logs are here."""
        found: dict[str, list[str]] = {}
        for node in self._nodes.all:
            sender = self._senders.get(node.index)
            has_vanished = sender is None and node.facts and node.index in self._nodes.seats
            why = sender.why if sender else _CUT_OFF if has_vanished else ""
            if why and node.state != "lost":
                found.setdefault(why, []).append(node.host)
        return found


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' * (number != 1)}"
