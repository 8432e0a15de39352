"""Queries of ``--check`` to an agent without a run, and its answers. No behaviour belongs here."""

from __future__ import annotations

from typing import Annotated

from ddplaunch.features.health.records import NodeHealth
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Pid, Port, Seconds, Size, between
from ddplaunch.protocol.specs import Program

_FileLimit = Annotated[int, between(-1, 1 << 60)]


@dataclass(frozen=True)
class InspectNode:
    """Launcher to agent: requests a NodeReport. GetTime and ConnectToNodes may follow.

    Attributes:
        has_peers: other nodes connect to this one; if not, its workers use loopback.
        local_addr: the address at which other nodes connect to this one, if the user gave it.
        interface: the network interface with that address, if the user gave it.
        program: what the workers of a job would run; it is only looked for.
        looks_at_health: NodeReport has the health of the node.
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: all GPUs that the environment makes visible.
    """

    has_peers: bool
    local_addr: str | None = None
    interface: str | None = None
    program: Program | None = None
    looks_at_health: bool = False
    log_dir: str | None = None
    gpus: tuple[str, ...] | None = None


@dataclass(frozen=True)
class GpuUser:
    """A process that has GPUs open; ``gpus`` are their indices."""

    pid: Pid
    name: OneLine
    gpus: tuple[Count, ...]


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Agent to launcher, in answer to InspectNode.

    Attributes:
        cuda: version of CUDA that torch was built for, or ``ROCm`` and its version; empty for none.
        gpus: models by index; empty text for an unknown model.
        gpu_users: processes with open GPUs, as far as this user may see them.
        shm_free_bytes: free space in /dev/shm; None if it does not exist.
        open_files: soft and hard limit; -1 for none.
        name: the name that the reverse DNS look-up of ``address`` gave; empty if it has none.
        name_s: seconds that this look-up took; every client of a TCPStore makes one.
        addresses: addresses at which this node listens at ``port``, best first.
        health: None if it was not asked for.
    """

    python: OneLine
    torch: OneLine
    cuda: OneLine
    gpus: tuple[OneLine, ...]
    gpu_users: tuple[GpuUser, ...]
    shm_free_bytes: Size | None
    open_files: tuple[_FileLimit, _FileLimit]
    address: OneLine
    name: OneLine
    name_s: Seconds
    addresses: tuple[OneLine, ...]
    port: Port
    health: NodeHealth | None = None


@dataclass(frozen=True)
class GetTime:
    """Launcher to agent: requests a NodeTime."""


@dataclass(frozen=True)
class NodeTime:
    """Agent to launcher, in answer to GetTime: the node's clock, in seconds since the epoch."""

    time_s: Seconds


@dataclass(frozen=True)
class ListeningNode:
    """A node that listens at ``port`` of each of ``addresses``."""

    host: str
    addresses: tuple[str, ...]
    port: Port


@dataclass(frozen=True)
class ConnectToNodes:
    """Launcher to agent: connect to each of ``nodes``; answered by ConnectResults."""

    nodes: tuple[ListeningNode, ...]


@dataclass(frozen=True)
class ConnectResults:
    """Agent to launcher, in answer to ConnectToNodes. ``failed``: hosts without a connection, each with the reason."""

    failed: tuple[tuple[OneLine, OneLine], ...]


TO_AGENT = {InspectNode: "node_check"}
FROM_AGENT = (NodeReport, ConnectResults, NodeTime)
