"""NCCL's own lines about its network, with NCCL_DEBUG=INFO: what each rank has chosen, and what is wrong with that.

Pure; for the lines of NCCL 2.4 to 2.28 and of plug-ins. They are texts of another program: a rank whose lines are not
understood counts as one that has told nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from ddplaunch.cluster.hosts import fold
from ddplaunch.text import grouped, plural, quote, ranks

SOCKETS = "Socket"
"""NCCL's name of the network that every machine has."""

_VERSION = re.compile(r"(?:^|NCCL INFO )NCCL version (\d[\w.+-]*)")
_NETWORK = re.compile(r"^Using network (.+)")
_DEVICES = re.compile(r"^NET/(IB|Socket) : Using (\[0\].*)")
_DEVICE = re.compile(r"\[\d+\]([\w.-]+)")
_REASONS = (
    re.compile(r"(NCCL_IB_DISABLE set by environment to [1-9]\d*|NCCL_NET set by environment to Socket)"),
    re.compile(r"(NET/OFI .*(?:[Ff]ailed|[Cc]ould not|[Cc]ouldn't|[Uu]nable).*)"),
    re.compile(r"(Failed to open libibverbs\.so\S*|NET/IB : No device found)"),
)
"""Why NCCL uses sockets, the most telling first."""


class RankNetwork:
    """What the lines of one rank have told so far.

    Attributes:
        host: of the rank.
        version: of NCCL; only one rank of a communicator tells it.
        network: NCCL's name, as ``IB`` or ``Socket``; empty: not told yet.
    """

    def __init__(self, host: str) -> None:
        self.host, self.version, self.network = host, "", ""
        self._devices: dict[str, tuple[str, ...]] = {}
        self._reasons: dict[int, str] = {}

    def read(self, line: str) -> None:
        """Take in a line of the rank, of any kind."""
        if found := _VERSION.search(line):
            self.version = found[1]
        _, of_nccl, text = line.partition(" NCCL INFO ")
        if not of_nccl:
            _, of_nccl, text = line.partition(" NCCL WARN ")
        if not of_nccl:
            return
        if found := _NETWORK.match(text):
            self.network = found[1].strip()
        elif found := _DEVICES.match(text):
            self._devices[found[1]] = tuple(_DEVICE.findall(found[2].partition("; OOB")[0]))
        elif "Init COMPLETE" in text and not self.network:  # NCCL 2.4 names no network.
            self.network = next((name for name in ("IB", "Socket") if name in self._devices), "")
        for position, pattern in enumerate(_REASONS):
            if found := pattern.search(text):
                self._reasons.setdefault(position, quote(found[1].strip(), 120))

    @property
    def devices(self) -> tuple[str, ...]:
        """The adapters of InfiniBand or RoCE, or the interfaces, that the network uses; empty for other networks."""
        return self._devices.get("Socket" if self.network == SOCKETS else "IB" if "IB" in self.network else "", ())

    @property
    def reason(self) -> str:
        """Why it is not another network; empty if the rank has not told."""
        return self._reasons[min(self._reasons)] if self._reasons and self.network == SOCKETS else ""


def active(ports: Sequence[str]) -> str:
    """How many of the active ports of a node, each with its kind first, are not Ethernet's; empty for none.

    RoCE is Ethernet, and many clusters do not use it. The kernel calls EFA's ports "Unspecified".
    """
    fast = [port for port in ports if not port.startswith("Ethernet")]
    kind = "InfiniBand" if all(port.startswith("InfiniBand") for port in fast) else "InfiniBand or EFA"
    return f"{plural(len(fast), f'{kind} port')} {'is' if len(fast) == 1 else 'are'} active" if fast else ""


def summary(told: Mapping[int, RankNetwork]) -> str:
    """In one line, what the ranks have told of the network."""
    versions = sorted({each.version for each in told.values()} - {""})
    groups = grouped((_network(each), rank) for rank, each in sorted(told.items()))
    parts = [name if len(groups) == 1 else f"{ranks(found)}: {name}" for name, found in groups.items()]
    return f"NCCL{' ' if versions else ''}{', '.join(versions)} uses {'; '.join(parts)}"


def _network(rank: RankNetwork) -> str:
    name = "sockets" if rank.network == SOCKETS else quote(rank.network, 40)
    devices = [quote(each, 32) for each in rank.devices[:8]]
    more = f" and {len(rank.devices) - 8} more" if len(rank.devices) > 8 else ""
    return f"{name} ({', '.join(devices)}{more})" if devices else name


def warnings(told: Mapping[int, RankNetwork], ports: Mapping[str, str]) -> Iterator[str]:
    """What is probably wrong, a sentence each; ``ports``: by host, which ports are active, as ``active``."""
    slow = grouped(
        ((ports[each.host], _network(each), each.reason), each.host)
        for each in told.values()
        if each.network == SOCKETS and ports.get(each.host)
    )
    for (found, network, reason), hosts in slow.items():
        yield f"{fold(dict.fromkeys(hosts))}: {found}, NCCL uses {network}{f': {reason}' if reason else ''}"
    if len({each.network == SOCKETS for each in told.values()}) > 1:
        yield "some ranks use sockets and others another network: NCCL cannot connect them, or is slow"
