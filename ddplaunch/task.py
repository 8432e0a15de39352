"""A worker that a scheduler started by itself: its place in the job is known before any agent."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """One worker of many, each of which the scheduler started through a ddplaunch of its own.

    Attributes:
        node_rank: None where the ranks are not dealt out node by node, and nobody tells; ``check_counts`` refuses it.
        tasks_per_node: all nodes', in their order; empty where they do not come out even, and nobody tells.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int | None
    tasks_per_node: tuple[int, ...]

    def environ(self) -> dict[str, str]:
        """The worker's variables that an agent with one worker gets wrong; ``check_counts`` comes first."""
        return {
            "RANK": str(self.rank),
            "LOCAL_RANK": str(self.local_rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(self.node_rank),
            "GROUP_WORLD_SIZE": str(len(self.tasks_per_node)),
            "ROLE_RANK": str(self.rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
        }
