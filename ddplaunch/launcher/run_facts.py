"""What was started, when and where: run.json at the start of a run, and the same facts in the report at its end.

Runs in the launcher, in the main thread; ``--ps --all`` reads the files. run.json lets a run be listed whose launcher
was killed before it wrote a report. Both files may hold secrets of the command line that do not look like one: they
are the user's alone.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.config import LINE_PREFIX, LaunchConfig
from ddplaunch.protocol import wire
from ddplaunch.protocol.run_result import NodeOfRun, RunResult, Versions
from ddplaunch.system.files import kept_files
from ddplaunch.system.files.run_folder import RUN, RunFacts
from ddplaunch.text import iso_time, masked
from ddplaunch.version import __version__, commit

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.launcher.nodes import Node
    from ddplaunch.protocol.launcher_agent import NodeDetails

SCHEMA = 1
"""Version of the keys of run.json."""


def of_this_process(run_id: str, run_tag: str, config: LaunchConfig) -> RunFacts:
    """The facts of a run that this process starts now."""
    return RunFacts(
        run_id=run_id,
        run_tag=run_tag,
        script=config.script,
        command=masked(_command_line()),
        cwd=_cwd(),
        start=iso_time(time.time()),
        host=socket.gethostname(),
        pid=os.getpid(),
        line_prefix=LINE_PREFIX if config.output.line_prefix is None else config.output.line_prefix,
    )


def write(facts: RunFacts, folder: Path | None) -> RunFacts:
    """Write run.json into the run folder, if there is one. An error of the disk is noted.

    Returns ``facts``.
    """
    if folder:
        text = json.dumps({"schema": SCHEMA, **wire.to_json(facts)}, indent=2) + "\n"
        with kept_files.noting(folder / RUN):
            kept_files.write_whole(folder / RUN, text)
    return facts


def with_run_id(facts: RunFacts, run_id: str, folder: Path | None) -> RunFacts:
    """``facts`` with the run id on which the nodes have agreed; another one than before is written at once."""
    agreed = replace(facts, run_id=run_id)
    if agreed != facts:
        write(agreed, folder)
    return agreed


def completed(result: RunResult, facts: RunFacts, nodes: Sequence[Node]) -> RunResult:
    """``result`` with these facts, the time, and what the run has used."""
    details = next((node.details for node in nodes if node.details), None)
    return replace(
        result,
        command=facts.command,
        cwd=facts.cwd,
        start=facts.start,
        end=iso_time(time.time()),
        versions=_versions(details),
        hosts=tuple(_node_of_run(node) for node in nodes if node.workers),
    )


def _versions(first: NodeDetails | None) -> Versions:
    known = Versions(__version__, commit=commit())
    return replace(known, python=first.python, torch=first.torch) if first else known


def _node_of_run(node: Node) -> NodeOfRun:
    known = node.details
    return NodeOfRun(node.host, node.workers, known.cpus, known.gpus) if known else NodeOfRun(node.host, node.workers)


def _command_line() -> tuple[str, ...]:
    """The words that the user typed; the kernel puts an interpreter before a script that is started by its name."""
    program = sys.argv[0] if sys.argv else ""
    if os.path.basename(program) != "ddplaunch":
        return tuple(sys.orig_argv)
    return ("ddplaunch" if shutil.which("ddplaunch") == program else program, *sys.argv[1:])


def _cwd() -> str:
    try:
        return os.getcwd()
    except OSError:
        return ""
