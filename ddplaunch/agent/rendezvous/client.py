"""Client of one rendezvous: starts this node's member process, exchanges records with it, resolves addresses.

Runs in the agent, main thread only, which a daemon thread has handle the member's records, and its end. Must not decide
anything about rounds: the coordinator does.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent.workers.output import HelperOutput
from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.protocol import wire
from ddplaunch.protocol.rendezvous import (
    FROM_MEMBER,
    MemberReady,
    MemberSpec,
    NodeLeft,
    RendezvousLost,
    WaitingNodes,
)
from ddplaunch.system import network
from ddplaunch.text import plural
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import BinaryIO

    from ddplaunch.agent.rendezvous.single_node import AgentCallbacks
    from ddplaunch.config import RendezvousConfig
    from ddplaunch.protocol.specs import AgentSpec

LOG = "rendezvous.log"
"""File in the run folder: what the member has written."""

_ENDED = "this node's member of the rendezvous has ended"
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
_NOT_REACHED = (
    "Check that every node can reach every other at any port; --local-addr and --interface select the network."
)


class RendezvousClient:
    """This node's part in one rendezvous.

    Attributes:
        ready: what the member has reported; None until it has joined.
        index: this node's number in the rendezvous; None until it has joined.
        server_address: address at which this node connected to the rendezvous; empty until ``index`` is set.
        address: address at which other nodes connect to this one; empty until ``index`` is set.
        is_server: this node serves the rendezvous.
        waiting_nodes: the nodes that wait for the next round, as last reported.
        is_spare: the run has all nodes that it needs; this node waits until one is lost.
        lost_reason: why the rendezvous is lost; None while it is not.
        has_left: this node has left the run; the other nodes continue without it.
        rejected_count: records that this node has ignored because others than the nodes of the run wrote them.
    """

    def __init__(self, spec: AgentSpec, config: RendezvousConfig) -> None:
        """Bind the endpoint's socket if the endpoint is on this node.

        Raises:
            LaunchError: this node must serve the rendezvous and cannot, or the endpoint's host name cannot be resolved.
        """
        self._spec, self._host = spec, spec.host
        if config.interface and not config.local_addr:
            config = replace(config, local_addr=network.address_of(spec.host, config.interface))
        self.config = config
        self.ready: MemberReady | None = None
        self.index: int | None = None
        self.lost_reason: str | None = None
        self._search_failure: str | None = None
        self.is_spare = self.has_left = False
        self.rejected_count = 0
        self.waiting_nodes = WaitingNodes(spec.host, 1, (len(config.participants) or config.min_nodes) - 1)
        self._listener, self.addresses = network.bind_endpoint(spec.host, config)
        self.is_server = self._listener is not None
        self.port: int = self._listener.getsockname()[1] if self._listener else config.port
        self.server_address = self.address = ""
        if not self.is_server and len(self.addresses) == 1:
            self.route_address()  # Fails now, not after a wait, if the host name cannot be resolved.
        self._join_until, self._others_import = float("inf"), False
        self._channel: BinaryIO | None = None
        self._socket: socket.socket | None = None

    @property
    def endpoint(self) -> str:
        """The endpoint, for messages."""
        ports = () if self.is_server or self.index is not None else self.config.other_ports
        return f"{self.addresses[0]}:{self.port}" + (f" (or port {', '.join(map(str, ports))})" if ports else "")

    @property
    def worker_environ(self) -> dict[str, str]:
        """Variables of the workers for the network through which this node has joined."""
        if not (name := network.interface_of(self.address)):
            return {}
        names = {"GLOO_SOCKET_IFNAME": name}
        if self.config.local_addr:
            names["NCCL_SOCKET_IFNAME"] = f"={name}"
        return names

    def connect(self, callbacks: AgentCallbacks, handle: Callable[[object], None]) -> None:
        """Start the member's process, once torch is imported; its output goes into the run folder.

        The main thread calls ``handle`` with each record of the member.
        """
        ours, theirs = socket.socketpair()
        self._channel, self._socket = ours.makefile("wb"), ours
        stream = ours.makefile("rb")
        self.send(self._member_spec())  # Records wait in the socket until the process has started.
        null = os.open(os.devnull, os.O_RDWR)
        endpoint_fd = self._listener.detach() if self._listener else os.dup(null)
        self._listener = None
        file = Path(self._spec.node_dir, LOG) if self._spec.node_dir else None
        output = HelperOutput(f"the member of the rendezvous on {self._host}", file, callbacks.send)
        callbacks.start_member([null, output.fd, os.dup(output.fd), theirs.detach(), endpoint_fd])
        self.start_clock()
        self._others_import = self._spec.launcher_assigns_rendezvous and not self.config.attempt
        in_thread("rendezvous", lambda: _read_all(stream, lambda record: callbacks.post(partial(handle, record))))

    def on_ready(self, event: MemberReady) -> None:
        """This node has joined the rendezvous.

        Raises:
            LaunchError: this node has no address for connections of other nodes.
        """
        self.ready, self.index = event, event.node_index
        self.server_address, self.port = event.server_address, event.port
        self.address = self.config.local_addr or (event.server_address if self.is_server else self.route_address())

    def route_address(self) -> str:
        """This node's address on its route to the node that serves the rendezvous.

        Raises:
            LaunchError: that node's host name cannot be resolved here.
        """
        return network.route_address(self._host, self.server_address or self.addresses[0], self.port)

    def listen(self, address: str) -> socket.socket:
        """A bound socket for the workers' store, at ``address`` unless it is empty or the user chose another.

        Raises:
            LaunchError: the address is not this node's.
        """
        self.address = self.config.local_addr or address or self.address
        return network.listen(self._host, network.bindable(self.address), 0)

    def send(self, record: object) -> None:
        """Send to the member, for the coordinator. Does nothing if the member has ended: an event reports that."""
        if self._channel:
            with contextlib.suppress(OSError):
                self._channel.write(wire.encode(record))
                self._channel.flush()

    def leave(self) -> None:
        """Report to the other nodes that this one leaves the run; then the member ends, unless it serves them."""
        self.has_left = True
        if self.index is not None:
            self.send(NodeLeft(self.index))
            if self._socket and not self.is_server:
                with contextlib.suppress(OSError):
                    self._socket.shutdown(socket.SHUT_WR)

    def start_clock(self) -> None:
        """The time for meeting the other nodes begins: this node has imported torch, or its attempt has ended."""
        self._join_until, self._others_import = time.monotonic() + self.config.join_timeout_s, False

    def join_deadline(self) -> float:
        """Deadline of the wait for a round, as ``time.monotonic()``.

        Once MIN nodes have come, they wait for more. A spare may wait for the whole run. Before the first attempt, a
        launcher that leads all nodes watches those that still import torch.
        """
        has_joined = self.index is not None
        if self.is_spare or (has_joined and self._others_import):
            return float("inf")
        has_last_call = has_joined and not self.waiting_nodes.missing
        return self._join_until + (self.config.last_call_timeout_s if has_last_call else 0.0)

    # Messages to the user; those of errors have a hint.

    def on_waiting_nodes(self, event: WaitingNodes) -> str:
        """The message while nodes are waited for; empty if none is needed."""
        self.waiting_nodes = event
        # If one launcher has all nodes, the message of one node is enough.
        is_alone = not self._spec.launcher_assigns_rendezvous
        if event.missing and (self.is_server or is_alone):
            return self._waiting_message()
        may_come = not event.missing and event.count < self.config.max_nodes
        return self._last_call_message() if may_come and is_alone else ""

    def _waiting_message(self) -> str:
        """The message while other nodes have not joined."""
        count = plural(self.waiting_nodes.missing, "more node")
        return f"waiting at {self.endpoint} for {count}; here: {self.waiting_nodes.hosts}"

    def _last_call_message(self) -> str:
        """The message while there are enough nodes, and more could join."""
        here = f"{self.waiting_nodes.count} of up to {plural(self.config.max_nodes, 'node')} are here"
        return f"{here}; the workers start within {self.config.last_call_timeout_s:g} s, or once all have come"

    def spare_message(self, hosts: tuple[str, ...], departs: str) -> str:
        """The message when this node becomes a spare; ``departs``: because it is taken out of service."""
        if departs:
            return f"{self._host} is left: {departs}; it waits until the run ends, or needs it"
        return (
            f"the run at {self.endpoint} has all nodes that it needs ({', '.join(hosts)}); "
            f"{self._host} waits until a node is lost"
        )

    def equal_ranks_message(self, rank_holder: str) -> str:
        """The message when another node has this one's node rank."""
        return (
            f"warning: {self._host} and {rank_holder} have the same --node-rank, {self.config.node_index}: nodes with "
            "an equal one are numbered in the order of arrival, after the others"
        )

    def other_limit_message(self, limit: int) -> str:
        """The message when the node that serves the rendezvous has another --max-restarts than this one."""
        return (
            f"warning: --max-restarts is {self._spec.max_restarts} on {self._host}, and {limit} on the node that "
            f"serves the rendezvous at {self.endpoint}: {limit} counts"
        )

    def on_rejected(self, count: int) -> str:
        """The message when the first record without a valid signature was ignored; empty after that."""
        is_first, self.rejected_count = not self.rejected_count, count
        if not is_first:
            return ""
        return (
            f"{self._host} ignores records that a process outside this run writes into the rendezvous at "
            f"{self.endpoint}; a firewall would keep it away"
        )

    def rejected_total(self) -> str:
        """The message at the end of a run in which records were ignored."""
        return f"{self._host} has ignored {plural(self.rejected_count, 'record')} from outside this run"

    def search_message(self, reason: str, limit_s: float) -> str:
        """The message while no node has answered at the endpoint. Keeps ``reason`` for a later error."""
        self._search_failure = reason
        return (
            f"{self._host_with_addresses} has not found the rendezvous at {self.endpoint}{self._why_not_served_here}: "
            f"{reason}; the search goes on for up to {limit_s:g} s"
        )

    def unreachable_error(self) -> LaunchError:
        """The error when the rendezvous is lost or was never found."""
        if self.index is not None:
            return LaunchError(
                f"{self._host} has lost the rendezvous at {self.endpoint}: {self.lost_reason}",
                f"This node's address on the route to it is {self.route_address()}. Does ddplaunch still run on the "
                "node that serves the rendezvous, and is the network between the nodes up?",
                RENDEZVOUS,
            )
        reason = self.lost_reason or self._search_failure or "no node has answered there in time"
        return LaunchError(
            f"{self._host_with_addresses} cannot join the other nodes at {self.endpoint}{self._why_not_served_here}: "
            f"{reason}",
            _NOT_HOSTED if self.config.is_server is None else _NOT_STARTED,
            RENDEZVOUS,
        )

    def too_few_error(self) -> LaunchError:
        """The error when no round was formed in time, or this node has not found the rendezvous."""
        if self.index is None and not self.is_server:
            return self.unreachable_error()
        timeout_s, waiting = self.config.join_timeout_s, self.waiting_nodes
        if self.index is None:
            message = f"{self._host} serves the rendezvous at {self.endpoint}, which did not open in {timeout_s:g} s"
            return LaunchError(message, "", RENDEZVOUS)
        if not waiting.missing:
            timeout_s += self.config.last_call_timeout_s
            message = f"after {timeout_s:g} s no attempt has begun at {self.endpoint}: {waiting.hosts}"
            return LaunchError(message, _NOT_REACHED, RENDEZVOUS)
        return LaunchError(
            f"after {timeout_s:g} s only these nodes have joined at {self.endpoint}: {waiting.hosts}; "
            f"{waiting.count + waiting.missing} are needed",
            _NOT_REACHED if self._spec.launcher_assigns_rendezvous else _NOT_JOINED,
            RENDEZVOUS,
        )

    @property
    def _host_with_addresses(self) -> str:
        return f"{self._host} ({', '.join(network.own_addresses(os.environ)[:4]) or 'no address but loopback'})"

    @property
    def _why_not_served_here(self) -> str:
        """For messages, where no option names the server: the node with the endpoint's address serves, if it can."""
        if self.config.is_server is not None:
            return ""
        is_mine = network.is_local(self.addresses[0])
        return ", an address of this host whose port is taken" if is_mine else ", which is not an address of this host"

    def close(self) -> None:
        """Close the channel, which ends the member's process."""
        if self._channel:
            with contextlib.suppress(OSError):  # Buffered records for a process that has ended.
                self._channel.close()
            self._channel = None
        if self._socket:
            self._socket.close()
        if self._listener:
            self._listener.close()

    def _member_spec(self) -> MemberSpec:
        config, spec = self.config, self._spec
        completed = replace(
            config,
            server_addresses=self.addresses,
            port=self.port,
            other_ports=() if self.is_server else config.other_ports,
            is_server=self.is_server,
        )
        return MemberSpec(
            rendezvous=completed,
            node_id=f"{self._host} {os.urandom(8).hex()}",
            run_id=spec.run_id,
            max_restarts=spec.max_restarts,
            launcher_assigns_rendezvous=spec.launcher_assigns_rendezvous,
        )


def _read_all(stream: BinaryIO, post: Callable[[object], None]) -> None:
    try:
        with stream, contextlib.suppress(OSError, wire.ProtocolError):
            while (received := wire.read_record(stream, FROM_MEMBER)) is not None:
                post(received[0])
    finally:
        post(RendezvousLost(_ENDED))
