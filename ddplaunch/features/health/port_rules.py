"""What is wrong with a node's InfiniBand and RoCE ports.

Used by the agent; docs/gpu-health.md lists the rules. Pure: readings in, findings out. A port is compared with the
others of the node, because nobody says which ports should be connected.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.features.gpus.records import IbPort
from ddplaunch.protocol.results import HealthFinding

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_CABLE = "look at its cable and at the switch"


def ports_at_start(ports: Sequence[IbPort]) -> Iterator[HealthFinding]:
    """What is wrong with the ports of a node before a job uses them."""
    for port in ports:
        peers = [other for other in ports if _kind(other) == _kind(port) and other.name != port.name]
        active = [other for other in peers if other.state == "ACTIVE"]
        if port.phys_state == "LinkUp" and port.state in ("INIT", "ARMED"):
            text = f"its link is up, but it is {port.state}"
            yield _finding("ib-inactive", port, text, "look whether the subnet manager runs")
        if port.state == "DOWN" and 2 * len(active) > len(peers) + 1:
            yield _finding("ib-down", port, f"it is down ({port.phys_state}), unlike other ports of the node")
        if port.state == "ACTIVE" and 0 < port.rate_gbps < max((other.rate_gbps for other in active), default=0):
            yield _finding("ib-slow", port, f"it runs at {port.rate_gbps} Gb/s, other ports of the node are faster")


def ports_while_running(before: Sequence[IbPort], now: Sequence[IbPort]) -> Iterator[HealthFinding]:
    """What has become wrong with the ports since ``before``: it explains a failure within a minute."""
    ports = {port.name: port for port in now}
    for old in before:
        port = ports.get(old.name, IbPort(name=old.name))
        if old.state == "ACTIVE" != port.state:
            state = f"{port.state or 'gone'} ({port.phys_state or 'no such port'})"
            yield replace(_finding("ib-lost", port, f"it is no longer active: {state}"), is_fault=True)
        elif port.state == "ACTIVE" and port.link_downed > old.link_downed:
            text = f"its link has gone down and come back: {port.link_downed} times since its driver was loaded"
            yield replace(_finding("ib-link-downed", port, text), is_fault=True)


def _kind(port: IbPort) -> tuple[str, str]:
    return port.board, port.link_layer


def _finding(rule: str, port: IbPort, text: str, action: str = _CABLE) -> HealthFinding:
    return HealthFinding(rule=rule, text=f"{port.name}: {text}", action=action)
