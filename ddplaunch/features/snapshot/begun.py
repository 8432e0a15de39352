"""Agents that have got the code become those of the run: no second login, no second process on each host.

Runs in the launcher. ``Begun`` is in place of the run's Transport. Any thread posts; the main thread does the rest.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from ddplaunch.launcher import setup
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.transport.handle import FromNode, NodeFacts, discard_output

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.runs.asked_nodes import QueriedNode
    from ddplaunch.protocol.launcher_agent import Output
    from ddplaunch.transport.handle import AgentHandle, Post, Purpose, WriteOutput

_CLOSE_S = 5.0


class Begun:
    """The Transport of a run, used before the run, too. What it does is as in ``transport.handle.Transport``.

    Attributes:
        run_tag: the run tag, which agents have from their start.
        transport: that starts them.
    """

    is_remote = True

    def __init__(self, config: LaunchConfig, run_tag: str, post: Post) -> None:
        """``post`` gets all events until ``hand_over``. Raises LaunchError, as ``setup.transport_for``."""
        self.run_tag = run_tag
        self._lock = threading.Lock()
        self._post = post
        self._output: WriteOutput = discard_output
        self._said: dict[int, list[object]] = {}
        self._kept: dict[int, list[object]] = {}
        """By node, the events that the run is to get when it starts the node."""
        self._handles: dict[int, AgentHandle] = {}
        self.transport = setup.transport_for(config, run_tag, self._write, self._on_event)
        self.node_names = self.transport.node_names

    def hand_over(self, nodes: Sequence[QueriedNode], count: int) -> None:
        """Keep all events from now on, and the first ``count`` agents; the others end, which are spares."""
        with self._lock:
            self._kept = {index: self._said.get(index, []) for index in range(len(nodes))}
        self._handles = {index: node.handle for index, node in enumerate(nodes[:count])}
        for node in nodes[count:]:
            node.handle.end_input()
        for node in nodes[count:]:
            node.handle.close(_CLOSE_S)

    def __call__(
        self, _config: LaunchConfig, _hosts: object, _tag: str, output: WriteOutput, post: Post, *_: Any
    ) -> Begun:
        """The run takes the agents over: as the constructor of a Transport. Returns self."""
        self._output, self._post = output, post
        return self

    def start(self, index: int, purpose: Purpose = "run") -> AgentHandle:
        """The agent of node ``index`` that runs already, or a new one."""
        with self._lock:
            events = self._kept.pop(index, [])
            if handle := self._handles.pop(index, None):
                for event in events:
                    self._post(event)
        return handle or self.transport.start(index, purpose)

    def sweep(self, index: int, on_event: Callable[[object], object]) -> AgentHandle | None:
        return self.transport.sweep(index, on_event)

    def start_together(self) -> None:
        self.transport.start_together()

    def close(self) -> None:
        """Also ends the agents that no run has started."""
        for handle in self._handles.values():
            handle.end_input()
        for handle in self._handles.values():
            handle.close(_CLOSE_S)
        self.transport.close()

    # Any thread.

    def _write(self, header: Output, data: bytes) -> None:
        self._output(header, data)

    def _on_event(self, event: object) -> None:
        with self._lock:
            index = event.index if isinstance(event, FromNode) else -1
            if index in self._kept:
                self._kept[index].append(event)
                return
            if isinstance(event, FromNode) and isinstance(event.event, (NodeFacts, Notice)):
                self._said.setdefault(index, []).append(event)
            self._post(event)
