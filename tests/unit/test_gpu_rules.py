"""Every rule about a GPU fires at its threshold and not just below it; the values come through the real binding."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from ddplaunch.features.health import gpu_rules
from ddplaunch.features.health.gpu_rules import RULES
from ddplaunch.protocol.gpus import GpuReading
from tests.support.fake_nvml import Says

MB = 1 << 20

# Rule, values of a GPU that breaks it, values of one that just does not, and a part of the text.
CASES: list[tuple[str, list[str], list[str], str]] = [
    ("recovery-action", ["field230 1"], ["field230 0"], "the driver asks for a reset of the GPU"),
    ("recovery-action", ["field230 2"], [], "a reboot of the node"),
    ("recovery-action", ["field230 4"], [], "that the node is drained and the GPU reset"),
    ("recovery-action", ["field230 5"], [], "a recovery of the IMEX domain"),
    ("recovery-action", ["field230 6"], [], "a reset of the bus"),
    ("recovery-action", ["field230 7"], [], "a reboot of the machine"),
    ("recovery-action", ["field230 8"], [], "an unknown action"),
    ("drain-nvlinks", ["field230 3"], ["field230 0"], "that no process uses its NVLinks"),
    ("row-remap-failed", ["rows 0 1 0 1"], ["rows 0 1 0 0"], "could not be remapped"),
    ("row-remap-pending", ["rows 0 0 1 0"], ["rows 4 4 0 0"], "waits for a reset"),
    ("many-remapped-rows", ["rows 0 513 0 0"], ["rows 600 512 0 0"], "513 rows"),
    ("sram-worn", ["sram_worn 1"], ["sram_worn 0"], "its SRAM has more errors"),
    ("pcie-narrow", ["pcie 2", "pcie_max 16"], ["pcie 16", "pcie_max 16"], "2 of 16 lanes"),
    ("pcie-width", ["pcie 4", "pcie_max 16"], ["pcie 8", "pcie_max 8"], "4 of 16 lanes"),
    ("pcie-width", ["pcie 15", "pcie_max 16"], [], "15 of 16 lanes"),
    ("fabric-incomplete", ["fabric 1 0 0"], ["fabric 0 0 0"], "has not started"),
    ("fabric-incomplete", ["fabric 2 0 0"], ["fabric 3 0 0"], "is in progress"),
    ("fabric-incomplete", ["fabric 3 999 0"], [], "has failed with NVML's error 999"),
    ("fabric-degraded", ["fabric 3 0 1"], ["fabric 3 0 2"], "bandwidth is degraded"),
    ("fabric-degraded", ["fabric 3 0 4"], ["fabric 3 0 8"], "routes are being recovered"),
    ("fabric-degraded", ["fabric 3 0 16"], ["fabric 3 0 32"], "a route has failed"),
    ("uncorrected-errors", ["uncorrected 1"], ["uncorrected 0"], "1 memory errors"),
    ("many-corrected-sram", ["sram_corrected 10001"], ["sram_corrected 10000"], "10001 errors"),
    ("many-corrected-dram", ["dram_corrected 20000001"], ["dram_corrected 20000000"], "20000001 errors"),
    ("ecc-off", ["ecc 0 0", "ecc_default 1"], ["ecc 0 0", "ecc_default 0"], "not protected by ECC"),
    ("ecc-pending", ["ecc 1 0"], ["ecc 1 1"], "switched off"),
    ("ecc-pending", ["ecc 0 1"], ["ecc 0 0"], "switched on"),
    ("throttled", ["clocks 8"], ["clocks 7"], "hardware slowdown"),
    ("throttled", ["clocks 64"], ["clocks 32"], "thermal slowdown"),
    ("throttled", ["clocks 128"], ["clocks 16"], "power brake"),
    ("temperature", ["margin 4"], ["margin 5"], "4 degrees below"),
    ("temperature", ["margin -3"], [], "-3 degrees below"),
    ("nvlink-inactive", ["nvlinks 101"], ["nvlinks 111"], "2 of its NVLinks are active, 3 of others"),
    ("in-use", ["pid 4194304"], [], "process 4194304 uses it already"),
    (
        "in-use",
        [f"total {9 * MB}", f"used {513 * MB}"],
        [f"total {9 * MB}", f"used {512 * MB}"],
        "513 MB of its memory",
    ),
    ("in-use", ["pid 4194303"], ["display 1", f"total {9 * MB}", f"used {513 * MB}"], "process 4194303"),
]
HISTORY = {"throttled-often", "nvlink-errors"}
ELSEWHERE = {"lost"}


def test_each_rule_fires_at_its_threshold_and_in_the_run_when_a_gpu_begins_to_break_it(
    driver: Says, watch: Any
) -> None:
    in_run = {rule.name: rule.in_run for rule in RULES}
    with_broken, with_whole = (_read(driver, watch, [case[which] for case in CASES]) for which in (1, 2))
    for (name, _, _, text), broken, whole in zip(CASES, with_broken, with_whole, strict=True):
        (finding,) = gpu_rules.at_start(broken)
        assert (finding.rule, finding.gpu, finding.uuid) == (name, broken.index, broken.uuid)
        assert text in finding.text
        assert gpu_rules.at_start(whole) == (), name
        for before in (whole, None):
            assert [found.rule for found in gpu_rules.while_running(before, broken)] == [name] * in_run[name]
        assert gpu_rules.while_running(broken, broken) == gpu_rules.while_running(broken, whole) == ()


def _read(driver: Says, watch: Any, values: list[list[str]]) -> tuple[GpuReading, ...]:
    """All cases as GPUs of one machine, of a name each; one more GPU has all NVLinks, which count by name."""
    names = [f"case {index}" for index in range(len(values))]
    linked = names[[name for name, *_ in CASES].index("nvlink-inactive")]
    gpus = [*zip(names, values, strict=True), (linked, ["nvlinks 111"])]
    lines = [f"{index} {value}" for index, (name, own) in enumerate(gpus) for value in (*own, f"name {name}")]
    driver(f"gpus {len(gpus)}", *lines)
    return watch().until_read(lambda _: True).gpus[:-1]  # A busy machine may say first that it takes long.


def test_every_rule_has_a_case() -> None:
    assert {name for name, *_ in CASES} | HISTORY | ELSEWHERE == {rule.name for rule in RULES}


@pytest.mark.parametrize(
    ("name", "field", "most"),
    [("throttled-often", "throttled_minutes", 5), ("nvlink-errors", "nvlink_error_minutes", 15)],
)
def test_rules_about_the_last_minutes_have_a_threshold(name: str, field: str, most: int) -> None:
    gpu = GpuReading(index=0)
    assert gpu_rules.at_start(replace(gpu, **{field: most})) == ()
    assert [finding.rule for finding in gpu_rules.at_start(replace(gpu, **{field: most + 1}))] == [name]


def test_more_errors_that_could_not_be_corrected_are_told_each_time() -> None:
    gpus = [GpuReading(index=0, uncorrected_errors=count) for count in (1, 1, 3)]
    assert gpu_rules.while_running(gpus[0], gpus[1]) == ()
    (finding,) = gpu_rules.while_running(gpus[1], gpus[2])
    assert (finding.text, finding.is_fault) == (
        "3 memory errors could not be corrected since its driver was loaded",
        True,
    )


def test_a_lost_gpu_is_a_lasting_fault() -> None:
    (finding,) = gpu_rules.while_running(GpuReading(index=3), GpuReading(index=3, uuid="GPU-3", error="GPU is lost"))
    assert (finding.rule, finding.severity, finding.is_fault, finding.gpu) == ("lost", "refuse", True, 3)


def test_what_only_warns_at_the_start_explains_no_later_failure() -> None:
    gpu = GpuReading(index=0, uncorrected_errors=1, is_remap_failed=True)
    assert {finding.rule: finding.is_fault for finding in gpu_rules.at_start(gpu)} == {
        "row-remap-failed": True,
        "uncorrected-errors": False,
    }
