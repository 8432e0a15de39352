"""A worker whose scheduler started a separate ddplaunch process for it, with the ranks that the scheduler gave it.

Made by ``schedulers`` in the launcher, used by the agent of this only worker. Pure.
"""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True)
class ScheduledTask:
    """One worker of a job whose scheduler starts every worker separately.

    Attributes:
        node_rank: number of this worker's node; None if the ranks are not contiguous per node, which ``check_counts``
            rejects.
        tasks_per_node: numbers of workers of all nodes, in order; empty if only this node's number is known and the
            numbers differ.
    """

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int | None
    tasks_per_node: tuple[int, ...]

    def environ(self) -> dict[str, str]:
        """The worker's variables in the whole job; an agent with one worker would set other values.

        Call ``check_counts`` first.
        """
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
