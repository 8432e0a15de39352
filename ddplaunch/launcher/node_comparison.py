"""Compares the nodes of a run: their hardware, once all have told theirs, and their clocks with that of this machine.

Runs in the launcher, in the main thread; where each node has a launcher, in that of the node that serves the
rendezvous. A node that joins later is compared with the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.health import differences

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.protocol.health import NodeHardware

_EXACT_S = 1.0
"""A clock that is known so exactly is not looked at again: it may be set while the job runs."""


class NodeComparison:
    """Shows each difference once."""

    def __init__(self, show: Callable[[str, int], None]) -> None:
        self._show = show
        self._known: dict[int, tuple[str, NodeHardware]] = {}
        self._is_compared = False
        self._has_clock: set[int] = set()

    def on_hardware(self, index: int, host: str, hardware: NodeHardware, participants: Sequence[int]) -> None:
        """Node ``index`` has told what it has; ``participants`` are all nodes of the job now."""
        if index in self._known:
            return
        self._known[index] = host, hardware
        if self._known.keys() >= set(participants):
            nodes = dict(self._known[other] for other in (*participants, index))
            for text in differences.between(nodes, host if self._is_compared else ""):
                self._show(text, Level.ALWAYS)
            self._is_compared = True

    def on_clock(self, index: int, host: str, least_s: float, most_s: float) -> None:
        """The clock of node ``index`` is ahead of this machine's by so many seconds at least, and at most."""
        if index in self._has_clock:
            return
        text = differences.clock_text(host, differences.certain_offset(least_s, most_s))
        if text:
            self._show(text, Level.ALWAYS)
        if text or most_s - least_s < _EXACT_S:
            self._has_clock.add(index)
