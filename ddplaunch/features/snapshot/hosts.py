"""Sends a snapshot to hosts that do not share a file system with this machine, for ``--sync``.

Runs in the process of the command, before the run: an agent on each host makes a copy, and gets only the files that the
host does not have. No host waits for another one, and one that is silent is given up. When all have their copy, the
same agents run the job (``begun``).
"""

from __future__ import annotations

import base64
import contextlib
import functools
import getpass
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from ddplaunch.cluster.hosts import fold
from ddplaunch.errors import NODE_NOT_READY, LaunchError, StartNotice
from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries
from ddplaunch.features.snapshot import content, copies
from ddplaunch.features.snapshot.begun import Begun
from ddplaunch.features.snapshot.queries import (
    PART_BYTES,
    ROUND_BYTES,
    CopyAnswer,
    CopyProgress,
    GiveFiles,
    Giving,
    KeepWaiting,
    MakeCopy,
    PutPart,
    Source,
    Wanted,
)
from ddplaunch.features.snapshot.records import HOME_BASE, MARKER
from ddplaunch.features.snapshot.spread import Spread
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.console import Progress
from ddplaunch.system.files.run_folder import new_run_id
from ddplaunch.system.run_tags import new_run_tag
from ddplaunch.text import plural, quote, size
from ddplaunch.transport.failures import HostFailure, failures_table

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.snapshot.copies import Facts

_SILENT_S = 20.0
"""A host that says nothing for so long is given up. A slow link delays what it says by ten seconds, no more."""

STUCK_S = 180.0
"""So is one that lives, but gets nothing and makes nothing for so long: its file system hangs."""

_SPREAD_ABOVE = 32
"""Hosts: those of more that have the code give it to others."""

_ASK_AGAIN_S = 10.0
"""A host that waits for a source is asked again, so that it knows that this command lives."""

_LOOK_S = 0.5
_FROZEN_S = 5.0
"""After a look that came so late, this process was suspended: what hosts have said meanwhile has not been read."""

_ALL_BYTES, _LEAST_BYTES = 256 << 20, 1 << 20
"""So many bytes are on the way to all hosts at once, but no less than the second to each."""

_KEPT_PARTS = 128
_TIMES = 3
"""So many times the code is sent to a host on which it does not arrive as it was."""


def paths(folder: str) -> tuple[str, str]:
    """The copy of a snapshot on a host, and the folder in which its workers run; both below the home there."""
    project, name = folder.split("/")[-2:]
    return f"{HOME_BASE}/{copies.FOLDER}/{project}/{name}", f"{HOME_BASE}/work/{project}"


def send(config: LaunchConfig, folder: str, found: Facts, cwd: str) -> LaunchConfig:
    """Have all hosts make a copy of the snapshot ``folder``.

    Returns ``config`` of a run there, with the hosts that have a copy, and with notices.

    ``cwd``: working directory of the workers, relative to that of the code.

    Raises:
        LaunchError: a host cannot be reached, or has no copy, and so the job cannot run.
    """
    config = on_hosts(config, folder, cwd)
    order, files = _order(config, folder, found, cwd)
    queries = Queries(STUCK_S)
    run_id = config.run_id or new_run_id()
    begun = Begun(config, new_run_tag(run_id, is_unique=not config.run_id), queries.post)
    with contextlib.closing(setup.open_console(config, None, 1)) as console, contextlib.ExitStack() as stack:
        stack.callback(begun.close)
        stack.callback(queries.close)
        queries.start(begun.transport, order, "run")
        progress = Progress(console, is_quiet=config.output.verbosity < 0)
        (sending := Sending(queries, queries.nodes, order, files)).run(progress)
        failed = {node.name: failure for node in queries.nodes if (failure := _failure(node))}
        if not failed:  # Otherwise nodes have other numbers in the run.
            stack.pop_all()
            begun.hand_over(queries.nodes, config.max_nodes)
    hosts = tuple(host for host, node in zip(config.hosts, queries.nodes, strict=True) if node.name not in failed)
    table = failures_table(failed.values())
    if len(hosts) < config.min_nodes:
        raise LaunchError(f"the code cannot be copied to hosts\n{table}", "", NODE_NOT_READY)
    given = f", which gave each other {size(sending.given)}" if sending.given else ""
    notices = [StartNotice("detail", f"sent {size(sending.sent)} of code to {plural(len(hosts), 'host')}{given}")]
    if failed:
        notices.append(StartNotice("warning", f"the run goes on without hosts that have no code\n{table}"))
    notices += [warning for node in queries.nodes for warning in _warnings(node)]
    return replace(
        config,
        hosts=hosts,
        max_nodes=min(config.max_nodes, len(hosts)),
        run_id=config.run_id if failed else run_id,
        begun=None if failed else begun,
        notices=(*config.notices, *notices),
    )


