"""What other machines send as logs is written where it belongs, and nothing that they can send does any harm."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import pytest

from ddplaunch.config import LaunchConfig
from ddplaunch.errors import Level
from ddplaunch.features.collect_logs import launcher
from ddplaunch.features.collect_logs.launcher import LogCollector
from ddplaunch.features.collect_logs.log_writer import LogWriter, Written
from ddplaunch.features.collect_logs.records import LogChunk, LogsFound, LogsSent
from ddplaunch.launcher.nodes import NodeState
from ddplaunch.transport.handle import NodeFacts, WithData
from tests.support import golden
from tests.support.fake_agents import participants_of
from tests.support.watches import run_services

OUT = "attempt_0/0/stdout.log"


class Progress:
    """That of the console, which shows nothing."""

    def show(self, _text: object) -> float:
        return float("inf")

    def end(self) -> None: ...


class Writer:
    """Has written when ``put`` returns: a real one for each piece."""

    failure: str | None = None

    def put(self, *piece: object) -> None:
        if not self.failure:
            writer = LogWriter()
            writer.put(*piece)  # type: ignore[arg-type]
            writer.close(60)
            self.failure = writer.failure

    def close(self, _timeout_s: float) -> None: ...


class Run:
    """A run of some nodes whose work is done. Its methods are the steps of a story."""

    def __init__(self, folder: Path, kind: str, *hosts: str) -> None:
        self.folder, self.progress = folder, Progress()
        self.said: list[str] = []
        self.later_s = 0.0
        self.participants = participants_of((1, len(hosts)), *hosts, show=self.show)
        self.nodes = self.participants.nodes
        for node in self.nodes.all:
            self.nodes.on_agent_connected(node, NodeFacts())
            node.handle.sent.clear()
            node.state, node.unkillable_pids = NodeState.ENDING, ()
        parts = {"nodes": self.nodes, "participants": self.participants, "messages": self}
        run = run_services(LaunchConfig(script="x.py"), folder=None if kind == "no folder" else folder, **parts)
        self.collected = LogCollector(run, "logs" if kind == "no folder" else kind)

    def show(self, text: str, _level: int) -> None:
        self.said.append(text.replace(str(self.folder), "<folder>"))

    def _event(self, number: str, event: object) -> None:
        self.collected.on_event(int(number), event)
        self._tell()

    def _tell(self) -> None:
        """What agents were sent since the last step."""
        for node in self.nodes.all:
            self.said += [f"to {node.host}: {record}" for record in node.handle.sent]
            node.handle.sent.clear()
            self.said += [f"{node.host} is killed"] * node.handle.is_killed
            node.handle.is_killed = False

    def find(self, *numbers: str) -> None:
        """These nodes have logs, or all."""
        for number in numbers or map(str, range(len(self.nodes.all))):
            self._event(number, LogsFound(1000))

    def send(self, number: str, path: str, text: str = "", *, is_last: bool = True) -> None:
        path = OUT if path == "stdout" else path
        self._event(number, WithData(LogChunk(path, len(text), is_last), text.encode()))

    def part(self, number: str, path: str, text: str) -> None:
        """More of the file follows."""
        self.send(number, path, text, is_last=False)

    def sent(self, number: str, skipped_files: str = "0") -> None:
        self._event(number, LogsSent(int(skipped_files)))

    def leaves(self, number: str, state: str = "DONE") -> None:
        self.nodes.all[int(number)].state = NodeState[state]
        self.later("1")

    def later(self, seconds: str) -> None:
        self.later_s += float(seconds)
        self.collected.run_due(time.monotonic() + self.later_s)
        self._tell()

    def signal(self) -> None:
        self.said.append(f"was that all to stop: {self.collected.on_stop(signal.SIGINT)}")
        self._tell()

    def blocks(self, name: str) -> None:
        """Where a folder is to be made there is a file."""
        (self.folder / name).write_text("a file")

    def end(self) -> None:
        for node in self.nodes.all:
            if node.state.has_agent:
                self.leaves(str(node.index))
        self.collected.on_loop_ended()
        for host, why in self.collected.missing.items():
            self.show(f"{host}: {why}", Level.ALWAYS)
        files = sorted(path for path in self.folder.rglob("*") if path.is_file())
        self.said += [f"{path.relative_to(self.folder)}: {path.read_text()!r}" for path in files]
        assert all(path.stat().st_mode & 0o077 == 0 for path in files if path.name != "gpu1")


def test_what_is_written_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A story is what is copied, the hosts, limits that are others, and steps."""
    monkeypatch.setattr(launcher, "LogWriter", Writer)

    def story(text: str) -> str:
        _, kind, hosts, *limits, steps = text.split(": ")
        (folder := tmp_path / "run").mkdir()
        with monkeypatch.context() as patch:
            for name, value in (each.split("=") for each in limits):
                patch.setattr(launcher, name, int(value))
            told = golden.play(Run(folder, kind, *hosts.split()), steps)
        shutil.rmtree(folder)
        return told

    golden.check_pages("collected_logs", story)


def test_few_nodes_send_at_a_time(tmp_path: Path) -> None:
    run = Run(tmp_path, "logs", *(f"gpu{n}" for n in range(40)))
    asked = []
    for step in (run.find, lambda: run.sent("0"), lambda: run.sent("1"), lambda: run.leaves("2")):
        step()
        asked.append(sum(line.endswith("GrantLogBytes(nbytes=262144)") for line in run.said))
    assert asked == [16, 17, 18, 19]


def test_the_writer_has_written_all_when_it_is_closed(tmp_path: Path) -> None:
    writer, written = LogWriter(), Written()
    for number in range(1000):
        writer.put(tmp_path, LogChunk(OUT, 1, is_last=number == 999), b"x", written, lambda _: None)
    writer.close(60)
    assert (tmp_path / OUT).read_bytes() == b"x" * 1000
    assert (tmp_path / OUT).stat().st_mode & 0o777 == 0o600
