"""What a scheduler has made of this process: the place of its worker in the job, and the SLURM job that it is in.

Pure. The configuration holds both: agents get the task, and report.json has the job.
"""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass


@dataclass(frozen=True)
class ScheduledTask:
    """The only worker of this launcher, where the scheduler starts a ddplaunch for every worker.

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


@dataclass(frozen=True)
class SlurmJob:
    """A job as SLURM's commands identify it.

    Attributes:
        id: number of the job; ``12_3`` for a task of an array, whose number alone may mean the whole array.
        requeue_count: how often SLURM has requeued the job.
        requeue_on: names of the signals after which ddplaunch requests a requeue of the job.
        requests_requeue: this launcher is the one of the run that requests a requeue, if --requeue-on asks for one.
    """

    id: str
    requeue_count: int = 0
    requeue_on: tuple[str, ...] = ()
    requests_requeue: bool = False
