"""Which network interfaces lead to other nodes: not bridges of containers and virtual machines, and not most tunnels.

NCCL itself takes the interfaces whose name begins with ``ib``, or if there is none all but ``docker*``, ``lo`` and, in
its newest versions, ``virbr*``; of these the first one to meet. An address that is equal on all nodes, or that no other
node reaches, blocks the start (``ncclFindInterfaces`` in NCCL's socket.cc). No route is asked for about each interface:
a second network has none to the addresses of the first.
"""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from ddplaunch.errors import LaunchError
from ddplaunch.system import network, procfs

VARIABLE = "NCCL_SOCKET_IFNAME"
_MAX_NAMES = 16
"""NCCL reads no more."""

_ANY_PORT = 9
"""A route does not depend on it."""

_NOT_BY_NCCL = ("docker", "lo")
_OF_CONTAINERS = ("veth", "cali", "lxc")
"""Ends of cables to containers of this machine, by the names that container networks give them."""

_TUNNELS = ("vxlan", "geneve", "wireguard")


def interface_to(address: str) -> str:
    """The interface on the kernel's route to the address; empty for loopback, or if there is none. Sends nothing."""
    try:
        ipaddress.ip_address(address)  # A name would be looked up.
        source = network.route_address("", address, _ANY_PORT)
    except (ValueError, LaunchError):
        return ""
    return network.interface_environ(source, is_chosen=False).get("GLOO_SOCKET_IFNAME", "")


def choice(
    interfaces: Mapping[str, Sequence[str]], leading: Collection[str], root: str = "/"
) -> tuple[list[str], list[str]]:
    """Of the interfaces with these addresses those for NCCL, and those that it must not use.

    ``leading``: those that lead to other nodes. None is wrong if NCCL would not use it, as where one of InfiniBand has
    an address.
    """
    usual = [name for name in interfaces if name in leading or not name.startswith(_NOT_BY_NCCL)]
    if any(name.startswith("ib") for name in interfaces):
        return [], []
    own = [name for name in usual if name in leading]
    others = [name for name in usual if name not in leading]
    is_routed = any(not is_of_one_cable(address) for name in own for address in interfaces[name])
    wrong = [
        name
        for name in others
        if leads_nowhere(name, root) or (is_routed and all(map(is_of_one_cable, interfaces[name])))
    ]
    return [*own, *(name for name in others if name not in wrong)][:_MAX_NAMES], wrong


def is_of_one_cable(address: str) -> bool:
    """Whether no router passes the address on, as that of a management controller: link-local, IPv4 or IPv6."""
    return address.startswith("169.254.") or address.lower().startswith("fe80:")


def leads_nowhere(name: str, root: str = "/") -> bool:
    """Whether an interface connects this machine only with containers and virtual machines on it, or is a tunnel."""
    folder = Path(root, "sys/class/net", name)
    kind = _kind(folder)
    if kind == "bridge":
        ports = (folder.parent / port.name for port in (folder / "brif").glob("*"))
        return not any(os.path.exists(port / "device") or _kind(port) in ("bond", "vlan") for port in ports)
    return kind in _TUNNELS or os.path.exists(folder / "tun_flags") or name.startswith(_OF_CONTAINERS)


def _kind(folder: Path) -> str:
    lines = procfs.read(str(folder / "uevent")).decode(errors="replace").splitlines()
    return next((line.partition("=")[2] for line in lines if line.startswith("DEVTYPE=")), "")
