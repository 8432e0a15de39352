"""InfiniBand ports: what the kernel's files say, and the rules about them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ddplaunch.features.gpus.child import ports_of
from ddplaunch.features.gpus.records import IbPort
from ddplaunch.features.health.rules import ports_at_start, ports_while_running
from tests.support import golden

GOOD = IbPort(
    name="mlx5_0:1",
    board="MT_0000000838",
    link_layer="InfiniBand",
    state="ACTIVE",
    phys_state="LinkUp",
    rate_gbps=400,
    link_downed=2,
)
FOUR = [replace(GOOD, name=f"mlx5_{index}:1") for index in range(4)]


def rules(ports: list[IbPort]) -> list[str]:
    return [finding.rule for finding in ports_at_start(ports)]


def files(root: Path, port: IbPort, numbers: tuple[int, int] = (4, 5)) -> None:
    device, _, number = port.name.partition(":")
    folder = root / "sys/class/infiniband" / device / "ports" / number
    (folder / "counters").mkdir(parents=True, exist_ok=True)
    (folder.parent.parent / "board_id").write_text(f"{port.board}\n")
    for name, text in {
        "state": f"{numbers[0]}: {port.state}",
        "phys_state": f"{numbers[1]}: {port.phys_state}",
        "rate": f"{port.rate_gbps} Gb/sec (4X NDR)",
        "link_layer": port.link_layer,
        "counters/link_downed": str(port.link_downed),
    }.items():
        (folder / name).write_text(f"{text}\n")


def test_ports_are_read_from_the_kernels_files(tmp_path: Path) -> None:
    for port in FOUR[:2]:
        files(tmp_path, port)
    assert [IbPort(**said) for said in ports_of(str(tmp_path))] == FOUR[:2]


def test_a_machine_without_adapters_has_no_ports(tmp_path: Path) -> None:
    assert ports_of(str(tmp_path)) == []


def test_what_a_port_has_no_file_for_is_unknown(tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0/ports/1").mkdir(parents=True)
    (said,) = ports_of(str(tmp_path))
    port = IbPort(**said)
    assert port == IbPort(name="mlx5_0:1")
    assert rules([port]) == []


def test_what_one_port_of_four_says_breaks_a_rule() -> None:
    """A question is when it is asked, at the start or in the run, and what is unlike the other ports."""

    def broken(question: str) -> str:
        when, _, words = question.partition(" ")
        ports = [replace(FOUR[0], **golden.keywords(words)), *FOUR[1:]]
        found = ports_at_start(ports) if when == "start" else ports_while_running(FOUR, ports)
        return "; ".join(f"{each.rule}, {each.severity}, fault: {each.is_fault}, {each.text}" for each in found)

    golden.check_answers("port_rules", broken)


def test_second_ports_that_nobody_uses_are_no_finding() -> None:
    unused = [replace(port, name=f"{port.name}_b", state="DOWN", phys_state="Disabled") for port in FOUR]
    assert rules([*FOUR, *unused]) == []


def test_ports_of_another_kind_may_be_slower() -> None:
    assert rules([*FOUR, replace(GOOD, name="mlx5_9:1", board="MT_1", rate_gbps=25)]) == []


def test_an_adapter_that_vanishes_is_a_fault() -> None:
    (finding,) = ports_while_running(FOUR, FOUR[1:])
    assert finding.text == "mlx5_0:1: it is no longer active: gone (no such port)"
