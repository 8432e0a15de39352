"""Events of a GPU; the actions of Xid errors are as in NVIDIA's catalogue."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ddplaunch.features.health.gpu_events import ACTIONS, XIDS, of_event, xid
from ddplaunch.protocol.gpus import GpuEvent

RESET = (46, 62, 64, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)


@pytest.mark.parametrize("number", RESET)
def test_errors_that_only_a_reset_ends_keep_the_gpu_out(number: int) -> None:
    assert (xid(number).action, xid(number).is_fault, xid(number).is_lasting) == ("reset", True, True)


def test_a_gpu_that_has_fallen_off_the_bus_is_kept_out() -> None:
    assert (xid(79).meaning, xid(79).is_fault, xid(79).is_lasting) == ("the GPU has fallen off the bus", True, True)


@pytest.mark.parametrize("number", [13, 31])
def test_errors_of_the_script_are_no_fault_of_the_hardware(number: int) -> None:
    assert (xid(number).is_fault, xid(number).is_lasting) == (False, False)


def test_a_contained_memory_error_ends_one_worker_only() -> None:
    assert (xid(94).action, xid(94).is_fault, xid(94).is_lasting) == ("restart", True, False)


@pytest.mark.parametrize("number", [43, 45, 63, 92, 154])
def test_what_needs_no_attention_is_ignored(number: int) -> None:
    assert xid(number).action == "ignore"


@pytest.mark.parametrize("number", [48, 74, *range(144, 151)])
def test_what_may_be_one_or_the_other_is_to_be_looked_at(number: int) -> None:
    assert (xid(number).action, xid(number).is_fault, xid(number).is_lasting) == ("investigate", True, False)


def test_a_number_that_nobody_knows_is_told() -> None:
    assert (xid(9999).action, xid(9999).is_fault) == ("investigate", False)


def test_each_action_says_what_to_do() -> None:
    assert {known.action for known in XIDS.values()} == set(ACTIONS)


@pytest.mark.parametrize(
    ("event", "text", "severity", "is_fault"),
    [
        (GpuEvent(index=3, kind="xid", xid=79), "Xid 79: the GPU has fallen off the bus", "refuse", True),
        (GpuEvent(index=3, kind="xid", xid=31), "Xid 31: a kernel has accessed memory that it may not", "warn", False),
        (GpuEvent(index=3, kind="ecc"), "a memory error could not be corrected (double-bit ECC)", "warn", True),
        (GpuEvent(index=3, kind="unavailable"), "the GPU has become unavailable", "refuse", True),
    ],
)
def test_an_event_is_a_finding_about_its_gpu(event: GpuEvent, text: str, severity: str, is_fault: bool) -> None:
    finding = of_event(replace(event, uuid="GPU-3"))
    assert finding
    assert (finding.text, finding.severity, finding.is_fault) == (text, severity, is_fault)
    assert (finding.gpu, finding.uuid) == (3, "GPU-3")


@pytest.mark.parametrize("event", [GpuEvent(index=0, kind="xid", xid=45), GpuEvent(index=0, kind="recovery")])
def test_an_event_that_needs_no_attention_is_none(event: GpuEvent) -> None:
    assert of_event(event) is None
