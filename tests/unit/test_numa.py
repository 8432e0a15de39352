"""``--numa-binding``: the CPUs torchrun would choose, without CUDA and numactl."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from ddplaunch.system.numa import cpus_for

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import NumaBinding

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


def both_threads(cores: range | set[int]) -> set[int]:
    return {cpu for core in cores for cpu in (core, core + 17)}


def test_node_gives_all_cpus_of_the_gpus_numa_node(machine: Machine) -> None:
    """torchrun: test_numa_binding 1."""
    chosen = [cpus_for("node", i, GPUS, ALL, str(machine.sysroot)) for i in range(4)]
    assert chosen == [both_threads(cores) for cores in (range(5), range(5), range(5, 9), range(9, 13))]


def test_socket_gives_all_cpus_of_all_numa_nodes_of_the_gpus_socket(machine: Machine) -> None:
    """torchrun: test_numa_binding 2."""
    chosen = [cpus_for("socket", i, GPUS, ALL, str(machine.sysroot)) for i in range(4)]
    assert chosen == [both_threads(cores) for cores in (range(9), range(9), range(9), range(9, 17))]


def test_exclusive_divides_the_cores_and_gives_the_lower_ranks_one_more(machine: Machine) -> None:
    """torchrun: test_numa_binding 3."""
    chosen = [cpus_for("exclusive", i, GPUS, ALL, str(machine.sysroot)) for i in range(4)]
    assert chosen == [both_threads(cores) for cores in (range(3), range(3, 5), range(5, 9), range(9, 13))]


def test_exclusive_divides_only_among_gpus_that_workers_use(machine: Machine) -> None:
    assert cpus_for("exclusive", 0, GPUS[1:], ALL, str(machine.sysroot)) == both_threads(range(5))


def test_exclusive_follows_the_order_of_workers_also_when_they_share_a_gpu(machine: Machine) -> None:
    shared = (GPUS[2], GPUS[2])
    chosen = [cpus_for("exclusive", i, shared, ALL, str(machine.sysroot)) for i in range(2)]
    assert chosen == [both_threads({5, 6}), both_threads({7, 8})]


def test_core_complex_gives_each_gpu_of_a_node_another_l3_cache(machine: Machine) -> None:
    """torchrun: test_numa_binding 4."""
    chosen = [cpus_for("core-complex", i, GPUS, ALL, str(machine.sysroot)) for i in range(4)]
    assert chosen == [both_threads(cores) for cores in ({0, 1}, {2, 3}, {5, 6}, {9, 10})]


def test_core_complexes_are_dealt_again_when_gpus_outnumber_them(machine: Machine) -> None:
    three = (GPUS[2],) * 3
    chosen = [cpus_for("core-complex", i, three, ALL, str(machine.sysroot)) for i in range(3)]
    assert chosen == [both_threads({5, 6}), both_threads({7, 8}), both_threads({5, 6})]


def test_core_complexes_with_more_allowed_cpus_are_taken_first(machine: Machine) -> None:
    assert cpus_for("core-complex", 2, GPUS, ALL - {5}, str(machine.sysroot)) == both_threads({7, 8})


@pytest.mark.parametrize(
    ("mode", "cpus"),
    [("node", {2, 4, 19}), ("socket", {2, 4, 8, 19}), ("exclusive", {2, 19}), ("core-complex", {2, 19})],
)
def test_no_mode_gives_cpus_that_the_agent_may_not_use(machine: Machine, mode: NumaBinding, cpus: set[int]) -> None:
    allowed = frozenset({2, 4, 8, 16, 19})
    assert cpus_for(mode, 0, GPUS, allowed, str(machine.sysroot)) == cpus


def test_a_gpu_of_no_numa_node_counts_as_on_node_0(machine: Machine) -> None:
    machine.add_gpu("0000:50:00.0", -1)
    assert cpus_for("node", 0, ("0000:50:00.0",), ALL, str(machine.sysroot)) == both_threads(range(5))


def test_a_worker_without_a_gpu_is_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match="local rank 4 has no GPU"):
        cpus_for("node", 4, GPUS, ALL, str(machine.sysroot))


def test_a_node_of_which_no_cpu_is_allowed_is_refused(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"no CPU near the GPU 0000:10:00\.0"):
        cpus_for("exclusive", 0, GPUS, frozenset({9, 10}), str(machine.sysroot))


def test_more_workers_than_cores_cannot_be_exclusive(machine: Machine) -> None:
    with pytest.raises(ValueError, match="2 workers cannot share the 1 cores of a NUMA node"):
        cpus_for("exclusive", 0, GPUS, frozenset({0, 17}), str(machine.sysroot))


def test_the_file_that_is_missing_is_named(machine: Machine) -> None:
    with pytest.raises(ValueError, match=r"needs .*/0000:99:00.0/numa_node: No such file"):
        cpus_for("node", 0, ("0000:99:00.0",), ALL, str(machine.sysroot))


def test_a_machine_that_tells_no_caches_has_no_core_complexes(tmp_path: Path) -> None:
    write(tmp_path / "bus/pci/devices" / GPUS[0] / "numa_node", "0")
    write(tmp_path / "devices/system/node/node0/cpulist", "0-3")
    with pytest.raises(ValueError, match="sysfs has no cache of CPU"):
        cpus_for("core-complex", 0, GPUS[:1], ALL, str(tmp_path))
