"""Events of a GPU, most of them Xid errors of NVIDIA's driver: what each means, and what is to be done.

Used by the agent. The meanings are after NVIDIA's catalogue,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html ("Resolution Bucket, Immediate Action"). Where NVML
does not tell of them any more, they are in the kernel's log.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.results import HealthFinding

if TYPE_CHECKING:
    from ddplaunch.features.gpus.records import GpuEvent

Action = Literal["script", "restart", "reset", "reboot", "investigate", "ignore"]

ACTIONS: dict[Action, str] = {
    "script": "an error of the script in most cases: run it with compute-sanitizer",
    "restart": "a restart of the job is enough",
    "reset": "drain the node and reset the GPU (nvidia-smi --gpu-reset)",
    "reboot": "drain the node and power-cycle it; if it happens again, replace the GPU",
    "investigate": "have the administrator look at the kernel log and the GPU's NVLinks",
    "ignore": "nothing",
}
"""What the user or the administrator can do."""


@dataclass(frozen=True)
class Xid:
    """One kind of Xid error.

    Attributes:
        meaning: continues ``Xid 79: ``.
        is_fault: the hardware, its firmware or the driver has failed, not the script: a worker that ends within a
            minute has ended because of it.
    """

    meaning: str
    action: Action
    is_fault: bool

    @property
    def is_lasting(self) -> bool:
        """Whether no worker should use the GPU before somebody has acted."""
        return self.action in ("reset", "reboot")


def _faults(numbers: Iterable[int], meaning: str, action: Action) -> dict[int, Xid]:
    return dict.fromkeys(numbers, Xid(meaning, action, True))


_CODEC = (68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139, 142)
_COPY_ENGINE = (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136))

XIDS: dict[int, Xid] = {
    8: Xid("the GPU has stopped processing", "restart", False),
    11: Xid("invalid commands were sent to the GPU", "restart", False),
    13: Xid("a kernel has failed, as by an access out of bounds", "script", False),
    25: Xid("invalid commands were sent to the GPU", "restart", False),
    31: Xid("a kernel has accessed memory that it may not", "script", False),
    32: Xid("commands were corrupted on their way to the GPU", "restart", True),
    **_faults(_COPY_ENGINE, "a copy engine has failed", "restart"),
    43: Xid("a process was stopped because of an error of its own", "ignore", False),
    45: Xid("a process has ended while the GPU worked for it", "ignore", False),
    46: Xid("the GPU has stopped processing", "reset", True),
    48: Xid("a memory error could not be corrected (double-bit ECC)", "investigate", True),
    54: Xid("the GPU's power cable is not connected", "reboot", True),
    60: Xid("the video processor has failed", "restart", True),
    62: Xid("the GPU's internal micro-controller has halted", "reset", True),
    63: Xid("a row of its memory will be remapped", "ignore", False),
    64: Xid("a row of its memory could not be remapped", "reset", True),
    **_faults(_CODEC, "a video engine has failed", "restart"),
    69: Xid("invalid commands were sent to the GPU", "script", False),
    74: Xid("an NVLink has failed, of this GPU or at the other end", "investigate", True),
    79: Xid("the GPU has fallen off the bus", "reboot", True),
    80: Xid("data were corrupted on their way to the GPU", "restart", True),
    92: Xid("many memory errors are corrected", "ignore", False),
    94: Xid("a memory error could not be corrected; it was contained in one process", "restart", True),
    95: Xid("a memory error could not be corrected nor contained", "reset", True),
    109: Xid("the GPU could not switch between processes", "reset", True),
    110: Xid("the GPU's security engine has failed", "reset", True),
    119: Xid("the GPU's firmware (GSP) does not answer", "reset", True),
    120: Xid("the GPU's firmware (GSP) has failed", "reset", True),
    121: Xid("errors of the link to the CPU were corrected", "ignore", False),
    136: Xid("an NVLink could not be trained", "reset", True),
    137: Xid("memory of another GPU was accessed over NVLink that may not be", "script", False),
    140: Xid("a memory error could not be corrected", "reset", True),
    143: Xid("the GPU could not be initialised", "reset", True),
    **_faults(range(144, 151), "an NVLink reports an error", "investigate"),
    151: Xid("the GPU's encryption keys could not be changed", "reboot", True),
    154: Xid("the driver asks for another recovery action", "ignore", False),
    155: Xid("an NVLink was taken down", "reset", True),
    156: Xid("a damaged part of the GPU will not be used after a reset", "reset", True),
    157: Xid("a damaged part of the GPU could not be taken out of use", "investigate", True),
    158: Xid("the GPU does not answer", "reset", True),
    167: Xid("the GPU does not answer over PCIe", "reboot", True),
    169: Xid("the GPU's internal micro-controller has halted", "reset", True),
    171: Xid("a memory error could not be corrected (DRAM)", "investigate", True),
    172: Xid("a memory error could not be corrected (SRAM)", "investigate", True),
}
"""154 is told by the recovery action that is read after it; 43 and 45 follow each worker that is killed."""

_UNKNOWN = Xid("an error that this version does not know", "investigate", False)


def xid(number: int) -> Xid:
    """The meaning of a number, whatever it is."""
    return XIDS.get(number, _UNKNOWN)


_EVENTS = {
    "ecc": Xid("a memory error could not be corrected (double-bit ECC)", "investigate", True),
    "unavailable": Xid("the GPU has become unavailable", "reset", True),
}
"""Events that are no Xid; a new recovery action is told by the reading that follows."""


def of_event(event: GpuEvent) -> HealthFinding | None:
    """What an event means; None for one that needs no attention, or of which the next reading tells more."""
    known = xid(event.xid) if event.kind == "xid" else _EVENTS.get(event.kind)
    if known is None or known.action == "ignore":
        return None
    number = f"Xid {event.xid}: " if event.kind == "xid" else ""
    return HealthFinding(
        rule=f"xid-{event.xid}" if event.kind == "xid" else f"event-{event.kind}",
        text=f"{number}{known.meaning}",
        action=ACTIONS[known.action],
        severity="refuse" if known.is_lasting else "warn",
        is_fault=known.is_fault,
        gpu=event.index,
        uuid=event.uuid,
    )


def of_silence(missing: str) -> HealthFinding:
    """NVML did not answer, or could not be asked: ``missing`` says which."""
    return HealthFinding(
        rule="nvml-silent", text=missing, action="look at the kernel log (dmesg) for messages of the driver"
    )


# The kernel's log: lines of NVIDIA's driver (``NVRM: Xid``). /dev/kmsg may be read by root, and by others where
# ``kernel.dmesg_restrict`` is 0; in a container it is often missing.

_KERNEL_LOG = "/dev/kmsg"
_MAX_RECORDS = 100_000
_MAX_RECORD_BYTES = 8192
_XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)\b", re.MULTILINE)


def recent_xids(within_s: float, path: str = _KERNEL_LOG) -> tuple[tuple[str, int], ...]:
    """The Xid errors of the last ``within_s`` seconds, in order; none where the log cannot be read. Never blocks.

    Each with the PCI address of its GPU, without function, as ``0000:17:00``.
    """
    earliest_us = (time.monotonic() - within_s) * 1e6
    found = _XID.findall(_read(path))
    return tuple((address.lower(), int(xid)) for at_us, address, xid in found if int(at_us) >= earliest_us)


def is_logged_for(logged: str, pci_address: str) -> bool:
    """Whether an address of the log is that of the GPU at ``pci_address`` as NVML writes it, ``00000000:17:00.0``."""
    domain, _, rest = pci_address.lower().partition(":")
    own_domain, _, own_rest = logged.partition(":")
    return bool(own_rest) and rest.startswith(own_rest) and domain.lstrip("0") == own_domain.lstrip("0")


def _read(path: str) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return b"".join(_records(fd)).decode(errors="replace")
    finally:
        os.close(fd)


def _records(fd: int) -> list[bytes]:
    """One record per read; the newest come last."""
    records: list[bytes] = []
    while len(records) < _MAX_RECORDS:
        try:
            record = os.read(fd, _MAX_RECORD_BYTES)
        except BrokenPipeError:  # Records were overwritten while this process read; the next call goes on after them.
            continue
        except OSError:  # EAGAIN: there is no more.
            break
        if not record:
            break
        records.append(record)
    return records
