"""What ``--check`` and the agents that it starts on each node say to each other; records."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LookAtNode:
    """In place of an AgentSpec: tell of the node by NodeLook, then answer TellTime and ReachNodes.

    Attributes:
        meets: other nodes must reach this one; else it is alone, and its workers meet on loopback.
        local_addr: where they reach it, if the user says so; ``interface``: the same, by the interface's name.
    """

    meets: bool
    local_addr: str | None = None
    interface: str | None = None


@dataclass(frozen=True)
class GpuUser:
    """A process that has GPUs open; ``gpus`` are their indices."""

    pid: int
    name: str
    gpus: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class NodeLook:
    """Answer to LookAtNode.

    Attributes:
        cuda: version of the CUDA runtime that torch was built for; empty for none.
        gpus: models by index; empty text where a model is not known.
        gpu_users: as far as this user may see them.
        shm_free_bytes: of /dev/shm; None where there is none.
        open_files: limit, soft and hard; -1 for none.
        name_s: how long it took to find ``name`` by ``address`` as a client of a TCPStore does; empty if it has none.
        addresses: where other nodes may reach this one at ``port``, best first.
    """

    python: str
    torch: str
    cuda: str
    gpus: tuple[str, ...]
    gpu_users: tuple[GpuUser, ...]
    shm_free_bytes: int | None
    open_files: tuple[int, int]
    address: str
    name: str
    name_s: float
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class TellTime:
    """Asks for TimeTold."""


@dataclass(frozen=True)
class TimeTold:
    """The node's clock, in seconds since the epoch."""

    time_s: float


@dataclass(frozen=True)
class Listening:
    """A node that other nodes shall connect to, at one of ``addresses``."""

    host: str
    addresses: tuple[str, ...]
    port: int


@dataclass(frozen=True)
class ReachNodes:
    """Asks for NodesReached."""

    nodes: tuple[Listening, ...]


@dataclass(frozen=True)
class NodesReached:
    """``failed``: hosts that cannot be connected to from here, and why, in pairs."""

    failed: tuple[tuple[str, str], ...]
