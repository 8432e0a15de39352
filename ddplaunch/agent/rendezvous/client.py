"""Client of one rendezvous: starts this node's member, sends to it, and keeps what the coordinator says by it.

Runs in the agent, main thread only; a daemon thread reads what the member says, and posts each record and the end. Must
not decide anything about rounds: the coordinator does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.agent.helper_output import HelperOutput
from ddplaunch.errors import NODE_LOST, RENDEZVOUS, LaunchError
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import (
    EndpointOpen,
    NeedsRendezvous,
    NodeSilent,
    Notice,
    OrderToNodes,
    ReportOfNode,
    RunIdAgreed,
)
from ddplaunch.protocol.rendezvous import (
    FROM_MEMBER,
    AllNodesLeft,
    ListenForWorkersStore,
    MemberReady,
    MemberSpec,
    NodeCannotJoin,
    NodeLeft,
    NodeReady,
    NoFreePlace,
    RecordsRejected,
    RendezvousLost,
    RendezvousNotFound,
    RoundFormed,
    StopRound,
    WaitingNodes,
    WorkersStoreListens,
)
from ddplaunch.protocol.results import RoundVerdict
from ddplaunch.system import network
from ddplaunch.text import plural
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from ddplaunch.agent.parts import NodeServices
    from ddplaunch.config import RendezvousConfig

LOG = "rendezvous.log"
"""File in the run folder: what the member has written."""

_ENDED = "this node's member of the rendezvous has ended"
_READ_LOG = f"See {LOG} in the run folder; without an error there, the process has crashed or was killed."
_NOT_HOSTED = (
    "The node that has the endpoint's address serves the rendezvous, if the port is free: start ddplaunch on that node "
    "too, or give another address. --rdzv-conf read_timeout=SECONDS waits longer."
)
_NOT_STARTED = (
    "Is ddplaunch started on the node that serves the rendezvous, and is the port open? "
    "--rdzv-conf join_timeout=SECONDS waits longer."
)
_NOT_JOINED = (
    "Start the others with the same --rdzv-endpoint and --rdzv-id. A node joins when it has imported torch and "
    "--preload; --rdzv-conf join_timeout=SECONDS waits longer."
)
_NOT_BACK = (
    "Start ddplaunch with the same --rdzv-endpoint and --rdzv-id on each lost node that works again, or on another in "
    "its place; --rdzv-conf join_timeout=SECONDS waits longer."
)
_NOT_REACHED = (
    "Check that every node can reach every other at any port; --local-addr and --interface select the network."
)


class RendezvousClient:
    """This node's part in one rendezvous.

    Attributes:
        ready: what the member has reported; None until this node has joined.
        address: address at which other nodes connect to this one; empty until it has joined.
        is_server: this node serves the rendezvous.
        endpoint_socket: bound, on the node that serves, until the member has it.
        waiting_nodes: the nodes that wait for the next round, as last reported.
        has_no_place: the run has all nodes that it needs (NoFreePlace); this node waits until one is lost or leaves.
        formed: the round for which this node has joined last; None until it is formed.
        verdict: on that round, or on the run if it ends without this node; None until it has arrived.
        cannot_start: why the run does not start; None as far as is known.
        stopped_attempt: number of the last round that the coordinator has stopped; -1: none.
        clock_ahead_s: as ``Rendezvous.clock_ahead_s``.
        all_left: all other nodes have left, so this one, which serves the rendezvous, may end.
        lost_reason: why the rendezvous is lost; None while it is not.
        has_left: this node has told the others that it leaves: after the last verdict, or earlier, so that they
            continue without it.
    """

    def __init__(self, node: NodeServices, config: RendezvousConfig) -> None:
        """Bind the endpoint's socket if the endpoint is on this node.

        Raises:
            LaunchError: this node must serve the rendezvous and cannot, or the endpoint's host name cannot be resolved.
        """
        self._node, self._spec, self._host = node, node.spec, node.spec.host
        if config.interface and not config.local_addr:
            config = replace(config, local_addr=network.address_of(self._host, config.interface))
        self.config = config
        self.ready: MemberReady | None = None
        self.formed: RoundFormed | None = None
        self.verdict: RoundVerdict | None = None
        self.cannot_start: NodeCannotJoin | None = None
        self.lost_reason: str | None = None
        self.has_no_place = self.has_left = self.all_left = False
        self.stopped_attempt = -1
        self.clock_ahead_s = float("-inf"), float("inf")
        self.waiting_nodes = WaitingNodes(self._host, 1, (len(config.assigned) or config.min_nodes) - 1)
        self.address = ""
        self._search_failure: str | None = None
        self._rejected_count, self._joined_time_s, self._why_departs = 0, 0.0, ""
        self.endpoint_socket, self._addresses = network.bind_endpoint(self._host, config)
        self.is_server = self.endpoint_socket is not None
        self._port: int = self.endpoint_socket.getsockname()[1] if self.endpoint_socket else config.port
        if not self.is_server and len(self._addresses) == 1:
            self._route_address()  # Fails now, not after a wait, if the host name cannot be resolved.
        self._store_listener: socket.socket | None = None
        self._channel: BinaryIO | None = None
        self._socket: socket.socket | None = None

    @property
    def index(self) -> int | None:
        """This node's number in the rendezvous; None until it has joined."""
        return self.ready.node_index if self.ready else None

    @property
    def endpoint(self) -> str:
        """The endpoint, for messages."""
        ports = () if self.is_server or self.ready else self.config.other_ports
        return f"{self._addresses[0]}:{self._port}" + (f" (or port {', '.join(map(str, ports))})" if ports else "")

    @property
    def default_environ(self) -> dict[str, str]:
        """Variables of the workers for the network through which this node has joined."""
        return network.interface_environ(self.address, is_chosen=bool(self.config.local_addr))

    # What the agent says.

    def connect(self) -> None:
        """Start the member's process, once torch is imported; its output goes into the run folder."""
        if self.is_server and self._spec.one_launcher_leads:
            self._node.outbox.send(EndpointOpen(self.config.token, self._addresses, self._port))
        ours, theirs = socket.socketpair()
        self._channel, self._socket = ours.makefile("wb"), ours
        stream = ours.makefile("rb")
        self.send(self.member_spec())  # Records wait in the socket until the process has started.
        null = os.open(os.devnull, os.O_RDWR)
        endpoint_fd = self.endpoint_socket.detach() if self.endpoint_socket else os.dup(null)
        self.endpoint_socket = None
        file = Path(self._spec.node_dir, LOG) if self._spec.node_dir else None
        output = HelperOutput(f"the member of the rendezvous on {self._host}", file, self._node.outbox.send)
        self._node.start_member([null, output.fd, os.dup(output.fd), theirs.detach(), endpoint_fd])
        in_thread("rendezvous", lambda: self._read_all(stream))

    def member_spec(self) -> MemberSpec:
        """What a process needs that speaks to the rendezvous."""
        config, spec = self.config, self._spec
        completed = replace(
            config,
            server_addresses=self._addresses,
            port=self._port,
            other_ports=() if self.is_server else config.other_ports,
            is_server=self.is_server,
        )
        return MemberSpec(
            rendezvous=completed,
            node_id=f"{self._host} {os.urandom(8).hex()}",
            run_id=spec.run_id,
            max_restarts=spec.max_restarts,
            one_launcher_leads=spec.one_launcher_leads,
        )

    def join(
        self, local_world_size: int, attempt: int, why_departs: str, restart_count: int, saved: str | None = None
    ) -> None:
        """Join the next round; the parameters are as in NodeReady. ``formed`` and ``verdict`` are then its own."""
        if not self.ready:
            return
        if self.formed or self.verdict or not self._joined_time_s:  # Else it is said again, and may come too late.
            self._joined_time_s = time.time()
        self.formed = self.verdict = None
        self._why_departs = why_departs
        index, address = self.ready.node_index, self.ready.server_address
        self.send(NodeReady(index, self._host, local_world_size, address, attempt, why_departs, restart_count, saved))

    def take_store_listener(self) -> socket.socket | None:
        """The bound socket of the workers' store, on the first node of the round; the caller must close it."""
        listener, self._store_listener = self._store_listener, None
        return listener

    def send(self, record: object) -> None:
        """Send to the member, for the coordinator. Does nothing if the member has ended: an event reports that."""
        if self._channel:
            with contextlib.suppress(OSError):
                self._channel.write(wire.encode(record))
                self._channel.flush()

    def leave(self) -> None:
        """Report to the other nodes that this one leaves the run; then the member ends, unless it serves them."""
        self.has_left = True
        if self.ready:
            self.send(NodeLeft(self.ready.node_index))
            if self._socket and not self.is_server:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def tell_rejected(self) -> None:
        """At the end of the run, tell the user how many records of others were ignored, if there were some."""
        if self._rejected_count:
            count = plural(self._rejected_count, "record")
            self._node.outbox.send(Notice(f"{self._host} has ignored {count} from outside this run"))

    def close(self) -> None:
        """Close the channel, which ends the member's process."""
        if self._channel:
            with contextlib.suppress(OSError):  # Buffered records for a process that has ended.
                self._channel.close()
            self._channel = None
        for each in (self._socket, self.endpoint_socket, self._store_listener):
            if each:
                each.close()

    # What the member says.

    def _read_all(self, stream: BinaryIO) -> None:
        """In a thread: have the main thread handle all records."""
        try:
            with stream, contextlib.suppress(OSError, wire.ProtocolError):
                while (received := wire.read_record(stream, FROM_MEMBER)) is not None:
                    self._node.post(partial(self._handle, received[0]))
        finally:
            self._node.post(partial(self._handle, RendezvousLost(_ENDED)))

    def _handle(self, record: object) -> None:
        if self._channel is None:  # The agent has left this rendezvous meanwhile.
            return
        match record:
            case MemberReady():
                self._on_ready(record)
            case WaitingNodes():
                self._on_waiting_nodes(record)
            case NoFreePlace(hosts=hosts):
                self._on_no_free_place(hosts)
            case RendezvousNotFound(reason=reason, limit_s=limit_s):
                self._on_not_found(reason, limit_s)
            case ListenForWorkersStore(attempt=attempt, address=address):
                self._listen(attempt, address)
            case RoundFormed():
                self.formed, self.has_no_place = record, False
                if record.time_s:
                    self.clock_ahead_s = self._joined_time_s - record.joined_time_s, time.time() - record.time_s
            case StopRound(attempt=attempt):
                # As an order below: one that was sent before, and that stops the workers otherwise, comes first.
                self._node.post(partial(setattr, self, "stopped_attempt", attempt))
            case RoundVerdict():
                self.verdict = record
            case NodeCannotJoin():
                self.cannot_start = record
            case AllNodesLeft():
                self.all_left = True
            case ReportOfNode() | NodeSilent() | Notice():
                self._node.outbox.send(record)
            case OrderToNodes(order=order):
                self._node.post(order)
            case RecordsRejected(count=count):
                self._on_rejected(count)
            case RendezvousLost():
                self._on_lost(record)

    def _on_ready(self, ready: MemberReady) -> None:
        """Raises a LaunchError if this node has no address for connections of other nodes."""
        self.ready, self._port = ready, ready.port
        self.address = self.config.local_addr or (ready.server_address if self.is_server else self._route_address())
        if ready.rank_holder:
            rank = self.config.node_index
            text = f"warning: {self._host} and {ready.rank_holder} have the same --node-rank, {rank}: nodes with an "
            self._node.outbox.send(Notice(f"{text}equal one are numbered in the order of arrival, after the others"))
        if not self._spec.one_launcher_leads:
            self._node.outbox.send(RunIdAgreed(ready.run_id))

    def _route_address(self) -> str:
        """This node's address on its route to the node that serves the rendezvous.

        Raises:
            LaunchError: that node's host name cannot be resolved here.
        """
        server = self.ready.server_address if self.ready else self._addresses[0]
        return network.route_address(self._host, server, self._port)

    def _listen(self, attempt: int, address: str) -> None:
        """Bind the socket of the workers' store, at ``address`` unless it is empty or the user chose another.

        Raises:
            LaunchError: the address is not this node's.
        """
        if self._store_listener is None:
            self.address = self.config.local_addr or address or self.address
            self._store_listener = network.listen(self._host, network.bindable(self.address), 0)
        port = self._store_listener.getsockname()[1]
        self.send(WorkersStoreListens(self.index or 0, attempt, self.address, port))

    def _on_lost(self, lost: RendezvousLost) -> None:
        if self.lost_reason is None:
            self.lost_reason = lost.reason
            if self._spec.one_launcher_leads and not self.has_left:
                self._node.outbox.send(NeedsRendezvous(self.config.token, lost.reason))
        if lost.refused_hint:
            raise LaunchError(f"{self.endpoint}: {lost.reason}", lost.refused_hint, RENDEZVOUS)

    # Messages to the user.

    def tell_progress(self, text: str) -> None:
        """Send a message for the user, shown only with --verbose if the launcher reports the progress of all nodes."""
        self._node.outbox.send(Notice(text, 1 if self._spec.one_launcher_leads else 0))

    def _on_waiting_nodes(self, waiting: WaitingNodes) -> None:
        self.waiting_nodes = waiting
        each_tells = not self._spec.one_launcher_leads  # Else the message of one node is enough.
        if waiting.missing and (self.is_server or each_tells):
            missing = plural(waiting.missing, "more node")
            self.tell_progress(f"waiting at {self.endpoint} for {missing}; here: {waiting.hosts}")
        elif not waiting.missing and waiting.count < self.config.max_nodes and each_tells:
            here = f"{waiting.count} of up to {plural(self.config.max_nodes, 'node')} are here"
            limit = f"{self.config.last_call_timeout_s:g} s"
            self.tell_progress(f"{here}; the workers start within {limit}, or once all have come")

    def _on_no_free_place(self, hosts: tuple[str, ...]) -> None:
        text = (
            f"the run at {self.endpoint} has all nodes that it needs ({', '.join(hosts)}); "
            f"{self._host} waits until a node is lost"
        )
        if self._why_departs:
            text = f"{self._host} takes no part: {self._why_departs}; it waits until the run ends, or needs it"
        if not self.has_no_place:
            self._node.outbox.send(Notice(text))
        self.has_no_place = True

    def _on_not_found(self, reason: str, limit_s: float) -> None:
        self._search_failure = reason
        where = f"{self.endpoint}{network.why_not_served_here(self.config)}"
        text = f"{network.with_addresses(self._host)} has not found the rendezvous at {where}: {reason}"
        self.tell_progress(f"{text}; the search goes on for up to {limit_s:g} s")

    def _on_rejected(self, count: int) -> None:
        if not self._rejected_count:
            text = f"{self._host} ignores records that a process outside this run writes into the rendezvous at "
            self._node.outbox.send(Notice(f"{text}{self.endpoint}; a firewall would keep it away"))
        self._rejected_count = count

    def unreachable_error(self) -> LaunchError:
        """The error when the rendezvous is lost or was never found."""
        if self.ready:
            return LaunchError(
                f"{self._host} has lost the rendezvous at {self.endpoint}: {self.lost_reason}",
                f"This node's address on the route to it is {self._route_address()}. Does ddplaunch still run on the "
                "node that serves the rendezvous, and is the network between the nodes up?",
                RENDEZVOUS,
            )
        if self.lost_reason == _ENDED:
            hint = _READ_LOG if self._spec.node_dir else ""
            return LaunchError(f"{self._host} cannot join the other nodes: {_ENDED}", hint, NODE_LOST)
        reason = self.lost_reason or self._search_failure or "no node has answered there in time"
        where = f"{self.endpoint}{network.why_not_served_here(self.config)}"
        text = f"{network.with_addresses(self._host)} cannot join the other nodes at {where}: {reason}"
        return LaunchError(text, _NOT_HOSTED if self.config.is_server is None else _NOT_STARTED, RENDEZVOUS)

    def too_few_error(self) -> LaunchError:
        """The error when no round was formed in time, or this node has not found the rendezvous."""
        if not self.ready and not self.is_server:
            return self.unreachable_error()
        timeout_s, waiting = self.config.join_timeout_s, self.waiting_nodes
        if not self.ready:
            message = f"{self._host} serves the rendezvous at {self.endpoint}, which did not open in {timeout_s:g} s"
            return LaunchError(message, "", RENDEZVOUS)
        if not waiting.missing:
            timeout_s += self.config.last_call_timeout_s
            message = f"after {timeout_s:g} s no attempt has begun at {self.endpoint}: {waiting.hosts}"
            return LaunchError(message, _NOT_REACHED, RENDEZVOUS)
        return LaunchError(
            f"{f'lost: {waiting.lost}; ' if waiting.lost else ''}after {timeout_s:g} s only these nodes have joined "
            f"at {self.endpoint}: {waiting.hosts}; {waiting.count + waiting.missing} are needed",
            _NOT_BACK if waiting.lost else _NOT_REACHED if self._spec.one_launcher_leads else _NOT_JOINED,
            RENDEZVOUS,
        )
