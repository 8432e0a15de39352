"""What NVML tells of a GPU, and its events. Runs in the child of ``nvml`` and ``gpu_health``.

The binding (pynvml) is an argument, and is not imported. What it or the driver lacks is left out.
"""

from __future__ import annotations

import ctypes
import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

_MAX_LINKS = 36
"""NVML_NVLINK_MAX_LINKS."""

_RECOVERY_ACTION = 230
"""NVML_FI_DEV_GET_GPU_RECOVERY_ACTION, of drivers from 570 on."""

_NVLINK_ERRORS = (38, 45, 52, 59)
"""NVML_FI_DEV_NVLINK_*_ERROR_COUNT_TOTAL: CRC of flits and of data, replays, recoveries; of all links."""

_EVENTS = {0x8: "xid", 0x2: "ecc", 0x4000: "unavailable", 0x8000: "recovery"}
"""nvmlEventType of Xid errors, double-bit ECC errors, a GPU that is unavailable, a new recovery action."""

_EVENT_WAIT_MS = 60_000
_EVENT_PAUSE_S = 1.0

_MPS_SERVER = "nvidia-cuda-mps"
"""NVIDIA's server that shares a GPU between processes, as /proc/PID/comm has it; its clients are told too."""

Values = dict[str, Any]


def activity(nvml: Any) -> list[Values]:
    """For each GPU the values that ``nvml.GpuActivity`` has."""
    return _each(nvml, _activity)


def health(nvml: Any) -> list[Values]:
    """For each GPU the values that ``gpu_health.GpuHealth`` has."""
    return _each(nvml, _health)


def memory(nvml: Any) -> list[Values]:
    """For each GPU the values that ``gpu_health.GpuMemory`` has."""
    return _each(nvml, _memory)


def usage(nvml: Any) -> list[Values]:
    """For each GPU the values that ``gpu_health.GpuUsage`` has."""
    return _each(nvml, _usage)


def _each(nvml: Any, read: Callable[[Any, Values, Any], None]) -> list[Values]:
    """What ``read`` adds to each GPU's index; what the GPU or the driver does not support is left out."""
    return [_one(nvml, read, index) for index in range(nvml.nvmlDeviceGetCount())]


def _one(nvml: Any, read: Callable[[Any, Values, Any], None], index: int) -> Values:
    found: Values = {"index": index}
    try:
        read(nvml, found, nvml.nvmlDeviceGetHandleByIndex(index))
    except nvml.NVMLError as error:
        found["error"] = text_of(error)
    return {name: _decoded(value) for name, value in found.items() if value is not None}


def _asked(nvml: Any, found: Values, function: str, *arguments: Any) -> Any:
    """What a function of NVML returns; None if it fails, and an error in ``found`` if the GPU is lost.

    A function that is missing in the driver, in the binding or for this GPU is no error.
    """
    try:
        return getattr(nvml, function)(*arguments)
    except nvml.NVMLError as error:
        if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_IRQ_ISSUE):
            found["error"] = text_of(error)
    except Exception:  # The binding has no such function, or it is too new for the driver, which has its own errors.
        pass
    return None


def _decoded(value: Any) -> Any:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def text_of(error: Exception) -> str:
    """An error in words."""
    return str(error) or type(error).__name__


