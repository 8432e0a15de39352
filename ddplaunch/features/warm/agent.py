"""Leaves a keeper on this node: a process of its own that imports torch for the next run (``--keep-warm``).

Runs in the agent, as its last act: the keeper inherits what the command has set, but nothing of the run.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import Part
from ddplaunch.protocol import environment, wire
from ddplaunch.protocol.agent_entry import KEEPER_COMMAND
from ddplaunch.system import procfs
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from ddplaunch.agent.workers.forkserver_client import ForkserverClient
    from ddplaunch.features.schedulers.info import SchedulerRow
    from ddplaunch.features.warm.records import KeeperSpec


class WarmPart(Part):
    """What a run leaves on this node."""

    def on_run_ended(self) -> None:
        """Start a keeper, if the user wants one."""
        if text := self._node.spec.texts.get("warm"):
            leave(text, self._node.forkserver)


def leave(text: str, forkserver: ForkserverClient) -> None:
    """Start a keeper for the next run, unless this agent comes from one whose imports fit. Does not wait for it.

    ``text`` is the encoded KeeperSpec. Never raises: the run has ended, and its result is known.
    """
    from ddplaunch.features.warm import keeper_start
    from ddplaunch.features.warm.records import KeeperSpec

    spec: KeeperSpec = wire.decode(text.encode(), (KeeperSpec,))
    if run_folder.base_at_home(os.environ) is None or (_parent_is_keeper() and not forkserver.is_replaced):
        return
    jobs = processes_of_jobs(os.environ)
    if 0 in jobs:  # Its end could not be seen.
        return
    spec = replace(spec, watched=(*spec.watched, *jobs))
    chosen = {name: forkserver.env[name] for name in environment.SET_BEFORE_IMPORTS if name in forkserver.env}
    env = {name: value for name, value in os.environ.items() if name not in (environment.RUN_ID, environment.SECRET)}
    spec = replace(spec, script=spec.script and os.path.abspath(spec.script))
    with contextlib.suppress(OSError):
        keeper_start.start(spec, {**env, **chosen}, forkserver.open_files)


def _parent_is_keeper() -> bool:
    command = procfs.read(f"/proc/{os.getppid()}/cmdline").split(b"\0")
    return command[: len(KEEPER_COMMAND)] == [word.encode() for word in KEEPER_COMMAND]


def processes_of_jobs(environ: Mapping[str, str]) -> tuple[int, ...]:
    """For each scheduler's job of which the launcher is a part the process with which it ends; 0: none is seen."""
    from ddplaunch.features.schedulers import table as schedulers

    return tuple(_process_of(row, environ) for row in schedulers.jobs(environ))


def _process_of(row: SchedulerRow, environ: Mapping[str, str]) -> int:
    """An ancestor of the launcher, which itself ends with the run."""
    mark = f"{row.job[0]}={environ[row.job[0]]}".encode()
    outermost, pid = 0, _parent(os.getppid())
    while pid > 1:
        if row.job_processes:
            if procfs.read(f"/proc/{pid}/comm").decode("utf-8", "replace").strip() in row.job_processes:
                return pid
        elif mark in procfs.read(f"/proc/{pid}/environ").split(b"\0"):
            outermost = pid
        pid = _parent(pid)
    return outermost


def _parent(pid: int) -> int:
    fields = procfs.stat(pid)
    return int(fields[procfs.PARENT]) if fields else 0


part = WarmPart
