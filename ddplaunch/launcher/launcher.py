"""The run as the user sees it: one agent per node, one console, one verdict.

``launch`` runs in the user's process: the ``ddplaunch`` command's, or any that imports the package. The calling
thread owns all state; its only wait is ``mailbox.get``.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from typing import TYPE_CHECKING

from ddplaunch import environ, errors, verdict
from ddplaunch.errors import LaunchError
from ddplaunch.launcher import events, report, run_folder, signals
from ddplaunch.launcher.console import Console
from ddplaunch.launcher.local import NO_ROOM_HINT, AgentLost, LocalHandle, inheritable_stdin, sweep
from ddplaunch.launcher.preparation import agent_spec, make_folder, shared_terminals, style
from ddplaunch.launcher.signals import Signalled
from ddplaunch.mailbox import Mailbox
from ddplaunch.model import AttemptResult, Outcome, RunResult
from ddplaunch.records import (
    AgentEnded,
    AgentFailed,
    AgentReady,
    AttemptEnded,
    AttemptStarted,
    Notice,
    PassSignal,
    StopWorkers,
)

if TYPE_CHECKING:
    from ddplaunch.config import LaunchConfig

_SECOND_GRACE_S = 2.0
_AGENT_OVERTIME_S = 20.0
"""What an agent may need beyond the grace: reaping, sweeping and draining all have deadlines that add up to less."""

_STALL_S, _STOPPED_STALL_S = 10.0, 2.0
"""How long a screen that takes nothing is waited for at the end; less once the user wants the end."""

_PASSED_ON = ("SIGUSR1", "SIGUSR2")


def launch(config: LaunchConfig) -> RunResult:
    """Run the job to its end and return the verdict; nothing of it runs any more, but what ``left`` names.

    From the main thread, signals are handled as the command does until it returns; from another they are left alone.

    Raises:
        LaunchError: the job could not be started, or an agent was lost.
    """
    mailbox: Mailbox[object] = Mailbox()
    with signals.posted((*config.signals, *_PASSED_ON), mailbox.post):
        return _Run(config, mailbox).run()


class _Run:
    """The state of one run."""

    def __init__(self, config: LaunchConfig, mailbox: Mailbox[object]) -> None:
        self._config = config
        self._mailbox = mailbox
        self._host = socket.gethostname().split(".")[0] or "localhost"
        self._run_id = config.run_id or run_folder.new_run_id()
        # What a sweep looks for must be this run's alone, whatever the user called it.
        self._mark = f"{self._run_id}.{secrets.token_hex(3)}" if config.run_id else self._run_id
        self._folder, complaint = make_folder(config, self._run_id)
        try:
            self._console = Console(style(config, self._host, self._folder))
        except RuntimeError as error:  # "can't start new thread"
            raise LaunchError(f"no room to start on {self._host}: {error}", NO_ROOM_HINT) from None
        if complaint:
            self._say(complaint, -1)
        self._started_s = time.monotonic()
        self._attempts: list[AttemptResult] = []
        self._signals: list[int] = []
        self._deadline: float | None = None
        self._failed: AgentFailed | None = None
        self._left: tuple[int, ...] | None = None
        self._lost = False
        self._killed = False

    def run(self) -> RunResult:
        handle = self._start_agent()
        try:
            while self._left is None and not self._lost:
                event = self._mailbox.get(self._deadline)
                if event is None:
                    self._say(f"the agent on {self._host} does not answer and is killed", -1)
                    handle.kill()
                    self._killed, self._deadline = True, None
                else:
                    self._apply(event, handle)
        finally:
            returncode = handle.close()
        if self._lost:
            self._agent_lost(returncode)
        return self._finish()

    def _start_agent(self) -> LocalHandle:
        stdin_fd = inheritable_stdin()
        copies = {name: os.dup(fd) for name, fd in shared_terminals(self._config).items()}
        fds = tuple(fd for fd in (stdin_fd, *copies.values()) if fd is not None)
        env = {**os.environ, environ.RUN_ID: self._mark}
        try:
            handle = LocalHandle(env, fds, self._mailbox.post, self._console.output)
        except (OSError, RuntimeError) as error:
            raise LaunchError(f"the agent on {self._host} cannot be started: {error}", NO_ROOM_HINT) from None
        finally:
            for fd in fds:
                os.close(fd)
        folder = str(self._folder) if self._folder else None
        handle.send(agent_spec(self._config, self._run_id, self._host, folder, stdin_fd, copies))
        return handle

    # Events.

    def _apply(self, event: object, handle: LocalHandle) -> None:
        match event:
            case Signalled(signum=signum):
                self._signalled(signum, handle)
            case AgentReady(local_world_size=nproc):
                self._ready(nproc)
            case AttemptStarted():
                self._say(f"{report.ranks(range(event.world_size))} run, attempt {event.attempt + 1}", 1)
            case AttemptEnded(result=result):
                self._attempt_ended(result)
            case Notice(text=text, level=level):
                self._say(text, level)
            case AgentFailed():
                self._failed = event
            case AgentEnded(left=left):
                self._left = left
            case AgentLost():
                self._lost = True

    def _signalled(self, signum: int, handle: LocalHandle) -> None:
        if signal.Signals(signum).name not in self._config.signals:
            handle.send(PassSignal(signum))
            return
        self._signals.append(signum)
        grace_s = (self._config.shutdown_timeout_s, _SECOND_GRACE_S, 0.0)[min(len(self._signals), 3) - 1]
        grace_s = min(grace_s, self._config.shutdown_timeout_s)
        self._deadline = time.monotonic() + grace_s + _AGENT_OVERTIME_S
        handle.wake()
        handle.send(StopWorkers(signum, grace_s))
        self._say(f"{signal.Signals(signum).name}: stopping the workers, SIGKILL in {grace_s:g} s", 0)

    def _ready(self, nproc: int) -> None:
        if nproc == 1 and self._config.meeting is None and self._config.line_prefix is None:
            self._console.no_prefix()
        workers = "1 worker" if nproc == 1 else f"{nproc} workers"
        where = f"logs in {self._folder}" if self._folder else "no logs are kept"
        self._say(f"{workers} on {self._host}, {where}", 0)

    def _attempt_ended(self, result: AttemptResult) -> None:
        self._attempts.append(result)
        if self._config.events == "console":
            for line in events.worker_events(self._run_id, self._config.role, result):
                self._console.say(line)
        if result.restarts:
            number = f"restart {result.attempt + 1} of {self._config.max_restarts}"
            self._say(f"{report.attempt_line(result)}; {number}", 0)

    def _say(self, text: str, level: int) -> None:
        if level <= self._config.verbosity:
            self._console.say(f"ddplaunch: {text}")

    # The end.

    def _agent_lost(self, returncode: int) -> None:
        """Clean up what a dead agent left, and tell, unless we killed it and so have told already."""
        self._left = sweep(self._mark, self._mailbox, time.monotonic() + _AGENT_OVERTIME_S)
        if self._killed and self._left == ():
            return
        ended = verdict.describe(returncode)
        swept = "its workers are gone" if self._left == () else f"of its processes {self._left or 'some'} may be left"
        self._failed = self._failed or AgentFailed(
            f"the agent on {self._host} ended by {ended}; {swept}",
            "SIGKILL comes from somebody's kill, the kernel's out-of-memory killer or a job scheduler.",
            errors.NODE_LOST,
        )

    def _finish(self) -> RunResult:
        result = self._result()
        text = report.page(result) if result.outcome == "failed" and not self._failed else ""
        if self._folder:
            report.write(result, self._folder, text)
        report.reply(result.first_failure, os.environ.get("TORCHELASTIC_ERROR_FILE", ""))
        if text:
            self._console.say(text)
        elif result.left:
            self._say(f"pids {result.left} could not be ended", -1)
        elif result.outcome == "stopped":
            why = result.attempts[-1].note if result.attempts else ""
            self._say(f"stopped{why and f', {why}'}; every process of this run is gone", -1 if why else 0)
        count = len(self._signals)
        self._console.drain(lambda: self._more_signals(count), _STOPPED_STALL_S if self._signals else _STALL_S)
        if self._failed:
            raise LaunchError(self._failed.message, self._failed.hint, self._failed.exit_code)
        return result

    def _more_signals(self, count: int) -> bool:
        while (event := self._mailbox.get(0.0)) is not None:
            if isinstance(event, Signalled):
                self._signals.append(event.signum)
        return len(self._signals) > count

    def _result(self) -> RunResult:
        last = self._attempts[-1] if self._attempts else None
        is_over = last is not None and not last.restarts
        outcome: Outcome = "failed" if self._failed else last.outcome if last and is_over else "stopped"
        first = (last.cause or verdict.first_failure(last.exits)) if last and outcome == "failed" else None
        return RunResult(
            run_id=self._run_id,
            exit_code=self._exit_code(outcome, first.returncode if first else None, bool(first and first.error)),
            outcome=outcome,
            duration_s=time.monotonic() - self._started_s,
            attempts=tuple(self._attempts),
            first_failure=first,
            signal=signal.Signals(self._signals[0]).name if self._signals else None,
            run_dir=str(self._folder) if self._folder else None,
            left=self._left or (),
        )

    def _exit_code(self, outcome: Outcome, returncode: int | None, raised: bool) -> int:
        if self._failed:
            return self._failed.exit_code
        if outcome == "succeeded":
            return errors.LEFT_RUNNING if self._left else 0
        if outcome == "stopped":
            return 128 + self._signals[0] if self._signals else errors.NODE_LOST
        if returncode is None:
            return errors.LEFT_RUNNING if self._left else errors.NODE_LOST
        # One that raised and was then told to stop on its way out ended by our signal; its own code was 1.
        return 1 if raised and returncode == -signal.SIGTERM else verdict.exit_code(returncode)
