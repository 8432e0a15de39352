"""All options of the command line, by the headings of the help page.

A row says all about an option. ``fields`` applies those that set a field; ``build_config`` has the others.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch import features
from ddplaunch.cli import values
from ddplaunch.cli.run_options import EXISTING_RUNS, LEAVING_AND_COMING_BACK
from ddplaunch.cli.worker_options import DEVICES, RESTARTS_AND_STOPPING, WORKERS
from ddplaunch.rows import DRY_RUN, HOSTS, LOGS, REAL_RUN, SSH, Option, flag

if TYPE_CHECKING:
    from collections.abc import Callable


def version_line() -> str:
    """Versions for a bug report, read without importing torch."""
    from importlib import metadata

    from ddplaunch.version import __version__

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"ddplaunch {__version__} (torch {torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"


def _short_help(ctx: Any) -> object:
    return ctx.command.short_help_page(ctx, "All options and exit codes: ddplaunch --help. Documentation: --docs.")


def _shows(name: str, text: str, prints: Callable[[Any], object]) -> Option:
    """An option that prints something and ends the command."""
    return flag(name, text, prints=prints)


def docs_folder() -> Path:
    """The folder with the documentation: inside the package, or next to it in a clone of the repository."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "docs", package.parent / "docs") if os.path.isdir(path))


