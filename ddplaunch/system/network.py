"""Addresses and listening sockets of this machine, and the addresses for connections from other nodes.

Runs in the agent. Interfaces are asked of the kernel: no package for that is on a host to which ddplaunch was sent.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import os
import re
import socket
import struct
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from ddplaunch.errors import RENDEZVOUS, LaunchError
from ddplaunch.text import grouped

if TYPE_CHECKING:
    from ddplaunch.config import RendezvousConfig

_BACKLOG = 4096
"""Workers that connect before the store answers wait in this queue (the kernel limits it to net.core.somaxconn)."""

_BRIDGE = re.compile(r"docker|br-|virbr|veth|cni|flannel|cali|vmnet|lxc|podman")
_LOCAL_ONLY = re.compile(r"127\.|::1$|fe80:|169\.254\.", re.IGNORECASE)

_SIOCGIFCONF, _SIOCGIFFLAGS, _RUNNING = 0x8912, 0x8913, 0x40
"""Of netdevice(7): list the IPv4 addresses; read the flags of an interface, and IFF_RUNNING of them."""

_IFREQ_BYTES, _MAX_ADDRESSES = 40, 4096
_LINK_LOCAL = 0x20
"""Scope of an address in /proc/net/if_inet6."""


def listen(host: str, address: str, port: int, *, only_reserve: bool = False) -> socket.socket:
    """A listening socket on this machine, named ``host`` in errors; port 0 takes a free one.

    ``only_reserve``: the socket does not listen. No process gets the port by chance; a server that asks for it
    with SO_REUSEADDR, as torch's store does, gets it.

    Raises:
        LaunchError: the address does not belong to this machine, or the port is in use.
    """
    try:
        family, _, _, _, bound_address = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
        with contextlib.ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family))
            if address == "::":
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            # A fixed port is used again by the next attempt, while connections of the last one are in TIME_WAIT.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(bound_address)
            if not only_reserve:
                listener.listen(_BACKLOG)
            stack.pop_all()
    except (OSError, UnicodeError) as error:  # A name with an empty or overlong label is a UnicodeError (idna).
        raise LaunchError(
            f"{host} cannot listen at {address}:{port}: {getattr(error, 'strerror', error)}",
            "Give an address of this machine and a free port; with one node leave out --master-addr and --master-port.",
            RENDEZVOUS,
        ) from None
    return listener


def bind_endpoint(host: str, rendezvous: RendezvousConfig) -> tuple[socket.socket | None, tuple[str, ...]]:
    """The rendezvous endpoint's socket if this machine, ``host``, owns the endpoint; and the endpoint's addresses.

    Binding decides on the ownership: it fails for an address of another machine. Names need not be compared.

    Raises:
        LaunchError: the settings make this node serve the endpoint, and it cannot.
    """
    if rendezvous.is_server is False:
        return None, rendezvous.server_addresses
    if not rendezvous.server_addresses:
        addresses = (rendezvous.local_addr,) if rendezvous.local_addr else own_addresses(os.environ)
        if not addresses:
            raise LaunchError(f"{host} has no address but loopback", "Give one with --local-addr.", RENDEZVOUS)
        return _first_free(host, addresses[0] if len(addresses) == 1 else any_address(), rendezvous), addresses
    try:
        address = bindable(rendezvous.server_addresses[0]) if len(rendezvous.server_addresses) == 1 else any_address()
        return _first_free(host, address, rendezvous), rendezvous.server_addresses
    except LaunchError as error:
        if rendezvous.is_server:
            addresses_here = ", ".join(own_addresses(os.environ)) or "loopback only"
            hint = "The endpoint must be an address of the node that serves it (node rank 0), with a free port."
            raise LaunchError(f"{error.message}; its addresses: {addresses_here}", hint, RENDEZVOUS) from None
        return None, rendezvous.server_addresses


def _first_free(host: str, address: str, rendezvous: RendezvousConfig) -> socket.socket:
    """A socket on the first free port of the settings.

    Raises:
        LaunchError: no port is free, or the address does not belong to this machine.
    """
    *ports, last_port = (rendezvous.port, *rendezvous.other_ports)
    for port in ports:
        with contextlib.suppress(LaunchError):
            return listen(host, address, port)
    return listen(host, address, last_port)


def with_addresses(host: str) -> str:
    """``host``, which is this machine, with some of its addresses, for messages."""
    return f"{host} ({', '.join(own_addresses(os.environ)[:4]) or 'no address but loopback'})"


def why_not_served_here(rendezvous: RendezvousConfig) -> str:
    """For messages, where no option names the server: the node with the endpoint's address serves, if it can."""
    if rendezvous.is_server is not None:
        return ""
    is_mine = is_local(rendezvous.server_addresses[0])
    return ", an address of this host whose port is taken" if is_mine else ", which is not an address of this host"


