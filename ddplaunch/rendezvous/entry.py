"""How a node gets to the rendezvous: connects to the store, or serves it, and takes a place of its own."""

from __future__ import annotations

import contextlib
import errno
import os
import queue
import select
import socket
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

from ddplaunch.mailbox import take
from ddplaunch.rendezvous.store import allow_many_clients
from ddplaunch.rounds import NotReached

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch.distributed import TCPStore

    from ddplaunch.rounds import MemberSpec

_OPENED_S = 10.0
_PATIENCE_S = 5.0
_PROBE_S, _BETTER_S = 3.0, 0.3
_ANSWER_S = 5.0
_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0

_Found = tuple["TCPStore", str, int]


class Refused(Exception):
    """The rendezvous does not want this node; the text says why."""


def connect(spec: MemberSpec, listen_fd: int, tell: Callable[[NotReached], None]) -> _Found:
    """The store, and by which of the addresses and ports it was reached; ``tell`` hears, once, that it takes long.

    Raises:
        RuntimeError: it cannot be reached, and why, or it cannot be served, as torch says it.
    """
    if not spec.serves:
        return _Search(spec).run(tell)
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=max(1.0, spec.connect_timeout_s))
    allow_many_clients()
    store = TCPStore(
        spec.hosts[0], spec.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
    )
    return store, spec.hosts[0], spec.port


class _Search:
    """Looks for this run's store; of several ports, those of other runs and services are passed over."""

    def __init__(self, spec: MemberSpec) -> None:
        self._spec = spec
        self._ports = (spec.port, *spec.other_ports)
        self._found: queue.SimpleQueue[_Found] = queue.SimpleQueue()
        self._is_over = threading.Event()
        self._seen = "nobody answers there"

    def run(self, tell: Callable[[NotReached], None]) -> _Found:
        # A thread each: torch waits for ever where something else than a store listens.
        for port in self._ports:
            threading.Thread(target=self._seek, args=(port,), name=f"port {port}", daemon=True).start()
        began, limit_s = time.monotonic(), min(self._spec.silence_s, self._spec.connect_timeout_s)
        try:
            with contextlib.suppress(queue.Empty):
                return self._next(began + min(_PATIENCE_S, limit_s / 2))
            tell(NotReached(self._why_not))
            with contextlib.suppress(queue.Empty):
                return self._next(began + limit_s)
            raise RuntimeError(f"{self._why_not}, after {limit_s:g} s")
        finally:
            self._is_over.set()

    def _next(self, deadline: float) -> _Found:
        return take(self._found, deadline)

    @property
    def _why_not(self) -> str:
        if len(self._ports) == 1:
            return self._seen
        return f"this run is not at any of the ports {', '.join(map(str, self._ports))} of {self._spec.hosts[0]}"

    def _seek(self, port: int) -> None:
        hosts, pause_s = self._spec.hosts, _FIRST_PAUSE_S
        while not self._is_over.is_set():
            answered, why_not = _probe(hosts, port, time.monotonic() + _PROBE_S)
            self._seen = "what answers there is not a rendezvous, or not yet" if answered else why_not
            host = min(answered, key=hosts.index, default="")
            if host and (store := self._own_store(host, port)):
                self._found.put((store, host, port))
                return
            self._is_over.wait(pause_s)
            pause_s = min(_LAST_PAUSE_S, 1.5 * pause_s)

    def _own_store(self, host: str, port: int) -> TCPStore | None:
        """None where none answers. Of several ports, also where the store is another run's, or about to be ours."""
        from torch.distributed import TCPStore

        several = len(self._ports) > 1
        timeout = timedelta(seconds=_ANSWER_S if several else max(1.0, self._spec.connect_timeout_s))
        try:
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            return store if not several or store.check([_open_key(self._spec)]) else None
        except RuntimeError:
            return None


def _probe(hosts: tuple[str, ...], port: int, deadline: float) -> tuple[set[str], str]:
    """Which of ``hosts`` answer, all tried at a time, and what became of the last one that does not.

    An earlier one that answers a little later than another is waited for: most nodes then choose the same.
    """
    with contextlib.ExitStack() as stack:
        pending: dict[socket.socket, str] = {}
        why_not = _silent(errno.ETIMEDOUT)
        for host in hosts:
            try:
                for family, kind, _, _, where in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
                    probe = stack.enter_context(socket.socket(family, kind))
                    probe.setblocking(False)
                    code = probe.connect_ex(where)
                    if code in (0, errno.EINPROGRESS):
                        pending[probe] = host
                    else:
                        why_not = _silent(code)
            except OSError as error:
                why_not = f"{host}: {error.strerror}"
        answered: set[str] = set()
        while pending and (left_s := deadline - time.monotonic()) > 0:
            _, ready, _ = select.select([], list(pending), [], left_s)
            for probe in ready:
                host = pending.pop(probe)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    answered.add(host)
                    deadline = min(deadline, time.monotonic() + _BETTER_S)
                else:
                    why_not = _silent(code)
            best = min(map(hosts.index, answered), default=len(hosts))
            if all(hosts.index(host) > best for host in pending.values()):
                break
        return answered, why_not


def _silent(code: int) -> str:
    return f"nobody answers there ({os.strerror(code).lower()})"


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
