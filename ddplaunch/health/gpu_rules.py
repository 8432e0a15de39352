"""What is wrong with a GPU: the findings of the rules of ``gpu_rule_table``, and of events.

Used by the agent, for the GPUs of its node. Pure: a reading or an event in, findings out. A value that a GPU does not
tell breaks no rule.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.health.gpu_rule_table import RULES, Rule
from ddplaunch.health.xid import ACTIONS, Xid, xid
from ddplaunch.protocol.health import HealthFinding

if TYPE_CHECKING:
    from ddplaunch.protocol.gpus import GpuEvent, GpuReading

_EVENTS = {
    "ecc": Xid("a memory error could not be corrected (double-bit ECC)", "investigate", True),
    "unavailable": Xid("the GPU has become unavailable", "reset", True),
}
"""Events that are no Xid; a new recovery action is told by the reading that follows."""


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
