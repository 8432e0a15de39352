"""``--check``: tests whether a job would run on these nodes, and measures their network.

Runs in the launcher. First the agent of every node inspects it, which does not need a rendezvous; then a real run with
one worker per node measures an all-reduce. Must not run the user's script.
"""

from __future__ import annotations

import contextlib
import json
import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ddplaunch.cluster.hostlist import fold
from ddplaunch.errors import CHECK_WARNED, HARDWARE, NODE_NOT_READY, RENDEZVOUS, LaunchError, UsageError
from ddplaunch.features.check import gpu_rates_page, page
from ddplaunch.features.check import job as check_job
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import (
    ConnectResults,
    ConnectToNodes,
    GetTime,
    InspectNode,
    ListeningNode,
    NodeReport,
    NodeTime,
)
from ddplaunch.late_dataclass import dataclass
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote
from ddplaunch.transport.failures import failures_table
from ddplaunch.transport.handle import FromNode
from ddplaunch.transport.queries import ANSWER_TIMEOUT_S, QueriedNode, Queries, first_deadline

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.check.records import NodeGpuRates
    from ddplaunch.transport.failures import HostFailure

MODULE = "ddplaunch.features.check.worker_network"
"""Module that the job's workers run."""

_PREFIX = b"check: "
"""Start of the line with the results of rank 0."""

_CONNECT_HINT = (
    "Every node must be able to connect to every other at any port; --local-addr and --interface choose the network."
)

_MAX_PEERS = 63
"""Nodes to which each node connects, besides the first: all to all would be too many for large jobs."""


@dataclass(frozen=True)
class _Rates:
    """Results of the job; values per node are in the order of the nodes.

    Attributes:
        nccl: version of NCCL; empty without NCCL.
        pairs: bytes per second with one other node at a time.
        backend: backend of torch.distributed.
        all_reduce: bytes per second out of each node and into it.
    """

    nccl: tuple[str, ...]
    pairs: tuple[float, ...]
    backend: str
    all_reduce: float


def check(
    config: LaunchConfig, show: Callable[[str], None], report: Callable[[str], None], *, is_deep: bool = False
) -> int:
    """Check all nodes of ``config``, spares too: ``show`` prints results, ``report`` progress and the summary.

    ``is_deep``: measure the GPUs too, if the nodes can run a job.

    Returns:
        The exit code.

    Raises:
        LaunchError: hosts cannot be used, or cannot connect to each other; the results so far have been shown.
        UsageError: this launcher would not start agents on all nodes.
    """
    _check_supported(config)
    for notice in config.notices:
        if notice.min_verbosity <= config.output.verbosity:
            report(str(notice))
    report(f"checking {quote(fold(setup.node_names(config)))}")
    nodes, failures = _inspect(config)
    rates, error = _measure(config, nodes)
    if rates:
        by_node = zip(nodes, rates.nccl, rates.pairs, strict=True)
        nodes = [replace(node, nccl=nccl, bytes_per_s=rate) for node, nccl, rate in by_node]
    gpu_rates, error = _measure_gpus(config, nodes, report) if is_deep and rates else ([], error)
    refused = page.refused(nodes) if config.health == "refuse" else []
    problems = [*page.problems(nodes), *gpu_rates_page.problems(gpu_rates)]
    if nodes:
        show(page.node_table(nodes))
    if rates and len(nodes) > 1:
        show(page.rates(rates.all_reduce, rates.backend, nodes))
    if gpus := gpu_rates_page.rates_table(gpu_rates):
        show(gpus)
    if health := page.health(nodes):
        show(health)
    for line in problems:
        show(f"warning: {line}")
    _raise_failures(failures, error)
    report("problems found, see the warnings above" if problems else "no problems found")
    if refused:
        report(f"jobs do not use {fold(refused)} (--health)")
    return HARDWARE if refused else CHECK_WARNED if problems else 0


def _check_supported(config: LaunchConfig) -> None:
    if config.dry_run:
        raise UsageError("--check tests real nodes, and cannot be combined with --dry-run")
    if config.rendezvous or config.task:
        raise UsageError(
            "--check: one launcher must start agents on all nodes", "Name them with --hosts or --hostfile."
        )


def _raise_failures(failures: Sequence[HostFailure], error: LaunchError | None) -> None:
    """Raises LaunchError for hosts that cannot be used, else ``error``."""
    if failures:
        also = f"\n{error.message}" if error else ""
        raise LaunchError(f"some hosts cannot be used\n{failures_table(failures)}{also}", "", NODE_NOT_READY)
    if error:
        raise error


def _measure(config: LaunchConfig, nodes: Sequence[CheckedNode]) -> tuple[_Rates | None, LaunchError | None]:
    """Results of the job on the usable nodes, or the error that prevented them."""
    failed = page.unreachable(nodes)
    if failed:
        lines = "\n".join(f"  {line}" for line in failed)
        return None, LaunchError(f"nodes cannot connect to each other\n{lines}", _CONNECT_HINT, RENDEZVOUS)
    if not nodes:
        return None, None
    try:
        return _run(check_job.job(config, [node.host for node in nodes], MODULE)), None
    except LaunchError as error:
        return None, error


