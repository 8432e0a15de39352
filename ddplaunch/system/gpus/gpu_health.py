"""The health of this machine's GPUs: a child process reads them, waits for NVML's events and answers questions.

Used by the agent. NVML blocks where the driver does, so only the child calls it (``gpu_child``). The child ends when
its stdin is closed: when the agent closes it, or ends in any way. What it says is checked here. Must not import the
binding (pynvml), which is large.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import threading
import time
from dataclasses import fields, replace
from subprocess import PIPE
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from ddplaunch.late_dataclass import dataclass
from ddplaunch.system.gpus import devices, nvml
from ddplaunch.system.infiniband import IbPort
from ddplaunch.text import quote

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

INTERVAL_S = 5.0
"""Between two readings of all GPUs, which take some milliseconds for each."""

SILENCE_S = 15.0
"""A reading is this late before it is said that NVML does not answer: its calls wait for one another under load."""

_MAX_ANSWER_BYTES = 1 << 20
_MAX_NUMBER = 1 << 63

Kind = Literal["xid", "ecc", "unavailable", "recovery"]


@dataclass(frozen=True, kw_only=True)
class GpuHealth:
    """One GPU as it was read. None, empty or 0: the GPU or its driver does not tell.

    Attributes:
        index: NVML's index: in PCI order, whatever CUDA_VISIBLE_DEVICES hides.
        pci_address: as NVML writes it: ``00000000:17:00.0``.
        error: what NVML says of a GPU that it has lost, as ``GPU is lost``; empty for others.
        has_display: a monitor is connected: the desktop uses its memory.
        used_bytes: device memory that any process uses; old drivers count what they reserve too.
        pids: processes that compute on it, in this machine's numbers; a container may not see them.
        power_limit_w: watts, the limit that is in force.
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
        clock_reasons: the bits nvmlClocksEventReasons.
        throttled_minutes: of the last 10 minutes, those in which the hardware has lowered its clocks.
        nvlinks_active: of its ``nvlinks``, those that work.
        nvlinks_usual: active links of the GPU of this name that has most of them on this machine.
        nvlink_errors: of all its NVLinks, since the driver was loaded; all of them were corrected.
        nvlink_error_minutes: of the last 30 minutes, those in which there were such errors.
        temperature_margin_c: degrees below the temperature at which it lowers its clocks.
    """

    index: int
    uuid: str = ""
    name: str = ""
    pci_address: str = ""
    driver: str = ""
    vbios: str = ""
    error: str = ""
    is_mig: bool | None = None
    has_display: bool | None = None
    memory_bytes: int | None = None
    used_bytes: int | None = None
    pids: tuple[int, ...] = ()
    power_limit_w: float | None = None
    recovery_action: int | None = None
    uncorrected_rows: int | None = None
    is_remap_pending: bool | None = None
    is_remap_failed: bool | None = None
    is_sram_worn: bool | None = None
    uncorrected_errors: int | None = None
    sram_corrected: int | None = None
    dram_corrected: int | None = None
    is_ecc_on: bool | None = None
    is_ecc_wanted: bool | None = None
    is_ecc_usual: bool | None = None
    pcie_width: int | None = None
    pcie_max_width: int | None = None
    fabric_state: int | None = None
    fabric_status: int | None = None
    fabric_health: int | None = None
    clock_reasons: int | None = None
    throttled_minutes: int | None = None
    nvlinks: int | None = None
    nvlinks_active: int | None = None
    nvlinks_usual: int | None = None
    nvlink_errors: int | None = None
    nvlink_error_minutes: int | None = None
    temperature_margin_c: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuMemory:
    """Device memory of one GPU; None: not known. ``pids``: processes that compute on it."""

    index: int
    used_bytes: int | None = None
    memory_bytes: int | None = None
    pids: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class GpuUsage:
    """What one GPU does now. None: not known.

    Attributes:
        utilization: percent of the last period (up to a second) in which a kernel ran.
        clock_reasons: the bits nvmlClocksEventReasons.
    """

    index: int
    utilization: int | None = None
    used_bytes: int | None = None
    power_mw: int | None = None
    temperature_c: int | None = None
    clock_reasons: int | None = None


@dataclass(frozen=True, kw_only=True)
class GpuEvent:
    """Something that NVML has told when it happened; ``xid`` is the number of an Xid error, else 0."""

    index: int
    uuid: str = ""
    kind: Kind
    xid: int = 0


@dataclass(frozen=True)
class GpusRead:
    """All GPUs, or none and why not: NVML's silence is told too, and is over when GPUs follow.

    Attributes:
        missing: a sentence; empty if the GPUs were read.
        ports: the InfiniBand and RoCE ports of the machine, if the GPUs were read.
        is_first: nothing was read before. Exactly one answer is the first; it comes within ``nvml.LIMIT_S``.
    """

    gpus: tuple[GpuHealth, ...]
    missing: str = ""
    is_first: bool = False
    ports: tuple[IbPort, ...] = ()


@dataclass(frozen=True)
class MemoryRead:
    """The answer to ``ask_memory``; ``missing`` says why there are no GPUs in it."""

    gpus: tuple[GpuMemory, ...]
    missing: str = ""


@dataclass(frozen=True)
class UsageRead:
    """The answer to ``ask_usage``; without GPUs if they cannot be read, which a GpusRead has told."""

    gpus: tuple[GpuUsage, ...]


@dataclass(frozen=True)
class GpuEvents:
    """What has just happened. A new recovery action, or a GPU that is lost, also changes a reading, which follows."""

    events: tuple[GpuEvent, ...]


Answer = GpusRead | MemoryRead | UsageRead | GpuEvents


class GpuWatch:
    """The child process, and the thread that reads its answers.

    The methods may be called from any thread, and neither block nor raise.
    """

    def __init__(self, what: str, on_answer: Callable[[Answer], None], interval_s: float) -> None:
        """Use ``start``. Raises OSError if the child cannot be started; it is asked ``what``."""
        self._process = nvml.start_child(what, PIPE, interval_s)
        self._who = "amdgpu" if what.startswith("amd:") else "NVML"
        self._on_answer = on_answer
        self._interval_s = interval_s
        self._is_first = True
        self._missing = ""
        threading.Thread(target=self._read, name="gpu-watch", daemon=True).start()

    @classmethod
    def start(
        cls, on_answer: Callable[[Answer], None], interval_s: float = INTERVAL_S, root: str = "/"
    ) -> GpuWatch | None:
        """None on a machine without GPUs of NVIDIA or AMD; or if no child could be started, after an answer about that.

        Args:
            on_answer: is called with each answer, in a thread of the watch; until after ``close``, for one answer.
            interval_s: seconds between readings. A reading is an answer only if something has changed.
            root: where AMD's driver has its files.
        """
        if nvml.is_installed():
            what = "watch"
        elif devices.is_amd(root):
            what = f"amd:{root}"
        else:
            return None
        try:
            return cls(what, on_answer, interval_s)
        except OSError as error:
            on_answer(GpusRead((), nvml.not_started(error), is_first=True))
            return None

    def ask_memory(self) -> None:
        """A MemoryRead follows. It does not while NVML blocks: the caller waits with a bound."""
        self._ask("memory", MemoryRead)

    def ask_usage(self) -> None:
        """A UsageRead follows. It does not while NVML blocks: the caller must not ask again before it has come."""
        self._ask("usage", lambda gpus, _: UsageRead(gpus))

    def ask_health(self) -> None:
        """A GpusRead follows, also if nothing has changed. It does not while NVML blocks."""
        self._ask("health", GpusRead)

    @property
    def pid(self) -> int:
        """The child process."""
        return self._process.pid

    def close(self) -> None:
        """Ends the child. Also safe a second time."""
        with contextlib.suppress(OSError):
            self._stdin.close()

    @property
    def _stdin(self) -> Any:
        return self._process.stdin

    def _ask(self, question: str, no_answer: Callable[[tuple[()], str], Answer]) -> None:
        try:
            self._stdin.write(f"{question}\n".encode())
            self._stdin.flush()
        except (OSError, ValueError):  # It has ended, or was closed.
            self._on_answer(no_answer((), self._missing or "the process that asks the GPU driver has ended"))

    def _read(self) -> None:
        pipe = self._process.stdout
        assert pipe
        is_silent = False
        for line in _lines(pipe.fileno(), lambda: nvml.LIMIT_S if self._is_first else self._interval_s + SILENCE_S):
            if line is None and not is_silent:
                self._tell(GpusRead((), nvml.silence(nvml.LIMIT_S if self._is_first else SILENCE_S, self._who)))
            elif line is not None:
                self._tell(_answer(line, self._who))
            if line is not None and is_silent:
                self.ask_health()  # It answers again, but what it says may not have changed.
            is_silent = line is None
        self._end()

    def _tell(self, answer: Answer | None) -> None:
        if isinstance(answer, GpusRead):
            answer = replace(answer, is_first=self._is_first)
            self._is_first, self._missing = False, answer.missing
        if answer:
            self._on_answer(answer)

    def _end(self) -> None:
        is_expected = self._stdin.closed or self._missing
        nvml.end_child(self._process)
        if not is_expected:
            self._tell(GpusRead((), f"the process that asked {self._who} ended with {self._process.returncode}"))
        self.close()


def _lines(fd: int, limit_s: Callable[[], float]) -> Iterator[bytes | None]:
    """Lines until the end of the pipe; None whenever ``limit_s()`` seconds have passed without one."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    rest = b""
    due = time.monotonic() + limit_s()
    while len(rest) < _MAX_ANSWER_BYTES:
        if not poll.poll(max(0.0, due - time.monotonic()) * 1000):
            yield None
            due = time.monotonic() + limit_s()
            continue
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
        if lines:
            due = time.monotonic() + limit_s()


