"""A node's member of the rendezvous: passes records between the node's agent and the c10d store.

Runs in a process that the forkserver starts, and that the agent kills at the end. On the node that serves that store it
also runs the coordinator (``CoordinatorRunner``). A blocked store call cannot be interrupted and blocks all other calls
of its client. So every thread has a separate client:

===============  =============================  ========================================================================
thread           blocks in                      what happens then
===============  =============================  ========================================================================
main             ``Mailbox.get``                calls what the others post; each second a heartbeat
agent            a read of the agent's channel  posts each record: for the coordinator's box; one of
                                                ``FROM_SERVING_AGENT`` to the coordinator at once
node box         ``Box.records``                posts each record of the coordinator, for the agent
coordinator box  ``Box.records``                only on the node that serves: posts each record for the coordinator
watch            a sleep of a second            only on the other nodes: tells the agent that the main thread hangs
===============  =============================  ========================================================================

Each thread posts its end as well, with which the member ends.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import AssignNodes, NodeSilent
from ddplaunch.protocol.rendezvous import (
    FROM_NODE,
    FROM_SERVING_AGENT,
    TO_NODE,
    MemberReady,
    MemberSpec,
    NodeLeft,
    NodeReady,
    RecordsRejected,
    RendezvousLost,
    RoundFormed,
)
from ddplaunch.rendezvous.boxes import GAP, Box, coordinator_count_key, send_to_coordinator
from ddplaunch.rendezvous.connect import (
    JoinRefused,
    agreed_id,
    claim_node_index,
    connect,
    enter,
    first_line,
    read_note,
)
from ddplaunch.rendezvous.plain_store import ServerCannotJoin
from ddplaunch.rendezvous.store import Signer, beat_key, key_prefix, lost_key
from ddplaunch.rounds.coordinator import Coordinator, Outgoing
from ddplaunch.rounds.restarts import Restarts
from ddplaunch.system import signals
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from torch.distributed import TCPStore


HEARTBEAT_S = 1.0
_FOR_EVER = timedelta(days=3650)


def _why_ended(work: Callable[[], None]) -> str:
    """Call ``work`` of a thread until it ends. Returns why it did; empty if there is nothing to say."""
    try:
        work()
    except RuntimeError as error:  # An error of torch's store: its process, its node or the network has failed.
        return first_line(error)
    except (OSError, wire.ProtocolError) as error:
        return f"malformed record: {error}"
    except Exception as error:  # A bug, or a file of the package that an upgrade has removed meanwhile.
        return f"{type(error).__name__}: {error}"
    return ""  # The agent has closed its channel, or ``_watch_main_loop`` has said why.


def serve(channel_fd: int, listen_fd: int) -> None:
    """Run until the agent closes its channel or the rendezvous store is lost; then end the process.

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
    except ServerCannotJoin as error:
        send(error.record)
    except JoinRefused as error:
        send(RendezvousLost(str(error), refused_hint=error.hint))
    except (RuntimeError, wire.ProtocolError) as error:
        send(RendezvousLost(first_line(error)))
    else:
        ready = MemberReady(index, address, port, *agreed_id(signer), rank_holder)
        Member(spec, ready, store, signer, reader, send).run()
    # A thread that returns from a call of torch's store at the end of the interpreter would abort the process.
    os._exit(0)


