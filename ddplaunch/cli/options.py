"""All options of the command line, by the headings of the help page; ``build_config`` applies their values.

A new option needs an entry here, a field in ``config`` and its line in ``build_config``.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ddplaunch.cli.run_options import EXISTING_RUNS, LEAVING_AND_COMING_BACK
from ddplaunch.config import LaunchConfig, NumaBinding
from ddplaunch.rows import Option, flag

if TYPE_CHECKING:
    from collections.abc import Callable

STOP_SIGNALS = ",".join(LaunchConfig.signals)


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
    return flag(name, text, pet=False, prints=prints)


def docs_folder() -> Path:
    """The folder with the documentation: inside the package, or next to it in a clone of the repository."""
    package = Path(__file__).parents[1]
    return next(path for path in (package / "docs", package.parent / "docs") if os.path.isdir(path))


OPTIONS: dict[str, tuple[Option, ...]] = {
    "Workers": (
        Option(
            "--nproc-per-node",
            "N",
            "Workers per node: a number, gpu, xpu, cpu (one per CPU), or auto (gpu, else cpu). Default: gpu, else 1.",
            short="workers per node; default: one per GPU, or one",
        ),
        flag("-m --module", "SCRIPT is a module; run it as 'python -m' does."),
        flag("--no-python", "SCRIPT is a program; execute it directly."),
        flag("--run-path", "SCRIPT is a script, even with -m or --no-python."),
        Option(
            "--start-method",
            "METHOD",
            "forkserver, fork: import torch once, then fork; spawn: an interpreter per worker. Default: forkserver.",
            "forkserver",
            choices=("forkserver", "spawn", "fork"),
        ),
        Option("--preload", "A,B", "Modules to import before forking, besides torch.", pet=False),
        Option(
            "--keep-warm",
            "TIME",
            "Leave torch and --preload imported for the next run, for this time; 0: use nothing that is left.",
            pet=False,
            short="leave torch imported for the next run, like 10m",
        ),
        flag(
            "--pass-local-rank", "Give the script --local-rank=N, for old torch.distributed.launch scripts.", pet=False
        ),
        flag("--use-env", "Option of torch.distributed.launch; has no effect.", pet=False, hidden=True),
        Option("--role", "NAME", "The workers' ROLE_NAME. Default: default.", "default"),
    ),
    "Devices": (
        Option(
            "--gpus",
            "2,4,7",
            "GPUs to use. Default: CUDA_VISIBLE_DEVICES, or all.",
            pet=False,
            short="GPUs to use; default: all",
        ),
        Option("--gpus-per-proc", "K", "Each worker sees K GPUs of the node. Default: all.", "0", pet=False),
        flag("--virtual-local-rank", "Each worker sees one GPU, with LOCAL_RANK=0."),
        Option(
            "--numa-binding",
            "HOW",
            "Bind workers to CPUs near their GPU: node, socket, exclusive or core-complex. Default: no binding.",
            pet=False,
            choices=get_args(NumaBinding),
        ),
    ),
    "Restarts and stopping": (
        Option(
            "--max-restarts",
            "N",
            "After a failure start all workers again, at most N times. Default: 0.",
            "0",
            short="after a failure start again, at most N times",
        ),
        Option(
            "--shutdown-timeout",
            "TIME",
            "Time from SIGTERM to SIGKILL, like 90, 90s or 5m; a stop takes at most about 10 s more. Default: 30 s.",
        ),
        Option(
            "--hang-timeout",
            "TIME",
            "The job counts as failed when nothing has moved on any node for this time, like 90 or 5m: no output, no "
            "collective, no CPU time, nothing read or written. Default: never.",
            pet=False,
            short="the job fails if nothing moves for so long",
        ),
        Option(
            "--busy-timeout",
            "TIME",
            "As --hang-timeout, but only output and collectives count as movement: also ends a rank that computes for "
            "ever. Default: never.",
            pet=False,
        ),
        Option(
            "--hang-report",
            "TIME|off",
            "When nothing has moved for this time, show which ranks wait for whom, and write hang.txt; the job goes "
            "on. Default: 5m, or ten times the longest pause of the run if that is more.",
            pet=False,
        ),
        flag(
            "--debug-on-error",
            "The first rank that raises an exception stops in pdb (post-mortem) before the job ends. Needs a terminal. "
            "breakpoint() works without any option.",
            pet=False,
        ),
        Option(
            "--debug-ranks",
            "0,4-7",
            "Only these ranks stop in a debugger, by breakpoint() or --debug-on-error; the others go on. Default: all.",
            "",
            pet=False,
        ),
        Option(
            "--health",
            "off|warn|refuse",
            "Before the start, look at the GPUs, disks and clock of every node. refuse: a node with a fault is not "
            "used; warn: faults are only shown; off: nothing is looked at. Default: refuse.",
            "refuse",
            pet=False,
        ),
        Option("--signals-to-handle", "NAMES", f"Signals that stop the job. Default: {STOP_SIGNALS}.", STOP_SIGNALS),
        Option(
            "--requeue-on",
            "USR1,TERM",
            "In a SLURM job these signals also stop the run, and SLURM then requeues the job. Default: none.",
            "",
            pet=False,
        ),
        Option(
            "--on-exit",
            "COMMAND",
            "Run this shell command when the run has ended; DDPLAUNCH_OUTCOME and others are in its environment.",
            pet=False,
        ),
    ),
    "Output and logs": (
        Option(
            "--log-dir",
            "DIR",
            "Parent of the run folder, which has the logs; /dev/null: no files. Default: $XDG_STATE_HOME/ddplaunch.",
            path="folder",
        ),
        Option(
            "--keep-runs",
            "N",
            "Run folders to keep, the newest N; those in --log-dir are never deleted. Default: 30 days, at most 5 GB.",
            pet=False,
        ),
        Option(
            "-r --redirects",
            "WHAT",
            "Streams to keep off the console: 1 stdout, 2 stderr, 3 both; by local rank: 0:1,7:3. Default: 0, none.",
            "0",
        ),
        Option(
            "-t --tee",
            "WHAT",
            "Streams to show on the console even if redirected; values as of --redirects. Default: 0.",
            "0",
        ),
        Option("--ranks-filter", "0,4-7", "Ranks shown on the console. Default: all.", "", pet=False),
        Option("--local-ranks-filter", "0,4-7", "Local ranks shown on the console. Default: all.", ""),
        Option(
            "--duplicate-stdout-filters",
            "A,B",
            "Copy stdout lines with A or B to filtered_stdout.log. Default: none.",
            "",
        ),
        Option(
            "--duplicate-stderr-filters",
            "A,B",
            "Copy stderr lines with A or B to filtered_stderr.log; ',,' is a comma. Default: none.",
            "",
        ),
        flag("--timestamps", "Show the time, on this machine's clock, before every line on the console.", pet=False),
        flag(
            "--collect-logs",
            "At the end copy the log files of all nodes to this machine. Default: the last lines of failed workers.",
            pet=False,
        ),
        flag(
            "--no-samples",
            "Do not read every 2 s what workers, GPUs and nodes use. Default: read it, into samples/ of the run.",
            pet=False,
        ),
        Option(
            "--metrics-file",
            "FILE",
            "Write what workers, GPUs and nodes do into FILE every 10 s, in Prometheus' text format. Default: none.",
            pet=False,
            path="file",
        ),
        flag("--no-page", "Do not make run.html, the page of the run. Default: it is made.", pet=False),
        Option("--event-log-handler", "NAME", "null, or console: events as JSON lines. Default: null.", "null"),
        flag("-v --verbose", "Show more messages.", pet=False),
        flag("-q --quiet", "Show only errors and the failure page.", pet=False),
    ),
    "Nodes and rendezvous": (
        Option(
            "--nnodes",
            "N|MIN:MAX",
            "Nodes of the job. Default: all named hosts, else 1.",
            short="nodes of the job; default: all hosts, or one",
        ),
        Option(
            "--cluster",
            "WORD",
            "Scheduler whose variables name the nodes, or this node's rank and the endpoint: auto, none, slurm, "
            "openmpi, mpich, pals, jsrun, lsf, pbs or kubernetes. Default: auto.",
            "auto",
            pet=False,
        ),
        flag("--standalone", "One node, like --nnodes 1, also with --nnodes 1:MAX; ignore endpoint options."),
        Option("--rdzv-id", "ID", "Run id: the name of the run on all nodes. Default: a new one."),
        Option(
            "--rdzv-backend",
            "NAME",
            "Which node serves the rendezvous. static: node rank 0; c10d: the node of the endpoint. Default: static.",
            "static",
        ),
        Option(
            "--rdzv-endpoint", "HOST:PORT", "Endpoint of the rendezvous. With c10d the port may be left out: 29400.", ""
        ),
        Option(
            "--rdzv-conf",
            "K=V,...",
            "Settings of the rendezvous: join_timeout, last_call_timeout, keep_alive_interval, is_host, ...",
            "",
        ),
        Option(
            "--node-rank",
            "N",
            "Number of this node. Default: 0; with c10d, by arrival, as among nodes with an equal one.",
        ),
        Option("--master-addr", "HOST", "With static: address of node rank 0."),
        Option(
            "--master-port",
            "PORT",
            "On one node: port of the workers' store. With static: port at which node rank 0 serves the rendezvous.",
        ),
        Option(
            "--local-addr",
            "HOST",
            "Address at which other nodes reach this one. Default: the one on the way to the endpoint.",
        ),
    ),
    "Hosts (started over SSH)": (
        Option(
            "--hosts",
            "gpu[1-4],USER@HOST:PORT",
            "Hosts to start nodes on. Default: DDPLAUNCH_HOSTS.",
            pet=False,
            short="hosts to start nodes on, over SSH",
        ),
        Option("--hostfile", "FILE", "File with a host per line. Default: DDPLAUNCH_HOSTFILE.", pet=False),
        Option("--include", "gpu1@gpu2:0,2", "Use only these hosts, or only these devices of a host.", pet=False),
        Option("--exclude", "gpu1@gpu2:0,2", "Use all hosts, or all devices of a host, except these.", pet=False),
        Option("--avoid", "gpu[7-8]", "Do not use these hosts of the list, also as spares.", pet=False),
        Option(
            "-x --export",
            "NAME[=VALUE]",
            "Forward a variable to the workers; 'PRE*': all with this prefix.",
            pet=False,
            multiple=True,
        ),
        Option("--env-file", "FILE", "Forward the variables in FILE to the workers; a NAME=VALUE per line.", pet=False),
        Option(
            "--chdir", "DIR", "Working directory of the workers on every node. Default: the current one.", pet=False
        ),
        Option("--interface", "NAME", "Network interface between the nodes. Default: detected.", pet=False),
        Option("--remote-python", "PATH", "Python interpreter on the hosts. Default: the path of this one.", pet=False),
        Option("--remote-setup", "TEXT", "Shell text to run first on the hosts, like 'module load cuda'.", pet=False),
        Option("--ssh-user", "NAME", "Login name, like ssh -l.", pet=False),
        Option("--ssh-port", "PORT", "Port of the SSH server, like ssh -p.", pet=False),
        Option("--ssh-identity", "FILE", "File of the private key, like ssh -i.", pet=False),
        Option("--ssh-config", "FILE", "SSH configuration file, like ssh -F.", pet=False),
        flag("--ssh-accept-new", "Accept and store the keys of unknown hosts.", pet=False),
        Option("--connect-timeout", "TIME", "Time for one attempt to connect. Default: 15 s.", "15", pet=False),
    ),
    "Before a run": (
        flag(
            "--check",
            "Test this machine, or --hosts: versions, GPUs, health, limits, network speed; run no script.",
            pet=False,
            short="test this machine or the hosts; run no script",
        ),
        flag(
            "--deep",
            "With --check: measure each GPU (matrix product, memory, transfers to the others) and name the slow ones.",
            pet=False,
            of="--check",
        ),
    ),
    "Leaving a run and coming back": LEAVING_AND_COMING_BACK,
    "Existing runs (yours, here and on --hosts)": EXISTING_RUNS,
    "Dry run": (
        flag(
            "--dry-run",
            "Run the job on this machine's CPU, with simulated nodes and GPUs; scripts stay unchanged.",
            pet=False,
            short="run the job on this machine's CPU",
        ),
        flag(
            "--rehearse-compile",
            "With --dry-run: torch.compile compiles for the CPU. Default: it returns the model unchanged.",
            pet=False,
        ),
        flag(
            "--plan",
            "Show the plan of the run: nodes, ranks, GPUs, environment; start nothing.",
            pet=False,
            short="show what would be started; start nothing",
        ),
        flag("--json", "With --plan: print JSON, for machines.", pet=False, of="--plan"),
        Option(
            "--inject",
            "'kill rank=3 after=5s'",
            "With --dry-run: inject a fault and report how the job handled it; 'help' lists the faults.",
            pet=False,
            multiple=True,
        ),
    ),
    "Accepted, without effect": (
        Option("--monitor-interval", "S", "ddplaunch does not poll.", "0.1"),
        Option("--logs-specs", "NAME", "Must be default: plug-ins of torchrun's agent are not supported.", pet=False),
    ),
    "Other": (
        _shows("--version", "Show versions.", lambda _: version_line()),
        _shows("--docs", "Show the folder with the documentation.", lambda _: docs_folder()),
        _shows("-h", "Show the most used options.", _short_help),
    ),
}
