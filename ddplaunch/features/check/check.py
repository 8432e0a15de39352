"""``--check``: tests whether a job would run on these nodes, and measures their network.

Runs in the launcher. First the agent of every node inspects it, which does not need a rendezvous; then a real run with
one worker per node measures an all-reduce. Must not run the user's script.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch import features
from ddplaunch.cluster.hosts import display_names, fold
from ddplaunch.config import LINE_PREFIX, NO_LOGS, LaunchConfig, OutputConfig, Streams, WorkerConfig
from ddplaunch.errors import CHECK_WARNED, HARDWARE, NODE_NOT_READY, RENDEZVOUS, USAGE, LaunchError, UsageError
from ddplaunch.features.check import deep_check, page, verdicts
from ddplaunch.features.check.page import CheckedNode
from ddplaunch.features.check.queries import (
    GPU_RATES,
    IMPORTS_S,
    NETWORK_RATES,
    ConnectResults,
    ConnectToNodes,
    ImportTimes,
    ImportTorch,
    InspectNode,
    NetworkRates,
    NodeGpuRates,
    NodeReport,
)
from ddplaunch.features.health import passing
from ddplaunch.features.runs.asked_nodes import ANSWER_TIMEOUT_S, QueriedNode, Queries
from ddplaunch.launcher import setup
from ddplaunch.launcher.display.console import Console
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Ping, Pong
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote
from ddplaunch.timeouts import TimeoutConfig
from ddplaunch.transport.failures import HostFailure, failures_table
from ddplaunch.transport.handle import NodeFacts

if TYPE_CHECKING:
    from ddplaunch.cli.commands import Request
    from ddplaunch.protocol.run_result import RunResult


_CONNECT_HINT = (
    "Every node must be able to connect to every other at any port; --local-addr and --interface choose the network."
)

_MAX_PEERS = 63
"""Nodes to which each node connects, besides the first: all to all would be too many for large jobs."""


def check(request: Request) -> int:
    """Check all nodes of a run, spares too, and return the exit code. A script must exist; it is not run.

    --deep: measure the GPUs too, if the nodes can run a job.

    Raises:
        LaunchError: hosts cannot be used, or cannot connect to each other; the results so far have been shown.
        UsageError: this launcher would not start agents on all nodes.
    """
    config = _configuration(request)
    show, report = request.show, request.report
    _check_supported(config)
    passing.check_file(config)
    for notice in config.notices:
        if notice.min_verbosity <= config.output.verbosity:
            report(str(notice))
    report(f"checking {quote(fold(setup.node_names(config)))}")
    nodes, failures = inspect(config)
    rates, rates_of_gpus, error = None, list[tuple[str, NodeGpuRates]](), None
    try:
        if nodes:
            rates = network_rates(config, nodes)
            nodes = with_rates(nodes, rates)
            if request.options["deep"]:
                rates_of_gpus = gpu_rates(config, nodes, report)
    except LaunchError as problem:
        error = problem
    refused = page.refused(nodes) if config.health == "refuse" else []
    problems = [*page.problems(nodes), *deep_check.problems(rates_of_gpus)]
    if nodes:
        show(page.node_table(nodes))
    for line in filter(None, (*page.imports(nodes), page.sent(nodes))):
        show(line)
    if rates and len(nodes) > 1:
        show(page.rates(rates.all_reduce, rates.backend, nodes))
    if gpus := deep_check.rates_table(rates_of_gpus):
        show(gpus)
    if health := page.health(nodes):
        show(health)
    for line in problems:
        show(f"warning: {line}")
    if config.passing_hosts_file:
        _write_passing(config, nodes, rates_of_gpus, error)
    _raise_failures(failures, error)
    report("problems found, see the warnings above" if problems else "no problems found")
    if refused:
        report(f"jobs do not use {fold(refused)} (--health)")
    return HARDWARE if refused else CHECK_WARNED if problems else 0


def _configuration(request: Request) -> LaunchConfig:
    """That of the run that is checked; without a script, or where hosts have none yet, that of a script of ours."""
    own = {"script": f"{__package__}.worker_network", "module": True, "no_python": False, "run_path": False}
    config = request.configure(**({} if request.options["script"] else own))
    config = request.configure(**own, chdir="~") if config.sync else config
    # Without the code: nothing of the user's is run. With the Python environment.
    return features.at_start(replace(config, sync=False, snapshot=False, code=None))


def _check_supported(config: LaunchConfig) -> None:
    if config.dry_run:
        raise UsageError("--check tests real nodes, and cannot be combined with --dry-run")
    if config.each_node_has_launcher or config.task:
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


def _write_passing(
    config: LaunchConfig,
    nodes: Sequence[CheckedNode],
    gpus: Sequence[tuple[str, NodeGpuRates]],
    error: LaunchError | None,
) -> None:
    """Write ``--passing-hosts-file``, unless a job that measures has failed: then nobody knows which hosts pass.

    Raises:
        LaunchError: the file cannot be written.
    """
    if error and not page.unreachable(nodes):
        return
    failed = verdicts.failed(nodes, config.health) | verdicts.slow(nodes, gpus)
    names = [node.host for node in nodes if node.host not in failed]
    if problem := passing.written(config.passing_hosts_file or "", config, names):
        raise LaunchError(f"{passing.OPTION} {quote(config.passing_hosts_file or '')}: {problem}", "", USAGE)


def network_rates(config: LaunchConfig, nodes: Sequence[CheckedNode]) -> NetworkRates:
    """Run the job that measures the network of the usable nodes, and read the results that rank 0 printed.

    Raises:
        LaunchError: the nodes cannot connect to each other, the job failed, or the user stopped it.
    """
    if failed := page.unreachable(nodes):
        lines = "\n".join(f"  {line}" for line in failed)
        raise LaunchError(f"nodes cannot connect to each other\n{lines}", _CONNECT_HINT, RENDEZVOUS)
    result, printed = _run(_job(config, nodes, "worker_network"), NETWORK_RATES.encode())
    if not result.exit_code and printed:
        rates: NetworkRates = wire.decode(printed[0], (NetworkRates,))
        return rates
    if len(nodes) > 1:
        raise LaunchError(
            "the test job failed, although the agents can connect; the failure page above has the reason",
            _CONNECT_HINT,
            RENDEZVOUS,
        )
    raise LaunchError("a worker that only uses torch fails on this node", "", NODE_NOT_READY)


def with_rates(nodes: Sequence[CheckedNode], rates: NetworkRates) -> list[CheckedNode]:
    """``nodes`` with what was measured of each."""
    by_node = zip(nodes, rates.nccl, rates.pairs, strict=True)
    return [replace(node, nccl=nccl, bytes_per_s=rate) for node, nccl, rate in by_node]


def gpu_rates(
    config: LaunchConfig, nodes: Sequence[CheckedNode], report: Callable[[str], None]
) -> list[tuple[str, NodeGpuRates]]:
    """Run the job that measures the GPUs: the rates by host.

    Raises:
        LaunchError: the user stopped it.
    """
    report("measuring the GPUs: matrix products, memory, and transfers between them")
    _, lines = _run(_job(config, nodes, "worker_gpus"), GPU_RATES.encode())
    return deep_check.of_nodes([node.host for node in nodes], lines)


# A module of ddplaunch in a real job with one worker per node.


def _job(config: LaunchConfig, nodes: Sequence[CheckedNode], module: str) -> LaunchConfig:
    """A job that runs a module of this package in one worker on each of the nodes, in their order."""
    names = [node.host for node in nodes]
    named = zip(display_names(config.hosts), config.hosts, strict=True)
    hosts = tuple(replace(host, slots=None) for name, host in named if name in names)
    return LaunchConfig(
        script=f"{__package__}.{module}",
        entry="module",
        min_nodes=len(names),
        max_nodes=len(names),
        workers=WorkerConfig(nproc_per_node=1, gpus=config.workers.gpus),
        hosts=hosts,
        # The table shows addresses without a name; torch would warn about them for every worker.
        remote=replace(config.remote, environ=(("TORCH_CPP_LOG_LEVEL", "ERROR"), *config.remote.environ)),
        chdir=config.chdir,
        interface=config.interface,
        local_addr=config.local_addr,
        timeouts=TimeoutConfig(shutdown_timeout_s=min(config.timeouts.shutdown_timeout_s, 5.0), hang_report_s=None),
        signals=config.signals,
        health="off",  # The check itself has looked, and a sick node is to be measured too.
        output=OutputConfig(
            log_dir=NO_LOGS,
            redirects=Streams(2),
            line_prefix=LINE_PREFIX,
            verbosity=max(-1, config.output.verbosity - 1),
        ),
    )


def _run(config: LaunchConfig, prefix: bytes) -> tuple[RunResult, list[bytes]]:
    """Run ``config``; its result, and the rest of each line of output after ``prefix``.

    Raises:
        LaunchError: the user stopped it.
    """
    from ddplaunch.launcher.launch import launch

    with os.fdopen(os.memfd_create("ddplaunch-check"), "rb") as file:  # A container may have no writable folder.
        result = launch(config, file.fileno())
        file.seek(0)
        lines = [line.partition(prefix)[2] for line in file.read().splitlines() if prefix in line]
    if result.outcome == "stopped":
        raise LaunchError("stopped", "", result.exit_code)
    return result, lines


# Inspection by agents.


def inspect(config: LaunchConfig) -> tuple[list[CheckedNode], list[HostFailure]]:
    """Results of all usable nodes in the order of the hosts, and the failures of the others.

    Raises:
        LaunchError: this machine has no room for the connections.
    """
    queries = Queries()
    console = Console(setup.console_style(config, None))
    transport = setup.transport_for(config, run_folder.new_run_id(), console.output, queries.post)
    query = InspectNode(
        len(config.hosts) > 1,
        config.local_addr,
        config.interface,
        setup.program(config),
        looks_at_health=config.health != "off",
        log_dir=config.output.log_dir,
        gpus=config.workers.gpus,
        sets_caches=config.workers.compile_cache != "off",
    )
    with contextlib.closing(transport), contextlib.closing(queries):
        queries.start(transport, query, "run")
        queries.wait(queries.nodes, NodeReport)
        queries.ask(queries.nodes, lambda _node: Ping(0.0, time.time()), Pong)
        _connect(queries)
        queries.ask(queries.nodes, lambda _node: ImportTorch(), ImportTimes, IMPORTS_S + ANSWER_TIMEOUT_S)
        return [_checked(node) for node in queries.nodes if not node.failure], queries.failures()


def _connect(queries: Queries) -> None:
    """Have every usable node connect to the first one, and to some that follow it."""
    usable = [node for node in queries.nodes if not node.failure]
    reports = {node.name: node.answers[NodeReport] for node in usable}
    names = list(reports)

    def peers(node: QueriedNode) -> ConnectToNodes:
        position = names.index(node.name)
        following = (names[(position + step) % len(names)] for step in range(1, _MAX_PEERS + 1))
        others = [name for name in (names[0], *following) if name != node.name]
        return ConnectToNodes({name: (reports[name].addresses, reports[name].port) for name in others})

    queries.ask(usable if len(names) > 1 else (), peers, ConnectResults)


def _checked(node: QueriedNode) -> CheckedNode:
    pong = node.answers[Pong]
    half_s = (node.received_s[Pong] - pong.ping_time_s) / 2
    connected = node.answers.get(ConnectResults, ConnectResults(()))
    return CheckedNode(
        host=node.name,
        report=node.answers[NodeReport],
        clock_s=pong.time_s - pong.ping_time_s - half_s,
        clock_error_s=half_s,
        unreachable=connected.failed,
        imports=node.answers[ImportTimes],
        sent=node.answers.get(NodeFacts, NodeFacts()).sent,
    )
