"""A node's member of the rendezvous: a process that carries messages between its agent and the c10d store.

On the node that owns the endpoint it also serves the store and is the coordinator. Messages are JSON records below
``ddplaunch/<token>/``: an inbox that the coordinator reads in order, numbered by the store's ``add``, and an outbox per
node, numbered by the coordinator. A blocked store call cannot be interrupted and holds up every other call of its
client, so each thread has a client of its own, and the process is simply killed at the end.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch import protocol
from ddplaunch.mailbox import Mailbox
from ddplaunch.rendezvous.coordinator import Coordinator, Sent
from ddplaunch.rendezvous.entry import Refused, connect, first_line, prefix, take_place
from ddplaunch.rendezvous.outboxes import Outboxes
from ddplaunch.rounds import (
    FROM_NODE,
    TO_NODE,
    MemberReady,
    MemberSpec,
    NodeGone,
    NodeJoined,
    RendezvousLost,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch.distributed import TCPStore

BEAT_S = 1.0
_FOR_EVER = timedelta(days=3650)
_NEVER = float("inf")


@dataclass(frozen=True)
class FromAgent:
    """What this node's agent says to the coordinator."""

    record: object


@dataclass(frozen=True)
class ForCoordinator:
    """A message in the inbox."""

    record: object


@dataclass(frozen=True)
class ForNode:
    """A message in this node's outbox."""

    record: object


@dataclass(frozen=True)
class Gone:
    """A channel has ended: the store's, with its reason, or the agent's, without."""

    reason: str


