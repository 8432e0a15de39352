"""A node's member of the rendezvous: passes records between the node's agent and the c10d store.

Runs in a process that the forkserver starts; on the node that serves that store it is also the coordinator. Records are
JSON texts in numbered keys below ``ddplaunch/<token>/``: one inbox, which the coordinator reads, and one outbox per
node, which the coordinator writes. They are signed; those without a valid signature, and malformed ones, are ignored. A
blocked store call cannot be interrupted and blocks all other calls of its client. So every thread has a separate
client, and the agent kills the process at the end.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import Counter
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, BinaryIO

from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes, NodeSilent
from ddplaunch.protocol.rendezvous import (
    FROM_NODE,
    FROM_SERVER,
    TO_NODE,
    MemberReady,
    MemberSpec,
    NodeJoined,
    NodeLeft,
    RecordsRejected,
    RendezvousLost,
    RoundFormed,
    RunCannotStart,
)
from ddplaunch.rendezvous.connect import (
    JoinRefused,
    agreed_id,
    claim_node_index,
    connect,
    enter,
    first_line,
    read_note,
)
from ddplaunch.rendezvous.plain_store import RunRefused
from ddplaunch.rendezvous.store import beat_key, key_prefix, lost_key
from ddplaunch.rounds.coordinator import Coordinator, Outgoing
from ddplaunch.rounds.verdict import Restarts
from ddplaunch.system import signals
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed import TCPStore

    from ddplaunch.rendezvous.store import Signer

HEARTBEAT_S = 1.0
_POLL_S = 0.1
_GAP = "gap"
"""Written by the coordinator's node in place of a record that will never be written."""

_FOR_EVER = timedelta(days=3650)


def _end_of(work: Callable[[], None]) -> str:
    """Call ``work`` of a thread until it ends. Returns why it did; empty if the agent has closed its channel."""
    try:
        work()
    except RuntimeError as error:  # An error of torch's store: its process, its node or the network has failed.
        return first_line(error)
    except (OSError, wire.ProtocolError) as error:
        return f"malformed record: {error}"
    except Exception as error:  # A bug, or a file of the package that an upgrade has removed meanwhile.
        return f"{type(error).__name__}: {error}"
    return ""  # Only ``Member._read_agent`` returns.


def serve(channel_fd: int, listen_fd: int) -> None:
    """Run until the agent closes its channel or the rendezvous store is lost.

    Args:
        channel_fd: socket to the agent, which first sends a ``MemberSpec``.
        listen_fd: listening socket for the rendezvous store; not used unless this node serves it.
    """
    signals.leave_to_agent()
    reader, writer = os.fdopen(channel_fd, "rb"), os.fdopen(os.dup(channel_fd), "wb")

    def send(record: object) -> None:
        writer.write(wire.encode(record))
        writer.flush()

    try:
        received = wire.read_record(reader, (MemberSpec,))
        if received is None:
            return
        spec = received[0]
        store, address, port = connect(spec, listen_fd, send)
        signer = enter(spec, store)
        index, rank_holder = claim_node_index(spec, store)
    except RunRefused as error:
        send(RunCannotStart(error.record.reason, error.record.exit_code))
        return
    except JoinRefused as error:
        send(RendezvousLost(str(error), refused_hint=error.hint))
        return
    except (RuntimeError, wire.ProtocolError) as error:
        send(RendezvousLost(first_line(error)))
        return
    ready = MemberReady(index, address, port, *agreed_id(signer), rank_holder)
    Member(spec, ready, store, signer, reader, send).run()


def _coordinator(spec: MemberSpec, server: int) -> Coordinator:
    settings = spec.rendezvous
    return Coordinator(
        server,
        settings.min_nodes,
        settings.max_nodes,
        Restarts(spec.max_restarts, settings.restarts_so_far),
        settings.participants,
        settings.attempt,
        settings.departing,
        settings.spares,
    )


