"""How a node gets to the rendezvous: connects to the store, or serves it, and takes a place of its own."""

from __future__ import annotations

import contextlib
import select
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddplaunch.rounds import MemberSpec

_OPENED_S = 10.0
_PROBE_S, _BETTER_S = 3.0, 0.3


class Refused(Exception):
    """The rendezvous does not want this node; the text says why."""


def connect(spec: MemberSpec, listen_fd: int) -> tuple[TCPStore, str]:
    """The store, and by which of the addresses it was reached.

    Raises:
        RuntimeError: it cannot be reached, as torch says it.
    """
    from torch.distributed import TCPStore

    deadline = time.monotonic() + spec.connect_timeout_s
    host = reachable(spec.hosts, spec.port, deadline) if len(spec.hosts) > 1 and not spec.serves else spec.hosts[0]
    timeout = timedelta(seconds=max(1.0, deadline - time.monotonic()))
    if spec.serves:
        store = TCPStore(
            host, spec.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
        )
    else:
        store = TCPStore(host, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)
    return store, host


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
    opened = f"{prefix(spec)}/open"
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


def prefix(spec: MemberSpec) -> str:
    """Where all keys of a run are: two runs at one store never mix."""
    return f"ddplaunch/{spec.token}"


def first_line(error: BaseException) -> str:
    """A C++ error without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]
