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
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NoReturn

import click

from ddplaunch import features
from ddplaunch.cli import completion, pages
from ddplaunch.cli.build_config import build_config, connection_options
from ddplaunch.cli.host_options import HOST_OPTIONS
from ddplaunch.cli.options import OPTIONS
from ddplaunch.cli.parser import INHERITED, GroupedCommand, Option
from ddplaunch.cli.scheduler_options import is_first_task
from ddplaunch.config import LaunchConfig
from ddplaunch.errors import INTERNAL, USAGE, LaunchError, UsageError, error_text
from ddplaunch.features.come_back import coming_back
from ddplaunch.late_dataclass import dataclass
from ddplaunch.text import escape

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

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

_DECLARED = [option for options in OPTIONS.values() for option in options]

_UNPROCESSED: dict[str, Any] = {"type": click.UNPROCESSED, "shell_complete": completion.files}
ARGUMENTS = (
    click.Argument(["script"], metavar="SCRIPT", required=False, default="", **_UNPROCESSED),
    click.Argument(["script_args"], metavar="[ARGS]...", nargs=-1, **_UNPROCESSED),
)


@dataclass(frozen=True)
class DetachedRun:
    """A run that is started and left, ``--detach``."""

    config: LaunchConfig


def _to_config(**options: object) -> LaunchConfig:
    try:
        return build_config(options, os.environ)
    except UsageError as error:
        origin = _origin(click.get_current_context(), error.options)
        raise UsageError(error.message, f"{error.hint} {origin}".strip()) from None


def _dispatch(
    plan: bool, json: bool, check: bool, kill: str | None, stacks: str | None, **options: Any
) -> LaunchConfig | DetachedRun | int:
    """The configuration of the run; or run another command, and return its exit code."""
    is_detached, is_quiet = options.pop("detach"), bool(options["quiet"])
    ps = options["ps"] is not None
    coming = coming_back.popped(options)
    of_runs = {"--ps": ps and "ps" not in coming, "--kill": kill is not None, "--stacks": stacks is not None}
    others = {**of_runs, "--plan": plan, "--json": json, "--detach": is_detached}
    files = {f"--{name}": options.pop(name) for name in ("all", "nodes")}
    given = {**others, **files, **{f"--{name}": True for name in coming}, "--check": check}
    if (code := pages.command(given, options, _show, _print)) is not None:
        return code
    if coming:
        given = {**others, **files, "--forget": options.pop("forget") is not None, "--check": check}
        report: Callable[[str], None] = (lambda _: None) if is_quiet else _print
        return coming_back.run(coming, [name for name, is_given in given.items() if is_given], options, _show, report)
    if (forgotten := options.pop("forget")) is not None:
        return _forget(forgotten, {**others, **files, "--check": check}, options)
    if any(files.values()):
        return _ps_of_files(ps, files, {**others, "--ps": False, "--check": check}, options)
    is_deep = options.pop("deep")
    if check:
        return _check([name for name, is_given in others.items() if is_given], options, is_deep=is_deep)
    if is_deep:
        raise UsageError("--deep: needs --check", "--check --deep also measures the GPUs.")
    if any(of_runs.values()):
        return _with_runs([name for name, is_given in others.items() if is_given], kill, stacks, options)
    if json and not plan:
        raise UsageError("--json: needs --plan", "--plan --json prints the plan for machines.")
    _check_word(str(options["script"]))
    config = _to_config(**options)
    if not plan:
        return DetachedRun(config) if is_detached else config
    if is_detached:
        raise UsageError("--plan cannot be combined with --detach")
    from ddplaunch.features.plan import page as plan_page
    from ddplaunch.features.plan.plan import plan as plan_of

    planned = plan_of(features.prepared(config))
    _show(plan_page.as_json(planned) if json else plan_page.page(planned, is_verbose=bool(options["verbose"])))
    return 0


_COMMANDS = ("check", "ps", "kill", "stacks", "forget", "page", "serve", "plan", "help", "version")


def _check_word(script: str) -> None:
    """Raise UsageError for a command that was typed without its dashes."""
    if script in _COMMANDS and not os.path.exists(script):
        raise UsageError(f"{script}: no such file", f"Did you mean --{script}?")


def _check(others: Sequence[str], options: dict[str, Any], *, is_deep: bool) -> int:
    """Run --check. A given script must exist; it is not run."""
    if others:
        raise UsageError(f"--check cannot be combined with {others[0]}")
    from ddplaunch.features.check import check

    if not options["script"]:
        options |= {"script": check.MODULE, "module": True, "no_python": False, "run_path": False}
    report = (lambda _: None) if options["quiet"] else _print
    return check.check(_to_config(**options), _show, report, is_deep=is_deep)


_OF_FILES = {"--all": "the run folders", "--nodes": "the file nodes.json"}
"""What is read with --ps in place of processes."""


