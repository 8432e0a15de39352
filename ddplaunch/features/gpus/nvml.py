"""What NVML, the library of NVIDIA's driver, tells of a GPU, and its events. Runs in ``child``.

The binding (pynvml) is an argument, and is not imported. What it or the driver lacks is left out.
"""

from __future__ import annotations

import ctypes
import time
from typing import Any

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


def read(nvml: Any, question: str) -> list[Values]:
    """For each GPU the values of ``records.GpuReading`` that the question is about; None: unknown."""
    return [_one(nvml, question, index) for index in range(nvml.nvmlDeviceGetCount())]


def _one(nvml: Any, question: str, index: int) -> Values:
    found: Values = {"index": index}
    try:
        gpu = _Gpu(nvml, nvml.nvmlDeviceGetHandleByIndex(index), found)
        for part in _PARTS[question]:
            part(gpu)
    except nvml.NVMLError as error:
        found["error"] = str(error)
    return found


class _Gpu:
    """A GPU that is being read; ``found`` gets its values."""

    def __init__(self, nvml: Any, handle: Any, found: Values) -> None:
        self.nvml, self.handle, self.found = nvml, handle, found

    def asked(self, function: str, *arguments: Any) -> Any:
        """As ``called``, for a function whose first argument is the GPU."""
        return self.called(function, self.handle, *arguments)

    def called(self, function: str, *arguments: Any) -> Any:
        """What a function of NVML returns; None if it fails, and an error in ``found`` if the GPU is lost.

        A function that is missing in the driver, in the binding or for this GPU is no error.
        """
        nvml = self.nvml
        try:
            return getattr(nvml, function)(*arguments)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_GPU_IS_LOST, nvml.NVML_ERROR_RESET_REQUIRED, nvml.NVML_ERROR_IRQ_ISSUE):
                self.found["error"] = str(error)
        except (
            Exception
        ):  # The binding has no such function, or it is too new for the driver, which has its own errors.
            pass
        return None

    def watts(self, function: str) -> float | None:
        milliwatts = self.asked(function)
        return None if milliwatts is None else milliwatts / 1000

    def filled(self, function: str, structure: str) -> Any:
        """A structure that a function has filled; None as for ``asked``, or if the binding has no such one."""
        make = getattr(self.nvml, structure, None)
        filled: Any = make() if make else None
        is_filled = make and self.asked(function, ctypes.byref(filled)) is not None
        return filled if is_filled else None

    def field(self, number: int) -> int | None:
        values = self.asked("nvmlDeviceGetFieldValues", [number])
        if values is None or values[0].nvmlReturn:
            return None
        kinds = {1: "uiVal", 2: "ulVal", 3: "ullVal", 4: "sllVal", 5: "siVal", 6: "usVal"}
        return int(getattr(values[0].value, kinds.get(values[0].valueType, "uiVal")))


def _identity(gpu: _Gpu) -> None:
    gpu.found.update(
        name=gpu.asked("nvmlDeviceGetName"),
        uuid=gpu.asked("nvmlDeviceGetUUID"),
        pci_address=getattr(gpu.asked("nvmlDeviceGetPciInfo"), "busId", None),
        power_limit_w=gpu.watts("nvmlDeviceGetEnforcedPowerLimit"),
    )


def _clocks(gpu: _Gpu) -> None:
    # Its old name: every driver has it.
    gpu.found["clock_reasons"] = gpu.asked("nvmlDeviceGetCurrentClocksThrottleReasons")


def _activity(gpu: _Gpu) -> None:
    utilization = gpu.asked("nvmlDeviceGetUtilizationRates")
    gpu.found.update(
        utilization=getattr(utilization, "gpu", None),
        memory_utilization=getattr(utilization, "memory", None),
        power_w=gpu.watts("nvmlDeviceGetPowerUsage"),
    )


def _memory(gpu: _Gpu) -> None:
    """Version 2 of the call leaves out what the driver reserves, which is over 512 MB on large GPUs."""
    version = getattr(gpu.nvml, "nvmlMemory_v2", None)
    memory = gpu.asked("nvmlDeviceGetMemoryInfo", version) or gpu.asked("nvmlDeviceGetMemoryInfo")
    gpu.found.update(memory_bytes=getattr(memory, "total", None), used_bytes=getattr(memory, "used", None))


def _temperature(gpu: _Gpu) -> None:
    gpu.found["temperature_c"] = gpu.asked("nvmlDeviceGetTemperature", 0)  # NVML_TEMPERATURE_GPU.


