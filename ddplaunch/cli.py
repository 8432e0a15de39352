"""The command line: options -> ``LaunchConfig`` -> ``launch`` -> exit code.

Runs in the launcher. ``options.py`` says what the options mean, ``cli_help.py`` how they are read and shown. What
follows the script on the command line is never looked at.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ddplaunch.cli_help import INHERITED, GroupedCommand, Option, complete_files
from ddplaunch.cli_options import OPTIONS
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import INTERNAL, USAGE, LaunchError, UsageError
from ddplaunch.options import build_config, find_options
from ddplaunch.printable import printable

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

INTERRUPTED = 130

EXAMPLES = """Start, watch and stop the workers of a PyTorch DDP job, in place of torchrun.

\b
Examples:
  ddplaunch train.py --lr 1e-3            one worker per GPU (1 without GPUs)
  ddplaunch --nproc-per-node 4 -m pkg.train
  ddplaunch --gpus 2,3 --max-restarts 3 train.py --resume
  ddplaunch --hosts 'gpu[1-4]' train.py   four machines, over SSH
  ddplaunch --dry-run --nnodes 2 --nproc-per-node 8 train.py  # here, on CPU"""

AFTER_OPTIONS = {
    "Exit codes": (
        ("0", "all workers succeeded"),
        ("2", "wrong usage"),
        (
            "80-89",
            "ddplaunch's own: 80 a bug, 81 --check warns, 82 not ready to run, 83 no rendezvous, 84 node lost, "
            "85 needs a GPU, 86 processes left, 87 hung (--hang-timeout)",
        ),
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


def _asked_for(
    plan: bool, json: bool, check: bool, ps: bool, kill: str | None, **options: object
) -> LaunchConfig | int:
    """The run that the user wants; an exit code where something else was all, which has been done."""
    if check:
        return _check(plan or json or ps or kill is not None, options)
    if ps or kill is not None:
        return _look_for_runs(ps, kill, plan, options)
    if json and not plan:
        raise UsageError("--json: needs --plan", "--plan --json prints the plan for machines.")
    config = _to_config(**options)
    if not plan:
        return config
    from ddplaunch.launcher import plan as plans
    from ddplaunch.launcher import plan_page

    found = plans.plan(config)
    click.echo(plan_page.as_json(found) if json else plan_page.page(found))
    return 0


def _check(is_more: bool, options: dict[str, Any]) -> int:
    """A script that is named must be there, and is not run."""
    if is_more:
        raise UsageError("--check is done alone, without --plan, --json, --ps or --kill")
    from ddplaunch.launcher import check

    if not options["script"]:
        options |= {"script": check.MODULE, "module": True, "no_python": False, "run_path": False}
    return check.check(_to_config(**options), click.echo, (lambda _: None) if options["quiet"] else _tell)


def _look_for_runs(ps: bool, kill: str | None, plan: bool, options: Mapping[str, Any]) -> int:
    name = "--ps" if ps else "--kill"
    if ps + plan + (kill is not None) > 1:
        raise UsageError(f"{name} is done alone, without {'--plan' if plan else '--kill'}")
    if options["script"]:
        raise UsageError(
            f"{name}: {options['script']}: no script is run", "--hosts and --hostfile name other machines."
        )
    hosts, remote, grace_s = find_options(options, os.environ)
    from ddplaunch.launcher import remains

    say = (lambda _: None) if options["quiet"] else _tell
    if kill is None:
        remains.ps(hosts, remote, click.echo, say)
    else:
        remains.kill(kill, grace_s, hosts, remote, say)
    return 0


def _origin(ctx: click.Context | None, names: Sequence[str]) -> str:
    """Which of the options ``names`` the environment set: nobody looks there when the command line is right."""
    inherited = ctx.meta.get(INHERITED, ()) if ctx else ()
    variables = [option.pet for option in _DECLARED if option.long_name in inherited and option.long_name in names]
    return f"Set in the environment: {', '.join(variables)}." if variables else ""


command = GroupedCommand("ddplaunch", _asked_for, OPTIONS, ARGUMENTS, EXAMPLES, AFTER_OPTIONS)


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
    if not isinstance(config, LaunchConfig):  # --help, --version or --plan: it has been shown
        return int(config)
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        _tell(
            "warning: TORCHELASTIC_ENABLE_FILE_TIMER=1 has no effect: torchrun's file timers are not supported; "
            "--hang-timeout ends a job that is silent for too long"
        )
    if config.job and config.job.requeue_on:
        from ddplaunch.launcher import requeue

        if refusal := requeue.look(config.job):
            _tell(f"warning: {refusal}")
    from ddplaunch.launcher.launching import launch

    return launch(config).exit_code


def _in_our_words(error: click.ClickException) -> tuple[str, str]:
    if not isinstance(error, click.BadParameter) or not isinstance(error.param, Option):
        return error.format_message(), ""
    name = error.param.long_name
    return f"{name}: {error.message.rstrip('.')}", _origin(error.ctx, [name])


def _tell(text: str) -> None:
    # The exit code must survive a stderr that nobody reads any more.
    with contextlib.suppress(OSError):
        print(f"ddplaunch: {printable(text)}", file=sys.stderr, flush=True)


def _tell_error(message: str, hint: str) -> None:
    _tell(f"error: {message}" + (f"\n  hint: {hint}" if hint else ""))


def _tell_bug() -> None:
    import traceback

    _tell(f"internal error\n{traceback.format_exc()}")
    _tell("this is a bug in ddplaunch: please report it with the lines above and what `ddplaunch --version` prints")