def _answer(line: bytes, who: str = "NVML") -> Answer | None:
    """The answer that a line of the child is; None for a line that only shows that NVML answers."""
    try:
        said: dict[str, Any] = dict(json.loads(line).items())
        if "gpus" in said:
            gpus = _with_usual_links([_checked(GpuHealth, gpu) for gpu in said["gpus"]])
            ports = tuple(_checked(IbPort, port) for port in said.get("ports", ()))
            return GpusRead(gpus, "" if gpus else nvml.NO_GPUS, ports=ports)
        if "memory" in said:
            return MemoryRead(tuple(_checked(GpuMemory, gpu) for gpu in said["memory"]))
        if "usage" in said:
            return UsageRead(tuple(_checked(GpuUsage, gpu) for gpu in said["usage"]))
        if "events" in said:
            return GpuEvents(tuple(_checked(GpuEvent, event) for event in said["events"]))
        return GpusRead((), f"{who}: {quote(str(said['error']))}") if "error" in said else None
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return GpusRead((), nvml.UNREADABLE)


_T = TypeVar("_T", GpuHealth, GpuMemory, GpuUsage, GpuEvent, IbPort)


def _checked(kind: type[_T], said: dict[str, Any]) -> _T:
    """Raises ValueError or TypeError for a value of another type than the field's; ignores what is no field."""
    watts = said.pop("power_limit_mw", None)
    values = {field.name: _value(field.type, said[field.name]) for field in fields(kind) if field.name in said}
    if watts is not None:
        values["power_limit_w"] = _value("int", watts) / 1000
    return kind(**values)


def _value(type_: Any, value: Any) -> Any:
    """``value`` as the type of a field, which is a text here, wants it."""
    if type_ == "str":
        return quote(str(value))
    if type_ == "Kind":
        return get_args(Kind)[get_args(Kind).index(value)]
    if type_.startswith("tuple"):
        return tuple(_value("int", item) for item in value)
    if not isinstance(value, int) or not -_MAX_NUMBER < value < _MAX_NUMBER:
        raise ValueError(value)
    return bool(value) if type_.startswith("bool") else int(value)


def _with_usual_links(gpus: list[GpuHealth]) -> tuple[GpuHealth, ...]:
    most: dict[str, int] = {}
    for gpu in gpus:
        most[gpu.name] = max(most.get(gpu.name, 0), gpu.nvlinks_active or 0)
    return tuple(gpu if gpu.nvlinks is None else replace(gpu, nvlinks_usual=most[gpu.name]) for gpu in gpus)
