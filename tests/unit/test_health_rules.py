"""Every rule about a GPU fires at its threshold and not just below it; the values come through the real binding.

InfiniBand ports: what the kernel's files say, and the rules about them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ddplaunch.features.gpus.child import ports_of
from ddplaunch.features.gpus.records import GpuReading, IbPort
from ddplaunch.features.health import rules
from tests.support import golden
from tests.support.fake_nvml import Says

HISTORY = {"throttled-often", "nvlink-errors"}
ELSEWHERE = {"lost"}


def test_each_rule_fires_at_its_threshold_and_in_the_run_when_a_gpu_begins_to_break_it(
    driver: Says, watch: Any
) -> None:
    """A question is what the driver says of a GPU."""
    in_run = {rule.name: rule.in_run for rule in rules.RULES}
    questions = golden.questions("gpu_rules")
    gpus = dict(zip(questions, _read(driver, watch, questions), strict=True))
    sound = [gpu for gpu in gpus.values() if not rules.at_start(gpu)]
    broken: set[str] = set()

    def told(question: str) -> str:
        gpu = gpus[question]
        found = rules.at_start(gpu)
        for before in (*sound, None):
            begun = [finding.rule for finding in rules.while_running(before, gpu)]
            assert begun == [finding.rule for finding in found if in_run[finding.rule]]
        assert all(rules.while_running(gpu, after) == () for after in (gpu, *sound))
        assert {(finding.gpu, finding.uuid) for finding in found} <= {(gpu.index, gpu.uuid)}
        broken.update(finding.rule for finding in found)
        return "; ".join(f"{finding.rule}: {finding.text}" for finding in found) or "sound"

    golden.check_answers("gpu_rules", told)
    assert broken | HISTORY | ELSEWHERE == in_run.keys()


def _read(driver: Says, watch: Any, questions: list[str]) -> tuple[GpuReading, ...]:
    """All as GPUs of one machine, of a name each; one more GPU has all NVLinks, which count by name."""
    names = [f"case {index}" for index in range(len(questions))]
    linked = names[questions.index("nvlinks 101")]
    gpus = [*zip(names, questions, strict=True), (linked, "nvlinks 111")]
    lines = [
        f"{index} {value}" for index, (name, own) in enumerate(gpus) for value in (*own.split(" / "), f"name {name}")
    ]
    driver(f"gpus {len(gpus)}", *lines)
    return watch().until_read(lambda _: True).gpus[:-1]  # A busy machine may say first that it takes long.


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [("throttled-often", "throttled_minutes", 5), ("nvlink-errors", "nvlink_error_minutes", 15)],
)
def test_rules_about_the_last_minutes_have_a_threshold(name: str, field: str, most: int) -> None:
    gpu = GpuReading(index=0)
    assert rules.at_start(replace(gpu, **{field: most})) == ()
    assert [finding.rule for finding in rules.at_start(replace(gpu, **{field: most + 1}))] == [name]


def test_more_errors_that_could_not_be_corrected_are_told_each_time() -> None:
    gpus = [GpuReading(index=0, uncorrected_errors=count) for count in (1, 1, 3)]
    assert rules.while_running(gpus[0], gpus[1]) == ()
    (finding,) = rules.while_running(gpus[1], gpus[2])
    assert (finding.text, finding.is_fault) == (
        "3 memory errors could not be corrected since its driver was loaded",
        True,
    )


def test_a_lost_gpu_is_a_lasting_fault() -> None:
    (finding,) = rules.while_running(GpuReading(index=3), GpuReading(index=3, uuid="GPU-3", error="GPU is lost"))
    assert (finding.rule, finding.severity, finding.is_fault, finding.gpu) == ("lost", "refuse", True, 3)


def test_what_only_warns_at_the_start_explains_no_later_failure() -> None:
    gpu = GpuReading(index=0, uncorrected_errors=1, is_remap_failed=True)
    assert {finding.rule: finding.is_fault for finding in rules.at_start(gpu)} == {
        "row-remap-failed": True,
        "uncorrected-errors": False,
    }


# Ports.

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


def broken_by(ports: list[IbPort]) -> list[str]:
    return [finding.rule for finding in rules.ports_at_start(ports)]


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
    assert broken_by([port]) == []


def test_what_one_port_of_four_says_breaks_a_rule() -> None:
    """A question is when it is asked, at the start or in the run, and what is unlike the other ports."""

    def broken(question: str) -> str:
        when, _, words = question.partition(" ")
        ports = [replace(FOUR[0], **golden.keywords(words)), *FOUR[1:]]
        found = rules.ports_at_start(ports) if when == "start" else rules.ports_while_running(FOUR, ports)
        return "; ".join(f"{each.rule}, {each.severity}, fault: {each.is_fault}, {each.text}" for each in found)

    golden.check_answers("port_rules", broken)


def test_second_ports_that_nobody_uses_are_no_finding() -> None:
    unused = [replace(port, name=f"{port.name}_b", state="DOWN", phys_state="Disabled") for port in FOUR]
    assert broken_by([*FOUR, *unused]) == []


def test_ports_of_another_kind_may_be_slower() -> None:
    assert broken_by([*FOUR, replace(GOOD, name="mlx5_9:1", board="MT_1", rate_gbps=25)]) == []


def test_an_adapter_that_vanishes_is_a_fault() -> None:
    (finding,) = rules.ports_while_running(FOUR, FOUR[1:])
    assert finding.text == "mlx5_0:1: it is no longer active: gone (no such port)"