def _identity(nvml: Any, found: Values, handle: Any) -> None:
    found.update(
        name=_asked(nvml, found, "nvmlDeviceGetName", handle),
        uuid=_asked(nvml, found, "nvmlDeviceGetUUID", handle),
        pci_address=getattr(_asked(nvml, found, "nvmlDeviceGetPciInfo", handle), "busId", None),
        power_limit_mw=_asked(nvml, found, "nvmlDeviceGetEnforcedPowerLimit", handle),
        # Its old name: every driver has it.
        clock_reasons=_asked(nvml, found, "nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    )


def _activity(nvml: Any, found: Values, handle: Any) -> None:
    _identity(nvml, found, handle)
    utilization = _asked(nvml, found, "nvmlDeviceGetUtilizationRates", handle)
    found.update(
        utilization=getattr(utilization, "gpu", None),
        memory_utilization=getattr(utilization, "memory", None),
        power_mw=_asked(nvml, found, "nvmlDeviceGetPowerUsage", handle),
    )


def _health(nvml: Any, found: Values, handle: Any) -> None:
    _identity(nvml, found, handle)
    for read in (_versions, _memory, _memory_errors, _links, _fabric):
        read(nvml, found, handle)
    found.update(
        recovery_action=_field(nvml, found, handle, _RECOVERY_ACTION),
        temperature_margin_c=_asked(nvml, found, "nvmlDeviceGetMarginTemperature", handle),
        pcie_width=_asked(nvml, found, "nvmlDeviceGetCurrPcieLinkWidth", handle),
        pcie_max_width=_asked(nvml, found, "nvmlDeviceGetMaxPcieLinkWidth", handle),
    )


def _versions(nvml: Any, found: Values, handle: Any) -> None:
    mig = _asked(nvml, found, "nvmlDeviceGetMigMode", handle)
    found.update(
        driver=_asked(nvml, found, "nvmlSystemGetDriverVersion"),
        vbios=_asked(nvml, found, "nvmlDeviceGetVbiosVersion", handle),
        is_mig=bool(mig[0]) if mig else None,
        has_display=_asked(nvml, found, "nvmlDeviceGetDisplayActive", handle),
    )


def _usage(nvml: Any, found: Values, handle: Any) -> None:
    utilization = _asked(nvml, found, "nvmlDeviceGetUtilizationRates", handle)
    found.update(
        utilization=getattr(utilization, "gpu", None),
        used_bytes=getattr(_memory_info(nvml, found, handle), "used", None),
        power_mw=_asked(nvml, found, "nvmlDeviceGetPowerUsage", handle),
        temperature_c=_asked(nvml, found, "nvmlDeviceGetTemperature", handle, 0),  # NVML_TEMPERATURE_GPU.
        clock_reasons=_asked(nvml, found, "nvmlDeviceGetCurrentClocksThrottleReasons", handle),
    )


def _memory_info(nvml: Any, found: Values, handle: Any) -> Any:
    """Version 2 of the call leaves out what the driver reserves, which is over 512 MB on large GPUs."""
    version = getattr(nvml, "nvmlMemory_v2", None)
    memory = _asked(nvml, found, "nvmlDeviceGetMemoryInfo", handle, version)
    return memory or _asked(nvml, found, "nvmlDeviceGetMemoryInfo", handle)


def _memory(nvml: Any, found: Values, handle: Any) -> None:
    memory = _memory_info(nvml, found, handle)
    found.update(
        memory_bytes=getattr(memory, "total", None),
        used_bytes=getattr(memory, "used", None),
        pids=sorted(process.pid for process in _processes(nvml, found, handle) if _is_counted(process.pid)),
    )


def _processes(nvml: Any, found: Values, handle: Any) -> list[Any]:
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
        processes: list[Any] | None = _asked(nvml, found, function, handle)
        if processes is not None:
            return processes
    return []


def _is_counted(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() != _MPS_SERVER
    except OSError:
        return True


def _memory_errors(nvml: Any, found: Values, handle: Any) -> None:
    corrected, uncorrected, volatile, dram, sram = 0, 1, 0, 2, 7  # NVML's enumerations.
    rows = _asked(nvml, found, "nvmlDeviceGetRemappedRows", handle)
    mode = _asked(nvml, found, "nvmlDeviceGetEccMode", handle)
    default = _asked(nvml, found, "nvmlDeviceGetDefaultEccMode", handle)
    if rows:
        _, found["uncorrected_rows"], found["is_remap_pending"], found["is_remap_failed"] = map(int, rows)
    if mode:
        found["is_ecc_on"], found["is_ecc_wanted"] = mode
    found.update(
        is_ecc_usual=default[0] if default else None,
        is_sram_worn=_sram_status(nvml, found, handle),
        uncorrected_errors=_asked(nvml, found, "nvmlDeviceGetTotalEccErrors", handle, uncorrected, volatile),
        sram_corrected=_asked(nvml, found, "nvmlDeviceGetMemoryErrorCounter", handle, corrected, volatile, sram),
        dram_corrected=_asked(nvml, found, "nvmlDeviceGetMemoryErrorCounter", handle, corrected, volatile, dram),
    )


def _sram_status(nvml: Any, found: Values, handle: Any) -> int | None:
    status = _filled(nvml, found, "nvmlDeviceGetSramEccErrorStatus", handle, "c_nvmlEccSramErrorStatus_v1_t")
    return None if status is None else int(status.bThresholdExceeded)


def _filled(nvml: Any, found: Values, function: str, handle: Any, structure: str) -> Any:
    """A structure that a function of NVML has filled; None as for ``_asked``, or if the binding has no such one."""
    make = getattr(nvml, structure, None)
    filled: Any = make() if make else None
    is_filled = make and _asked(nvml, found, function, handle, ctypes.byref(filled)) is not None
    return filled if is_filled else None


def _fabric(nvml: Any, found: Values, handle: Any) -> None:
    """The state of a GPU on NVSwitches: the newest structure that both the binding and the driver know."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfoV_t"):
        info = _filled(nvml, found, "nvmlDeviceGetGpuFabricInfoV", handle, name)
        if info is not None:
            found.update(fabric_state=info.state, fabric_status=info.status, fabric_health=info.healthMask)
            return


def _links(nvml: Any, found: Values, handle: Any) -> None:
    """NVLinks, those of them that are active, and the errors of all since the driver was loaded."""
    states = []
    for link in range(_MAX_LINKS):
        try:
            states.append(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            break
    if states:
        errors = [_field(nvml, found, handle, number) or 0 for number in _NVLINK_ERRORS]
        found.update(nvlinks=len(states), nvlinks_active=sum(map(bool, states)), nvlink_errors=sum(errors))


def _field(nvml: Any, found: Values, handle: Any, number: int) -> int | None:
    values = _asked(nvml, found, "nvmlDeviceGetFieldValues", handle, [number])
    if values is None or values[0].nvmlReturn:
        return None
    kinds = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
    return int(getattr(values[0].value, kinds.get(values[0].valueType, "uiVal")))


class Events:
    """The events of all GPUs. Raises the binding's NVMLError if this driver has none."""

    def __init__(self, nvml: Any) -> None:
        self._nvml = nvml
        self._set = nvml.nvmlEventSetCreate()
        self._gpus: dict[int | None, Values] = {}
        self._has_failed = False
        for index in range(nvml.nvmlDeviceGetCount()):
            self._register(index)

    def _register(self, index: int) -> None:
        """Nothing for a GPU that has none of the events, or is lost."""
        nvml = self._nvml
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
            wanted = nvml.nvmlDeviceGetSupportedEventTypes(handle) & sum(_EVENTS)
            if wanted:
                nvml.nvmlDeviceRegisterEvents(handle, wanted, self._set)
                self._gpus[_address(handle)] = {"index": index, "uuid": _decoded(nvml.nvmlDeviceGetUUID(handle))}
        except nvml.NVMLError:
            pass

    def __bool__(self) -> bool:
        """Whether any GPU has events."""
        return bool(self._gpus)

    def wait(self) -> Values | None:
        """The next event, as ``gpu_health.GpuEvent`` has it; None after a minute, or if the GPUs should be read."""
        nvml = self._nvml
        if self._has_failed:
            time.sleep(_EVENT_PAUSE_S)  # After a GPU is lost, which the next reading tells, each call fails at once.
        try:
            data = nvml.nvmlEventSetWait(self._set, _EVENT_WAIT_MS)
        except nvml.NVMLError as error:
            self._has_failed = error.value != nvml.NVML_ERROR_TIMEOUT
            return None
        kind, gpu = _EVENTS.get(data.eventType), self._gpus.get(_address(data.device))
        return {**gpu, "kind": kind, "xid": data.eventData if kind == "xid" else 0} if kind and gpu else None


def _address(handle: Any) -> int | None:
    """What is equal for two handles of one GPU."""
    return ctypes.cast(handle, ctypes.c_void_p).value
