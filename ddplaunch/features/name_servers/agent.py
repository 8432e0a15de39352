"""Looks up the name of the workers' store before the workers do, while the forkserver imports torch.

Runs in the agent; each look-up is in a thread, which wakes the agent at its end. Must not change how this process
resolves names.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features import name_servers
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round

_IMPATIENT = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The resolver of glibc then waits for a name server once, for 1 s (resolv.conf(5))."""


class NameLookup:
    """The look-up of one address.

    Attributes:
        address: that address, or the host whose address it is, until that is known.
        deadline: time of ``time.monotonic()`` after which the look-up is slow.
        is_done: the look-up has ended, with or without a name.
        was_told: the user has been told that it is slow.
    """

    def __init__(self, address: str, post: Callable[[object], None]) -> None:
        """Start the look-up of an address or of the address of a host; at its end ``post`` wakes the agent."""
        self.deadline = time.monotonic() + name_servers.SLOW_S
        self.is_done = self._was_slow = self.was_told = False
        self.address = address
        in_thread("name look-up", lambda: self._run(post))

    def _run(self, post: Callable[[object], None]) -> None:
        started_s = time.monotonic()  # On a busy machine a thread may start late.
        with contextlib.suppress(OSError, UnicodeError):
            self.address = str(socket.getaddrinfo(self.address, None, type=socket.SOCK_STREAM)[0][4][0])
            name_servers.reverse_name(self.address)
        self._was_slow, self.is_done = time.monotonic() - started_s > name_servers.SLOW_S, True
        post(lambda: None)

    @property
    def is_slow(self) -> bool:
        """Whether the look-up took, or has taken so far, longer than ``name_servers.SLOW_S``."""
        return self._was_slow if self.is_done else time.monotonic() > self.deadline


class NameServersPart(Part):
    """The look-up of the store of each attempt; of an address once."""

    def __init__(self, node: NodeServices) -> None:
        super().__init__(node)
        self._lookups: dict[str, NameLookup] = {}
        self._round: Round | None = None

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """As ``Part.on_attempt``."""
        self._round, address = round_, round_.master_addr
        if address not in self._lookups:
            self._lookups[address] = NameLookup(address, self._node.post)

    def default_environ(self) -> Mapping[str, str]:
        """As ``Part.default_environ``: waits for the look-up for a short time."""
        if self._round is None:
            return {}
        lookup = self._lookups[self._round.master_addr]
        self._node.wait(lambda: lookup.is_done or self._node.is_stopping(), lookup.deadline)
        if not lookup.is_slow:
            return {}
        if not lookup.was_told:
            lookup.was_told = True
            self._node.outbox.send(self._notice(lookup.address, self._round.node_rank))
        return _IMPATIENT

    def _notice(self, address: str, node_rank: int) -> Notice:
        """What is slow, and the line that avoids it. If one launcher leads all nodes, that of the first is enough."""
        spec = self._node.spec
        advice = name_servers.advice(address, "NAME" if node_rank else spec.host)
        text = (
            f"no name server answers for {address}, and torch waits for one at every start: {advice} on every node; "
            "until then workers wait 1 s for a name server (RES_OPTIONS)"
        )
        return Notice(text, 1 if node_rank and spec.one_launcher_leads else 0)


part = NameServersPart