def _ps_of_files(ps: bool, files: Mapping[str, bool], others: Mapping[str, bool], options: Mapping[str, Any]) -> int:
    """Run --ps --all or --ps --nodes, which look at files of this machine only."""
    name = next(name for name, is_given in files.items() if is_given)
    if not ps:
        raise UsageError(f"{name}: needs --ps", f"--ps {name} shows {_OF_FILES[name]}.{_NOT_NNODES[name]}")
    given = next((other for other, is_given in {**files, name: False, **others}.items() if is_given), "")
    if given:
        raise UsageError(f"--ps{'' if given in others else f' {name}'} cannot be combined with {given}")
    _check_no_script("--ps", options)
    if given := next((option for option in HOST_OPTIONS if options[option] is not None), ""):
        raise UsageError(f"--ps {name} lists {_OF_FILES[name]} of this machine only, and --{given} names others")
    # Hosts in the environment are meant for runs. Options about connections have no effect without hosts: an error.
    connection_options(options, {})
    report = (lambda _: None) if options["quiet"] else _print
    if name == "--nodes":
        from ddplaunch.features.health import known_nodes

        known_nodes.list_all(_show, report)
        return 0
    from ddplaunch.features.come_back import past_runs

    past_runs.list_all(options["log_dir"], _columns(), _show, report)
    return 0


_NOT_NNODES = {"--all": "", "--nodes": " The number of nodes is --nnodes."}


def _forget(text: str, others: Mapping[str, bool], options: Mapping[str, Any]) -> int:
    """Run --forget; ``text`` is a list of hosts, or ``all``."""
    if given := next((name for name, is_given in others.items() if is_given), ""):
        raise UsageError(f"--forget cannot be combined with {given}")
    _check_no_script("--forget", options)
    from ddplaunch.cluster.hosts import parse_hosts
    from ddplaunch.features.health import node_memory

    hosts = None if text == node_memory.ALL else parse_hosts(text, "--forget")
    node_memory.forget(hosts, (lambda _: None) if options["quiet"] else _print)
    return 0


def _columns() -> int | None:
    """Width of the terminal on stdout; None if it is none."""
    try:
        return os.get_terminal_size(1).columns or None
    except OSError:
        return None


def _check_no_script(name: str, options: Mapping[str, Any]) -> None:
    if options["script"]:
        raise UsageError(
            f"{name}: {options['script']}: no script is run", "--hosts and --hostfile name other machines."
        )


def _with_runs(names: Sequence[str], kill: str | None, stacks: str | None, options: Mapping[str, Any]) -> int:
    """Run --ps, --kill or --stacks, the first of ``names``. More than one name is an error."""
    name, *others = names
    if others:
        raise UsageError(f"{name} cannot be combined with {others[0]}")
    _check_no_script(name, options)
    hosts, remote, grace_s = connection_options(options, os.environ)
    report = (lambda _: None) if options["quiet"] else _print
    is_verbose = bool(options["verbose"])
    if stacks is not None:
        from ddplaunch.features.hangs import stacks as stacks_command

        stacks_command.stacks(stacks, hosts, remote, _show, report)
        return 0
    from ddplaunch.features.ps import ps as ps_command

    if kill is None:
        ps_command.ps(hosts, remote, _show, report, is_verbose=is_verbose)
    else:
        ps_command.kill(kill, grace_s, hosts, remote, report, is_verbose=is_verbose)
    return 0


def _origin(ctx: click.Context | None, names: Sequence[str]) -> str:
    """A hint that names the variables which set the options ``names``; empty if none did."""
    inherited = ctx.meta.get(INHERITED, ()) if ctx else ()
    variables = [
        option.pet_variable for option in _DECLARED if option.long_name in inherited and option.long_name in names
    ]
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
        _print_error(error.message, error.hint)
        return error.exit_code
    except click.ClickException as error:
        _print_usage_error(*_describe(error))
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
    config = parsed.config if isinstance(parsed, DetachedRun) else parsed
    if not isinstance(config, LaunchConfig):  # --help, --version or another command
        return int(config)
    if os.environ.get("TORCHELASTIC_ENABLE_FILE_TIMER") == "1":
        _print(
            "warning: TORCHELASTIC_ENABLE_FILE_TIMER=1 has no effect: torchrun's file timers are not supported; "
            "--hang-timeout ends a job without output"
        )
    if config.entry == "script" and config.script == "-":
        config = replace(config, text=_program_on_stdin(config))
    if isinstance(parsed, DetachedRun):
        from ddplaunch.features.come_back import detached

        return detached.start(config, _show, (lambda _: None) if config.output.verbosity < 0 else _print)
    from ddplaunch.launcher.launch import launch
    from ddplaunch.system import terminal

    terminal.is_own = True
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


def _describe(error: click.ClickException) -> tuple[str, str]:
    if not isinstance(error, click.BadParameter) or not isinstance(error.param, Option):
        return error.format_message(), ""
    name = error.param.long_name
    return f"{name}: {error.message.rstrip('.')}", _origin(error.ctx, [name])


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
    if is_first_task(os.environ):
        _print_error(message, hint)


def _print_error(message: str, hint: str) -> None:
    _print(error_text(message, hint))


def _print_bug() -> int:
    import traceback

    _print(f"internal error\n{traceback.format_exc()}")
    _print("this is a bug in ddplaunch: please report it with the lines above and the output of `ddplaunch --version`")
    return INTERNAL
