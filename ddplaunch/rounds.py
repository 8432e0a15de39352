"""What nodes and the coordinator of their rounds tell each other; records that travel through the rendezvous store."""

from __future__ import annotations

from dataclasses import dataclass

from ddplaunch.model import NodesExpected, Round, WorkerExit

# From a node to the coordinator.


@dataclass(frozen=True)
class NodeJoined:
    """A node is ready for the next round.

    ``reached`` is the address at which it reached the one that serves, ``attempt`` the first number of a round that
    it has not had, at an earlier rendezvous maybe.
    """

    node_index: int
    host: str
    local_world_size: int
    reached: str = ""
    attempt: int = 0


@dataclass(frozen=True)
class StoreListens:
    """The first node of round ``attempt`` has bound the socket of the workers' store."""

    attempt: int
    address: str
    port: int


@dataclass(frozen=True)
class WorkerFailed:
    """A worker has failed, and its node is stopping the others. Sent at once: the other nodes shall stop too."""

    node_index: int
    attempt: int


@dataclass(frozen=True)
class NodeEnded:
    """All workers of a node are gone.

    Attributes:
        failed: one of them failed by itself, or the node could not run them.
        stopped: somebody stopped this node; the run shall not go on.
        cause: this node's first failure, if a worker's.
    """

    node_index: int
    attempt: int
    failed: bool = False
    stopped: bool = False
    cause: WorkerExit | None = None


@dataclass(frozen=True)
class NodeGone:
    """A node is lost, or has heard that the run is over, and leaves."""

    node_index: int


# From the coordinator to a node.


@dataclass(frozen=True)
class Gathered:
    """Who waits for the round, the hosts as one text, how many that are, and how many more it needs."""

    hosts: str
    count: int
    missing: int


@dataclass(frozen=True)
class RunFull:
    """``hosts`` have all places of the run: wait until one is lost, or the run is over."""

    hosts: tuple[str, ...]


@dataclass(frozen=True)
class ListenForStore:
    """You are the first node of round ``attempt``: bind the socket of the workers' store and say where.

    ``reached``: the address of yours that other nodes have reached you by; empty if none has.
    """

    attempt: int
    reached: str = ""


@dataclass(frozen=True)
class RoundFormed:
    """Start your workers."""

    round: Round


@dataclass(frozen=True)
class StopRound:
    """Stop your workers of round ``attempt``: something happened on another node."""

    attempt: int


@dataclass(frozen=True)
class RoundOver:
    """All nodes have stopped, and this is the verdict of all.

    ``restarts``: another round follows, join it. ``stopped``: somebody stopped a node, and no worker failed by
    itself. ``reason`` tells what ended the round where no worker's failure, ``cause``, did, or why that is not tried
    again where it might be.
    """

    attempt: int
    restarts: bool
    failed: bool
    stopped: bool = False
    reason: str = ""
    cause: WorkerExit | None = None


@dataclass(frozen=True)
class RunClosed:
    """To the node that serves: all others have heard the verdict, the store is not needed any more."""


# Between an agent and its node's member of the rendezvous.


@dataclass(frozen=True, kw_only=True)
class MemberSpec:
    """How a node takes part. ``node_index`` None asks for the next free one; ``node_id`` is the node's alone.

    ``connect_timeout_s`` is for the store, ``silence_s`` for the search of the node that serves it. The rest is
    ``Meeting``'s.
    """

    token: str
    node_id: str
    node_index: int | None
    hosts: tuple[str, ...]
    port: int
    serves: bool
    min_nodes: int
    max_nodes: int
    max_restarts: int
    connect_timeout_s: float
    silence_s: float
    last_call_s: float
    lost_after_s: float
    seats: tuple[int, ...] = ()
    attempt: int = 0
    restarts: int = 0
    other_ports: tuple[int, ...] = ()


@dataclass(frozen=True)
class MemberReady:
    """The node is connected to the rendezvous at ``reached`` and ``port``, as ``node_index``."""

    node_index: int
    reached: str
    port: int


@dataclass(frozen=True)
class NotReached:
    """The node looks for the one that serves, and goes on looking; ``reason`` says what it has seen so far."""

    reason: str


@dataclass(frozen=True)
class RendezvousLost:
    """The store cannot be reached, or not any more; ``refused`` if it would not have this node."""

    reason: str
    refused: bool = False


FROM_NODE = (NodeJoined, StoreListens, WorkerFailed, NodeEnded, NodeGone, NodesExpected)
TO_NODE = (Gathered, RunFull, ListenForStore, RoundFormed, StopRound, RoundOver, RunClosed)
FROM_MEMBER = (MemberReady, NotReached, RendezvousLost, *TO_NODE)
