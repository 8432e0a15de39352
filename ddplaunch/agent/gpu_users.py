"""Which models this node's GPUs are, and which processes have them open. Only reads files, and NVML where it is."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddplaunch.agent import devices
from ddplaunch.node_check import GpuUser

if TYPE_CHECKING:
    from collections.abc import Iterator

_SERVICES = ("nvidia-persiste", "nv-hostengine", "nvidia-smi", "dcgm-exporter", "nvtop")
"""They watch GPUs and use none; names as in /proc/PID/comm, which cuts them."""


def models(root: str = "/") -> tuple[str, ...]:
    """Of all GPUs in the order of their indices; empty text for one whose driver does not name it."""
    addresses = devices.gpu_pci_addresses(root)
    if root == "/" and addresses:
        with contextlib.suppress(Exception), _Nvml() as nvml:
            return tuple(_text(nvml.nvmlDeviceGetName(handle)) for handle in _handles(nvml))
    return tuple(_field(address, "Model", root) for address in addresses)


def find(root: str = "/") -> tuple[GpuUser, ...]:
    """Processes that use GPUs: what NVML tells, and whose files are open, as far as this user may see that."""
    addresses = devices.gpu_pci_addresses(root)
    minors = {_field(address, "Device Minor", root): index for index, address in enumerate(addresses)}
    users: dict[int, set[int]] = {}
    for pid, gpu in [*_by_nvml(root), *_by_files(minors, root)]:
        users.setdefault(pid, set()).add(gpu)
    named = ((pid, _name(pid, root), tuple(sorted(gpus))) for pid, gpus in sorted(users.items()))
    return tuple(GpuUser(*user) for user in named if user[1] not in _SERVICES)


def _by_nvml(root: str) -> list[tuple[int, int]]:
    if root == "/":
        with contextlib.suppress(Exception), _Nvml() as nvml:
            return [
                (int(process.pid), index)
                for index, handle in enumerate(_handles(nvml))
                for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
            ]
    return []


def _by_files(minors: dict[str, int], root: str) -> Iterator[tuple[int, int]]:
    for folder in Path(root, "proc").glob("[0-9]*/fd") if minors else ():
        with contextlib.suppress(OSError):
            for link in os.scandir(folder):
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"/dev/nvidia([0-9]+)", os.readlink(link.path))
                    if match and match[1] in minors:
                        yield int(folder.parent.name), minors[match[1]]


class _Nvml:
    """The optional binding, initialised meanwhile."""

    def __enter__(self) -> Any:
        self._nvml = importlib.import_module("pynvml")
        self._nvml.nvmlInit()
        return self._nvml

    def __exit__(self, *_: object) -> None:
        self._nvml.nvmlShutdown()


def _handles(nvml: Any) -> list[Any]:
    return [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]


def _text(name: str | bytes) -> str:
    return name.decode(errors="replace") if isinstance(name, bytes) else name


def _field(address: str, name: str, root: str) -> str:
    text = _read(Path(root, "proc/driver/nvidia/gpus", address, "information"))
    found = re.search(rf"^{name}:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return found[1] if found else ""


def _name(pid: int, root: str) -> str:
    return _read(Path(root, "proc", str(pid), "comm")).strip()


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
