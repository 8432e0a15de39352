"""The command line: parses options, then starts a run or another command, and exits with its exit code.

Runs in the launcher. ``options`` declares the options, ``parser`` parses them and prints the help page, and
``build_config`` applies them. Must not interpret arguments after the script.
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import click

from ddplaunch import features
from ddplaunch.cli import commands
from ddplaunch.cli.build_config import build_config
from ddplaunch.cli.options import OPTIONS
from ddplaunch.cli.parser import INHERITED, GroupedCommand, complete_path
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import INTERNAL, USAGE, LaunchError, UsageError, error_text
from ddplaunch.rows import load
from ddplaunch.text import escape

INTERRUPTED = 130
PIPE_CLOSED = 128 + signal.SIGPIPE

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""Errors of a write to stdout."""

HELP_HEAD = """Start, watch and stop the workers of a PyTorch DDP job, in place of torchrun.

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
            "85 needs a GPU, 86 processes left, 87 hung (--hang-timeout, --busy-timeout), 88 hardware, "
            "89 unknown to --wait",
        ),
        ("90", "the time of the job is nearly over: start it again (--stop-before-end)"),
        ("93", "the script gave up: no restart (ddplaunch.give_up)"),
        ("128+N", "stopped by signal N, the run (130: Ctrl-C, 143: SIGTERM) or the worker that failed first"),
        ("others", "exit code of the worker that failed first"),
    ),
    "More": (
        ("spelling", "_ and - are the same in options; unique beginnings of options are enough"),
        (
            "environment",
            "PET_<NAME> sets torchrun's option of that name: PET_NPROC_PER_NODE=4; PYTHON_EXEC, "
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT and TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE work as with torchrun",
        ),
        (
            "shell completion",
            "_DDPLAUNCH_COMPLETE=bash_source ddplaunch prints the script to source (or zsh_source, fish_source)",
        ),
    ),
}


_UNPROCESSED: dict[str, Any] = {"type": click.UNPROCESSED, "shell_complete": complete_path}
ARGUMENTS = (
    click.Argument(["script"], metavar="SCRIPT", required=False, default="", **_UNPROCESSED),
    click.Argument(["script_args"], metavar="[ARGS]...", nargs=-1, **_UNPROCESSED),
)


def _to_config(options: Mapping[str, Any], **others: object) -> LaunchConfig:
    """The configuration of a run with ``options``, and ``others`` in their place.

    Raises:
        UsageError: there is none, or the script is a command that was typed without its dashes.
    """
    script = str(options["script"])
    if script in (*commands.WORDS, "help", "version") and not os.path.exists(script):
        raise UsageError(f"{script}: no such file", f"Did you mean --{script}?")
    try:
        return build_config({**options, **others}, os.environ)
    except UsageError as error:
        origin = _origin(click.get_current_context(), error.options)
        raise UsageError(error.message, f"{error.hint} {origin}".strip()) from None


def _dispatch(**options: Any) -> LaunchConfig | tuple[LaunchConfig, str] | int:
    """The configuration of the run; or run another command, and return its exit code.

    Of a run that a command starts, as ``--detach`` does, also the function of this command.
    """
    chosen = commands.chosen(options)
    if chosen and not chosen.starts_run:
        inherited = click.get_current_context().meta[INHERITED]
        return commands.run(chosen, options, _show, _print, partial(_to_config, options), inherited)
    config = _to_config(options)
    return (config, chosen.run) if chosen else config


def _origin(ctx: click.Context | None, names: Sequence[str]) -> str:
    """A hint that names the variables which set the options ``names``; empty if none did."""
    inherited = ctx.meta.get(INHERITED, ()) if ctx else ()
    options = (option for options in command.groups.values() for option in options)
    named = (option for option in options if option.long_name in inherited and option.long_name in names)
    variables = [option.pet_variable for option in named]
    return f"Set in the environment: {', '.join(variables)}." if variables else ""


command = GroupedCommand("ddplaunch", _dispatch, OPTIONS, ARGUMENTS, HELP_HEAD, AFTER_OPTIONS)


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line ``argv`` (without the program's name; None for this process's own) and exit.

    A traceback is shown only for a bug in ddplaunch.
    """
    sys.exit(_exit_code(argv))


