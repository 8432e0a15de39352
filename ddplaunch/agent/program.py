"""How this node's workers are started: checks the program and chooses between a fork and an exec, with the reason."""

from __future__ import annotations

import os
import shutil
import stat
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import ddplaunch
from ddplaunch import run_folder
from ddplaunch.config import NO_LOGS
from ddplaunch.errors import LaunchError
from ddplaunch.records import ForkserverSpec
from ddplaunch.working_folder import working_folder

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.config import Rehearsal
    from ddplaunch.model import AgentSpec, Program

_EXEC_WORKER = str(Path(ddplaunch.__file__).parent / "worker" / "exec_worker.py")


@dataclass(frozen=True)
class StartPlan:
    """How workers are started.

    Attributes:
        bootstrap: an exec'd interpreter runs our bootstrap first, which records exceptions.
        reason: why workers are exec'd where the user did not ask for it.
        source: the script's text where it is forked.
    """

    how: Literal["script", "module", "exec"]
    bootstrap: bool = True
    reason: str = ""
    source: bytes = b""


def at_home(spec: AgentSpec) -> AgentSpec:
    """``spec`` with what only this node knows: its interpreter, and the run folder of a node that has its own.

    A folder that cannot be made is complained of when a worker's log is opened in it.
    """
    if not spec.program.python:
        spec = replace(spec, program=replace(spec.program, python=sys.executable))
    if not spec.own_folder:
        return spec
    if spec.log_dir == NO_LOGS:
        return replace(spec, log_dir=None)
    base = Path(spec.log_dir).absolute() if spec.log_dir else run_folder.default_base(os.environ)
    if spec.log_dir is None:
        run_folder.prune(base)
    return replace(spec, log_dir=str(run_folder.share(base, spec.own_folder, spec.host)))


def check(program: Program, host: str, path_variable: str) -> None:
    """Find out before anything starts what would make every worker fail.

    Raises:
        LaunchError: the script, program or interpreter is missing or not usable on ``host``.
    """
    working_folder()  # Not even torch can be imported without one.
    if program.entry == "program":
        if shutil.which(program.path, path=path_variable) is None:
            raise LaunchError(
                f"{program.path}: no such program on {host}, or it is not executable",
                "With --no-python give a path, or a program that is in PATH, and check its x permission.",
            )
        return
    if shutil.which(program.python, path=path_variable) is None:
        raise LaunchError(f"{program.python}: no such interpreter on {host}", "Check PYTHON_EXEC.")
    if program.entry == "script":
        _check_script(program.path, host)


def _check_script(path: str, host: str) -> None:
    if os.path.isdir(path):
        if os.path.isfile(os.path.join(path, "__main__.py")):
            return
        raise LaunchError(f"{path}: is a directory on {host}", "Give the script itself, or a package with -m.")
    try:
        # Not blocked by a FIFO that nobody writes to.
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        is_file = stat.S_ISREG(os.fstat(fd).st_mode)
        os.close(fd)
    except FileNotFoundError:
        raise LaunchError(
            f"{path}: no such file on {host}",
            f"It is looked for in {working_folder()}. A module is started with -m, a program with --no-python.",
        ) from None
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror} on {host}", "Check the file's permissions.") from None
    if not is_file:
        raise LaunchError(
            f"{path}: is not a regular file on {host}", "Every worker reads the script for itself: save it to a file."
        )


def plan(spec: AgentSpec, env: Mapping[str, str]) -> StartPlan:
    """Fork from the forkserver where nothing speaks against it."""
    entry = spec.program.entry
    if entry == "program":
        _check_rehearsal(spec, "--no-python")
        return StartPlan("exec", bootstrap=False)
    if not spec.python_is_ours:
        reason = f"{spec.program.python} is not the interpreter that runs ddplaunch"
        _check_rehearsal(spec, reason)
        return StartPlan("exec", bootstrap=False, reason=reason)
    source = b"" if entry == "module" else _source(spec.program.path)
    if source is None:
        _check_rehearsal(spec, f"{spec.program.path} is not a plain script")
        return StartPlan("exec", bootstrap=False, reason=f"{spec.program.path} is not a plain script")
    if spec.start_method == "spawn":
        return StartPlan("exec")
    injected = [name for name in ("CUDA_INJECTION64_PATH", "NSYS_PROFILING_SESSION_ID") if env.get(name)]
    if injected:
        return StartPlan("exec", reason=f"{injected[0]} is set: a profiler wants to be there from the start")
    return StartPlan("module" if entry == "module" else "script", source=source)


def _check_rehearsal(spec: AgentSpec, reason: str) -> None:
    if spec.rehearsal:
        raise LaunchError(
            f"--dry-run cannot rehearse GPUs in {spec.program.path}: {reason}", "Give a Python script or -m."
        )


def _source(path: str) -> bytes | None:
    """The script's text; None for a folder, an archive or a compiled file, which only the interpreter can run."""
    try:
        text = Path(path).read_bytes()
    except OSError:
        return None
    return None if b"\0" in text else text


def arguments(spec: AgentSpec, plan: StartPlan, local_rank: int, rehearsal: Rehearsal | None) -> tuple[str, ...]:
    """The worker's argv, as the forkserver wants it for ``plan.how``."""
    program = spec.program
    local_rank_argument = (f"--local-rank={local_rank}",) if spec.pass_local_rank else ()
    script = (program.path, *local_rank_argument, *program.args)
    if plan.how != "exec" or program.entry == "program":
        return script
    bootstrap: tuple[str, ...] = (_EXEC_WORKER,) if plan.bootstrap else ()
    if plan.bootstrap and rehearsal:
        bootstrap += (f"--rehearse={rehearsal.gpus},{int(rehearsal.compiles)}",)
    module_flag = ("-m",) if program.entry == "module" else ()
    return (program.python, "-u", *bootstrap, *module_flag, *script)


def forkserver_spec(spec: AgentSpec, plan: StartPlan) -> ForkserverSpec:
    """What this agent's forkserver must prepare for ``plan``."""
    forks, path = plan.how != "exec", spec.program.path
    return ForkserverSpec(
        run_id=spec.run_id,
        agent_pid=os.getpid(),
        imports=forks,
        preload=spec.preload if forks else (),
        script=path if plan.how == "script" else "",
        script_dir=os.path.dirname(os.path.realpath(path)) if plan.how == "script" else working_folder(),
    )


def import_error(host: str, module: str, error: str) -> LaunchError:
    """The forkserver could not import ``module``."""
    torch = f"Install torch for {sys.executable}, or run ddplaunch from the environment that has it."
    hint = torch if module.split(".")[0] == "torch" else "Take it out of --preload, or install it."
    return LaunchError(f"{host}: {module} cannot be imported\n{error}", hint)
