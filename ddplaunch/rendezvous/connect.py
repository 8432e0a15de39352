"""Connects a node to the store of the rendezvous, or serves the store, and claims the node's index.

Runs in the member process of a node, before its loop starts. Imports torch only when a store is needed.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from ddplaunch.mailbox import NEVER, Mailbox
from ddplaunch.protocol.environment import SECRET
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.protocol.rendezvous import MemberSpec, RendezvousNotFound
from ddplaunch.rendezvous.plain_store import ServerCannotJoin, ask_whether_it_comes
from ddplaunch.rendezvous.store import Signer, beat_key, key_prefix, lost_key, open_key, open_store
from ddplaunch.system import linux
from ddplaunch.text import is_run_id, quote
from ddplaunch.threads import in_thread

if TYPE_CHECKING:
    from torch.distributed import TCPStore


_OPEN_KEY_S = 10.0
_LOSS_REPORTED_S = 2.0
_REPORT_AFTER_S = 5.0
_PROBE_S, _BETTER_HOST_S = 3.0, 0.3
_STORE_ANSWER_S = 5.0
_SERVER_GONE_S = 10.0
"""For so long an endpoint that has answered may refuse connections: the node that serves it may be started again."""

_NODES_PER_S, _LAST_ASK_S = 100, 10.0
"""Of many nodes that ask one process, each asks less often, but several times before that process ends."""

_FIRST_PAUSE_S, _LAST_PAUSE_S = 0.1, 1.0
_POLL_S = 0.1
_MAX_HOST = 100
_NOTE_KEY = "ddplaunch/turned_away"
"""Outside the keys of a run: its nodes have none in common with a node that is turned away."""

_Found = tuple["TCPStore", str, int]
_AddressInfo = tuple[socket.AddressFamily, socket.SocketKind, Any]


class JoinRefused(Exception):
    """The rendezvous does not accept this node. The message is the reason; ``hint`` says what the user can do."""

    def __init__(self, reason: str, hint: str = "Give each run a different --rdzv-id.") -> None:
        super().__init__(reason)
        self.hint = hint


def connect(spec: MemberSpec, listen_fd: int, report: Callable[[RendezvousNotFound], None]) -> _Found:
    """Serve the store, or connect to it at one of the hosts and ports of ``spec``.

    If that takes long, calls ``report`` once.

    Returns:
        The store, the host and the port.

    Raises:
        RuntimeError: the store cannot be reached, with the reason, or cannot be served, with torch's message.
        ServerCannotJoin: the node that serves it says that it does not come.
    """
    settings = spec.rendezvous
    if not settings.is_server:
        return _Search(spec).find_store(report)
    store = open_store(listen_fd, timedelta(seconds=max(1.0, settings.join_timeout_s)))
    return store, settings.server_addresses[0], settings.port


class _Search:
    """Searches the hosts and ports of ``spec`` for this run's store; skips other runs and services."""

    def __init__(self, spec: MemberSpec) -> None:
        self._spec, self._settings, self._open_key = spec, spec.rendezvous, open_key(spec)
        self._ports = (self._settings.port, *self._settings.other_ports)
        self._resolved: dict[str, list[_AddressInfo]] = {}
        self._found: Mailbox[_Found | ServerCannotJoin] = Mailbox()
        self._is_over = threading.Event()
        self._port_reason = "nothing answers there"
        self._answers: dict[int, bool] = {}
        """By port: whether the process still is there that has once accepted a connection. The node that serves does so
        while it still imports torch."""
        self._gone_at = NEVER

    def find_store(self, report: Callable[[RendezvousNotFound], None]) -> _Found:
        # One thread per port: torch blocks for ever on a port where another kind of server listens.
        for port in self._ports:
            in_thread(f"port {port}", partial(self._search_port, port))
        began = time.monotonic()
        try:
            found = self._found.get(began + min(_REPORT_AFTER_S, self._limit_s / 2))
            if found is None:
                report(RendezvousNotFound(self._reason, self._limit_s))
                if not self._spec.one_launcher_leads:  # That launcher knows of it.
                    in_thread("cannot join", self._ask_whether_it_comes)
            while found is None and (now := time.monotonic()) < (ends_at := min(began + self._limit_s, self._gone_at)):
                found = self._found.get(min(ends_at, now + _LAST_PAUSE_S))
            if found is None and now >= self._gone_at:
                raise RuntimeError(f"{self._reason}; the process that had answered there has ended")
            if found is None:
                raise RuntimeError(f"{self._reason}, after {self._limit_s:g} s")
            if isinstance(found, ServerCannotJoin):
                raise found
            return found
        finally:
            self._is_over.set()

    def _ask_whether_it_comes(self) -> None:
        """In a thread: post a ServerCannotJoin if the node that serves the rendezvous says that it does not come."""
        pause_s = min(_LAST_ASK_S, max(_LAST_PAUSE_S, self._settings.min_nodes / _NODES_PER_S))
        while not self._is_over.is_set():
            ports = [port for port, answers in list(self._answers.items()) if answers]
            try:
                for address, port in itertools.product(self._settings.server_addresses, ports):
                    ask_whether_it_comes(self._spec, address, port)
            except ServerCannotJoin as answer:
                self._found.post(answer)
                return
            self._is_over.wait(pause_s)

    @property
    def _limit_s(self) -> float:
        join_s = self._settings.join_timeout_s
        return join_s if self._answers else min(self._settings.search_timeout_s or join_s, join_s)

    @property
    def _reason(self) -> str:
        if len(self._ports) == 1:
            return self._port_reason
        ports = ", ".join(map(str, self._ports))
        return f"no rendezvous of this run at any of the ports {ports} of {self._settings.server_addresses[0]}"

    def _search_port(self, port: int) -> None:
        hosts, pause_s = self._settings.server_addresses, _FIRST_PAUSE_S
        while not self._is_over.is_set():
            answered, failure, is_refused = _probe(self._resolve, hosts, port, time.monotonic() + _PROBE_S)
            self._note_answer(port, bool(answered), is_refused)
            self._port_reason = (
                "the process that answers there does not serve a rendezvous (yet)" if answered else failure
            )
            host = min(answered, key=hosts.index, default="")
            if host and (store := self._store_of_run(answered[host], port)):
                self._found.post((store, host, port))
                return
            self._is_over.wait(pause_s)
            pause_s = min(_LAST_PAUSE_S, 1.5 * pause_s)

    def _note_answer(self, port: int, answers: bool, is_refused: bool) -> None:
        # No answer at all says little: the queue of a process that imports torch is full, or its machine is busy.
        if answers or port in self._answers:
            self._answers[port] = not is_refused
        if not self._answers or any(list(self._answers.values())):
            self._gone_at = NEVER
        elif self._gone_at == NEVER:
            self._gone_at = time.monotonic() + _SERVER_GONE_S

    def _resolve(self, host: str, port: int) -> list[_AddressInfo]:
        """Addresses of ``host``, with ``port``; the last known ones if it cannot be resolved any more.

        Raises:
            OSError: the host has never been resolved.
        """
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
            self._resolved[host] = [(family, kind, where) for family, kind, _, _, where in found]
        except OSError:
            if host not in self._resolved:
                raise
        return [(family, kind, (where[0], port, *where[2:])) for family, kind, where in self._resolved[host]]

    def _store_of_run(self, address: str, port: int) -> TCPStore | None:
        """None if no store answers, or if there are several ports and the store does not hold this run's key (yet)."""
        from torch.distributed import TCPStore

        has_several_ports = len(self._ports) > 1
        timeout = timedelta(seconds=_STORE_ANSWER_S if has_several_ports else max(1.0, self._settings.join_timeout_s))
        linux.ignore_name_servers()  # From here on torch looks up names; ``_resolve`` has done so before.
        try:
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            return store if not has_several_ports or store.check([self._open_key]) else None
        except RuntimeError:
            return None


