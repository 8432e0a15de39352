"""What is wrong with a node's InfiniBand and RoCE ports: one rule is one row of ``PORT_RULES``.

Used by the agent. Pure: readings in, findings out. A port is compared with the others of the node, because nobody says
which ports should be connected.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ddplaunch.features.gpus.records import IbPort
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.results import HealthFinding

_INACTIVE = ("INIT", "ARMED")
_CABLE = "look at its cable and at the switch"


@dataclass(frozen=True, kw_only=True)
class PortRule:
    """A rule about one port.

    Attributes:
        name: fixed, for files and tests.
        fires_if: the condition with its threshold, for the docs.
        is_broken: at the start: whether a port, with all ports of the node, breaks it; in the run: whether the port has
            come to that since it was as the second argument has it.
        text: the finding's text, after the port's name.
        source: who uses the rule, or a like one, for the docs.
        in_run: applied while workers run, and not at the start.
    """

    name: str
    fires_if: str
    is_broken: Callable[[IbPort, Sequence[IbPort]], bool]
    text: Callable[[IbPort], str]
    action: str
    source: str
    in_run: bool = False


def _peers(port: IbPort, ports: Sequence[IbPort]) -> list[IbPort]:
    """Other ports of the same kind of adapter."""
    kind = (port.board, port.link_layer)
    return [other for other in ports if (other.board, other.link_layer) == kind and other.name != port.name]


def _is_down_alone(port: IbPort, ports: Sequence[IbPort]) -> bool:
    peers = _peers(port, ports)
    return port.state == "DOWN" and 2 * sum(other.state == "ACTIVE" for other in peers) > len(peers) + 1


def _is_slow(port: IbPort, ports: Sequence[IbPort]) -> bool:
    rates = [other.rate_gbps for other in _peers(port, ports) if other.state == "ACTIVE"]
    return port.state == "ACTIVE" and bool(rates) and 0 < port.rate_gbps < max(rates)


PORT_RULES: tuple[PortRule, ...] = (
    PortRule(
        name="ib-inactive",
        fires_if="its link is up, but the port is not active (INIT or ARMED)",
        is_broken=lambda port, ports: port.phys_state == "LinkUp" and port.state in _INACTIVE,
        text=lambda port: f"its link is up, but it is {port.state}",
        action="look whether the subnet manager runs",
        source="own",
    ),
    PortRule(
        name="ib-down",
        fires_if="it is down, and more than half of the node's ports of the same kind are active",
        is_broken=_is_down_alone,
        text=lambda port: f"it is down ({port.phys_state}), unlike other ports of the node",
        action=_CABLE,
        source="gpud",
    ),
    PortRule(
        name="ib-slow",
        fires_if="its rate is below that of an active port of the same kind in the node",
        is_broken=_is_slow,
        text=lambda port: f"it runs at {port.rate_gbps} Gb/s, other ports of the node are faster",
        action=_CABLE,
        source="gpud",
    ),
    PortRule(
        name="ib-lost",
        fires_if="it was active, and is no longer",
        is_broken=lambda port, before: port.state != "ACTIVE" and any(old.state == "ACTIVE" for old in before),
        text=lambda port: f"it is no longer active: {port.state or 'gone'} ({port.phys_state or 'no such port'})",
        action=_CABLE,
        source="gpud (after 4 min)",
        in_run=True,
    ),
    PortRule(
        name="ib-link-downed",
        fires_if="its link has gone down, and is up again",
        is_broken=lambda port, before: port.state == "ACTIVE" and any(port.link_downed > o.link_downed for o in before),
        text=lambda port: f"its link has gone down and come back: {port.link_downed} times since its driver was loaded",
        action=_CABLE,
        source="Azure (from 5 in 24 h)",
        in_run=True,
    ),
)


def ports_at_start(ports: Sequence[IbPort]) -> tuple[HealthFinding, ...]:
    """What is wrong with the ports of a node before a job uses them."""
    return _findings(ports, lambda port: ports, is_in_run=False)


def ports_while_running(before: Sequence[IbPort], now: Sequence[IbPort]) -> tuple[HealthFinding, ...]:
    """What has become wrong with the ports since ``before``: it explains a failure within a minute."""
    names = {port.name for port in now}
    gone = [IbPort(name=port.name) for port in before if port.name not in names]
    return _findings([*now, *gone], lambda port: [old for old in before if old.name == port.name], is_in_run=True)


def _findings(
    ports: Sequence[IbPort], with_: Callable[[IbPort], Sequence[IbPort]], is_in_run: bool
) -> tuple[HealthFinding, ...]:
    return tuple(
        HealthFinding(rule=rule.name, text=f"{port.name}: {rule.text(port)}", action=rule.action, is_fault=is_in_run)
        for rule in PORT_RULES
        for port in ports
        if rule.in_run == is_in_run and rule.is_broken(port, with_(port))
    )
