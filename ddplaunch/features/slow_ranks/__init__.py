"""The slow ranks: which rank, host or GPU holds up the others while a job runs, and by how much.

The agents time the collectives of their workers, the launcher compares the nodes. Uses the flight records of
``features.hangs``. Must not import torch.
"""

EVENTS = {
    "slow_rank": "a rank, or a host, for which the others wait",
}