def _order(config: LaunchConfig, folder: str, found: Facts, cwd: str) -> tuple[MakeCopy, dict[str, str]]:
    """What the hosts are to make, and the paths of the files that they may want, by hash."""
    with open(os.path.join(folder, MARKER), "rb") as file:
        marker = file.read()
    project, name = folder.split("/")[-2:]
    order = MakeCopy(
        project=project,
        name=name,
        marker=content.hash_of(marker),
        marker_bytes=len(marker),
        cwd=cwd,
        round_bytes=max(_LEAST_BYTES, min(ROUND_BYTES, _ALL_BYTES // len(config.hosts))),
        sender=quote(f"{_user()}@{setup.local_host_name()}"),
    )
    files = {noted[2]: os.path.join(folder, path) for path, noted in found.files.items() if len(noted) > 1}
    return order, {**files, order.marker: os.path.join(folder, MARKER)}


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # A container may have no name for it.
        return str(os.geteuid())


def _warnings(node: QueriedNode) -> Iterator[StartNotice]:
    answer: CopyAnswer = node.answers.get(CopyAnswer, CopyAnswer())
    for link in answer.links:
        yield StartNotice("warning", f"the link {link} of the code leads to nothing on {node.name}")
    if answer.other_sender:
        text = (
            f"the working directory on {node.name} had the code of {answer.other_sender}, from a folder of the same "
            "path, and has that of this run now"
        )
        yield StartNotice("warning", text)


def _failure(node: QueriedNode) -> HostFailure | None:
    answer: CopyAnswer | None = node.answers.get(CopyAnswer)
    if node.failure or not answer or not answer.problem:
        return node.failure
    return HostFailure(node.name, "directory", answer.problem)


class Sending:
    """Sends the hosts what they want, or has others send it, until they want nothing. Main thread.

    Attributes:
        sent: bytes that were sent to all hosts.
        given: bytes that hosts have got from others.
    """

    def __init__(
        self,
        queries: Queries,
        nodes: Sequence[QueriedNode],
        order: MakeCopy,
        files: Mapping[str, str],
        what: str = "the code",
    ) -> None:
        """``order`` has been sent to ``nodes``, of ``queries``; ``files`` are by hash; ``what`` they are, for messages.

        Others of ``queries`` are let alone.
        """
        self.sent = self.given = 0
        self._queries, self._order, self._files, self._what = queries, order, files, what
        self._nodes = {node.name: node for node in nodes}
        self._sent = dict.fromkeys(self._nodes, 0)
        self._most = _TIMES * sum(map(os.path.getsize, files.values()))
        self._wanted: dict[str, CopyAnswer] = {}
        """What each node has wanted last."""
        self._progress: dict[str, CopyProgress] = {}
        self._heard_at: dict[str, float] = {}
        """When each node has said something; later for one that has only connected: it may load slowly."""
        self._looked_at = self._asked_at = time.monotonic()
        self._spread = Spread(is_on=len(self._nodes) > _SPREAD_ABOVE and bool(find_spec("cryptography")))
        self._secret = os.urandom(32).hex()
        self._copied: set[str] = set()
        """They have answered last: they have a copy, or a problem."""
        self._takers: set[str] = set()
        """Each has been told to take what it wants from another node."""

    def run(self, progress: Progress) -> None:
        """A node that gets no copy has a ``failure`` then, or an answer with a problem."""
        while self._unfinished():
            node = self._queries.next_event(self._looked_at + _LOOK_S)
            node = node if node and node.name in self._nodes else None
            if node and node.failure:
                self._spread.leaves(node.name)
            elif node:
                self._on_event(node, time.monotonic())
            if (now := time.monotonic()) >= self._looked_at + _LOOK_S:
                self._look(now)
                progress.show(self._text)
            self._place(now)
        progress.end()

    @functools.cached_property
    def _identity(self) -> tuple[bytes, str]:
        from ddplaunch.features.ssh.listener import new_identity

        return new_identity()

    def _unfinished(self) -> list[QueriedNode]:
        return [node for node in self._nodes.values() if not node.failure and node.name not in self._copied]

    def _on_event(self, node: QueriedNode, now: float) -> None:
        if node.deadline < math.inf:  # Its facts have come.
            self._heard_at[node.name] = now + (0.0 if node.name in self._heard_at else setup.SLOW_START_S)
        latest: CopyProgress | None = node.answers.pop(CopyProgress, None)
        answer: CopyAnswer | None = node.answers.get(CopyAnswer)
        if answer and node.name not in self._copied:
            latest = CopyProgress(answer.left, 0)
            self._on_answer(node, answer, now)
        if latest and latest != self._progress.get(node.name):
            self._progress[node.name], node.deadline = latest, now + STUCK_S
        giving: Giving | None = node.answers.pop(Giving, None)
        if giving:
            source = Source(giving.addresses, giving.port, self._identity[1], self._secret)
            self._spread.gives(node.name, source if giving.addresses else None)

    def _on_answer(self, node: QueriedNode, answer: CopyAnswer, now: float) -> None:
        if answer.wanted:
            self._wanted[node.name] = node.answers.pop(CopyAnswer)
            self._spread.wants(node.name, answer.left, now)
            return
        self._copied.add(node.name)
        if node.name in self._takers:
            self.given += self._wanted[node.name].left
        if answer.problem:
            self._spread.leaves(node.name)
        elif self._spread.has_copy(node.name):
            project, name, identity = self._order.project, self._order.name, self._identity[0].decode()
            node.handle.send(GiveFiles(project=project, name=name, identity=identity, secret=self._secret))

    def _place(self, now: float) -> None:
        for name, source in self._spread.placed(now):
            if source:
                self._takers.add(name)
                self._nodes[name].handle.send(replace(self._order, source=source))
            else:
                self._takers.discard(name)
                self._send(self._nodes[name], self._wanted[name])

    def _send(self, node: QueriedNode, answer: CopyAnswer) -> None:
        """Send a node what it wants, and ask again. A node fails that wants more than one of ours can."""
        nbytes = sum(wanted.nbytes for wanted in answer.wanted)
        self.sent += nbytes
        self._sent[node.name] += nbytes
        if nbytes > self._order.round_bytes or any(wanted.hash not in self._files for wanted in answer.wanted):
            self._give_up(node, HostFailure(node.name, "start", f"asks for files that are not in {self._what}"))
        elif self._sent[node.name] > self._most:
            self._give_up(node, HostFailure(node.name, "start", "what is sent arrives damaged, again and again"))
        else:
            for wanted in answer.wanted:
                for part in _parts(self._order.project, self._files[wanted.hash], wanted):
                    node.handle.send(part)
            node.handle.send(self._order)

    def _look(self, now: float) -> None:
        """Give up the nodes that are silent, or stuck."""
        was_frozen, self._looked_at = now - self._looked_at > _FROZEN_S, now
        waiting = tuple(self._spread.waiting)
        for node in map(self._nodes.__getitem__, waiting):
            node.deadline = now + STUCK_S
        if now > self._asked_at + _ASK_AGAIN_S:
            self._asked_at = now
            for name in waiting:
                del self._spread.waiting[name]
                self._nodes[name].handle.send(self._order)
            for name in self._copied:
                self._nodes[name].handle.send(KeepWaiting())
        for node in self._unfinished():
            if node.name not in self._heard_at:  # Its handle limits the time in which it connects.
                continue
            if was_frozen:
                self._heard_at[node.name], node.deadline = now, now + STUCK_S
            if now - max(self._heard_at[node.name], node.handle.heard_at) > _SILENT_S:
                message = f"has said nothing for {_SILENT_S:g} s while {self._what} was sent to it"
                self._give_up(node, HostFailure(node.name, "timeout", message))
            elif now > node.deadline:
                message = f"does not get on with {self._what}: it has got nothing for {STUCK_S:g} s"
                self._give_up(node, HostFailure(node.name, "timeout", message))

    def _give_up(self, node: QueriedNode, failure: HostFailure) -> None:
        node.failure = failure
        node.handle.kill()
        self._spread.leaves(node.name)

    def _text(self) -> str:
        """For a line of progress."""
        unfinished = self._unfinished()
        absent = [node.name for node in unfinished if node.name not in self._heard_at]
        behind = [node.name for node in unfinished if node.name in self._heard_at]
        left = sum(self._progress[name].left for name in behind if name in self._progress)
        has = len([name for name in self._copied if not self._nodes[name].answers[CopyAnswer].problem])
        return (
            f"{self._what} is on {has} of {plural(len(self._nodes), 'host')}"
            + (f"; not connected yet: {quote(fold(absent), 100)}" if absent else "")
            + (f"; {size(left)} left for {quote(fold(behind), 100)}" if behind else "")
        )


def _parts(project: str, path: str, wanted: Wanted) -> Iterator[PutPart]:
    end, nbytes = wanted.offset + wanted.nbytes, os.path.getsize(path)
    for offset in range(wanted.offset, max(end, wanted.offset + 1), PART_BYTES):
        text = _text_of_part(path, offset, min(PART_BYTES, end - offset))
        yield PutPart(project, wanted.hash, offset, nbytes, text)


@functools.lru_cache(_KEPT_PARTS)
def _text_of_part(path: str, offset: int, nbytes: int) -> str:
    """Most hosts want the same parts: each is read and compressed once."""
    with open(path, "rb") as file:
        data = os.pread(file.fileno(), nbytes, offset)
    return base64.b64encode(zlib.compress(data, 1)).decode()


def on_hosts(config: LaunchConfig, folder: str, cwd: str) -> LaunchConfig:
    """``config`` of a run whose hosts get copies of the snapshot ``folder``: workers run there."""
    copy, work = paths(folder)
    script = config.script
    if config.script_file:
        script = f"{copy}/{os.path.relpath(config.script, folder)}"
    return replace(config, chdir=f"{work}/{cwd}".rstrip("/"), script=script)
