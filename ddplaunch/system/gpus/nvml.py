"""What NVIDIA's GPUs of this machine do now: utilization and power, through NVML.

Runs in the agent, in a thread: it waits up to ``LIMIT_S``. NVML itself is called in a child process, because it blocks
where the driver does. Must not import the binding (pynvml), which is large.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import quote

LIBRARY = "libnvidia-ml.so.1"
"""A part of NVIDIA's driver. A machine without it has no GPU of NVIDIA that a program could use."""

LIMIT_S = 2.0
"""NVML answers within milliseconds; within a second where it must wake GPUs without persistence mode."""

NO_GPUS = "NVML knows no GPU"
UNREADABLE = "NVML's answer could not be read"

_CHILD = str(Path(__file__).with_name("gpu_child.py"))
_MAX_ANSWER_BYTES = 1 << 20
_REAP_S = 0.2

_THROTTLED = {
    0x40: "thermal slowdown (hardware)",
    0x20: "thermal slowdown (driver)",
    0x80: "power brake",
    0x08: "hardware slowdown",
}
"""Bits of nvmlClocksEventReasons: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html"""


@functools.cache
def is_installed() -> bool:
    """Whether NVML's library can be loaded. Takes less than a millisecond, and asks no driver."""
    try:
        ctypes.CDLL(LIBRARY)
    except OSError:
        return False
    return True


@dataclass(frozen=True, kw_only=True)
class GpuActivity:
    """One GPU. None: the GPU or its driver does not tell.

    Attributes:
        index: NVML's index: in PCI order, whatever CUDA_VISIBLE_DEVICES hides.
        pci_address: as NVML writes it: ``00000000:17:00.0``.
        utilization: percent of the last period (up to a second) in which a kernel ran, however little it did.
        memory_utilization: percent of that period in which device memory was read or written.
        power_w: watts.
        power_limit_w: watts, the limit that is in force.
        throttled: why its clocks are lowered, as ``thermal slowdown``; empty if they are not. A GPU that reaches its
            power limit is not throttled: that is usual.
        error: what NVML says of a GPU that fails, as ``GPU is lost``; empty for others.
    """

    index: int
    name: str = ""
    uuid: str = ""
    pci_address: str = ""
    utilization: int | None = None
    memory_utilization: int | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    throttled: str = ""
    error: str = ""


def gpu_activity(limit_s: float = LIMIT_S) -> tuple[tuple[GpuActivity, ...], str]:
    """All GPUs of NVIDIA, or none and a sentence that says why. Blocks up to ``limit_s`` seconds; raises nothing."""
    answer, missing = _ask("activity", limit_s)
    try:
        return tuple(_built(gpu) for gpu in answer), missing
    except (KeyError, TypeError, ValueError, AttributeError):
        return (), UNREADABLE


def _built(answer: dict[str, Any]) -> GpuActivity:
    return GpuActivity(
        index=int(answer["index"]),
        name=_line(answer.get("name")),
        uuid=_line(answer.get("uuid")),
        pci_address=_line(answer.get("pci_address")),
        utilization=_percent(answer.get("utilization")),
        memory_utilization=_percent(answer.get("memory_utilization")),
        power_w=_watts(answer.get("power_mw")),
        power_limit_w=_watts(answer.get("power_limit_mw")),
        throttled=throttled(answer.get("clock_reasons")),
        error=_line(answer.get("error")),
    )


def _line(text: str | None) -> str:
    return quote(str(text or ""))


def _percent(value: int | None) -> int | None:
    return None if value is None else max(0, min(int(value), 100))


def _watts(milliwatts: int | None) -> float | None:
    return None if milliwatts is None else int(milliwatts) / 1000


def throttled(reasons: int | None) -> str:
    """The texts of NVML's bit mask of clocks event reasons."""
    return ", ".join(text for bit, text in _THROTTLED.items() if int(reasons or 0) & bit)


def _ask(what: str, limit_s: float) -> tuple[list[Any], str]:
    """The GPUs as ``gpu_child`` reads them, or none and the reason."""
    try:
        output, returncode = _run_child(what, limit_s)
    except subprocess.TimeoutExpired:
        return [], silence(limit_s)
    except OSError as error:
        return [], not_started(error)
    try:
        answer = json.loads(output[:_MAX_ANSWER_BYTES])
        error_text, gpus = answer.get("error"), answer.get("gpus")
    except (ValueError, AttributeError, RecursionError):
        return [], f"the process that asked NVML ended with {returncode}, without an answer"
    if isinstance(gpus, list):
        return gpus, "" if gpus else NO_GPUS
    return [], f"NVML: {quote(str(error_text))}"


def silence(duration_s: float, who: str = "NVML") -> str:
    """What it means that NVML, or another driver's interface, says nothing."""
    return f"{who} has not answered for {duration_s:g} s: the GPU driver hangs, or is very slow"


def not_started(error: OSError) -> str:
    return f"no process could be started to ask the GPU driver: {os.strerror(error.errno or 0)}"


def _run_child(what: str, limit_s: float) -> tuple[bytes, int]:
    process = start_child(what, stdin=subprocess.DEVNULL)
    try:
        output, _ = process.communicate(timeout=limit_s)
        return output, process.returncode
    finally:
        end_child(process)


def start_child(what: str, stdin: int, interval_s: float = 0) -> subprocess.Popen[bytes]:
    """``gpu_child`` with its output in a pipe. Raises OSError.

    Args:
        what: what it is asked, as it says itself.
        stdin: as for ``subprocess``.
        interval_s: seconds between its readings, if it reads more than once.
    """
    # -S and -I: the child takes this process's search path, which has no folder of the user first.
    command = [sys.executable, "-S", "-I", _CHILD, what, str(interval_s), *sys.path]
    return subprocess.Popen(command, stdin=stdin, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Kill the process if it runs. Does not wait for one that the driver holds: ``subprocess`` reaps it later."""
    process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_REAP_S)
    if process.stdout:
        process.stdout.close()
