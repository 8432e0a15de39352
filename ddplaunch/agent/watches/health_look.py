"""One look at the health of this node, for ``--check``: what a start would find.

Runs in an agent without workers. Waits for at most ``_LIMIT_S``: NVML and file systems of the network may block.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.agent.watches.gpus_of_job import is_named, is_worth_telling
from ddplaunch.agent.watches.health_watch import FOLDER_LIMIT_S
from ddplaunch.agent.watches.node_health import node_health
from ddplaunch.config import NO_LOGS
from ddplaunch.health import gpu_rules, node_rules, port_rules
from ddplaunch.system.files import folder_probe, run_folder
from ddplaunch.system.gpus import devices
from ddplaunch.system.gpus.gpu_health import GpusRead, GpuWatch

if TYPE_CHECKING:
    from ddplaunch.protocol.health import Finding, NodeHealth
    from ddplaunch.system.files.folder_probe import FolderState

_LIMIT_S = 3.0
"""The watch of the GPUs itself gives up after 2 s."""


def look(log_dir: str | None, gpus: tuple[str, ...] | None = None, *, is_alone: bool) -> NodeHealth:
    """The findings about this node, and about all GPUs that workers could use.

    Args:
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: those that the environment makes visible.
        is_alone: no other node could be used. Then a job runs without logs if their folder cannot be written.
    """
    states = _probing(_existing(log_dir))
    read = _usable(_read_gpus(), gpus)
    findings = [*_of_gpus(read), *_of_folder(states, _existing(log_dir), is_alone=is_alone)]
    return node_health(findings, read.gpus, read.ports, read.missing)


def _read_gpus() -> GpusRead:
    """The first reading; empty on a machine without NVML's library."""
    answers: queue.SimpleQueue[object] = queue.SimpleQueue()
    watch = GpuWatch.start(answers.put)
    if watch is None and answers.empty():
        return GpusRead(())
    deadline = time.monotonic() + _LIMIT_S
    with closing(watch) if watch else nullcontext():
        while (left_s := deadline - time.monotonic()) > 0:
            try:
                answer = answers.get(timeout=left_s)
            except queue.Empty:
                break
            if isinstance(answer, GpusRead):
                return answer
    return GpusRead((), f"NVML has not answered for {_LIMIT_S:g} s")


def _usable(read: GpusRead, chosen: tuple[str, ...] | None) -> GpusRead:
    """Without GPUs that no worker may use. If GPUs were chosen that do not exist, with all: a start tells that."""
    try:
        names = devices.visible_devices(os.environ, chosen)
    except ValueError:
        return read
    if names is None:
        return read
    return replace(read, gpus=tuple(gpu for gpu in read.gpus if any(is_named(n, gpu.index, gpu.uuid) for n in names)))


def _of_gpus(read: GpusRead) -> list[Finding]:
    found = [finding for gpu in read.gpus for finding in gpu_rules.at_start(gpu)]
    found += port_rules.ports_at_start(read.ports)
    if is_worth_telling(read.missing, has_gpus=devices.has_driver()):
        found.append(gpu_rules.of_silence(read.missing))
    return found


def _existing(log_dir: str | None) -> str:
    """The folder for logs, or the one in which it would be created; empty if no logs are kept."""
    if log_dir == NO_LOGS:
        return ""
    folder = Path(log_dir).absolute() if log_dir else run_folder.default_base(os.environ)
    return str(next((path for path in (folder, *folder.parents) if os.path.isdir(path)), folder))


def _probing(folder: str) -> queue.SimpleQueue[FolderState]:
    """Gets the state of ``folder``, if there is one, from a thread."""
    states: queue.SimpleQueue[FolderState] = queue.SimpleQueue()
    if folder:
        threading.Thread(
            target=lambda: states.put(folder_probe.probe(folder)), name="folder probe", daemon=True
        ).start()
    return states


def _of_folder(states: queue.SimpleQueue[FolderState], folder: str, *, is_alone: bool) -> tuple[Finding, ...]:
    if not folder:
        return ()
    try:
        findings = node_rules.of_folder(states.get(timeout=FOLDER_LIMIT_S))
    except queue.Empty:
        findings = (node_rules.of_silent_folder(folder, FOLDER_LIMIT_S),)
    return tuple(replace(finding, severity="warn") for finding in findings) if is_alone else findings
