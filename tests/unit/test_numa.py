"""``--numa-binding``: the CPUs torchrun would choose, without CUDA and numactl."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from ddplaunch.features.numa.cpus import cpus_for, pci_address
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
