"""Results of nodes become one table and one line per problem; all nodes transfer data in pairs."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import spec_from_file_location
from pathlib import Path

import pytest

from ddplaunch import text
from ddplaunch.agent import torch_files
from ddplaunch.features.check import page
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import (
    ConnectResults,
    ConnectToNodes,
    GetTime,
    GpuUser,
    InspectNode,
    ListeningNode,
    NodeReport,
    NodeTime,
)
from ddplaunch.features.health.records import NodeHardware, NodeHealth
from ddplaunch.protocol import wire
from ddplaunch.protocol.gpus import Gpu, HealthFinding
from ddplaunch.protocol.specs import Program
from ddplaunch.system.gpus import devices

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


def test_equal_nodes_are_one_line() -> None:
    assert page.node_table(nodes(8)).splitlines() == [
        "hosts     Python  torch   CUDA  NCCL    GPUs      /dev/shm    open files       clock  reverse DNS",
        "gpu[1-8]  3.11.7  2.13.0  12.8  2.27.5  8 x H200  64 GB free  1024 of 1048576  same   fast",
    ]
    assert page.problems(nodes(8)) == []
    assert page.unreachable(nodes(8)) == []


def test_columns_that_nobody_has_are_left_out_and_other_nodes_have_their_own_line() -> None:
    plain = [replace(each, nccl="", report=replace(each.report, cuda="", gpus=())) for each in nodes(3)]
    late = replace(plain[2], clock_s=-2.5)
    assert [line.split()[0] for line in page.node_table([*plain[:2], late]).splitlines()] == [
        "hosts",
        "gpu[1-2]",
        "gpu3",
    ]
    assert page.node_table(plain).splitlines()[0].split()[:4] == ["hosts", "Python", "torch", "GPUs"]
    assert "  -2.5 s  " in page.node_table([late])


@pytest.mark.parametrize(
    ("look", "line"),
    [
        ({"name_s": 5.01}, "gpu3: 5.0 s to look up its address"),
        ({"name_s": 5.01}, "add the line `::ffff:10.0.0.3 gpu3` to /etc/hosts there"),
        ({"name_s": 5.01, "name": "", "address": "127.0.0.1"}, "add the line `::ffff:127.0.0.1 localhost`"),
        ({"name_s": 5.01, "name": "", "address": "fd00::3"}, "add the line `fd00::3 gpu3`"),
        ({"shm_free_bytes": 64 << 20}, "gpu3: little space in /dev/shm"),
        ({"shm_free_bytes": None}, "gpu3: little space in /dev/shm"),
        ({"open_files": (1024, 1024)}, "gpu3: at most 1024 open files"),
        ({"gpu_users": (GpuUser(7, "python3", (0,)),)}, "gpu3: GPU 0 in use by pid 7 (python3)"),
        ({"gpu_users": (GpuUser(7, "", (0, 1)),)}, "gpu3: GPUs 0,1 in use by pid 7"),
        ({"python": "3.12.1"}, "gpu3: Python 3.12, but 3.11 on most hosts"),
        ({"torch": "2.12.0"}, "gpu3: torch 2.12.0, but 2.13.0 on most hosts"),
        ({"cuda": ""}, "gpu3: torch for CUDA none, but 12.8 on most hosts"),
        ({"cuda": ""}, "gpu3: has GPUs, but torch 2.13.0 cannot use them"),
        ({"gpus": ("H200",) * 7}, "gpu3: 7 GPUs, but 8 on most hosts"),
        ({"gpus": ("H100",) * 8}, "gpu3: GPUs are H100, but H200 on most hosts"),
    ],
)
def test_what_is_wrong_is_told_with_its_host(look: dict[str, object], line: str) -> None:
    assert line in "\n".join(page.problems(nodes(3, **look)))


def test_what_is_wrong_everywhere_is_one_line() -> None:
    assert len(page.problems([node(number, shm_free_bytes=0) for number in range(1, 9)])) == 1


def test_a_clock_is_wrong_only_if_that_is_certain() -> None:
    off = replace(node(1), clock_s=1.5)
    assert "gpu1: the clock is 1.5 s ahead of the launcher's" in page.problems([off])[0]
    assert page.problems([replace(off, clock_error_s=0.6)]) == []


def test_a_node_that_is_slow_with_all_others_is_named() -> None:
    slow = [*nodes(3), replace(node(4), bytes_per_s=1e9)]
    assert page.problems(slow) == [
        "gpu4: at best 8.0 Gbit/s with another node, but 320.0 Gbit/s on most hosts: every step of a job waits for it"
    ]
    assert page.rates(1e8, "nccl", slow).splitlines() == [
        "all-reduce by nccl over 4 nodes: 800 Mbit/s out of each node and into it",
        "in pairs, each way: 8.0 Gbit/s to 320.0 Gbit/s",
    ]


def test_who_cannot_reach_whom_is_folded() -> None:
    first, *others = nodes(4)
    cut = [first, *(replace(each, unreachable=(("gpu1", "timed out"),)) for each in others)]
    assert page.unreachable(cut) == ["gpu[2-4] cannot connect to gpu1 (10.0.0.1): timed out"]
    alone = replace(first, unreachable=(("gpu2", "no"), ("gpu3", "no"), ("gpu4", "refused")))
    assert page.unreachable([alone, *others]) == [
        "gpu1 cannot connect to gpu[2-3]: no",
        "gpu1 cannot connect to gpu4 (10.0.0.1): refused",
    ]


REMAP = HealthFinding(
    rule="row-remap-failed",
    text="a row of its memory could not be remapped",
    action="have the GPU replaced",
    severity="refuse",
    gpu=3,
    uuid="GPU-8f6a",
)
FULL = HealthFinding(rule="disk-full", text="the disk of /logs is 97% full")


def test_findings_about_the_hardware_are_problems() -> None:
    gpus = tuple(Gpu(index=index, name="H200", driver="575.51") for index in range(8))
    hardware = NodeHardware(gpus=gpus)
    well, sick = NodeHealth(hardware=hardware), NodeHealth(hardware=hardware, findings=(REMAP, FULL))
    assert page.health(nodes(3, health=None)) == ""
    assert (
        page.health([node(1, health=well), node(2, health=well)]) == "health: 16 GPUs, folders and disks: nothing wrong"
    )
    found = [node(1, health=well), node(2, health=well), node(3, health=sick)]
    assert page.health(found) == "health: 24 GPUs, folders and disks: 2 findings"
    assert page.refused(found) == ["gpu3"]
    assert page.problems(found) == [
        "gpu3: GPU 3 (GPU-8f6a): a row of its memory could not be remapped (have the GPU replaced)",
        "gpu3: the disk of /logs is 97% full",
    ]


def test_what_a_start_compares_is_compared() -> None:
    """Models and numbers of GPUs have their own lines, which need no driver."""
    old, new = (
        NodeHealth(hardware=NodeHardware(gpus=(Gpu(index=0, name=name, driver=name),))) for name in ("535.1", "575.5")
    )
    found = page.problems([node(1, health=new), node(2, health=new), node(3, health=old)])
    assert found == ["the nodes differ in driver: 535.1 on gpu3, 575.5 on gpu[1-2]"]


@pytest.mark.parametrize("size", [0, 999, 1 << 10, 5 << 20, 12 << 30])
def test_sizes_have_a_unit(size: int) -> None:
    assert text.size(size) == {0: "0 B", 999: "999 B", 1 << 10: "1.0 kB", 5 << 20: "5.0 MB", 12 << 30: "12 GB"}[size]


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
    "record",
    [
        InspectNode(True, None, "eth0", Program("script", "train.py", (), ""), looks_at_health=True, log_dir="/logs"),
        LOOK,
        replace(LOOK, health=NodeHealth(findings=(REMAP,))),
        GetTime(),
        NodeTime(1.5),
        ConnectToNodes((ListeningNode("a", ("::1",), 1),)),
        ConnectResults((("a", "no"),)),
    ],
)
def test_records_survive_the_wire(record: object) -> None:
    assert wire.decode(wire.encode(record), (type(record),)) == record


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
    monkeypatch.setattr(torch_files, "find_spec", lambda _name: spec)
    assert torch_files.versions() == ("2.13.0", version)


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
    assert devices.gpu_users([(11, 0)], str(tmp_path)) == ((11, "python3", (0, 1)),), "told, and opened"


def test_without_gpus_nobody_is_looked_for(tmp_path: Path) -> None:
    assert devices.visible_models(None, str(tmp_path)) == ()
    assert devices.gpu_users(root=str(tmp_path)) == ()
