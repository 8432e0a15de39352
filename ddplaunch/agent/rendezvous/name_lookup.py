"""Look-up of the name of the workers' store: whether a name server answers, and what to do if none does.

Runs in the agent. torch looks up the name of the peer of a connection and waits for the answer, by default 10 s and
more, at every start. The look-up runs in a thread, which wakes the agent at its end. Must not change how this process
resolves names.
"""

from __future__ import annotations

import contextlib
import socket
import time
from typing import TYPE_CHECKING

from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import network
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.protocol.specs import AgentSpec

_IMPATIENT = {"RES_OPTIONS": "timeout:1 attempts:1"}
"""The resolver of glibc then waits for a name server once, for 1 s (resolv.conf(5))."""


class NameLookup:
    """The look-up of one address.

    Attributes:
        deadline: time of ``time.monotonic()`` after which the look-up is slow.
        is_done: the look-up has ended, with or without a name.
    """

    def __init__(self, address: str, post: Callable[[object], None]) -> None:
        """Start the look-up of an address or of the address of a host; at its end ``post`` wakes the agent."""
        self.deadline = time.monotonic() + network.SLOW_LOOKUP_S
        self.is_done = self._was_slow = self._was_told = False
        self._address = address
        in_thread("name look-up", lambda: self._run(post))

    def _run(self, post: Callable[[object], None]) -> None:
        started_s = time.monotonic()  # On a busy machine a thread may start late.
        with contextlib.suppress(OSError, UnicodeError):
            self._address = str(socket.getaddrinfo(self._address, None, type=socket.SOCK_STREAM)[0][4][0])
            network.reverse_name(self._address)
        self._was_slow, self.is_done = time.monotonic() - started_s > network.SLOW_LOOKUP_S, True
        post(lambda: None)

    @property
    def is_slow(self) -> bool:
        """Whether the look-up took, or has taken so far, longer than ``network.SLOW_LOOKUP_S``."""
        return self._was_slow if self.is_done else time.monotonic() > self.deadline

    @property
    def worker_environ(self) -> dict[str, str]:
        """Default variables of workers that connect to the address."""
        return dict(_IMPATIENT) if self.is_slow else {}

    def notice(self, spec: AgentSpec, node_rank: int) -> Notice | None:
        """The message for the user, if the look-up is slow: what to do about it. Once, and None after that."""
        if not self.is_slow or self._was_told:
            return None
        self._was_told = True
        # If one launcher has all nodes, the message of the first node is enough.
        is_further = node_rank and spec.launcher_assigns_rendezvous
        return Notice(self._message("NAME" if node_rank else spec.host), 1 if is_further else 0)

    def _message(self, name: str) -> str:
        """What is slow, and the line that avoids it. ``name`` is the address's."""
        line = f"{network.mapped(self._address)} {'localhost' if network.is_loopback(self._address) else name}"
        return (
            f"no name server answers for {self._address}, and torch waits for one at every start: add the line "
            f"`{line}` to /etc/hosts on every node; until then workers wait 1 s for a name server (RES_OPTIONS)"
        )
