"""The start of a run's nodes: a signal stops it between two nodes, and other events wait until all are started."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ddplaunch import features
from ddplaunch.errors import LaunchError
from ddplaunch.launcher import launch, setup
from ddplaunch.launcher import run as run_module
from ddplaunch.launcher.display.console import Console
from ddplaunch.launcher.run import Run
from ddplaunch.launcher.watches import RunServices, Watch
from ddplaunch.mailbox import Mailbox
from ddplaunch.protocol.launcher_agent import (
    AgentEnded,
    AgentFailed,
    FirstRoundFormed,
    Output,
    RunIdAgreed,
    StopWorkers,
)
from ddplaunch.system import run_tags
from ddplaunch.system.files import run_folder
from ddplaunch.system.signals import SignalReceived
from ddplaunch.transport.handle import ChannelClosed, FromNode
from tests.support.configs import launch_config
from tests.support.fake_agents import FakeHandle, FakeTransport
from tests.support.processes import wait_until

NODES = 100


class StoppableHandle(FakeHandle):
    """An agent that ends when it is told to."""

    def __init__(self, post: Callable[[object], None]) -> None:
        super().__init__()
        self._post = post

    def send(self, record: object) -> None:
        super().send(record)
        if isinstance(record, StopWorkers):
            self._post(AgentEnded())
            self._post(ChannelClosed())


class CountingTransport(FakeTransport):
    """Starts agents here; ``at[N]`` is posted after the start of ``N`` agents."""

    is_remote = False

    def __init__(self, post: Callable[[object], None], at: dict[int, object]) -> None:
        super().__init__(*(f"node{number}" for number in range(NODES)))
        self.started = 0
        self._post, self._at = post, at

    def start(self, index: int) -> FakeHandle:
        self.started += 1
        if self.started in self._at:
            self._post(self._at[self.started])
        return StoppableHandle(lambda event: self._post(FromNode(index, event)))


def started_until(at: dict[int, object], monkeypatch: pytest.MonkeyPatch) -> tuple[int, Run]:
    mailbox: Mailbox[object] = Mailbox()
    transport = CountingTransport(mailbox.post, at)
    monkeypatch.setattr(setup, "transport_for", lambda *_: transport)
    config = launch_config(script="x.py", dry_run=True, min_nodes=NODES, max_nodes=NODES, log_dir="/dev/null")
    null = os.open(os.devnull, os.O_WRONLY)
    with contextlib.closing(Console(setup.console_style(config, None), null, null)) as console:
        run = Run(config, "r1", "r1", None, mailbox, None, console)
        run._start_nodes()
        console.drain(lambda: False, 10.0)
    os.close(null)
    return transport.started, run


def test_a_signal_stops_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = started_until({3: SignalReceived(signal.SIGINT)}, monkeypatch)
    assert started == 3
    assert run._shutdown.signals == [signal.SIGINT]


def test_other_events_are_handled_once_all_nodes_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    started, run = started_until({3: FromNode(0, AgentFailed("no room", "", 82))}, monkeypatch)
    assert started == NODES
    assert run._shutdown.error
    assert run._shutdown.error.message == "no room"


def test_what_a_watch_posts_when_the_last_agent_ends_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[str] = []

    class Late(Watch):
        def __init__(self, run: RunServices) -> None:
            self._post = run.post

        def on_event(self, index: int, event: object) -> None:
            if isinstance(event, ChannelClosed):
                self._post(lambda: called.append("posted"))

        def on_loop_ended(self) -> None:
            called.append("loop ended")

    late = SimpleNamespace(watches=lambda run: (Late(run),))
    monkeypatch.setattr(features, "watch_modules", lambda _config: [late])
    _, run = started_until({NODES: FromNode(0, AgentFailed("no room", "", 82))}, monkeypatch)
    monkeypatch.setattr(run, "_finish", lambda: None)
    run.run()
    assert called == ["posted"] * NODES + ["loop ended"]


def test_a_launcher_takes_the_run_id_and_the_folder_on_which_the_nodes_have_agreed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own, agreed = "20261120-193012-000001", "20261120-193012-000002"
    monkeypatch.setattr(setup, "transport_for", lambda *_: FakeTransport("gpu1"))
    config = launch_config(script="x.py", log_dir=str(tmp_path))
    null = os.open(os.devnull, os.O_WRONLY)
    style = setup.console_style(config, tmp_path / own)
    with contextlib.closing(Console(style, null, null)) as console:
        run = Run(config, own, own, None, Mailbox(), tmp_path / own, console)
        run._start_nodes()
        for record in (RunIdAgreed(agreed), FirstRoundFormed((agreed, "gpu1"))):
            run._on_node_event(run._nodes.all[0], record)
        assert console.logs == f"logs in {tmp_path}/{agreed}/gpu1"
        hint = console._stdout.style.log_hint(Output("gpu1", 3, 0, "stdout", 0))
        assert hint == f"{tmp_path}/{agreed}/gpu1/attempt_*/0/stdout.log"
        assert run_tags.launcher_memfds(os.getpid()) == {own: agreed}
        run._marks.close()
        result = run._finish()
    os.close(null)
    assert (result.run_id, result.run_dir) == (agreed, str(tmp_path / agreed / "gpu1"))
    assert not run_tags.launcher_memfds(os.getpid())


def test_a_run_that_cannot_be_prepared_leaves_no_lock_and_no_thread(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def fail(*_: object) -> None:
        raise LaunchError("too few open files")

    monkeypatch.setattr(setup, "transport_for", fail)
    before, held = set(threading.enumerate()), dict(run_folder._held)
    with pytest.raises(LaunchError, match="too few open files"):
        launch.run(launch_config(script="x.py", log_dir=str(tmp_path)), "r1", "r1", None, 1)
    assert run_folder._held == held
    wait_until(lambda: not [thread for thread in set(threading.enumerate()) - before if "console" in thread.name])


@pytest.mark.parametrize("verbosity", [0, -1])
def test_a_folder_that_does_not_answer_is_named_before_there_is_a_console(
    verbosity: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    told: list[str] = []

    def hang(*_: object) -> None:
        wait_until(lambda: told.append(capfd.readouterr().err) or told[-1] or verbosity, 10)
        raise LaunchError("it answers again")

    monkeypatch.setattr(launch, "_SLOW_START_S", 0.0)
    monkeypatch.setattr(setup, "create_run_folder", hang)
    with pytest.raises(LaunchError, match="it answers again"):
        launch.launch(launch_config(script="x.py", dry_run=True, log_dir=str(tmp_path), verbosity=verbosity))
    line = f"ddplaunch: the start takes long: perhaps the file system of {tmp_path} does not answer\n"
    assert "".join(told) == ("" if verbosity else line)


def test_once_there_is_a_console_nobody_looks_how_long_the_start_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    def begin(*_: object) -> None:
        wait_until(lambda: "slow start" not in [thread.name for thread in threading.enumerate()], 10)
        raise LaunchError("it has begun")

    monkeypatch.setattr(run_module, "Run", begin)
    with pytest.raises(LaunchError, match="it has begun"):
        launch.launch(launch_config(script="x.py", dry_run=True, log_dir="/dev/null"))
