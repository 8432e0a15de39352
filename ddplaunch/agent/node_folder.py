"""Moves the folder of this node's launcher into that of the run, where each node has a launcher. Used by the agent."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system.files import run_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ddplaunch.protocol.rendezvous import MemberReady
    from ddplaunch.protocol.specs import AgentSpec


def moved(
    spec: AgentSpec, ready: MemberReady, names: Sequence[str], send: Callable[[object], None]
) -> tuple[AgentSpec, tuple[str, ...]]:
    """``spec`` with its folder moved to the first of ``names`` that is free, in the folder of the run.

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
