"""GPUs, as a process tells another of them: what identifies one, what was read of it, what has happened to it.

The child of ``GpuReader`` sends a GpusRead for each question, and a GpuEvent when something happens; records of other
features have GPUs in them. A value that the GPU or its driver does not tell is None, empty or 0. Pure.
"""

from __future__ import annotations

from typing import Annotated, Literal

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, OneLine, Size, at_most, between

MAX_GPUS = 256
"""In one record; so for ports and events."""

MAX_NUMBER = 1 << 60
Number = Annotated[int, between(0, MAX_NUMBER)]
Watts = Annotated[float, between(0, MAX_NUMBER)]

Question = Literal["health", "memory", "usage", "activity", ""]

_THROTTLED = {
    0x40: "thermal slowdown (hardware)",
    0x20: "thermal slowdown (driver)",
    0x80: "power brake",
    0x08: "hardware slowdown",
}
"""Bits of nvmlClocksEventReasons: https://docs.nvidia.com/deploy/nvml-api/group__nvmlClocksEventReasons.html

A GPU that reaches its power limit is not throttled: that is usual.
"""

HARDWARE_SLOWDOWN = 0x08 | 0x40 | 0x80
"""Those of them that the hardware sets."""


def throttled(reasons: int | None) -> str:
    """Why clocks are lowered, as ``power brake``; empty if they are not. ``reasons`` are nvmlClocksEventReasons."""
    return ", ".join(text for bit, text in _THROTTLED.items() if (reasons or 0) & bit)


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, and what should be the same for all GPUs of a job.

    Attributes:
        index: NVML's index, or that of another vendor's driver: in PCI order, whatever CUDA_VISIBLE_DEVICES hides.
        pci_address: as the driver writes it: NVML as ``00000000:17:00.0``.
        power_limit_w: watts, the limit that is in force.
    """

    index: Count
    uuid: OneLine = ""
    name: OneLine = ""
    pci_address: OneLine = ""
    driver: OneLine = ""
    vbios: OneLine = ""
    is_mig: bool = False
    memory_bytes: Size = 0
    power_limit_w: Watts = 0.0

    def is_named(self, name: str) -> bool:
        """Whether ``name``, as in CUDA_VISIBLE_DEVICES, is this GPU. CUDA accepts the begin of a UUID, too."""
        return name == str(self.index) if name.isdigit() else bool(self.uuid) and self.uuid.startswith(name)


@dataclass(frozen=True, kw_only=True)
class GpuReading(Gpu):
    """A GPU as it was read: the values that the question is about, and no others.

    Attributes:
        error: what the driver says of a GPU that it has lost, as ``GPU is lost``; empty for others.
        has_display: a monitor is connected: the desktop uses its memory.
        used_bytes: device memory that any process uses; old drivers count what they reserve too.
        pids: processes that compute on it, in this machine's numbers; a container may not see them.
        utilization: percent of the last period (up to a second) in which a kernel ran, however little it did.
        memory_utilization: percent of that period in which device memory was read or written.
        temperature_margin_c: degrees below the temperature at which it lowers its clocks.
        clock_reasons: the bits nvmlClocksEventReasons.
        throttled_minutes: of the last 10 minutes, those in which the hardware has lowered its clocks.
        recovery_action: nvmlGpuRecoveryAction: what the driver wants done; 0 is nothing.
        uncorrected_rows: rows of its memory that were remapped because of uncorrectable errors.
        is_sram_worn: the driver counts more errors of its SRAM than a good GPU has.
        uncorrected_errors: memory errors that could not be corrected, since the driver was loaded.
        sram_corrected: corrected errors, since the driver was loaded; so is ``dram_corrected``.
        is_ecc_wanted: whether its memory is protected by ECC after the next reset.
        is_ecc_usual: whether it is on GPUs of this kind as they are delivered.
        fabric_state: nvmlGpuFabricState: 0 no NVSwitch, 1 not started, 2 in progress, 3 completed.
        fabric_status: NVML's error code of the registration with the fabric, once it has completed; 0 is none.
        fabric_health: the bits NVML_GPU_FABRIC_HEALTH_MASK.
        nvlinks_active: its NVLinks that work.
        nvlinks_usual: active links of the GPU of this name that has most of them on this machine.
        nvlink_error_minutes: of the last 30 minutes, those in which its NVLinks had errors; all of them were corrected.
    """

    error: OneLine = ""
    has_display: bool | None = None
    used_bytes: Size | None = None
    pids: Annotated[tuple[Number, ...], at_most(1 << 12)] = ()
    utilization: Number | None = None
    memory_utilization: Number | None = None
    power_w: Watts | None = None
    temperature_c: Number | None = None
    temperature_margin_c: Annotated[int, between(-MAX_NUMBER, MAX_NUMBER)] | None = None
    clock_reasons: Number | None = None
    throttled_minutes: Number | None = None
    recovery_action: Number | None = None
    uncorrected_rows: Number | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    is_sram_worn: bool | None = None
    uncorrected_errors: Number | None = None
    sram_corrected: Number | None = None
    dram_corrected: Number | None = None
    is_ecc_on: bool | None = None
    is_ecc_wanted: bool | None = None
    is_ecc_usual: bool | None = None
    pcie_width: Number | None = None
    pcie_max_width: Number | None = None
    fabric_state: Number | None = None
    fabric_status: Number | None = None
    fabric_health: Number | None = None
    nvlinks_active: Number | None = None
    nvlinks_usual: Number | None = None
    nvlink_error_minutes: Number | None = None

    @property
    def throttled(self) -> str:
        """Why its clocks are lowered, in words; empty if they are not."""
        return throttled(self.clock_reasons)

    def identity(self) -> Gpu:
        """The GPU without its other values, for a record that many nodes send."""
        return Gpu(**{name: getattr(self, name) for name in vars(Gpu)["__dataclass_fields__"]})


@dataclass(frozen=True, kw_only=True)
class GpuEvent:
    """Something that NVML has told when it happened; ``xid`` is the number of an Xid error, else 0.

    A new recovery action, or a GPU that is lost, also changes a reading, which follows.
    """

    index: Count
    uuid: OneLine = ""
    kind: Literal["xid", "ecc", "unavailable", "recovery"]
    xid: Number = 0


@dataclass(frozen=True, kw_only=True)
class IbPort:
    """One InfiniBand or RoCE port; see Documentation/ABI/stable/sysfs-class-infiniband of the Linux kernel.

    Attributes:
        name: adapter and port, as ``mlx5_0:1``.
        board: the kind of the adapter, as ``MT_0000000838``.
        link_layer: ``InfiniBand`` or ``Ethernet``.
        state: ``ACTIVE``, ``DOWN``, ``INIT`` or ``ARMED``.
        phys_state: ``LinkUp``, ``Polling``, ``Disabled`` and others.
        rate_gbps: 10^9 bits per second; 0 if it is not known.
        link_downed: how often its link has gone down since the driver was loaded.
    """

    name: OneLine
    board: OneLine = ""
    link_layer: OneLine = ""
    state: OneLine = ""
    phys_state: OneLine = ""
    rate_gbps: Number = 0
    link_downed: Number = 0


@dataclass(frozen=True, kw_only=True)
class GpusRead:
    """All GPUs of a machine, or none and why not.

    Attributes:
        question: what was asked; empty: nothing was, and nothing has changed since the last reading of the health.
        missing: a sentence; empty if the GPUs were read.
        ports: the ports of the machine, in a reading of the health.
    """

    question: Question = "health"
    gpus: Annotated[tuple[GpuReading, ...], at_most(MAX_GPUS)] = ()
    missing: OneLine = ""
    ports: Annotated[tuple[IbPort, ...], at_most(MAX_GPUS)] = ()
