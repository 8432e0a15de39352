"""CPUs for ``--numa-binding``: those near a worker's GPU, read from sysfs.

Runs in the agent; must not bind anything, the worker binds itself. Chooses like torch.numa.binding (2.13), but needs
neither CUDA nor numactl, and divides a NUMA node among the GPUs that workers use, not among all visible ones. "Core" is
a physical core, "CPU" a hardware thread.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.system import devices
from ddplaunch.text import grouped

if TYPE_CHECKING:
    from ddplaunch.config import NumaBinding
    from ddplaunch.protocol.specs import AgentSpec


def of_workers(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[frozenset[int], ...]:
    """The CPUs of each worker of this node, by local rank; ``visible`` are the devices that the workers use.

    Raises:
        ValueError: a worker has no GPU, or its CPUs cannot be found.
    """
    assert spec.workers.numa_binding
    per_worker = max(1, spec.workers.gpus_per_proc)
    if not visible or nproc * per_worker > len(visible):
        raise ValueError(
            f"--numa-binding needs a GPU for each of {nproc} workers, and {len(visible or ())} can be used"
        )
    addresses = tuple(pci_address(visible[i * per_worker]) for i in range(nproc))
    allowed = frozenset(os.sched_getaffinity(0))
    return tuple(cpus_for(spec.workers.numa_binding, i, addresses, allowed) for i in range(nproc))


def pci_address(device: str, root: str = "/") -> str:
    """PCI address of the GPU with this id; a UUID may be shortened, as for CUDA.

    Raises:
        ValueError: no such GPU, or an id that the driver's files do not contain (MIG, AMD's UUIDs).
    """
    by_index = {str(index): address for index, address in enumerate(devices.gpu_pci_addresses(root))}
    found = [
        a
        for index, a in by_index.items()
        if device == index or devices.driver_field(a, "GPU UUID", root).startswith(device)
    ]
    if len(found) != 1:
        raise ValueError(f"the PCI address of GPU {device} is not known")
    return found[0]


def cpus_for(
    mode: NumaBinding,
    local_rank: int,
    pci_addresses: tuple[str, ...],
    allowed: frozenset[int],
    sysroot: str = "/sys",
) -> frozenset[int]:
    """CPUs that one worker should run on; never empty.

    Args:
        mode: the option's value.
        local_rank: local rank of the worker.
        pci_addresses: address of the first GPU of each worker of the node, by local rank; may repeat.
        allowed: CPUs that the agent may use.
        sysroot: mount point of sysfs.

    Raises:
        ValueError: sysfs lacks the data, or no CPU remains for the worker.
    """
    sys = Path(sysroot)
    nodes = [_node_of(address, sys) for address in pci_addresses]
    node = nodes[local_rank]
    near = (_socket_cpus(node, sys) if mode == "socket" else _node_cpus(node, sys)) & allowed
    if not near:
        raise ValueError(f"--numa-binding {mode}: no CPU near the GPU {pci_addresses[local_rank]} is allowed here")
    index, sharers = nodes[:local_rank].count(node), nodes.count(node)
    if mode == "exclusive":
        return _share_of_cores(_groups(near, _core_of, sys), index, sharers)
    if mode == "core-complex":
        # Caches with most allowed CPUs first, so that a partly forbidden one is taken last.
        complexes = sorted(_groups(near, _cache_of, sys), key=lambda cpus: -len(cpus))
        return complexes[index % len(complexes)]
    return near


def _share_of_cores(cores: list[frozenset[int]], index: int, sharers: int) -> frozenset[int]:
    share, extra = divmod(len(cores), sharers)
    if share == 0:
        raise ValueError(
            f"--numa-binding exclusive: {sharers} workers cannot share the {len(cores)} cores of a NUMA node"
        )
    start = index * share + min(index, extra)
    end = start + share + (index < extra)
    return frozenset().union(*cores[start:end])


def _groups(cpus: frozenset[int], key: Callable[[int, Path], int], sys: Path) -> list[frozenset[int]]:
    by_key = grouped((key(cpu, sys), cpu) for cpu in cpus)
    return [frozenset(by_key[name]) for name in sorted(by_key)]


def _core_of(cpu: int, sys: Path) -> int:
    return min(_cpu_list(_cpu_folder(cpu, sys) / "topology/thread_siblings_list"))


def _cache_of(cpu: int, sys: Path) -> int:
    """Identifies the last-level data cache by its lowest CPU."""
    caches = [index for index in (_cpu_folder(cpu, sys) / "cache").glob("index[0-9]*") if _holds_data(index)]
    if not caches:
        raise ValueError(f"--numa-binding core-complex: sysfs has no cache of CPU {cpu}")
    return min(_cpu_list(max(caches, key=lambda index: _number(index / "level")) / "shared_cpu_list"))


def _holds_data(cache: Path) -> bool:
    return _read(cache / "type") in ("Unified", "Data")


def _node_of(pci_address: str, sys: Path) -> int:
    # -1 without data from the firmware, as on most machines with one NUMA node.
    return max(0, _number(sys / "bus/pci/devices" / pci_address / "numa_node"))


def _node_cpus(node: int, sys: Path) -> frozenset[int]:
    return _cpu_list(sys / f"devices/system/node/node{node}/cpulist")


def _socket_cpus(node: int, sys: Path) -> frozenset[int]:
    sockets = {_socket_of(cpu, sys) for cpu in _node_cpus(node, sys)}
    online = _cpu_list(sys / "devices/system/node/online")
    # A node with memory only (HBM, CXL) has an empty list of CPUs.
    by_node = [cpus for cpus in (_node_cpus(other, sys) for other in online) if cpus]
    return frozenset().union(*(cpus for cpus in by_node if _socket_of(min(cpus), sys) in sockets))


def _socket_of(cpu: int, sys: Path) -> int:
    return _number(_cpu_folder(cpu, sys) / "topology/physical_package_id")


def _cpu_folder(cpu: int, sys: Path) -> Path:
    return sys / f"devices/system/cpu/cpu{cpu}"


def _cpu_list(path: Path) -> frozenset[int]:
    """The kernel's list format, ``0-2,4``."""
    ends = [part.partition("-")[::2] for part in _read(path).split(",") if part]
    return frozenset(cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1))


def _number(path: Path) -> int:
    return int(_read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ValueError(f"--numa-binding needs {path}: {error.strerror}") from error