class Member:
    """The main thread and its state. Only the main thread uses ``store``; the threads that read boxes use clones."""

    def __init__(
        self,
        spec: MemberSpec,
        ready: MemberReady,
        store: TCPStore,
        signer: Signer,
        reader: BinaryIO,
        send_to_agent: Callable[[object], None],
    ) -> None:
        self._ready, self._store, self._signer = ready, store, signer
        self._reader, self._send_to_agent = reader, send_to_agent
        self._silent_after_s = spec.rendezvous.silent_after_s
        self._nonce = "" if spec.rendezvous.is_server else os.urandom(16).hex()
        """With that of the rendezvous, it makes the key of the records to this node: those of an earlier run, which
        somebody may serve again, are invalid. The node that serves has made that of the rendezvous itself."""
        self._prefix, self._beat_key = key_prefix(spec), beat_key(spec, ready.node_index)
        self._mailbox: Mailbox[Callable[[], None]] = Mailbox()
        self._is_over = False
        self._iterations = 0
        """Of the main loop: ``_watch_main_loop`` sees whether it goes on."""
        self._rejected_count = self._told_count = 0
        """Records without a valid signature, and how many of them the agent knows of."""
        self._node_box = self._box(f"to/{ready.node_index}", TO_NODE, signer.for_node(self._nonce))
        self._coordinator_box = self._box("in", FROM_NODE, signer, coordinator_count_key(self._prefix))
        self._runner: CoordinatorRunner | None = None
        if spec.rendezvous.is_server:
            self._runner = CoordinatorRunner(spec, ready, store, signer, self._coordinator_box, send_to_agent)

    def _box(self, name: str, allowed: tuple[type, ...], signer: Signer, count_key: str = "") -> Box:
        on_rejected = partial(self._mailbox.post, self._on_rejected)
        return Box(f"{self._prefix}/{name}", signer, allowed, on_rejected, count_key)

    def run(self) -> None:
        """Pass records and send heartbeats until the agent closes its channel or the rendezvous store is lost."""
        # For the connections of clones. A call of a store whose host has gone has no limit, see ``_watch_main_loop``.
        self._store.set_timeout(timedelta(seconds=max(1.0, self._silent_after_s)))
        self._start("agent", self._read_agent)
        self._start("node box", partial(self._read_box, self._node_box, self._send_to_agent))
        if self._runner:
            self._start("coordinator box", partial(self._read_box, self._coordinator_box, self._runner.receive))
        else:
            self._start("watch", self._watch_main_loop)
        self._send_to_agent(self._ready)
        try:
            self._loop()
        except RuntimeError as error:
            self._send_to_agent(RendezvousLost(first_line(error)))

    def _loop(self) -> None:
        next_heartbeat = time.monotonic()
        while True:
            if function := self._mailbox.get(min(next_heartbeat, self._runner.last_call if self._runner else NEVER)):
                function()
            if self._is_over:
                return
            now, self._iterations = time.monotonic(), self._iterations + 1
            if now >= next_heartbeat:
                next_heartbeat = now + HEARTBEAT_S
                self._on_heartbeat(now)
            if self._runner:
                self._runner.end_last_call(now)

    def _on_heartbeat(self, now: float) -> None:
        self._store.add(self._beat_key, 1)
        if self._runner:
            self._runner.on_heartbeat(now)
        if self._rejected_count != self._told_count:
            self._told_count = self._rejected_count
            self._send_to_agent(RecordsRejected(self._rejected_count))

    # What the other threads post.

    def _on_thread_ended(self, reason: str) -> None:
        """``reason``: as ``_why_ended``."""
        self._is_over = True
        if reason:
            self._send_to_agent(RendezvousLost(reason))

    def _on_rejected(self) -> None:
        self._rejected_count += 1

    def _on_agent_record(self, record: object) -> None:
        if isinstance(record, NodeReady):
            record = replace(record, nonce=self._nonce)
        if not isinstance(record, FROM_SERVING_AGENT):
            send_to_coordinator(self._store, self._signer, self._prefix, record)
        elif self._runner:
            self._runner.receive(record)

    # The other threads, each with one blocking call.

    def _start(self, name: str, target: Callable[[], None]) -> None:
        in_thread(name, lambda: self._mailbox.post(partial(self._on_thread_ended, _why_ended(target))))

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
        while (received := wire.read_record(self._reader, (*FROM_NODE, *FROM_SERVING_AGENT))) is not None:
            self._mailbox.post(partial(self._on_agent_record, received[0]))

    def _read_box(self, box: Box, handle: Callable[[object], None]) -> None:
        store = self._store.clone()  # type: ignore[attr-defined]
        store.set_timeout(_FOR_EVER)
        for record in box.records(store):
            self._mailbox.post(partial(handle, record))


