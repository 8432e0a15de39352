"""The agent of a lone node starts before the launcher has loaded its own parts: what ends the launcher then ends it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ddplaunch.cluster.hosts import Host
from ddplaunch.config import LaunchConfig
from ddplaunch.transport import agent_process
from tests.support.processes import children, command_line, is_alive, own_descriptors, wait_until
from tests.support.runs import PROGRAMS, Running, run, start

EXIT_WITH = PROGRAMS / "exit_with.py"
MARK = "20261121-000000-abcdef"


def test_it_is_there_for_the_block_and_gone_behind_it() -> None:
    with agent_process.early_agent(LaunchConfig(script="train.py"), MARK) as agent:
        assert agent
        pid = agent.process.pid
        assert is_alive(pid)
    assert not is_alive(pid)


def test_an_exception_ends_it() -> None:
    with (
        pytest.raises(KeyboardInterrupt),
        agent_process.early_agent(LaunchConfig(script="train.py"), MARK) as agent,
    ):
        raise KeyboardInterrupt
    assert agent
    assert not is_alive(agent.process.pid)


@pytest.mark.parametrize(
    "config",
    [
        LaunchConfig(script="train.py", hosts=(Host("gpu1"),)),
        LaunchConfig(script="train.py", dry_run=True, max_nodes=2),
        LaunchConfig(script="train.py", chdir="/nowhere"),
    ],
    ids=["of another machine", "one of many", "without its folder"],
)
def test_no_other_agent_is_started_ahead(config: LaunchConfig) -> None:
    before = own_descriptors()
    with agent_process.early_agent(config, MARK) as agent:
        assert agent is None
        assert own_descriptors() <= before


def starting_agent(running: Running) -> int:
    """Its pid, as soon as there is one: the launcher loads still."""
    return wait_until(lambda: [pid for pid in children(running.pid) if "agent.main" in command_line(pid)])[0]


@pytest.mark.parametrize(
    ("signum", "returncodes"),
    # A signal that comes later stops the run, which has then begun. Where Ctrl-C breaks off an exec() of text, as every
    # dataclass does one, CPython ends by SIGINT in the end, whatever was made of the exception: 130 in a shell too.
    [
        (signal.SIGINT, (130, -signal.SIGINT)),
        (signal.SIGTERM, (-signal.SIGTERM, 143)),
        (signal.SIGKILL, (-signal.SIGKILL,)),
    ],
)
def test_whatever_ends_the_launcher_while_it_loads_ends_the_agent(signum: int, returncodes: tuple[int, ...]) -> None:
    running = start("--nproc-per-node", "1", EXIT_WITH)
    agent = starting_agent(running)
    running.signal(signum)
    finished = running.finish()
    assert finished.returncode in returncodes, finished.err
    assert "Traceback" not in finished.err
    wait_until(lambda: not is_alive(agent))


def test_ctrl_c_in_a_callback_of_an_import_is_not_lost() -> None:
    """Python ignores a KeyboardInterrupt there."""
    program = """
import os, signal, sys, weakref
from ddplaunch.__main__ import main

class Finder:
    def find_spec(self, name, *_others):
        if name == "ddplaunch.launcher.launch":
            kept = [set()]
            reference = weakref.ref(kept[0], lambda _: os.kill(os.getpid(), signal.SIGINT))
            kept.clear()

sys.meta_path.insert(0, Finder())
main()
"""
    command = [sys.executable, "-c", program, "--nproc-per-node", "1", EXIT_WITH]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (-signal.SIGINT, ""), ended.stderr


def test_a_run_that_cannot_begin_leaves_no_agent(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("")
    finished = run("--log-dir", tmp_path / "logs", EXIT_WITH)
    assert finished.returncode == 2
    assert "is a file" in finished.err


def test_an_agent_that_dies_at_once_is_told_of() -> None:
    running = start("--nproc-per-node", "1", EXIT_WITH)
    os.kill(starting_agent(running), signal.SIGKILL)
    finished = running.finish()
    assert finished.returncode == 84, finished.err
    assert "was killed by SIGKILL; left: nothing" in finished.err
