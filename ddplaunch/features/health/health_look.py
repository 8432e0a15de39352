"""One look at the health of this node, for ``--check``: what a start would find.

Runs in an agent without workers. Waits for at most ``FOLDER_LIMIT_S``: file systems of the network may block.
"""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ddplaunch.config import NO_LOGS
from ddplaunch.features.health import findings, gpu_events, gpu_rules, port_rules
from ddplaunch.features.health.agent import FOLDER_LIMIT_S, node_health
from ddplaunch.features.health.gpu_faults import is_worth_telling
from ddplaunch.system.files import folder_probe, run_folder
from ddplaunch.system.gpus import devices

if TYPE_CHECKING:
    from ddplaunch.features.health.records import NodeHealth
    from ddplaunch.protocol.gpus import GpusRead, HealthFinding


def look(read: GpusRead, log_dir: str | None, gpus: tuple[str, ...] | None = None, *, is_alone: bool) -> NodeHealth:
    """The findings about this node, and about all GPUs that workers could use.

    Args:
        read: the health of this machine's GPUs; empty on a machine without any.
        log_dir: value of ``--log-dir``; None: the default folder.
        gpus: value of ``--gpus``; None: those that the environment makes visible.
        is_alone: no other node could be used. Then a job runs without logs if their folder cannot be written.
    """
    usable = _usable(read, gpus)
    found = [*_of_gpus(usable), *_of_folder(_existing(log_dir), is_alone=is_alone)]
    return node_health(found, usable.gpus, usable.ports, usable.missing)


def _usable(read: GpusRead, chosen: tuple[str, ...] | None) -> GpusRead:
    """Without GPUs that no worker may use. If GPUs were chosen that do not exist, with all: a start tells that."""
    try:
        names = devices.visible_devices(os.environ, chosen)
    except ValueError:
        return read
    if names is None:
        return read
    return replace(read, gpus=tuple(gpu for gpu in read.gpus if any(map(gpu.is_named, names))))


def _of_gpus(read: GpusRead) -> list[HealthFinding]:
    found = [finding for gpu in read.gpus for finding in gpu_rules.at_start(gpu)]
    found += port_rules.ports_at_start(read.ports)
    if is_worth_telling(read.missing, has_gpus=devices.has_driver()):
        found.append(gpu_events.of_silence(read.missing))
    return found


def _existing(log_dir: str | None) -> str:
    """The folder for logs, or the one in which it would be created; empty if no logs are kept."""
    if log_dir == NO_LOGS:
        return ""
    folder = Path(log_dir).absolute() if log_dir else run_folder.default_base(os.environ)
    return str(next((path for path in (folder, *folder.parents) if os.path.isdir(path)), folder))


def _of_folder(folder: str, *, is_alone: bool) -> list[HealthFinding]:
    if not folder:
        return []
    probed: list[tuple[HealthFinding, ...]] = []
    probe = lambda: probed.append(findings.of_folder(folder_probe.probe(folder)))  # noqa: E731
    thread = threading.Thread(target=probe, name="folder probe", daemon=True)
    thread.start()
    thread.join(FOLDER_LIMIT_S)
    found = probed[0] if probed else (findings.of_silent_folder(folder, FOLDER_LIMIT_S),)
    return [replace(finding, severity="warn") if is_alone else finding for finding in found]
