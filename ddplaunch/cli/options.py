"""All options of the command line, by the headings of the help page: those of the core, and what features bring.

A row says all about an option. ``build_config`` applies those that set a field, and decides about the others.

An option has three places: its field, its row, and its use; docs/architecture.md has the steps for a variable of the
workers. The row stands here, in ``host_options`` (other machines), in ``rendezvous_options`` (nodes and how they meet),
or in ``rows`` of a feature's package. Who uses the value says which class in ``config`` or ``timeouts`` has the field;
the value is then there already:

=======================  ========================================  ====================================================
who uses it              the field is in                           where it is found
=======================  ========================================  ====================================================
launcher                 ``LaunchConfig``, ``RemoteConfig``        ``config``; in a watch ``RunServices.config``
launcher and agent       ``AgentConfig``, ``OutputConfig``,        the same; and ``spec``, the ``AgentSpec`` of the
                         ``TimeoutConfig``                         agent; in a part ``NodeServices.spec``
agent, for its workers   ``WorkerConfig``                          ``spec.workers``
forkserver, and its      ``WorkerConfig``                          ``server.workers`` in ``worker.forkserver``; in a
forks before the script                                            fork ``_become`` applies it: every worker passes
                                                                   there, also an executed one. Catch its error, and
                                                                   call ``_refuse`` with a message that names the
                                                                   option, as ``_bind`` does
script                   ``WorkerConfig``                          a variable: ``protocol.environment``; of a feature
                                                                   ``Part.default_environ``
a feature in a worker    ``WorkerConfig``, or no field             the text that ``Part.for_worker`` returns for it
=======================  ========================================  ====================================================

Where each node has a launcher, each launcher has its own options. If all nodes must have one value of an option, as of
``--max-restarts``, that of the node that serves the rendezvous counts. It has seven more places, each of them a line:
``MemberSpec`` and ``RendezvousClient.member_spec``, which fills it; ``Coordinator``, a parameter, or ``Restarts`` there
if it is about restarts; ``CoordinatorRunner``, which fills that; ``RoundFormed`` and ``Coordinator._start``, which
tells it to all nodes; ``MultiNodeRendezvous.with_agreed``, which puts it into each node's spec. That is too late for
the forkserver and ``shared_environ``: they get what this node's own launcher has, before the nodes meet.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ddplaunch import features
from ddplaunch.cli import host_options, rendezvous_options, values
from ddplaunch.config import LaunchConfig
from ddplaunch.rows import (
    COMING_BACK,
    EXISTING_RUNS,
    LOGS,
    Option,
    flag,
    parse_positive_seconds,
    parse_ranks,
    parse_seconds,
    parse_whole,
)


def version_line() -> str:
    """Versions for a bug report, read without importing torch."""
    from importlib import metadata

    from ddplaunch.version import __version__, commit

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    python = ".".join(map(str, sys.version_info[:3]))
    checkout = f"commit {found}, " if (found := commit()) else ""
    return f"ddplaunch {__version__} ({checkout}torch {torch}, Python {python})"


def _short_help(ctx: Any) -> object:
    return ctx.command.short_help_page(ctx, "All options and exit codes: ddplaunch --help. Documentation: --docs.")


def _shows(name: str, text: str, prints: Callable[[Any], object]) -> Option:
    """An option that prints something and ends the command."""
    return flag(name, text, prints=prints)


def docs_folder() -> Path:
    """The folder with the documentation: inside the package, or next to it in a clone of the repository."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "docs", package.parent / "docs") if os.path.isdir(path))


_STOP_SIGNALS = ",".join(LaunchConfig.signals)