def _measure_gpus(
    config: LaunchConfig, nodes: Sequence[CheckedNode], report: Callable[[str], None]
) -> tuple[list[tuple[str, NodeGpuRates]], LaunchError | None]:
    """The rates of the GPUs of all nodes, or the error that prevented their measurement."""
    from ddplaunch.features.check import deep_check

    report("measuring the GPUs: matrix products, memory, and transfers between them")
    try:
        return deep_check.measure(config, [node.host for node in nodes]), None
    except LaunchError as error:
        return [], error


def _run(job: LaunchConfig) -> _Rates:
    """Run the job and read the results that rank 0 printed.

    Raises:
        LaunchError: the job failed, or the user stopped it.
    """
    result, lines = check_job.run(job, _PREFIX)
    if result.exit_code or not lines:
        if job.max_nodes > 1:
            raise LaunchError(
                "the test job failed, although the agents can connect; the failure page above has the reason",
                _CONNECT_HINT,
                RENDEZVOUS,
            )
        raise LaunchError("a worker that only uses torch fails on this node", "", NODE_NOT_READY)
    values: Any = json.loads(lines[0])
    return _Rates(tuple(values["nccl"]), tuple(values["pairs"]), values["backend"], values["all"])


# Inspection by agents.


@dataclass
class _InspectedNode(QueriedNode):
    """A node under inspection; ``clock_requested_s`` is the launcher's time when the node's was requested."""

    checked: CheckedNode | None = None
    clock_requested_s: float = 0.0
    has_clock: bool = False
    has_connected: bool = False

    def handle_event(self, event: object, received_s: float) -> None:
        """Store an answer of the agent, and request the node's time after its report."""
        match event:
            case NodeReport():
                self.checked = CheckedNode(host=self.name, report=event)
                self.clock_requested_s = time.time()
                self.handle.send(GetTime())
            case NodeTime(time_s=time_s) if self.checked:
                half_s = (received_s - self.clock_requested_s) / 2
                clock_s = time_s - self.clock_requested_s - half_s
                self.checked = replace(self.checked, clock_s=clock_s, clock_error_s=half_s)
                self.has_clock = True
            case ConnectResults(failed=failed) if self.checked:
                self.checked = replace(self.checked, unreachable=failed)
                self.has_connected = True
            case _:
                super().handle_event(event, received_s)


def _inspect(config: LaunchConfig) -> tuple[list[CheckedNode], list[HostFailure]]:
    """Results of all usable nodes in the order of the hosts, and the failures of the others.

    Raises:
        LaunchError: this machine has no room for the connections.
    """
    queries: Queries[_InspectedNode] = Queries()

    def post(event: object) -> None:
        if isinstance(event, FromNode):
            queries.post(event.index, event.event)

    console = Console(setup.console_style(config, None))
    transport = setup.transport_for(config, run_folder.new_run_id(), console.output, post)
    with contextlib.closing(transport), contextlib.closing(queries):
        for index, host in enumerate(transport.node_names):
            deadline = first_deadline(is_remote=transport.is_remote)
            queries.nodes.append(_InspectedNode(host, transport.start(index), deadline=deadline))
            queries.nodes[index].handle.send(
                InspectNode(
                    len(config.hosts) > 1,
                    config.local_addr,
                    config.interface,
                    setup.program(config),
                    looks_at_health=config.health != "off",
                    log_dir=config.output.log_dir,
                    gpus=config.workers.gpus,
                )
            )
        queries.wait(queries.nodes, lambda node: node.has_clock)
        _connect(queries.nodes)
        queries.wait(queries.nodes, lambda node: node.has_connected)
        return [checked for _, checked in _usable(queries.nodes)], queries.failures()


def _usable(nodes: Sequence[_InspectedNode]) -> list[tuple[_InspectedNode, CheckedNode]]:
    return [(node, node.checked) for node in nodes if node.checked and not node.failure]


def _connect(nodes: Sequence[_InspectedNode]) -> None:
    """Have every usable node connect to the first one, and to some that follow it."""
    usable = _usable(nodes)
    listening = [ListeningNode(checked.host, checked.report.addresses, checked.report.port) for _, checked in usable]
    for position, (node, _) in enumerate(usable):
        following = (listening[(position + step) % len(listening)] for step in range(1, _MAX_PEERS + 1))
        peers = {peer.host: peer for peer in (listening[0], *following) if peer.host != node.name}
        node.has_connected = not peers
        node.deadline = time.monotonic() + ANSWER_TIMEOUT_S
        node.handle.send(ConnectToNodes(tuple(peers.values())))
