"""Text of ``--check``: the table of nodes, the network's rates, and problems that would make a job fail or slow.

Pure; runs in the launcher. Nodes with equal results share a line.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from ddplaunch.cluster.hosts import fold
from ddplaunch.features import mounts, name_servers
from ddplaunch.features.check.queries import ImportTimes, NodeReport
from ddplaunch.features.health import findings, readiness
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import grouped, median, plural, size, table

MAX_CLOCK_S = 1.0
SLOW_IMPORT_S = 10.0
_HEAD = ("hosts", "Python", "torch", "CUDA", "NCCL", "GPUs", "/dev/shm", "open files", "clock", "reverse DNS")


@dataclass(frozen=True, kw_only=True)
class CheckedNode:
    """The results of one node.

    Attributes:
        clock_s: the node's clock minus the launcher's, within ``clock_error_s``.
        nccl: version of NCCL; empty without NCCL, or if the job did not run.
        bytes_per_s: best rate to and from one other node, of a few other nodes.
        unreachable: hosts that this node cannot connect to, each with the reason.
        imports: the times of importing torch.
        sent: the node runs a ddplaunch that was sent to it.
    """

    host: str
    report: NodeReport
    clock_s: float = 0.0
    clock_error_s: float = 0.0
    nccl: str = ""
    bytes_per_s: float = 0.0
    unreachable: tuple[tuple[str, str], ...] = ()
    imports: ImportTimes = ImportTimes()
    sent: bool = False


def node_table(nodes: Sequence[CheckedNode]) -> str:
    """One line for all nodes with equal results; a column of versions only where a node has one."""
    groups = grouped((_row(node), node.host) for node in nodes)
    rows = [_HEAD, *((fold(hosts), *row) for row, hosts in groups.items())]
    columns = [column for column in zip(*rows, strict=True) if set(column[1:]) != {"-"}]
    return "\n".join(table(list(zip(*columns, strict=True))))


def _row(node: CheckedNode) -> tuple[str, ...]:
    report = node.report
    soft, hard = map(_limit, report.open_files)
    return (
        report.python,
        report.torch or "-",
        report.cuda or "-",
        node.nccl or "-",
        _gpus(report.gpus),
        "none" if report.shm_free_bytes is None else f"{size(report.shm_free_bytes)} free",
        soft if soft == hard else f"{soft} of {hard}",
        # What a busy machine adds to a time that is measured makes no line of its own.
        f"{node.clock_s:+.1f} s" if abs(node.clock_s) - node.clock_error_s >= 0.05 else "same",
        f"{report.name_s:.1f} s" if report.name_s > name_servers.SLOW_S else "fast" if report.name else "no name",
    )


def _limit(limit: int) -> str:
    return "any" if limit < 0 else str(limit)


def _gpus(models: Sequence[str]) -> str:
    return ", ".join(f"{count} x {model or 'unknown'}" for model, count in Counter(models).items()) or "none"


def health(nodes: Sequence[CheckedNode]) -> str:
    """What was looked at, in one line; empty if nothing was."""
    looks = [node.report.health for node in nodes if node.report.health]
    if not looks:
        return ""
    gpus = sum(len(look.hardware.gpus) for look in looks)
    of_gpus = f"{plural(gpus, 'GPU')}, " if gpus else ""
    wrong = sum(len(look.findings) for look in looks)
    return f"health: {of_gpus}folders and disks: {plural(wrong, 'finding') if wrong else 'nothing wrong'}"


def refused(nodes: Sequence[CheckedNode]) -> list[str]:
    """Hosts whose hardware is not sound."""
    return [
        node.host
        for node in nodes
        if node.report.health and any(finding.severity == "refuse" for finding in node.report.health.findings)
    ]


def rates(all_bytes_per_s: float, backend: str, nodes: Sequence[CheckedNode]) -> str:
    """Rates of the all-reduce and of pairs of nodes."""
    pairs = sorted(node.bytes_per_s for node in nodes)
    ends = list(dict.fromkeys((_bits(pairs[0]), _bits(pairs[-1]))))
    return f"{all_reduce(all_bytes_per_s, backend, nodes)}\nin pairs, each way: {' to '.join(ends)}"


def all_reduce(bytes_per_s: float, backend: str, nodes: Sequence[CheckedNode]) -> str:
    """The rate of the all-reduce."""
    return f"all-reduce by {backend} over {len(nodes)} nodes: {_bits(bytes_per_s)} out of each node and into it"


def imports(nodes: Sequence[CheckedNode]) -> list[str]:
    """How long ``import torch`` took, at first and again; one line for all nodes that read it from the same place."""
    found = grouped((node.imports.file_system, node) for node in nodes if node.imports.times_s)
    return [
        f"import torch{_of(group, nodes)}: {_times([node.imports.times_s for node in group])}{_from(name, group)}"
        for name, group in found.items()
    ]


def sent(nodes: Sequence[CheckedNode]) -> str:
    """Which nodes have not this ddplaunch; empty if all have it."""
    names = [node.host for node in nodes if node.sent]
    return f"ddplaunch was sent to {fold(names)}: it is not installed there, or not as here" if names else ""


def _of(group: Sequence[CheckedNode], nodes: Sequence[CheckedNode]) -> str:
    return "" if len(group) == len(nodes) else f" on {fold(node.host for node in group)}"


def _from(file_system: str, group: Sequence[CheckedNode]) -> str:
    """Where torch lies; if other machines use it too, also what a copy on the node's own disk would save at most."""
    waits_s = [node.imports.waits_s for node in group if node.imports.waits_s]
    saved = f"; of that, waits for files: {_times(waits_s)}" if waits_s and _is_shared(file_system) else ""
    return file_system and f", from {file_system}{saved}"


