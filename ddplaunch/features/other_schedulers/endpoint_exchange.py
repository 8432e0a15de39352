"""Tells the addresses of rank 0 to all tasks, through what started them: mpirun, or another one with its interfaces.

Runs in the launcher, before the configuration is built. Every task of the mpirun must call ``exchange``: it returns
when all have. Two interfaces: PMI-1, a text protocol on an inherited socket (MPICH, Intel MPI;
https://flux-framework.readthedocs.io/projects/flux-rfc/en/latest/spec_13.html), and PMIx, by the library that Open MPI
brings (https://pmix.github.io/standard).
"""

from __future__ import annotations

import ctypes
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Mapping

from ddplaunch.threads import in_thread

LIMIT_S = 120.0
"""Seconds to wait for the other tasks."""

_KEY = "ddplaunch"
_MAX_LINE = 4096
_PMIX_GLOBAL, _PMIX_STRING = 3, 3
_LIBPMIX = "libpmix.so.2"


def exchange(environ: Mapping[str, str], addresses: tuple[str, ...] | None) -> tuple[str, tuple[str, ...]] | None:
    """Exchange the addresses of rank 0, which gives its ``addresses``; the other tasks give None.

    Returns:
        A text that is equal in all tasks and differs between runs, and the addresses of rank 0, best first. None if
        this process has no process manager with one of the interfaces.

    Raises:
        OSError: the process manager failed, or the other tasks have not called this within ``LIMIT_S``.
        RuntimeError: no room for a thread.
    """
    own = None if addresses is None else ",".join(addresses)
    if (fd := _pmi_socket(environ)) is not None:
        run, found = _with_limit(lambda: _by_pmi(fd, own))
    elif environ.get("PMIX_NAMESPACE") and (library := _load_pmix()):
        run, found = _with_limit(lambda: _by_pmix(library, own))
    else:
        return None
    try:
        return run, tuple(str(ipaddress.ip_address(text)) for text in found.split(","))
    except ValueError:
        raise OSError("rank 0 gave no addresses") from None


def _with_limit(call: Callable[[], tuple[str, str]]) -> tuple[str, str]:
    """Run ``call`` in a thread: it blocks in a library, where Ctrl-C would be noticed only at its end."""
    results: list[tuple[str, str] | OSError] = []

    def run() -> None:
        try:
            results.append(call())
        except OSError as error:
            results.append(error)

    in_thread("mpi", run).join(LIMIT_S)
    result = results[0] if results else OSError(f"not all tasks have started ddplaunch within {LIMIT_S:g} s")
    if isinstance(result, OSError):
        raise result
    return result


def _pmi_socket(environ: Mapping[str, str]) -> int | None:
    """The inherited socket of a process manager; None without one, as in a process started by such a task."""
    text = environ.get("PMI_FD", "")
    try:
        is_open = re.fullmatch(r"[0-9]{1,6}", text) and stat.S_ISSOCK(os.fstat(int(text)).st_mode)
    except OSError:
        return None
    return int(text) if is_open else None


def _by_pmi(fd: int, own: str | None) -> tuple[str, str]:
    with socket.socket(fileno=fd) as channel, channel.makefile("rwb", buffering=0) as stream:

        def ask(command: str, **arguments: str) -> dict[str, str]:
            words = (f"cmd={command}", *(f"{name}={value}" for name, value in arguments.items()))
            stream.write(" ".join(words).encode() + b"\n")
            line = stream.readline(_MAX_LINE).decode(errors="replace")
            answer = dict(word.split("=", 1) for word in line.split() if "=" in word)
            if not line or answer.get("rc", "0") != "0":
                raise OSError(f"PMI: {command} failed")
            return answer

        ask("init", pmi_version="1", pmi_subversion="1")
        run = ask("get_my_kvsname").get("kvsname", "")
        if own is not None:
            ask("put", kvsname=run, key=_KEY, value=own)
        ask("barrier_in")
        found = ask("get", kvsname=run, key=_KEY).get("value", "")
        ask("finalize")
        return run, found


class _Process(ctypes.Structure):
    """``pmix_proc_t``."""

    _fields_ = (("namespace", ctypes.c_char * 256), ("rank", ctypes.c_uint32))


class _Value(ctypes.Structure):
    """``pmix_value_t`` that holds a string; the padding covers the other kinds of value."""

    _fields_ = (("type", ctypes.c_uint16), ("text", ctypes.c_char_p), ("padding", ctypes.c_char * 32))


def _load_pmix() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL(_LIBPMIX)
    except OSError:
        return None


def _by_pmix(library: ctypes.CDLL, own: str | None) -> tuple[str, str]:
    def call(name: str, *arguments: object) -> None:
        status = getattr(library, name)(*arguments)
        if status:
            raise OSError(f"{name} failed with status {status}")

    none, process, found = ctypes.c_size_t(0), _Process(), ctypes.POINTER(_Value)()
    call("PMIx_Init", ctypes.byref(process), None, none)
    if own is not None:
        call("PMIx_Put", _PMIX_GLOBAL, _KEY.encode(), ctypes.byref(_Value(_PMIX_STRING, own.encode())))
        call("PMIx_Commit")
    call("PMIx_Fence", None, none, None, none)
    first = _Process(process.namespace, 0)
    call("PMIx_Get", ctypes.byref(first), _KEY.encode(), None, none, ctypes.byref(found))
    is_text = found.contents.type == _PMIX_STRING and found.contents.text is not None
    text = found.contents.text.decode(errors="replace") if is_text else ""
    call("PMIx_Fence", None, none, None, none)  # A server may forget the values of a process that has finalized.
    call("PMIx_Finalize", None, none)
    return process.namespace.decode(errors="replace"), text
