"""This node: its interpreter, its folder for logs, and what its workers use.

Runs in the agent, in its main thread. Must not start a process or import torch.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS
from ddplaunch.protocol.launcher_agent import NodeDetails, Notice
from ddplaunch.system import devices
from ddplaunch.system.files import run_folder
from ddplaunch.text import quote

if TYPE_CHECKING:
    from ddplaunch.protocol.rendezvous import MemberReady
    from ddplaunch.protocol.specs import AgentSpec


def prepare(spec: AgentSpec) -> AgentSpec:
    """``spec`` with the paths of this node's interpreter, of a script below this node's home, and of the node folder.

    Creates that folder if the node must. A folder that cannot be created is reported when a worker's log is opened in
    it.
    """
    if not spec.program.python:
        spec = replace(spec, program=replace(spec.program, python=sys.executable))
    if spec.program.path.startswith("~/"):
        spec = replace(spec, program=replace(spec.program, path=os.path.expanduser(spec.program.path)))
    log_dir = spec.output.log_dir
    if not spec.run_dir_name or log_dir == NO_LOGS:
        return spec
    base = Path(log_dir).absolute() if log_dir else run_folder.default_base(os.environ)
    return replace(spec, node_dir=str(run_folder.share(base, spec.run_dir_name, spec.host)))


def moved_into_run(
    spec: AgentSpec, ready: MemberReady, names: Sequence[str], send: Callable[[object], None]
) -> tuple[AgentSpec, tuple[str, ...]]:
    """``spec`` with the node folder moved to the first of ``names`` that is free, in the folder of the run.

    The launchers of all nodes of a shared disk meet there. The second value is that of ``FirstRoundFormed``. If the
    folder cannot be moved, ``send`` tells that.
    """
    if not spec.node_dir:
        return spec, ()
    folder = Path(spec.node_dir)
    try:
        path = run_folder.move_into_run(folder, ready.run_id, ready.run_key, names)
        return replace(spec, node_dir=str(path)), (path.parent.name, path.name)
    except OSError as error:
        text = f"the logs of {spec.host} are in {folder}, not in the folder of {ready.run_id}: {error.strerror}"
        send(Notice(text, -1))
        return spec, ()


def details(spec: AgentSpec) -> NodeDetails:
    """What the workers of this node use, for the report. In a dry run it has no GPUs, since none is used.

    Reads a few small files, while the forkserver imports torch.
    """
    gpus = () if spec.dry_run else devices.visible_models(devices.visible_devices(os.environ, spec.workers.gpus))
    return NodeDetails(
        cpus=len(os.sched_getaffinity(0)),
        gpus=tuple(map(quote, gpus)),
        python=".".join(map(str, sys.version_info[:3])) if spec.same_python else "",
        torch=quote(devices.torch_versions()[0]) if spec.same_python else "",
        folder=spec.node_dir or "",
    )