def _probe(
    resolve: Callable[[str, int], list[_AddressInfo]], hosts: tuple[str, ...], port: int, deadline: float
) -> tuple[dict[str, str], str, bool]:
    """Try all ``hosts`` at once.

    After one accepts, waits ``_BETTER_HOST_S`` for earlier ones in ``hosts``, so that most nodes choose one host.

    Returns:
        The hosts that accept a connection, each with its address; the error of the last that does not; and whether
        none accepts, all have answered in time, and at least one has refused the connection.
    """
    with contextlib.ExitStack() as stack:
        pending: dict[socket.socket, str] = {}
        failure, codes = _no_answer(errno.ETIMEDOUT), set[int]()
        for host in hosts:
            try:
                for family, kind, where in resolve(host, port):
                    probe = stack.enter_context(socket.socket(family, kind))
                    probe.setblocking(False)
                    code = probe.connect_ex(where)
                    if code in (0, errno.EINPROGRESS):
                        pending[probe] = host
                    else:
                        failure = _no_answer(code)
                        codes.add(code)
            except OSError as error:
                failure = f"{host}: {error.strerror}"
        answered: dict[str, str] = {}
        while pending and (remaining_s := deadline - time.monotonic()) > 0:
            _, ready, _ = select.select([], list(pending), [], remaining_s)
            for probe in ready:
                host = pending.pop(probe)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                if code == 0:
                    answered[host] = _address(probe)
                    deadline = min(deadline, time.monotonic() + _BETTER_HOST_S)
                else:
                    failure = _no_answer(code)
                    codes.add(code)
            best = min(map(hosts.index, answered), default=len(hosts))
            if all(hosts.index(host) > best for host in pending.values()):
                break
        return answered, failure, errno.ECONNREFUSED in codes and not (answered or pending)


