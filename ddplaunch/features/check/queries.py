"""Records of ``--check``: queries to an agent without a run and its answers, and what workers print. No behaviour."""

from __future__ import annotations

from typing import Annotated

from ddplaunch.features.health.records import NodeHealth
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Port, Quantity, Seconds, Size, at_most, between
from ddplaunch.protocol.specs import Program

NETWORK_RATES, GPU_RATES = "check: ", "check-gpus: "
"""Start of the line that a worker of ``--check``, and one of ``--check --deep``, prints."""

IMPORTS_S = 300.0
"""Time limit of an agent for both imports of ImportTorch, in seconds."""

MAX_GPUS = 256
_MAX_LINES = 1 << 16
_Lines = Annotated[tuple[OneLine, ...], at_most(_MAX_LINES)]
_FileLimit = Annotated[int, between(-1, 1 << 60)]


@dataclass(frozen=True)
class InspectNode:
    """Launcher to agent: requests a NodeReport. Ping, for the node's clock, ConnectToNodes and ImportTorch may follow.

    Attributes:
        has_peers: other nodes connect to this one; if not, its workers use loopback.
        local_addr: the address at which other nodes connect to this one, if the user gave it.
        interface: the network interface with that address, if the user gave it.
        program: what the workers of a job would run; it is only looked for.
        looks_at_health: NodeReport has the health of the node.
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: all GPUs that the environment makes visible.
        sets_caches: a run would choose the folders of compile caches (``--compile-cache``).
    """

    has_peers: bool
    local_addr: str | None = None
    interface: str | None = None
    program: Program | None = None
    looks_at_health: bool = False
    log_dir: str | None = None
    gpus: tuple[str, ...] | None = None
    sets_caches: bool = True


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """Agent to launcher, in answer to InspectNode.

    Attributes:
        cuda: version of CUDA that torch was built for, or ``ROCm`` and its version; empty for none.
        gpus: models by index; empty text for an unknown model.
        gpu_users: a sentence on each process with open GPUs, as far as this user may see them.
        shm_free_bytes: free space in /dev/shm; None if it does not exist.
        open_files: soft and hard limit; -1 for none.
        name: the name that the reverse DNS look-up of ``address`` gave; empty if it has none.
        name_s: seconds that this look-up took; every client of a TCPStore makes one.
        addresses: addresses at which this node listens at ``port``, best first.
        health: None if it was not asked for.
        far_gpus: GPUs that are far from all CPUs that a run may use, as ``numa.cpus.far_gpus``.
        compile_caches: of each cache of a run the variable that chooses its folder, and the file system of that.
    """

    python: OneLine
    torch: OneLine
    cuda: OneLine
    gpus: Annotated[tuple[OneLine, ...], at_most(MAX_GPUS)]
    gpu_users: _Lines
    shm_free_bytes: Size | None
    open_files: tuple[_FileLimit, _FileLimit]
    address: OneLine
    name: OneLine
    name_s: Seconds
    addresses: _Lines
    port: Port
    health: NodeHealth | None = None
    far_gpus: OneLine = ""
    compile_caches: Annotated[tuple[tuple[OneLine, OneLine], ...], at_most(2)] = ()


@dataclass(frozen=True)
class ConnectToNodes:
    """Launcher to agent: connect to each of ``nodes``, by host the addresses and the port at which it listens.

    Answered by ConnectResults.
    """

    nodes: dict[str, tuple[tuple[str, ...], Port]]


@dataclass(frozen=True)
class ConnectResults:
    """Agent to launcher, in answer to ConnectToNodes. ``failed``: hosts without a connection, each with the reason."""

    failed: Annotated[tuple[tuple[OneLine, OneLine], ...], at_most(_MAX_LINES)]


@dataclass(frozen=True)
class ImportTorch:
    """Launcher to agent: import torch in a new process, and again if that is slow. Answered by ImportTimes."""


@dataclass(frozen=True, kw_only=True)
class ImportTimes:
    """Agent to launcher, in answer to ImportTorch.

    Attributes:
        times_s: seconds of the first import, and of the second one if the first was slow; empty: it failed.
        waits_s: seconds of each in which it neither computed nor waited for a processor: it waited for files.
        file_system: where torch lies: the kind of the file system, and its mount point; empty if it is not known.
    """

    times_s: Annotated[tuple[Seconds, ...], at_most(2)] = ()
    waits_s: Annotated[tuple[Seconds, ...], at_most(2)] = ()
    file_system: OneLine = ""


# What workers print: rank 0 for all nodes, and for ``--check --deep`` the worker of each node; one line each.


@dataclass(frozen=True, kw_only=True)
class NetworkRates:
    """The rates of the network; values per node are in the order of the nodes.

    Attributes:
        nccl: version of NCCL; empty without NCCL.
        pairs: bytes per second with one other node at a time.
        backend: backend of torch.distributed.
        all_reduce: bytes per second out of each node and into it.
    """

    nccl: tuple[OneLine, ...]
    pairs: tuple[Quantity, ...]
    backend: OneLine
    all_reduce: Quantity


@dataclass(frozen=True, kw_only=True)
class GpuRates:
    """The rates of one GPU; 0: not measured.

    Attributes:
        index: CUDA's index in the worker.
        uuid: empty if torch does not tell it.
        matmul_flops: floating point operations per second, of a product of two large matrices.
        memory_bytes_per_s: bytes read and written per second.
        peer_bytes_per_s: to and from another GPU of the node, of which the fastest counts.
        problem: why a rate is missing; empty if none is.
    """

    index: Count
    name: OneLine = ""
    uuid: OneLine = ""
    matmul_flops: Quantity = 0.0
    memory_bytes_per_s: Quantity = 0.0
    peer_bytes_per_s: Quantity = 0.0
    problem: OneLine = ""


@dataclass(frozen=True, kw_only=True)
class NodeGpuRates:
    """The rates of the GPUs of one node; ``missing`` says why there are none. ``rank`` is that of the worker."""

    rank: Count
    gpus: Annotated[tuple[GpuRates, ...], at_most(MAX_GPUS)] = ()
    missing: OneLine = ""


TO_AGENT = {InspectNode: "node_check"}
FROM_AGENT = (NodeReport, ConnectResults, ImportTimes)
