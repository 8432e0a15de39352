"""The first part of ``--check``: an agent on every node tells what is there, also where the nodes cannot meet."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddplaunch import run_folder
from ddplaunch.launcher import asking, preparation
from ddplaunch.launcher.asking import Asked
from ddplaunch.launcher.check_page import CheckedNode
from ddplaunch.launcher.console import Console
from ddplaunch.launcher.handles import FromNode
from ddplaunch.launcher.starting import starter_for
from ddplaunch.mailbox import Mailbox
from ddplaunch.node_check import Listening, LookAtNode, NodeLook, NodesReached, ReachNodes, TellTime, TimeTold

if TYPE_CHECKING:
    from collections.abc import Callable

    from ddplaunch.config import LaunchConfig
    from ddplaunch.launcher.failures import HostFailure

_MAX_OTHERS = 63
"""How many each node connects to, beside the first: all of all would be too many for large jobs."""


@dataclass
class _Asked(Asked):
    """A node and what is known of it."""

    node: CheckedNode | None = None
    is_told: bool = False
    is_reached: bool = False
    asked_s: float = 0.0


def look(config: LaunchConfig) -> tuple[list[CheckedNode], list[HostFailure]]:
    """What all nodes tell, in the order of the hosts, and why others cannot be used.

    Raises:
        LaunchError: this machine has no room for it.
    """
    with contextlib.closing(_Nodes(config)) as nodes:
        nodes.ask(LookAtNode(len(config.hosts) > 1, config.local_addr, config.interface))
        nodes.wait(lambda asked: asked.is_told)
        nodes.reach()
        nodes.wait(lambda asked: asked.is_reached)
        return nodes.checked(), nodes.failures()


class _Nodes:
    """All nodes that are asked, whose agents are started as a run's; an event comes with the launcher's time."""

    def __init__(self, config: LaunchConfig) -> None:
        self._mailbox: Mailbox[tuple[float, object]] = Mailbox()
        self._all: list[_Asked] = []
        run_id = run_folder.new_run_id()
        console = Console(preparation.style(config, None))
        self._starter = starter_for(config, run_id, run_id, None, console, self._post)

    def _post(self, event: object) -> None:
        self._mailbox.post((time.time(), event))

    def ask(self, order: LookAtNode) -> None:
        """Start an agent on every node."""
        for index, host in enumerate(self._starter.hosts):
            self._all.append(_Asked(host, self._starter.start(index)))
            self._all[-1].handle.send(order)

    def reach(self) -> None:
        """Have all connect to the first, and each to some that follow it."""
        useful = [asked for asked in self._all if asked.node and not asked.failure]
        there = [
            Listening(asked.name, asked.node.look.addresses, asked.node.look.port) for asked in useful if asked.node
        ]
        for place, asked in enumerate(useful):
            ring = (there[(place + step) % len(there)] for step in range(1, min(len(there), _MAX_OTHERS + 1)))
            others = {node.host: node for node in (there[0], *ring) if node.host != asked.name}
            asked.is_reached = not others
            asked.deadline = time.monotonic() + asking.ANSWER_S
            asked.handle.send(ReachNodes(tuple(others.values())))

    def wait(self, is_done: Callable[[_Asked], bool]) -> None:
        """Until all have answered, or cannot."""
        asking.wait(lambda: [asked for asked in self._all if not (asked.failure or is_done(asked))], self._take_next)

    def _take_next(self, deadline: float) -> bool:
        received = self._mailbox.get(deadline)
        if received and isinstance(received[1], FromNode):
            _take(self._all[received[1].index], received[0], received[1].event)
        return received is not None

    def checked(self) -> list[CheckedNode]:
        """Those that have answered."""
        return [asked.node for asked in self._all if asked.node and not asked.failure]

    def failures(self) -> list[HostFailure]:
        """Those that have not."""
        return [asked.failure for asked in self._all if asked.failure]

    def close(self) -> None:
        """End all agents."""
        asking.close(self._all)
        self._starter.close()


def _take(asked: _Asked, now_s: float, event: object) -> None:
    match event:
        case NodeLook():
            asked.node = CheckedNode(host=asked.name, look=event)
            asked.asked_s = time.time()
            asked.handle.send(TellTime())
        case TimeTold(time_s=time_s) if asked.node:
            half_s = (now_s - asked.asked_s) / 2
            asked.node = replace(asked.node, clock_s=time_s - asked.asked_s - half_s, clock_error_s=half_s)
            asked.is_told = True
        case NodesReached(failed=failed) if asked.node:
            asked.node = replace(asked.node, unreached=failed)
            asked.is_reached = True
        case _:
            asked.hear(event)