_ALL: dict[str, tuple[Option, ...]] = {
    "Workers": WORKERS,
    "Devices": DEVICES,
    "Restarts and stopping": RESTARTS_AND_STOPPING,
    "Output and logs": (
        Option(
            "--log-dir",
            "DIR",
            "Parent of the run folder, which has the logs; /dev/null: no files. Default: $XDG_STATE_HOME/ddplaunch.",
            pet=True,
            path="folder",
            sets="output.log_dir",
        ),
        Option(
            "--keep-runs",
            "N",
            "Run folders to keep, the newest N; those in --log-dir are never deleted. Default: 30 days, at most 5 GB.",
            sets="output.keep_runs",
            parse=values.parse_count,
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
            parse=values.parse_ranks,
        ),
        Option(
            "--local-ranks-filter",
            "0,4-7",
            "Local ranks shown on the console. Default: all.",
            pet=True,
            sets="output.show_local_ranks",
            parse=values.parse_ranks,
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
        flag("--timestamps", "Show the time, on this machine's clock, before every line on the console."),
        flag(
            "--collect-logs",
            "At the end copy the log files of all nodes to this machine. Default: the last lines of failed workers.",
            sets="output.collect_logs",
            only=(LOGS,),
        ),
        flag(
            "--no-samples",
            "Do not read every 2 s what workers, GPUs and nodes use. Default: read it, into samples/ of the run.",
            sets="output.samples",
            gives=False,
            feature="usage",
        ),
        Option(
            "--metrics-file",
            "FILE",
            "Write what workers, GPUs and nodes do into FILE every 10 s, in Prometheus' text format. Default: none.",
            path="file",
            sets="output.metrics_file",
            feature="metrics",
        ),
        flag(
            "--no-page",
            "Do not make run.html, the page of the run. Default: it is made.",
            sets="output.page",
            gives=False,
            feature="page",
        ),
        Option(
            "--event-log-handler",
            "NAME",
            "null, or console: events as JSON lines. Default: null.",
            pet=True,
            sets="output.events",
            parse=values.parse_events,
            completes=("null", "console"),
        ),
        flag("-v --verbose", "Show more messages.", sets="output.verbosity", gives=1),
        flag("-q --quiet", "Show only errors and the failure page.", sets="output.verbosity", gives=-1),
    ),
    "Nodes and rendezvous": (
        Option(
            "--nnodes",
            "N|MIN:MAX",
            "Nodes of the job. Default: all named hosts, else 1.",
            pet=True,
            short="nodes of the job; default: all hosts, or one",
        ),
        Option(
            "--cluster",
            "WORD",
            "Scheduler whose variables name the nodes, or this node's rank and the endpoint: auto, none, slurm, "
            "openmpi, mpich, pals, jsrun, lsf, pbs or kubernetes. Default: auto.",
            "auto",
            completes="ddplaunch.cli.completion:clusters",
        ),
        flag("--standalone", "One node, like --nnodes 1, also with --nnodes 1:MAX; ignore endpoint options.", pet=True),
        Option(
            "--rdzv-id",
            "ID",
            "Run id: the name of the run on all nodes. Default: a new one.",
            pet=True,
            sets="run_id",
            parse=values.parse_run_id,
        ),
        Option(
            "--rdzv-backend",
            "NAME",
            "Which node serves the rendezvous. static: node rank 0; c10d: the node of the endpoint. Default: static.",
            "static",
            pet=True,
            completes=("static", "c10d"),
        ),
        Option(
            "--rdzv-endpoint",
            "HOST:PORT",
            "Endpoint of the rendezvous. With c10d the port may be left out: 29400.",
            "",
            pet=True,
        ),
        Option(
            "--rdzv-conf",
            "K=V,...",
            "Settings of the rendezvous: join_timeout, last_call_timeout, keep_alive_interval, is_host, ...",
            "",
            pet=True,
        ),
        Option(
            "--node-rank",
            "N",
            "Number of this node. Default: 0; with c10d, by arrival, as among nodes with an equal one.",
            pet=True,
        ),
        Option("--master-addr", "HOST", "With static: address of node rank 0.", pet=True),
        Option(
            "--master-port",
            "PORT",
            "On one node: port of the workers' store. With static: port at which node rank 0 serves the rendezvous.",
            pet=True,
        ),
        Option(
            "--local-addr",
            "HOST",
            "Address at which other nodes reach this one. Default: the one on the way to the endpoint.",
            pet=True,
            sets="local_addr",
            parse=values.parse_host,
        ),
    ),
    "Hosts (started over SSH)": (
        Option(
            "--hosts",
            "gpu[1-4],USER@HOST:PORT",
            "Hosts to start nodes on. Default: DDPLAUNCH_HOSTS.",
            short="hosts to start nodes on, over SSH",
        ),
        Option(
            "--hostfile",
            "FILE",
            "File with a host per line. Default: DDPLAUNCH_HOSTFILE.",
            completes="ddplaunch.cli.completion:files",
        ),
        Option("--include", "gpu1@gpu2:0,2", "Use only these hosts, or only these devices of a host."),
        Option("--exclude", "gpu1@gpu2:0,2", "Use all hosts, or all devices of a host, except these."),
        Option("--avoid", "gpu[7-8]", "Do not use these hosts of the list, also as spares."),
        Option(
            "-x --export",
            "NAME[=VALUE]",
            "Forward a variable to the workers; 'PRE*': all with this prefix.",
            multiple=True,
        ),
        Option(
            "--env-file",
            "FILE",
            "Forward the variables in FILE to the workers; a NAME=VALUE per line.",
            completes="ddplaunch.cli.completion:files",
        ),
        Option(
            "--chdir",
            "DIR",
            "Working directory of the workers on every node. Default: the current one.",
            sets="chdir",
            completes="ddplaunch.cli.completion:folders",
        ),
        Option(
            "--interface",
            "NAME",
            "Network interface between the nodes. Default: detected.",
            sets="interface",
            only=(REAL_RUN,),
        ),
        Option(
            "--remote-python",
            "PATH",
            "Python interpreter on the hosts. Default: the path of this one.",
            sets="remote.python",
            only=(REAL_RUN, HOSTS),
            completes="ddplaunch.cli.completion:files",
        ),
        Option(
            "--remote-setup",
            "TEXT",
            "Shell text to run first on the hosts, like 'module load cuda'.",
            sets="remote.setup",
            only=(REAL_RUN, HOSTS),
        ),
        Option("--ssh-user", "NAME", "Login name, like ssh -l.", sets="remote.user", only=(SSH,)),
        Option(
            "--ssh-port",
            "PORT",
            "Port of the SSH server, like ssh -p.",
            sets="remote.port",
            parse=values.parse_whole,
            only=(SSH,),
        ),
        Option(
            "--ssh-identity",
            "FILE",
            "File of the private key, like ssh -i.",
            sets="remote.identity",
            only=(SSH,),
            completes="ddplaunch.cli.completion:files",
        ),
        Option(
            "--ssh-config",
            "FILE",
            "SSH configuration file, like ssh -F.",
            sets="remote.config",
            only=(SSH,),
            completes="ddplaunch.cli.completion:files",
        ),
        flag("--ssh-accept-new", "Accept and store the keys of unknown hosts.", sets="remote.accept_new", only=(SSH,)),
        Option(
            "--connect-timeout",
            "TIME",
            "Time for one attempt to connect. Default: 15 s.",
            sets="remote.connect_timeout_s",
            parse=values.parse_positive_seconds,
            only=(SSH,),
        ),
    ),
    "Before a run": (
        flag(
            "--check",
            "Test this machine, or --hosts: versions, GPUs, health, limits, network speed; run no script.",
            short="test this machine or the hosts; run no script",
            feature="check",
        ),
        flag(
            "--deep",
            "With --check: measure each GPU (matrix product, memory, transfers to the others) and name the slow ones.",
            of="--check",
        ),
    ),
    "Leaving a run and coming back": LEAVING_AND_COMING_BACK,
    "Existing runs (yours, here and on --hosts)": EXISTING_RUNS,
    "Dry run": (
        flag(
            "--dry-run",
            "Run the job on this machine's CPU, with simulated nodes and GPUs; scripts stay unchanged.",
            short="run the job on this machine's CPU",
            sets="dry_run",
        ),
        flag(
            "--rehearse-compile",
            "With --dry-run: torch.compile compiles for the CPU. Default: it returns the model unchanged.",
            sets="compile_on_cpu",
            only=(DRY_RUN,),
            feature="dry_run",
        ),
        flag(
            "--plan",
            "Show the plan of the run: nodes, ranks, GPUs, environment; start nothing.",
            short="show what would be started; start nothing",
            feature="plan",
        ),
        flag("--json", "With --plan: print JSON, for machines.", of="--plan"),
        Option(
            "--inject",
            "'kill rank=3 after=5s'",
            "With --dry-run: inject a fault and report how the job handled it; 'help' lists the faults.",
            multiple=True,
            sets="injections",
            only=(DRY_RUN,),
            feature="faults",
        ),
    ),
    "Accepted, without effect": (
        Option("--monitor-interval", "S", "ddplaunch does not poll.", pet=True, parse=values.parse_positive_seconds),
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

_OFFERED = {row.long_name for rows in _ALL.values() for row in rows if row.feature in ("", *features.names())}
OPTIONS = {
    heading: kept
    for heading, rows in _ALL.items()
    if (kept := tuple(row for row in rows if row.long_name in _OFFERED and row.of in ("", *_OFFERED)))
}
"""By heading of the help page."""

ROWS = [row for rows in OPTIONS.values() for row in rows if not row.prints]
