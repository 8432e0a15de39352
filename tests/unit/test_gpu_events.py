"""Events of a GPU; the actions of Xid errors are as in NVIDIA's catalogue."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddplaunch.features.gpus.records import GpuEvent
from ddplaunch.features.health.gpu_events import ACTIONS, XIDS, is_logged_for, of_event, recent_xids, xid
from tests.support import golden


def told(question: str) -> str:
    """Of ``ecc`` or ``xid 79`` of a GPU: the finding, and of an Xid its action."""
    kind, _, number = question.partition(" ")
    finding = of_event(GpuEvent(index=3, uuid="GPU-3", kind=kind, xid=int(number or 0)))  # type: ignore[arg-type]
    words = []
    if number:
        known = xid(int(number))
        words = [known.action, *["a fault"] * known.is_fault, *["lasting"] * known.is_lasting]
    if not finding:
        return ", ".join([*words, "no finding"])
    assert (finding.gpu, finding.uuid) == (3, "GPU-3")
    return ", ".join([*words, f"a finding{' of a fault' * finding.is_fault} ({finding.severity}): {finding.text}"])


def test_what_an_event_of_a_gpu_means() -> None:
    golden.check_answers("gpu_events", told)


def test_each_action_says_what_to_do() -> None:
    assert {known.action for known in XIDS.values()} == set(ACTIONS)


# The kernel's log: its records are made up, because a test cannot make a driver write them.


def record(text: str, age_s: float = 1.0) -> str:
    return f"4,1234,{int((time.monotonic() - age_s) * 1e6)},-;{text}\n SUBSYSTEM=pci\n"


def test_recent_errors_are_found_in_their_order(tmp_path: Path) -> None:
    log = tmp_path / "kmsg"
    log.write_text(
        record("NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.", 90)
        + record("usb 1-1: new device")
        + record("NVRM: Xid (PCI:0000:3B:00): 94, pid=7, Contained error")
        + record("NVRM: Xid (PCI:0000:17:00): 79, pid=1, GPU has fallen off the bus.")
        + record("told by a user: NVRM: Xid (PCI:0000:17:00): 13")
    )
    assert recent_xids(60, str(log)) == (("0000:3b:00", 94), ("0000:17:00", 79))


def test_a_log_that_cannot_be_read_has_no_errors(tmp_path: Path) -> None:
    assert recent_xids(60, str(tmp_path / "missing")) == ()
    assert isinstance(recent_xids(60), tuple), "whatever this machine allows"


@pytest.mark.parametrize(
    ("address", "is_it"),
    [("00000000:17:00.0", True), ("00000000:18:00.0", False), ("00000001:17:00.0", False), ("", False)],
)
def test_an_error_is_of_the_gpu_at_its_address(address: str, is_it: bool) -> None:
    assert is_logged_for("0000:17:00", address) == is_it
