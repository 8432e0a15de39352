"""Keeps NCCL away from network interfaces that lead to no other node: bridges of containers, virtual machines, VPNs.

Runs in the agent, in its main thread. NCCL itself leaves out only ``docker*`` and ``lo``, and takes all others, or the
first of them to meet: an address that is equal on all nodes, or that no other node reaches, blocks the start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import network, procfs

VARIABLE = "NCCL_SOCKET_IFNAME"
_MAX_NAMES = 16
"""NCCL reads no more."""

_NOT_BY_NCCL = ("docker", "lo")
_OF_CONTAINERS = ("veth", "cali", "lxc")
"""Ends of cables to containers of this machine, by the names that container networks give them."""

_TUNNELS = ("vxlan", "geneve", "wireguard")


class NcclPart(Part):
    """Chooses the interfaces where NCCL's own choice would have a wrong one."""

    _was_told = False

    def default_environ(self) -> Mapping[str, str]:
        """As ``Part.default_environ``: nothing where the user, or ``--interface``, has chosen."""
        spec, joined = self._node.spec, self._node.rendezvous.default_environ
        own = joined.get("GLOO_SOCKET_IFNAME", "")
        if spec.dry_run or not self._node.placement.visible or not own or VARIABLE in {**os.environ, **joined}:
            return {}
        names, wrong = choice(network.interfaces(), own)
        if not wrong:
            return {}
        value = f"={','.join(names)}"
        if not self._was_told:
            self._was_told = True
            lead = "does" if len(wrong) == 1 else "do"
            text = f"NCCL would also use {', '.join(wrong)}, which {lead} not lead to other nodes: {VARIABLE}={value}"
            self._node.outbox.send(Notice(f"{spec.host}: {text}"))
        return {VARIABLE: value}


def choice(names: Sequence[str], own: str, root: str = "/") -> tuple[list[str], list[str]]:
    """Of the interfaces with an address those for NCCL, and those that it must not use; ``own`` leads to other nodes.

    None is wrong if NCCL would not use it, as where one of InfiniBand has an address.
    """
    usual = [name for name in names if name == own or not name.startswith(_NOT_BY_NCCL)]
    if any(name.startswith("ib") for name in names):
        return [], []
    wrong = [name for name in usual if name != own and leads_nowhere(name, root)]
    return [own, *(name for name in usual if name not in (own, *wrong))][:_MAX_NAMES], wrong


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


def part(node: NodeServices) -> NcclPart:
    """The part of an agent."""
    return NcclPart(node)
