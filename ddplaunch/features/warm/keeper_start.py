"""Leaves a keeper on this node: a process of its own that imports torch for the next run (``--keep-warm``).

Runs in the agent, as its last act: the keeper inherits what the command has set, but nothing of the run.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from typing import TYPE_CHECKING

from ddplaunch.features.warm.records import KeeperSpec, KeepWarm
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.agent_entry import IMPORT_PACKAGE, KEEPER_COMMAND, PACKAGE_ROOT
from ddplaunch.system import procfs
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from ddplaunch.agent.workers.forkserver_client import ForkserverClient
    from ddplaunch.protocol.specs import AgentSpec
    from ddplaunch.system.limits import Limits

KEEPER_MODULE = "ddplaunch.features.warm.keeper"
"""Started by its name: the agent must not import the package. A test checks that the module exists."""

_START = f"""\
{IMPORT_PACKAGE}; from {KEEPER_MODULE} import caught, finished, main, script; main(search_path)()
with finished, caught:
    script()()"""

_JOB_PROCESSES = (b"slurmstepd", b"salloc")
"""Names of the processes of SLURM that contain a job's command; they end with the job."""


def leave(spec: AgentSpec, text: str, forkserver: ForkserverClient) -> None:
    """Start a keeper for the next run, unless this agent comes from one whose imports fit. Does not wait for it.

    ``text`` is the encoded KeepWarm. Never raises: the run has ended, and its result is known.
    """
    order, base = wire.decode(text.encode(), (KeepWarm,)), run_folder.base_at_home(os.environ)
    if base is None or (_parent_is_keeper() and not forkserver.is_replaced):
        return
    watched = _watched(order.session_leader)
    if watched is None:
        return
    omp = forkserver.env.get("OMP_NUM_THREADS")
    env = {name: value for name, value in os.environ.items() if name not in (environment.RUN_ID, environment.SECRET)}
    script = spec.program.path if spec.program.entry == "script" and not spec.program.text else ""
    record = KeeperSpec(
        seconds=order.seconds,
        watched=watched,
        preload=spec.workers.preload,
        script=script and os.path.abspath(script),
        base=str(base),
    )
    try:
        _start(record, {**env, **({"OMP_NUM_THREADS": omp} if omp else {})}, forkserver.open_files)
    except OSError:
        return


def _start(record: KeeperSpec, env: dict[str, str], open_files: Limits) -> None:
    process = subprocess.Popen(
        [sys.executable, "-u", "-c", _START, PACKAGE_ROOT],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=env,
        start_new_session=True,
    )
    assert process.stdin
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, open_files)  # It reads its limits after its first record.
    with process.stdin:
        process.stdin.write(wire.encode(record))
    process.returncode = 0  # It outlives this process: no warning about a child that has not been waited for.


def _parent_is_keeper() -> bool:
    command = procfs.read(f"/proc/{os.getppid()}/cmdline").split(b"\0")
    return command[: len(KEEPER_COMMAND)] == [word.encode() for word in KEEPER_COMMAND]


def _watched(session_leader: int) -> tuple[int, ...] | None:
    """The processes with whose end the keeper must end; None if the end of the SLURM job could not be seen."""
    leaders = (session_leader,) if session_leader else ()
    if "SLURM_JOB_ID" not in os.environ:
        return leaders
    job = _ancestor(_JOB_PROCESSES)
    return (*leaders, job) if job else None


def _ancestor(names: tuple[bytes, ...]) -> int:
    pid = os.getppid()
    while pid > 1:
        if procfs.read(f"/proc/{pid}/comm").strip() in names:
            return pid
        fields = procfs.stat(pid)
        pid = int(fields[procfs.PARENT]) if fields else 0
    return 0
