"""Binds a worker to CPUs and memory: what a binding is, and how a process gets it.

``bind`` runs in the new process of a worker, before its script or program is there, so it must import little.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable

from ddplaunch.text import fold_ints

_PREFERRED, _MAX_NODES = 1, 1023
_MEMORY_POLICY = {"x86_64": (238, 239), "aarch64": (237, 236)}
"""The numbers of set_mempolicy and get_mempolicy, which have no function in libc."""


def text(cpus: Iterable[int], memory_node: int | None) -> str:
    """A binding: CPUs in the kernel's list format, and the NUMA node whose memory is preferred, if one is."""
    node = "" if memory_node is None else f", memory of NUMA node {memory_node}"
    return f"CPUs {fold_ints(cpus).replace(' ', '')}{node}"


def bind(binding: str) -> None:
    """Bind this process and those that it starts. Memory is preferred where the kernel allows it: a container may not.

    Raises:
        OSError: the CPUs may not be used; they may have gone offline, or have been taken from the job.
    """
    cpus, _, node = binding.removeprefix("CPUs ").partition(", memory of NUMA node ")
    try:
        os.sched_setaffinity(0, numbers(cpus))
    except OSError as error:
        raise OSError(f"no binding to CPUs {cpus}: {error.strerror}") from error
    if node:
        _prefer_memory_of(int(node))


def numbers(listed: str) -> frozenset[int]:
    """The numbers of the kernel's list format, ``0-2,4``."""
    ends = [part.partition("-")[::2] for part in listed.split(",") if part]
    return frozenset(cpu for first, last in ends for cpu in range(int(first), int(last or first) + 1))


def has_memory_policy() -> bool:
    """Whether this process has been told where to allocate memory, as by numactl(8); False if it is not known."""
    mode = ctypes.c_int()
    _, number = _MEMORY_POLICY.get(os.uname().machine, (0, 0))
    return (
        bool(number)
        and ctypes.CDLL(None).syscall(number, ctypes.byref(mode), None, 0, None, 0) == 0
        and mode.value != 0
    )


def _prefer_memory_of(node: int) -> None:
    """Of this thread, and those that it starts: allocate on a NUMA node while it has memory (set_mempolicy(2))."""
    nodes = (ctypes.c_ulong * 16)()
    number, _ = _MEMORY_POLICY.get(os.uname().machine, (0, 0))
    if number and node < _MAX_NODES:
        bits = 8 * ctypes.sizeof(ctypes.c_ulong)
        nodes[node // bits] = 1 << node % bits
        ctypes.CDLL(None).syscall(number, _PREFERRED, nodes, ctypes.c_ulong(_MAX_NODES + 1))