def serve(channel_fd: int, listen_fd: int) -> None:
    """Run until the agent or the store is gone. ``listen_fd`` counts where the spec says that this node serves."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    reader, writer = os.fdopen(channel_fd, "rb"), os.fdopen(os.dup(channel_fd), "wb")

    def tell(record: object) -> None:
        writer.write(protocol.encode(record))
        writer.flush()

    try:
        received = protocol.read_record(reader, (MemberSpec,))
        if received is None:
            return
        spec = received[0]
        store, reached, port = connect(spec, listen_fd, tell)
        index = take_place(spec, store)
    except (RuntimeError, Refused, protocol.ProtocolError) as error:
        tell(RendezvousLost(first_line(error), isinstance(error, Refused)))
        return
    Member(spec, MemberReady(index, reached, port), store, reader, writer).run()


class Member:
    """The main thread's state; it alone uses ``store``, the other threads use clones."""

    def __init__(
        self, spec: MemberSpec, ready: MemberReady, store: TCPStore, reader: BinaryIO, writer: BinaryIO
    ) -> None:
        self._ready = ready
        self._index = ready.node_index
        self._last_call_s = spec.last_call_s
        self._lost_after_s = spec.lost_after_s
        self._store = store
        self._reader = reader
        self._writer = writer
        self._prefix = prefix(spec)
        self._mailbox: Mailbox[object] = Mailbox()
        self._coordinator: Coordinator | None = None
        if spec.serves:
            nodes = (self._index, spec.min_nodes, spec.max_nodes)
            self._coordinator = Coordinator(*nodes, spec.max_restarts, spec.seats, spec.attempt, spec.restarts)
        self._last_call = _NEVER
        self._beats: dict[int, tuple[int, float]] = {}
        self._hosts: dict[int, str] = {}
        self._is_led = bool(spec.seats)
        self._turns = 0
        self._outboxes = Outboxes(store, self._prefix)
        self._gathered: list[Sent] = []

    def run(self) -> None:
        """Carry messages and beat until a channel ends."""
        self._store.set_timeout(timedelta(seconds=max(1.0, self._lost_after_s)))
        self._start(self._read_agent, "agent")
        self._start(self._read_outbox, "outbox")
        if self._coordinator:
            self._start(self._read_inbox, "inbox")
        elif not self._is_led:  # A launcher hears by itself of a node that is silent, and has the place moved.
            self._start(self._watch, "watch")
        self._tell(self._ready)
        try:
            self._loop()
        except RuntimeError as error:
            self._tell(RendezvousLost(first_line(error)))

    def _loop(self) -> None:
        next_beat = time.monotonic()
        while True:
            event = self._mailbox.get(min(next_beat, self._last_call))
            if isinstance(event, Gone):
                if event.reason:
                    self._tell(RendezvousLost(event.reason))
                return
            if event is not None:
                self._apply(event)
            now, self._turns = time.monotonic(), self._turns + 1
            if now >= next_beat:
                next_beat = now + BEAT_S
                self._beat(now)
                self._tell_gathered()
            if now >= self._last_call and self._coordinator:
                self._last_call = _NEVER
                self._outboxes.send(self._coordinator.last_call())

    def _apply(self, event: object) -> None:
        match event:
            case FromAgent(record=record):
                self._post(f"{self._prefix}/in", record)
            case ForNode(record=record):
                self._tell(record)
            case ForCoordinator(record=record):
                self._coordinate(record)

    def _coordinate(self, message: object) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        if isinstance(message, NodeJoined):
            self._beats[message.node_index] = (-1, time.monotonic())
            self._hosts[message.node_index] = message.host
        elif isinstance(message, NodeGone):
            self._beats.pop(message.node_index, None)
        self._outboxes.send(coordinator.receive(message))
        if not coordinator.has_enough:
            self._last_call = _NEVER
        elif self._last_call == _NEVER:
            self._last_call = time.monotonic() + self._last_call_s

    def _post(self, box: str, record: object) -> None:
        number = self._store.add(f"{box}/count", 1)
        self._store.set(f"{box}/{number}", protocol.encode(record).decode("ascii"))

    def _tell(self, record: object) -> None:
        self._writer.write(protocol.encode(record))
        self._writer.flush()

    def _beat(self, now: float) -> None:
        """Count on; as coordinator look who has not, on this one clock: no two hosts' clocks are ever compared."""
        self._store.add(f"{self._prefix}/beat/{self._index}", 1)
        for index, (count, since) in list(self._beats.items()):
            current = self._store.add(f"{self._prefix}/beat/{index}", 0)
            if current != count:
                self._beats[index] = (current, now)
            elif now - since > self._lost_after_s:
                self._coordinate(NodeGone(index))
                if self._is_led:  # Its launcher may well hear of it, and would wait for it here for ever.
                    self._tell(RendezvousLost(f"{self._hosts[index]} was silent for {self._lost_after_s:g} s"))

    def _tell_gathered(self) -> None:
        """Once a second at most, and only what has changed."""
        gathered = self._coordinator.gathered() if self._coordinator else []
        if gathered != self._gathered:
            self._gathered = gathered
            self._outboxes.send(gathered)

    # Threads, with one blocking call each.

    def _start(self, target: Callable[[], None], name: str) -> None:
        threading.Thread(target=self._until_gone, args=(target,), name=name, daemon=True).start()

    def _until_gone(self, target: Callable[[], None]) -> None:
        try:
            target()
            self._mailbox.post(Gone(""))
        except RuntimeError as error:  # torch's store errors: its process, its node or the network is gone.
            self._mailbox.post(Gone(first_line(error)))
        except (OSError, protocol.ProtocolError) as error:
            self._mailbox.post(Gone(f"not understood: {error}"))

    def _watch(self) -> None:
        """Until the loop stands still: a call to a store whose machine has lost its power or network never returns.

        Counted, so that a time in which this process itself stood still is none.
        """
        silent_s, seen = 0.0, -1
        while silent_s < self._lost_after_s + 2 * BEAT_S:
            time.sleep(BEAT_S)
            silent_s, seen = (0.0 if seen != self._turns else silent_s + BEAT_S), self._turns
        self._tell(RendezvousLost(f"the node that serves it has not answered for {silent_s:g} s"))

    def _read_agent(self) -> None:
        while (received := protocol.read_record(self._reader, FROM_NODE)) is not None:
            self._mailbox.post(FromAgent(received[0]))

    def _read_inbox(self) -> None:
        for text in self._messages(f"{self._prefix}/in"):
            self._mailbox.post(ForCoordinator(protocol.decode(text, FROM_NODE)))

    def _read_outbox(self) -> None:
        for text in self._messages(f"{self._prefix}/to/{self._index}"):
            self._mailbox.post(ForNode(protocol.decode(text, TO_NODE)))

    def _messages(self, box: str) -> Iterator[bytes]:
        store, number = self._store.clone(), 0  # type: ignore[attr-defined]
        store.set_timeout(_FOR_EVER)
        while True:
            number += 1
            yield store.get(f"{box}/{number}")
