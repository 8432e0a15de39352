"""Log files of other machines, for ``--logs``: read part by part from agents that are started on their nodes.

Runs in the process that the user started; an agent ends with it. A node that cannot be reached, or that no longer
answers, is named once, and the files of the others are read on.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from ddplaunch.cli.build_config import transport_of_command
from ddplaunch.cluster.hosts import Host, display_names, parse_entry
from ddplaunch.config import RemoteConfig
from ddplaunch.errors import UsageError
from ddplaunch.features.come_back.log_follower import shown
from ddplaunch.features.come_back.queries import PART_BYTES, LogPart, ReadLog
from ddplaunch.features.runs.asked_nodes import QueriedNode, Queries, query_transport
from ddplaunch.text import quote
from ddplaunch.transport.failures import HostFailure
from ddplaunch.transport.handle import WithData

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request

_CLOSE_S = 1.0
_HINT = "Name the hosts of the run as for the run itself: --hosts, --ssh-config and the other options of SSH."


class RemoteNodes:
    """The nodes whose files are read. ``close`` is the last call.

    Attributes:
        problems: why files cannot be read, by host and path; without a path: no file of the host can.
    """

    def __init__(self, request: Request) -> None:
        """``request``: its hosts are those that may be asked; without any, each node of the run by its name."""
        self._request = request
        self._named = dict(zip(display_names(request.hosts), request.hosts, strict=True))
        self._queries = Queries()
        self._nodes: dict[str, QueriedNode] = {}
        self._closing = contextlib.ExitStack()
        self.problems: dict[tuple[str, str], HostFailure] = {}

    def connect(self, folders: Mapping[str, str]) -> None:
        """Start an agent on each of these hosts that has none, all at once, and wait for them.

        ``folders``: by host, a folder with log files there; empty if none is known, and then no agent is started.
        """
        new: dict[str, Host] = {}
        for name, folder in folders.items():
            if name not in self._nodes and (name, "") not in self.problems:
                try:
                    new[name] = self._host(name, folder)
                except UsageError as error:
                    self.problems[name, ""] = HostFailure(name, "configuration", error.message, error.hint)
        if new:
            self._start(new)

    def _host(self, name: str, folder: str) -> Host:
        """Raises UsageError: the folder is not known; the user names other hosts only; no host can have this name."""
        if not folder:
            raise UsageError("its log files are not on this machine, and where they are is not known")
        if self._named:
            if name in self._named:
                return self._named[name]
            raise UsageError("it is none of --hosts", _HINT)
        hosts = parse_entry(f"[{name}]" if name.count(":") > 1 else name, "a node of the run")
        if len(hosts) != 1:
            raise UsageError("this is no name of a host")
        return hosts[0]

    def _start(self, new: dict[str, Host]) -> None:
        request, queries, first = self._request, self._queries, len(self._queries.nodes)
        remote = request.remote
        if not self._named:
            remote = RemoteConfig(transport=transport_of_command(tuple(new.values()), request.options, os.environ))
        transport = query_transport(tuple(new.values()), remote, partial(queries.post, first=first))
        self._closing.callback(transport.close)
        queries.start(transport, ReadLog("", 0))
        self._nodes |= dict(zip(new, queries.nodes[first:], strict=True))
        queries.wait(queries.nodes[first:], WithData)
        for node in queries.nodes[first:]:
            self._note(node, _HINT)

    def read(self, name: str, path: str, offset: int) -> tuple[bytes, int, bool]:
        """The next part of a file on a host, the size of the file, and whether it is the user's own there.

        No bytes and the size: the file has no more. No bytes and ``offset``: there is a problem.
        """
        node = self._nodes.get(name)
        if node is None or {(name, ""), (name, path)} & self.problems.keys():
            return b"", offset, True
        node.answers.pop(WithData, None)
        self._queries.ask([node], lambda _: ReadLog(path, offset), WithData)
        self._note(node)
        answer: WithData | None = node.answers.get(WithData)
        if not answer or not isinstance(answer.chunk, LogPart):
            return b"", offset, True
        if answer.chunk.problem:
            self.problems[name, path] = HostFailure(name, "directory", f"{quote(path)}: {answer.chunk.problem}")
            return b"", offset, True
        return answer.data[:PART_BYTES], answer.chunk.size, answer.chunk.is_own

    def _note(self, node: QueriedNode, hint: str = "") -> None:
        if failure := node.failure:
            self.problems[node.name, ""] = HostFailure(node.name, failure.cause, failure.message, failure.hint or hint)

    def close(self) -> None:
        """End the agents, which have nothing to lose: one that does not answer is hardly waited for."""
        self._queries.close(_CLOSE_S)
        self._closing.close()


class RemoteLog:
    """A log file on another machine, with the methods of ``LogFollower`` that ``--logs`` uses."""

    def __init__(self, read: Callable[[int], tuple[bytes, int, bool]]) -> None:
        """``read`` returns what the file has from an offset on, its size, and whether it is the user's own."""
        self._read, self._offset, self._size = read, 0, 0

    def read(self) -> bytes:
        """What was written next, at most ``PART_BYTES``; empty if there is nothing more yet."""
        data, self._size, is_own = self._read(self._offset)
        if self._size < self._offset:  # Somebody has emptied it.
            self._offset = 0
            data, self._size, is_own = self._read(0)
        self._offset += len(data)
        return shown(data, is_own=is_own)

    def progress(self) -> tuple[int, int]:
        """How many bytes of the file were read, and how many it had then."""
        return self._offset, self._size

    def close(self) -> None:
        """Nothing is open here."""
