"""Inspects this node for ``--check``: versions, GPUs, limits, and connections to other nodes.

Runs in an agent without workers, and answers the launcher's queries. Must not import torch.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from ddplaunch.agent.workers import start_plan
from ddplaunch.features import mounts, name_servers
from ddplaunch.features.check.queries import (
    IMPORTS_S,
    ConnectResults,
    ConnectToNodes,
    ImportTimes,
    ImportTorch,
    NodeReport,
)
from ddplaunch.features.compile_cache import environ
from ddplaunch.features.gpus import reader
from ddplaunch.features.health import readiness
from ddplaunch.features.numa import cpus
from ddplaunch.protocol import wire
from ddplaunch.protocol.launcher_agent import Ping, Pong
from ddplaunch.system import devices, network, procfs
from ddplaunch.text import quote
from ddplaunch.threads import in_thread, post_from_thread

if TYPE_CHECKING:
    from ddplaunch.agent.launcher_channel import Outbox
    from ddplaunch.features.check.queries import InspectNode
    from ddplaunch.features.gpus.records import GpusRead
    from ddplaunch.features.health.records import NodeHealth

_CONNECT_S, _ALL_CONNECTS_S = 3.0, 12.0
_MAX_CONNECTS = 32
_GPUS_S = 3.0
"""The driver itself has 2 s to answer. On a loaded machine the process that asks it may start later."""

_FAST_IMPORT_S = 5.0
_NULL = subprocess.DEVNULL

_TIMED_IMPORT = """
import ctypes, signal, time
ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: end with the agent, which waits for this process.
def busy_s():  # Has computed, or has waited for a processor.
    with open("/proc/thread-self/schedstat") as file:
        return sum(map(int, file.read().split()[:2])) / 1e9
start_s, start_busy_s = time.monotonic(), busy_s()
import torch
end_s = time.monotonic()
print(f"\\n{end_s - start_s:.3f} {max(0.0, end_s - start_s - busy_s() + start_busy_s):.3f} {torch.__file__}")
"""

_SERVICES = ("nvidia-persiste", "nv-hostengine", "nvidia-smi", "dcgm-exporter", "nvtop")
"""Programs that only observe GPUs, as named in /proc/PID/comm, which holds 15 characters."""


def serve(order: InspectNode, stream: BinaryIO, outbox: Outbox) -> tuple[int, ...]:
    """Send a NodeReport, then answer queries until ``stream`` ends. Returns no unkillable pids: it starts no process.

    Raises:
        LaunchError: this node has no address for connections of other nodes, or the workers' program is missing.
    """
    if order.program:
        program = replace(order.program, python=order.program.python or sys.executable)
        start_plan.check_program(program, "this node", os.environ.get("PATH", os.defpath))
    addresses = _addresses(order)
    listen_at = addresses[0] if len(addresses) == 1 else network.any_address()
    with network.listen("this node", listen_at, 0) as listener:
        in_thread("accept", partial(_accept, listener))
        read = reader.read_once("health", _GPUS_S)
        outbox.send(_inspect(order, addresses, listener.getsockname()[1], read))
        while received := wire.read_record(stream, (Ping, ConnectToNodes, ImportTorch)):
            match received[0]:
                case Ping() as ping:
                    outbox.send(Pong(ping.time_s, time.time()))
                case ConnectToNodes() as query:
                    outbox.send(_connect_all(query))
                case ImportTorch():
                    python = (order.program and order.program.python) or sys.executable
                    post_from_thread("import torch", partial(_import_torch, python), outbox.send, ImportTimes())
    return ()


def _addresses(order: InspectNode) -> tuple[str, ...]:
    if not order.has_peers:
        return ("127.0.0.1",)
    if order.interface and not order.local_addr:
        return (network.address_of("this node", order.interface),)
    given = (order.local_addr,) if order.local_addr else ()
    return given or network.own_addresses(os.environ) or ("127.0.0.1",)


def _health(order: InspectNode, read: GpusRead) -> NodeHealth | None:
    if not order.looks_at_health:
        return None
    from ddplaunch.features.health.gpu_faults import look

    return look(read, order.log_dir, order.gpus, has_peers=order.has_peers)


def _inspect(order: InspectNode, addresses: tuple[str, ...], port: int, read: GpusRead) -> NodeReport:
    torch, cuda = devices.torch_versions()
    started_s = time.monotonic()
    name = name_servers.reverse_name(addresses[0])
    name_s = time.monotonic() - started_s
    return NodeReport(
        python=".".join(map(str, sys.version_info[:3])),
        torch=quote(torch),
        cuda=quote(cuda),
        gpus=_models(read),
        gpu_users=tuple(gpu_users(read)),
        shm_free_bytes=readiness.free_bytes("/dev/shm"),
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
        address=addresses[0],
        name=quote(name),
        name_s=name_s,
        addresses=addresses,
        port=port,
        health=_health(order, read),
        far_gpus=quote(cpus.far_gpus(order.gpus or _all_gpus()), 200),
        compile_caches=_compile_caches(order),
    )


def _compile_caches(order: InspectNode) -> tuple[tuple[str, str], ...]:
    folders = environ.in_use(os.environ, sets=order.sets_caches)
    return tuple((name, _file_system(folder)) for name, folder in folders.items())


def _all_gpus() -> tuple[str, ...]:
    return tuple(map(str, range(len(devices.gpu_pci_addresses()))))


def _models(read: GpusRead) -> tuple[str, ...]:
    """Of all GPUs by index: from the driver's files, which tell them for most, or as the driver itself has told."""
    told = {gpu.index: gpu.name for gpu in read.gpus}
    return tuple(quote(model) or told.get(index, "") for index, model in enumerate(devices.visible_models(None)))