def is_local(name: str) -> bool:
    """Whether this machine can listen at the name or address, on some port."""
    try:
        listen("", bindable(name), 0).close()
    except LaunchError:
        return False
    return True


def own_addresses(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Addresses at which other machines may reach this one, best first; the address of the SSH connection is first.

    Addresses of bridges for containers and virtual machines come last, because they are equal on every host.
    """
    is_bridge: dict[str, bool] = {}
    by_ssh = environ.get("SSH_CONNECTION", "").split()
    if len(by_ssh) == 4:
        is_bridge[by_ssh[2].removeprefix("::ffff:")] = False
    for name, address in sorted(_addresses(), key=lambda each: each[0]):
        if _is_up(name):
            is_bridge.setdefault(address, bool(_BRIDGE.match(name)))
    usable = [address for address in is_bridge if not _LOCAL_ONLY.match(address)]
    return tuple(sorted(usable, key=lambda address: (is_bridge[address], ":" in address and len(by_ssh) < 4)))


def interfaces() -> dict[str, list[str]]:
    """The network interfaces that have an address and are up, in the kernel's order, with their addresses."""
    return {name: addresses for name, addresses in grouped(_addresses()).items() if _is_up(name)}


def address_of(host: str, interface: str) -> str:
    """Address of a network interface of this machine, named ``host`` in errors; IPv4 before IPv6.

    Raises:
        LaunchError: the interface does not exist or has no address.
    """
    addresses = [address for name, address in _addresses() if name == interface]
    if not addresses:
        names = ", ".join(name for _, name in sorted(socket.if_nameindex()) if name != "lo")
        raise LaunchError(
            f"--interface {interface}: {host} has no address on it", f"Its interfaces: {names}.", RENDEZVOUS
        ) from None
    return str(min(addresses, key=lambda address: ":" in address))


def interface_environ(address: str, *, is_chosen: bool) -> dict[str, str]:
    """Variables of workers for the network interface with ``address``; none for loopback, or if there is none.

    ``is_chosen``: by the user, so that NCCL must use it, too.
    """
    for name, own in _addresses():
        if name != "lo" and own == address:
            return {"GLOO_SOCKET_IFNAME": name, **({"NCCL_SOCKET_IFNAME": f"={name}"} if is_chosen else {})}
    return {}


def _addresses() -> Iterator[tuple[str, str]]:
    """The addresses of this machine, each with the name of its network interface; IPv4 first."""
    buffer = array.array("B", bytes(_IFREQ_BYTES * _MAX_ADDRESSES))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFCONF, struct.pack("iP", len(buffer), buffer.buffer_info()[0]))
    for start in range(0, struct.unpack("iP", answer)[0], _IFREQ_BYTES):
        name, address = struct.unpack_from("16s4x4s", buffer, start)
        yield os.fsdecode(name.partition(b"\0")[0]), socket.inet_ntoa(address)
    with contextlib.suppress(FileNotFoundError), open("/proc/thread-self/net/if_inet6") as file:
        for digits, _, _, scope, _, name in map(str.split, file):
            text = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
            yield name, f"{text}%{name}" if int(scope, 16) == _LINK_LOCAL else text


def _is_up(name: str) -> bool:
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        answer = fcntl.ioctl(asked, _SIOCGIFFLAGS, struct.pack("16s24x", os.fsencode(name)))
        return bool(struct.unpack_from("16sH", answer)[1] & _RUNNING)
    return False


def any_address() -> str:
    """The wildcard address, for listening at all addresses of this machine."""
    return "::" if socket.has_dualstack_ipv6() else "0.0.0.0"


def bindable(name: str) -> str:
    """Address to listen at for ``name``: all addresses if it resolves to loopback here (Debian: 127.0.1.1)."""
    try:
        address = str(socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError):
        return name
    return "0.0.0.0" if name not in ("localhost", address) and address.startswith("127.") else name


def route_address(host: str, name: str, port: int) -> str:
    """Local address of the route from this machine, ``host``, to ``name``; sends nothing.

    Raises:
        LaunchError: the name cannot be resolved, or there is no route.
    """
    try:
        family, kind, _, _, remote_address = socket.getaddrinfo(name, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(remote_address)
            return str(probe.getsockname()[0])
    except (OSError, UnicodeError) as error:
        raise LaunchError(
            f"{host} cannot reach {name}:{port}: {getattr(error, 'strerror', error)}",
            "Give an address that every node can resolve, or add the name to /etc/hosts.",
            RENDEZVOUS,
        ) from None
