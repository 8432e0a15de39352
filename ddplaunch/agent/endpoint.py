"""Addresses and listening sockets of this node: what it can bind, and how other nodes reach it."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from ddplaunch.errors import RENDEZVOUS, LaunchError

if TYPE_CHECKING:
    from ddplaunch.config import Meeting

_BACKLOG = 4096
"""Workers that connect before the store answers wait in this queue (the kernel cuts it to net.core.somaxconn)."""


def listen(host: str, address: str, port: int) -> socket.socket:
    """A listening socket on ``host``, this node; port 0 takes a free one.

    Raises:
        LaunchError: the address is not this node's, or the port is taken.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family)
        # A fixed port is used again by the next attempt, while connections of the last one are in TIME_WAIT.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(where)
        listener.listen(_BACKLOG)
    except (OSError, UnicodeError) as error:  # A name with an empty or endless part is a UnicodeError (idna).
        raise LaunchError(
            f"{host} cannot listen at {address}:{port}: {getattr(error, 'strerror', error)}",
            "With one node leave --master-addr and --master-port out: a free port is then chosen and held.",
            RENDEZVOUS,
        ) from None
    return listener


def own(host: str, meeting: Meeting) -> socket.socket | None:
    """The endpoint's socket, if its address is that of ``host``, this node, and nobody here serves it already.

    Binding tells better than any comparison of names: it fails for an address that is not this node's.

    Raises:
        LaunchError: this node is told to serve, and cannot.
    """
    if meeting.serves is False:
        return None
    try:
        return listen(host, _reachable(meeting.host), meeting.port)
    except LaunchError:
        if meeting.serves:
            raise
        return None


def _reachable(name: str) -> str:
    """What to listen at: the endpoint's address, or all where its name means loopback only here (Debian: 127.0.1.1)."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return name
    return "0.0.0.0" if name not in ("localhost", address) and address.startswith("127.") else name


def route_address(host: str, meeting: Meeting) -> str:
    """The address of ``host``, this node, on the way to the endpoint; nothing is sent.

    Raises:
        LaunchError: the endpoint's name or address means nothing here.
    """
    try:
        found = socket.getaddrinfo(meeting.host, meeting.port, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{host} cannot reach {meeting.host}:{meeting.port}: {getattr(error, 'strerror', error)}",
            "Give an address that every node knows, or add the name to /etc/hosts.",
            RENDEZVOUS,
        ) from None
