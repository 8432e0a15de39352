"""Chooses the rendezvous of an agent. A single node starts faster without the modules of several."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ddplaunch.agent.rendezvous.single_node import SingleNodeRendezvous

if TYPE_CHECKING:
    from ddplaunch.agent.rendezvous.single_node import AgentCallbacks, Rendezvous
    from ddplaunch.protocol.specs import AgentSpec


def choose(spec: AgentSpec, local_world_size: int, callbacks: AgentCallbacks) -> Rendezvous:
    """The rendezvous for ``spec``, for a node of ``local_world_size`` workers."""
    if not spec.rendezvous and not spec.launcher_assigns_rendezvous:
        return SingleNodeRendezvous(spec, local_world_size, callbacks)
    from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous

    return MultiNodeRendezvous(spec, local_world_size, callbacks)
