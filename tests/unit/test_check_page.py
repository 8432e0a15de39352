"""Results of nodes become one table and one line per problem; all nodes transfer data in pairs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.check import page
from ddplaunch.features.check.node_check import gpu_users
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import ImportTimes, NodeReport
from ddplaunch.features.gpus.records import Gpu, GpuReading, GpusRead
from ddplaunch.features.health.records import NodeHardware, NodeHealth
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.system import devices
from tests.support import golden

LOOK = NodeReport(
    python="3.11.7",
    torch="2.13.0",
    cuda="12.8",
    gpus=("H200",) * 8,
    gpu_users=(),
    shm_free_bytes=64 << 30,
    open_files=(1024, 1048576),
    address="10.0.0.1",
    name="gpu1",
    name_s=0.001,
    addresses=("10.0.0.1",),
    port=4711,
)


def node(number: int, **look: object) -> CheckedNode:
    own = {"address": f"10.0.0.{number}", "name": f"gpu{number}", **look}
    return CheckedNode(host=f"gpu{number}", report=replace(LOOK, **own), nccl="2.27.5", bytes_per_s=40e9)  # type: ignore[arg-type]


def nodes(count: int, **look: object) -> list[CheckedNode]:
    """The last is the one with ``look``."""
    return [*(node(number) for number in range(1, count)), node(count, **look)]


REMAP = HealthFinding(
    rule="row-remap-failed",
    text="a row of its memory could not be remapped",
    action="have the GPU replaced",
    severity="refuse",
    gpu=3,
    uuid="GPU-8f6a",
)
FULL = HealthFinding(rule="disk-full", text="the disk of /logs is 97% full")
GPUS = tuple(Gpu(index=index, name="H200", driver="575.51") for index in range(8))
WELL = NodeHealth(hardware=NodeHardware(gpus=GPUS))
SICK = replace(WELL, findings=(REMAP, FULL))
OLD, NEW = (
    NodeHealth(hardware=NodeHardware(gpus=(Gpu(index=0, name=name, driver=name),))) for name in ("535.1", "575.5")
)
PLAIN = [replace(each, nccl="", report=replace(each.report, cuda="", gpus=())) for each in nodes(3)]
FIRST, *OTHERS = nodes(4)


def _importing(*places: tuple[Any, ...]) -> list[CheckedNode]:
    """Nodes that import torch: where it lies, and the times."""
    times = [ImportTimes(times_s=times_s, file_system=place) for place, *times_s in places]
    return [replace(node(number), imports=each) for number, each in enumerate(times, start=1)]


CASES = {
    "equal nodes": nodes(8),
    "a compile cache that other machines use too": nodes(
        2, compile_caches=(("TORCHINDUCTOR_CACHE_DIR", "ext4 at /"), ("TRITON_CACHE_DIR", "nfs4 at /home"))
    ),
    "a GPU that is far from the CPUs": nodes(2, far_gpus="GPU 2 (NUMA node 1)"),
    "columns that nobody has, and a late clock": [*PLAIN[:2], replace(PLAIN[2], clock_s=-2.5)],
    "wrong everywhere": [node(number, shm_free_bytes=0) for number in range(1, 9)],
    "a wrong clock": [replace(node(1), clock_s=1.5)],
    "a clock that may be wrong": [replace(node(1), clock_s=1.5, clock_error_s=0.6)],
    "times as a busy machine measures them": [
        replace(node(1), clock_s=0.3, clock_error_s=0.4),
        node(2, name_s=0.2),
        node(3),
    ],
    "a slow node": [*nodes(3), replace(node(4), bytes_per_s=1e9)],
    "who cannot reach whom": [FIRST, *(replace(each, unreachable=(("gpu1", "timed out"),)) for each in OTHERS)],
    "who reaches nobody": [
        replace(FIRST, unreachable=(("gpu2", "no"), ("gpu3", "no"), ("gpu4", "refused"))),
        *OTHERS,
    ],
    "good health": [node(1, health=WELL), node(2, health=WELL)],
    "findings": [node(1, health=WELL), node(2, health=WELL), node(3, health=SICK)],
    "imports": _importing(("ext4 at /", 1.31, 1.0), ("ext4 at /", 1.12, 1.04), ("xfs at /opt", 2.0)),
    "slow imports": _importing(("nfs4 at /shared", 61.2, 8.0), ("nfs4 at /shared", 48.0, 8.3), ("xfs at /", 12.0, 1.0)),
    "imports from a shared file system": [
        replace(node(number), imports=ImportTimes(times_s=times_s, waits_s=waits_s, file_system="nfs4 at /shared"))
        for number, times_s, waits_s in ((1, (61.2, 8.0), (57.9, 5.1)), (2, (48.0, 8.3), (45.2, 5.0)))
    ],
    "imports of nobody": _importing(("",), ("",)),
    "other drivers": [node(1, health=NEW), node(2, health=NEW), node(3, health=OLD)],
}


def told(checked: list[CheckedNode]) -> str:
    parts = [
        page.node_table(checked),
        *page.imports(checked),
        *(f"problem: {line}" for line in page.problems(checked)),
        *(f"unreachable: {line}" for line in page.unreachable(checked)),
        page.health(checked),
        *(f"refused: {host}" for host in page.refused(checked)),
        page.rates(1e8, "nccl", checked),
    ]
    return "\n".join(part for part in parts if part)


def test_the_page() -> None:
    golden.check("check", {name: told(checked) for name, checked in CASES.items()})


def test_a_node_that_differs_from_two_others() -> None:
    """A question is a sentence, and what is unlike the others."""
    golden.check_pages("odd_nodes", lambda case: told(nodes(3, **golden.keywords(case.partition(": ")[2]))))


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8, 17])
def test_in_each_turn_every_node_talks_to_one_that_talks_to_it(world: int) -> None:
    from ddplaunch.features.check.worker_network import TURNS, round_robin_partner  # Imports torch.

    by_rank = [list(round_robin_partner(rank, world)) for rank in range(world)]
    for turn in zip(*by_rank, strict=True):
        for rank, partner in enumerate(turn):
            assert partner != rank
            assert partner == -1 or turn[partner] == rank
        assert turn.count(-1) == world % 2
    turns = min(TURNS, world - 1 + world % 2)
    assert all(len(set(row)) == len(row) == turns for row in by_rank)


@pytest.mark.parametrize(
    ("cuda", "hip", "version"),
    [("'12.8'", "None", "12.8"), ("None", "'6.4.43482'", "ROCm 6.4.43482"), ("None", "None", "")],
)
def test_what_torch_was_built_for_is_read_from_its_file(
    cuda: str, hip: str, version: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "__init__.py").touch()
    lines = f"__version__ = '2.13.0'\ncuda: Optional[str] = {cuda}\nhip: Optional[str] = {hip}\n"
    (tmp_path / "version.py").write_text(lines)
    spec = spec_from_file_location("torch", tmp_path / "__init__.py", submodule_search_locations=[str(tmp_path)])
    monkeypatch.setattr(devices, "find_spec", lambda _name: spec)
    assert devices.torch_versions() == ("2.13.0", version)


def test_gpus_and_their_users_are_read_from_files(tmp_path: Path) -> None:
    for minor, address in enumerate(("0000:17:00.0", "0000:3d:00.0")):
        folder = tmp_path / "proc/driver/nvidia/gpus" / address
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t\t NVIDIA H200\nDevice Minor: \t {minor}\n")
    for pid, name in ((11, "python3"), (12, "nvidia-persiste")):
        fds = tmp_path / f"proc/{pid}/fd"
        fds.mkdir(parents=True)
        (fds / "0").symlink_to("/dev/null")
        (fds / "5").symlink_to("/dev/nvidiactl")
        (fds / "6").symlink_to("/dev/nvidia1")
        (fds.parent / "comm").write_text(f"{name}\n")
    assert devices.visible_models(None, str(tmp_path)) == ("NVIDIA H200",) * 2
    told = GpusRead(gpus=(GpuReading(index=0, pids=(11, 13)),))
    assert [*gpu_users(told, str(tmp_path))] == [
        "GPUs 0,1 in use by pid 11 (python3)",  # Told, and opened.
        "GPU 0 in use by pid 13",
    ]


def test_without_gpus_nobody_is_looked_for(tmp_path: Path) -> None:
    assert devices.visible_models(None, str(tmp_path)) == ()
    assert [*gpu_users(GpusRead(), str(tmp_path))] == []