_OF_CORE: dict[str, tuple[Option, ...]] = {
    "Workers": (
        Option(
            "--nproc-per-node",
            "N",
            "Workers per node: a number, gpu, xpu, cpu (one per CPU), or auto (gpu, else cpu). Default: gpu, else 1.",
            pet=True,
            short="workers per node; default: one per GPU, or one",
            sets="workers.nproc_per_node",
            parse=values.parse_nproc,
            completes=("gpu", "xpu", "cpu", "auto"),
        ),
        flag("-m --module", "SCRIPT is a module; run it as 'python -m' does.", pet=True),
        flag("--no-python", "SCRIPT is a program; execute it directly.", pet=True),
        flag("--run-path", "SCRIPT is a script, even with -m or --no-python.", pet=True),
        Option(
            "--start-method",
            "METHOD",
            "forkserver, fork: import torch once, then fork; spawn: an interpreter per worker. Default: forkserver.",
            pet=True,
            choices=("forkserver", "spawn", "fork"),
            sets="workers.start_method",
            parse=values.parse_start_method,
        ),
        Option(
            "--preload",
            "A,B",
            "Modules to import before forking, besides torch.",
            sets="workers.preload",
            parse=values.parse_preload,
        ),
        flag(
            "--pass-local-rank",
            "Give the script --local-rank=N, for old torch.distributed.launch scripts.",
            sets="workers.pass_local_rank",
        ),
        flag("--use-env", "Option of torch.distributed.launch; has no effect.", hidden=True),
        Option(
            "--role",
            "NAME",
            "The workers' ROLE_NAME. Default: default.",
            pet=True,
            sets="workers.role",
            parse=lambda text, _: text,
        ),
    ),
    "Devices": (
        Option(
            "--gpus",
            "2,4,7",
            "GPUs to use; free:2: two that nobody uses; free: as many as the workers need. Default: "
            "CUDA_VISIBLE_DEVICES, or all.",
            short="GPUs to use; default: all",
            sets="workers.gpus",
            can_be_bare=True,
            parse=values.parse_gpus,
        ),
        Option(
            "--gpus-per-proc",
            "K",
            "Each worker sees K GPUs of the node. Default: all.",
            sets="workers.gpus_per_proc",
            parse=parse_whole,
        ),
        flag(
            "--virtual-local-rank",
            "Each worker sees one GPU, with LOCAL_RANK=0.",
            pet=True,
            sets="workers.virtual_local_rank",
        ),
    ),
    "Restarts and stopping": (
        Option(
            "--max-restarts",
            "N",
            "After a failure start all workers again, at most N times. Default: 0.",
            pet=True,
            short="after a failure start again, at most N times",
            sets="max_restarts",
            parse=parse_whole,
        ),
        Option(
            "--shutdown-timeout",
            "TIME",
            "Time from SIGTERM to SIGKILL, like 90, 90s or 5m; a stop takes at most about 10 s more. Default: 30 s.",
            pet=True,
            sets="timeouts.shutdown_timeout_s",
            parse=parse_seconds,
            variable="TORCH_ELASTIC_SHUTDOWN_TIMEOUT",
        ),
        Option(
            "--signals-to-handle",
            "NAMES",
            f"Signals that stop the job. Default: {_STOP_SIGNALS}.",
            pet=True,
            sets="signals",
            parse=values.parse_signals,
        ),
    ),
    "Output and logs": (
        Option(
            "--log-dir",
            "DIR",
            "Parent of the run folder, which has the logs; /dev/null: no files. Default: $XDG_STATE_HOME/ddplaunch.",
            pet=True,
            sets="output.log_dir",
            parse=values.parse_folder,
            completes="folder",
        ),
        Option(
            "-r --redirects",
            "WHAT",
            "Streams to keep off the console: 1 stdout, 2 stderr, 3 both; by local rank: 0:1,7:3. Default: 0, none.",
            pet=True,
            sets="output.redirects",
            parse=values.parse_streams,
        ),
        Option(
            "-t --tee",
            "WHAT",
            "Streams to show on the console even if redirected; values as of --redirects. Default: 0.",
            pet=True,
            sets="output.tee",
            parse=values.parse_streams,
        ),
        Option(
            "--ranks-filter",
            "0,4-7",
            "Ranks shown on the console. Default: all.",
            sets="output.show_ranks",
            parse=parse_ranks,
        ),
        Option(
            "--local-ranks-filter",
            "0,4-7",
            "Local ranks shown on the console. Default: all.",
            pet=True,
            sets="output.show_local_ranks",
            parse=parse_ranks,
        ),
        Option(
            "--duplicate-stdout-filters",
            "A,B",
            "Copy stdout lines with A or B to filtered_stdout.log. Default: none.",
            pet=True,
            sets="output.duplicate_stdout_filters",
            parse=values.parse_needles,
            only=(LOGS,),
        ),
        Option(
            "--duplicate-stderr-filters",
            "A,B",
            "Copy stderr lines with A or B to filtered_stderr.log; ',,' is a comma. Default: none.",
            pet=True,
            sets="output.duplicate_stderr_filters",
            parse=values.parse_needles,
            only=(LOGS,),
        ),
        Option(
            "--line-prefix",
            "TEXT",
            "Before every line on the console; ${host}, ${rank} and others are replaced; '' shows output as it was "
            "written. Default: '[${host}:${rank}] ', nothing for a lone worker.",
            sets="output.line_prefix",
            parse=lambda text, _: text,
            variable="TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE",
        ),
        flag("--timestamps", "Show the time, on this machine's clock, before every line on the console."),
        flag("-v --verbose", "Show more messages.", sets="output.verbosity", gives=1),
        flag("-q --quiet", "Show only errors and the failure page.", sets="output.verbosity", gives=-1),
    ),
    "Nodes and rendezvous": rendezvous_options.ROWS,
    "Hosts": host_options.ROWS,
    "Before a run": (),
    COMING_BACK: (),
    EXISTING_RUNS: (),
    "Many jobs": (),
    "Dry run": (
        flag(
            "--dry-run",
            "Run the job on this machine's CPU, with simulated nodes and GPUs; scripts stay unchanged.",
            short="run the job on this machine's CPU",
            sets="dry_run",
        ),
    ),
    "Accepted, without effect": (
        Option("--monitor-interval", "S", "ddplaunch does not poll.", pet=True, parse=parse_positive_seconds),
        Option(
            "--logs-specs",
            "NAME",
            "Must be default: plug-ins of torchrun's agent are not supported.",
            parse=values.parse_logs_specs,
            completes=("default",),
        ),
    ),
    "Other": (
        _shows("--version", "Show versions.", lambda _: version_line()),
        _shows("--docs", "Show the folder with the documentation.", lambda _: docs_folder()),
        _shows("-h", "Show the most used options.", _short_help),
    ),
}


