"""What findings mean: for a failure, for a refused node, and between nodes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.features.health import differences, findings
from ddplaunch.features.health.findings import with_hardware
from ddplaunch.features.health.records import HealthFinding, NodeHardware
from ddplaunch.protocol.gpus import Gpu
from ddplaunch.protocol.results import WorkerExit
from ddplaunch.system.files.folder_probe import FolderState

XID = HealthFinding(
    rule="xid-79",
    text="Xid 79: the GPU has fallen off the bus",
    action="drain the node",
    severity="refuse",
    is_fault=True,
    gpu=3,
    uuid="GPU-8f6a",
    local_ranks=(3,),
)
FAILED = WorkerExit(11, 3, "gpu3", 100, 1, stopped=False, time_s=0.0, duration_s=1.0)


def test_a_cause_names_the_gpu_where_the_text_does() -> None:
    assert findings.cause(XID) == "Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus"
    row = replace(XID, text="a row of its memory could not be remapped", uuid="")
    assert findings.cause(row) == "GPU 3: a row of its memory could not be remapped"
    assert findings.cause(HealthFinding(rule="x", text="the fan is broken")) == "the fan is broken"


def test_a_line_names_host_gpu_and_ranks() -> None:
    assert findings.line(XID, "gpu3", 8) == (
        "gpu3: GPU 3 (GPU-8f6a), local rank 3, rank 11: Xid 79: the GPU has fallen off the bus (drain the node)"
    )
    assert findings.line(HealthFinding(rule="x", text="the disk is full"), "gpu3") == "gpu3: the disk is full"


def test_a_refusal_is_one_line_whatever_is_wrong() -> None:
    found = [replace(XID, severity="warn"), replace(XID, local_ranks=()), XID, XID]
    assert findings.refusal(found, "gpu3") == (
        "gpu3: GPU 3 (GPU-8f6a): Xid 79: the GPU has fallen off the bus (drain the node); and 2 more"
    )


# The cause of a failure.


def test_a_worker_that_fails_after_a_fault_of_its_gpu_has_failed_because_of_it() -> None:
    other = replace(FAILED, rank=8, local_rank=0)
    found = with_hardware((other, FAILED), [XID])
    assert [exit_.hardware for exit_ in found] == ["", "Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus"]


def test_a_fault_of_the_node_concerns_all_its_workers() -> None:
    fault = HealthFinding(rule="x", text="no power", is_fault=True)
    assert with_hardware((FAILED, replace(FAILED, local_rank=0)), [fault])[1].hardware == "no power"


@pytest.mark.parametrize(
    ("exit_", "fault", "is_blamed"),
    [
        (FAILED, replace(XID, is_fault=False), False),
        (replace(FAILED, returncode=0), XID, False),
        (replace(FAILED, stopped=True), XID, True),
        (replace(FAILED, stopped=True), replace(XID, severity="warn"), False),
        (replace(FAILED, stopped=True), replace(XID, gpu=None), False),
    ],
)
def test_only_a_fault_is_a_cause_and_a_stopped_worker_needs_a_lasting_one(
    exit_: WorkerExit, fault: HealthFinding, is_blamed: bool
) -> None:
    (found,) = with_hardware((exit_,), [fault])
    assert bool(found.hardware) == is_blamed
    assert found.stopped == (exit_.stopped and not is_blamed)


# The node.


def test_a_folder_that_cannot_be_written_to_refuses_and_a_full_disk_warns() -> None:
    (found,) = findings.of_folder(FolderState("/logs", "Read-only file system", 0.2))
    assert (found.severity, found.text) == ("refuse", "nothing can be written to /logs: Read-only file system")
    (full,) = findings.of_folder(FolderState("/logs", used_share=0.95))
    assert (full.severity, full.text) == ("warn", "the disk of /logs is 95% full")
    assert not findings.of_folder(FolderState("/logs", used_share=0.949))
    assert not findings.of_folder(FolderState("/logs"))
    assert findings.of_silent_folder("/logs", 2.0).severity == "refuse"


# Differences.


def node(
    driver: str = "570.1", cpus: int = 64, memory_gb: float = 512, limit_w: float = 700.0, ports: int = 2
) -> NodeHardware:
    gpus = tuple(
        Gpu(index=index, name="H100", driver=driver, memory_bytes=80 << 30, power_limit_w=limit_w) for index in range(8)
    )
    kinds = ("InfiniBand 400 Gb/s",) * ports
    return NodeHardware(gpus=gpus, cpus=cpus, memory_bytes=int(memory_gb * (1 << 30)), ports=kinds)


def test_equal_nodes_do_not_differ() -> None:
    assert differences.between({"a": node(), "b": node(), "c": node(memory_gb=500)}) == []
    assert differences.between({"a": node()}) == differences.between({}) == []
    assert differences.between({"a": node(), "b": NodeHardware()}) == [], "what is not known is no difference"


def test_of_a_newcomer_only_what_is_unusual_is_told() -> None:
    nodes = {"a": node(), "b": node(cpus=32), "c": node(cpus=32, driver="550.9")}
    assert differences.between(nodes, "b") == [], "of its two others, one has as many"
    assert differences.between(nodes, "c") == ["the nodes differ in driver: 550.9 on c, 570.1 on a,b"]


@pytest.mark.parametrize(
    ("odd", "text"),
    [
        (node(driver="550.9"), "the nodes differ in driver: 550.9 on c, 570.1 on [ab]"),
        (node(cpus=32), "the nodes differ in CPUs: 32 on c, 64 on [ab]"),
        (node(memory_gb=256), "the nodes differ in memory: 256 GB on c, 512 GB on [ab]"),
        (node(limit_w=500), "the nodes differ in power limit: 500 W on c, 700 W on [ab]"),
        (
            node(ports=1),
            "the nodes differ in active ports: 1 x InfiniBand 400 Gb/s on c, 2 x InfiniBand 400 Gb/s on [ab]",
        ),
    ],
)
def test_the_odd_node_comes_first(odd: NodeHardware, text: str) -> None:
    (found,) = differences.between({"a": node(), "b": node(), "c": odd})
    assert found.replace("a,b", "[ab]") == text


@pytest.mark.parametrize(
    ("least_s", "most_s", "certain_s"),
    [(6.0, 9.0, 6.0), (-9.0, -6.0, -6.0), (-600.0, 0.1, 0.0), (-1.0, 20.0, 0.0), (0.0, 0.0, 0.0)],
)
def test_only_what_is_certain_of_a_clock_counts(least_s: float, most_s: float, certain_s: float) -> None:
    assert differences.certain_offset(least_s, most_s) == certain_s


@pytest.mark.parametrize(
    ("offset_s", "text"),
    [
        (5.0, ""),
        (-5.0, ""),
        (65.0, "the clock of gpu3 is 1 min 5 s ahead of this machine's"),
        (-6.0, "the clock of gpu3 is 6 s behind this machine's"),
    ],
)
def test_a_clock_may_be_wrong_by_five_seconds(offset_s: float, text: str) -> None:
    assert differences.clock_text("gpu3", offset_s) == text
