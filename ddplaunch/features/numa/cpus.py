"""CPUs and memory for ``--numa-binding``: those near a worker's GPU, read from sysfs.

Runs in the agent; ``binding`` binds, in the worker. Chooses like torch.numa.binding (2.13), but needs neither CUDA nor
numactl, and divides a NUMA node among the GPUs that workers use, not among all visible ones. "Core" is a physical core,
"CPU" a hardware thread.

``auto`` takes no CPU from the job: each CPU that the agent may use is given to the workers of the nearest GPUs. So it
stays within what a scheduler, a cgroup or taskset allows. A worker prefers the memory of its GPU's NUMA node, unless
the user has chosen a memory policy, or the cgroup forbids that node.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.features.numa import binding
from ddplaunch.system import devices, procfs
from ddplaunch.text import fold_ints, grouped, quote

if TYPE_CHECKING:
    from ddplaunch.config import NumaBinding
    from ddplaunch.protocol.specs import AgentSpec


Binding = tuple[frozenset[int], int | None]
"""The CPUs of a worker, and the NUMA node whose memory it prefers."""


def of_workers(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[str, ...]:
    """As ``_of_workers``, each as ``binding.text``."""
    return tuple(binding.text(*each) for each in _of_workers(spec, visible, nproc))


def _of_workers(spec: AgentSpec, visible: tuple[str, ...] | None, nproc: int) -> tuple[Binding, ...]:
    """The binding of each worker of this node, by local rank; empty: none. ``visible`` are the devices that they use.

    Raises:
        ValueError: a worker has no GPU, or its CPUs cannot be found; but not with ``auto``.
    """
    mode, per_worker = spec.workers.numa_binding, max(1, spec.workers.gpus_per_proc)
    if mode == "auto":
        # A scheduler that has started each worker has bound each, or the user wants none bound.
        return () if spec.task or not visible else auto(visible[::per_worker][:nproc], nproc)
    if not visible or nproc * per_worker > len(visible):
        raise ValueError(
            f"--numa-binding needs a GPU for each of {nproc} workers, and {len(visible or ())} can be used"
        )
    addresses = tuple(devices.pci_address(visible[i * per_worker]) for i in range(nproc))
    allowed = frozenset(os.sched_getaffinity(0))
    nodes = memory_nodes(addresses)
    return tuple((cpus_for(mode, i, addresses, allowed), nodes[i]) for i in range(nproc))


def auto(
    gpus: tuple[str, ...], nproc: int, root: str = "/", allowed: frozenset[int] | None = None
) -> tuple[Binding, ...]:
    """The bindings of ``auto``; empty where there is nothing to choose, or where it is not known.

    ``gpus``: of each worker the first. ``allowed``: the CPUs that this process may use, if not known.
    """
    sys, allowed = Path(root, "sys"), allowed or frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(ValueError):
        with_cpus = _cpu_list(sys / "devices/system/node/has_cpu")
        if len(with_cpus) < 2 or len(gpus) < nproc:
            return ()
        addresses = tuple(devices.pci_address(gpu, root) for gpu in gpus)
        nodes = [_number(sys / "bus/pci/devices" / address / "numa_node") for address in addresses]
        if min(nodes) < 0:  # The firmware does not say it.
            return ()
        near = {node: _nearest_cpus(node, set(nodes), with_cpus, sys) & allowed for node in set(nodes)}
        is_even = all(2 * len(near[node]) * nproc >= len(allowed) * nodes.count(node) > 0 for node in near)
        if len(near) > 1 and is_even:
            return tuple(zip((near[node] for node in nodes), memory_nodes(addresses, root), strict=True))
    return ()


def _nearest_cpus(node: int, of_gpus: set[int], with_cpus: frozenset[int], sys: Path) -> frozenset[int]:
    """The CPUs of the NUMA nodes that have no nearer node with GPUs of workers than ``node``."""
    online = sorted(_cpu_list(sys / "devices/system/node/online"))
    found = frozenset[int]()
    for other in with_cpus:
        distances = _read(sys / f"devices/system/node/node{other}/distance").split()
        to = dict(zip(online, map(int, distances), strict=True))
        if to[node] == min(to[each] for each in of_gpus):
            found |= _node_cpus(other, sys)
    return found


def memory_nodes(addresses: tuple[str, ...], root: str = "/") -> tuple[int | None, ...]:
    """The NUMA nodes of these GPUs; None for one whose memory must not be used, or if the user has chosen a policy."""
    if binding.has_memory_policy():
        return (None,) * len(addresses)
    status = procfs.read(os.path.join(root, "proc/self/status")).decode()
    listed = next((line.split()[1] for line in status.splitlines() if line.startswith("Mems_allowed_list:")), "")
    may_use = binding.numbers(listed)
    nodes = (_node_of(address, Path(root, "sys")) for address in addresses)
    return tuple(node if node in may_use else None for node in nodes)


def far_gpus(gpus: tuple[str, ...], root: str = "/", allowed: frozenset[int] | None = None) -> str:
    """Those of the GPUs that are far from all CPUs that this process may use; empty if none is, or not known."""
    sys, allowed = Path(root, "sys"), allowed or frozenset(os.sched_getaffinity(0))
    far = dict[str, int]()
    for gpu in gpus:
        with contextlib.suppress(ValueError):
            node = _number(sys / "bus/pci/devices" / devices.pci_address(gpu, root) / "numa_node")
            near = _node_cpus(node, sys) if node >= 0 else frozenset()
            if near and not near & allowed:
                far[gpu] = node
    if not far:
        return ""
    which = f"GPU{'s' if len(far) > 1 else ''} {', '.join(far)}"
    nodes = fold_ints(set(far.values()))
    return f"{which} (NUMA node {nodes})"


def kept(environ: Mapping[str, str], root: str = "/", allowed: frozenset[int] | None = None) -> str:
    """What has bound this process, and its CPUs, on a machine with several NUMA nodes; empty if nothing has."""
    sys, allowed = Path(root, "sys"), allowed or frozenset(os.sched_getaffinity(0))
    with contextlib.suppress(ValueError):
        is_bound = allowed < _cpu_list(sys / "devices/system/cpu/online")
        if is_bound and len(_cpu_list(sys / "devices/system/node/has_cpu")) > 1:
            slurm = environ.get("SLURM_CPU_BIND", "")
            by = f"SLURM_CPU_BIND={quote(slurm, 60)}" if slurm else "a scheduler, a cgroup or taskset"
            return f"{by} has chosen CPUs {fold_ints(allowed)}"
    return ""


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
    return binding.numbers(_read(path))


def _number(path: Path) -> int:
    return int(_read(path))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError as error:
        raise ValueError(f"--numa-binding needs {path}: {error.strerror}") from error
