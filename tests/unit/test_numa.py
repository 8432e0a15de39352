"""``--numa-binding``: the CPUs torchrun would choose, without CUDA and numactl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ddplaunch.features.numa import binding
from ddplaunch.features.numa.cpus import auto, cpus_for, far_gpus, kept
from ddplaunch.system.devices import pci_address
from ddplaunch.text import fold_ints
from tests.support import golden
from tests.unit.test_devices import nvidia_node

ALL = frozenset(range(1024))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


@dataclass(frozen=True)
class Machine:
    """A fake sysfs. CPU ``i`` and ``i + cores`` are one core, as on most servers."""

    sysroot: Path
    cores: int

    def add_node(self, node: int, cores: range, socket: int) -> None:
        """Add a NUMA node; its cores share one L3 cache in pairs."""
        halves = [f"{cores[0]}-{cores[-1]}", f"{cores[0] + self.cores}-{cores[-1] + self.cores}"] if cores else []
        write(self.sysroot / f"devices/system/node/node{node}/cpulist", ",".join(halves))
        for core in cores:
            for cpu in (core, core + self.cores):
                self._add_cpu(cpu, core, cores[0] + (core - cores[0]) // 2 * 2, socket)

    def _add_cpu(self, cpu: int, core: int, first_of_cache: int, socket: int) -> None:
        folder = self.sysroot / f"devices/system/cpu/cpu{cpu}"
        write(folder / "topology/thread_siblings_list", f"{core},{core + self.cores}")
        write(folder / "topology/physical_package_id", str(socket))
        pair = f"{first_of_cache}-{first_of_cache + 1}"
        upper = f"{first_of_cache + self.cores}-{first_of_cache + 1 + self.cores}"
        self._add_cache(folder / "cache/index0", "1", "Data", f"{core},{core + self.cores}")
        self._add_cache(folder / "cache/index1", "9", "Instruction", f"{cpu}")
        self._add_cache(folder / "cache/index3", "3", "Unified", f"{pair},{upper}")

    def _add_cache(self, folder: Path, level: str, kind: str, shared: str) -> None:
        write(folder / "level", level)
        write(folder / "type", kind)
        write(folder / "shared_cpu_list", shared)

    def add_gpu(self, address: str, node: int) -> None:
        write(self.sysroot / "bus/pci/devices" / address / "numa_node", str(node))


GPUS = ("0000:10:00.0", "0000:20:00.0", "0000:30:00.0", "0000:40:00.0")


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """Two sockets of two NUMA nodes with 5, 4, 4 and 4 cores, and a node of memory only; two GPUs are on node 0."""
    made = Machine(tmp_path, cores=17)
    for node, (cores, socket) in enumerate([(range(5), 0), (range(5, 9), 0), (range(9, 13), 1), (range(13, 17), 1)]):
        made.add_node(node, cores, socket)
    made.add_node(4, range(0), socket=-1)
    write(tmp_path / "devices/system/node/online", "0-4")
    for address, node in zip(GPUS, (0, 0, 1, 2), strict=True):
        made.add_gpu(address, node)
    return made


def test_cpus_near_the_gpu_of_each_worker(machine: Machine) -> None:
    """torchrun: test_numa_binding 1, 2, 3, 4. A question is the mode, GPUs of workers, and allowed CPUs."""
    machine.add_gpu("0000:50:00.0", -1)
    gpus = (*GPUS, "0000:50:00.0")

    def cpus(question: str) -> str:
        mode, numbers, allowed = question.split()
        used = tuple(gpus[int(number)] for number in numbers.split(","))
        may = ALL if allowed == "all" else frozenset(map(int, allowed.split(",")))
        chosen = [cpus_for(mode, rank, used, may, str(machine.sysroot)) for rank in range(len(used))]
        return "; ".join(fold_ints(sorted(found)) for found in chosen)

    golden.check_answers("numa", cpus)


def test_a_gpu_that_is_not_there_is_told(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"0000:99:00\.0/numa_node: No such file"):
        cpus_for("node", 0, ("0000:99:00.0",), ALL, str(machine.sysroot))


def test_a_machine_that_tells_no_caches_has_no_core_complexes(tmp_path: Path) -> None:
    write(tmp_path / "bus/pci/devices" / GPUS[0] / "numa_node", "0")
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3")
    with pytest.raises(ValueError, match="sysfs has no cache of CPU"):
        cpus_for("core-complex", 0, GPUS[:1], ALL, str(tmp_path))


def test_a_gpu_is_found_by_index_and_by_the_beginning_of_its_uuid(tmp_path: Path) -> None:
    root = nvidia_node(tmp_path, *(f"0000:{bus:02x}:00.0" for bus in range(16, 24)))
    golden.check_answers("pci_addresses", lambda device: pci_address(device, root))


# auto: a machine, by its nodes with CPUs, and the node of each GPU.

SERVERS = {
    "dual": ((0, 1), (0, 0, 1, 1)),
    "dgx": ((0, 1, 2, 3, 4, 5, 6, 7), (3, 3, 1, 1, 7, 7, 5, 5)),
    "grace": ((0, 1), (0, 1)),
    "single": ((0,), (0, 0)),
    "cloud": ((0, 1), (-1, -1)),
}


def server(root: Path, name: str, mems: str = "0-63") -> str:
    """Each node has 4 CPUs. dgx: two sockets, in which nodes 0 and 1, 2 and 3 and so on are closer than others."""
    nodes, gpus = SERVERS[name]
    sys = root / "sys"
    memory = (8, 9) if name == "grace" else ()  # Nodes of GPU memory have no CPUs.
    write(sys / "devices/system/node/has_cpu", f"{nodes[0]}-{nodes[-1]}")
    write(sys / "devices/system/node/online", ",".join(map(str, (*nodes, *memory))))
    write(sys / "devices/system/cpu/online", f"0-{4 * len(nodes) - 1}")
    for node in nodes:
        write(sys / f"devices/system/node/node{node}/cpulist", f"{4 * node}-{4 * node + 3}")
        to = [32 - 5 * sum(each // size == node // size for size in (1, 2, 4, 8)) for each in nodes]
        write(sys / f"devices/system/node/node{node}/distance", " ".join(map(str, (*to, *(80 for _ in memory)))))
    addresses = [f"0000:{bus:02x}:00.0" for bus in range(16, 16 + len(gpus))]
    for address, node in zip(addresses, gpus, strict=True):
        write(sys / "bus/pci/devices" / address / "numa_node", str(node))
    write(root / "proc/self/status", f"Name:\tpython\nMems_allowed_list:\t{mems}")
    return nvidia_node(root, *addresses)


def test_auto_takes_no_cpu_from_the_job(tmp_path: Path) -> None:
    """A question is the server, the GPUs of the workers, the CPUs that may be used, and the nodes of memory."""

    def bindings(question: str) -> str:
        name, gpus, allowed, *mems = question.split()
        root = server(tmp_path / question.replace(" ", "_"), name, *mems)
        may = frozenset(range(64)) if allowed == "all" else binding.numbers(allowed)
        if allowed == "all":
            may = frozenset(range(4 * len(SERVERS[name][0])))
        found = auto(tuple(gpus.split(",")), gpus.count(",") + 1, root, may)
        return "; ".join(f"{fold_ints(cpus)} memory {node}" for cpus, node in found) or "none"

    golden.check_answers("numa_auto", bindings)


def test_the_users_own_memory_policy_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(binding, "has_memory_policy", lambda: True)
    found = auto(("0", "2"), 2, server(tmp_path, "dual"), binding.numbers("0-7"))
    assert [node for _, node in found] == [None, None]


def test_a_gpu_that_is_far_from_all_cpus_is_named(tmp_path: Path) -> None:
    root = server(tmp_path, "dual")
    far = "GPUs 2, 3 (NUMA node 1)"
    assert far_gpus(("0", "1", "2", "3"), root, binding.numbers("0-3")) == far
    assert far_gpus(("0", "2"), root, binding.numbers("3,4")) == ""
    assert far_gpus(("0",), server(tmp_path / "cloud", "cloud"), binding.numbers("0-3")) == ""
    assert far_gpus(("7", "MIG-1"), root, binding.numbers("0-3")) == ""


def test_what_has_bound_the_launcher_is_told(tmp_path: Path) -> None:
    root = server(tmp_path, "dual")
    assert kept({}, root, binding.numbers("0-7")) == ""
    assert kept({}, root, binding.numbers("0-3")) == "a scheduler, a cgroup or taskset has chosen CPUs 0-3"
    slurm = {"SLURM_CPU_BIND": "quiet,mask_cpu:0xF"}
    assert kept(slurm, root, binding.numbers("0-3")) == "SLURM_CPU_BIND=quiet,mask_cpu:0xF has chosen CPUs 0-3"
    assert kept({}, server(tmp_path / "single", "single"), binding.numbers("0-1")) == ""
