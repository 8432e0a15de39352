"""Xid errors are found in the kernel's log; its records are made up, because a test cannot make a driver write them."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from ddplaunch.system.gpus import kernel_log
from ddplaunch.system.gpus.kernel_log import recent_xids


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
    assert kernel_log.is_of("0000:17:00", address) == is_it
