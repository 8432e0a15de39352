"""The rendezvous of a node: how many nodes meet, where, and for how long they wait. Pure."""

from __future__ import annotations

from dataclasses import field

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True, kw_only=True)
class RendezvousConfig:
    """How the agent of one node finds the agents of the other nodes.

    Attributes:
        token: identifies the run at the endpoint, and where one launcher leads, one rendezvous of the run; others at
            the same endpoint have other tokens.
        min_nodes: smallest number of nodes of an attempt.
        max_nodes: largest number of nodes of an attempt; further nodes are spares.
        node_index: number of this node, spares included; None: by the order of arrival.
        server_addresses: names or addresses of the node that serves the rendezvous, best first; empty: it detects them.
        port: TCP port of the rendezvous.
        other_ports: the serving node takes the first free port of ``port`` and these; the other nodes try them all.
        is_server: whether this node serves the rendezvous; None: detected by comparing addresses.
        assigned: indices of all nodes in rank order; only where the launcher assigns them and this node serves.
        departing: assigned nodes that leave after an attempt, if another one follows; as ``assigned``.
        spares: hosts that can replace assigned nodes; used only where the launcher assigns and this node serves.
        attempt: number of the first round; above 0 where the launcher has begun another rendezvous.
        restart_count: restarts before the first round of this rendezvous.
        local_addr: address at which other nodes reach this one; None: the source address on the way to the endpoint.
        interface: network interface whose address is ``local_addr``; ``local_addr`` takes precedence.
        join_timeout_s: seconds to wait for ``min_nodes`` nodes.
        last_call_timeout_s: seconds to wait for further nodes after that, up to ``max_nodes``.
        search_timeout_s: seconds to wait for any answer at the endpoint; None: ``join_timeout_s``.
        silent_after_s: seconds without a heartbeat after which a node counts as lost. Where one launcher leads all
            nodes, it notices a loss first, by ``TimeoutConfig.lost_after_s``.
        secret: common to all nodes; records in the store that are not signed with it are ignored. Empty: no signatures.
    """

    token: str
    min_nodes: int
    max_nodes: int
    node_index: int | None
    server_addresses: tuple[str, ...]
    port: int
    is_server: bool | None
    local_addr: str | None
    interface: str | None
    join_timeout_s: float
    last_call_timeout_s: float
    silent_after_s: float
    search_timeout_s: float | None = None
    assigned: tuple[int, ...] = ()
    departing: tuple[int, ...] = ()
    spares: int = 0
    attempt: int = 0
    restart_count: int = 0
    other_ports: tuple[int, ...] = ()
    secret: str = field(default="", repr=False)