def _times(of_nodes: Sequence[Sequence[float]]) -> str:
    first, again = ([times_s[turn] for times_s in of_nodes if len(times_s) > turn] for turn in (0, 1))
    return f"{_between(first)} at first, {_between(again)} again" if again else _between(first)


def _between(times_s: Sequence[float]) -> str:
    ends = list(dict.fromkeys(f"{end:.1f} s" for end in (min(times_s), max(times_s))))
    return " to ".join(ends)


def _slow_imports(nodes: Sequence[CheckedNode]) -> Iterator[str]:
    """Nodes where a start waits long for torch; grouped by where they read it from."""
    slow = [node for node in nodes if node.imports.times_s and node.imports.times_s[0] >= SLOW_IMPORT_S]
    for name, group in grouped((node.imports.file_system, node) for node in slow).items():
        hosts = fold(node.host for node in group)
        wait_s = max(node.imports.times_s[0] for node in group)
        waited_s = max((node.imports.waits_s[0] for node in group if node.imports.waits_s), default=wait_s)
        own_disk = f"{waited_s:.0f} s are waits for files, which --env brings to the node's own disk"
        remedy = own_disk if _is_shared(name) else "a slow disk?"
        yield f"{hosts}: a start may wait {wait_s:.0f} s for `import torch`: {remedy}"


def _is_shared(file_system: str) -> bool:
    """Whether other machines use it too, by its kind."""
    return mounts.is_shared(file_system.partition(" ")[0])


def _bits(bytes_per_s: float) -> str:
    bits = bytes_per_s * 8
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"


def unreachable(nodes: Sequence[CheckedNode]) -> list[str]:
    """Failed connections: one line for all nodes that cannot connect to certain hosts for one reason."""
    lines = grouped(
        ((_named(hosts, nodes), reason), node.host)
        for node in nodes
        for reason, hosts in grouped((reason, host) for host, reason in node.unreachable).items()
    )
    return [f"{fold(hosts)} cannot connect to {others}: {reason}" for (others, reason), hosts in lines.items()]


def _named(hosts: Sequence[str], nodes: Sequence[CheckedNode]) -> str:
    if len(hosts) > 1:
        return fold(hosts)
    addresses = [", ".join(node.report.addresses) for node in nodes if node.host == hosts[0]]
    return f"{hosts[0]} ({''.join(addresses)})"


