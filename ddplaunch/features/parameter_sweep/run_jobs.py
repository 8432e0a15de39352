"""Runs the jobs of ``--sweep``: in the process that the user started, or in ``own_process``; in its main thread."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from ddplaunch import features
from ddplaunch.errors import Level
from ddplaunch.features.parameter_sweep import job_lines, job_process, places, results
from ddplaunch.features.parameter_sweep.results import JobResult
from ddplaunch.features.runs import run_folders
from ddplaunch.launcher import run_facts
from ddplaunch.launcher.display import console_log, report_files
from ddplaunch.protocol import environment
from ddplaunch.protocol.run_result import RunResult
from ddplaunch.system import procfs, run_tags
from ddplaunch.system.files import kept_files, run_folder
from ddplaunch.text import elapsed, escape, iso_time, plural

if TYPE_CHECKING:
    from pathlib import Path

    from ddplaunch.config import LaunchConfig
    from ddplaunch.features.parameter_sweep.places import Gpus
    from ddplaunch.features.parameter_sweep.results import SweepResult
    from ddplaunch.system.files.run_folder import RunFacts

JOB_VARIABLE = "DDPLAUNCH_SWEEP_JOB"
"""Number of its job, for the workers."""

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
_TABLE_S, _FILES_S = 1.0, 1.0
_KEEPER_S = 60.0


def run(config: LaunchConfig, run_id: str, folder: Path, *, is_detached: bool) -> SweepResult:
    """Run all jobs and return the result: exit code 0 if all have succeeded, 1 if one has failed.

    ``folder`` is that of all jobs; ``is_detached``: console.log in it is stdout and stderr. The process must have no
    other threads, since it is forked. Then no process of the jobs is left.

    Raises:
        UsageError: what the jobs need does not fit this machine.
    """
    before = results.earlier(config) if config.retry_failed else None
    found = places.of_jobs(config)
    tag = run_tags.new_run_tag(run_id, is_unique=not config.run_id)
    with run_tags.launcher_memfd(tag), wakeups() as (wakeup, handled):
        facts = run_facts.of_this_process(run_id, tag, config)
        jobs = [JobResult(number=number, arguments=job) for number, job in enumerate(config.sweep_jobs, 1)]
        if before:
            jobs = results.not_done(before, jobs)
        run_facts.write(facts, folder)
        screen = _Screen(config, folder, is_detached=is_detached)
        sweep = _Sweep(config, run_id, folder, jobs, found, screen, wakeup, handled)
        return _finished(sweep, facts, folder)


def _finished(sweep: _Sweep, facts: RunFacts, folder: Path) -> SweepResult:
    begun = time.monotonic()
    sweep.run()
    failed = sum(job.state == "failed" for job in sweep.jobs)
    signum = sweep.stopped_by
    result = RunResult(
        run_id=facts.run_id,
        exit_code=128 + signum if signum else int(failed > 0),
        outcome="stopped" if signum else "failed" if failed else "succeeded",
        duration_s=round(time.monotonic() - begun, 3),
        signal=signal.Signals(signum).name if signum else None,
        run_dir=str(folder),
        reason=f"{failed} of {plural(len(sweep.jobs), 'job')} failed" if failed else "",
        command=facts.command,
        cwd=facts.cwd,
        start=facts.start,
        end=iso_time(time.time()),
    )
    report_files.write_report(result, folder)
    if problem := kept_files.not_written(folder):
        sweep.screen.say(f"warning: {problem}")
    return results.SweepResult(**vars(result), jobs=tuple(sweep.jobs))


@contextlib.contextmanager
def wakeups() -> Iterator[tuple[int, list[int]]]:
    """A descriptor from which the numbers of the signals are read that arrive, and which signals these are."""
    reader, writer = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    handled = [int(signum) for signum in SIGNALS if signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, lambda *_: None) for signum in handled}
    signal.set_wakeup_fd(writer)
    try:
        yield reader, handled
    finally:
        signal.set_wakeup_fd(-1)
        for signum, handler in before.items():
            signal.signal(signum, handler)
        os.close(reader)
        os.close(writer)


class _Running(NamedTuple):
    """A job whose launcher runs: its index among the jobs, and that of its GPUs."""

    job: int
    pid: int
    place: int


class _Sweep:
    """All jobs.

    Attributes:
        jobs: what is known of each, in their order.
        stopped_by: number of the signal that has stopped them; 0: none has.
        screen: what the user sees.
    """

    def __init__(
        self,
        config: LaunchConfig,
        run_id: str,
        folder: Path,
        jobs: list[JobResult],
        found: Sequence[Gpus],
        screen: _Screen,
        wakeup: int,
        handled: list[int],
    ) -> None:
        self.jobs = jobs
        self.stopped_by = 0
        self._config, self._run_id, self._folder, self.screen = config, run_id, folder, screen
        self._places, self._wakeup, self._handled = found, wakeup, handled
        self._free = list(range(len(found)))
        self._waiting = [index for index, job in enumerate(jobs) if job.state == "waiting"][::-1]
        self._running: dict[int, _Running] = {}
        self._is_stopping = False
        self._due, self._written_s = 0.0, 0.0

    def run(self) -> None:
        """Run all jobs. Then none of their processes is left."""
        what = f"{plural(len(self._waiting), 'job')}, {len(self._places)} at a time; results in {self._folder}"
        self.screen.say(what, Level.NORMAL)
        _share_cpus(self._config, self._places)
        with _keeper(self._config, self._wakeup):
            job_process.load(self._config)
            self._start_more()
            while self._running:
                self._wait()
                self._start_more()
        self._write(is_last=True)
        self.screen.end(self.jobs)
        if failed := [job for job in self.jobs if job.state == "failed"]:
            where = f"{self._run_id}/{failed[0].run_id.rpartition('-')[2]}"
            self.screen.say(f"{len(failed)} failed; the logs of one: ddplaunch --logs {where}", Level.NORMAL)

    def _start_more(self) -> None:
        while self._free and self._waiting and not self._is_stopping:
            self._start(self._waiting.pop(), self._free.pop(0))
        self._write()
        self.screen.refresh(self.jobs)

    def _start(self, index: int, place: int) -> None:
        job = self.jobs[index]
        run_id = f"{self._run_id}-{job.number:0{len(str(len(self.jobs)))}d}"
        base = self._folder / run_folders.JOBS
        config = places.of_job(self._config, job.arguments, self._places[place])
        variables = (*config.remote.environ, (JOB_VARIABLE, str(job.number)))
        remote, output = replace(config.remote, environ=variables), replace(config.output, log_dir=str(base))
        config = replace(config, run_id=run_id, remote=remote, output=output)
        job = self.jobs[index] = replace(job, state="running", start_t=round(time.time(), 3), run_id=run_id)
        try:
            folder = run_folder.create(base, run_id)
            pid = job_process.start(config, run_id, folder, self._folder, self._handled)
            self._running[os.pidfd_open(pid)] = _Running(index, pid, place)
        except OSError as error:
            self._free.append(place)
            failure = f"it cannot be started: {error.strerror}"
            self._end(index, replace(job, state="failed", failure=failure))
            return
        self.jobs[index] = replace(job, folder=str(folder))
        self.screen.say(f"job {job.number} starts: {job_lines.text(job.arguments)}", Level.VERBOSE)

    def _wait(self) -> None:
        """Wait for the end of a job, for a signal, or until the table is to be shown again."""
        poll = select.poll()
        for fd in (self._wakeup, *self._running):
            poll.register(fd, select.POLLIN)
        for fd, _ in poll.poll(_TABLE_S * 1000):
            if fd == self._wakeup:
                for signum in os.read(fd, 64):
                    self._stop(signum)
            else:
                self._on_end(fd)

    def _stop(self, signum: int) -> None:
        if signum in self._handled:
            self.stopped_by = self.stopped_by or signum
            self.screen.say(f"{signal.Signals(signum).name}: {plural(len(self._running), 'job')} are stopped")
            self._stop_jobs()

    def _stop_jobs(self) -> None:
        """Stop all; those that are asked again are no longer given time."""
        self._is_stopping = True
        for fd in self._running:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(fd, signal.SIGTERM)

    def _on_end(self, fd: int) -> None:
        running = self._running.pop(fd)
        os.close(fd)
        code = os.waitstatus_to_exitcode(os.waitpid(running.pid, 0)[1])
        self._free.append(running.place)
        ended = self.jobs[running.job].ended(code, is_stopped=self._is_stopping)
        self._end(running.job, ended)

    def _end(self, index: int, job: JobResult) -> None:
        self.jobs[index] = job
        why = f": {job.failure}" if job.failure else ""
        what = f"job {job.number} of {len(self.jobs)} {job.state} after {elapsed(job.seconds)}{why}"
        self.screen.say(what, Level.NORMAL if job.failure or not self.screen.is_terminal else Level.VERBOSE)
        if job.state == "failed" and self._config.stop_on_failure and not self._is_stopping:
            self.screen.say(f"--stop-on-failure: {plural(len(self._running), 'other job')} stopped, no more started")
            self._stop_jobs()

    def _write(self, *, is_last: bool = False) -> None:
        """Write the files of the results, if that is not too often: with thousands of jobs it takes a while."""
        begun = time.monotonic()
        if is_last or begun >= self._due:
            results.write(self._folder, self._config, self.jobs)
            now = time.monotonic()
            self._due = now + max(_FILES_S, 20 * (now - begun))


def _share_cpus(config: LaunchConfig, found: Sequence[Gpus]) -> None:
    """Divide the CPUs among all jobs that run at a time, as a run divides them among its workers."""
    if len(found) > 1:
        threads = str(places.threads(config, found))
        for name in ("OMP_NUM_THREADS", "TORCHINDUCTOR_COMPILE_THREADS"):
            os.environ.setdefault(name, threads)


@contextlib.contextmanager
def _keeper(config: LaunchConfig, wakeup: int) -> Iterator[None]:
    """Have torch imported once for all jobs, and wait for it; without it, each job imports torch.

    The keeper ends with the block, or with this process if that is killed, unless the user has told it to stay.
    """
    pid = _leave_keeper(config, wakeup)
    try:
        yield
    finally:
        if pid and config.keep_warm_s is None:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGTERM)
                os.waitpid(pid, 0)


def _leave_keeper(config: LaunchConfig, wakeup: int) -> int | None:
    """Its pid, if one has been started; it is ready, or has ended."""
    from ddplaunch.features.warm import early_agent, keeper_files, keeper_start
    from ddplaunch.features.warm.records import KeeperSpec
    from ddplaunch.protocol import wire

    path = keeper_files.path(os.environ)
    text = early_agent.for_agent(replace(config, keep_warm_s=config.keep_warm_s or _KEEPER_S))
    if config.keep_warm_s == 0 or config.entry == "program" or path is None or text is None:
        return None
    spec: KeeperSpec = wire.decode(text.encode(), (KeeperSpec,))
    if config.keep_warm_s is None:
        spec = replace(spec, watched=(os.getpid(),))
    spec = replace(spec, script=spec.script and os.path.abspath(spec.script))
    env = {**os.environ, **_set_before_imports(config)}
    try:
        pid = keeper_start.start(spec, env, resource.getrlimit(resource.RLIMIT_NOFILE))
        with procfs.pidfd(pid) as fd:
            while (
                not os.path.exists(path) and not select.select([wakeup, *([] if fd is None else [fd])], [], [], 0.02)[0]
            ):
                pass
    except OSError:
        return None
    return pid


def _set_before_imports(config: LaunchConfig) -> dict[str, str]:
    workers = places.workers_of_job(config)
    found: dict[str, str] = {}
    for each in features.call_each("default_environ", config, os.environ, workers):
        found.update(each)
    return {name: value for name, value in found.items() if name in environment.SET_BEFORE_IMPORTS}


class _Screen:
    """What the user sees: lines, on a terminal a table below them, and at the end the table of all jobs."""

    def __init__(self, config: LaunchConfig, folder: Path, *, is_detached: bool) -> None:
        self._verbosity = config.output.verbosity
        self.is_terminal = not is_detached and sys.stderr is not None and os.isatty(2)
        self._log = None if is_detached else kept_files.open_to_append(folder / console_log.FILE)
        self._shown, self._due = 0, 0.0

    def say(self, text: str, level: Level = Level.ALWAYS) -> None:
        """Show a line."""
        if level <= self._verbosity:
            self._show([f"ddplaunch: {escape(text)}"], 2)

    def refresh(self, jobs: Sequence[JobResult]) -> None:
        """Show the table anew, if it is time."""
        if not self.is_terminal or self._verbosity < 0 or time.monotonic() < self._due:
            return
        self._due = time.monotonic() + _TABLE_S / 2
        size = os.get_terminal_size(2)
        lines = [line[: size.columns or None] for line in results.live_table(jobs, size.lines or 24)]
        self._write(2, f"{self._clear()}{''.join(f'{line}{os.linesep}' for line in lines)}")
        self._shown = len(lines)

    def end(self, jobs: Sequence[JobResult]) -> None:
        """Show the table of all jobs on stdout."""
        self._show([results.last_table(jobs)], 1)

    def _show(self, lines: Sequence[str], fd: int) -> None:
        text = "".join(f"{line}\n" for line in lines)
        self._write(2, self._clear())
        self._write(fd, text)
        if self._log is not None:
            with contextlib.suppress(OSError):
                os.write(self._log, text.encode("utf-8", "backslashreplace"))

    def _clear(self) -> str:
        """What removes the table from the terminal."""
        shown, self._shown = self._shown, 0
        return f"\x1b[{shown}F\x1b[J" if shown else ""

    def _write(self, fd: int, text: str) -> None:
        if text:
            with contextlib.suppress(OSError):  # The reader has gone, or the disk is full: the jobs go on.
                os.write(fd, text.encode("utf-8", "backslashreplace"))
