"""Every option of the command line, under the headings of the help page. ``options.py`` says what they mean."""

from __future__ import annotations

import sys
from typing import get_args

import click

from ddplaunch.cli_help import Option, flag
from ddplaunch.config import NumaBinding

STOP_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"


def _print_version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if wanted and not ctx.resilient_parsing:
        click.echo(version_line())
        ctx.exit()


def version_line() -> str:
    """Versions for a bug report, read without importing torch."""
    from importlib import metadata

    from ddplaunch import __version__

    try:
        torch = metadata.version("torch")
    except metadata.PackageNotFoundError:
        torch = "not installed"
    return f"ddplaunch {__version__} (torch {torch}, Python {'.'.join(map(str, sys.version_info[:3]))})"


OPTIONS: dict[str, tuple[Option, ...]] = {
    "Workers": (
        Option("--nproc-per-node", "N", "Workers: a number, auto, cpu, gpu or xpu. Default: one per GPU, else one."),
        flag("-m --module", "SCRIPT is a module; run it as 'python -m' does."),
        flag("--no-python", "SCRIPT is a program; execute it as it is."),
        flag("--run-path", "SCRIPT is a script, whatever -m and --no-python say."),
        Option(
            "--start-method",
            "METHOD",
            "forkserver, fork: import torch once, then fork; spawn: start each anew. Default: forkserver.",
            "forkserver",
            type=click.Choice(["forkserver", "spawn", "fork"]),
        ),
        Option("--preload", "A,B", "Further modules to import before forking.", pet=False),
        flag(
            "--pass-local-rank", "Give the script --local-rank=N, for old torch.distributed.launch scripts.", pet=False
        ),
        flag("--use-env", "torch.distributed.launch's, and the default.", pet=False, hidden=True),
        Option("--role", "NAME", "The workers' ROLE_NAME. Default: default.", "default"),
    ),
    "Devices": (
        Option("--gpus", "2,4,7", "GPUs to use. Default: CUDA_VISIBLE_DEVICES, or all.", pet=False),
        Option("--gpus-per-proc", "K", "Each worker sees K GPUs, its own. Default: all.", "0", pet=False),
        flag("--virtual-local-rank", "Each worker sees its own GPU only, with LOCAL_RANK=0."),
        Option(
            "--numa-binding",
            "HOW",
            "Bind workers to CPUs near their GPU: node, socket, exclusive or core-complex. Default: no.",
            pet=False,
            type=click.Choice(get_args(NumaBinding)),
        ),
    ),
    "Restarts and stopping": (
        Option("--max-restarts", "N", "After a failure start all workers again, N times. Default: 0.", "0"),
        Option(
            "--shutdown-timeout",
            "S",
            "Seconds from SIGTERM to SIGKILL; the whole stop takes at most about 10 s more. Default: 30.",
        ),
        Option(
            "--hang-timeout",
            "S",
            "End the job as hung when no worker has written a line for S seconds. Default: never.",
            pet=False,
        ),
        Option("--signals-to-handle", "NAMES", f"Signals that stop the job. Default: {STOP_SIGNALS}.", STOP_SIGNALS),
        Option(
            "--requeue-on",
            "USR1,TERM",
            "In a job of SLURM these signals stop it too, and then SLURM is asked to requeue it. Default: none.",
            "",
            pet=False,
        ),
        Option("--monitor-interval", "S", "Accepted, without effect: ddplaunch does not poll.", "0.1"),
    ),
    "Output and logs": (
        Option(
            "--log-dir",
            "DIR",
            "Where the run's log folder goes; /dev/null: no files. Default: $XDG_STATE_HOME/ddplaunch.",
            type=click.Path(file_okay=False, readable=False),
        ),
        Option(
            "-r --redirects",
            "WHAT",
            "Keep off the console: 1 stdout, 2 stderr, 3 both; per local rank: 0:1,7:3. Default: 0, none.",
            "0",
        ),
        Option("-t --tee", "WHAT", "Show on the console, even if redirected. Default: 0.", "0"),
        Option("--ranks-filter", "0,4-7", "Ranks shown on the console. Default: all.", "", pet=False),
        Option("--local-ranks-filter", "0,4-7", "The same, by local rank. Default: all.", ""),
        Option(
            "--duplicate-stdout-filters",
            "A,B",
            "Copy stdout lines with A or B to filtered_stdout.log. Default: none.",
            "",
        ),
        Option("--duplicate-stderr-filters", "A,B", "The same for stderr; ',,' is a comma. Default: none.", ""),
        flag("--collect-logs", "At the end bring the log files of all nodes here. Default: what failed.", pet=False),
        Option("--event-log-handler", "NAME", "null, or console: events as JSON lines. Default: null.", "null"),
        Option("--logs-specs", "NAME", "Not supported (plug-ins of torchrun's agent).", pet=False),
        flag("-v --verbose", "Say what is done and why.", pet=False),
        flag("-q --quiet", "Say nothing but errors and the failure page.", pet=False),
    ),
    "Nodes and rendezvous": (
        Option("--nnodes", "N|MIN:MAX", "Nodes of the job. Default: all hosts that are named, else 1."),
        Option(
            "--cluster",
            "WORD",
            "Scheduler whose variables say which node this is and where nodes meet: auto, none, slurm, openmpi, mpich, "
            "pals, jsrun, lsf, pbs or kubernetes. Default: auto.",
            "auto",
            pet=False,
        ),
        flag("--standalone", "One node, as --nnodes 1; ignore where nodes meet."),
        Option("--rdzv-id", "ID", "Name of the run. Default: a fresh one."),
        Option(
            "--rdzv-backend", "NAME", "static: meet at node rank 0; c10d: at the endpoint. Default: static.", "static"
        ),
        Option("--rdzv-endpoint", "HOST:PORT", "Where nodes meet. Default port: 29400, if static 29500.", ""),
        Option("--rdzv-conf", "K=V,...", "join_timeout, last_call_timeout, keep_alive_interval, is_host, ...", ""),
        Option("--node-rank", "N", "Number of this node. Default: 0; with c10d, by arrival."),
        Option("--master-addr", "HOST", "If static: where node rank 0 is."),
        Option("--master-port", "PORT", "If static: the port there; on one node, of the workers' store."),
        Option("--local-addr", "HOST", "Where other nodes reach this one. Default: its address towards the endpoint."),
    ),
    "Hosts (started over SSH)": (
        Option("--hosts", "gpu[1-4],USER@HOST:PORT", "Start the nodes there. Default: DDPLAUNCH_HOSTS.", pet=False),
        Option("--hostfile", "FILE", "The same, a host per line. Default: DDPLAUNCH_HOSTFILE.", pet=False),
        Option("--include", "gpu1@gpu2:0,2", "Of these hosts use only those, or only those devices.", pet=False),
        Option("--exclude", "gpu1@gpu2:0,2", "Of these hosts use all but those.", pet=False),
        Option("-x --export", "NAME[=VALUE]", "Give workers a variable; 'PRE*': all such.", pet=False, multiple=True),
        Option("--env-file", "FILE", "Give workers the variables in FILE, a NAME=VALUE per line.", pet=False),
        Option("--chdir", "DIR", "The workers' working directory, on every node. Default: this one.", pet=False),
        Option("--interface", "NAME", "Network interface for the nodes to meet. Default: where they can.", pet=False),
        Option("--remote-python", "PATH", "Python on the hosts. Default: the path of this one.", pet=False),
        Option("--remote-setup", "TEXT", "Shell text to run there first, as 'module load cuda'.", pet=False),
        Option("--ssh-user", "NAME", "Login name, as ssh -l.", pet=False),
        Option("--ssh-port", "PORT", "As ssh -p.", pet=False),
        Option("--ssh-identity", "FILE", "As ssh -i.", pet=False),
        Option("--ssh-config", "FILE", "As ssh -F.", pet=False),
        flag("--ssh-accept-new", "Take and keep the keys of unknown hosts.", pet=False),
        Option("--connect-timeout", "S", "Seconds for one try to connect. Default: 15.", "15", pet=False),
    ),
    "Before a run": (
        flag("--check", "Look whether a job would run, here or on the hosts, and how fast; run no script.", pet=False),
    ),
    "Earlier runs (yours, here and on --hosts)": (
        flag("--ps", "Show which runs have processes, and whether their launcher is alive.", pet=False),
        Option(
            "--kill", "RUN_ID", "End that run and what it has left: SIGTERM, --shutdown-timeout, SIGKILL.", pet=False
        ),
    ),
    "Rehearsal": (
        flag(
            "--dry-run",
            "Run the job here on the CPU: --nnodes pretended nodes, scripts for GPUs as they are.",
            pet=False,
        ),
        flag(
            "--rehearse-compile",
            "With --dry-run: torch.compile compiles, for the CPU. Default: the model runs as it is written.",
            pet=False,
        ),
        flag("--plan", "Show what the run would do: nodes, ranks, GPUs, environment; start nothing.", pet=False),
        flag("--json", "With --plan: as JSON.", pet=False),
        Option(
            "--inject",
            "'kill rank=3 after=5s'",
            "With --dry-run: make this happen, and tell how the job took it; '' shows all there is.",
            pet=False,
            multiple=True,
        ),
    ),
    "Other": (
        flag("--version", "Show versions.", pet=False, is_eager=True, expose_value=False, callback=_print_version),
    ),
}