def problems(nodes: Sequence[CheckedNode]) -> list[str]:
    """Problems that would make a job fail or slow, with remedies; one line for all nodes with a problem."""
    hosts = grouped((text, node.host) for node in nodes for text in _node_problems(node))
    of_nodes = [f"{fold(names)}: {text}" for text, names in hosts.items()]
    slow = (*_slow_imports(nodes), *slow_links(nodes))
    return [*of_nodes, *_differences(nodes), *_hardware_differences(nodes), *slow]


def _node_problems(node: CheckedNode) -> Iterator[str]:
    report = node.report
    for finding in report.health.findings if report.health else ():
        gpu, action = findings.gpu(finding), f" ({finding.action})" if finding.action else ""
        yield f"{gpu}{': ' if gpu else ''}{finding.text}{action}"
    yield from report.gpu_users
    if report.far_gpus:
        yield f"no CPU near {report.far_gpus} may be used: a scheduler, a cgroup or taskset has chosen others"
    for finding in readiness.broken(facts(node)):
        yield f"{finding.text} ({finding.action})"
    if abs(node.clock_s) - node.clock_error_s > MAX_CLOCK_S:
        side = "ahead of" if node.clock_s > 0 else "behind"
        yield f"the clock is {abs(node.clock_s):.1f} s {side} the launcher's: start chrony or ntpd"
    if report.name_s > name_servers.SLOW_S:
        yield _slow_name(node)
    for variable, file_system in report.compile_caches:
        if _is_shared(file_system):
            yield (
                f"what is compiled is kept on {file_system}, where ranks may fail by stale files and compile slowly: "
                f"set {variable} to a folder on the node's own disk"
            )


def facts(node: CheckedNode) -> readiness.Facts:
    """What the node has of what jobs need."""
    report = node.report
    return readiness.Facts(
        report.shm_free_bytes, report.open_files, report.torch, report.cuda, has_gpus=bool(report.gpus)
    )


def _slow_name(node: CheckedNode) -> str:
    delay = f"{node.report.name_s:.1f} s to look up its address, and every worker does that when it connects"
    return f"{delay}: {name_servers.advice(node.report.address, node.report.name or node.host)} there"


def _differences(nodes: Sequence[CheckedNode]) -> Iterator[str]:
    kinds: tuple[tuple[str, Callable[[CheckedNode], str]], ...] = (
        ("Python {}", lambda node: ".".join(node.report.python.split(".")[:2])),
        ("torch {}", lambda node: node.report.torch),
        ("torch for CUDA {}", lambda node: node.report.cuda or "none"),
        ("NCCL {}", lambda node: node.nccl),
        ("{} GPUs", lambda node: str(len(node.report.gpus))),
        ("GPUs are {}", lambda node: " and ".join(sorted({model for model in node.report.gpus if model}))),
    )
    for text, value_of in kinds:
        counts = Counter(value for node in nodes if (value := value_of(node)))
        common = max(counts, key=counts.__getitem__, default="")
        for other in counts:
            if other != common:
                hosts = fold(node.host for node in nodes if value_of(node) == other)
                yield f"{hosts}: {text.format(other)}, but {common} on {'most' if len(nodes) > 2 else 'other'} hosts"


def _hardware_differences(nodes: Sequence[CheckedNode]) -> list[str]:
    """What a start compares too; the models and their number are compared above, also without NVML."""
    found = {node.host: node.report.health.hardware for node in nodes if node.report.health}
    nameless = {
        host: replace(hardware, gpus=tuple(replace(gpu, name="") for gpu in hardware.gpus))
        for host, hardware in found.items()
    }
    return findings.between(nameless)


def slow_links(nodes: Sequence[CheckedNode]) -> Iterator[str]:
    """A sentence on each node with less than half of the usual bandwidth; it begins with the host."""
    typical = median([node.bytes_per_s for node in nodes]) if nodes else 0.0
    for node in nodes:
        if node.bytes_per_s < typical / 2:
            consequence = f"but {_bits(typical)} on most hosts: every step of a job waits for it"
            yield f"{node.host}: at best {_bits(node.bytes_per_s)} with another node, {consequence}"
