"""--stop-before-end: when a job ends by what its scheduler says, and who then stops the run."""

from __future__ import annotations

import math
import os
import re
import signal
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import OptionError
from ddplaunch.features.schedulers.table import job_ends
from ddplaunch.features.time_limit import _parse, prepare
from ddplaunch.features.time_limit.launcher import TimeLimitWatch
from ddplaunch.features.time_limit.records import StopBeforeEnd
from ddplaunch.protocol.launcher_agent import AttemptEnded, AttemptStarted, OrderToNodes
from ddplaunch.protocol.results import AttemptResult
from tests.support import golden
from tests.support.configs import launch_config, rendezvous_config
from tests.support.watches import call, run_services

NOW = 1_790_000_000.0


def command(folder: Path, name: str, answer: str) -> None:
    """A scheduler's command, which prints ``answer`` with its arguments in place of ARGUMENTS."""
    (path := folder / name).write_text(f"#!/bin/sh\ncat <<END\n{answer.replace('ARGUMENTS', '$*')}\nEND\n")
    path.chmod(0o755)


@pytest.fixture
def scheduler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No job, and a folder for commands, which come first."""
    for name in list(os.environ):
        if name.startswith(("SLURM", "LSB_", "PBS_")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()
    monkeypatch.setattr("time.time", lambda: NOW)
    return tmp_path


def test_what_schedulers_say_of_the_end(scheduler: Path):
    """A question is a variable, a command, and what it prints; the answer is the time left in seconds."""

    def left(question: str) -> str:
        variables, _, told = question.partition(" | ")
        name, _, answer = told.partition(": ")
        command(scheduler, name, answer.replace("; ", "\n    "))
        environ = dict(each.split("=") for each in variables.split())
        found = job_ends(environ, anew=False)
        return ", ".join("not known" if end is None else f"{end - NOW:g}" for end in found) or "nobody says it"

    golden.check_answers("job_ends", left)


def test_a_changed_limit_is_seen_and_the_variable_of_the_start_is_not_read_again(scheduler: Path):
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_END_TIME": str(int(NOW) + 100)}
    command(scheduler, "scontrol", f"JobId=7 JobState=RUNNING TimeLimit=00:10:00 EndTime={int(NOW) + 600}")
    assert job_ends(environ, anew=False) == (NOW + 100,)
    assert job_ends(environ, anew=True) == (NOW + 600,)


def test_a_scheduler_that_does_not_answer_is_not_waited_for(scheduler: Path, monkeypatch: pytest.MonkeyPatch):
    command(scheduler, "qstat", "")
    (scheduler / "qstat").write_text("#!/bin/sh\nexec sleep 600\n")
    monkeypatch.setattr("ddplaunch.features.other_schedulers.job_end._ANSWER_S", 0.1)
    assert job_ends({"PBS_JOBID": "7"}, anew=False) == (None,)


# Before the run.


def wants(before_s: float = 300.0, **settings: Any) -> LaunchConfig:
    return launch_config(script="train.py", stop_before_end=("SIGUSR1", before_s), **settings)


def test_a_run_without_enough_time_is_not_started(scheduler: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) + 240))
    with pytest.raises(OptionError, match="USR1@300s: the time limit is 4 min away"):
        prepare(wants(), None)
    assert prepare(wants(before_s=200.0), None).job_ends_s == NOW + 240
    with pytest.raises(OptionError, match="the time limit is 1 min 40 s away"):
        prepare(wants(before_s=200.0, time_limit_s=100.0), None)
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(NOW) - 1))
    with pytest.raises(OptionError, match="the time limit has passed"):
        prepare(wants(), None)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("HUP@5m", "HUP@5m: the signal before @ must be TERM, USR1 or USR2"),
        ("@5m", "@5m: the signal before @ must be TERM, USR1 or USR2"),
        ("2d", "2d: must be at most a day"),
        ("USR1@", "must be a number of seconds, or a time like 90s"),
    ],
)
def test_what_is_no_signal_and_no_time_is_refused(text: str, told: str):
    with pytest.raises(OptionError, match=re.escape(told)):
        _parse(text, "--stop-before-end")


def test_somebody_must_say_when_the_job_ends(scheduler: Path, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(OptionError, match="no scheduler says when this job ends"):
        prepare(wants(), None)
    assert prepare(wants(time_limit_s=3600.0), None).job_ends_s is None
    monkeypatch.setenv("LSB_JOBID", "7")
    (notice,) = prepare(wants(), None).notices
    assert str(notice).startswith("warning: --stop-before-end: the scheduler does not say")
    assert not prepare(wants(time_limit_s=3600.0), None).notices


# During the run.


class Run:
    """A launcher with a clock of its own. ``stops`` are the signal, the grace period and the reason of each stop."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, config: LaunchConfig, *answers: float | None) -> None:
        self.at, self.stops, self.told, self.sent = 0.0, list[Any](), list[str](), list[object]()
        self.answers = list(answers)
        monkeypatch.setattr("time.time", lambda: NOW + self.at)
        module = "ddplaunch.features.time_limit.launcher"
        monkeypatch.setattr(f"{module}.job_ends", lambda _environ, anew: (self.answers.pop(0),) if self.answers else ())
        monkeypatch.setattr(f"{module}.post_from_thread", lambda _name, work, on_result, _otherwise: on_result(work()))
        self.shutdown: Any = SimpleNamespace(in_progress=False, stop_to_continue=self._stop)
        show = lambda text, *_, **facts: self.told.append(text)  # noqa: E731
        run = run_services(config, send=self.sent.append, show=show, post=call)
        self.watch = TimeLimitWatch(run._replace(shutdown=self.shutdown))

    def _stop(self, *stop: Any) -> None:
        self.stops.append(stop)
        self.shutdown.in_progress = True

    def until(self, end: float) -> None:
        """Call the watch whenever it wants to be called."""
        while not self.stops:
            due = self.watch.run_due(self.at)
            if self.stops or self.at >= end:
                return
            self.at = min(end, max(self.at + 0.01, due))