def _exit_code(argv: Sequence[str] | None) -> int:
    try:
        return _run(argv)
    except UsageError as error:
        _print_usage_error(error.message, error.hint)
        return error.exit_code
    except LaunchError as error:
        if not error.is_shown:
            _print_error(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        _print_usage_error(error.format_message(), "")
        return USAGE
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except Exception as error:
        is_interrupt = isinstance(error.__cause__, KeyboardInterrupt)  # Ctrl-C in a __set_name__, before Python 3.12.
        return INTERRUPTED if is_interrupt else _print_bug()


def _parse(argv: Sequence[str] | None) -> Any:
    """The configuration of a run; or run another command, --help or --version, and return its exit code.

    Raises:
        LaunchError: stdout cannot be written.
    """
    try:
        return command.main(argv, prog_name="ddplaunch", standalone_mode=False)
    except SystemExit:  # click's answer to a closed pipe, and the end of shell completion.
        if "_DDPLAUNCH_COMPLETE" in os.environ:
            raise
        _discard_stdout()
        return PIPE_CLOSED
    except OSError as error:
        if error.filename is not None or error.errno not in _FULL:
            raise
        _discard_stdout()
        raise LaunchError(f"stdout cannot be written: {error.strerror}") from None


def _discard_stdout() -> None:
    """Make stdout /dev/null: what its buffer still holds must not fail again at the exit of the interpreter."""
    with contextlib.suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _run(argv: Sequence[str] | None) -> int:
    parsed = _parse(argv)
    config, start = parsed if isinstance(parsed, tuple) else (parsed, "")
    if not isinstance(config, LaunchConfig):  # --help, --version or another command
        return int(config)
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        _print(
            "warning: TORCHELASTIC_ENABLE_FILE_TIMER=1 has no effect: torchrun's file timers are not supported; "
            "--hang-timeout ends a job without output"
        )
    if config.entry == "script" and config.script == "-":
        config = replace(config, text=_program_on_stdin(config))
    if start:
        report = (lambda _: None) if config.output.verbosity < 0 else _print
        return int(load(start)(config, _show, report))
    from ddplaunch.system import signals

    with signals.ctrl_c_ends_process():
        from ddplaunch.launcher.launch import launch

        signals.owns_terminal = True
        return launch(config, ends_process=True).exit_code


def _program_on_stdin(config: LaunchConfig) -> str:
    """The text of the script ``-``, read to the end before anything starts: every worker gets all of it.

    Raises:
        UsageError: stdin is a terminal or is closed, or the text is empty or too long; another Python runs it.
    """
    from ddplaunch.protocol.agent_entry import MAX_TEXT_BYTES

    hint = "Give the program by a pipe or by `< FILE`, or save it to a file."
    if config.python and config.python != sys.executable:
        raise UsageError("-: PYTHON_EXEC cannot run a program from stdin", "Save it to a file, or unset PYTHON_EXEC.")
    if os.isatty(0):
        raise UsageError("-: stdin is a terminal", hint)
    with open(0, "rb", closefd=False) as stdin:
        data = stdin.read(MAX_TEXT_BYTES + 1)
    if not 0 < len(data) <= MAX_TEXT_BYTES:
        raise UsageError(f"-: stdin has {'no program' if not data else f'over {MAX_TEXT_BYTES} bytes'}", hint)
    return data.decode("utf-8", "surrogateescape")


def _show(text: str) -> None:
    """Print a result on stdout; control characters in it are escaped."""
    click.echo(escape(text))


def _print(text: str) -> None:
    if sys.stderr is None:  # Closed when Python started; ``print`` would take stdout.
        return
    # A stderr that cannot be written must not change the exit code.
    with contextlib.suppress(OSError):
        sys.stderr.write(f"ddplaunch: {escape(text)}\n")  # One write: many launchers may share a terminal.
        sys.stderr.flush()


def _print_usage_error(message: str, hint: str) -> None:
    """Print an error of the command line; of many launchers that a scheduler has started, only the first does."""
    if all(module.is_first_task(os.environ) for module in features.modules("scheduler")):
        _print_error(message, hint)


def _print_error(message: str, hint: str) -> None:
    _print(error_text(message, hint))


def _print_bug() -> int:
    import traceback

    _print(f"internal error\n{traceback.format_exc()}")
    _print("this is a bug in ddplaunch: please report it with the lines above and the output of `ddplaunch --version`")
    return INTERNAL
