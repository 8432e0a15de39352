"""The command line: options -> ``LaunchConfig`` -> ``launch`` -> exit code.

Runs in the launcher. ``options.py`` says what the options mean, ``cli_help.py`` how they are read and shown. What
follows the script on the command line is never looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn, get_args

import click

from ddplaunch.cli_help import INHERITED, GroupedCommand, Option, complete_files, flag
from ddplaunch.config import LaunchConfig, NumaBinding
from ddplaunch.errors import INTERNAL, USAGE, LaunchError, UsageError
from ddplaunch.options import build_config

if TYPE_CHECKING:
    from collections.abc import Sequence

INTERRUPTED = 130
STOP_SIGNALS = "SIGTERM,SIGINT,SIGHUP,SIGQUIT"

EXAMPLES = """Start, watch and stop the workers of a PyTorch DDP job, in place of torchrun.

\b
Examples:
  ddplaunch train.py --lr 1e-3            one worker per GPU (1 without GPUs)
  ddplaunch --nproc-per-node 4 -m pkg.train
  ddplaunch --gpus 2,3 --max-restarts 3 train.py --resume"""

AFTER_OPTIONS = {
    "Exit codes": (
        ("0", "all workers succeeded"),
        ("2", "wrong usage"),
        ("80-89", "ddplaunch's own: 80 a bug, 82 not ready to run, 83 no rendezvous, 84 node lost, 86 processes left"),
        ("128+N", "stopped by signal N, the run (130: Ctrl-C, 143: SIGTERM) or the worker that failed first"),
        ("others", "that of the worker that failed first"),
    ),
    "More": (
        ("spelling", "_ and - are the same in options; unique beginnings of options are enough"),
        (
            "environment",
            "PET_<NAME> sets torchrun's option of that name: PET_NPROC_PER_NODE=4; PYTHON_EXEC, "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT and TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE are read as by torchrun",
        ),
        (
            "shell completion",
            "_DDPLAUNCH_COMPLETE=bash_source ddplaunch prints what to source (or zsh_source, fish_source)",
        ),
    ),
}


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
        Option("--signals-to-handle", "NAMES", f"Signals that stop the job. Default: {STOP_SIGNALS}.", STOP_SIGNALS),
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
        Option("--event-log-handler", "NAME", "null, or console: events as JSON lines. Default: null.", "null"),
        Option("--logs-specs", "NAME", "Not supported (plug-ins of torchrun's agent).", pet=False),
        flag("-v --verbose", "Say what is done and why.", pet=False),
        flag("-q --quiet", "Say nothing but errors and the failure page.", pet=False),
    ),
    "Nodes and rendezvous": (
        Option("--nnodes", "N|MIN:MAX", "Nodes of the job; start ddplaunch on each. Default: 1.", "1"),
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
    "Other": (
        flag("--version", "Show versions.", pet=False, is_eager=True, expose_value=False, callback=_print_version),
    ),
}

_DECLARED = [option for options in OPTIONS.values() for option in options]

_ANYTHING: dict[str, Any] = {"type": click.UNPROCESSED, "shell_complete": complete_files}
ARGUMENTS = (
    click.Argument(["script"], metavar="SCRIPT", required=False, default="", **_ANYTHING),
    click.Argument(["script_args"], metavar="[ARGS]...", nargs=-1, **_ANYTHING),
)


def _to_config(**options: object) -> LaunchConfig:
    try:
        return build_config(options, os.environ)
    except UsageError as error:
        origin = _origin(click.get_current_context(), re.findall(r"--[a-z-]+", error.message))
        raise UsageError(error.message, f"{error.hint} {origin}".strip()) from None


def _origin(ctx: click.Context | None, names: Sequence[str]) -> str:
    """Which of the options ``names`` the environment set: nobody looks there when the command line is right."""
    inherited = ctx.meta.get(INHERITED, ()) if ctx else ()
    variables = [option.pet for option in _DECLARED if option.long_name in inherited and option.long_name in names]
    return f"Set in the environment: {', '.join(variables)}." if variables else ""


command = GroupedCommand("ddplaunch", _to_config, OPTIONS, ARGUMENTS, EXAMPLES, AFTER_OPTIONS)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (without the program's name; None for this process's own) and exit.

    Only a mistake in ddplaunch itself shows a traceback.
    """
    sys.exit(_exit_code(argv))


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        return _run(argv)
    except LaunchError as error:
        _tell_error(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        _tell_error(*_in_our_words(error))
        return USAGE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception:
        _tell_bug()
        return INTERNAL


def _run(argv: Sequence[str] | None) -> int:
    config = command.main(argv, prog_name="ddplaunch", standalone_mode=False)
    if not isinstance(config, LaunchConfig):  # --help or --version has been shown: click returns an exit code
        return int(config)
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        _tell("warning: TORCHELASTIC_ENABLE_FILE_TIMER=1 has no effect: torchrun's file timers are not supported")
    from ddplaunch.launcher.launcher import launch

    return launch(config).exit_code


def _in_our_words(error: click.ClickException) -> tuple[str, str]:
    if not isinstance(error, click.BadParameter) or not isinstance(error.param, Option):
        return error.format_message(), ""
    name = error.param.long_name
    return f"{name}: {error.message.rstrip('.')}", _origin(error.ctx, [name])


def _tell(text: str) -> None:
    # The exit code must survive a stderr that nobody reads any more.
    with contextlib.suppress(OSError):
        print(f"ddplaunch: {text}", file=sys.stderr, flush=True)


def _tell_error(message: str, hint: str) -> None:
    _tell(f"error: {message}" + (f"\n  hint: {hint}" if hint else ""))


def _tell_bug() -> None:
    import traceback

    _tell(f"internal error\n{traceback.format_exc()}")
    _tell("this is a bug in ddplaunch: please report it with the lines above and what `ddplaunch --version` prints")
