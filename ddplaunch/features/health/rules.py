"""The rules about one GPU, each of which is one row of ``RULES``, and about the ports of a node.

Used by the agent; docs/gpu-health.md lists them, and says who has like ones. Pure: readings in, findings out. A value
that a GPU does not tell breaks no rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ddplaunch.features.gpus.records import HARDWARE_SLOWDOWN, GpuReading, IbPort, throttled
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.results import HealthFinding, Severity
from ddplaunch.text import fold_ints, size

_RECOVERY_ACTIONS = {
    1: "a reset of the GPU",
    2: "a reboot of the node",
    3: "that no process uses its NVLinks",
    4: "that the node is drained and the GPU reset",
    5: "a recovery of the IMEX domain",
    6: "a reset of the bus",
    7: "a reboot of the machine",
}
"""nvmlGpuRecoveryAction."""

_DRAIN_P2P = 3
_FABRIC_STATES = {1: "has not started", 2: "is in progress"}
_FABRIC_COMPLETED = 3
_FABRIC_HEALTH = ((0, "bandwidth is degraded"), (2, "routes are being recovered"), (4, "a route has failed"))
_FABRIC_TRUE = 1
_MB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rule:
    """A rule about one reading of a GPU.

    Attributes:
        name: fixed, for files and tests.
        is_broken: whether the GPU breaks it; not if a value that it needs is not told.
        text: the finding's text.
        action: what the user or the administrator can do.
        is_fault: as in HealthFinding.
        in_run: it is applied not only at the start, but also while workers run: when a GPU begins to break it.
        grows: in the run, it is also broken anew each time this value grows.
    """

    name: str
    is_broken: Callable[[GpuReading], bool]
    text: Callable[[GpuReading], str]
    action: str
    severity: Severity = "warn"
    is_fault: bool = False
    in_run: bool = True
    grows: Callable[[GpuReading], int | None] | None = None


def _is_above(value: float | None, limit: float) -> bool:
    return value is not None and value > limit


def _is_below(value: float | None, limit: float) -> bool:
    return value is not None and value < limit


def _lanes(gpu: GpuReading) -> float | None:
    """The share of its PCIe lanes that are in use."""
    return gpu.pcie_width / gpu.pcie_max_width if gpu.pcie_width and gpu.pcie_max_width else None


def _throttled(gpu: GpuReading) -> str:
    """Why the hardware has lowered its clocks; empty if it has not."""
    return throttled((gpu.clock_reasons or 0) & HARDWARE_SLOWDOWN)


def _fabric_problems(gpu: GpuReading) -> Iterator[str]:
    """What NVML's mask of the fabric's health tells: two bits for each."""
    for shift, text in _FABRIC_HEALTH:
        if (gpu.fabric_health or 0) >> shift & 3 == _FABRIC_TRUE:
            yield text


def _is_fabric_incomplete(gpu: GpuReading) -> bool:
    is_failed = gpu.fabric_state == _FABRIC_COMPLETED and bool(gpu.fabric_status)
    return gpu.fabric_state in _FABRIC_STATES or is_failed


def _fabric_text(gpu: GpuReading) -> str:
    state = _FABRIC_STATES.get(gpu.fabric_state or 0, f"has failed with NVML's error {gpu.fabric_status}")
    return f"its registration with the NVSwitches {state}"


def _is_in_use(gpu: GpuReading) -> bool:
    return bool(gpu.pids) or (_is_above(gpu.used_bytes, 512 * _MB) and not gpu.has_display)


def _users(gpu: GpuReading) -> str:
    if gpu.pids:
        return f"process {fold_ints(gpu.pids)} uses it already"
    return f"{size(gpu.used_bytes or 0)} of its memory are in use, by processes that cannot be seen from here"


RULES: tuple[Rule, ...] = (
    Rule(
        name="lost",
        is_broken=lambda gpu: bool(gpu.error),
        text=lambda gpu: f"the driver cannot use it: {gpu.error}",
        action="drain the node, then reset the GPU or reboot the node",
        severity="refuse",
        is_fault=True,
    ),
    Rule(
        name="recovery-action",
        is_broken=lambda gpu: gpu.recovery_action not in (None, 0, _DRAIN_P2P),
        text=lambda gpu: f"the driver asks for {_RECOVERY_ACTIONS.get(gpu.recovery_action or 0, 'an unknown action')}",
        action="drain the node and do so",
        severity="refuse",
        is_fault=True,
    ),
    Rule(
        name="drain-nvlinks",
        is_broken=lambda gpu: gpu.recovery_action == _DRAIN_P2P,
        text=lambda gpu: f"the driver asks {_RECOVERY_ACTIONS[_DRAIN_P2P]}",
        action="drain the node when its jobs have ended",
    ),
    Rule(
        name="row-remap-failed",
        is_broken=lambda gpu: bool(gpu.is_remap_failed),
        text=lambda gpu: "a row of its memory could not be remapped",
        action="drain the node and have the GPU replaced",
        severity="refuse",
        is_fault=True,
    ),
    Rule(
        name="sram-worn",
        is_broken=lambda gpu: bool(gpu.is_sram_worn),
        text=lambda gpu: "its SRAM has more errors than the driver's threshold",
        action="drain the node and have the GPU replaced",
        severity="refuse",
        is_fault=True,
    ),
    Rule(
        name="pcie-narrow",
        is_broken=lambda gpu: _is_below(_lanes(gpu), 0.25),
        text=lambda gpu: f"its PCIe link has {gpu.pcie_width} of {gpu.pcie_max_width} lanes",
        action="drain the node; reseat the GPU or replace its riser",
        severity="refuse",
    ),
    Rule(
        name="pcie-width",
        is_broken=lambda gpu: _is_below(_lanes(gpu), 1) and not _is_below(_lanes(gpu), 0.25),
        text=lambda gpu: f"its PCIe link has {gpu.pcie_width} of {gpu.pcie_max_width} lanes",
        action="compare its bandwidth with that of other GPUs; reseat it if it is lower",
    ),
    Rule(
        name="fabric-incomplete",
        is_broken=_is_fabric_incomplete,
        text=_fabric_text,
        action="look at the service nvidia-fabricmanager of the node",
        severity="refuse",
        is_fault=True,
    ),
    Rule(
        name="fabric-degraded",
        is_broken=lambda gpu: any(_fabric_problems(gpu)),
        text=lambda gpu: f"its way to the NVSwitches: {', '.join(_fabric_problems(gpu))}",
        action="look at the service nvidia-fabricmanager of the node",
    ),
    Rule(
        name="row-remap-pending",
        is_broken=lambda gpu: bool(gpu.is_remap_pending),
        text=lambda gpu: "a row of its memory waits for a reset of the GPU to be remapped",
        action="reset the GPU when the node has no job",
    ),
    Rule(
        name="many-remapped-rows",
        is_broken=lambda gpu: _is_above(gpu.uncorrected_rows, 512),
        text=lambda gpu: f"{gpu.uncorrected_rows} rows of its memory were remapped because of errors",
        action="have the GPU replaced",
    ),
    Rule(
        name="uncorrected-errors",
        is_broken=lambda gpu: _is_above(gpu.uncorrected_errors, 0),
        text=lambda gpu: f"{gpu.uncorrected_errors} memory errors could not be corrected since its driver was loaded",
        action="reset the GPU when the node has no job; if it happens again, have it replaced",
        is_fault=True,
        grows=lambda gpu: gpu.uncorrected_errors,
    ),
    Rule(
        name="many-corrected-sram",
        is_broken=lambda gpu: _is_above(gpu.sram_corrected, 10_000),
        text=lambda gpu: f"{gpu.sram_corrected} errors of its SRAM were corrected since its driver was loaded",
        action="have the GPU tested (dcgmi diag -r 3)",
    ),
    Rule(
        name="many-corrected-dram",
        is_broken=lambda gpu: _is_above(gpu.dram_corrected, 20_000_000),
        text=lambda gpu: f"{gpu.dram_corrected} errors of its memory were corrected since its driver was loaded",
        action="have the GPU tested (dcgmi diag -r 3)",
    ),
    Rule(
        name="ecc-off",
        is_broken=lambda gpu: gpu.is_ecc_on is False and bool(gpu.is_ecc_usual),
        text=lambda gpu: "its memory is not protected by ECC",
        action="nvidia-smi --ecc-config=1, then reset the GPU",
        in_run=False,
    ),
    Rule(
        name="ecc-pending",
        is_broken=lambda gpu: None not in (gpu.is_ecc_on, gpu.is_ecc_wanted) and gpu.is_ecc_on != gpu.is_ecc_wanted,
        text=lambda gpu: f"ECC will be switched {'on' if gpu.is_ecc_wanted else 'off'} at its next reset",
        action="reset the GPU when the node has no job",
        in_run=False,
    ),
    Rule(
        name="throttled",
        is_broken=lambda gpu: bool(_throttled(gpu)),
        text=lambda gpu: f"its clocks are lowered: {_throttled(gpu)}",
        action="look at the cooling and the power supplies of the node",
        in_run=False,
    ),
    Rule(
        name="throttled-often",
        is_broken=lambda gpu: _is_above(gpu.throttled_minutes, 5),
        text=lambda gpu: f"the hardware has lowered its clocks in {gpu.throttled_minutes} of the last 10 minutes",
        action="look at the cooling and the power supplies of the node",
    ),
    Rule(
        name="temperature",
        is_broken=lambda gpu: _is_below(gpu.temperature_margin_c, 5),
        text=lambda gpu: (
            f"it is {gpu.temperature_margin_c} degrees below the temperature at which it lowers its clocks"
        ),
        action="look at the cooling of the node",
        in_run=False,
    ),
    Rule(
        name="nvlink-inactive",
        is_broken=lambda gpu: _is_below(gpu.nvlinks_active, gpu.nvlinks_usual or 0),
        text=lambda gpu: f"{gpu.nvlinks_active} of its NVLinks are active, {gpu.nvlinks_usual} of others like it",
        action="drain the node and have its NVLinks tested (dcgmi diag -r 2)",
        is_fault=True,
    ),
    Rule(
        name="nvlink-errors",
        is_broken=lambda gpu: _is_above(gpu.nvlink_error_minutes, 15),
        text=lambda gpu: f"its NVLinks have corrected errors in {gpu.nvlink_error_minutes} of the last 30 minutes",
        action="have its NVLinks tested (dcgmi diag -r 2)",
    ),
    Rule(
        name="in-use",
        is_broken=_is_in_use,
        text=_users,
        action="end that process, or choose other GPUs with --gpus",
        in_run=False,
    ),
)


def at_start(gpu: GpuReading) -> tuple[HealthFinding, ...]:
    """What is wrong with a GPU before a job uses it.

    A finding that only warns explains no later failure: the GPU was like this before.
    """
    found = (_finding(rule, gpu) for rule in RULES if rule.is_broken(gpu))
    return tuple(replace(finding, is_fault=finding.is_fault and finding.severity == "refuse") for finding in found)


def while_running(before: GpuReading | None, now: GpuReading) -> tuple[HealthFinding, ...]:
    """What has become wrong with a GPU since ``before``; None: since a time when it could not be read."""
    return tuple(_finding(rule, now) for rule in RULES if rule.in_run and _is_newly_broken(rule, before, now))


def _is_newly_broken(rule: Rule, before: GpuReading | None, now: GpuReading) -> bool:
    if not rule.is_broken(now):
        return False
    has_grown = bool(before and rule.grows and (rule.grows(now) or 0) > (rule.grows(before) or 0))
    return has_grown or not (before and rule.is_broken(before))


def _finding(rule: Rule, gpu: GpuReading) -> HealthFinding:
    return HealthFinding(
        rule=rule.name,
        text=rule.text(gpu),
        action=rule.action,
        severity=rule.severity,
        is_fault=rule.is_fault,
        gpu=gpu.index,
        uuid=gpu.uuid,
    )


# InfiniBand and RoCE ports. A port is compared with the others of the node: nobody says which should be connected.

_CABLE = "look at its cable and at the switch"


def ports_at_start(ports: Sequence[IbPort]) -> Iterator[HealthFinding]:
    """What is wrong with the ports of a node before a job uses them."""
    for port in ports:
        peers = [other for other in ports if _kind(other) == _kind(port) and other.name != port.name]
        active = [other for other in peers if other.state == "ACTIVE"]
        if port.phys_state == "LinkUp" and port.state in ("INIT", "ARMED"):
            text = f"its link is up, but it is {port.state}"
            yield _port_finding("ib-inactive", port, text, "look whether the subnet manager runs")
        if port.state == "DOWN" and 2 * len(active) > len(peers) + 1:
            yield _port_finding("ib-down", port, f"it is down ({port.phys_state}), unlike other ports of the node")
        if port.state == "ACTIVE" and 0 < port.rate_gbps < max((other.rate_gbps for other in active), default=0):
            yield _port_finding(
                "ib-slow", port, f"it runs at {port.rate_gbps} Gb/s, other ports of the node are faster"
            )


def ports_while_running(before: Sequence[IbPort], now: Sequence[IbPort]) -> Iterator[HealthFinding]:
    """What has become wrong with the ports since ``before``: it explains a failure within a minute."""
    ports = {port.name: port for port in now}
    for old in before:
        port = ports.get(old.name, IbPort(name=old.name))
        if old.state == "ACTIVE" != port.state:
            state = f"{port.state or 'gone'} ({port.phys_state or 'no such port'})"
            yield replace(_port_finding("ib-lost", port, f"it is no longer active: {state}"), is_fault=True)
        elif port.state == "ACTIVE" and port.link_downed > old.link_downed:
            text = f"its link has gone down and come back: {port.link_downed} times since its driver was loaded"
            yield replace(_port_finding("ib-link-downed", port, text), is_fault=True)


def _kind(port: IbPort) -> tuple[str, str]:
    return port.board, port.link_layer


def _port_finding(rule: str, port: IbPort, text: str, action: str = _CABLE) -> HealthFinding:
    return HealthFinding(rule=rule, text=f"{port.name}: {text}", action=action)
