"""This node's part in the rendezvous: a single node's own rounds, or those agreed with other nodes over a store.

Runs in the agent, without torch: the member, which is a process of its own, speaks to the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddplaunch.agent.rendezvous.single_node import AgentCallbacks, Rendezvous
    from ddplaunch.protocol.specs import AgentSpec


def choose(spec: AgentSpec, local_world_size: int, callbacks: AgentCallbacks) -> Rendezvous:
    """The rendezvous for ``spec``, for a node of ``local_world_size`` workers.

    A single node starts faster without the modules of several.
    """
    if not spec.rendezvous and not spec.launcher_assigns_rendezvous:
        from ddplaunch.agent.rendezvous.single_node import SingleNodeRendezvous

        return SingleNodeRendezvous(spec, local_world_size, callbacks)
    from ddplaunch.agent.rendezvous.multi_node import MultiNodeRendezvous

    return MultiNodeRendezvous(spec, local_world_size, callbacks)
