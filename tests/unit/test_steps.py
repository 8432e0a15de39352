"""Steps of SLURM: how many srun there are, and which agents each starts. The command is a shell, in place of srun."""

from __future__ import annotations

import contextlib
import os
import queue
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ddplaunch.features.remote.call_back import CallBackHandle
from ddplaunch.features.remote.io_thread import IoThread
from ddplaunch.features.remote.remote_start import RemoteStart
from ddplaunch.features.slurm.steps import MAX_STARTING, Steps
from ddplaunch.transport.handle import Purpose, discard_output
from tests.support.processes import is_alive, wait_until

START = RemoteStart(python="python3", cwd="/", timeout_s=60.0)
WAIT_S = 60.0


class Cluster:
    """Steps whose command writes its pid and its nodes, and then does ``then``."""

    def __init__(self, log: Path, then: str = "exec sleep 1000") -> None:
        self.io, self.posted = IoThread("test"), queue.SimpleQueue[tuple[str, object]]()
        self._log, self._then = log, then
        self.steps = Steps(self.io, self._command, lambda _: b"", dict(os.environ))
        self.handles: dict[str, CallBackHandle] = {}
        log.touch()

    def _command(self, names: Sequence[str]) -> tuple[str, ...]:
        return ("sh", "-c", f'echo "$$ $*" >> {self._log}; {self._then}', "sh", *names)

    def start(self, *names: str, purpose: Purpose = "run") -> None:
        self.handles |= {name: self._handle(name) for name in names}
        self.steps.start([(name, self.handles[name], purpose) for name in names])

    def _handle(self, name: str) -> CallBackHandle:
        return CallBackHandle(self.io, name, START, lambda event: self.posted.put((name, event)), discard_output)

    @property
    def commands(self) -> list[list[str]]:
        """The nodes of each, in the order of their starts."""
        return [line.split()[1:] for line in self._log.read_text().splitlines()]

    @property
    def pids(self) -> list[int]:
        return [int(line.split()[0]) for line in self._log.read_text().splitlines()]

    def close(self) -> None:
        for handle in self.handles.values():
            handle.close()
        self.steps.close()
        self.io.close()
        assert not any(map(is_alive, self.pids))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with contextlib.closing(Cluster(tmp_path / "log")) as cluster:
        yield cluster


def test_at_most_eight_steps_start_at_a_time_and_those_that_wait_become_one(cluster: Cluster) -> None:
    names = [f"n{number:02}" for number in range(20)]
    for name in names:
        cluster.start(name)
    wait_until(lambda: len(cluster.commands) == MAX_STARTING, WAIT_S)
    cluster.handles["n03"].kill()
    wait_until(lambda: len(cluster.commands) == MAX_STARTING + 1, WAIT_S)
    assert sorted(cluster.commands) == sorted([*([name] for name in names[:MAX_STARTING]), names[MAX_STARTING:]])


def test_agents_of_another_purpose_that_wait_are_another_step(cluster: Cluster) -> None:
    for number in range(MAX_STARTING):
        cluster.start(f"n{number}")
    wait_until(lambda: len(cluster.commands) == MAX_STARTING, WAIT_S)
    cluster.start("r1", "r2")
    cluster.start("s1", purpose="sweep")
    for name in ("n0", "n1"):
        cluster.handles[name].kill()
    wait_until(lambda: len(cluster.commands) == MAX_STARTING + 2, WAIT_S)
    assert sorted(cluster.commands[-2:]) == [["r1", "r2"], ["s1"]]


def test_a_step_ends_when_no_agent_of_it_is_needed_any_more(cluster: Cluster) -> None:
    cluster.start("n1", "n2")
    [pid] = wait_until(lambda: cluster.pids, WAIT_S)
    cluster.handles["n1"].kill()
    cluster.handles["n2"].kill()
    wait_until(lambda: not is_alive(pid), WAIT_S)