def _address(connected: socket.socket) -> str:
    """Address of the peer, with the scope of a link-local one."""
    return socket.getnameinfo(connected.getpeername(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]


def _no_answer(code: int) -> str:
    return f"nothing answers there ({os.strerror(code).lower()})"


def enter(spec: MemberSpec, store: TCPStore) -> Signer:
    """Open the rendezvous on the node that serves it; on the others wait for it, and verify that it has their secret.

    Returns:
        The signer of all records of the rendezvous; ``agreed_id`` takes the run id from its nonce.

    Raises:
        JoinRefused: another run uses the endpoint, or the nodes have different secrets.
        RuntimeError: the store does not answer, or does not hold the rendezvous that the launcher assigned.
    """
    key, signer = open_key(spec), Signer(spec.rendezvous.secret)
    if spec.rendezvous.is_server:
        nonce = f"{os.urandom(16).hex()}:{spec.run_id}"
        store.set(key, signer.sign(key, nonce))
        return signer.for_nonce(nonce)
    if not _key_appears(store, key):
        if spec.one_launcher_leads:  # Nobody else knows the endpoint: the node that serves it is slow or lost.
            raise RuntimeError(f"the node that serves the rendezvous has not opened it within {_OPEN_KEY_S:g} s")
        _leave_note(spec, store, "run_id")
        raise JoinRefused("another run uses this endpoint: no rendezvous with this --rdzv-id was found there")
    value = store.get(key)
    try:
        return verified(spec, signer, value)
    except JoinRefused:
        _leave_note(spec, store, "secret")
        raise


def _leave_note(spec: MemberSpec, store: TCPStore, differs: str) -> None:
    """Tell the node that serves the rendezvous that this one is turned away: it may wait for this node."""
    store.set(_NOTE_KEY, f"{differs} {spec.node_id.partition(' ')[0]}")


def read_note(store: TCPStore, endpoint: str) -> Notice | None:
    """For the user: the last node that was turned away at ``endpoint``. None if there is none.

    Nothing proves that it is true: such a node is no node of the run.
    """
    if not store.check([_NOTE_KEY]):
        return None
    differs, _, host = store.get(_NOTE_KEY).decode("utf-8", "replace").partition(" ")
    what = SECRET if differs == "secret" else "--rdzv-id"
    return Notice(f"{quote(host, _MAX_HOST)} cannot join at {endpoint}: it has another {what} than this node")


def verified(spec: MemberSpec, signer: Signer, value: bytes) -> Signer:
    """The signer of the rendezvous that was opened with ``value``, given that of its secret. Raises as ``enter``."""
    nonce, is_signed = signer.verify(open_key(spec), value), b" " in value
    if nonce is not None and is_signed == signer.has_secret:
        signer = signer.for_nonce(nonce.decode("ascii", "replace"))
        if all(map(is_run_id, agreed_id(signer))):
            return signer
        raise RuntimeError("the process that answers there opened the rendezvous with an invalid text")
    if spec.one_launcher_leads:
        raise RuntimeError("another process has changed the rendezvous in the store")
    reason = f"the node that serves the rendezvous has {f'another {SECRET}' if is_signed else f'no {SECRET}'}"
    if not signer.has_secret:
        reason = f"the rendezvous accepts only nodes with its {SECRET}, and this node has none"
    raise JoinRefused(reason, f"Set {SECRET} to the same text on every node, or on none.")


def agreed_id(signer: Signer) -> tuple[str, str]:
    """The run id of all nodes, and a random text that is equal on all nodes and differs from all other runs'."""
    run_key, _, run_id = signer.nonce.partition(":")
    return run_id, run_key


def claim_node_index(spec: MemberSpec, store: TCPStore) -> tuple[int, str]:
    """Claim an index for this node: the one that the launcher assigned, its node rank, or the next free one.

    If the node with this node rank is lost, this node replaces it and gets another index, which no node has had: the
    lost node may still run. If that node lives, this node gets an index after those of all node ranks, by arrival:
    a node that is turned away would leave the others waiting for it.

    Returns:
        The index. The host with the same node rank, on the first node of the run that finds its rank taken; else empty.

    Raises:
        RuntimeError: the store does not answer any more.
    """
    rank = spec.rendezvous.node_index
    if rank is None:
        arrivals = f"{key_prefix(spec)}/nodes"
        return _claim_first(spec, store, (store.add(arrivals, 1) - 1 for _ in itertools.count())), ""
    return (rank, "") if spec.one_launcher_leads else _claim_rank(spec, store, rank)


def _claim_rank(spec: MemberSpec, store: TCPStore, rank: int) -> tuple[int, str]:
    holder = _claim(spec, store, rank, rank)
    if holder == _claim_text(spec, rank):
        return rank, ""
    max_nodes, is_lost = spec.rendezvous.max_nodes, _gets_lost(spec, store, holder.rpartition(" ")[2])
    # The further indices of all ranks are in the order of the ranks.
    index = _claim_first(spec, store, itertools.count(rank + max_nodes, max_nodes))
    if is_lost and _claim(spec, store, rank, index, expected=holder) == _claim_text(spec, index):
        return index, ""
    is_first = store.add(f"{key_prefix(spec)}/equal_ranks", 1) == 1
    return index, quote(holder.partition(" ")[0]) if is_first else ""


def _gets_lost(spec: MemberSpec, store: TCPStore, index: str) -> bool:
    """Whether the node with this index leaves or is lost while this node waits. Ends with that node's heartbeat."""
    limit_s = min(spec.rendezvous.silent_after_s + _LOSS_REPORTED_S, spec.rendezvous.join_timeout_s / 2)
    deadline, beats = time.monotonic() + limit_s, store.add(beat_key(spec, index), 0)
    while not store.check([lost_key(spec, index)]):
        if store.add(beat_key(spec, index), 0) != beats or time.monotonic() >= deadline:
            return False
        time.sleep(_POLL_S)
    return True


def _claim_first(spec: MemberSpec, store: TCPStore, candidates: Iterable[int]) -> int:
    """Claim the first of ``candidates`` that no node has claimed."""
    return next(index for index in candidates if _claim(spec, store, index, index) == _claim_text(spec, index))


def _claim(spec: MemberSpec, store: TCPStore, rank: int, index: int, expected: str = "") -> str:
    """Claim ``rank`` for ``index`` if its claim is ``expected``. Returns the claim that then holds."""
    key = f"{key_prefix(spec)}/claim/{rank}"
    return store.compare_set(key, expected, _claim_text(spec, index)).decode("utf-8", "replace")


def _claim_text(spec: MemberSpec, index: int) -> str:
    return f"{spec.node_id} {index}"


def _key_appears(store: TCPStore, key: str) -> bool:
    """Whether the store gets ``key`` in time.

    Raises:
        RuntimeError: the store does not answer any more.
    """
    store.set_timeout(timedelta(seconds=_OPEN_KEY_S))
    with contextlib.suppress(RuntimeError):
        store.get(key)
    return store.check([key])


def first_line(error: BaseException) -> str:
    """The message of a C++ error without its stack."""
    return (str(error).splitlines() or [type(error).__name__])[0]
