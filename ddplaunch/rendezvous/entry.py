"""How a node gets to the rendezvous: connects to the store, or serves it, and takes a place of its own."""

from __future__ import annotations

import contextlib
import queue
import select
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddplaunch.rounds import MemberSpec

_OPENED_S = 10.0
_PROBE_S, _BETTER_S = 3.0, 0.3
_ANSWER_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0


class Refused(Exception):
    """The rendezvous does not want this node; the text says why."""


def connect(spec: MemberSpec, listen_fd: int) -> tuple[TCPStore, str, int]:
    """The store, and by which of the addresses and ports it was reached.

    Raises:
        RuntimeError: it cannot be reached, as torch says it.
    """
    from torch.distributed import TCPStore

    deadline = time.monotonic() + spec.connect_timeout_s
    if spec.other_ports and not spec.serves:
        return _find(spec, deadline)
    host = reachable(spec.hosts, spec.port, deadline) if len(spec.hosts) > 1 and not spec.serves else spec.hosts[0]
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if spec.serves:
        store = TCPStore(
            host, spec.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
        )
    else:
        store = TCPStore(host, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store, host, spec.port


def _find(spec: MemberSpec, deadline: float) -> tuple[TCPStore, str, int]:
    """This run's store at one of several ports; other runs and services at them are passed over.

    Raises:
        RuntimeError: it is at none of them until ``deadline``.
    """
    ports = (spec.port, *spec.other_ports)
    found: queue.SimpleQueue[tuple[TCPStore, str, int]] = queue.SimpleQueue()
    is_over = threading.Event()
    # A thread each: torch waits for ever where something else than a store listens.
    for port in ports:
        threading.Thread(target=_seek, args=(spec, port, found, is_over), name=f"port {port}", daemon=True).start()
    try:
        return found.get(timeout=max(0.0, deadline - time.monotonic()))
    except queue.Empty:
        text = ", ".join(map(str, ports))
        raise RuntimeError(f"this run is not at any of the ports {text} of {spec.hosts[0]}") from None
    finally:
        is_over.set()


def _seek(
    spec: MemberSpec, port: int, found: queue.SimpleQueue[tuple[TCPStore, str, int]], is_over: threading.Event
) -> None:
    pause_s = _FIRST_PAUSE_S
    while not is_over.is_set():
        answered = _probe(spec.hosts, port, time.monotonic() + _PROBE_S)
        host = min(answered, key=spec.hosts.index, default="")
        if host and (store := _own_store(spec, host, port)):
            found.put((store, host, port))
            return
        is_over.wait(pause_s)
        pause_s = min(_LAST_PAUSE_S, 1.5 * pause_s)


def _own_store(spec: MemberSpec, host: str, port: int) -> TCPStore | None:
    """None where the store is another run's, or is about to become ours, or where none answers."""
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=_ANSWER_S)
    try:
        store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
        return store if store.check([_open_key(spec)]) else None
    except RuntimeError:
        return None


def reachable(hosts: tuple[str, ...], port: int, deadline: float) -> str:
    """The first of ``hosts`` that answers at ``port``; all are tried at a time, again and again until ``deadline``.

    An earlier one that answers a little later than another is preferred: most nodes then choose the same.

    Raises:
        RuntimeError: none answers.
    """
    while time.monotonic() < deadline:
        answered = _probe(hosts, port, min(deadline, time.monotonic() + _PROBE_S))
        if answered:
            return min(answered, key=hosts.index)
        time.sleep(0.1)
    raise RuntimeError(f"no answer at port {port} of any of {', '.join(hosts)}")


def _probe(hosts: tuple[str, ...], port: int, deadline: float) -> set[str]:
    with contextlib.ExitStack() as stack:
        pending: dict[socket.socket, str] = {}
        for host in hosts:
            with contextlib.suppress(OSError):
                family, kind, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
                probe = stack.enter_context(socket.socket(family, kind))
                probe.setblocking(False)
                pending[probe] = host
                probe.connect_ex(where)
        answered: set[str] = set()
        while pending and (left_s := deadline - time.monotonic()) > 0:
            _, ready, _ = select.select([], list(pending), [], left_s)
            for probe in ready:
                host = pending.pop(probe)
                if probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0:
                    answered.add(host)
                    deadline = min(deadline, time.monotonic() + _BETTER_S)
            best = min(map(hosts.index, answered), default=len(hosts))
            if all(hosts.index(host) > best for host in pending.values()):
                break
        return answered


def take_place(spec: MemberSpec, store: TCPStore) -> int:
    """This node's index: what a launcher says, its node rank, which must be free, or the next in order of arrival.

    Raises:
        Refused: the endpoint belongs to another run, or the node rank is taken.
    """
    opened = _open_key(spec)
    if spec.serves:
        store.set(opened, "")
    elif not _appears(store, opened):
        raise Refused("another run uses it: no run with this --rdzv-id has its rendezvous there")
    index = spec.node_index
    if spec.seats and index is not None:
        return index
    if index is None:
        index = store.add(f"{prefix(spec)}/nodes", 1) - 1
    holder = store.compare_set(f"{prefix(spec)}/place/{index}", "", spec.node_id).decode()
    if holder != spec.node_id:
        raise Refused(f"node rank {index} is taken by {holder.partition(' ')[0]}")
    return index


def _appears(store: TCPStore, key: str) -> bool:
    store.set_timeout(timedelta(seconds=_OPENED_S))
    try:
        store.get(key)
    except RuntimeError:
        return False
    return True


def _open_key(spec: MemberSpec) -> str:
    return f"{prefix(spec)}/open"


def prefix(spec: MemberSpec) -> str:
    """Where all keys of a run are: two runs at one store never mix."""
    return f"ddplaunch/{spec.token}"


def first_line(error: BaseException) -> str:
    """A C++ error without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]