class Member:
    """The main thread and its state. Only the main thread uses ``store``; the reading threads use clones."""

    def __init__(
        self,
        spec: MemberSpec,
        ready: MemberReady,
        store: TCPStore,
        signer: Signer,
        reader: BinaryIO,
        send_to_agent: Callable[[object], None],
    ) -> None:
        self._ready = ready
        self._index = ready.node_index
        settings = spec.rendezvous
        self._last_call_s, self._silent_after_s = settings.last_call_timeout_s, settings.silent_after_s
        self._store, self._signer = store, signer
        self._reader = reader
        self._send_to_agent = send_to_agent
        self._prefix = key_prefix(spec)
        self._lost_key, self._beat_key = partial(lost_key, spec), partial(beat_key, spec)
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._is_over = False
        self._coordinator = _coordinator(spec, self._index) if settings.is_server else None
        self._token = settings.token
        self._one_launcher_leads = spec.one_launcher_leads
        self._reports_turned_away = settings.is_server and not spec.one_launcher_leads
        self._iterations = 0
        """Of the main loop: ``_watch_main_loop`` sees whether it goes on."""
        self._rejected_count = self._reported_count = 0
        """Records without a valid signature, and how many of them the agent knows of."""

        # Of the coordinator.
        self._last_call = NEVER
        """Until when nodes that are not needed may join the round."""
        self._heartbeats: dict[int, tuple[int, float]] = {}
        """By node: its last counter, and when that was new."""
        self._joined_times_s: dict[int, float] = {}
        """By node: when its last NodeJoined had arrived, by the wall clock."""
        self._sent_counts: Counter[int] = Counter()
        """By node: number of records in its outbox."""
        self._last_waiting_nodes: list[Outgoing] = []
        self._inbox_count_key = f"{self._prefix}/in/count"
        """The key with the highest number of the inbox that a node has taken."""
        self._inbox_count = 0
        """That number when a stranger's record, or a gap, was found: those up to it are not waited for."""
        self._awaited, self._gap = 1, (0, 0.0)
        """Number of the inbox that is read next; and the number that is missing, with the time since when it is."""

    def run(self) -> None:
        """Pass records and send heartbeats until the agent closes its channel or the rendezvous store is lost."""
        self._store.set_timeout(timedelta(seconds=max(1.0, self._silent_after_s)))
        self._start(self._read_agent, "agent")
        self._start(partial(self._read_box, f"to/{self._index}", TO_NODE, self._send_to_agent), "outbox")
        if self._coordinator:
            self._start(partial(self._read_box, "in", FROM_NODE, self._coordinate), "inbox")
        else:
            self._start(self._watch_main_loop, "watch")
        self._send_to_agent(self._ready)
        try:
            self._loop()
        except RuntimeError as error:
            self._send_to_agent(RendezvousLost(first_line(error)))

    def _loop(self) -> None:
        next_heartbeat = time.monotonic()
        while True:
            if function := self._mailbox.get(min(next_heartbeat, self._last_call)):
                function()
            if self._is_over:
                return
            now, self._iterations = time.monotonic(), self._iterations + 1
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                self._exchange_heartbeats(now)
                self._send_waiting_nodes()
                self._report_rejected()
                self._report_turned_away()
                self._close_gap(now)
            if now >= self._last_call and self._coordinator:
                self._last_call = NEVER
                self._send_to_nodes(self._coordinator.last_call_expired())

    def _on_thread_ended(self, reason: str) -> None:
        """``reason``: as ``_end_of``."""
        self._is_over = True
        if reason:
            self._send_to_agent(RendezvousLost(reason))

    def _coordinate(self, record: object) -> None:
        coordinator = self._coordinator
        if coordinator is None:
            return
        if isinstance(record, NodeJoined):
            self._heartbeats[record.node_index] = (-1, time.monotonic())
            self._joined_times_s[record.node_index] = time.time()
        elif isinstance(record, NodeLeft):
            self._forget(record.node_index)
        elif isinstance(record, AssignNodes):  # Missing heartbeats of removed nodes are not a loss.
            for index in set(coordinator.assigned) - set(record.participants):
                self._heartbeats.pop(index, None)
        self._send_and_time(coordinator, coordinator.receive(record))

    def _on_silent(self, coordinator: Coordinator, node_index: int) -> None:
        self._forget(node_index)
        self._send_and_time(coordinator, coordinator.on_gone(node_index))
        # A launcher that still has a connection to the node would wait for it for ever.
        if self._one_launcher_leads:
            self._send_to_agent(NodeSilent(self._token, node_index, self._silent_after_s))

    def _forget(self, node_index: int) -> None:
        """The node has left, or is lost: its heartbeats are not missed, and another may take its place."""
        self._heartbeats.pop(node_index, None)
        if not self._one_launcher_leads:
            self._store.set(self._lost_key(node_index), "1")

    def _send_and_time(self, coordinator: Coordinator, records: Sequence[Outgoing]) -> None:
        """Send what the coordinator says, and start or end the time for the last call."""
        self._send_to_nodes([self._with_times(sent) for sent in records])
        if not coordinator.has_enough:
            self._last_call = NEVER
        elif self._last_call == NEVER:
            self._last_call = time.monotonic() + self._last_call_s

    def _with_times(self, sent: Outgoing) -> Outgoing:
        """For the node's comparison of its clock with that of this one. It is only shown: no decision depends on it."""
        formed, joined_s = sent.record, self._joined_times_s.get(sent.node_index, 0.0)
        if not isinstance(formed, RoundFormed) or self._one_launcher_leads:
            return sent
        return Outgoing(sent.node_index, replace(formed, joined_time_s=joined_s, time_s=time.time()))

    def _send_to_coordinator(self, record: object) -> None:
        key = f"{self._prefix}/in/{self._store.add(self._inbox_count_key, 1)}"
        self._store.set(key, self._signer.sign(key, wire.encode(record).decode("ascii")))

    def _send_to_nodes(self, records: Sequence[Outgoing]) -> None:
        """Write all records in one call to the store: with one call each, thousands of nodes would stop very late."""
        texts: dict[str, str] = {}
        record, text = None, ""
        for outgoing in records:
            if outgoing.record is not record:
                record, text = outgoing.record, wire.encode(outgoing.record).decode("ascii")
            node_index = outgoing.node_index
            self._sent_counts[node_index] += 1
            key = f"{self._prefix}/to/{node_index}/{self._sent_counts[node_index]}"
            texts[key] = self._signer.sign(key, text)
        if texts:
            self._store.multi_set(list(texts), list(texts.values()))  # type: ignore[attr-defined]

    def _exchange_heartbeats(self, now: float) -> None:
        """Send this node's heartbeat; on the coordinator's node, detect lost nodes.

        A heartbeat is a counter. Its age is measured on this process's clock: clocks of hosts are never compared.
        """
        self._store.add(self._beat_key(self._index), 1)
        for index, (count, since) in list(self._heartbeats.items()):
            current = self._store.add(self._beat_key(index), 0)
            if current != count:
                self._heartbeats[index] = (current, now)
            elif now - since > self._silent_after_s and self._coordinator and self._coordinator.may_take_part(index):
                self._on_silent(self._coordinator, index)

    def _close_gap(self, now: float) -> None:
        """Give up a record of the inbox whose number was taken, and that is not written for ``_silent_after_s``.

        A node that is killed between the two leaves a gap, at which the inbox would wait for ever. A node that lives
        has sent no heartbeat for as long, since its main thread does both: it is lost.
        """
        if self._coordinator is None:
            return
        number, since = self._awaited, self._gap[1]
        taken = self._store.add(self._inbox_count_key, 0)
        if number != self._gap[0] or taken < number:
            self._gap = (number, now)
        elif now - since > self._silent_after_s:
            self._inbox_count = max(self._inbox_count, taken)
            self._store.set(f"{self._prefix}/in/{number}", _GAP)

    def _count_rejected(self) -> None:
        self._rejected_count += 1

    def _report_rejected(self) -> None:
        """Report the number of rejected records if it has changed since the last heartbeat."""
        if self._rejected_count != self._reported_count:
            self._reported_count = self._rejected_count
            self._send_to_agent(RecordsRejected(self._rejected_count))

    def _report_turned_away(self) -> None:
        """Report the first node of another run or secret that came to this endpoint."""
        endpoint = f"{self._ready.server_address}:{self._ready.port}"
        if self._reports_turned_away and (notice := read_note(self._store, endpoint)):
            self._reports_turned_away = False
            self._send_to_agent(notice)

    def _send_waiting_nodes(self) -> None:
        """Send the list of waiting nodes if it has changed since the last heartbeat."""
        waiting = self._coordinator.waiting_nodes() if self._coordinator else []
        if waiting != self._last_waiting_nodes:
            self._last_waiting_nodes = waiting
            self._send_to_nodes(waiting)

    # Threads, each with one blocking call.

    def _start(self, target: Callable[[], None], name: str) -> None:
        in_thread(name, lambda: self._mailbox.post(partial(self._on_thread_ended, _end_of(target))))

    def _watch_main_loop(self) -> None:
        """Report the rendezvous as lost when the main loop hangs.

        A call to a store whose host lost power or network never returns. Counts sleeps, not clock time, so that a
        suspended process reports no loss.
        """
        hung_s, seen = 0.0, -1
        while hung_s < self._silent_after_s + 2 * HEARTBEAT_S:
            time.sleep(HEARTBEAT_S)
            hung_s, seen = (0.0 if seen != self._iterations else hung_s + HEARTBEAT_S), self._iterations
        self._send_to_agent(RendezvousLost(f"the node that serves the rendezvous has not answered for {hung_s:g} s"))

    def _read_agent(self) -> None:
        while (received := wire.read_record(self._reader, (*FROM_NODE, *FROM_SERVER))) is not None:
            handle = self._coordinate if isinstance(received[0], FROM_SERVER) else self._send_to_coordinator
            self._mailbox.post(partial(handle, received[0]))

    def _read_box(self, box: str, allowed: tuple[type, ...], handle: Callable[[Any], None]) -> None:
        store, number = self._store.clone(), 0  # type: ignore[attr-defined]
        store.set_timeout(_FOR_EVER)
        while True:
            number += 1
            record = self._await_record(store, box, number, allowed)
            if record is not None:
                self._mailbox.post(partial(handle, record))

    def _await_record(self, store: TCPStore, box: str, number: int, allowed: tuple[type, ...]) -> object | None:
        """Wait for a record with a valid signature, of one of the ``allowed`` types.

        None for a number of the inbox that a stranger has filled, or that is a gap: no node will replace its value.
        """
        key = f"{self._prefix}/{box}/{number}"
        seen: bytes | None = None
        if box == "in":
            self._awaited = number
        while (record := self._verified(key, value := store.get(key), allowed)) is None:
            if value not in (seen, _GAP.encode()):
                seen = value
                self._mailbox.post(self._count_rejected)
            if box == "in" and number <= self._inbox_count:
                return None
            # A node that takes this number will replace the value; ``_POLL_S`` is enough for one that just took it.
            inbox_count = store.add(self._inbox_count_key, 0)
            time.sleep(_POLL_S)
            self._inbox_count = max(self._inbox_count, inbox_count)
        return record

    def _verified(self, key: str, value: bytes, allowed: tuple[type, ...]) -> object | None:
        line = None if value == _GAP.encode() else self._signer.verify(key, value)
        with contextlib.suppress(wire.ProtocolError):
            return wire.decode(line, allowed) if line else None
        return None
