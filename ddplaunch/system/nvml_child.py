"""Reads the GPUs through NVML, in a process of its own: a driver that does not answer blocks whoever asks it.

``nvml`` starts this file by its path and reads its only line of output, a JSON object. ``READERS`` has what can be
asked. Must not import another module of ddplaunch.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def main() -> None:
    """``sys.argv``: what to read, a name of ``READERS``, and the ``sys.path`` of the starting process."""
    read, sys.path[:] = READERS[sys.argv[1]], sys.argv[2:]
    try:
        import pynvml

        pynvml.nvmlInit()
        answer: dict[str, Any] = {"gpus": [read(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]}
    except Exception as error:  # ctypes and the binding raise errors of many kinds; the reader gets them all.
        answer = {"error": _text(error)}
    print(json.dumps(answer))


def _activity(nvml: Any, index: int) -> dict[str, Any]:
    """The fields of ``nvml.GpuActivity``; what the GPU or the driver does not support is left out."""
    found: dict[str, Any] = {"index": index}
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return {**found, "error": _text(error)}
    utilization = _asked(nvml, found, "nvmlDeviceGetUtilizationRates", handle)
    found.update(
        name=_asked(nvml, found, "nvmlDeviceGetName", handle),
        uuid=_asked(nvml, found, "nvmlDeviceGetUUID", handle),
        pci_address=getattr(_asked(nvml, found, "nvmlDeviceGetPciInfo", handle), "busId", None),
        utilization=getattr(utilization, "gpu", None),
        memory_utilization=getattr(utilization, "memory", None),
        power_mw=_asked(nvml, found, "nvmlDeviceGetPowerUsage", handle),
        power_limit_mw=_asked(nvml, found, "nvmlDeviceGetEnforcedPowerLimit", handle),
        # Its old name: every driver has it.
        clock_reasons=_asked(nvml, found, "nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    )
    return {name: _decoded(value) for name, value in found.items() if value is not None}


def _asked(nvml: Any, found: dict[str, Any], function: str, handle: Any) -> Any:
    """What a function of NVML returns; None, and an error in ``found`` unless the function is merely missing."""
    try:
        return getattr(nvml, function)(handle)
    except nvml.NVMLError as error:
        if error.value not in (nvml.NVML_ERROR_NOT_SUPPORTED, nvml.NVML_ERROR_FUNCTION_NOT_FOUND):
            found["error"] = _text(error)
        return None


def _decoded(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__


READERS: dict[str, Callable[[Any, int], dict[str, Any]]] = {"activity": _activity}

if __name__ == "__main__":
    main()
