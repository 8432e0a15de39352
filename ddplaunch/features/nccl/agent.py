"""Keeps NCCL away from network interfaces that lead to no other node. Runs in the agent, in its main thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ddplaunch.agent.parts import NodeServices, Part
from ddplaunch.features.nccl.interfaces import VARIABLE, choice, interface_to
from ddplaunch.protocol.launcher_agent import Notice
from ddplaunch.system import network

if TYPE_CHECKING:
    from ddplaunch.agent.workers.worker_group import WorkerGroup
    from ddplaunch.protocol.results import Round


class NcclPart(Part):
    """Chooses the interfaces where NCCL's own choice would have a wrong one."""

    _was_told = False
    _store = ""
    """The address of the workers' store: the first node."""

    def on_attempt(self, group: WorkerGroup, round_: Round) -> None:
        """Keep where the first node is: it is not always the one by which the nodes have met."""
        super().on_attempt(group, round_)
        self._store = round_.master_addr

    def default_environ(self) -> Mapping[str, str]:
        """As ``Part.default_environ``: nothing where the user, or ``--interface``, has chosen."""
        spec, joined = self._node.spec, self._node.rendezvous.default_environ
        own = joined.get("GLOO_SOCKET_IFNAME", "")
        if spec.dry_run or not self._node.placement.visible or not own or VARIABLE in {**os.environ, **joined}:
            return {}
        names, wrong = choice(network.interfaces(), {own, interface_to(self._store)})
        if not wrong:
            return {}
        value = f"={','.join(names)}"
        if not self._was_told:
            self._was_told = True
            lead = "does" if len(wrong) == 1 else "do"
            text = f"NCCL would also use {', '.join(wrong)}, which {lead} not lead to other nodes: {VARIABLE}={value}"
            self._node.outbox.send(Notice(f"{spec.host}: {text}"))
        return {VARIABLE: value}


def part(node: NodeServices) -> NcclPart:
    """The part of an agent."""
    return NcclPart(node)
