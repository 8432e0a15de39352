"""What a job needs of a node besides sound hardware: looked at by ``--check``, and with ``--check-first`` at a start.

A node that breaks a rule is not used. ``facts`` runs in agents, and takes no more than a millisecond; the rest is pure.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

from ddplaunch.features.health.findings import NOT_READY, of_check
from ddplaunch.protocol.results import HealthFinding
from ddplaunch.system import devices

MIN_SHM_BYTES, MIN_OPEN_FILES = 512 << 20, 4096


class Facts(NamedTuple):
    """What the rules look at.

    Attributes:
        shm_free_bytes: free space in /dev/shm; None if it does not exist.
        open_files: soft and hard limit; -1 for none.
        torch: version of the workers' torch; empty: not known.
        cuda: of CUDA or ROCm that it was built for; empty for none.
        has_gpus: the job uses GPUs of this node.
    """

    shm_free_bytes: int | None
    open_files: tuple[int, int]
    torch: str
    cuda: str
    has_gpus: bool


def facts(*, has_gpus: bool, same_python: bool = True) -> Facts:
    """Those of this machine; ``same_python``: workers have the interpreter of this process, and so its torch."""
    torch, cuda = devices.torch_versions() if has_gpus and same_python else ("", "")
    return Facts(free_bytes("/dev/shm"), resource.getrlimit(resource.RLIMIT_NOFILE), torch, cuda, has_gpus)


def free_bytes(folder: str) -> int | None:
    """Free space on the file system of ``folder``; None if it cannot be told."""
    try:
        return shutil.disk_usage(os.path.abspath(folder)).free
    except OSError:
        return None


def broken(node: Facts) -> Iterator[HealthFinding]:
    """What is missing, a finding for each rule."""
    if node.has_gpus and node.torch and not node.cuda:
        text = f"has GPUs, but torch {node.torch} cannot use them"
        yield _finding("torch", text, "install a torch built for them")
    if node.shm_free_bytes is None or node.shm_free_bytes < MIN_SHM_BYTES:
        text = "little space in /dev/shm: DataLoader workers and NCCL need it"
        yield _finding("shm", text, "docker run --shm-size=8g or --ipc=host")
    if 0 <= node.open_files[1] < MIN_OPEN_FILES:
        text = f"at most {node.open_files[1]} open files, too few for many workers"
        yield _finding("open-files", text, "raise the hard limit, nofile")


def _finding(rule: str, text: str, action: str) -> HealthFinding:
    return HealthFinding(rule=NOT_READY + rule, text=text, action=action, severity="refuse")


def strict(found: Iterable[HealthFinding]) -> list[HealthFinding]:
    """``found`` of the hardware, as a node is judged that must pass the check: nobody else may use its GPUs."""
    return [replace(each, severity="refuse") if of_check(each) else each for each in found]
