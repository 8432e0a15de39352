"""``--check``: whether a job would run on these nodes, and how fast they are together.

First an agent on every node tells what is there; then a real job meets and all-reduces, by all that a run is made of.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddplaunch.config import NO_LOGS, LaunchConfig, Streams
from ddplaunch.errors import CHECK_FOUND, NODE_NOT_READY, RENDEZVOUS, LaunchError, UsageError
from ddplaunch.host_ranges import fold
from ddplaunch.launcher import check_nodes, preparation
from ddplaunch.launcher import check_page as page
from ddplaunch.launcher.failures import failures_table
from ddplaunch.printable import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.launcher.check_page import CheckedNode
    from ddplaunch.launcher.failures import HostFailure

MODULE = "ddplaunch.worker.check_node"
"""What workers run."""

_MARK = b"check: "
_MEET_HINT = "Can every node reach every other, at any port? --local-addr and --interface name the way."


@dataclass(frozen=True)
class _Together:
    """What the job has shown, by node in their order: NCCL's version, bytes a second in pairs; and ``all`` at once."""

    nccl: tuple[str, ...]
    pairs: tuple[float, ...]
    backend: str
    all: float


def check(config: LaunchConfig, show: Callable[[str], None], say: Callable[[str], None]) -> int:
    """Look at all nodes of ``config``, spares too: ``show`` gets what was found, ``say`` the rest.

    Returns:
        The exit code.

    Raises:
        LaunchError: hosts cannot be used, or cannot meet; all that was found has been shown.
        UsageError: there is no launcher that could ask all nodes.
    """
    _refuse(config)
    for level, text in config.notices:
        if level <= config.verbosity:
            say(text)
    say(f"checking {shown(fold(preparation.hosts(config)))}")
    nodes, failures = check_nodes.look(config)
    together, error = _meet(config, nodes)
    if together:
        shown_by = zip(nodes, together.nccl, together.pairs, strict=True)
        nodes = [replace(node, nccl=nccl, bytes_per_s=rate) for node, nccl, rate in shown_by]
    problems = page.problems(nodes)
    if nodes:
        show(page.table(nodes))
    if together and len(nodes) > 1:
        show(page.rates(together.all, together.backend, nodes))
    for line in problems:
        show(f"warning: {line}")
    _fail(failures, error)
    say("nothing stands in the way of a job" if not problems else "a job may fail or be slow")
    return CHECK_FOUND if problems else 0


def _refuse(config: LaunchConfig) -> None:
    if config.dry_run:
        raise UsageError("--check looks at real nodes, and --dry-run pretends them")
    if config.meeting or config.task:
        raise UsageError("--check: one launcher must reach all nodes", "Name them with --hosts or --hostfile.")


def _fail(failures: Sequence[HostFailure], error: LaunchError | None) -> None:
    """Raises LaunchError for the worst."""
    if failures:
        also = f"\n{error.message}" if error else ""
        raise LaunchError(f"not all hosts can be used\n{failures_table(failures)}{also}", "", NODE_NOT_READY)
    if error:
        raise error


def _meet(config: LaunchConfig, nodes: Sequence[CheckedNode]) -> tuple[_Together | None, LaunchError | None]:
    """What the job shows on the nodes that can be used, or why there was none."""
    unreached = page.unreached(nodes)
    if unreached:
        lines = "\n".join(f"  {line}" for line in unreached)
        return None, LaunchError(f"nodes cannot reach each other\n{lines}", _MEET_HINT, RENDEZVOUS)
    if not nodes:
        return None, None
    try:
        return _run(_job(config, [node.host for node in nodes])), None
    except LaunchError as error:
        return None, error


def _job(config: LaunchConfig, names: Sequence[str]) -> LaunchConfig:
    """One worker on each node, whatever the user's own job would have."""
    hosts = tuple(replace(host, slots=None) for host in config.hosts if host.name in names)
    return LaunchConfig(
        script=MODULE,
        entry="module",
        min_nodes=len(names),
        max_nodes=len(names),
        nproc_per_node=1,
        gpus=config.gpus,
        hosts=hosts,
        # That an address has no name is in the table; torch would say it for every worker.
        remote=replace(config.remote, environ=(("TORCH_CPP_LOG_LEVEL", "ERROR"), *config.remote.environ)),
        chdir=config.chdir,
        interface=config.interface,
        local_addr=config.local_addr,
        shutdown_timeout_s=min(config.shutdown_timeout_s, 5.0),
        signals=config.signals,
        log_dir=NO_LOGS,
        redirects=Streams(2),
        line_prefix="[${host}:${rank}] ",
        verbosity=max(-1, config.verbosity - 1),
    )


def _run(job: LaunchConfig) -> _Together:
    """Run it and read what its first worker has said.

    Raises:
        LaunchError: it has failed, or the user has stopped it.
    """
    from ddplaunch.launcher.launching import launch

    with tempfile.TemporaryFile() as file:
        result = launch(job, file.fileno())
        file.seek(0)
        said = [line for line in file.read().splitlines() if _MARK in line]
    if result.outcome == "stopped":
        raise LaunchError("stopped", "", result.exit_code)
    if result.exit_code or not said:
        if job.max_nodes > 1:
            raise LaunchError("the nodes met, and their workers could not", _MEET_HINT, RENDEZVOUS)
        raise LaunchError("a worker that only uses torch fails here", "", NODE_NOT_READY)
    told: Any = json.loads(said[0].partition(_MARK)[2])
    return _Together(tuple(told["nccl"]), tuple(told["pairs"]), told["backend"], told["all"])
