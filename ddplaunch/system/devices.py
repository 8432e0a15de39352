"""The accelerators of this node: number, PCI addresses, the devices of each worker, and for which torch was built.

Runs in the agent. Asks NVML for addresses where the driver has brought its library, and reads the drivers' files below
``root`` in /proc and /sys. Must not use torch (import takes 1.1 s, and touching CUDA spoils a later fork) or nvidia-smi
(takes seconds on a node with many GPUs), and must not open a device file, which would wake a GPU without persistence
mode.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import re
import time
from collections.abc import Mapping
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

from ddplaunch.text import is_device_id
from ddplaunch.threads import start_work

_DRIVERS = ("proc/driver/nvidia", "dev/nvidiactl", "sys/class/kfd", "dev/dxg")
"""Without any of these no GPU of NVIDIA or AMD is usable; with one of them GPUs may exist that cannot be counted."""

NVML_LIBRARY = "libnvidia-ml.so.1"
"""A part of NVIDIA's driver. A machine without it has no GPU of NVIDIA that a program could use."""

NVML_LIMIT_S = 2.0
"""NVML answers within milliseconds; within a second where it must wake GPUs without persistence mode."""

NO_GPU = "--gpus: there is no GPU here; without --gpus the workers use the CPU, and --dry-run simulates GPUs"


def has_driver(root: str = "/") -> bool:
    """Whether this machine may have GPUs."""
    return any(os.path.exists(os.path.join(root, path)) for path in _DRIVERS)


@functools.cache
def has_nvml() -> bool:
    """Whether NVML's library can be loaded. Takes less than a millisecond, and asks no driver."""
    try:
        ctypes.CDLL(NVML_LIBRARY)
    except OSError:
        return False
    return True


def gpu_pci_addresses(root: str = "/") -> tuple[str, ...]:
    """Addresses of the physical GPUs that this process may open, whatever the environment hides; none if not known.

    They are as sysfs writes them (``0000:17:00.0``); the position is the GPU's index.

    NVIDIA GPUs are in PCI order, which is CUDA's order where all GPUs are of one model or CUDA_DEVICE_ORDER=PCI_BUS_ID;
    AMD GPUs are in the order of the kfd nodes, which is HIP's order. Partitions of one AMD GPU repeat its address.
    """
    return _nvidia_addresses(root) or _amd_addresses(root)


def pci_address(device: str, root: str = "/") -> str:
    """PCI address of the GPU with this id; a UUID may be shortened, as for CUDA.

    Raises:
        ValueError: no such GPU, or an id that the driver's files do not contain (MIG, AMD's UUIDs).
    """
    by_index = {str(index): address for index, address in enumerate(gpu_pci_addresses(root))}
    found = [
        a for index, a in by_index.items() if device == index or driver_field(a, "GPU UUID", root).startswith(device)
    ]
    if len(found) != 1:
        raise ValueError(f"the PCI address of GPU {device} is not known")
    return found[0]


def visible_models(visible: tuple[str, ...] | None, root: str = "/") -> tuple[str, ...]:
    """Models of the devices that ``visible_devices`` returned, from the drivers' files alone, which costs little.

    All GPUs if none were named; an empty text for one whose model is not known, or that is named by its UUID.
    """
    models = tuple(_model(address, root) for address in gpu_pci_addresses(root))
    if visible is None:
        return models
    return tuple(models[int(device)] if device.isdigit() and int(device) < len(models) else "" for device in visible)