def _with_features(of_core: Mapping[str, Sequence[Option]]) -> dict[str, list[Option]]:
    """``of_core`` and the options of the features; what has nothing to stand below, as --all without --ps, is left out.

    Raises:
        ValueError: there is no such ``heading``, or no option that ``after`` names.
    """
    groups = {heading: [*rows] for heading, rows in of_core.items()}
    brought = [row for row in features.rows() if isinstance(row, Option)]
    for row in sorted(brought, key=lambda row: bool(row.of)):
        if row.heading in groups:
            groups[row.heading].append(row)
        elif not _is_placed(row, groups.values()) and not row.of:
            raise ValueError(f"{row.names}: there is no heading {row.heading!r}, and no option {row.after!r}")
    return {heading: rows for heading, rows in groups.items() if rows}


def _is_placed(row: Option, groups: Iterable[list[Option]]) -> bool:
    """Whether ``row`` now stands below the option that it names, and below others that name the same one."""
    above = row.of or row.after
    for group in groups:
        places = [n for n, other in enumerate(group, 1) if above in (other.long_name, other.of or other.after)]
        if above and places:
            group.insert(places[-1], row)
            return True
    return False


OPTIONS = _with_features(_OF_CORE)
"""By heading of the help page."""

ROWS = [row for rows in OPTIONS.values() for row in rows if row.sets or not row.prints]
