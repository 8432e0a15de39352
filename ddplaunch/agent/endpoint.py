"""Addresses and listening sockets of this node: what it can bind, and how other nodes reach it."""

from __future__ import annotations

import contextlib
import os
import re
import socket
from typing import TYPE_CHECKING

from ddplaunch.errors import RENDEZVOUS, LaunchError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ddplaunch.config import Meeting

_BACKLOG = 4096
"""Workers that connect before the store answers wait in this queue (the kernel cuts it to net.core.somaxconn)."""

_BRIDGE = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|vmnet|lxc|podman")
_LOCAL_ONLY = re.compile(r"127\.|::1$|fe80:|169\.254\.", re.IGNORECASE)


def listen(host: str, address: str, port: int) -> socket.socket:
    """A listening socket on ``host``, this node; port 0 takes a free one.

    Raises:
        LaunchError: the address is not this node's, or the port is taken.
    """
    try:
        family, _, _, _, where = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family))
            if address == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # A fixed port is used again by the next attempt, while connections of the last one are in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(_BACKLOG)
            stack.pop_all()
    except (OSError, UnicodeError) as error:  # A name with an empty or endless part is a UnicodeError (idna).
        raise LaunchError(
            f"{host} cannot listen at {address}:{port}: {getattr(error, 'strerror', error)}",
            "With one node leave --master-addr and --master-port out: a free port is then chosen and held.",
            RENDEZVOUS,
        ) from None
    return listener


def own(host: str, meeting: Meeting) -> tuple[socket.socket | None, tuple[str, ...]]:
    """The endpoint's socket, if ``host``, this node, owns it, and the addresses that stand for the endpoint.

    Binding tells better than any comparison of names: it fails for an address that is not this node's.

    Raises:
        LaunchError: this node is told to serve, and cannot.
    """
    if meeting.serves is False:
        return None, meeting.hosts
    if not meeting.hosts:
        addresses = (meeting.local_addr,) if meeting.local_addr else own_addresses(os.environ)
        if not addresses:
            raise LaunchError(f"{host} has no address but loopback", "Name one with --local-addr.", RENDEZVOUS)
        return _first_free(host, addresses[0] if len(addresses) == 1 else any_address(), meeting), addresses
    try:
        return _first_free(host, bindable(meeting.hosts[0]), meeting), meeting.hosts
    except LaunchError as error:
        if meeting.serves:
            has = ", ".join(own_addresses(os.environ)) or "loopback only"
            hint = "The endpoint must be an address of the node that serves it (node rank 0), with a free port."
            raise LaunchError(f"{error.message}; it has {has}", hint, RENDEZVOUS) from None
        return None, meeting.hosts


def _first_free(host: str, address: str, meeting: Meeting) -> socket.socket:
    """A socket on the first of the ports that are agreed on which is free.

    Raises:
        LaunchError: none is, or the address is not this node's.
    """
    for port in (meeting.port, *meeting.other_ports)[:-1]:
        with contextlib.suppress(LaunchError):
            return listen(host, address, port)
    return listen(host, address, (meeting.port, *meeting.other_ports)[-1])


def is_here(name: str) -> bool:
    """Whether this node could listen at the name or address, at some port."""
    try:
        listen("", bindable(name), 0).close()
    except LaunchError:
        return False
    return True


def own_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """This node's addresses for other machines, best first: the one that ssh came in by, then those of networks.

    Addresses of bridges for containers and virtual machines come last: every host has the same.
    """
    import psutil

    stats = psutil.net_if_stats()
    found: dict[str, bool] = {}
    by_ssh = environ.get("SSH_CONNECTION", "").split()
    if len(by_ssh) == 4:
        found[by_ssh[2].removeprefix("::ffff:")] = False
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        for address in addresses:
            if address.family in (socket.AF_INET, socket.AF_INET6) and name in stats and stats[name].isup:
                found.setdefault(address.address, bool(_BRIDGE.match(name)))
    usable = [address for address in found if not _LOCAL_ONLY.match(address)]
    return tuple(sorted(usable, key=lambda address: (found[address], ":" in address and len(by_ssh) < 4)))


def address_of(host: str, interface: str) -> str:
    """The address of a network interface of ``host``, this node; IPv4 before IPv6.

    Raises:
        LaunchError: it has none.
    """
    import psutil

    there = psutil.net_if_addrs()
    found = [each.address for each in there.get(interface, ()) if each.family in (socket.AF_INET, socket.AF_INET6)]
    if not found:
        names = ", ".join(name for name in sorted(there) if name != "lo")
        raise LaunchError(
            f"--interface {interface}: {host} has no address there", f"It has {names}.", RENDEZVOUS
        ) from None
    return str(min(found, key=lambda address: ":" in address))


def interface_of(address: str) -> str:
    """Name of the network interface that has ``address``; empty for loopback, or if none has."""
    import psutil

    for name, addresses in psutil.net_if_addrs().items():
        if name != "lo" and any(each.address == address for each in addresses):
            return str(name)
    return ""


def any_address() -> str:
    """Stands for all addresses of this node."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def bindable(name: str) -> str:
    """What to listen at for ``name``: all addresses where it means loopback only here (Debian: 127.0.1.1)."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return name
    return "0.0.0.0" if name not in ("localhost", address) and address.startswith("127.") else name


def route_address(host: str, name: str, port: int) -> str:
    """The address of ``host``, this node, on the way to ``name``; nothing is sent.

    Raises:
        LaunchError: the name or address means nothing here.
    """
    try:
        found = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)
        family, kind, _, _, where = found[0]
        with socket.socket(family, kind) as probe:
            probe.connect(where)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{host} cannot reach {name}:{port}: {getattr(error, 'strerror', error)}",
            "Give an address that every node knows, or add the name to /etc/hosts.",
            RENDEZVOUS,
        ) from None