def visibility_variable(environ: Mapping[str, str], root: str = "/") -> str:
    """Name of the variable that selects the devices a process sees: read from ``environ``, set for a worker."""
    # HIP obeys CUDA_VISIBLE_DEVICES too, but only without its own variable, and torch ignores CUDA_VISIBLE_DEVICES
    # beside ROCR_VISIBLE_DEVICES (torch.cuda._parse_visible_devices); SLURM sets those two together.
    amd_variables = environ.keys() & {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
    if not is_amd(root) or ("CUDA_VISIBLE_DEVICES" in environ and not amd_variables):
        return "CUDA_VISIBLE_DEVICES"
    return "HIP_VISIBLE_DEVICES"


def visible_devices(
    environ: Mapping[str, str], requested: tuple[str, ...] | None, root: str = "/"
) -> tuple[str, ...] | None:
    """Ids of the devices that this node's workers may use, in the order in which the workers will number them.

    ``requested`` are the ids of ``--gpus``. None: no devices were named and none was found, so the workers' variables
    stay as they are. An empty tuple: the environment hides all devices.

    Raises:
        ValueError: a requested id that is malformed, repeated, not present or hidden by the environment, or that
            neither a driver nor the environment confirms.
    """
    count = _numbered(environ, root)
    variable = visibility_variable(environ, root)
    allowed = listed(environ[variable], count) if variable in environ else None
    if requested is not None:
        ids = tuple(map(_normalised, requested))
        if ids and not count and allowed is None and not has_driver(root):
            raise ValueError(NO_GPU)
        _check_requested(ids, count, allowed, f"{variable}={environ.get(variable)}")
        return ids
    return tuple(map(str, range(count))) or None if allowed is None else allowed


def resolve_nproc(nproc: int | str | None, visible: tuple[str, ...] | None, gpus_per_proc: int, root: str = "/") -> int:
    """Number of workers on this node; None means one per ``gpus_per_proc`` GPUs, or one without GPUs.

    At least 1 where any GPU is visible, also if there are too few for one worker: ``devices_of`` then raises.

    Raises:
        ValueError: no device of the kind that ``nproc`` names.
    """
    if isinstance(nproc, int):
        return nproc
    by_gpu = max(1, len(visible) // max(1, gpus_per_proc)) if visible else 0
    cpus = len(os.sched_getaffinity(0))
    # "auto" leaves out Intel's GPUs, unlike torchrun: without torch, a laptop's integrated GPU looks like an XPU.
    counts = {None: by_gpu or 1, "auto": by_gpu or cpus, "cpu": cpus, "gpu": by_gpu, "xpu": _xpu_count(root)}
    if counts[nproc] == 0:
        raise ValueError(f"--nproc-per-node {nproc}: this node has no {nproc} that workers could use")
    return counts[nproc]


def devices_of(local_rank: int, visible: tuple[str, ...], gpus_per_proc: int, nproc: int) -> tuple[str, ...]:
    """The devices of one worker: ``gpus_per_proc`` neighbours in ``visible``, or all of it where that is 0.

    Raises:
        ValueError: the node's workers together need more devices than are visible.
    """
    if gpus_per_proc == 0:
        return visible
    if nproc * gpus_per_proc > len(visible):
        needed = f"{nproc} x {gpus_per_proc} = {nproc * gpus_per_proc} GPUs (--nproc-per-node x --gpus-per-proc)"
        raise ValueError(f"{needed} are needed, but {len(visible)} can be used ({','.join(visible) or 'none'})")
    return visible[local_rank * gpus_per_proc : (local_rank + 1) * gpus_per_proc]


# Ids.


def listed(value: str, count: int) -> tuple[str, ...]:
    """The devices that CUDA sees by a *_VISIBLE_DEVICES: all before the first unknown id; none if one is repeated.

    ``count`` is the number of GPUs; 0: not known.
    """
    ids = map(_normalised, value.split(","))
    seen = tuple(takewhile(lambda device: _exists(device, count), ids))
    return seen if len(set(seen)) == len(seen) else ()


def _check_requested(ids: tuple[str, ...], count: int, allowed: tuple[str, ...] | None, setting: str) -> None:
    for device in ids:
        if not is_device_id(device):
            raise ValueError(f"--gpus: {device!r} is neither a GPU's index nor its UUID (GPU-..., MIG-...)")
        if not _exists(device, count):
            raise ValueError(f"--gpus: there is no GPU {device} on this node: it has {count}, counted from 0")
        if ids.count(device) > 1:
            raise ValueError(f"--gpus names GPU {device} more than once")
        if allowed is not None and device not in allowed:
            raise ValueError(f"--gpus: GPU {device} is not among those that {setting!r} leaves visible")


def _normalised(device: str) -> str:
    text = device.strip()
    return str(int(text)) if _is_index(text) else text


def _exists(device: str, count: int) -> bool:
    is_beyond = _is_index(device) and 0 < count <= int(device)
    return is_device_id(device) and not is_beyond


def _is_index(device: str) -> bool:
    return is_device_id(device) and device.isdigit()


def _numbered(environ: Mapping[str, str], root: str) -> int:
    # ROCR_VISIBLE_DEVICES acts below HIP, which numbers the devices that it leaves from 0.
    physical = len(gpu_pci_addresses(root))
    hidden = "ROCR_VISIBLE_DEVICES" in environ and is_amd(root)
    return len(listed(environ["ROCR_VISIBLE_DEVICES"], physical)) if hidden else physical


# NVIDIA.


def _nvidia_addresses(root: str) -> tuple[str, ...]:
    by_nvml = _nvml_addresses() if root == "/" else ()
    names = (folder.name.lower() for folder in Path(root, "proc/driver/nvidia/gpus").glob("*:*:*.*"))
    return by_nvml or tuple(sorted((name for name in names if _is_usable(name, root)), key=_pci_order))


@functools.cache  # An index must not change its meaning during a run, even when a GPU falls off the bus.
def _nvml_addresses() -> tuple[str, ...]:
    """Empty if NVML is missing, fails, or blocks for longer than ``NVML_LIMIT_S``, as where the driver hangs."""
    if not has_nvml():
        return ()
    return start_work("nvml", _ask_nvml_for_addresses, otherwise=None)(time.monotonic() + NVML_LIMIT_S) or ()


def _ask_nvml_for_addresses() -> tuple[str, ...]:
    with contextlib.suppress(Exception):  # Whatever the binding raises, /proc is read next.
        import pynvml

        pynvml.nvmlInit()
        try:
            handles = map(pynvml.nvmlDeviceGetHandleByIndex, range(pynvml.nvmlDeviceGetCount()))
            infos = map(pynvml.nvmlDeviceGetPciInfo, handles)
            return tuple(f"{info.domain:04x}:{info.bus:02x}:{info.device:02x}.0" for info in infos)
        finally:
            pynvml.nvmlShutdown()
    return ()


def _pci_order(address: str) -> list[int]:
    return [int(part, 16) for part in re.split("[:.]", address)]


def _is_usable(address: str, root: str) -> bool:
    # A job's device cgroup (SLURM's ConstrainDevices) hides nothing in /proc, but access(2) obeys it. The device file
    # may be missing until CUDA first runs.
    node = Path(root, "dev", "nvidia" + driver_field(address, "Device Minor", root))
    return not os.path.lexists(node) or os.access(node, os.R_OK | os.W_OK)


def _model(address: str, root: str) -> str:
    # amdgpu knows the name of boards that have one stored.
    by_amdgpu = Path(root, "sys/bus/pci/devices", address, "product_name")
    return driver_field(address, "Model", root) or _text(by_amdgpu).strip()


def driver_field(address: str, name: str, root: str) -> str:
    """What NVIDIA's driver says of the GPU at a PCI address in its files, as ``Device Minor``; empty if nothing."""
    text = _text(Path(root, "proc/driver/nvidia/gpus", address, "information"))
    found = re.search(rf"^{name}:[ \t]*(.*?)[ \t]*$", text, re.MULTILINE)
    return found[1] if found else ""


# AMD and Intel.


def is_amd(root: str = "/") -> bool:
    """Whether this machine's GPUs are AMD's: it has none of NVIDIA."""
    return not _nvidia_addresses(root) and bool(_amd_addresses(root))


def _amd_addresses(root: str) -> tuple[str, ...]:
    nodes = Path(root, "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    # CPUs are nodes without SIMDs; the kernel refuses to read a node that the job's device cgroup excludes.
    properties = [_properties(node) for node in sorted(nodes, key=lambda node: int(node.name))]
    return tuple(_amd_address(p) for p in properties if p.get("simd_count", 0) > 0)


def _properties(node: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE)}


def _amd_address(properties: dict[str, int]) -> str:
    location = properties.get("location_id", 0)  # Bus, device, function; the top bits number a partition.
    bus, device, function = location >> 8 & 0xFF, location >> 3 & 0x1F, location & 7
    return f"{properties.get('domain', 0):04x}:{bus:02x}:{device:02x}.{function}"


def _xpu_count(root: str) -> int:
    names = (node.name for node in Path(root, "dev/dri").glob("renderD*"))
    drivers = (Path(root, "sys/class/drm", name, "device/driver").resolve().name for name in names)
    return sum(driver in ("i915", "xe") for driver in drivers)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def torch_versions() -> tuple[str, str]:
    """Versions of torch and of its CUDA or ROCm; empty where there is none, ``unknown`` where it cannot be read.

    Read from torch's files: an import takes a second.
    """
    spec = find_spec("torch")
    if not spec or not spec.submodule_search_locations:
        return "", ""
    try:
        text = Path(spec.submodule_search_locations[0], "version.py").read_text(errors="replace")
    except OSError:
        return "unknown", ""
    hip = _version_in(text, "hip")
    return _version_in(text, "__version__") or "unknown", _version_in(text, "cuda") or (f"ROCm {hip}" if hip else "")


def _version_in(text: str, name: str) -> str:
    """The text that ``name`` has in torch's version.py; empty if it has none."""
    found = re.search(rf"^{name}\b.*= *['\"]([^'\"]+)", text, re.MULTILINE)
    return found[1] if found else ""
