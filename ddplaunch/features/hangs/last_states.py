"""What the workers were doing when they were stopped: for the user, the failure page and the result of an attempt.

Runs in the launcher, in the main thread, at the end of attempts and of the run. Nobody asks for it then: agents examine
their workers before they stop them. What happens while a job runs is in ``launcher``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ddplaunch.errors import Level
from ddplaunch.features.hangs.examinations import Examination, tell
from ddplaunch.features.hangs.rank_state import JobState
from ddplaunch.features.hangs.records import WorkersExamined, unfolded
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import NEVER
from ddplaunch.protocol import first_failure

if TYPE_CHECKING:
    from ddplaunch.protocol.launcher_agent import Report
    from ddplaunch.protocol.results import AttemptResult
    from ddplaunch.protocol.run_result import RunResult


class LastStates(Watch):
    """Those of the workers of one run, in three cases: a collective failed, the job hung, or the run was stopped."""

    def __init__(self, run: RunServices) -> None:
        self._messages, self._folder, self._is_remote = run.messages, run.folder, not run.config.is_local
        self._at_stop = Examination(0, 0, NEVER, set())

    def on_report(self, node_index: int, participants: Sequence[int], report: Report) -> None:
        """A node stops its workers, because the run is stopped, and they had been quiet: it has examined them."""
        if isinstance(report, WorkersExamined):
            self._at_stop.take(node_index, participants, report)

    def explain(self, result: AttemptResult, evidence: Sequence[Report]) -> AttemptResult:
        """Add what the ranks knew of the collective that has failed."""
        known = [rank for each in evidence if isinstance(each, WorkersExamined) for rank in unfolded(each.ranks)]
        if not known or result.outcome == "succeeded":
            return replace(result, collectives=())
        from ddplaunch.features.hangs.explanation import explain_failure

        failures = first_failure.failures(result.exits)
        causes = [exit_.rank for exit_ in failures if not first_failure.is_consequence(exit_)]
        failed = [exit_.rank for exit_ in failures]
        return replace(result, collectives=explain_failure(sorted(known, key=lambda each: each.rank), failed, causes))

    def add_to_result(self, result: RunResult) -> RunResult:
        """Show where the workers were, if the run was stopped when it had been quiet for long."""
        if self._at_stop.ranks:
            self._show_stopped()
        return result

    def page_lines(self, result: RunResult) -> Sequence[str]:
        """Where the ranks were, if the last attempt was ended because it hung."""
        if not result.attempts or not result.attempts[-1].hung:
            return ()
        from ddplaunch.features.hangs.wording import stuck_ranks

        return stuck_ranks(result.attempts[-1], result.run_dir, is_remote=self._is_remote)

    def _show_stopped(self) -> None:
        found = self._at_stop.explained()
        if found.job_state is not JobState.MOVING:
            self._at_stop.attempt = max(answer.attempt for answer in self._at_stop.answers.values())
            path = self._at_stop.write(self._folder(), found)
            tell(self._messages, found, f"when it was stopped{f' (stacks: {path})' if path else ''}:", Level.NORMAL)
