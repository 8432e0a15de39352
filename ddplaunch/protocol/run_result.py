"""The result of a run: what ``launch`` returns and report.json shows.

Made in the launcher, at the end of a run. A field of ``RunResult`` is a key of report.json, and so are those of the
classes in it. Frozen values. ``*_s`` are seconds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from ddplaunch.cluster.scheduled import SlurmJob
from ddplaunch.errors import JobFailed
from ddplaunch.late_dataclass import dataclass
from ddplaunch.protocol.field_types import Count, ExitCode, Seconds
from ddplaunch.protocol.results import AttemptResult, HealthFinding, Outcome, WorkerExit
from ddplaunch.text import plural, quote, ranks


@dataclass(frozen=True)
class RankLateness:
    """How late a rank called collectives, in the samples that were taken while the job ran.

    Attributes:
        collectives: number of collectives of all its process groups that were looked at.
        delayed: number of those in which ranks waited noticeably for each other.
        last: number of the delayed ones in which it was the last to call.
        median_s: seconds that it was behind the middle of all ranks, where it was the last; of the newest 1,000.
        p95_s: as ``median_s``: 95 % of them were less.
        cost_share: share of the time, from 0 to 1, for which the job waited for this rank only.
        warning: the sentence that was shown about this rank, or about its host; empty if there was none.
    """

    rank: int
    host: str
    collectives: int = 0
    delayed: int = 0
    last: int = 0
    median_s: float = 0.0
    p95_s: float = 0.0
    cost_share: float = 0.0
    warning: str = ""

    @property
    def last_share(self) -> float:
        """Share of the delayed collectives in which it was the last."""
        return self.last / self.delayed if self.delayed else 0.0


@dataclass(frozen=True)
class Injected:
    """The effect of one ``--inject``.

    Attributes:
        text: the fault as the user wrote it, shortened to 200 characters.
        after_s: seconds from the start of the attempt to the fault; None: it did not happen.
        account: one sentence: what happened, and how the job continued.
    """

    text: str
    after_s: float | None
    account: str


@dataclass(frozen=True)
class Versions:
    """Versions of a run's software; empty for one that is not known.

    Attributes:
        python: version of the interpreter that runs the workers, on the first node.
        torch: version of torch in that interpreter.
        commit: the first 7 digits of the commit, where ddplaunch runs from a checkout.
    """

    ddplaunch: str
    python: str = ""
    torch: str = ""
    commit: str = ""


@dataclass(frozen=True)
class NodeOfRun:
    """A node that has taken part in a run, or was ready to.

    Attributes:
        workers: number of its workers.
        cpus: number of CPUs that its processes may use; 0 if it is not known.
        gpus: models of the GPUs that its workers may use; an empty text for an unknown model.
    """

    host: str
    workers: int
    cpus: int = 0
    gpus: tuple[str, ...] = ()


@dataclass(frozen=True)
class CodeOfRun:
    """The snapshot of the code that the workers have run.

    Attributes:
        folder: path of the snapshot.
        root: folder of which it is a copy.
        commit: of the git repository when it was copied; empty: there is none.
        branch: as ``commit``.
        modified: number of files that differ from the commit; code.diff in the run folder has the differences.
        untracked: number of files that git does not have.
    """

    folder: str
    root: str
    commit: str = ""
    branch: str = ""
    modified: Count = 0
    untracked: Count = 0

    @property
    def version(self) -> str:
        """Commit, branch and changes, for the user."""
        if not self.commit:
            return "no commit"
        branch = f" ({self.branch})" if self.branch else ""
        changes = f"{plural(self.modified, 'file')} modified, {self.untracked} untracked"
        return f"commit {self.commit[:12]}{branch}, {changes}"


@dataclass(frozen=True)
class RunResult:
    """The result of a run, as ``launch`` returns it and report.json shows it.

    Attributes:
        run_dir: run folder with the logs, report.txt and report.json; None if none was kept.
        signal: name of the signal that stopped the run, or None.
        unkillable_pids: processes that could not be ended; normally empty.
        unreachable_hosts: hosts of lost nodes that could not be searched for remaining processes.
        slurm_job: the SLURM job of the run, if there is one.
        will_requeue: the run ended so that SLURM starts it again.
        reason: why the run failed, if neither a worker nor an attempt is the reason; empty otherwise.
        command: the command line of the launcher's process, as it was typed.
        cwd: working directory of the launcher; empty if it was deleted.
        start: when the launcher started, by its clock: ISO 8601 with zone.
        end: when the run ended, as ``start``.
        hosts: the nodes that this launcher started, those that were lost included.
        collectives: the ranks by what their lateness cost, the most expensive first; empty if there was no sample. Not
            the sentences of ``AttemptResult.collectives``.
        health: what was wrong with the hardware of the nodes, in order of time.
        code: the snapshot of the code, with --snapshot.
        checkpoint: path of the newest whole checkpoint, with --checkpoint; None: there is none.
        lost_work_s: seconds of attempts that no checkpoint has, with --checkpoint.
        waited_for_gpus_s: seconds before the first attempt, with --wait-for-gpus.
    """

    run_id: str
    exit_code: ExitCode
    outcome: Outcome
    duration_s: Seconds
    attempts: tuple[AttemptResult, ...] = ()
    first_failure: WorkerExit | None = None
    signal: str | None = None
    run_dir: str | None = None
    unkillable_pids: tuple[int, ...] = ()
    unreachable_hosts: tuple[str, ...] = ()
    injections: tuple[Injected, ...] = ()
    slurm_job: SlurmJob | None = None
    will_requeue: bool = False
    reason: str = ""
    command: tuple[str, ...] = ()
    cwd: str = ""
    start: str = ""
    end: str = ""
    versions: Versions | None = None
    hosts: tuple[NodeOfRun, ...] = ()
    collectives: tuple[RankLateness, ...] = ()
    health: tuple[HealthFinding, ...] = ()
    code: CodeOfRun | None = None
    checkpoint: str | None = None
    lost_work_s: Seconds = 0.0
    waited_for_gpus_s: Seconds = 0.0

    def __repr__(self) -> str:
        """The end of the run in a line, for whoever prints it or calls ``launch`` in a notebook."""
        first = self.first_failure
        shown = {
            "run_id": self.run_id,
            "outcome": self.outcome,
            "exit_code": self.exit_code,
            "attempts": len(self.attempts),
            **({"first_failure": f"rank {first.rank} on {first.host}"} if first else {}),
            **({"reason": self.reason} if self.reason else {}),
            "run_dir": self.run_dir,
        }
        return f"<{type(self).__name__} {', '.join(f'{name}={value!r}' for name, value in shown.items())}>"

    def check(self) -> None:
        """Do nothing if the job has succeeded.

        Raises:
            JobFailed: it has failed or was stopped.
        """
        if self.outcome == "succeeded" and self.exit_code == 0:
            return
        first, last = self.first_failure, self.attempts[-1] if self.attempts else None
        reason = last.reason if last else ""
        if self.outcome == "succeeded":
            reason = f"the workers have succeeded, but processes are left: {', '.join(map(str, self.unkillable_pids))}"
        if first:
            reason = first.error.message if first.error else f"returncode {first.returncode}"
            reason = f"rank {first.rank} on {first.host} failed: {reason}"
        message = quote(reason, 1000) or f"the job was stopped ({self.signal})"
        raise JobFailed(message, self._where_logs, self.exit_code)

    @property
    def _where_logs(self) -> str:
        return f"Its report and logs: {self.run_dir}" if self.run_dir else ""


@dataclass(frozen=True)
class FunctionResult(RunResult):
    """The result of a run whose workers call a function.

    Attributes:
        return_values: what the function has returned, by rank; empty unless the job has succeeded. Of the ranks that
            this launcher has started.
    """

    return_values: Mapping[int, object] = field(default_factory=dict)
    __repr__ = RunResult.__repr__

    def check(self) -> None:
        """Do nothing if the job has succeeded, and every rank has returned a value.

        Raises:
            JobFailed: it has failed or was stopped; or, with exit code 1, a rank has ended itself, as by
                ``sys.exit(0)``.
        """
        super().check()
        started = (exit_.rank for attempt in self.attempts[-1:] for exit_ in attempt.exits)
        if missing := [rank for rank in started if rank not in self.return_values]:
            message = f"no return value of {ranks(missing)}: they ended themselves, or the file could not be copied"
            raise JobFailed(message, self._where_logs, exit_code=1)