def test_the_workers_get_the_signal_and_the_time_that_is_left(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, wants(job_ends_s=NOW + 3600.0))
    run.until(3299.0)
    assert (run.stops, run.told) == ([], ["the time limit is 1 h away; the workers get SIGUSR1 5 min before it"])
    run.until(3600.0)
    assert run.at == pytest.approx(3300.0)
    assert run.stops == [(signal.SIGUSR1, 285.0, "the time limit is 5 min away")]


def test_of_a_short_time_a_quarter_is_kept_for_the_end(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, wants(20.0, time_limit_s=60.0))
    run.until(60.0)
    assert run.stops == [(signal.SIGUSR1, 15.0, "the time limit is 20 s away")]


@pytest.mark.parametrize(("new_end", "stops_at"), [(7200.0, 6900.0), (1800.0, 1500.0), (math.inf, None)])
def test_a_limit_that_is_changed_holds(monkeypatch: pytest.MonkeyPatch, new_end: float, stops_at: float | None):
    run = Run(monkeypatch, wants(job_ends_s=NOW + 3600.0), None, NOW + new_end)
    run.until(9000.0)
    assert run.at == pytest.approx(9000.0 if stops_at is None else stops_at)
    assert bool(run.stops) == (stops_at is not None)
    assert run.told[1].startswith("the time limit is now")


def test_the_scheduler_is_asked_seldom_and_once_more_just_before(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, wants(job_ends_s=NOW + 86700.0), *[None] * 1000)
    asked = []
    watch_ask = run.watch._ask
    run.watch._ask = lambda: (asked.append(run.at), watch_ask())[1]  # type: ignore[method-assign]
    run.until(90000.0)
    assert run.at == pytest.approx(86400.0)
    assert 86400.0 - asked[-1] <= 10.0
    assert len(asked) < 86400 / 300 + 20


def test_where_each_node_has_a_launcher_they_all_stop_by_the_clock_of_one(monkeypatch: pytest.MonkeyPatch):
    config = wants(60.0, job_ends_s=NOW + 600.0, rendezvous=rendezvous_config(node_index=1), max_nodes=2)
    run = Run(monkeypatch, config)
    run.until(545.0)  # No workers run.
    run.watch.on_event(0, AttemptStarted(3, 2, (1,), 1, 2, 1))
    run.until(548.0)
    assert run.sent[0] == OrderToNodes(StopBeforeEnd(3, signal.SIGUSR1, 41.2))
    assert len(run.sent) in (3, 4)
    run.watch.on_event(0, AttemptEnded(AttemptResult(3, "failed", (), 1.0)))
    assert not run.stops
    run.watch.on_event(0, StopBeforeEnd(3, signal.SIGUSR1, 44.0))
    assert run.stops == [(signal.SIGUSR1, 44.0, "the time limit is 52 s away")]


@pytest.mark.parametrize(("answer", "stops"), [(None, True), (NOW + 1200.0, False)])
def test_a_launcher_that_hears_nothing_asks_and_stops_alone(
    monkeypatch: pytest.MonkeyPatch, answer: float | None, stops: bool
):
    config = wants(60.0, job_ends_s=NOW + 600.0, rendezvous=rendezvous_config(node_index=1), max_nodes=2)
    run = Run(monkeypatch, config, answer)
    run.until(569.0)
    assert not run.stops
    run.until(580.0)
    assert bool(run.stops) == stops


def test_an_order_of_a_node_that_this_launcher_leads_has_no_effect(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, wants(job_ends_s=NOW + 3600.0))
    run.watch.on_event(0, StopBeforeEnd(0, signal.SIGUSR1, 9.0))
    assert not run.stops


def test_nothing_follows_once_the_run_is_being_stopped(monkeypatch: pytest.MonkeyPatch):
    run = Run(monkeypatch, replace(wants(), job_ends_s=NOW + 3600.0))
    run.shutdown.in_progress = True
    assert run.watch.run_due(0.0) == math.inf
