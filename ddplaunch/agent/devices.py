"""Which accelerators this node has, and which of them each worker gets. Runs in the agent and only reads files.

Never through torch (1.1 s, and touching CUDA spoils a later fork) nor nvidia-smi (seconds on a big node): NVML where
the optional package nvidia-ml-py is installed, else what the drivers show below ``root`` in /proc and /sys. Opens no
device file itself: that would wake a GPU without persistence mode.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import re
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

_INDEX = re.compile(r"[0-9]{1,5}")
_ID = re.compile(rf"{_INDEX.pattern}|(GPU|MIG)-[0-9A-Za-z/-]+")


def gpu_count(root: str = "/") -> int:
    """Physical GPUs this process may open, whatever the environment hides; 0 also where none could be counted."""
    return len(gpu_pci_addresses(root))


def gpu_pci_addresses(root: str = "/") -> tuple[str, ...]:
    """Addresses as sysfs writes them (``0000:17:00.0``); the position is the GPU's index.

    NVIDIA's are in PCI order, which is CUDA's where all GPUs are of one model or CUDA_DEVICE_ORDER=PCI_BUS_ID; AMD's
    are in the order of the kfd nodes, which is HIP's. Partitions of one AMD GPU repeat its address.
    """
    return _nvidia_addresses(root) or _amd_addresses(root)


def pci_address(device: str, root: str = "/") -> str:
    """Where the GPU with this id sits; a uuid may be shortened, as for CUDA.

    Raises:
        ValueError: no such GPU, or an id that the driver's files do not name (MIG, AMD's uuids).
    """
    named = {str(index): address for index, address in enumerate(gpu_pci_addresses(root))}
    found = [a for index, a in named.items() if device == index or _field(a, "GPU UUID", root).startswith(device)]
    if len(found) != 1:
        raise ValueError(f"where GPU {device} sits on the PCI bus is not known")
    return found[0]


def visibility_variable(environ: Mapping[str, str], root: str = "/") -> str:
    """Name of the variable that says here which devices a process sees: to be read, and to be set for a worker."""
    # HIP obeys CUDA_VISIBLE_DEVICES too, but only without its own, and torch ignores it beside ROCR_VISIBLE_DEVICES
    # (torch.cuda._parse_visible_devices); SLURM sets those two together.
    amds_own = environ.keys() & {"HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"}
    if not _is_amd(root) or ("CUDA_VISIBLE_DEVICES" in environ and not amds_own):
        return "CUDA_VISIBLE_DEVICES"
    return "HIP_VISIBLE_DEVICES"


def visible_devices(
    environ: Mapping[str, str], requested: tuple[str, ...] | None, root: str = "/"
) -> tuple[str, ...] | None:
    """Ids of the devices that this node's workers may use, in the order the workers will number them.

    ``requested`` are the ids of ``--gpus``. None means that nobody named devices and none was found: leave the workers'
    variables alone. An empty tuple means that the environment hides all devices.

    Raises:
        ValueError: a requested id that is malformed, repeated, not there or hidden by the environment.
    """
    count = _numbered(environ, root)
    variable = visibility_variable(environ, root)
    allowed = _listed(environ[variable], count) if variable in environ else None
    if requested is not None:
        ids = tuple(map(_normalised, requested))
        _check_requested(ids, count, allowed, f"{variable}={environ.get(variable)}")
        return ids
    return tuple(map(str, range(count))) or None if allowed is None else allowed


def resolve_nproc(nproc: int | str | None, visible: tuple[str, ...] | None, gpus_per_proc: int, root: str = "/") -> int:
    """Workers on this node; None means one per ``gpus_per_proc`` GPUs, and one without GPUs.

    At least 1 where any GPU is visible, also if too few for one worker: ``devices_of`` then tells the numbers.

    Raises:
        ValueError: an unknown word, or no device of the kind it names.
    """
    if isinstance(nproc, int):
        return nproc
    by_gpu = max(1, len(visible) // max(1, gpus_per_proc)) if visible else 0
    cpus = len(os.sched_getaffinity(0))
    # "auto" leaves out Intel's, unlike torchrun's: without torch, a laptop's integrated GPU looks like an XPU.
    counts = {None: by_gpu or 1, "auto": by_gpu or cpus, "cpu": cpus, "gpu": by_gpu, "xpu": _xpu_count(root)}
    if nproc not in counts:
        raise ValueError(f"--nproc-per-node: {nproc!r} is neither a number nor auto, cpu, gpu or xpu")
    if counts[nproc] == 0:
        raise ValueError(f"--nproc-per-node {nproc}: this node has no {nproc} that workers could use")
    return counts[nproc]


def devices_of(local_rank: int, visible: tuple[str, ...], gpus_per_proc: int, nproc: int) -> tuple[str, ...]:
    """The devices of one worker: its run of ``gpus_per_proc`` neighbours, or all where that is 0.

    Raises:
        ValueError: the node's workers together need more devices than are visible.
    """
    if gpus_per_proc == 0:
        return visible
    if nproc * gpus_per_proc > len(visible):
        needed = f"{nproc} x {gpus_per_proc} = {nproc * gpus_per_proc} GPUs (--nproc-per-node x --gpus-per-proc)"
        raise ValueError(f"{needed} are needed, but {len(visible)} can be used ({','.join(visible) or 'none'})")
    return visible[local_rank * gpus_per_proc : (local_rank + 1) * gpus_per_proc]


def _check_requested(ids: tuple[str, ...], count: int, allowed: tuple[str, ...] | None, setting: str) -> None:
    for device in ids:
        if not _ID.fullmatch(device):
            raise ValueError(f"--gpus: {device!r} is neither a GPU's index nor its uuid (GPU-..., MIG-...)")
        if not _is_there(device, count):
            raise ValueError(f"--gpus: there is no GPU {device} on this node: it has {count}, counted from 0")
        if ids.count(device) > 1:
            raise ValueError(f"--gpus names GPU {device} more than once")
        if allowed is not None and device not in allowed:
            raise ValueError(f"--gpus: GPU {device} is not among those that {setting!r} leaves visible")


def _listed(value: str, count: int) -> tuple[str, ...]:
    """What CUDA sees of a *_VISIBLE_DEVICES: all before the first id that is not there; nothing if one is repeated."""
    ids = map(_normalised, value.split(","))
    seen = tuple(takewhile(lambda device: _is_there(device, count), ids))
    return seen if len(set(seen)) == len(seen) else ()


def _normalised(device: str) -> str:
    text = device.strip()
    return str(int(text)) if _INDEX.fullmatch(text) else text


def _is_there(device: str, count: int) -> bool:
    is_beyond = bool(_INDEX.fullmatch(device)) and 0 < count <= int(device)
    return bool(_ID.fullmatch(device)) and not is_beyond


def _numbered(environ: Mapping[str, str], root: str) -> int:
    # ROCR_VISIBLE_DEVICES acts below HIP, which numbers what it leaves from 0.
    physical = gpu_count(root)
    hidden = "ROCR_VISIBLE_DEVICES" in environ and _is_amd(root)
    return len(_listed(environ["ROCR_VISIBLE_DEVICES"], physical)) if hidden else physical


def _is_amd(root: str) -> bool:
    return not _nvidia_addresses(root) and bool(_amd_addresses(root))


def _nvidia_addresses(root: str) -> tuple[str, ...]:
    by_nvml = _nvml_addresses() if root == "/" else ()
    names = (folder.name.lower() for folder in Path(root, "proc/driver/nvidia/gpus").glob("*:*:*.*"))
    return by_nvml or tuple(sorted((name for name in names if _is_usable(name, root)), key=_pci_order))


@functools.cache  # an index must not change its meaning during a run, even when a GPU falls off the bus
def _nvml_addresses() -> tuple[str, ...]:
    with contextlib.suppress(Exception):  # whatever a foreign binding raises, /proc answers next
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        try:
            handles = map(nvml.nvmlDeviceGetHandleByIndex, range(nvml.nvmlDeviceGetCount()))
            places = [nvml.nvmlDeviceGetPciInfo(handle) for handle in handles]
        finally:
            nvml.nvmlShutdown()
        return tuple(f"{p.domain:04x}:{p.bus:02x}:{p.device:02x}.0" for p in places)
    return ()


def _pci_order(address: str) -> list[int]:
    return [int(part, 16) for part in re.split("[:.]", address)]


def _is_usable(address: str, root: str) -> bool:
    # A job's device cgroup (SLURM's ConstrainDevices) hides nothing in /proc, but access(2) asks it too. The device
    # file may be missing until CUDA first runs.
    node = Path(root, "dev", "nvidia" + _field(address, "Device Minor", root))
    return not os.path.lexists(node) or os.access(node, os.R_OK | os.W_OK)


def _field(address: str, name: str, root: str) -> str:
    text = _text(Path(root, "proc/driver/nvidia/gpus", address, "information"))
    found = re.search(rf"^{name}:\s*(\S+)", text, re.MULTILINE)
    return found[1] if found else ""


def _amd_addresses(root: str) -> tuple[str, ...]:
    nodes = Path(root, "sys/class/kfd/kfd/topology/nodes").glob("[0-9]*")
    # CPUs are nodes without SIMDs; the kernel refuses to read a node that the job's device cgroup excludes.
    properties = [_properties(node) for node in sorted(nodes, key=lambda node: int(node.name))]
    return tuple(_amd_address(p) for p in properties if p.get("simd_count", 0) > 0)


def _properties(node: Path) -> dict[str, int]:
    return {name: int(value) for name, value in re.findall(r"^(\w+) (\d+)$", _text(node / "properties"), re.MULTILINE)}


def _amd_address(properties: dict[str, int]) -> str:
    place = properties.get("location_id", 0)  # bus, device, function; the top bits number a partition
    return f"{properties.get('domain', 0):04x}:{place >> 8 & 0xFF:02x}:{place >> 3 & 0x1F:02x}.{place & 7}"


def _xpu_count(root: str) -> int:
    names = (node.name for node in Path(root, "dev/dri").glob("renderD*"))
    drivers = (Path(root, "sys/class/drm", name, "device/driver").resolve().name for name in names)
    return sum(driver in ("i915", "xe") for driver in drivers)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
