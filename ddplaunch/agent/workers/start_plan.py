"""How this node's workers start: checks the program, chooses fork or exec, and builds command lines.

Runs in the agent, before the first attempt and once per worker. Must not start a process (see ``forkserver_client``).
"""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS
from ddplaunch.errors import LaunchError
from ddplaunch.protocol import start_method
from ddplaunch.protocol.agent_entry import PACKAGE_ROOT, is_own_module
from ddplaunch.protocol.specs import ForkserverSpec
from ddplaunch.system.files import run_folder, run_retention, script_file
from ddplaunch.system.files.run_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.protocol.specs import AgentSpec, ImportFailed, Program
    from ddplaunch.protocol.start_method import StartPlan

EXEC_WORKER = str(Path(PACKAGE_ROOT, "ddplaunch", "worker", "exec_worker.py"))
"""Started by its path: the agent must not import the worker package. A test checks that the file exists."""


def prepare_node(spec: AgentSpec) -> AgentSpec:
    """``spec`` with the path of this node's interpreter, and of this node's folder.

    Creates that folder if the node must, and deletes old run folders in the default folder. A folder that cannot be
    created is reported when a worker's log is opened in it.
    """
    if not spec.program.python:
        spec = replace(spec, program=replace(spec.program, python=sys.executable))
    log_dir = spec.output.log_dir
    if not spec.run_dir_name or log_dir == NO_LOGS:
        return spec
    base = Path(log_dir).absolute() if log_dir else run_folder.default_base(os.environ)
    if log_dir is None:
        run_retention.prune(base, spec.output.keep_runs)
    return replace(spec, node_dir=str(run_folder.share(base, spec.run_dir_name, spec.host)))


def check_program(program: Program, host: str, path_variable: str) -> None:
    """Check for errors that would make every worker fail.

    Raises:
        LaunchError: the script, program or interpreter is missing or not usable on ``host``.
    """
    working_folder()  # Without a working folder, torch cannot be imported.
    if program.entry == "program":
        if shutil.which(program.path, path=path_variable) is None:
            raise LaunchError(
                f"{program.path}: no such program on {host}, or it is not executable",
                "With --no-python give a path, or a program that is in PATH, and check its x permission.",
            )
        return
    if shutil.which(program.python, path=path_variable) is None:
        raise LaunchError(f"{program.python}: no such interpreter on {host}", "Check PYTHON_EXEC.")
    if program.entry == "script" and not program.text:
        script_file.check_readable(program.path, host)


def choose(spec: AgentSpec, env: Mapping[str, str]) -> StartPlan:
    """Fork where possible; otherwise exec, with the reason.

    Raises:
        LaunchError: a dry run with simulated GPUs, and the program cannot be forked or bootstrapped.
    """
    plan = start_method.choose(spec, env, script_file.is_plain)
    if spec.fake_gpus and not plan.bootstrap:
        why = plan.reason or "--no-python"
        raise LaunchError(
            f"--dry-run cannot simulate GPUs in {spec.program.path}: {why}", "Give a Python script or -m."
        )
    return plan


def worker_argv(spec: AgentSpec, plan: StartPlan, local_rank: int) -> tuple[str, ...]:
    """The worker's ``ProcessSpec.argv`` for ``plan.how``."""
    program = spec.program
    local_rank_argument = (f"--local-rank={local_rank}",) if spec.workers.pass_local_rank else ()
    script = (program.path, *local_rank_argument, *program.args)
    if plan.how != "exec" or program.entry == "program":
        return script
    bootstrap: tuple[str, ...] = (EXEC_WORKER,) if plan.bootstrap else ()
    flag = {"module": ("-m",), "function": ("--function",)}.get(program.entry, ())
    return (program.python, "-u", *bootstrap, *flag, *script)


def forkserver_spec(spec: AgentSpec, plan: StartPlan) -> ForkserverSpec:
    """The forkserver's first record, for ``plan``."""
    forks, path = plan.how != "exec", spec.program.path
    is_file = plan.how in ("script", "function") and path != "-"
    folder = os.path.dirname(os.path.realpath(path)) if is_file else working_folder()
    return ForkserverSpec(
        run_id=spec.run_id,
        agent_pid=os.getpid(),
        imports=forks,
        preload=spec.workers.preload if forks else (),
        script=path if is_file else "",
        script_dir=folder if forks and not is_own_module(path) else "",
    )


def import_error(host: str, failed: ImportFailed) -> LaunchError:
    """The error for the user if the forkserver cannot import a module."""
    if failed.hidden_by:
        hint = f"Rename {failed.hidden_by}: it hides the module of this name that {failed.module} needs."
    elif failed.module.split(".")[0] == "torch":
        hint = f"Install torch for {sys.executable}, or run ddplaunch from the environment that has it."
    else:
        hint = "Remove it from --preload, or install it."
    return LaunchError(f"{host}: {failed.module} cannot be imported\n{failed.error}", hint)
