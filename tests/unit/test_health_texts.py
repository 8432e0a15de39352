"""What findings mean: for a failure, for a refused node, and between nodes."""

from __future__ import annotations

from dataclasses import replace

from ddplaunch.features.gpus.records import Gpu
from ddplaunch.features.health import findings, log_folder
from ddplaunch.features.health.gpu_faults import with_hardware
from ddplaunch.features.health.records import NodeHardware
from ddplaunch.protocol.results import HealthFinding, WorkerExit
from tests.support import golden

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


FAN = HealthFinding(rule="x", text="the fan is broken")
ROW = replace(XID, text="a row of its memory could not be remapped", uuid="")


def node(
    driver: str = "570.1", cpus: int = 64, memory_gb: float = 512, limit_w: float = 700.0, ports: int = 2
) -> NodeHardware:
    gpus = tuple(
        Gpu(index=index, name="H100", driver=driver, memory_bytes=80 << 30, power_limit_w=limit_w) for index in range(8)
    )
    kinds = ("InfiniBand 400 Gb/s",) * ports
    return NodeHardware(gpus=gpus, cpus=cpus, memory_bytes=int(memory_gb * (1 << 30)), ports=kinds)


def between(odd: NodeHardware) -> str:
    """An odd node beside two others."""
    (found,) = findings.between({"a": node(), "b": node(), "c": odd})
    return found.replace("a,b", "[ab]")


def test_what_findings_and_differences_are_told_as() -> None:
    lines = {
        "causes": [findings.cause(finding) for finding in (XID, ROW, FAN)],
        "lines": [findings.line(XID, "gpu3", 8), findings.line(FAN, "gpu3")],
        "a refusal is one line": [
            findings.refusal([replace(XID, severity="warn"), replace(XID, local_ranks=()), XID, XID], "gpu3")
        ],
        "only the folder of the logs": [findings.subject([log_folder.silent("/logs"), *more]) for more in ((), (XID,))],
        "a silent folder": [found.severity for found in [log_folder.silent("/logs")]],
        "an odd node": [
            between(node(driver="550.9")),
            between(node(cpus=32)),
            between(node(memory_gb=256)),
            between(node(limit_w=500)),
            between(node(ports=1)),
        ],
        "what is certain of a clock": [
            f"{least_s} to {most_s} s: {findings.certain_offset(least_s, most_s)} s"
            for least_s, most_s in ((6.0, 9.0), (-9.0, -6.0), (-600.0, 0.1), (-1.0, 20.0), (0.0, 0.0))
        ],
        "clocks": [findings.clock_text("gpu3", offset_s) or "right" for offset_s in (5.0, -5.0, 65.0, -6.0)],
    }
    golden.check("health", {name: "\n".join(found) for name, found in lines.items()})


# The cause of a failure.


def test_a_worker_that_fails_after_a_fault_of_its_gpu_has_failed_because_of_it() -> None:
    other = replace(FAILED, rank=8, local_rank=0)
    found = with_hardware((other, FAILED), [XID])
    assert [exit_.hardware for exit_ in found] == ["", "Xid 79, GPU 3 (GPU-8f6a) has fallen off the bus"]


def test_a_fault_of_the_node_concerns_all_its_workers() -> None:
    fault = HealthFinding(rule="x", text="no power", is_fault=True)
    assert with_hardware((FAILED, replace(FAILED, local_rank=0)), [fault])[1].hardware == "no power"


def test_only_a_fault_is_a_cause_and_a_stopped_worker_needs_a_lasting_one() -> None:
    """A question is what differs from a worker that has failed, and from the fault of its GPU."""

    def blamed(question: str) -> str:
        of_exit, of_fault = (golden.keywords(words) for words in question.split(" | "))
        exit_ = replace(FAILED, **of_exit)
        (found,) = with_hardware((exit_,), [replace(XID, **of_fault)])
        assert found.stopped == (exit_.stopped and not found.hardware)
        return found.hardware or "not blamed"

    golden.check_answers("blamed_faults", blamed)


# Differences.


def test_equal_nodes_do_not_differ() -> None:
    assert findings.between({"a": node(), "b": node(), "c": node(memory_gb=500)}) == []
    assert findings.between({"a": node()}) == findings.between({}) == []
    assert findings.between({"a": node(), "b": NodeHardware()}) == [], "what is not known is no difference"


def test_of_a_newcomer_only_what_is_unusual_is_told() -> None:
    nodes = {"a": node(), "b": node(cpus=32), "c": node(cpus=32, driver="550.9")}
    assert findings.between(nodes, "b") == [], "of its two others, one has as many"
    assert findings.between(nodes, "c") == ["the nodes differ in driver: 550.9 on c, 570.1 on a,b"]