def _processes(gpu: _Gpu) -> None:
    for function in ("nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetComputeRunningProcesses_v2"):
        processes = gpu.asked(function)
        if processes is not None:
            gpu.found["pids"] = sorted(process.pid for process in processes if _is_counted(process.pid))
            return


def _is_counted(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/comm", encoding="ascii", errors="replace") as file:
            return file.read().strip() != _MPS_SERVER
    except OSError:
        return True


def _versions(gpu: _Gpu) -> None:
    mig = gpu.asked("nvmlDeviceGetMigMode")
    gpu.found.update(
        driver=gpu.called("nvmlSystemGetDriverVersion"),
        vbios=gpu.asked("nvmlDeviceGetVbiosVersion"),
        is_mig=bool(mig[0]) if mig else None,
        has_display=_bool(gpu.asked("nvmlDeviceGetDisplayActive")),
    )


def _memory_errors(gpu: _Gpu) -> None:
    corrected, uncorrected, volatile, dram, sram = 0, 1, 0, 2, 7  # NVML's enumerations.
    _, rows, is_pending, is_failed = gpu.asked("nvmlDeviceGetRemappedRows") or (None,) * 4
    is_on, is_wanted = gpu.asked("nvmlDeviceGetEccMode") or (None, None)
    default = gpu.asked("nvmlDeviceGetDefaultEccMode")
    worn = gpu.filled("nvmlDeviceGetSramEccErrorStatus", "c_nvmlEccSramErrorStatus_v1_t")
    gpu.found.update(
        uncorrected_rows=rows,
        is_remap_pending=_bool(is_pending),
        is_remap_failed=_bool(is_failed),
        is_ecc_on=_bool(is_on),
        is_ecc_wanted=_bool(is_wanted),
        is_ecc_usual=bool(default[0]) if default else None,
        is_sram_worn=None if worn is None else bool(worn.bThresholdExceeded),
        uncorrected_errors=gpu.asked("nvmlDeviceGetTotalEccErrors", uncorrected, volatile),
        sram_corrected=gpu.asked("nvmlDeviceGetMemoryErrorCounter", corrected, volatile, sram),
        dram_corrected=gpu.asked("nvmlDeviceGetMemoryErrorCounter", corrected, volatile, dram),
    )


def _bool(value: int | None) -> bool | None:
    return None if value is None else bool(value)


def _links(gpu: _Gpu) -> None:
    """NVLinks that are active; and for ``child._History``, the errors of all since the driver was loaded."""
    states = []
    for link in range(_MAX_LINKS):
        try:
            states.append(gpu.nvml.nvmlDeviceGetNvLinkState(gpu.handle, link))
        except gpu.nvml.NVMLError:
            break
    if states:
        errors = sum(gpu.field(number) or 0 for number in _NVLINK_ERRORS)
        gpu.found.update(nvlinks_active=sum(map(bool, states)), nvlink_errors=errors)


def _fabric(gpu: _Gpu) -> None:
    """The state of a GPU on NVSwitches: the newest structure that both the binding and the driver know."""
    for name in ("c_nvmlGpuFabricInfo_v3_t", "c_nvmlGpuFabricInfoV_t"):
        info = gpu.filled("nvmlDeviceGetGpuFabricInfoV", name)
        if info is not None:
            gpu.found.update(fabric_state=info.state, fabric_status=info.status, fabric_health=info.healthMask)
            return


def _rest_of_health(gpu: _Gpu) -> None:
    gpu.found.update(
        recovery_action=gpu.field(_RECOVERY_ACTION),
        temperature_margin_c=gpu.asked("nvmlDeviceGetMarginTemperature"),
        pcie_width=gpu.asked("nvmlDeviceGetCurrPcieLinkWidth"),
        pcie_max_width=gpu.asked("nvmlDeviceGetMaxPcieLinkWidth"),
    )


_PARTS = {
    "activity": (_identity, _clocks, _activity),
    "usage": (_clocks, _activity, _memory, _temperature),
    "memory": (_memory, _processes),
    "health": (
        *(_identity, _clocks, _versions, _memory, _processes),
        *(_memory_errors, _links, _fabric, _rest_of_health),
    ),
}
"""What is read for each question."""


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
                self._gpus[_address(handle)] = {"index": index, "uuid": nvml.nvmlDeviceGetUUID(handle)}
        except nvml.NVMLError:
            pass

    def __bool__(self) -> bool:
        """Whether any GPU has events."""
        return bool(self._gpus)

    def wait(self) -> Values | None:
        """The next event, as ``records.GpuEvent`` has it; None after a minute, or if the GPUs should be read."""
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
