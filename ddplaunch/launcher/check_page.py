"""What ``--check`` has found, as one table, and what of it would make a job fail or slow. Pure."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ddplaunch.host_ranges import fold
from ddplaunch.printable import size

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from ddplaunch.node_check import NodeLook  # noqa: TC004

MAX_CLOCK_S, _MAX_NAME_S = 1.0, 0.5
_MIN_SHM_BYTES, _MIN_OPEN_FILES = 512 << 20, 4096
_HEAD = ("hosts", "Python", "torch", "CUDA", "NCCL", "GPUs", "/dev/shm", "open files", "clock", "reverse DNS")


@dataclass(frozen=True, kw_only=True)
class CheckedNode:
    """One node.

    Attributes:
        clock_s: how much its clock is ahead of the launcher's; ``clock_error_s`` is how wrong that may be.
        nccl: version; empty where torch has none or was not asked.
        bytes_per_s: to one other node and back at a time, of a few the fastest.
        unreached: hosts that cannot be connected to from here, and why, in pairs.
    """

    host: str
    look: NodeLook
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    nccl: str = ""
    bytes_per_s: float = 0.0
    unreached: tuple[tuple[str, str], ...] = ()


def table(nodes: Sequence[CheckedNode]) -> str:
    """One line for all nodes that are equal; a column of versions only where a node has one."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for node in nodes:
        groups.setdefault(_row(node), []).append(node.host)
    rows = [_HEAD, *((fold(hosts), *row) for row, hosts in groups.items())]
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    widths = [max(map(len, column)) for column in columns]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in zip(*columns, strict=True)
    )


def _row(node: CheckedNode) -> tuple[str, ...]:
    look = node.look
    soft, hard = map(_limit, look.open_files)
    return (
        look.python,
        look.torch or "-",
        look.cuda or "-",
        node.nccl or "-",
        _gpus(look.gpus),
        "none" if look.shm_free_bytes is None else f"{size(look.shm_free_bytes)} free",
        soft if soft == hard else f"{soft} of {hard}",
        f"{node.clock_s:+.1f} s" if abs(node.clock_s) >= 0.05 else "same",
        f"{look.name_s:.1f} s" if look.name_s >= 0.05 else "fast" if look.name else "no name",
    )


def _limit(limit: int) -> str:
    return "any" if limit < 0 else str(limit)


def _gpus(models: Sequence[str]) -> str:
    return ", ".join(f"{count} x {model or 'unknown'}" for model, count in Counter(models).items()) or "none"


def rates(all_bytes_per_s: float, backend: str, nodes: Sequence[CheckedNode]) -> str:
    """How fast the nodes are together, and two by two."""
    pairs = sorted(node.bytes_per_s for node in nodes)
    ends = list(dict.fromkeys((_bits(pairs[0]), _bits(pairs[-1]))))
    return (
        f"all-reduce by {backend} over {len(nodes)} nodes: {_bits(all_bytes_per_s)} out of each node and into it\n"
        f"two by two, each way: {' to '.join(ends)}"
    )


def _bits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def unreached(nodes: Sequence[CheckedNode]) -> list[str]:
    """Who cannot reach whom: a line for all nodes that cannot reach the same others for the same reason."""
    lines: dict[tuple[str, str], list[str]] = {}
    for node in nodes:
        others: dict[str, list[str]] = {}
        for host, why in node.unreached:
            others.setdefault(why, []).append(host)
        for why, hosts in others.items():
            lines.setdefault((_named(hosts, nodes), why), []).append(node.host)
    return [f"{fold(hosts)} cannot reach {others}: {why}" for (others, why), hosts in lines.items()]


def _named(hosts: Sequence[str], nodes: Sequence[CheckedNode]) -> str:
    if len(hosts) > 1:
        return fold(hosts)
    addresses = [", ".join(node.look.addresses) for node in nodes if node.host == hosts[0]]
    return f"{hosts[0]} ({''.join(addresses)})"


def problems(nodes: Sequence[CheckedNode]) -> list[str]:
    """What would make a job fail or slow, and what can be done; a line for all nodes that have it."""
    found = [(node, text) for node in nodes for text in _own_problems(node)]
    return [*_folded(iter(found)), *_differences(nodes), *_slow_links(nodes)]


def _folded(found: Iterator[tuple[CheckedNode, str]]) -> list[str]:
    hosts: dict[str, list[str]] = {}
    for node, text in found:
        hosts.setdefault(text, []).append(node.host)
    return [f"{fold(names)}: {text}" for text, names in hosts.items()]


def _own_problems(node: CheckedNode) -> Iterator[str]:
    look = node.look
    for user in look.gpu_users:
        gpus = "GPU " + str(user.gpus[0]) if len(user.gpus) == 1 else "GPUs " + ",".join(map(str, user.gpus))
        yield f"{gpus} in use by pid {user.pid}{user.name and f' ({user.name})'}"
    if look.gpus and look.torch and not look.cuda:
        yield f"has GPUs, and torch {look.torch} cannot use them: install a torch that was built for them"
    if look.shm_free_bytes is None or look.shm_free_bytes < _MIN_SHM_BYTES:
        yield "little room in /dev/shm: DataLoader workers and NCCL need it (docker run --shm-size=8g, or --ipc=host)"
    if 0 <= look.open_files[1] < _MIN_OPEN_FILES:
        yield f"at most {look.open_files[1]} open files, few for many workers: raise the hard limit (nofile)"
    if abs(node.clock_s) - node.clock_error_s > MAX_CLOCK_S:
        side = "ahead of" if node.clock_s > 0 else "behind"
        yield f"the clock is {abs(node.clock_s):.1f} s {side} the launcher's: start chrony or ntpd"
    if look.name_s > _MAX_NAME_S:
        yield _slow_name(node)


def _slow_name(node: CheckedNode) -> str:
    address = node.look.address
    mapped = address if ":" in address else f"::ffff:{address}"
    name = "localhost" if address.startswith("127.") or address == "::1" else node.look.name or node.host
    cost = f"{node.look.name_s:.1f} s to look up its own address, and every worker does that as it connects"
    return f"{cost}: add the line `{mapped} {name}` to /etc/hosts there"


def _differences(nodes: Sequence[CheckedNode]) -> Iterator[str]:
    kinds: tuple[tuple[str, Callable[[CheckedNode], str]], ...] = (
        ("Python {}", lambda node: ".".join(node.look.python.split(".")[:2])),
        ("torch {}", lambda node: node.look.torch),
        ("torch for CUDA {}", lambda node: node.look.cuda or "none"),
        ("NCCL {}", lambda node: node.nccl),
        ("{} GPUs", lambda node: str(len(node.look.gpus))),
        ("GPUs are {}", lambda node: " and ".join(sorted({model for model in node.look.gpus if model}))),
    )
    for text, value_of in kinds:
        counts = Counter(value for node in nodes if (value := value_of(node)))
        usual = max(counts, key=counts.__getitem__, default="")
        for other in counts:
            if other != usual:
                hosts = fold(node.host for node in nodes if value_of(node) == other)
                yield f"{hosts}: {text.format(other)}, and {usual} on {'most' if len(nodes) > 2 else 'other'} hosts"


def _slow_links(nodes: Sequence[CheckedNode]) -> Iterator[str]:
    usual = median([node.bytes_per_s for node in nodes]) if nodes else 0.0
    for node in nodes:
        if node.bytes_per_s < usual / 2:
            rest = f"and {_bits(usual)} on most hosts: every step of a job waits for it"
            yield f"{node.host}: at best {_bits(node.bytes_per_s)} with another node, {rest}"
