"""Xid errors in the kernel's log, where NVML does not tell them any more: lines of NVIDIA's driver (``NVRM: Xid``).

Used by the agent. /dev/kmsg may be read by root, and by others where ``kernel.dmesg_restrict`` is 0; in a container it
is often missing. Never blocks.
"""

from __future__ import annotations

import os
import re
import time

PATH = "/dev/kmsg"
_MAX_RECORDS = 100_000
_MAX_RECORD_BYTES = 8192
_XID = re.compile(r"^\d+,\d+,(\d+),[^;]*;NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)\b", re.MULTILINE)


def recent_xids(within_s: float, path: str = PATH) -> tuple[tuple[str, int], ...]:
    """The Xid errors of the last ``within_s`` seconds, in order; none where the log cannot be read.

    Each with the PCI address of its GPU, without function, as ``0000:17:00``.
    """
    earliest_us = (time.monotonic() - within_s) * 1e6
    found = _XID.findall(_read(path))
    return tuple((address.lower(), int(xid)) for at_us, address, xid in found if int(at_us) >= earliest_us)


def is_of(logged: str, pci_address: str) -> bool:
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