def gpu_users(read: GpusRead, root: str = "/") -> Iterator[str]:
    """A sentence on each process that has GPUs open, as far as this user may see it, or that the driver has told.

    Without services that only observe.
    """
    addresses = devices.gpu_pci_addresses(root)
    minors = {devices.driver_field(address, "Device Minor", root): index for index, address in enumerate(addresses)}
    told = [(pid, gpu.index) for gpu in read.gpus for pid in gpu.pids]
    gpus: dict[int, set[int]] = {}
    for pid, gpu in (*told, *_pids_by_open_files(minors, root)):
        gpus.setdefault(pid, set()).add(gpu)
    for pid, indices in sorted(gpus.items()):
        name = procfs.read(os.path.join(root, f"proc/{pid}/comm")).decode(errors="replace").strip()
        if name not in _SERVICES:
            which = "GPUs" if len(indices) > 1 else "GPU"
            listed = ",".join(map(str, sorted(indices)))
            yield f"{which} {listed} in use by pid {pid}{name and f' ({quote(name)})'}"


def _pids_by_open_files(minors: dict[str, int], root: str) -> Iterator[tuple[int, int]]:
    for folder in Path(root, "proc").glob("[0-9]*/fd") if minors else ():
        with contextlib.suppress(OSError):
            for link in os.scandir(folder):
                with contextlib.suppress(OSError):
                    match = re.fullmatch(r"/dev/nvidia([0-9]+)", os.readlink(link.path))
                    if match and match[1] in minors:
                        yield int(folder.parent.name), minors[match[1]]


def _import_torch(python: str) -> ImportTimes:
    """The times of an import, and of a second one if it was slow; none of one that fails: a worker tells why."""
    deadline, times_s, waits_s, file_system = time.monotonic() + IMPORTS_S, list[float](), list[float](), ""
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        while not times_s or (len(times_s) == 1 and times_s[0] > _FAST_IMPORT_S):
            command, limit_s = [python, "-c", _TIMED_IMPORT], max(0.0, deadline - time.monotonic())
            # The first folder of sys.path is the working directory, which may have a torch of its own.
            done = subprocess.run(command, cwd="/", stdin=_NULL, capture_output=True, timeout=limit_s, check=True)
            taken_s, waited_s, path = done.stdout.decode(errors="surrogateescape").splitlines()[-1].split(" ", 2)
            times_s.append(float(taken_s))
            waits_s.append(float(waited_s))
            file_system = _file_system(path)
    return ImportTimes(times_s=tuple(times_s), waits_s=tuple(waits_s), file_system=file_system)


def _file_system(path: str) -> str:
    """Kind and mount point of the file system of ``path``; empty without /proc."""
    return quote(" at ".join(filter(None, mounts.mount_of(os.path.realpath(path)))))


def _accept(listener: socket.socket) -> None:
    """Accept connections until the socket is closed, so that the kernel's queue does not fill up."""
    with contextlib.suppress(OSError):
        while True:
            listener.accept()[0].close()


def _connect_all(query: ConnectToNodes) -> ConnectResults:
    deadline = time.monotonic() + _ALL_CONNECTS_S
    with ThreadPoolExecutor(_MAX_CONNECTS) as pool:
        errors = pool.map(partial(_connect, deadline), query.nodes.values())
        return ConnectResults(
            tuple((host, quote(error)) for host, error in zip(query.nodes, errors, strict=True) if error)
        )


def _connect(deadline: float, node: tuple[tuple[str, ...], int]) -> str:
    """The reason why no address of the node accepts a connection; empty if one does."""
    addresses, port = node
    errors: dict[str, None] = {}
    for address in addresses:
        timeout_s = min(_CONNECT_S, deadline - time.monotonic())
        try:
            socket.create_connection((address, port), max(0.1, timeout_s)).close()
        except OSError as error:
            errors[str(error.strerror or error)] = None
        else:
            return ""
    return ", ".join(errors)
