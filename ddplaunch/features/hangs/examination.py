"""An examination of all nodes: the answers that have come, and what they say. Runs in the launcher, main thread."""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING

from ddplaunch.features.hangs.records import NodeEvidence, RankEvidence
from ddplaunch.late_dataclass import dataclass

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from ddplaunch.features.hangs.explanation import Explanation
    from ddplaunch.features.hangs.records import WorkersExamined

EXAMINATION_S = 20.0
"""Seconds for a node's answer to ExamineWorkers: with a suspended worker and without NCCL's answer it takes 8 s."""


@dataclass
class Examination:
    """One question to all nodes, ended by the last answer or at ``deadline``.

    Attributes:
        number: of the ExamineWorkers; 0: nobody has asked, the nodes answer before a stop.
        expected: the nodes that answer; empty until that is known.
        all_nodes_at: as in WorkersExamined.
    """

    number: int
    attempt: int
    deadline: float
    expected: set[int]
    answered: set[int] = field(default_factory=set)
    ranks: list[RankEvidence] = field(default_factory=list)
    nodes: list[NodeEvidence] = field(default_factory=list)
    all_nodes_at: str = ""

    def take(self, index: int, participants: Sequence[int], answer: WorkersExamined) -> bool:
        """Take the answer of node ``index``, one of ``participants``. Returns whether all have answered with it."""
        if answer.number != self.number or index in self.answered:
            return False
        self.answered.add(index)
        self.ranks.extend(answer.ranks)
        self.nodes.extend([answer.node] if answer.node else [])
        self.all_nodes_at = answer.all_nodes_at
        self.expected = self.expected or set(participants)
        return not self.missing

    @property
    def missing(self) -> set[int]:
        """The nodes that have not answered."""
        return self.expected - self.answered

    def explained(self, *, output_counts: bool = True) -> Explanation:
        """What the answers say; without ``output_counts`` also of ranks that write output."""
        from ddplaunch.features.hangs.explanation import explain, explain_waiting
        from ddplaunch.features.hangs.gpus import with_gpus

        return with_gpus((explain if output_counts else explain_waiting)(self.ranks), self.nodes)

    def write(self, folder: Path | None, found: Explanation) -> Path | None:
        """Write hang.txt and hang.json to the run's ``folder``. Returns the path of the text; None if there is none."""
        from ddplaunch.features.hangs import hang_files

        if folder is None or not self.ranks:
            return None
        return hang_files.write(folder, self.attempt, self.ranks, self.nodes, found)


def load() -> None:
    """Import what explains and writes."""
    from ddplaunch.features.hangs import explanation, gpus, hang_files  # noqa: F401
