"""The query of ``--stacks`` to an agent without a run, and its answer. No behaviour belongs here."""

from __future__ import annotations

from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.control import RunExamined
from ddplaunch.protocol.field_types import OneLine, Pid


@dataclass(frozen=True)
class ExamineRuns:
    """Launcher to agent: have launchers on this machine, each a pid and a run tag, examine their workers.

    Answered by RunsExamined, after at most ``control.ANSWER_S``.
    """

    launchers: tuple[tuple[Pid, OneLine], ...]


@dataclass(frozen=True)
class LauncherAnswer:
    """What the launcher ``pid`` has answered to ExamineRun; ``problem`` says why there is no answer."""

    pid: Pid
    examined: RunExamined | None = None
    problem: OneLine = ""


@dataclass(frozen=True)
class RunsExamined:
    """Agent to launcher, in answer to ExamineRuns: one answer for each launcher."""

    answers: tuple[LauncherAnswer, ...]


TO_AGENT = {ExamineRuns: "launcher_query"}
FROM_AGENT = (RunsExamined,)