class CoordinatorRunner:
    """Passes the records of all nodes to the ``Coordinator``, sends what it says, and finds nodes that are silent.

    Only on the node that serves the rendezvous; main thread only.

    Attributes:
        last_call: until when nodes that are not needed may join the round, as ``time.monotonic()``.
    """

    def __init__(
        self,
        spec: MemberSpec,
        ready: MemberReady,
        store: TCPStore,
        signer: Signer,
        box: Box,
        send_to_agent: Callable[[object], None],
    ) -> None:
        settings = spec.rendezvous
        self._spec, self._settings = spec, settings
        self._endpoint = f"{ready.server_address}:{ready.port}"
        self._store, self._signer, self._box, self._send_to_agent = store, signer, box, send_to_agent
        self._coordinator = Coordinator(
            server_index=ready.node_index,
            min_nodes=settings.min_nodes,
            max_nodes=settings.max_nodes,
            restarts=Restarts(spec.max_restarts, settings.restart_count),
            assigned=settings.assigned,
            attempt=settings.attempt,
            departing=settings.departing,
            spares=settings.spares,
        )
        self.last_call = NEVER
        self._heartbeats: dict[int, tuple[bytes, float]] = {}
        """By node: its last counter, and when that was new. The store has the counters of all these nodes."""
        self._joined_times_s: dict[int, float] = {}
        """By node: when its last NodeReady had arrived, by the wall clock."""
        self._signers: dict[int, Signer] = {}
        """By node that has joined."""
        self._sent_counts: Counter[int] = Counter()
        """By node: number of records in its box."""
        self._told_waiting: list[Outgoing] = []
        self._has_told_note = False
        self._missing = 0, 0.0
        """The number that the coordinator's box awaited at the last heartbeat, and since when no record is there."""

    # Records.

    def receive(self, record: object) -> None:
        """A record for the coordinator: from its box, or from this node's agent."""
        coordinator = self._coordinator
        if isinstance(record, NodeReady):
            self._store.add(beat_key(self._spec, record.node_index), 0)
            self._heartbeats[record.node_index] = (b"", time.monotonic())
            self._joined_times_s[record.node_index] = time.time()
            self._signers[record.node_index] = self._signer.for_node(record.nonce)
        elif isinstance(record, NodeLeft):
            self._forget(record.node_index)
        elif isinstance(record, AssignNodes):  # Missing heartbeats of removed nodes are not a loss.
            for index in set(coordinator.assigned) - set(record.assigned):
                self._heartbeats.pop(index, None)
        self._send_and_time(coordinator.receive(record))

    def _forget(self, node_index: int) -> None:
        """The node has left, or is lost: its heartbeats are not missed, and another may take its place."""
        self._heartbeats.pop(node_index, None)
        if not self._spec.one_launcher_leads:
            self._store.set(lost_key(self._spec, node_index), "1")

    def _send_and_time(self, records: Sequence[Outgoing]) -> None:
        """Send what the coordinator says, and start or end the time for the last call."""
        self._send([self._with_times(sent) for sent in records])
        if not self._coordinator.has_enough:
            self.last_call = NEVER
        elif self.last_call == NEVER:
            self.last_call = time.monotonic() + self._settings.last_call_timeout_s

    def _with_times(self, sent: Outgoing) -> Outgoing:
        """For the node's comparison of its clock with that of this one. It is only shown: no decision depends on it."""
        node_index, formed = sent
        if not isinstance(formed, RoundFormed) or self._spec.one_launcher_leads:
            return sent
        joined_s = self._joined_times_s.get(node_index, 0.0)
        return node_index, replace(formed, joined_time_s=joined_s, time_s=time.time())

    def _send(self, records: Sequence[Outgoing]) -> None:
        """Write all records in one call to the store: with one call each, thousands of nodes would stop very late."""
        texts: dict[str, str] = {}
        before, text = None, ""
        for node_index, record in records:
            if record is not before:
                before, text = record, wire.encode(record).decode("ascii")
            self._sent_counts[node_index] += 1
            key = f"{key_prefix(self._spec)}/to/{node_index}/{self._sent_counts[node_index]}"
            texts[key] = self._signers.get(node_index, self._signer).sign(key, text)
        if texts:
            self._store.multi_set(list(texts), list(texts.values()))  # type: ignore[attr-defined]

    # Times.

    def end_last_call(self, now: float) -> None:
        """Start a round without the nodes that are not needed, once their time is over."""
        if now >= self.last_call:
            self.last_call = NEVER
            self._send(self._coordinator.last_call_expired())

    def on_heartbeat(self, now: float) -> None:
        """What is looked at once per heartbeat."""
        self._find_silent(now)
        self._tell_waiting_nodes()
        self._tell_note()
        self._close_gap(now)

    def _find_silent(self, now: float) -> None:
        """A heartbeat is a counter. Its age is by this process's clock: clocks of hosts are never compared."""
        known = list(self._heartbeats.items())
        keys = [beat_key(self._spec, index) for index, _ in known]  # One call for each would take half of the time.
        for (index, (count, since)), current in zip(known, self._store.multi_get(keys) if keys else (), strict=True):
            if current != count:
                self._heartbeats[index] = (current, now)
            elif now - since > self._settings.silent_after_s and self._coordinator.may_take_part(index):
                self._on_silent(index)

    def _on_silent(self, node_index: int) -> None:
        self._forget(node_index)
        self._send_and_time(self._coordinator.on_gone(node_index))
        # A launcher that still has a connection to the node would wait for it for ever.
        if self._spec.one_launcher_leads:
            self._send_to_agent(NodeSilent(self._settings.token, node_index, self._settings.silent_after_s))

    def _tell_waiting_nodes(self) -> None:
        """Send the list of waiting nodes if it has changed since the last heartbeat."""
        waiting = self._coordinator.waiting_nodes()
        if waiting != self._told_waiting:
            self._told_waiting = waiting
            self._send(waiting)

    def _tell_note(self) -> None:
        """Report the first node of another run or secret that came to this endpoint."""
        if self._spec.one_launcher_leads or self._has_told_note:
            return
        if notice := read_note(self._store, self._endpoint):
            self._has_told_note = True
            self._send_to_agent(notice)

    def _close_gap(self, now: float) -> None:
        """Give up a record whose number a node has taken, and that is not written for ``silent_after_s``.

        A node that is killed between the two leaves a gap, at which the coordinator's box would wait for ever. A node
        that lives has sent no heartbeat for as long, since its main thread does both: it is lost. The thread that reads
        the box finds ``GAP`` in place of the record, and goes on with the next number.
        """
        number, (missing, since) = self._box.awaited, self._missing
        taken = self._store.add(coordinator_count_key(key_prefix(self._spec)), 0)
        if number != missing or taken < number:
            self._missing = number, now
        elif now - since > self._settings.silent_after_s:
            self._store.set(self._box.key(number), GAP)
