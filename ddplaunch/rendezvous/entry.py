"""How a node gets to the rendezvous: connects to the store, or serves it, and takes a place of its own."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed import TCPStore

    from ddplaunch.rounds import MemberSpec

_OPENED_S = 10.0


class Refused(Exception):
    """The rendezvous does not want this node; the text says why."""


def connect(spec: MemberSpec, listen_fd: int) -> TCPStore:
    from torch.distributed import TCPStore

    timeout = timedelta(seconds=spec.connect_timeout_s)
    if spec.serves:
        return TCPStore(
            spec.address, spec.port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=listen_fd
        )
    return TCPStore(spec.address, spec.port, is_master=False, wait_for_workers=False, timeout=timeout)


def take_place(spec: MemberSpec, store: TCPStore) -> int:
    """This node's index: its node rank, which must be free, or the next in order of arrival.

    Raises:
        Refused: the endpoint belongs to another run, or the node rank is taken.
    """
    opened = f"{prefix(spec)}/open"
    if spec.serves:
        store.set(opened, "")
    elif not _appears(store, opened):
        raise Refused("another run uses it: no run with this --rdzv-id has its rendezvous there")
    index = spec.node_index
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
